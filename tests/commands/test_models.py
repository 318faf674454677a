"""The commands before a run: download, list, verify, remove, quantize and recommend models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import flip, make_model, refused, write_rows
from tests.fault.processes import call
from tests.hub.conftest import LARGE_BYTES, NAME, REPO, hub, model_files, no_hub  # noqa: F401
from tests.hub.server import Repo
from tests.terminal import on_terminal
from your_ai.doctor import model_list, recommend
from your_ai.hub.find import models_root
from your_ai.hub.registry import Known, known


def test_model_is_downloaded_only_once(hub, capsys):  # noqa: F811
    status, out, _ = call(capsys, "download", REPO)
    assert (status, str(models_root() / NAME) in out) == (0, True)
    status, out, _ = call(capsys, "download", REPO)
    assert (status, "nothing to download" in out) == (0, True)


def test_unknown_name_is_refused_with_a_suggestion(capsys, no_hub):  # noqa: F811
    assert "llama-8b" in refused(capsys, "download", "lama-8b")
    assert not models_root().exists()


@pytest.fixture
def few_known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Known]:
    """Three known models: planning all of them takes a second."""
    few = {name: known()[name] for name in ("qwen3-0.6b", "llama-8b", "llama-70b")}
    for module in (model_list, recommend):
        monkeypatch.setattr(module, "known", lambda: few)
    return few


def test_local_models_are_listed_before_known_models(hub, few_known, capsys):  # noqa: F811
    call(capsys, "download", REPO)
    status, out, _ = call(capsys, "models", "--json")
    rows = json.loads(out)
    assert [row["where"] for row in rows[:2]] == ["your_ai", "models"]
    assert (status, rows[0]["name"], rows[1]["repo"]) == (0, "demo", REPO)
    assert {row["name"] for row in rows} >= set(few_known)
    status, out, _ = call(capsys, "models")
    assert (status, "llama-8b" in out) == (0, True)


def test_verify_names_a_damaged_file(hub, capsys):  # noqa: F811
    call(capsys, "download", REPO)
    assert call(capsys, "models", "verify", REPO)[0] == 0
    shard = max((models_root() / NAME).glob("*.safetensors"))
    flip(shard, -1)
    status, out, error = call(capsys, "models", "verify", REPO)
    assert (status, shard.name in out) == (2, True)
    assert f"your_ai download {REPO}" in error


def test_rm_takes_the_beginning_of_one_alias_and_removes_nothing_for_several(hub, capsys):  # noqa: F811
    hub.repos["mlx-community/Qwen3-14B-4bit"] = hub.repos[REPO]
    hub.repos["mlx-community/Qwen3-4B-4bit"] = hub.repos[REPO]
    for alias in ("qwen3-14b", "qwen3-4b"):
        call(capsys, "download", alias)
    before = sorted(models_root().iterdir())
    for wrong, message in (
        ("qwen3", "qwen3: begins "),
        ("qwen3-14x", "no such folder or alias; did you mean qwen3-14b"),
    ):
        assert message in refused(capsys, "models", "rm", "qwen3-14b", wrong, "--yes")
        assert sorted(models_root().iterdir()) == before
    status, out, _ = call(capsys, "models", "rm", "qwen3-14", "--yes")
    assert (status, out.split(",")[0]) == (0, "removed Qwen3-14B-4bit")
    left = [path.name for path in models_root().iterdir() if path.name[0] != "."]
    assert left == ["Qwen3-4B-4bit"]


@pytest.mark.slow
def test_train_downloads_a_missing_model_with_yes(hub, configure, tiny_model, capsys):  # noqa: F811
    hub.repos[REPO] = Repo({path.name: path.read_bytes() for path in tiny_model.iterdir()})
    flags = ["train", "--model", REPO, "--data", "data", "--run", "fetched", "--max-steps", "1"]
    configure()  # writes the data
    status, _, error = call(capsys, *flags, "--no-supervise")
    assert status == 2
    assert f"your_ai download {REPO}" in error
    assert call(capsys, *flags, "--no-supervise", "--yes")[0] == 0


def test_quantize_writes_a_model(capsys, own_folder):
    make_model(own_folder / "whole", bits=None)
    options = ("--bits", "4", "--group-size", "32")
    status, out, error = call(capsys, "quantize", "whole", "small", *options)
    assert (status, error, out.splitlines()[-1]) == (0, "", "small")
    config = json.loads((own_folder / "small/config.json").read_text())
    assert (config["quantization"]["bits"], config["quantization"]["group_size"]) == (4, 32)
    status, _, error = call(capsys, "quantize", "small", "smaller", *options)
    assert (status, "4 bits" in error) == (2, True)


def test_recommendations_depend_on_the_given_memory(few_known, capsys):
    def count(memory: str) -> int:
        status, out, _ = call(capsys, "recommend", "--memory", memory, "--json")
        assert status == 0
        return len(json.loads(out)["recommendations"])

    assert 0 < count("8") < count("64")
    assert call(capsys, "recommend", "--memory", "0")[0] == 2


def test_doctor_reports_this_machine(capsys):
    status, out, _ = call(capsys, "doctor", "--json")
    assert status == 0
    assert json.loads(out)["machine"]["ram_bytes"] > 0
    status, out, _ = call(capsys, "doctor")
    assert (status, "limit" in out) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["y", "n"])
def test_train_asks_on_a_terminal_before_downloading(hub, configure, tiny_model, answer):  # noqa: F811
    hub.repos[REPO] = Repo({path.name: path.read_bytes() for path in tiny_model.iterdir()})
    configure()  # writes the data
    flags = ["train", "--model", REPO, "--data", "data", "--run", "r", "--max-steps", "1"]
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": "hf"}
    with on_terminal(*flags, **environment) as terminal:
        terminal.wait_for("download it?")
        assert not models_root().exists()
        terminal.press(f"{answer}\n")
        assert terminal.end() == (0 if answer == "y" else 2)
    assert (models_root() / NAME).exists() == (answer == "y")


PAIR = {"prompt": "a", "completion": "b"}
GRPO = ["--objective", "grpo", "--reward", "exact_match", "--reward"]
SOFT = ["--objective", "soft", "--reward-model", "run:none"]


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"messages": "nonsense"}, [], "train.jsonl:2: messages: expected a list"),
        ({"a": "b"}, [], "train.jsonl:2: unknown row format"),
        ({"a": "b"}, ["--columns", "text=c"], "has no column c"),
        ({"text": "a"}, ["--prompt-template", "none.jinja"], "cannot be read"),
        (PAIR, [*GRPO, "exact_matsch"], "--reward exact_matsch: no such reward; did you mean"),
        (PAIR, [*GRPO, "run:none"], "--reward run:none: no run named none"),
        (PAIR, SOFT, "--reward-model run:none: no run named none"),
    ],
)
def test_bad_input_is_refused_before_a_download(hub, capsys, row, flags, message):  # noqa: F811
    write_rows(Path("data/train.jsonl"), [PAIR, row])
    assert call(capsys, "train", "--model", REPO, "--data", "data", "--yes", *flags)[0] == 2
    assert hub.requests == []
    assert not models_root().exists()
    assert not Path("runs").exists()
