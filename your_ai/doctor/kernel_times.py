"""Time parts of a step by themselves: products, attention, and the head.

Whole steps do not tell these apart, because they grow together.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.doctor.fit_speed import TimedWork
from your_ai.engine import tiled_head
from your_ai.engine.dequantized import multiply
from your_ai.engine.gradients import Gradients, gradients_in
from your_ai.engine.spill import Spilled
from your_ai.hub.config_values import GROUP_SIZE
from your_ai.memory.calibration import Shape
from your_ai.memory.mixer_facts import ATTENTION, MixerFacts
from your_ai.memory.sizes import LEAN_QUERY_BLOCK, QUERY_BLOCK
from your_ai.memory.step_time import (
    BlockPasses,
    BlockRole,
    Work,
    adapter_work,
    add,
    attention_backward_work,
    attention_work,
    head_parts_work,
    times,
    weight_work,
)
from your_ai.nets.attention import attention
from your_ai.nets.head import Function, LayerRows, LinearHead
from your_ai.nets.mlx_types import Arrays, load_arrays
from your_ai.objectives.objective import Targets
from your_ai.objectives.sft import SUPERVISED
from your_ai.training.measure_peaks import batch_of

REPEATS = 3  # after one that may compile
SEVERAL = 8  # products
SPILLED_BYTES = 8_000_000
FILE_ARRAYS = 64  # with little in them
Clock = Callable[[], float]  # in seconds


@dataclass(frozen=True)
class Kernels:
    """The parts to time."""

    products: tuple[tuple[int, int, int], ...]
    """Rows, inputs and outputs."""
    adapters: tuple[tuple[int, int, int, int], ...]
    """Rows, inputs, outputs and rank."""
    attentions: tuple[tuple[int, int, int, int, bool], ...]
    """T, heads, heads of keys, head size, and whether blocks of queries are small."""
    heads: tuple[tuple[int, int, int], ...]
    """Targets, D and V."""


FAST = Kernels(
    products=((64, 256, 704), (256, 512, 512), (64, 512, 1408), (512, 1024, 2816)),
    adapters=((64, 256, 704, 16), (256, 704, 256, 64), (256, 512, 512, 8), (256, 256, 704, 64)),
    attentions=(
        (256, 8, 8, 32, False),
        (256, 8, 2, 128, False),
        (512, 4, 4, 64, True),
        (512, 8, 2, 64, False),
        (512, 8, 8, 64, False),
    ),
    heads=((64, 256, 6000), (256, 256, 6000), (64, 512, 3000)),
)
SLOW = Kernels(
    products=((64, 256, 704), (128, 512, 512), (32, 512, 1408)),
    adapters=((64, 128, 384, 16), (64, 384, 128, 64), (128, 384, 1024, 8)),
    attentions=(
        (128, 4, 4, 32, False),
        (128, 4, 1, 128, False),
        (256, 2, 2, 64, True),
        (256, 4, 1, 64, False),
        (256, 4, 4, 64, False),
    ),
    heads=((32, 256, 3000), (128, 256, 3000), (32, 512, 1500)),
)


def kernel_times(kernels: Kernels, dtype: mx.Dtype, now: Clock) -> Iterator[TimedWork]:
    """Time each part."""
    on_cpu = mx.default_device().type == mx.cpu
    for sizes in kernels.products:
        for quantized in (False, True):
            yield product_time(*sizes, quantized, dtype, now)
    for adapter in kernels.adapters:
        yield adapter_time(*adapter, dtype, now)
    for attended in kernels.attentions if on_cpu else ():
        yield from attention_times(*attended, dtype, now)
    for sizes in kernels.heads:
        for quantized in (False, True):
            yield head_time(*sizes, quantized, dtype, now)
    yield spill_time(now)
    yield from file_times(now)


def product_time(
    rows: int, inputs: int, outputs: int, quantized: bool, dtype: mx.Dtype, now: Clock
) -> TimedWork:
    """Time products with frozen weights."""
    on_cpu = mx.default_device().type == mx.cpu

    def made() -> Function:
        layer: Any = nn.Linear(inputs, outputs, bias=False)
        layer.set_dtype(dtype)
        if quantized:
            layer = nn.QuantizedLinear.from_linear(layer, GROUP_SIZE, 4)
        mx.eval(layer.parameters())
        return partial(multiply, layer=layer) if quantized and on_cpu else layer

    x = random_numbers(rows, inputs, dtype)
    found = several([made() for _ in range(SEVERAL)], x, now)
    work = times(weight_work(quantized, inputs, outputs, rows), SEVERAL)
    return TimedWork(f"product {rows} x {inputs} x {outputs}", work, found)


def adapter_time(
    rows: int, inputs: int, outputs: int, rank: int, dtype: mx.Dtype, now: Clock
) -> TimedWork:
    """Time the forward pass of adapters."""

    def made() -> Function:
        base = random_numbers(rows, outputs, dtype)
        lora_a, lora_b = random_numbers(inputs, rank, dtype), random_numbers(rank, outputs, dtype)
        return lambda x: base + (x @ lora_a) @ lora_b

    found = several([made() for _ in range(SEVERAL)], random_numbers(rows, inputs, dtype), now)
    work = times(adapter_work(inputs, outputs, rank, rows), SEVERAL)
    return TimedWork(f"adapter {rows} x {inputs} x {outputs}", work, found)


def several(layers: Sequence[Function], x: mx.array, now: Clock) -> float:
    """The seconds of all layers in one graph, as in a step, where no weight is in a cache already;
    to run a graph of its own takes as long as a small product."""
    return time_of(lambda: [layer(x) for layer in layers], now)


def random_numbers(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    found = mx.random.normal((rows, columns), key=mx.random.key(0)).astype(dtype)
    mx.eval(found)
    return found


def attention_times(
    tokens: int, heads: int, keys: int, size: int, lean: bool, dtype: mx.Dtype, now: Clock
) -> Iterator[TimedWork]:
    """Time attention in blocks of queries, forward, and forward with backward."""
    q = mx.random.normal((1, heads, tokens, size), key=mx.random.key(0)).astype(dtype)
    k, v = (
        mx.random.normal((1, keys, tokens, size), key=mx.random.key(place)).astype(dtype)
        for place in (1, 2)
    )
    mx.eval(q, k, v)
    queries = LEAN_QUERY_BLOCK if lean else QUERY_BLOCK

    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return attention(q, k, v, size**-0.5, queries=queries).sum()

    mixer = MixerFacts(kind=ATTENTION, heads=heads, kv_heads=keys, key_dim=size, value_dim=size)
    passes = BlockPasses(BlockRole(0, True, False, (False, False, False)), 1, tokens, lean)
    both: Work = dict(attention_work(mixer, passes, on_cpu=True))
    name = f"attention {tokens} x {heads} x {keys} x {size}"
    compiled, gradients = mx.compile(forward), mx.compile(mx.grad(forward, argnums=(0, 1, 2)))
    yield TimedWork(name, dict(both), time_of(lambda: compiled(q, k, v), now))
    add(both, attention_backward_work(mixer, passes, on_cpu=True))
    yield TimedWork(f"{name}, gradients", both, time_of(lambda: gradients(q, k, v), now))


def head_time(
    targets: int, hidden: int, vocabulary: int, quantized: bool, dtype: mx.Dtype, now: Clock
) -> TimedWork:
    """Time the loss and its gradient, over the vocabulary."""
    layer: Any = nn.Embedding(vocabulary, hidden)
    layer.set_dtype(dtype)
    if quantized:
        layer = nn.QuantizedEmbedding.from_embedding(layer, GROUP_SIZE, 4)
    head = LinearHead(LayerRows(layer))
    states = mx.random.normal((1, targets, hidden), key=mx.random.key(0)).astype(dtype)
    batch = Targets.of(batch_of(Shape(1, targets), packing=False))
    mx.eval(layer.parameters(), states)

    def run() -> Any:
        scale = mx.array(1.0)
        return tiled_head.loss_and_gradient(states, batch, SUPERVISED, scale, head)[:2]

    work = head_parts_work(quantized, targets, hidden, vocabulary)
    return TimedWork(f"head {targets} x {hidden} x {vocabulary}", work, time_of(run, now))


def spill_time(now: Clock) -> TimedWork:
    """Time writing block inputs to the disk and reading them back."""
    states = mx.zeros(SPILLED_BYTES // 4)
    mx.eval(states)
    with tempfile.TemporaryDirectory(prefix="your_ai-speed-") as place:
        inputs = Spilled(Path(place))

        def run() -> mx.array:
            inputs.append(states)
            return inputs.pop()

        return TimedWork("spilled inputs", {"spilled": 2 * SPILLED_BYTES}, time_of(run, now))


def file_times(now: Clock) -> Iterator[TimedWork]:
    """Time reading arrays of a block from a file, and storing and taking gradients."""
    few = {str(place): mx.zeros(16) for place in range(FILE_ARRAYS)}
    one = {"0": mx.zeros(SPILLED_BYTES // 4)}
    with tempfile.TemporaryDirectory(prefix="your_ai-speed-") as place:
        for arrays in (few, one):
            file, count = Path(place, f"{len(arrays)}.safetensors"), len(arrays)
            size = sum(array.nbytes for array in arrays.values())
            mx.save_safetensors(str(file), arrays)
            work: Work = {"read": size, "opened": count}
            yield TimedWork(
                f"{count} arrays read", work, time_of(partial(load_arrays, file, mx.cpu), now)
            )
            gradients = gradients_in(Path(place))

            def stored(arrays: Arrays = arrays, gradients: Gradients = gradients) -> Arrays:
                gradients.add(dict(arrays))
                return gradients.take(list(arrays))

            work = {"spilled": 2 * size, "stored": 2 * count}
            yield TimedWork(f"{count} gradients stored", work, time_of(stored, now))


def time_of(run: Callable[[], Any], now: Clock) -> float:
    """The median seconds of `run`, whose result is evaluated; the first call is left out."""
    found = []
    for _ in range(1 + REPEATS):
        began = now()
        mx.eval(run())
        found.append(now() - began)
    return statistics.median(found[1:])
