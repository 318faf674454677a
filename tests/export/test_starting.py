"""--from: which adapters a run can start from, and what it takes over from them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from tests.conftest import DEMO_FOLDER, make_model, write_rows
from tests.export.runs import change_config, make_run, make_trained
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.export import mlxlm, peft
from your_ai.nets.saved_adapter import read_adapter
from your_ai.run import checkpoint
from your_ai.session import new_run


def started(source, **flags):
    """A new run from `source`, and the adapter in its start/."""
    flags = {"from_adapter": str(source), "data": "d", "run": "new", **flags}
    run = new_run.create(new_run.resolve(flags, None))
    return run, read_adapter(run.start)


def refused(source, pattern, **flags):
    with pytest.raises(UserError, match=pattern) as caught:
        started(source, **flags)
    assert "\n" not in str(caught.value)
    assert not Path("runs/new").exists()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        mx.array_equal(a, theirs[n]) for n, a in ours.items()
    )


def by_run(trained):
    return "r"


def by_run_folder(trained):
    return trained.folder.path


def by_adapter_folder(trained):
    return trained.adapter.folder


def by_checkpoint_of_mlx_lm(trained):
    file = Path("tuned/0000100_adapters.safetensors")
    mlxlm.write(trained, file.parent)
    shutil.move(file.parent / "adapters.safetensors", file)
    return file


def by_peft_folder(trained):
    peft.write(trained, Path("tuned"))
    return "tuned"


def by_peft_file(trained):
    return Path(by_peft_folder(trained), "adapter_model.safetensors")


def by_pushed_folder(trained):
    """It has the settings of the run, but is not a run."""
    mlxlm.write(trained, Path("tuned"))
    shutil.copy(trained.folder.config, "tuned/config.yaml")
    return "tuned"


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(
    "named",
    [by_run, by_run_folder, by_adapter_folder, by_checkpoint_of_mlx_lm, by_peft_folder,
     by_peft_file, by_pushed_folder],
)  # fmt: skip
def test_each_form_of_an_adapter_gives_the_same_start(tiny_model, named, use_dora):
    trained = make_trained(tiny_model, lora_targets=("q_proj", "up_proj"), use_dora=use_dora)
    run, start = started(named(trained), model=str(tiny_model))
    assert same(start.arrays, trained.adapter.arrays)
    config = run.read_config()
    assert (config.lora_rank, config.lora_alpha, config.lora_layers) == (4, 10.0, 2)
    assert config.lora_targets == ("mlp.up_proj", "self_attn.q_proj")
    assert config.use_dora == use_dora
    assert start.config["base_files"] == trained.adapter.config["base_files"]


def test_run_starts_from_the_base_of_its_adapter(tiny_model):
    make_run(tiny_model)
    assert started("r")[0].read_config().model == str(tiny_model)


def test_source_is_recorded_so_that_it_means_the_same_elsewhere(tiny_model):
    trained = make_trained(tiny_model)
    assert started("r")[0].read_config().from_adapter == "r"
    run, _ = started("runs/r/adapter", run="second")
    assert run.read_config().from_adapter == str(trained.adapter.folder.resolve())


def test_dropout_is_the_users_choice(tiny_model):
    make_run(tiny_model, lora_dropout=0.2)
    assert started("r")[0].read_config().lora_dropout == 0.0
    assert started("r", run="second", lora_dropout="0.3")[0].read_config().lora_dropout == 0.3


def test_rank_stabilized_scale_of_peft_becomes_alpha(tiny_model):
    peft.write(make_trained(tiny_model), Path("tuned"))
    change_config(Path("tuned"), use_rslora=True, lora_alpha=8)
    config = started("tuned", model=str(tiny_model))[0].read_config()
    assert config.lora_alpha == pytest.approx(8 / 4**0.5 * 4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_becomes_float32(tiny_model, dtype):
    trained = make_trained(tiny_model)
    mlxlm.write(trained, Path("tuned"))
    halves = {name: array.astype(dtype) for name, array in trained.adapter.arrays.items()}
    mx.save_safetensors("tuned/adapters.safetensors", halves)
    _, start = started("tuned", model=str(tiny_model))
    assert same(start.arrays, {name: array.astype(mx.float32) for name, array in halves.items()})
    assert {array.dtype for array in start.arrays.values()} == {mx.float32}


def test_adapter_of_experts_is_a_start(tmp_path):
    base = make_model(tmp_path / "moe", "qwen3_moe")
    trained = make_trained(base, lora_targets=("q_proj", "switch_mlp.up_proj"))
    assert same(started("r")[1].arrays, trained.adapter.arrays)


@pytest.mark.parametrize("count", [-1, 0, 16])
def test_num_layers_of_mlx_lm_may_mean_all_blocks(tiny_model, count):
    mlxlm.write(make_trained(tiny_model, lora_layers="all"), Path("tuned"))
    change_config(Path("tuned"), num_layers=count)
    assert started("tuned", model=str(tiny_model))[0].read_config().lora_layers == 3


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ({"lora_rank": "8"}, r"^--lora-rank 8: the adapter of --from r has 4; leave the setting"),
        ({"lora_alpha": "8"}, r"^--lora-alpha 8.0: .* has 10.0;"),
        ({"lora_layers": "1"}, r"^--lora-layers 1: .* has 2;"),
        ({"lora_targets": "v_proj"}, r"^--lora-targets v_proj: .* has self_attn.q_proj;"),
        ({"use_dora": True}, r"^--use-dora on: .* has off;"),
        ({"lora_layers": "all"}, r"^--from r: has nothing for model.layers.0.self_attn.q_proj, w"),
        ({"lora_targets": "all-linear"}, r"^--from r: has nothing for model.layers.1.mlp.down"),
    ],
)  # fmt: skip
def test_settings_that_contradict_the_adapter_are_refused(tiny_model, flags, pattern):
    make_run(tiny_model)
    refused("r", pattern, **flags)


@pytest.mark.parametrize("flags", [{"lora_targets": "q_proj"}, {"lora_alpha": "10"},
                                   {"lora_layers": "2"}])  # fmt: skip
def test_settings_that_agree_with_the_adapter_are_kept(tiny_model, flags):
    trained = make_trained(tiny_model)
    assert same(started("r", **flags)[1].arrays, trained.adapter.arrays)


def test_adapter_of_a_model_of_other_shapes_is_refused(tiny_model, tmp_path):
    mlxlm.write(make_trained(tiny_model), Path("tuned"))
    change_config(Path("tuned"), base_files=None)
    wide = make_model(tmp_path / "wide", hidden_size=96, head_dim=24)
    refused("tuned", r"lora_a is 32 x 4, expected 96 x 4; is it for another", model=str(wide))
    flat = make_model(tmp_path / "flat", num_hidden_layers=1)
    refused("tuned", r"--from .*tuned: --lora-layers 2: the model has 1 block", model=str(flat))
    deep = make_model(tmp_path / "deep", num_hidden_layers=4)
    refused(
        "tuned", r"--from .*tuned: adapts model.layers.1.self_attn.q_proj, and", model=str(deep)
    )


def test_adapter_of_another_model_of_the_same_shape_is_refused(tiny_model, tmp_path):
    make_run(tiny_model)
    other = make_model(tmp_path / "other", seed=5)
    refused("r", "was trained on a different model than .*other", model=str(other))


def set_arrays(change):
    path = Path("tuned/adapters.safetensors")
    arrays = mx.load(str(path))
    mx.eval(arrays)
    mx.save_safetensors(str(path), change(arrays))


Q_PROJ = "model.layers.2.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda a: {**a, f"{Q_PROJ}.lora_a": mx.full((32, 4), mx.nan)}, "contains NaN or infinity"),
        (lambda a: {**a, f"{Q_PROJ}.lora_a": mx.zeros((32, 4), mx.int8)}, "not a floating-point"),
        (lambda a: {**a, f"{Q_PROJ}.lora_a": mx.zeros((32, 3))}, "has rank 3, but .* says 4"),
        (lambda a: {n: x for n, x in a.items() if n != f"{Q_PROJ}.lora_b"}, "has lora_a, but need"),
        (lambda a: {n: x for n, x in a.items() if "layers.2" not in n},
         "has nothing for model.layers.2.self_attn.q_proj, which the settings adapt; training ad"),
        (lambda a: {n.replace(Q_PROJ, "lm_head"): x for n, x in a.items()},
         "adapts lm_head, which is outside of the model's blocks"),
    ],
    ids=["nan", "integers", "ranks", "half a layer", "unlike blocks", "head"],
)  # fmt: skip
def test_adapter_that_cannot_be_trained_is_refused(tiny_model, change, pattern):
    mlxlm.write(make_trained(tiny_model), Path("tuned"))
    set_arrays(change)
    refused("tuned", pattern, model=str(tiny_model))


def test_damaged_adapter_of_a_run_is_refused(tiny_model):
    trained = make_trained(tiny_model)
    path = trained.adapter.folder / checkpoint.ADAPTERS
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    refused(trained.adapter.folder, "adapters.safetensors: its checksum is wrong; use another")
    refused("r", r"its adapter is damaged .*its checksum is wrong")


def test_run_without_a_finished_adapter_offers_the_folders_of_its_checkpoints(tiny_model):
    trained = make_trained(tiny_model)
    place = trained.folder.checkpoints / "step-000003"
    shutil.copytree(trained.adapter.folder, place)
    shutil.rmtree(trained.adapter.folder)
    refused(
        "r", r"no finished adapter; checkpoints: step-000003; give one as runs/r/checkpoints/st"
    )
    assert same(started(place)[1].arrays, trained.adapter.arrays | read_adapter(place).arrays)


def test_unknown_source_is_refused(tiny_model):
    make_run(tiny_model, "first")
    refused("frist", r"^--from frist: no such run or folder: .*/frist; did you mean first\?")
    refused(".", r"adapter_config.json: is missing")


def test_adapter_that_names_no_model_needs_one(tiny_model):
    trained = make_trained(tiny_model)
    mlxlm.write(trained, Path("tuned"))  # without the path of its local base
    refused("tuned", "does not name its base model; give it with --model")
    change_config(Path("tuned"), model="/no/where")
    refused("tuned", "its base model /no/where: no such folder; give the model with --model")


def test_base_that_can_be_downloaded_is_left_to_the_download(tiny_model):
    mlxlm.write(make_trained(tiny_model), Path("tuned"))
    change_config(Path("tuned"), model="mlx-community/some-model")
    flags = {"from_adapter": "tuned", "data": "d"}
    assert new_run.resolve(flags, None).model == "mlx-community/some-model"


def test_demo_is_the_data_only_for_an_adapter_of_the_demo(tiny_model):
    make_run(tiny_model)
    with pytest.raises(UserError, match="--data is missing"):
        new_run.resolve({"from_adapter": "r"}, None)
    make_run(DEMO_FOLDER, "d", model="demo", lora_rank=2)
    config = new_run.resolve({"from_adapter": "d"}, None)
    assert (config.model, config.data, config.lora_rank) == ("demo", "demo", 2)


def test_defaults_of_a_python_config_do_not_contradict(tiny_model):
    from your_ai.api import _settings

    make_run(tiny_model)
    config, _ = _settings(TrainConfig(data="d", from_adapter="r"), {})
    assert (config.lora_rank, config.model) == (4, str(tiny_model))
    with pytest.raises(UserError, match="--lora-rank 8"):
        _settings(dataclasses.replace(config, lora_rank=8), {})


def test_file_of_mlx_lm_may_name_the_adapter_to_resume(tiny_model):
    trained = make_trained(tiny_model)
    mlxlm.write(trained, Path("tuned"))
    write_rows(Path("chats/train.jsonl"), [{"text": "a"}])
    file = f"model: {tiny_model}\ndata: chats\nnum_layers: 2\niters: 3\n"
    file += "resume_adapter_file: tuned/adapters.safetensors\n"
    parameters = "lora_parameters: {rank: %d, scale: 2.5, dropout: 0.0, keys: [self_attn.q_proj]}"
    Path("c.yaml").write_text(file + parameters % 4)
    run = new_run.create(new_run.resolve({"run": "new"}, "c.yaml"))
    assert same(read_adapter(run.start).arrays, trained.adapter.arrays)
    Path("c.yaml").write_text(file + parameters % 8)
    with pytest.raises(
        UserError, match=r"^--lora-rank 8: the adapter of --from tuned/adapters.saf"
    ):
        new_run.resolve({}, "c.yaml")
