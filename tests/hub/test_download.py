"""Models fetched from a hub on localhost, through the real client, with what goes wrong there."""

from __future__ import annotations

import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hub.conftest import LARGE_BYTES, NAME, REPO, model_files, safetensors
from tests.hub.server import Fault, Hub, Repo
from your_ai.errors import UserError
from your_ai.hub import download as module
from your_ai.hub.check import check_model
from your_ai.hub.download import download, downloading
from your_ai.hub.find import Missing, find_model, models_root
from your_ai.hub.record import RECORD, read_record, verify

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
UNWANTED = {".gitattributes", "README.md", "onnx/config.json"}
SIZE = len(model_files()[FIRST])


def refused(name: str = REPO, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        download(name, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def notes(name: str = REPO, **options: object) -> list[str]:
    return [step.note for step in downloading(name, **options) if step.note]


def incomplete() -> Path:
    return models_root() / f".incomplete-{NAME}"


def parts() -> dict[int, Path]:
    """The files in the making, by their size."""
    return {path.stat().st_size: path for path in (incomplete() / "parts").iterdir()}


def assert_whole(folder: Path, files: dict[str, bytes] | None = None) -> None:
    files = files or model_files()
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != RECORD}
    assert found == {name: text for name, text in files.items() if name not in UNWANTED}
    assert verify(folder).faults == ()
    assert not incomplete().exists()


def test_a_model_is_fetched_whole(hub):
    folder = download(REPO)
    assert folder == models_root() / NAME
    assert_whole(folder)
    assert find_model(REPO) == folder


def test_its_record_says_where_it_came_from(hub):
    record = read_record(download(REPO))
    assert (record.repo, record.asked, record.revision) == (REPO, "main", "a" * 40)
    assert set(record.files) == set(model_files()) - UNWANTED


def test_each_file_is_asked_for_once_and_no_byte_sent_twice(hub):
    download(REPO)
    for name, content in model_files().items():
        assert hub.sent(name) == (0 if name in UNWANTED else len(content))


def test_an_alias_is_its_repo(hub):
    repo = "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"
    hub.repos[repo] = Repo(model_files())
    assert download("llama-8b").name == "Meta-Llama-3.1-8B-Instruct-4bit"
    assert find_model("llama-8b") == models_root() / "Meta-Llama-3.1-8B-Instruct-4bit"


def test_without_a_store_it_goes_into_models_here(hub, monkeypatch, own_folder):
    monkeypatch.delenv("YOUR_AI_HOME")
    assert download(REPO) == Path("models") / NAME
    assert_whole(own_folder / "models" / NAME)


def test_it_goes_where_it_is_told_to(hub, own_folder):
    folder = download(REPO, to=own_folder / "some" / "where")
    assert folder == own_folder / "some" / "where"
    assert_whole(folder)


def test_an_empty_folder_may_become_the_model(hub, own_folder):
    (own_folder / "empty").mkdir()
    assert_whole(download(REPO, to="empty"))


def test_a_revision_is_fetched(hub):
    assert read_record(download(REPO, revision="a" * 40)).asked == "a" * 40


def test_progress_never_goes_back_and_ends_with_everything(hub):
    steps = [step for step in downloading(REPO) if step.total_bytes]
    done = [step.done_bytes for step in steps]
    assert done == sorted(done)
    assert (steps[-1].done_bytes, steps[-1].done_files) == (steps[-1].total_bytes, 5)


# What is here already


def test_a_model_that_is_here_is_not_asked_for(hub):
    folder = download(REPO)
    hub.requests.clear()
    assert notes() == [f"{REPO} is whole in {folder}; nothing to fetch"]
    assert hub.requests == []


def test_a_damaged_model_is_mended(hub):
    folder = download(REPO)
    weights = folder / FIRST
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    (folder / "tokenizer.json").unlink()
    hub.requests.clear()
    told = notes()
    assert "tokenizer.json: is missing" in told[0]
    assert f"{FIRST}: is not what was fetched" in told[0]
    assert_whole(folder)
    assert hub.sent(SECOND) == hub.sent("config.json") == 0


def test_a_damaged_model_is_mended_from_the_revision_it_is_of(hub):
    folder = download(REPO)
    (folder / "tokenizer.json").write_text("x")
    hub.requests.clear()
    download(REPO)
    assert f"/revision/{'a' * 40}" in hub.requests[0].path


def test_a_folder_of_the_users_is_left_alone(hub, model):
    shutil.copytree(model, models_root() / NAME)
    assert download(REPO) == models_root() / NAME
    assert hub.requests == []


def test_a_broken_folder_of_the_users_is_left_alone(hub, model):
    folder = Path(shutil.copytree(model, models_root() / NAME))
    (folder / FIRST).unlink()
    assert "is missing; move it away, or choose another place with --to" in refused()
    assert (folder / SECOND).exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"files": {"../x": {}}}'])
def test_a_folder_with_a_damaged_record_is_left_alone(hub, content):
    folder = download(REPO)
    (folder / RECORD).write_text(content)
    assert "--to" in refused()
    assert (folder / FIRST).exists()


def test_another_repos_folder_is_left_alone(hub):
    download(REPO)
    hub.repos[f"other/{NAME}"] = hub.repos[REPO]
    assert f"holds {REPO}; choose another place with --to" in refused(f"other/{NAME}")


def test_another_revision_is_not_put_over_a_model(hub):
    download(REPO)
    assert "holds revision aaaaaaaaaaaa; remove it first" in refused(revision="b" * 40)


def cached(hub: Hub) -> Path:
    return Path(huggingface_hub.snapshot_download(REPO))


def test_a_model_in_the_hubs_cache_is_used_where_it_is(hub):
    folder = cached(hub)
    hub.requests.clear()
    assert download(REPO) == find_model(REPO) == folder
    assert hub.requests == []


def test_a_model_in_the_hubs_cache_is_copied_where_it_is_told_to(hub):
    cached(hub)
    hub.requests.clear()
    assert_whole(download(REPO, to="here"))
    assert hub.sent(FIRST) == 0


@pytest.mark.parametrize("missing", [FIRST, "tokenizer.json", "config.json"])
def test_what_is_not_whole_in_the_cache_is_no_model(hub, missing):
    (cached(hub) / missing).unlink()
    with pytest.raises(Missing):
        find_model(REPO)
    hub.requests.clear()
    assert_whole(download(REPO))
    assert hub.sent(SECOND) == 0


def test_a_blob_cut_short_in_the_cache_is_no_model(hub):
    os.truncate((cached(hub) / FIRST).resolve(), SIZE - 1)
    with pytest.raises(Missing):
        find_model(REPO)
    assert_whole(download(REPO))


# Cuts and wrong answers


def test_cut_connections_go_on_where_they_were_cut(hub):
    hub.faults[FIRST] = Fault(cuts=[100_000, 50_000, 20_000])
    told = notes()
    assert [r.start for r in hub.gets(FIRST) if r.sent_bytes] == [0, 100_000, 150_000, 170_000]
    assert hub.sent(FIRST) == SIZE
    assert any("trying again" in note for note in told)
    assert_whole(models_root() / NAME)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(0, LARGE_BYTES), max_size=4))
def test_wherever_it_is_cut_the_model_is_whole(hub, cuts):
    shutil.rmtree(models_root(), ignore_errors=True)
    hub.faults[FIRST] = Fault(cuts=list(cuts))
    assert_whole(download(REPO))


def test_a_server_without_ranges_sends_all_of_it_again(hub):
    hub.faults[FIRST] = Fault(cuts=[100_000], no_ranges=True)
    assert_whole(download(REPO))
    assert hub.sent(FIRST) == 100_000 + SIZE


@pytest.mark.parametrize("status", [500, 502, 503, 429])
@pytest.mark.parametrize("what", ["api", "config.json", FIRST])
def test_a_hub_that_fails_for_a_while_is_asked_again(hub, status, what):
    hub.faults[what] = Fault(statuses=[status] * 3)
    assert_whole(download(REPO))


def test_a_hub_that_keeps_failing_is_told_with_how_to_go_on(hub):
    hub.faults[SECOND] = Fault(statuses=[503] * 50)
    text = refused()
    assert "the hub answered 503" in text
    assert f"300 kB are kept; go on with: your_ai download {REPO}" in text
    assert not (models_root() / NAME).exists()


def test_a_connection_that_keeps_being_cut_is_told_with_how_to_go_on(hub):
    hub.faults[FIRST] = Fault(cuts=[100_000] + [0] * 50)
    assert f"100 kB are kept; go on with: your_ai download {REPO}" in refused()
    hub.faults.clear()
    hub.requests.clear()
    assert notes()[0] == "kept from before: 3 of 5 files, 100 kB of 600 kB"
    assert hub.sent(FIRST) == SIZE - 100_000
    assert_whole(models_root() / NAME)


def test_a_slow_hub_is_waited_for(hub):
    hub.faults[FIRST] = Fault(bytes_per_s=1_000_000)
    assert_whole(download(REPO))


def test_a_hub_that_falls_silent_is_asked_again(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.faults[FIRST] = Fault(hangs_at=100_000)
    for step in downloading(REPO):
        if "timed out" in step.note:
            hub.go_on.set()
    assert_whole(models_root() / NAME)
    assert [r.start for r in hub.gets(FIRST)] == [0, 100_000]


@pytest.mark.parametrize("claims", [SIZE - 1, 10])
def test_a_length_that_is_too_short_makes_no_file(hub, claims):
    hub.faults[FIRST] = Fault(claims=claims)
    text = refused()
    assert FIRST in text or "peer closed" in text
    assert not (models_root() / NAME).exists()


def test_a_length_that_is_too_long_does_no_harm(hub):
    hub.faults[FIRST] = Fault(claims=SIZE + 1)
    assert_whole(download(REPO))


@pytest.mark.parametrize("change", [b"x", b""])
def test_bytes_that_are_not_the_hubs_are_refused_by_name(hub, change):
    content = model_files()[FIRST]
    hub.faults[FIRST] = Fault(content=change + content[len(change) :] + b"y" * (not change))
    text = refused()
    assert FIRST in text
    assert not (models_root() / NAME).exists()
    assert not (incomplete() / FIRST).exists()


def test_a_small_file_that_is_not_the_hubs_is_refused_by_name(hub):
    hub.faults["tokenizer.json"] = Fault(content=b'{"version": "9.9"}')
    assert "tokenizer.json is not what the hub says (its hash differs)" in refused()


def test_a_damaged_part_is_fetched_anew(hub):
    hub.faults[FIRST] = Fault(cuts=[100_000] + [0] * 50)
    refused()
    parts()[100_000].write_bytes(b"x" * 100_000)
    hub.faults.clear()
    assert any("came damaged; fetching it again" in note for note in notes())
    assert_whole(models_root() / NAME)


def test_a_finished_file_damaged_meanwhile_is_fetched_anew(hub):
    hub.faults[SECOND] = Fault(statuses=[503] * 50)
    refused()
    (incomplete() / FIRST).write_bytes(b"x" * SIZE)
    hub.faults.clear()
    assert_whole(download(REPO))


def test_what_a_newer_revision_no_longer_has_goes(hub):
    hub.faults[SECOND] = Fault(cuts=[100_000] + [0] * 50)
    refused()
    files = model_files(LARGE_BYTES + 1) | {"tokenizer.json": b'{"version": "2.0"}'}
    hub.repos[REPO] = Repo(files, sha="b" * 40)
    (incomplete() / "stray.json").write_text("{}")
    hub.faults.clear()
    folder = download(REPO)
    assert_whole(folder, files)
    assert read_record(folder).revision == "b" * 40


# What cannot be had


def test_an_unknown_alias_is_refused_with_the_nearest(hub):
    assert "did you mean llama-8b, llama-1b or llama-3b?" in refused("lama-8b")


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc/x", "a/..", "./x", ".hidden/x", "a/b/c"])
def test_a_name_that_would_leave_the_store_is_refused(hub, name):
    assert f"{name}: is no id of the hub; those are OWNER/NAME" in refused(name)
    assert hub.requests == []


@pytest.mark.parametrize("path", ["../x.json", "/etc/x.json", "a/../../x.json", "..\\x.json"])
def test_a_file_that_would_leave_the_store_is_refused(hub, path):
    hub.repos[REPO].files[path] = b"{}"
    assert "would leave its folder; refused" in refused()
    assert list(models_root().glob("[!.]*")) == []
    assert not incomplete().exists()


def test_the_demo_is_not_fetched(hub):
    assert "comes with your_ai" in refused("demo")


def test_a_repo_that_is_not_there_is_told(hub):
    assert "no someone/else on the hub" in refused("someone/else")


def test_a_revision_that_is_not_there_is_told(hub):
    assert f"{REPO} has no revision v9" in refused(revision="v9")


def test_a_gated_repo_is_told_with_what_to_do(hub):
    hub.repos[REPO].gated = True
    text = refused()
    assert f"is gated; accept its licence on {hub.url}/{REPO}" in text
    assert "hf auth login" in text


def test_a_token_opens_a_gated_repo_and_goes_to_the_hub_alone(hub, monkeypatch):
    hub.repos[REPO].gated = True
    monkeypatch.setenv("HF_TOKEN", "right")
    assert_whole(download(REPO))
    elsewhere = [r.authorization for r in hub.requests if r.host.startswith("localhost")]
    assert elsewhere == [None, None]


def test_a_token_of_another_account_is_told(hub, monkeypatch):
    hub.repos[REPO].gated = True
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "is gated" in refused()


def test_a_token_that_is_not_taken_is_told(hub):
    hub.faults["api"] = Fault(statuses=[403])
    assert "log in anew: `hf auth login`" in refused()


def test_a_hub_that_cannot_be_reached_is_told_at_once():
    began = time.monotonic()
    assert "the hub cannot be reached at http://127.0.0.1:9" in refused()
    assert time.monotonic() - began < 2
    assert not models_root().exists()


Usage = collections.namedtuple("Usage", "total used free")


def test_too_small_a_disk_is_told_with_both_sizes(hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 610_000))
    text = refused()
    assert "needs 630 kB of disk" in text
    assert "has 610 kB free" in text
    assert hub.sent("") == 0
    assert not incomplete().exists()


def test_what_is_kept_needs_no_disk(hub, monkeypatch):
    hub.faults[SECOND] = Fault(cuts=[100_000] + [0] * 50)
    refused()
    hub.faults.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 220_000))
    assert_whole(download(REPO))


def test_a_disk_that_fills_up_is_told_with_how_to_go_on(hub, monkeypatch):
    from your_ai.hub import remote

    def write_at(file: int, data: memoryview, offset: int) -> None:
        if offset > 100_000:
            raise OSError(28, "No space left on device")
        os.pwrite(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "write_at", write_at)
        text = refused()
    assert "(No space left on device)" in text
    assert f"are kept; go on with: your_ai download {REPO}" in text
    assert_whole(download(REPO))
    assert [r.start > 50_000 for r in hub.gets(FIRST)] == [False, True]


def test_a_store_that_cannot_be_written_is_told(hub, own_folder, monkeypatch):
    (own_folder / "file").write_text("")
    monkeypatch.setenv("YOUR_AI_HOME", str(own_folder / "file"))
    assert "cannot be written (" in refused()


WEIGHTLESS = {name: text for name, text in model_files().items() if "safetensors" not in name}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "has no model*.safetensors, no weights"),
        ({"pytorch_model.bin": b"x"}, "only pytorch_model.bin, which is not safe to load"),
        ({"model.gguf": b"x"}, "only model.gguf"),
        ({"adapter_model.safetensors": b"x"}, "only adapter_model.safetensors"),
    ],
)
def test_a_repo_without_safe_weights_is_refused(hub, more, words):
    hub.repos[REPO] = Repo(WEIGHTLESS | more)
    assert words in refused()
    assert hub.sent("") == 0
    assert not incomplete().exists()


def test_pickled_weights_beside_safe_ones_are_left_there(hub):
    hub.repos[REPO].files["pytorch_model.bin"] = b"x"
    assert_whole(download(REPO))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b'{"model_type": "clip"}', "is of type clip, which mlx-lm has no code for"),
        (b'{"model_type": "../x"}', "which mlx-lm has no code for"),
        (b"{}", "is it a language model?"),
        (b"[]", "expected a JSON object"),
        (None, "has no config.json; is it a language model?"),
    ],
)
def test_what_is_no_language_model_is_refused_before_its_weights(hub, config, words):
    files = hub.repos[REPO].files
    del files["config.json"]
    files |= {"config.json": config} if config is not None else {}
    assert words in refused()
    assert hub.sent(FIRST) == 0
    assert not incomplete().exists()


def test_a_repo_without_a_tokenizer_is_refused(hub):
    del hub.repos[REPO].files["tokenizer.json"]
    assert "has no tokenizer" in refused()


def test_a_repo_that_lacks_a_shard_never_becomes_a_model(hub):
    del hub.repos[REPO].files[SECOND]
    assert "is not whole on the hub" in refused()
    assert not (models_root() / NAME).exists()


def test_weights_cut_short_on_the_hub_never_become_a_model(hub):
    hub.repos[REPO].files[SECOND] = safetensors()[:-1]
    assert "is not whole on the hub" in refused()
    assert not (models_root() / NAME).exists()


# Processes: the client reads its environment when it is imported

CODE = "import sys; from your_ai.hub.download import download; print(download(*sys.argv[1:]))"


def start(hub: Hub, *arguments: str, code: str = CODE, **environment: str) -> subprocess.Popen:
    own = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(Path("hf").absolute()),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *(arguments or (REPO,))],
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), (err.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_download_that_is_ended_goes_on_where_it_was(hub, number):
    hub.faults[SECOND] = Fault(hangs_at=200_000)
    process = start(hub)
    assert hub.hanging.wait(30)
    for _ in range(200):  # until it has written what it was sent
        if 200_000 in parts():
            break
        time.sleep(0.02)
    began = time.monotonic()
    process.send_signal(number)
    ended(process)
    assert time.monotonic() - began < 2
    assert not (models_root() / NAME).exists()
    with pytest.raises(Missing):
        find_model(REPO)

    hub.go_on.set()
    hub.requests.clear()
    assert notes()[0] == "kept from before: 4 of 5 files, 500 kB of 600 kB"
    assert {name: hub.sent(name) for name in (FIRST, "config.json")} == {FIRST: 0, "config.json": 0}
    assert hub.sent(SECOND) == SIZE - 200_000
    assert_whole(models_root() / NAME)


def test_two_downloads_at_once_fetch_one_model_once(hub):
    hub.faults[SECOND] = Fault(hangs_at=200_000)
    first = start(hub)
    assert hub.hanging.wait(30)
    steps = downloading(REPO)
    while next(steps).doing != "waiting":
        pass
    second = start(hub)
    hub.go_on.set()
    told = [step.note for step in steps if step.note]
    assert told == [f"{REPO} was fetched by another process: {models_root() / NAME}"]
    assert ended(first)[:2] == ended(second)[:2] == (0, str(models_root() / NAME))
    assert hub.sent(FIRST) == hub.sent(SECOND) == SIZE
    assert_whole(models_root() / NAME)


def test_offline_is_told_and_a_cached_model_still_found(hub):
    status, _, error = ended(start(hub, HF_HUB_OFFLINE="1"))
    assert (status, error) == (
        1,
        f"your_ai.errors.UserError: {REPO}: HF_HUB_OFFLINE is set; unset it to fetch {REPO}",
    )
    code = f"import huggingface_hub; huggingface_hub.snapshot_download({REPO!r})"
    assert ended(start(hub, code=code))[0] == 0
    hub.requests.clear()
    status, folder, _ = ended(start(hub, HF_HUB_OFFLINE="1"))
    assert status == 0
    assert check_model(Path(folder))
    assert hub.requests == []


def test_the_users_token_endpoint_and_proxy_are_used(hub):
    """No such endpoint: what is asked of it reaches this hub through a proxy alone."""
    hub.repos[REPO].gated = True
    proxy = {"HTTP_PROXY": hub.url, "http_proxy": hub.url, "NO_PROXY": "", "no_proxy": ""}
    status, folder, error = ended(
        start(hub, HF_ENDPOINT="http://hub.invalid", HF_TOKEN="right", **proxy)
    )
    assert (status, error) == (0, "")
    assert_whole(Path(folder))
    assert {r.host for r in hub.gets("config.json")} == {"hub.invalid"}


def test_nothing_heavy_is_loaded_to_import_it():
    code = (
        "import sys, your_ai.hub.download, your_ai.hub.local; "
        "sys.exit(','.join(m for m in ('mlx', 'huggingface_hub', 'yaml') if m in sys.modules) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_waits_between_tries_grow():
    assert json.loads(subprocess.check_output(
        [sys.executable, "-c",
         "import json; from your_ai.hub.download import WAITS_S; print(json.dumps(WAITS_S))"]
    )) == [1, 2, 4, 8, 16]  # fmt: skip
    assert sorted(module.WAITS_S) == list(module.WAITS_S)
