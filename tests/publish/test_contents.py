from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from tests.publish.conftest import PRIVATE
from your_ai.config import DEMO, TrainConfig, build
from your_ai.errors import UserError
from your_ai.evaluation import record as evaluation
from your_ai.gates.yaml_files import read_yaml
from your_ai.hub.registry import known
from your_ai.nets.saved_adapter import Trained, open_trained, read_adapter
from your_ai.publish.card import CARD, Base
from your_ai.publish.contents import (
    base_of,
    is_folder,
    of_folder,
    of_run,
    settings_of,
    without_paths,
    write,
)

REPO = "someone/mine"
FILES = {CARD, "adapter_config.json", "adapters.safetensors", "config.yaml"}
SIDE = {"value": 0.5, "low": 0.25, "high": 0.75}
MEASURED = {
    "version": 1, "data": "patients.jsonl", "rows": 2, "confidence": 0.95, "step": 3,
    "in_training_data": 0,
    "measures": {"loss": {"base": SIDE, "adapter": SIDE, "difference": SIDE}},
    "worst": [{"prompt": "When does the vault open?", "answer": "At noon"}],
}  # fmt: skip


@pytest.fixture
def trained(finished) -> Trained:
    return open_trained(str(finished.path))


@pytest.fixture
def measured(finished):
    """Writes results of an evaluation for the run, and removes them after the test."""
    yield lambda found: evaluation.write_evaluation(finished, found)
    evaluation.evaluation_file(finished).unlink(missing_ok=True)


def read(content: bytes | Path) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


def test_a_run_sends_adapter_settings_and_card(trained):
    sent = of_run(trained, REPO)
    assert set(sent.files) == FILES
    assert b"| step | loss | validation loss |" in sent.files[CARD]


def test_nothing_private_is_sent(trained, measured, finished):
    measured(MEASURED)
    sent = b"\n".join([read(content) for content in of_run(trained, REPO).files.values()]).lower()
    assert b"held-out rows" in sent
    hidden = [*PRIVATE, str(finished.path), str(trained.base), str(Path.home())]
    assert [word for word in hidden if word.lower().encode() in sent] == []


def test_the_adapter_that_is_sent_is_that_of_the_run(trained):
    found = read_adapter(write(of_run(trained, REPO)))
    assert found.config == {**trained.adapter.config, "model": trained.base.name}
    assert found.arrays.keys() == trained.adapter.arrays.keys()
    assert all(mx.array_equal(found.arrays[n], a) for n, a in trained.adapter.arrays.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"valid": "/cellar/v.jsonl"},
        {"prefix_cache": "disk", "prefix_cache_folder": "/vault"},
        {"objective": "grpo", "reward": ("judge",), "judge_model": "j", "judge_rubric": "/vault"},
        {"objective": "soft", "reward_model": "run:/vault/rm"},
        {"objective": "grpo", "reward": ("run:/vault/rm=2",)},
    ],
)
def test_the_settings_that_are_sent_name_no_file(changes):
    text = settings_of(TrainConfig(**changes), Base("b"))
    assert not any(word in text for word in PRIVATE)


def test_a_run_without_validation_is_sent_as_one():
    assert "valid: none" in settings_of(TrainConfig(valid="none"), Base("b"))


def test_the_settings_that_are_sent_can_train_again(trained):
    folder = write(of_run(trained, REPO))
    config = build(read_yaml(folder / "config.yaml"), "test")
    assert config.fixed_on_resume() == trained.config.fixed_on_resume()
    assert (config.run, config.data, config.push_to) == ("", "", "")


def test_the_card_of_a_checkpoint_ends_at_its_step(finished):
    sent = of_run(open_trained(str(finished.path), "1"), REPO)
    assert sent.what == "adapter of step 1"
    assert b"| steps | 1 |" in sent.files[CARD]
    assert read(sent.files["adapters.safetensors"]) == (
        (finished.checkpoints / "step-000001" / "adapters.safetensors").read_bytes()
    )


def test_an_evaluation_of_the_checkpoint_is_in_its_card(finished, measured):
    measured(MEASURED | {"step": None, "checkpoint": "step-000001"})
    assert b"held-out rows" in of_run(open_trained(str(finished.path), "1"), REPO).files[CARD]
    assert "is for step 1" in of_run(open_trained(str(finished.path)), REPO).notes[0]


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"step": 2}, "is for step 2, not for step 3"), ({"measures": None}, "is damaged")],
)
def test_an_evaluation_that_cannot_be_used_gives_a_note(trained, measured, changes, word):
    measured(MEASURED | changes)
    sent = of_run(trained, REPO)
    assert word in sent.notes[0]
    assert b"Not measured yet" in sent.files[CARD]


def test_the_base_is_named_by_its_repository(trained):
    known_one = dataclasses.replace(trained.config, model="llama-8b")
    found = base_of(dataclasses.replace(trained, config=known_one))
    assert found.repo == known()["llama-8b"].repo
    demo = dataclasses.replace(trained, config=dataclasses.replace(trained.config, model=DEMO))
    assert (base_of(demo).name, base_of(demo).repo) == (DEMO, None)


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        ("simpo", "SimPO ([arXiv:2405.14734](https://arxiv.org/abs/2405.14734)) on pairs of"),
        ("kto", "on answers labeled as good or bad."),
    ],
)  # fmt: skip
def test_the_card_says_the_method_and_its_settings(trained, objective, text):
    settings = {"objective": objective, "beta": 0.3, "exact_match": False}
    config = dataclasses.replace(trained.config, **settings)
    sent = of_run(dataclasses.replace(trained, config=config), REPO).files[CARD].decode()
    assert text in sent
    assert f"- {objective}\n" in sent
    assert "| `beta` | 0.3 |" in sent
    assert "orpo_lambda" not in sent


def test_the_card_says_that_training_began_from_an_adapter_without_its_name(trained):
    config = dataclasses.replace(trained.config, from_adapter="../vault")
    sent = of_run(dataclasses.replace(trained, config=config), REPO)
    assert b"Its training began from another adapter." in sent.files[CARD]
    assert b"vault" not in sent.files["config.yaml"]


@pytest.mark.parametrize("origin", ["merged", "imported"])
def test_a_merged_or_imported_run_has_no_settings_of_its_own(finished, trained, origin):
    finished.origin(origin).write_text("{}")
    try:
        sent = of_run(trained, REPO)
    finally:
        finished.origin(origin).unlink()
    assert "config.yaml" not in sent.files
    assert (b"It was merged from other adapters." in sent.files[CARD]) == (origin == "merged")
    assert not any(text in sent.files[CARD] for text in (b"## Settings", b"Trained with"))


# Folders


@pytest.fixture
def folder(own_folder: Path) -> Path:
    """An exported folder that also has private files of the user."""
    made = own_folder / "cellar"
    made.mkdir()
    named = {"base_model_name_or_path": "/cellar/llama", "peft_type": "LORA", "r": 4}
    (made / "adapter_config.json").write_text(json.dumps(named))
    (made / "adapter_model.safetensors").write_bytes(b"weights")
    (made / "README.md").write_text("---\nbase_model: a/b\n---\n# the vault")
    (made / "train.jsonl").write_text("{}")
    (made / "optimizer.safetensors").write_bytes(b"noon")
    (made / ".hidden").write_text("vault")
    return made


def test_only_the_files_of_an_adapter_are_sent_from_its_folder(folder):
    sent = of_folder(folder, REPO)
    assert set(sent.files) == {CARD, "adapter_config.json", "adapter_model.safetensors"}
    assert sent.notes == (
        "not sent, because it does not belong to a PEFT adapter: "
        "optimizer.safetensors, train.jsonl",
    )


def test_no_path_is_sent_from_a_folder(folder):
    sent = of_folder(folder, REPO)
    assert json.loads(sent.files["adapter_config.json"])["base_model_name_or_path"] == "llama"
    together = b"".join(map(read, sent.files.values()))
    assert [word for word in PRIVATE if word.encode() in together] == []


def test_a_config_without_paths_is_sent_as_it_is(folder):
    text = b'{"base_model_name_or_path":"a/b",  "r": 4}'
    (folder / "adapter_config.json").write_bytes(text)
    sent = of_folder(folder, REPO)
    assert read(sent.files["adapter_config.json"]) == text
    assert b"base_model: a/b" in sent.files[CARD]


def test_the_base_in_the_card_of_a_folder_is_kept(folder):
    (folder / "adapter_config.json").write_text("{}")
    assert b"base_model: a/b" in of_folder(folder, REPO).files[CARD]


def test_settings_of_mlx_lm_s_trainer_about_data_are_not_sent(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"lora_parameters": {"rank": 4}, "num_layers": 2, "data": "customers/x"})
    )
    (folder / "adapters.safetensors").write_bytes(b"")
    sent = json.loads(read(of_folder(folder, REPO).files["adapter_config.json"]))
    assert sent == {"lora_parameters": {"rank": 4}, "num_layers": 2}


def test_a_checkpoint_folder_is_refused(finished):
    with pytest.raises(UserError, match="push its run, with --checkpoint step-000003"):
        of_folder(finished.checkpoints / "step-000003", REPO)


def test_is_folder_is_false_for_runs(folder, finished):
    assert is_folder(str(folder))
    assert is_folder(str(finished.adapter))
    assert not is_folder(str(finished.path))
    assert not is_folder("nowhere")
    assert not is_folder(str(folder.parent))


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_a_damaged_config_is_an_error(folder, text):
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        of_folder(folder, REPO)


def test_paths_are_replaced_at_any_depth():
    found = {"a": [{"b": "/x/y"}, "~/z"], "c": "org/name", "d": 1.5, "e": "../up"}
    assert without_paths(found) == {"a": [{"b": "y"}, "z"], "c": "org/name", "d": 1.5, "e": "up"}


def test_a_full_disk_leaves_no_folder(contents, monkeypatch, tmp_path):
    def full(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"No space left.*free some disk"):
        write(contents)
    assert list(tmp_path.glob("your_ai-push-*")) == []


# --- Links


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_to_a_private_file_is_not_sent(folder, tmp_path, name):
    private = tmp_path / "key"
    private.write_text("vault")
    (folder / name).unlink()
    (folder / name).symlink_to(private)
    with pytest.raises(UserError, match=f"{name}: is a link to .*key, which is not sent"):
        of_folder(folder, REPO)


def test_a_link_within_the_folder_is_sent(folder):
    (folder / "adapter_model.safetensors").rename(folder / "weights")
    (folder / "adapter_model.safetensors").symlink_to(folder / "weights")
    assert "adapter_model.safetensors" in of_folder(folder, REPO).files


def test_an_adapter_that_is_a_link_is_not_sent(trained, tmp_path):
    path = trained.adapter.folder / "adapters.safetensors"
    shutil.move(path, tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(UserError, match="is a link to"):
        of_run(trained, REPO)
