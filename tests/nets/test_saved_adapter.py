from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from tests.conftest import TINY, chat, flip, load_base, make_model, train, working_in, write_rows
from your_ai.config import build
from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.nets import saved_adapter
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import checkpoint
from your_ai.run.folder import RunFolder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model):
    """The folder of a run of three steps."""
    root = tmp_path_factory.mktemp("trained")
    data = write_rows(root / "train.jsonl", [chat(f"Ask {i}", "Yes") for i in range(4)])
    settings = {"model": str(tiny_model), "data": str(data), "run": "r", "max_steps": 3}
    settings |= {"batch_size": 2, "learning_rate": 0.05, "lora_layers": 2, "lora_rank": 4}
    with working_in(root):
        train(build({**settings, "save_every": 1, "samples": 0, "supervise": False}, "test"))
    return root / "runs" / "r"


@pytest.fixture
def run(trained, own_folder):
    """That run, in the folder of the test."""
    return RunFolder(shutil.copytree(trained, Path("runs") / "r"))


def without_record(folder):
    """Remove the record of the base model's files from the adapter."""
    path = folder / checkpoint.ADAPTER_CONFIG
    config = json.loads(path.read_text())
    del config["base_files"]
    path.write_text(json.dumps(config))
    sums = json.loads((folder / checkpoint.CHECKSUMS).read_text())
    sums[path.name] = sha256(path)
    (folder / checkpoint.CHECKSUMS).write_text(json.dumps(sums))


def test_uses_the_finished_adapter_by_default(run, tiny_model):
    found = open_trained("r")
    assert found.adapter.folder == run.adapter
    assert found.base == tiny_model
    assert found.note == ""
    assert found.adapter.step == 3


def test_run_without_finished_adapter_lists_its_checkpoints_or_says_how_to_finish(run):
    for folder, said in (
        (run.adapter, "no finished adapter; checkpoints: step-000003, step-00"),
        (run.checkpoints, "no checkpoint either; finish it: your_ai train --resume r"),
    ):
        shutil.rmtree(folder)
        with pytest.raises(UserError, match=said):
            open_trained("r")


def test_damaged_adapter_is_refused(run):
    flip(run.adapter / checkpoint.ADAPTERS, -1)
    with pytest.raises(UserError, match=r"its checksum is wrong.*--checkpoint step-000003"):
        open_trained("r")


@pytest.mark.parametrize("chosen", ["step-000002", "2", "000002"])
def test_checkpoint_is_chosen_by_name_or_step(run, chosen):
    adapter = open_trained("r", chosen).adapter
    assert adapter.folder == run.checkpoints / "step-000002"
    assert adapter.step == 2


def test_latest_is_the_newest_complete_checkpoint(run):
    (run.checkpoints / "step-000003" / checkpoint.ADAPTERS).write_bytes(b"")
    assert open_trained("r", "latest").adapter.folder == run.checkpoints / "step-000002"


def test_best_of_a_run_without_validation_is_an_error(run):
    with pytest.raises(UserError, match=r"--checkpoint best: runs/r recorded no validation loss"):
        open_trained("r", "best")


@pytest.mark.parametrize("chosen", ["9", "step-", "nonsense", ""])
def test_missing_checkpoint_is_reported(run, chosen):
    with pytest.raises(UserError, match="no such checkpoint; checkpoints: step-000003"):
        open_trained("r", chosen)


def test_note_mentions_a_newer_checkpoint(run):
    newer = run.checkpoints / "step-000007"
    shutil.copytree(run.checkpoints / "step-000003", newer)
    found = open_trained("r")
    assert found.adapter.folder == run.adapter
    assert "step-000007 is newer" in found.note


def test_different_base_of_the_same_shape_is_refused(run, tmp_path):
    other = make_model(tmp_path / "other", seed=5, **TINY)
    with pytest.raises(
        UserError, match=r"a different model than .*other \(model.safetensors differ"
    ):
        open_trained("r", base=str(other))


def test_same_base_in_another_folder_is_accepted(run, tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "moved")
    (tmp_path / "moved" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert open_trained("r", base=str(tmp_path / "moved")).base == tmp_path / "moved"


def test_without_recorded_files_a_base_of_another_shape_is_refused(run, tmp_path):
    other = make_model(tmp_path / "other", hidden_size=128)
    without_record(run.adapter)
    found = open_trained("r", base=str(other))
    network, _ = load_base(found.base, mx.float32)
    with pytest.raises(UserError, match=r"expected (128 x 4|4 x 128)"):
        saved_adapter.put_adapter(network, found.adapter)


def test_put_layers_changes_nothing_until_set_arrays(run):
    found = open_trained("r")
    network, _ = load_base(found.base, mx.float32)
    tokens = mx.array([[3, 1, 4, 1, 5]])
    before = network(tokens)
    saved_adapter.put_layers(network, found.adapter)
    assert mx.array_equal(network(tokens), before)
    saved_adapter.set_arrays(network, found.adapter)
    assert not mx.allclose(network(tokens), before, rtol=1e-3, atol=1e-3)


def test_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not an adapter"):
        saved_adapter.read_adapter(tmp_path)


def test_missing_base_model_is_named_in_the_error(run, tmp_path):
    config = dataclasses.replace(run.read_config(), model=str(tmp_path / "gone"))
    run.write_config(config)
    with pytest.raises(UserError, match="gone"):
        open_trained("r")


# -- adapters from other tools


def change(folder, where, **settings):
    """Change the settings of an adapter, or its lora_parameters."""
    path = folder / checkpoint.ADAPTER_CONFIG
    config = json.loads(path.read_text())
    (config if where == "config" else config["lora_parameters"]).update(settings)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("lora_parameters", "rank", 10**12), ("lora_parameters", "rank", 0),
        ("lora_parameters", "rank", 4.0), ("lora_parameters", "rank", "4"),
        ("lora_parameters", "rank", True), ("lora_parameters", "rank", None),
        ("lora_parameters", "scale", math.nan), ("lora_parameters", "scale", math.inf),
        ("lora_parameters", "scale", "2"), ("lora_parameters", "dropout", -math.inf),
        ("lora_parameters", "keys", "q_proj"), ("lora_parameters", "keys", [1]),
        ("config", "lora_parameters", [1]), ("config", "lora_parameters", None),
        ("config", "num_layers", 1.5), ("config", "num_layers", "many"),
        ("config", "num_layers", 10**30), ("config", "fine_tune_type", "half"),
        ("config", "fine_tune_type", "x\x1b" * 5000), ("config", "step", "3"),
        ("config", "step", -1),
    ],
)  # fmt: skip
def test_impossible_adapter_values_are_refused(run, where, key, value):
    change(run.adapter, where, **{key: value})
    with pytest.raises(UserError, match=key) as caught:
        saved_adapter.read_adapter(run.adapter)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "null", "{", '{"a": ' * 100 + "1" + "}" * 100]
)
def test_malformed_adapter_config_is_refused(run, text):
    (run.adapter / checkpoint.ADAPTER_CONFIG).write_text(text)
    with pytest.raises(UserError, match="its adapter cannot be read"):
        saved_adapter.read_adapter(run.adapter)


def test_arrays_that_their_header_does_not_describe_are_refused(run):
    with (run.adapter / checkpoint.ADAPTERS).open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="1 byte does not belong to a tensor"):
        saved_adapter.read_adapter(run.adapter)
