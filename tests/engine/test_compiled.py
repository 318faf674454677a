"""The cache of compiled graphs, and engines that drop their graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from tests.conftest import TINY, chat, make_model, write_rows
from tests.engine.test_fused import load, prepared, relative_error
from tests.kernels import fuse
from your_ai.data.batches import Batch, make_schedule
from your_ai.data.encode import Encoder
from your_ai.data.examples import load_examples
from your_ai.engine import mlp, programs
from your_ai.engine.build import build_engine
from your_ai.engine.compiled import Graphs, GraphShape
from your_ai.engine.prefix import MemoryStore
from your_ai.engine.protocol import Engine
from your_ai.memory import facts
from your_ai.memory.workload import Kept

KERNELS = True  # which are what is tested
PLANS = [("fused", False), ("fused", True), ("staged", True), ("streamed", False)]  # and cached
NUMBERS = 1_000_000


@pytest.fixture(autouse=True)
def awake() -> None:
    """Evaluate something first: before the first evaluation, MLX compiles functions twice."""
    mx.eval(mx.zeros(1))


@pytest.fixture
def without_kernels() -> Iterator[None]:
    """Trace graphs without fusing their operations."""
    fuse(False)
    yield
    fuse(KERNELS)


SHAPES = [GraphShape(1, tokens) for tokens in (32, 64, 96)]


def made_in(graphs: Graphs, shape: GraphShape, key: str = "a") -> bool:
    """Whether the cache makes a new graph instead of returning a cached one."""
    made: list[str] = []
    assert graphs.get(shape, key, lambda: made.append(key) or key) == key
    return bool(made)


def test_each_graph_is_made_once_per_shape():
    graphs = Graphs()
    assert [made_in(graphs, shape) for shape in SHAPES * 2] == [True] * 3 + [False] * 3
    assert made_in(graphs, SHAPES[0], "b")
    assert not made_in(graphs, SHAPES[0], "b")


def test_dropped_graphs_are_made_again():
    graphs = Graphs()
    graphs.drop()
    assert made_in(graphs, SHAPES[0])
    graphs.drop()
    graphs.drop()
    assert made_in(graphs, SHAPES[0])


def test_evicts_the_least_recently_used_shape_first():
    graphs = Graphs(lambda shape: 10, room_bytes=20)
    for shape in (*SHAPES[:2], SHAPES[0], SHAPES[2]):
        made_in(graphs, shape)
    assert [made_in(graphs, shape) for shape in (SHAPES[0], SHAPES[2], SHAPES[1])] == [
        False,
        False,
        True,
    ]


@pytest.mark.memory
@given(st.lists(st.integers(1, 9), max_size=40), st.integers(0, 30))
def test_total_size_stays_within_the_limit(tokens, room):
    graphs = Graphs(lambda shape: shape.tokens, room)
    held: list[int] = []
    for count in tokens:
        fresh = made_in(graphs, GraphShape(1, count))
        assert fresh == (count not in held)
        held = [other for other in held if other != count] + [count]
        while sum(held) > room and fresh and len(held) > 1:
            held.pop(0)
        assert len(graphs) == len(held)


@pytest.mark.compiled
@pytest.mark.memory
def test_drop_frees_arrays_captured_by_a_graph():
    """An array that is not an input becomes a constant of the graph and lives as long."""
    held = {"constant": mx.ones(NUMBERS)}
    mx.eval(held)
    before = mx.get_active_memory()
    graphs = Graphs()
    compiled = graphs.get(
        SHAPES[0], "f", lambda: mx.compile(lambda x: (x + held["constant"]).sum())
    )
    compiled(mx.array(1.0)).item()
    held.clear()
    assert mx.get_active_memory() >= before
    del compiled
    graphs.drop()
    assert mx.get_active_memory() <= before - 4 * NUMBERS


# -- engines


class Made(NamedTuple):
    engine: Engine
    batches: list[Batch]


@pytest.fixture
def made(tiny_model: Path, tmp_path: Path) -> Callable[..., Made]:
    def make(plan: str, cached: bool, architecture: str = "", **settings: Any) -> Made:
        folder = tmp_path / architecture if architecture else tiny_model
        if not folder.exists():
            make_model(folder, architecture, **TINY)
        make_store = (lambda _: MemoryStore()) if cached else None
        found = prepared(folder, plan, settings, make_store=make_store)
        return Made(found.engine, short_batches(found.tokenizer, tmp_path))

    return make


def short_batches(tokenizer: Any, folder: Path) -> list[Batch]:
    """Two batches of different lengths."""
    rows = [chat("Ask", "Yes"), chat("Ask" + " and ask" * 12, "No", weight=2.5)]
    path = write_rows(folder / "short.jsonl", rows)
    examples = load_examples(path, Encoder(tokenizer), "tokenizer", 256, "error", folder / "cache")
    batches = make_schedule(examples, 1, 2, seed=0).batches_of(0)
    assert len({batch.tokens.shape for batch in batches}) == 2
    return batches


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Weak references to all functions compiled from now on."""
    found: list[weakref.ref] = []
    compile = mx.compile

    class Watched:
        def __init__(self, function: Callable, **options: Any) -> None:
            self.compiled = compile(function, **options)

        def __call__(self, *args: Any) -> Any:
            return self.compiled(*args)

    def watched(function: Callable, **options: Any) -> Watched:
        result = Watched(function, **options)
        found.append(weakref.ref(result))
        return result

    monkeypatch.setattr(mx, "compile", watched)
    return found


def everything(made: Made) -> list[mx.array]:
    """All results of an engine for its batches."""
    found: list[mx.array] = []
    for batch in made.batches:
        sums, grads = made.engine.gradients(batch, 0.5, 3)
        found += [sums.loss, *(grad for _, grad in sorted(tree_flatten(grads)))]
        found += [made.engine.loss(batch).loss, made.engine.predictions(batch)]
        mx.eval(found)
    return found


@pytest.mark.parametrize(("plan", "cached"), PLANS)
def test_results_are_bit_identical_after_compiling_again(made, plan, cached):
    engine = made(plan, cached, lora_dropout=0.2)
    first = everything(engine)
    engine.engine.drop()
    for before, after in zip(first, everything(engine), strict=True):
        assert mx.array_equal(before, after)


@pytest.mark.parametrize(
    ("plan", "cached", "architecture", "settings"),
    [
        *((*plan, "", {"lora_dropout": 0.2}) for plan in PLANS),
        ("fused", False, "gemma2", {"use_dora": True}),
        ("staged", False, "gemma2", {"use_dora": True}),
    ],
)
def test_fused_kernels_compute_what_their_operations_do(
    request, made, plan, cached, architecture, settings
):
    """So what tests find without kernels, as test_plans.py, holds with them."""
    found = everything(made(plan, cached, architecture, **settings))
    request.getfixturevalue("without_kernels")
    wanted = everything(made(plan, cached, architecture, **settings))
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize(("plan", "cached"), PLANS)
def test_drop_frees_every_compiled_function_of_an_engine(made, compilations, plan, cached):
    engine = made(plan, cached)
    everything(engine)
    alive = [reference for reference in compilations if reference() is not None]
    assert alive
    engine.engine.drop()
    gc.collect()
    assert [reference for reference in alive if reference() is not None] == []


@pytest.mark.parametrize("where", [programs, mlp])
@pytest.mark.parametrize("plan", ["staged", "streamed"])
def test_drop_frees_the_block_templates_of_programs(
    made, without_kernels, monkeypatch, plan, where
):
    """A template that keeps traced arrays would form a cycle with its graph, never freed."""
    monkeypatch.setattr(facts, "FEWEST_FEATURES", 64)
    monkeypatch.setattr(facts, "SLICE_STEP", 64)
    templates: list[weakref.ref] = []
    skeleton = where.skeleton

    def watched(block: Any) -> Any:
        twin = skeleton(block)
        templates.append(weakref.ref(twin))
        return twin

    monkeypatch.setattr(where, "skeleton", watched)
    engine = made(plan, False, "gemma3_text", lora_targets=("all-linear",))
    everything(engine)
    assert templates
    engine.engine.drop()
    gc.collect()
    assert [template for template in templates if template() is not None] == []


@pytest.mark.memory
@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("kept", [Kept(), Kept(attention=1), Kept(linear=1, attention=1)])
def test_adapters_that_were_replaced_are_freed(tiny_model, tmp_path, monkeypatch, kept, compiles):
    """A program that was made but never ran would keep those that it was made with."""
    if not compiles:
        monkeypatch.setattr(Graphs, "compile", lambda self, function, inputs=None: function)
    settings = {"lora_layers": 1, "lora_rank": 64, "lora_targets": ("all-linear",)}
    network, tokenizer, adapters = load(tiny_model, **settings)
    engine = build_engine(network, adapters.dropout_keys, "staged", kept=kept).engine
    batch = short_batches(tokenizer, tmp_path)[0]

    def held(offset: float) -> int:
        new = tree_map(lambda p: p + offset, network.trainable_parameters())
        mx.eval(new)
        network.update(new)
        del new
        mx.eval(engine.gradients(batch, 1.0, 0))
        gc.collect()
        return mx.get_active_memory()

    first = held(0.0)
    size = sum(array.nbytes for _, array in tree_flatten(network.trainable_parameters()))
    assert held(1e-3) - first < size / 10


@pytest.mark.memory
@pytest.mark.parametrize(("plan", "cached"), PLANS)
def test_memory_does_not_grow_when_dropping_after_each_step(made, plan, cached):
    engine = made(plan, cached)

    def held() -> int:
        engine.engine.drop()
        gc.collect()
        return mx.get_active_memory()

    everything(engine)
    before = held()
    everything(engine)
    assert held() <= before
