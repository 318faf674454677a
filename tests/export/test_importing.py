"""Importing adapters. These tests do not need PEFT; tests/interop imports what PEFT writes."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import pytest

from tests.conftest import call, change_json, make_model, resume, working_in
from tests.export.runs import change_config, change_parameters, logits, make_trained
from your_ai.errors import UserError
from your_ai.export import mlxlm, peft
from your_ai.export.untrained_run import import_adapter
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import checkpoint
from your_ai.run.folder import RUNS, RunFolder
from your_ai.session import run_list

Q_PROJ = "base_model.model.model.layers.2.self_attn.q_proj"


@pytest.fixture(scope="module")
def exported(tiny_model, tmp_path_factory):
    """An exported PEFT folder. Tests must not change it."""
    with working_in(tmp_path_factory.mktemp("exported")):
        trained = make_trained(tiny_model)
        target = tmp_path_factory.mktemp("peft") / "tuned"
        peft.write(trained, target)
    return target


@pytest.fixture
def source(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "tuned")


def change_arrays(source, changes, without=()):
    path = source / "adapter_model.safetensors"
    arrays = {n: a for n, a in mx.load(str(path)).items() if n not in without}
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays | changes, {"format": "pt"})


def imported(source, model, name="back"):
    import_adapter(source, str(model), name)
    return open_trained(name)


def refused(source, model, pattern):
    with pytest.raises(UserError, match=pattern) as caught:
        import_adapter(source, str(model), "back")
    assert "\n" not in str(caught.value)
    assert not RUNS.exists()


# --- The imported run


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True, "lora_targets": ("all-linear",), "lora_layers": "all"},
        {"lora_targets": ("q_proj", "mlp.up_proj"), "lora_layers": 1, "lora_rank": 3},
    ],
    ids=["lora", "dora", "some"],
)
def test_an_exported_adapter_is_imported_bit_for_bit(tiny_model, tmp_path, settings):
    trained = make_trained(tiny_model, **settings)
    peft.write(trained, tmp_path / "tuned")
    back = imported(tmp_path / "tuned", tiny_model)
    ours, theirs = trained.adapter, back.adapter
    assert ours.arrays.keys() == theirs.arrays.keys()
    assert all(mx.array_equal(a, theirs.arrays[n]) for n, a in ours.arrays.items())
    assert theirs.config["lora_parameters"] == ours.config["lora_parameters"]
    assert theirs.config["num_layers"] == ours.config["num_layers"]
    assert theirs.config["base_files"] == ours.config["base_files"]
    assert (theirs.step, theirs.kind) == (0, ours.kind)
    assert mx.array_equal(logits(back), logits(trained))


def test_an_adapter_of_only_the_first_blocks_is_imported(source, tiny_model):
    """mlx-lm counts blocks from the last one, so these layers are named by their full paths."""
    arrays = mx.load(str(source / "adapter_model.safetensors"))
    moved = {n.replace("layers.2", "layers.0"): a for n, a in arrays.items()}
    change_arrays(source, moved, without=tuple(arrays))
    change_config(source, layers_to_transform=[0, 1])
    back = imported(source, tiny_model)
    assert back.adapter.layers.keys() == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    }
    there = logits(back)
    assert not mx.allclose(there, logits(back, adapted=False), rtol=0, atol=1e-2)
    mlxlm.write(back, source.parent / "again")
    again = imported(source.parent / "again", tiny_model, "again")
    assert mx.array_equal(logits(again), there)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("all-linear",)])
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_of_an_older_mlx_lm_is_imported(tiny_model, tmp_path, targets, dora):
    """Without keys, which meant q and v; with lora_layers and use_dora. Named by its file."""
    trained = make_trained(tiny_model, use_dora=dora, lora_targets=targets)
    mlxlm.write(trained, tmp_path / "old")
    path = tmp_path / "old" / "adapter_config.json"
    config = json.loads(path.read_text())
    del config["lora_parameters"]["keys"], config["fine_tune_type"]
    old = {"lora_layers": config.pop("num_layers"), "use_dora": dora}
    path.write_text(json.dumps(config | old))
    back = imported(tmp_path / "old" / "adapters.safetensors", tiny_model)
    assert mx.array_equal(logits(back), logits(trained))


def test_a_target_that_no_layer_has_is_a_note_if_others_match(source, tiny_model):
    change_config(source, target_modules=["q_proj", "c_attn"])
    notes = []
    import_adapter(source, str(tiny_model), "back", notes.append)
    assert [note.partition(": ")[2] for note in notes] == [
        "target_modules: the model has no layer c_attn"
    ]


@pytest.mark.parametrize("dora", [False, True])
def test_layers_of_other_ranks_and_scales_give_the_same_model(tiny_model, tmp_path, dora):
    """One layer with half the rank and three times the alpha, as rank_pattern describes it."""
    trained = make_trained(tiny_model, use_dora=dora)
    peft.write(trained, tmp_path / "tuned")
    arrays = mx.load(str(tmp_path / "tuned" / "adapter_model.safetensors"))
    half = {
        f"{Q_PROJ}.lora_A.weight": arrays[f"{Q_PROJ}.lora_A.weight"][:2],
        f"{Q_PROJ}.lora_B.weight": arrays[f"{Q_PROJ}.lora_B.weight"][:, :2] / 3,
    }
    zeros = {  # the same, with the rank and alpha of the other layers
        name: mx.concatenate([a * 3 * 2, mx.zeros_like(a)], 1)
        if "lora_B" in name
        else mx.concatenate([a, mx.zeros_like(a)], 0)
        for name, a in half.items()
    }
    shutil.copytree(tmp_path / "tuned", tmp_path / "padded")
    change_arrays(tmp_path / "tuned", half)
    change_arrays(tmp_path / "padded", zeros)
    alpha = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())["lora_alpha"]
    patterns = {"rank_pattern": {"layers.2.self_attn.q_proj": 2}}
    patterns["alpha_pattern"] = {r".*\.2\..*q_proj": 3 * alpha}
    change_config(tmp_path / "tuned", **patterns)
    back = logits(imported(tmp_path / "tuned", tiny_model))
    wanted = logits(imported(tmp_path / "padded", tiny_model, "wanted"))
    assert mx.allclose(back, wanted, rtol=1e-5, atol=1e-5)
    assert not mx.allclose(back, logits(trained), atol=1e-3)


def test_half_precision_becomes_float32(source, tiny_model):
    arrays = mx.load(str(source / "adapter_model.safetensors"))
    change_arrays(source, {n: a.astype(mx.bfloat16) for n, a in arrays.items()})
    found = imported(source, tiny_model).adapter.arrays
    assert {a.dtype for a in found.values()} == {mx.float32}
    name = "model.layers.2.self_attn.q_proj.lora_a"
    halved = mx.load(str(source / "adapter_model.safetensors"))[f"{Q_PROJ}.lora_A.weight"]
    assert mx.array_equal(found[name], halved.T.astype(mx.float32))


def test_tensor_names_of_older_peft_versions_are_accepted(source, tiny_model):
    arrays = mx.load(str(source / "adapter_model.safetensors"))
    older = {n.replace(".weight", ".default.weight"): a for n, a in arrays.items()}
    change_arrays(source, older, without=tuple(arrays))
    assert len(imported(source, tiny_model).adapter.arrays) == 4


def test_the_run_gets_the_settings_of_the_adapter(source, tiny_model):
    folder = import_adapter(source, str(tiny_model), "back")
    config = folder.read_config()
    said = (config.model, config.data, config.run, config.lora_rank, config.lora_alpha)
    assert said == (str(tiny_model), "", "back", 4, 10.0)
    assert (config.lora_layers, config.lora_targets) == (2, ("self_attn.q_proj",))
    record = json.loads(folder.origin("imported").read_text())
    assert record["from"] == "tuned"
    assert sorted(record["files"]) == ["adapter_config.json", "adapter_model.safetensors"]


def test_the_base_model_is_found_by_the_name_in_the_adapter(source, tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "models" / "model")
    change_config(source, base_model_name_or_path="org/model")
    folder = import_adapter(source)
    assert folder.read_config().model == "org/model"
    assert folder.name.startswith("model-tuned-")


def test_an_mlx_folder_with_scale_zero_is_refused(tiny_model, tmp_path):
    mlxlm.write(make_trained(tiny_model), tmp_path / "tuned")
    change_parameters(tmp_path / "tuned", scale=0.0)
    with pytest.raises(UserError, match=r"adapter_config.json: --lora-alpha 0.0: must be"):
        import_adapter(tmp_path / "tuned", str(tiny_model), "back")


# --- Commands on an imported run


def test_the_list_of_runs_shows_it_as_imported(source, tiny_model):
    import_adapter(source, str(tiny_model), "back")
    (row,) = run_list.run_rows()
    assert (row.name, row.state, row.model) == ("back", "imported", str(tiny_model))
    assert run_list.prunable([row], ["imported"]) == [row]


def test_watching_an_imported_run_ends_immediately(source, tiny_model, capsys):
    import_adapter(source, str(tiny_model), "back")
    assert call("watch", "back") == 0
    said = capsys.readouterr().out
    assert "adapter: runs/back/adapter" in said
    assert "--resume" not in said


@pytest.mark.parametrize("more", [(), ("--no-supervise",)])
def test_an_imported_run_cannot_be_resumed(source, tiny_model, data_folder, capsys, more):
    folder = import_adapter(source, str(tiny_model), "back")
    before = (folder.adapter / checkpoint.ADAPTERS).read_bytes()
    given = ("--resume", "back", "--data", data_folder, "--max-steps", 1, *more)
    assert call("train", *given) == 2
    assert "was imported and cannot be resumed" in capsys.readouterr().err
    assert (folder.adapter / checkpoint.ADAPTERS).read_bytes() == before
    assert not folder.checkpoints.exists()


def test_the_training_process_refuses_an_imported_run(source, tiny_model, data_folder):
    folder = import_adapter(source, str(tiny_model), "back")
    before = (folder.adapter / checkpoint.ADAPTERS).read_bytes()
    with pytest.raises(UserError, match="was imported"):
        resume(folder, data=str(data_folder), max_steps=1)
    assert (folder.adapter / checkpoint.ADAPTERS).read_bytes() == before


def test_an_existing_run_name_is_an_error(source, tiny_model):
    import_adapter(source, str(tiny_model), "back")
    with pytest.raises(UserError, match=r"--run back: .* exists; choose another name$"):
        import_adapter(source, str(tiny_model), "back")


def test_a_full_disk_leaves_no_run(source, tiny_model, monkeypatch):
    def full(*_):
        raise RuntimeError("[write] Unable to write 4096 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", full)
    refused(
        source, tiny_model, r"runs/back: cannot be written .*free some disk space, then try again$"
    )


# --- Adapters that cannot be imported


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"r": 8}, r"adapter_model.safetensors: .*lora_[AB].weight is .*, but r is 8"),
        ({"target_modules": ["q_proj", "v_proj"]}, r"no tensors for .*v_proj, which target_mod"),
        ({"layers_to_transform": [2]}, r"tensors for .*layers.1.*does not name"),
        ({"use_dora": True}, r"adapter_model.safetensors: .*q_proj.m is missing"),
        ({"rank_pattern": {"q_proj": 8}}, r"lora_[AB].weight is .*, but r is 8"),
    ],
)
def test_settings_that_contradict_the_tensors_are_errors(source, tiny_model, settings, pattern):
    change_config(source, **settings)
    refused(source, tiny_model, pattern)


@pytest.mark.parametrize(
    ("name", "array", "pattern"),
    [
        (f"{Q_PROJ}.lora_A.weight", mx.zeros((4, 64)), "lora_a is 64 x 4, expected 32 x 4"),
        (f"{Q_PROJ}.lora_A.weight", mx.zeros((4,)), "lora_A.weight is 4, not a matrix"),
        (f"{Q_PROJ}.lora_A.weight", mx.full((4, 32), mx.nan), "lora_a contains NaN"),
        (f"{Q_PROJ}.lora_B.weight", mx.full((32, 4), mx.inf), "lora_b contains NaN or infinity"),
        (f"{Q_PROJ}.lora_A.weight", mx.zeros((4, 32), mx.int32), "not a floating-point dtype"),
        (f"{Q_PROJ}.lora_magnitude_vector", mx.ones((32,)), "but use_dora is not set"),
        (f"{Q_PROJ}.lora_E", mx.ones((4, 1)), "which is not a LoRA or DoRA tensor"),
        (f"{Q_PROJ}.base_layer.weight", mx.ones((32, 32)), "save_embedding_layers=False"),
        ("base_model.model.lm_head.weight", mx.ones((768, 32)), "a weight of the base model"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", mx.ones((4, 768)),
         "embed_tokens, which target_modules does not name"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", mx.ones((4, 32)),
         "layers.7.self_attn.q_proj, a layer that the model does not have"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_errors(source, tiny_model, name, array, pattern):
    change_arrays(source, {name: array})
    refused(source, tiny_model, rf"^{source}/adapter_model.safetensors: .*{pattern}")


def test_a_missing_tensor_or_file_is_an_error(source, tiny_model):
    change_arrays(source, {}, without=(f"{Q_PROJ}.lora_B.weight",))
    refused(source, tiny_model, r"adapter_model.safetensors: .*q_proj.lora_b is missing")
    (source / "adapter_model.safetensors").unlink()
    refused(source, tiny_model, r"adapter_model.safetensors: is missing")
    (source / "adapter_config.json").unlink()
    refused(source, tiny_model, r"adapter_config.json: is missing")


def test_a_pickle_is_not_loaded(source, tiny_model):
    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    refused(
        source, tiny_model, r"adapter_model.bin: is a pickle file, which is not safe .*safetensors"
    )


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_truncated_file_is_an_error(source, tiny_model, name):
    content = (source / name).read_bytes()
    (source / name).write_bytes(content[: len(content) // 2])
    refused(source, tiny_model, rf"{name}: .*(cut short|JSON)")


def test_a_folder_of_an_unknown_tool_is_an_error(source, tiny_model):
    (source / "adapter_config.json").write_text("{}")
    refused(source, tiny_model, "is not a PEFT or mlx-lm adapter config")


def test_an_architecture_with_unknown_layer_names_is_refused(source, tmp_path):
    other = make_model(tmp_path / "other", "qwen2-tied")
    change_json(other, "config.json", model_type="gemma")
    refused(source, other, r"architecture gemma is not supported")


@pytest.mark.parametrize(
    ("base", "pattern"),
    [
        (None, "does not name its base model; give it with --model"),
        ("org/model", "its base model org/model is not on this machine; run: your_ai download"),
        ("/nowhere/at/all", "its base model /nowhere/at/all: no such folder; give .* --model"),
    ],
)
def test_a_base_model_that_cannot_be_found_is_an_error(source, base, pattern):
    change_config(source, base_model_name_or_path=base)
    with pytest.raises(UserError, match=pattern):
        import_adapter(source)
    assert not RUNS.exists()


def test_an_interrupted_import_leaves_no_run(source, tiny_model, monkeypatch):
    def killed(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        import_adapter(source, str(tiny_model), "back")
    assert not RunFolder(RUNS / "back").path.exists()
    assert not RUNS.exists()
