"""The LoRA-only reload: what it reads, its peak memory, and that nothing else changes."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.conftest import TINY, chat, events_of, losses_of, make_model, resume, train, write_rows
from tests.engine.test_compiled import short_batches
from tests.engine.test_fused import prepared, step_of
from tests.fault.processes import final_files
from your_ai.data.batches import Batch
from your_ai.engine.prefix import MemoryStore
from your_ai.engine.protocol import Engine
from your_ai.engine.reload import reload_adapted
from your_ai.engine.weights import FileTensor, tensors_of
from your_ai.errors import RunError
from your_ai.nets import model
from your_ai.run import events, folder
from your_ai.run.folder import RunFolder
from your_ai.training import train as recipe

pytestmark = pytest.mark.memory

PLANS = ("fused", "staged", "streamed")


class Loaded(NamedTuple):
    network: nn.Module
    engine: Engine
    tensors: dict[str, FileTensor]
    batches: list[Batch]


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Loaded]:
    """Makes a model with adapters and the engine of a plan, as in a run."""

    def make(path: Path, plan: str, cached: bool = False, **settings: Any) -> Loaded:
        return loaded_with(tmp_path, path, plan, cached, **settings)

    return make


def loaded_with(place: Path, path: Path, plan: str, cached: bool, **settings: Any) -> Loaded:
    """place: where rows are written. path: of the model."""
    make_store = (lambda _: MemoryStore()) if cached else None
    made = prepared(path, plan, settings, make_store=make_store)
    return Loaded(made.network, made.engine, made.tensors, short_batches(made.tokenizer, place))


def step(loaded: Loaded) -> tuple[float, dict[str, mx.array]]:
    return step_of(loaded.engine, loaded.batches, 3)


def frozen_below(network: nn.Module) -> dict[str, mx.array]:
    """The arrays that a reload reads, by path."""
    return {
        f"{name}.linear.{path}": array
        for name, layer in network.named_modules()
        if "lora_a" in layer
        for path, array in tree_flatten(layer.linear.parameters())
    }


def bytes_of(arrays: dict[str, mx.array]) -> int:
    return sum(array.nbytes for array in arrays.values())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are read from now on."""
    found: list[str] = []

    def spied(name: str) -> None:
        whole = getattr(FileTensor, name)
        monkeypatch.setattr(
            FileTensor, name, lambda self, *args: found.append(self.name) or whole(self, *args)
        )

    spied("rows")
    spied("gather")
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Path]:
    """Models by number of bits."""
    place = tmp_path_factory.mktemp("models")
    return {bits: make_model(place / f"bits-{bits}", bits=bits, **TINY) for bits in (4, None)}


# -- the function


@pytest.mark.parametrize(
    ("bits", "dora", "plan"),
    [
        *((4, False, "fused"), (None, True, "fused")),
        *((4, True, "staged"), (None, False, "staged")),
        *((4, True, "streamed"), (None, False, "streamed")),
    ],
)
def test_step_after_reload_is_bit_identical(models, loaded, bits, dora, plan):
    made = loaded(models[bits], plan, use_dora=dora, lora_dropout=0.1)
    loss, grads = step(made)
    for drop in (False, True):  # a reload is also exact if compiled functions are kept
        if drop:
            made.engine.drop()
        reload_adapted(made.network, made.tensors)
        again, grads_again = step(made)
        assert again == loss
        assert grads_again.keys() == grads.keys()
        for name, grad in grads.items():
            assert mx.array_equal(grad, grads_again[name]), name


@pytest.mark.parametrize("plan", ["fused", "staged"])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("bits", [4, None])
def test_reload_reads_exactly_the_frozen_arrays_of_adapted_layers(models, loaded, bits, dora, plan):
    made = loaded(models[bits], plan, use_dora=dora)
    before = frozen_below(made.network)
    assert reload_adapted(made.network, made.tensors) == bytes_of(before)
    after = frozen_below(made.network)
    for name, array in before.items():
        assert after[name] is not array
        assert after[name].dtype == array.dtype
        assert mx.array_equal(after[name], array), name


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("targets", [("q_proj",), ("v_proj", "down_proj"), ("all-linear",)])
def test_reload_reads_only_target_layers_of_adapted_blocks(models, loaded, reads, targets, plan):
    made = loaded(models[4], plan, lora_layers=2, lora_targets=targets)
    wanted = {name.replace(".linear.", ".") for name in frozen_below(made.network)}
    reads.clear()
    reload_adapted(made.network, made.tensors)
    assert sorted(reads) == ([] if plan == "streamed" else sorted(wanted))
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in wanted)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_reload_does_not_touch_adapter_arrays(models, loaded, dora):
    made = loaded(models[4], "fused", use_dora=dora)
    before = model.adapter_arrays(made.network)
    reload_adapted(made.network, made.tensors)
    after = model.adapter_arrays(made.network)
    assert all(after[name] is array for name, array in before.items())


@pytest.mark.compiled
@pytest.mark.parametrize("plan", PLANS)
def test_memory_does_not_grow_after_reload(models, loaded, plan):
    made = loaded(models[None], plan, lora_layers="all")
    step(made)
    gc.collect()
    before = mx.get_active_memory()
    read = reload_adapted(made.network, made.tensors)
    assert (read == 0) == (plan == "streamed")
    assert mx.get_active_memory() <= before


def test_peak_memory_grows_by_at_most_one_tensor(tmp_path, loaded):
    made = loaded(
        make_model(tmp_path / "wide", bits=None, hidden_size=512, intermediate_size=1024),
        "fused",
        lora_layers="all",
    )
    mx.eval(made.network.parameters())
    largest = max(array.nbytes for array in frozen_below(made.network).values())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read = reload_adapted(made.network, made.tensors)
    assert read > 5 * largest
    assert mx.get_peak_memory() <= before + largest


def test_old_arrays_are_freed_before_new_ones_are_read(models, loaded, monkeypatch):
    """At each read, memory is below the start, because the old array is already freed."""
    made = loaded(models[4], "fused")
    mx.eval(made.network.parameters())
    before = mx.get_active_memory()
    held: list[int] = []
    rows = FileTensor.rows

    def spied(self: FileTensor, start: int, stop: int) -> mx.array:
        held.append(mx.get_active_memory())
        return rows(self, start, stop)

    monkeypatch.setattr(FileTensor, "rows", spied)
    reload_adapted(made.network, made.tensors)
    assert held
    assert max(held) < before


@pytest.mark.parametrize("tensors", [None, {}])
def test_without_files_nothing_is_read_or_freed(models, loaded, tensors):
    made = loaded(models[4], "fused")
    before = frozen_below(made.network)
    assert reload_adapted(made.network, tensors) == 0
    after = frozen_below(made.network)
    assert all(after[name] is array for name, array in before.items())


def test_reloaded_floats_are_cast_to_the_model_dtype(models, tmp_path):
    network, _ = model.load_network(models[4], mx.bfloat16)
    tensors = tensors_of(network, models[4])
    model.add_adapters(network, model.TrainConfig(lora_layers=1))
    before = frozen_below(network)
    assert reload_adapted(network, tensors) == bytes_of(before)
    for name, array in frozen_below(network).items():
        assert array.dtype == before[name].dtype
        assert mx.array_equal(array, before[name])


# -- whole runs


@pytest.fixture
def quick(configure, data_folder) -> Callable[..., Any]:
    """Makes a config for a few short steps without validation."""
    (data_folder / "valid.jsonl").unlink()
    write_rows(data_folder / "train.jsonl", [chat(f"Ask {i}", "Yes") for i in range(8)])
    first = {"max_steps": 5, "lora_targets": ("q_proj", "up_proj"), "lora_dropout": 0.1}

    def make(**settings: Any) -> Any:
        return configure(**{**first, **settings})

    return make


def reloads_of(run: RunFolder) -> list[events.Action]:
    return [a for a in events_of(run, events.Action) if a.kind == "reload_lora"]


def adapted_bytes(path: Path, targets: tuple[str, ...] = (), first_block: int = 1) -> int:
    """Bytes of these layers in the model's file, or of all, from block `first_block`."""
    arrays = mx.load(str(path / "model.safetensors"))
    parts = {name: name.split(".") for name in arrays}
    return sum(
        arrays[name].nbytes
        for name, part in parts.items()
        if part[1] == "layers" and int(part[2]) >= first_block and part[-2] in (targets or part)
    )


@pytest.mark.parametrize(
    ("bits", "dora", "plan"),
    [(4, False, "fused"), (None, True, "fused"), (4, True, "staged"), (None, False, "streamed")],
)
def test_run_with_reloads_equals_run_without(quick, models, bits, dora, plan):
    settings = {"model": str(models[bits]), "plan": plan, "use_dora": dora}
    plain = train(quick(run="plain", reload_interval=0, **settings))
    run = train(quick(run="reloading", reload_interval=2, **settings))
    assert losses_of(run) == losses_of(plain)
    assert final_files(run) == final_files(plain)
    assert reloads_of(plain) == []
    # Streamed: the 2 of 3 blocks that stay in memory, each as a whole.
    targets = () if plan == "streamed" else ("q_proj", "up_proj")
    expected = adapted_bytes(models[bits], targets)
    assert [(a.step, a.read_bytes) for a in reloads_of(run)] == [(2, expected), (4, expected)]
    assert {a.cause for a in reloads_of(run)} == {"every 2 steps"}


@pytest.mark.parametrize(
    ("bits", "settings", "reloads"),
    [
        (None, {"plan": "staged", "quantize": 4, "reload_interval": 2}, 2),  # of its copy
        (4, {"prefix_cache": "memory", "lora_layers": 1, "reload_interval": 2}, 2),
        (4, {"prefix_cache": "disk", "lora_layers": 1, "reload_interval": 2}, 2),
        # A change of the moments would only show in later steps, so steps follow the reload.
        (4, {"optimizer": "adamw", "reload_interval": 1, "max_steps": 8}, 8),
    ],
)
def test_reloads_do_not_change_other_parts_of_a_run(quick, models, bits, settings, reloads):
    settings = {"model": str(models[bits]), **settings}
    plain = train(quick(run="plain", **{**settings, "reload_interval": 0}))
    run = train(quick(run="reloading", **settings))
    assert losses_of(run) == losses_of(plain)
    assert final_files(run) == final_files(plain)
    read = [action.read_bytes for action in reloads_of(run)]
    assert len(read) == reloads
    assert min(read) > 0


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 3)


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", bits=4, **TINY)


@pytest.fixture
def spoilt(own_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Makes a function that damages the model's file after the first step."""
    file = own_model / "model.safetensors"
    content = file.read_bytes()

    def let(spoil: Callable[[Path], None]) -> Callable[[], None]:
        calls = itertools.count(1)
        train_step = recipe.train_step

        def spoilt_step(*args: Any) -> Any:
            if next(calls) == 2:
                spoil(file)
            return train_step(*args)

        monkeypatch.setattr(recipe, "train_step", spoilt_step)
        return lambda: file.write_bytes(content)

    yield let
    file.write_bytes(content)


@pytest.mark.parametrize(("spoil", "save_every"), [(Path.unlink, 1), (cut, 1), (Path.unlink, 100)])
def test_missing_file_ends_the_run_in_one_line_and_loses_no_step(
    quick, own_model, spoilt, spoil, save_every
):
    """The finished steps are still in memory and are saved before the run ends."""
    settings = {"model": str(own_model), "plan": "fused", "reload_interval": 3}
    settings["save_every"] = save_every
    whole = train(quick(run="whole", **settings))
    put_back = spoilt(spoil)
    run = folder.create(quick(**settings))
    with pytest.raises(RunError, match="then resume the run") as caught:
        resume(run)
    assert "\n" not in str(caught.value)
    assert str(own_model / "model.safetensors") in str(caught.value)
    put_back()
    assert resume(run) == 0
    assert losses_of(run) == losses_of(whole)
    assert final_files(run) == final_files(whole)
    assert [event.step for event in events_of(run, events.Step)] == [1, 2, 3, 4, 5]
