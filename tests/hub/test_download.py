"""Downloads from a hub on localhost, through the real client, with failures."""

from __future__ import annotations

import collections
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.hub.conftest import (
    FIRST,
    LARGE_BYTES,
    NAME,
    REPO,
    SECOND,
    download,
    error_of,
    model_files,
    safetensors,
)
from tests.hub.server import Fault, Hub, Repo
from your_ai.commands.models import doing, show
from your_ai.hub.check import RECORD, check_model, read_record, verify
from your_ai.hub.download import DownloadProgress, downloading
from your_ai.hub.find import Missing, find_model, models_root

UNWANTED = {".gitattributes", "README.md", "onnx/config.json"}
SIZE = len(model_files()[FIRST])


def refused(name: str = REPO, **options: object) -> str:
    return error_of(download, name, **options)


def notes(name: str = REPO, **options: object) -> list[str]:
    return [step.note for step in downloading(name, **options) if step.note]


def interrupted(hub: Hub, file: str, fault: Fault | None = None) -> str:
    """What a download says that ends at a fault of a file, by default after 100 kB of it."""
    hub.faults[file] = fault or Fault(cuts=[100_000] + [0] * 50)
    text = refused()
    hub.faults.clear()
    return text


def incomplete() -> Path:
    return models_root() / f".incomplete-{NAME}"


def parts() -> dict[int, Path]:
    """The partial files by size."""
    return {path.stat().st_size: path for path in (incomplete() / "parts").iterdir()}


def assert_whole(folder: Path, files: dict[str, bytes] | None = None) -> None:
    files = files or model_files()
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != RECORD}
    assert found == {name: text for name, text in files.items() if name not in UNWANTED}
    assert verify(folder).faults == ()
    assert not incomplete().exists()


def test_all_files_of_a_model_are_downloaded(hub):
    folder = download(REPO)
    assert folder == models_root() / NAME
    assert_whole(folder)
    assert find_model(REPO) == folder


def test_more_chat_templates_are_downloaded_and_checked(hub):
    tools, hidden = "additional_chat_templates/tool_use.jinja", "additional_chat_templates/.x.jinja"
    deeper = "additional_chat_templates/a/b.jinja"
    hub.repos[REPO].files |= {tools: b"{{ 'tools' }}", hidden: b"", deeper: b""}
    folder = download(REPO)
    assert (folder / tools).read_bytes() == b"{{ 'tools' }}"
    assert [path.name for path in (folder / tools).parent.iterdir()] == ["tool_use.jinja"]
    assert verify(folder).faults == ()
    (folder / tools).write_text("{{ other }}")
    assert [tools in fault for fault in verify(folder).faults] == [True]


def test_the_record_has_the_repository_and_revision(hub):
    record = read_record(download(REPO))
    assert (record.repo, record.asked, record.revision) == (REPO, "main", "a" * 40)
    assert set(record.files) == set(model_files()) - UNWANTED


def test_each_needed_file_is_sent_exactly_once(hub):
    download(REPO)
    for name, content in model_files().items():
        assert hub.sent(name) == (0 if name in UNWANTED else len(content))


def test_an_alias_downloads_its_repository(hub):
    repo = "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"
    hub.repos[repo] = Repo(model_files())
    assert download("llama-8b").name == "Meta-Llama-3.1-8B-Instruct-4bit"
    assert find_model("llama-8b") == models_root() / "Meta-Llama-3.1-8B-Instruct-4bit"


def test_without_a_store_the_model_goes_to_local_models(hub, monkeypatch, own_folder):
    monkeypatch.delenv("YOUR_AI_HOME")
    assert download(REPO) == Path("models") / NAME
    assert_whole(own_folder / "models" / NAME)


def test_the_model_goes_to_the_given_folder(hub, own_folder):
    folder = download(REPO, to=own_folder / "some" / "where")
    assert folder == own_folder / "some" / "where"
    assert_whole(folder)


def test_an_existing_empty_folder_can_be_the_target(hub, own_folder):
    (own_folder / "empty").mkdir()
    assert_whole(download(REPO, to="empty"))


def test_a_given_revision_is_downloaded(hub):
    assert read_record(download(REPO, revision="a" * 40)).asked == "a" * 40


def test_progress_never_decreases_and_ends_at_the_total(hub):
    steps = [step for step in downloading(REPO) if step.total_bytes]
    done = [step.done_bytes for step in steps]
    assert done == sorted(done)
    assert (steps[-1].done_bytes, steps[-1].done_files) == (steps[-1].total_bytes, 5)


# Models that already exist


def test_a_complete_model_needs_no_requests(hub):
    folder = download(REPO)
    hub.requests.clear()
    assert notes() == [f"{REPO} is complete in {folder}; nothing to download"]
    assert hub.requests == []


def test_only_damaged_files_are_downloaded_again(hub):
    folder = download(REPO)
    weights = folder / FIRST
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    (folder / "tokenizer.json").unlink()
    hub.requests.clear()
    first = notes()[0]
    assert "tokenizer.json: is missing" in first
    assert f"{FIRST}: has changed since it was downloaded" in first
    assert_whole(folder)
    assert hub.sent(SECOND) == hub.sent("config.json") == 0


def test_a_damaged_model_is_repaired_from_its_own_revision(hub):
    folder = download(REPO)
    (folder / "tokenizer.json").write_text("x")
    hub.requests.clear()
    download(REPO)
    assert f"/revision/{'a' * 40}" in hub.requests[0].path


def test_a_folder_without_a_record_is_used_as_it_is(hub, model):
    shutil.copytree(model, models_root() / NAME)
    assert download(REPO) == models_root() / NAME
    assert hub.requests == []


def test_a_broken_folder_without_a_record_is_not_changed(hub, model):
    folder = Path(shutil.copytree(model, models_root() / NAME))
    (folder / FIRST).unlink()
    assert "is missing; move it away, or choose another folder with --to" in refused()
    assert (folder / SECOND).exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"files": {"../x": {}}}'])
def test_a_folder_with_a_damaged_record_is_not_changed(hub, content):
    folder = download(REPO)
    (folder / RECORD).write_text(content)
    assert "--to" in refused()
    assert (folder / FIRST).exists()


def test_a_folder_of_another_repository_is_not_changed(hub):
    download(REPO)
    hub.repos[f"other/{NAME}"] = hub.repos[REPO]
    assert f"contains {REPO}; choose another folder with --to" in refused(f"other/{NAME}")


def test_a_model_is_not_replaced_by_another_revision(hub):
    download(REPO)
    assert "contains revision aaaaaaaaaaaa; remove it first" in refused(revision="b" * 40)


def cached(hub: Hub) -> Path:
    return Path(huggingface_hub.snapshot_download(REPO))


def test_a_cached_model_is_used_in_place(hub):
    folder = cached(hub)
    hub.requests.clear()
    assert download(REPO) == find_model(REPO) == folder
    assert hub.requests == []


def test_a_cached_model_is_copied_to_the_given_folder(hub):
    cached(hub)
    hub.requests.clear()
    assert_whole(download(REPO, to="here"))
    assert hub.sent(FIRST) == 0


@pytest.mark.parametrize("missing", [FIRST, "tokenizer.json", "config.json"])
def test_an_incomplete_cached_model_is_not_used(hub, missing):
    (cached(hub) / missing).unlink()
    with pytest.raises(Missing):
        find_model(REPO)
    hub.requests.clear()
    assert_whole(download(REPO))
    assert hub.sent(SECOND) == 0


def test_a_truncated_cached_model_is_not_used(hub):
    os.truncate((cached(hub) / FIRST).resolve(), SIZE - 1)
    with pytest.raises(Missing):
        find_model(REPO)
    assert_whole(download(REPO))


# Interrupted connections and wrong responses


def test_interrupted_downloads_continue_where_they_stopped(hub):
    hub.faults[FIRST] = Fault(cuts=[100_000, 50_000, 20_000])
    shown = notes()
    assert [r.start for r in hub.gets(FIRST) if r.sent_bytes] == [0, 100_000, 150_000, 170_000]
    assert hub.sent(FIRST) == SIZE
    assert any("trying again" in note for note in shown)
    assert_whole(models_root() / NAME)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(0, LARGE_BYTES), max_size=4))
def test_the_model_is_complete_wherever_the_connection_breaks(hub, cuts):
    shutil.rmtree(models_root(), ignore_errors=True)
    hub.faults[FIRST] = Fault(cuts=list(cuts))
    assert_whole(download(REPO))


def test_a_server_without_ranges_sends_the_whole_file_again(hub):
    hub.faults[FIRST] = Fault(cuts=[100_000], no_ranges=True)
    assert_whole(download(REPO))
    assert hub.sent(FIRST) == 100_000 + SIZE


@pytest.mark.parametrize("status", [500, 502, 503, 429])
@pytest.mark.parametrize("what", ["api", "config.json", FIRST])
def test_temporary_server_errors_are_retried(hub, status, what):
    hub.faults[what] = Fault(statuses=[status] * 3)
    assert_whole(download(REPO))


def test_persistent_server_errors_tell_how_to_continue(hub):
    hub.faults[SECOND] = Fault(statuses=[503] * 50)
    text = refused()
    assert "the hub answered 503" in text
    assert f"300 kB are kept; continue with: your_ai download {REPO}" in text
    assert not (models_root() / NAME).exists()


def test_persistent_connection_losses_tell_how_to_continue(hub):
    text = interrupted(hub, FIRST)
    assert f"100 kB are kept; continue with: your_ai download {REPO}" in text
    hub.requests.clear()
    assert notes()[0] == "kept from before: 3 of 5 files, 100 kB of 600 kB"
    assert hub.sent(FIRST) == SIZE - 100_000
    assert_whole(models_root() / NAME)


@pytest.mark.parametrize("fault", [Fault(bytes_per_s=1_000_000), Fault(claims=SIZE + 1)])
def test_a_slow_download_and_a_content_length_that_is_too_large_are_tolerated(hub, fault):
    hub.faults[FIRST] = fault
    assert_whole(download(REPO))


def test_a_stalled_download_is_retried(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.faults[FIRST] = Fault(hangs_at=100_000)
    for step in downloading(REPO):
        if "timed out" in step.note:
            hub.go_on.set()
    assert_whole(models_root() / NAME)
    assert [r.start for r in hub.gets(FIRST)] == [0, 100_000]


WHOLE = model_files()[FIRST]
SMALL = "tokenizer.json has another hash than the hub says"


@pytest.mark.parametrize(
    ("file", "fault", "words"),
    [
        (FIRST, Fault(claims=SIZE - 1), f"{FIRST}|peer closed"),
        (FIRST, Fault(claims=10), f"{FIRST}|peer closed"),
        (FIRST, Fault(content=b"x" + WHOLE[1:]), FIRST),
        (FIRST, Fault(content=WHOLE + b"y"), FIRST),
        ("tokenizer.json", Fault(content=b'{"version": "9.9"}'), SMALL),
    ],
    ids=["one byte less", "ten bytes", "another byte", "one byte more", "another small file"],
)
def test_a_file_with_a_wrong_length_or_hash_is_named_and_creates_no_model(hub, file, fault, words):
    assert re.search(words, interrupted(hub, file, fault))
    assert not (models_root() / NAME).exists()
    assert fault.content is None or not (incomplete() / file).exists()


def test_a_damaged_partial_file_is_downloaded_again(hub):
    interrupted(hub, FIRST)
    parts()[100_000].write_bytes(b"x" * 100_000)
    assert any("arrived damaged; downloading it again" in note for note in notes())
    assert_whole(models_root() / NAME)


def test_a_finished_file_damaged_later_is_downloaded_again(hub):
    interrupted(hub, SECOND, Fault(statuses=[503] * 50))
    (incomplete() / FIRST).write_bytes(b"x" * SIZE)
    assert_whole(download(REPO))


def test_files_that_are_not_in_a_newer_revision_are_deleted(hub):
    interrupted(hub, SECOND)
    files = model_files(LARGE_BYTES + 1) | {"tokenizer.json": b'{"version": "2.0"}'}
    hub.repos[REPO] = Repo(files, sha="b" * 40)
    (incomplete() / "stray.json").write_text("{}")
    folder = download(REPO)
    assert_whole(folder, files)
    assert read_record(folder).revision == "b" * 40


# Models that cannot be downloaded


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc/x", "a/..", "./x", ".hidden/x", "a/b/c"])
def test_a_model_name_outside_the_store_is_refused(hub, name):
    assert f"{name}: is not a repository id; those have the form OWNER/NAME" in refused(name)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("demo", {}, "comes with your_ai"),
        ("someone/else", {}, "someone/else is not on the hub"),
        (REPO, {"revision": "v9"}, f"{REPO} has no revision v9"),
    ],
)
def test_what_is_not_on_the_hub_is_reported(hub, name, options, words):
    assert words in refused(name, **options)


def test_the_error_for_a_gated_repository_says_what_to_do(hub):
    hub.repos[REPO].gated = True
    text = refused()
    assert f"is gated; accept its license on {hub.url}/{REPO}" in text
    assert "hf auth login" in text


def test_the_token_is_sent_only_to_the_hub(hub, monkeypatch):
    hub.repos[REPO].gated = True
    monkeypatch.setenv("HF_TOKEN", "right")
    assert_whole(download(REPO))
    elsewhere = [r.authorization for r in hub.requests if r.host.startswith("localhost")]
    assert elsewhere == [None, None]


def test_a_token_without_access_to_a_gated_repository_is_reported(hub, monkeypatch):
    hub.repos[REPO].gated = True
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "is gated" in refused()


def test_a_rejected_token_is_reported(hub):
    hub.faults["api"] = Fault(statuses=[403])
    assert "log in again: `hf auth login`" in refused()


def test_an_unreachable_hub_is_reported_immediately():
    began = time.monotonic()
    assert "the hub cannot be reached at http://127.0.0.1:9" in refused()
    assert time.monotonic() - began < 2
    assert not models_root().exists()


Usage = collections.namedtuple("Usage", "total used free")


def test_the_error_for_a_full_disk_gives_both_sizes(hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 610_000))
    text = refused()
    assert "needs 630 kB of disk space" in text
    assert "has 610 kB free" in text
    assert hub.sent("") == 0
    assert not incomplete().exists()


def test_files_kept_from_before_need_no_more_disk_space(hub, monkeypatch):
    interrupted(hub, SECOND)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 220_000))
    assert_whole(download(REPO))


def test_a_disk_that_fills_up_tells_how_to_continue(hub, monkeypatch):
    from your_ai.hub import remote

    def write_at(file: int, data: memoryview, offset: int) -> None:
        if offset > 100_000:
            raise OSError(28, "No space left on device")
        os.pwrite(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "write_at", write_at)
        text = refused()
    assert "(No space left on device)" in text
    assert f"are kept; continue with: your_ai download {REPO}" in text
    assert_whole(download(REPO))
    assert [r.start > 50_000 for r in hub.gets(FIRST)] == [False, True]


def test_a_read_only_store_is_reported(hub, own_folder, monkeypatch):
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
def test_a_repository_without_safetensors_is_refused(hub, more, words):
    hub.repos[REPO] = Repo(WEIGHTLESS | more)
    assert words in refused()
    assert hub.sent("") == 0
    assert not incomplete().exists()


def test_pickled_weights_next_to_safetensors_are_not_downloaded(hub):
    hub.repos[REPO].files["pytorch_model.bin"] = b"x"
    assert_whole(download(REPO))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b'{"model_type": "clip"}', "has model_type clip, which mlx-lm does not support"),
        (b"{}", "is it a language model?"),
        (b"[]", "expected a JSON object"),
        (None, "has no config.json; is it a language model?"),
    ],
)
def test_other_models_are_refused_before_their_weights_are_downloaded(hub, config, words):
    files = hub.repos[REPO].files
    del files["config.json"]
    files |= {"config.json": config} if config is not None else {}
    assert words in refused()
    assert hub.sent(FIRST) == 0
    assert not incomplete().exists()


def test_a_repository_without_a_tokenizer_is_refused(hub):
    del hub.repos[REPO].files["tokenizer.json"]
    assert "has no tokenizer" in refused()


@pytest.mark.parametrize("second", [None, safetensors()[:-1]], ids=["missing", "truncated"])
def test_a_repository_with_a_missing_or_truncated_shard_creates_no_model(hub, second):
    del hub.repos[REPO].files[SECOND]
    hub.repos[REPO].files |= {} if second is None else {SECOND: second}
    assert "is not complete on the hub" in refused()
    assert not (models_root() / NAME).exists()


# In processes: the client reads its environment when it is imported

CODE = (
    "import sys; from your_ai.hub.download import downloading, result_of; "
    "print(result_of(downloading(*sys.argv[1:])))"
)


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
def test_a_killed_download_continues_where_it_stopped(hub, number):
    hub.faults[SECOND] = Fault(hangs_at=200_000)
    process = start(hub)
    assert hub.hanging.wait(30)
    for _ in range(200):  # until it has written the bytes that it received
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


def test_concurrent_downloads_download_the_model_once(hub):
    hub.faults[SECOND] = Fault(hangs_at=200_000)
    first = start(hub)
    assert hub.hanging.wait(30)
    steps = downloading(REPO)
    while next(steps).doing != "waiting":
        pass
    second = start(hub)
    hub.go_on.set()
    shown = [step.note for step in steps if step.note]
    assert shown == [f"{REPO} was downloaded by another process: {models_root() / NAME}"]
    assert ended(first)[:2] == ended(second)[:2] == (0, str(models_root() / NAME))
    assert hub.sent(FIRST) == hub.sent(SECOND) == SIZE
    assert_whole(models_root() / NAME)


def test_offline_mode_is_reported_and_still_finds_cached_models(hub):
    status, _, error = ended(start(hub, HF_HUB_OFFLINE="1"))
    assert (status, error) == (
        1,
        f"your_ai.errors.UserError: {REPO}: HF_HUB_OFFLINE is set; unset it to download {REPO}",
    )
    code = f"import huggingface_hub; huggingface_hub.snapshot_download({REPO!r})"
    assert ended(start(hub, code=code))[0] == 0
    hub.requests.clear()
    status, folder, _ = ended(start(hub, HF_HUB_OFFLINE="1"))
    assert status == 0
    assert check_model(Path(folder))
    assert hub.requests == []


def test_the_users_token_endpoint_and_proxy_are_used(hub):
    """The endpoint does not exist, so requests reach this hub only through the proxy."""
    hub.repos[REPO].gated = True
    proxy = {"HTTP_PROXY": hub.url, "http_proxy": hub.url, "NO_PROXY": "", "no_proxy": ""}
    status, folder, error = ended(
        start(hub, HF_ENDPOINT="http://hub.invalid", HF_TOKEN="right", **proxy)
    )
    assert (status, error) == (0, "")
    assert_whole(Path(folder))
    assert {r.host for r in hub.gets("config.json")} == {"hub.invalid"}


AT = DownloadProgress(
    name="llama-8b", doing="fetching", file="model.safetensors", done_files=1, files=5,
    done_bytes=1_200_000_000, total_bytes=4_520_000_000,
)  # fmt: skip


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, highlight=False)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (AT, "fetching 2/5 model.safetensors"),
        (DownloadProgress(name="x"), "asking"),
        (DownloadProgress(name="x", doing="waiting"), "waiting for another download of this model"),
        (DownloadProgress(name="x", doing="checking", done_files=5, files=5), "checking 5/5"),
    ],
)
def test_a_bar_gives_the_activity_and_the_file(at, text):
    assert doing(at) == text


def test_without_a_terminal_there_are_few_lines(hub):
    out = console()
    assert show(downloading(REPO), out) == models_root() / NAME
    lines = out.file.getvalue().splitlines()
    assert 3 <= len(lines) <= 12
    assert lines[0].startswith(f"{REPO}: 0 MB of 600 kB, 0 of 5 files")
    assert lines[-1] == f"600 kB in 5 files, each checked by its hash: {models_root() / NAME}"
    assert "\x1b" not in out.file.getvalue()


def test_a_terminal_shows_a_bar_and_keeps_the_notes(hub):
    hub.faults["config.json"] = Fault(statuses=[503])
    out = console(terminal=True)
    show(downloading(REPO), out)
    shown = out.file.getvalue()
    assert "the hub answered 503; trying again in" in shown
    assert "600 kB in 5 files" in shown
    assert "600.3/600.3 kB" in shown


def test_brackets_in_a_note_are_printed_literally():
    def steps() -> Generator[DownloadProgress, None, Path]:
        yield DownloadProgress(name="x", note="[red]a[/] [b")
        return Path("x")

    out = console()
    show(steps(), out)
    assert out.file.getvalue() == "[red]a[/] [b\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_prints_what_is_kept_and_how_to_continue(terminal):
    closed = []

    def steps() -> Generator[DownloadProgress, None, Path]:
        try:
            yield AT
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    out = console(terminal)
    with pytest.raises(KeyboardInterrupt):
        show(steps(), out)
    last = out.file.getvalue().splitlines()[-1]
    assert last.endswith("stopped; 1.20 GB are kept; continue with: your_ai download llama-8b")
    assert closed == [True]
