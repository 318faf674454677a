"""Estimate the memory of adapters: their parameters, optimizer states and updates. Exact.

Each block counts with its own layers: those of a model may differ, and later ones may lack some.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from your_ai.config import ByLayer
from your_ai.config.optimizers import OPTIMIZERS
from your_ai.memory.facts import ModelFacts, adapters_named, arrays_named, names_of
from your_ai.memory.memoized import memoized
from your_ai.memory.sizes import (
    FEWEST_QUANTIZED,
    QUANTIZED_BLOCK,
    REDUCTION_BYTES,
    UPDATE_BYTES,
    UPDATE_BYTES_ROUNDED,
)
from your_ai.memory.workload import Plan, Training

FLOAT32_BYTES = 4  # of optimizer states and sums of gradients, and by default of all others
MATRIX_BYTES = {"float32": 4, "bfloat16": 2}  # by --adapter-dtype
Size = tuple[int, int, int]  # (inputs, outputs, rank)


@memoized
def adapted_parts(facts: ModelFacts, training: Training) -> list[tuple[list[Size], int]]:
    """The sizes of the adapters of a block, and how many blocks have such adapters."""
    sizes = {
        kind: adapters_named(facts.alone[kind], training.targets, training.experts)
        for kind in facts.alike_of_last(training.blocks)
    }
    return [
        ([(i, o, rank) for (i, o), rank in zip(sizes[kind], ranks, strict=True)], count)
        for (kind, ranks), count in Counter(ranks_of_blocks(facts, training)).items()
    ]


@memoized
def forms_of_kinds(facts: ModelFacts, training: Training) -> dict[int, int]:
    """The number of forms that adapted blocks of each kind have, by ranks and alphas. Programs of
    different forms are compiled separately."""
    forms, kinds = defaultdict(set), facts.last(training.blocks)
    ranks, alphas = training.ranks, ByLayer(0.0, training.alphas)
    for index, kind in enumerate(kinds, facts.blocks - len(kinds)):
        names = names_of(facts.alone[kind], training.targets, training.experts)
        places = [(index, name) for name in names]
        forms[kind].add(tuple((ranks.at(p), alphas.at(p)) for p in places))
    return {kind: len(found) for kind, found in forms.items()}


@memoized
def ranks_of_blocks(facts: ModelFacts, training: Training) -> list[tuple[int, tuple[int, ...]]]:
    """The kind of each adapted block, and the ranks of its adapters in the order of its layers."""
    kinds, ranks = facts.alike_of_last(training.blocks), training.ranks
    named = {
        kind: names_of(facts.alone[kind], training.targets, training.experts) for kind in set(kinds)
    }
    return [
        (kind, tuple(int(ranks.at((index, name))) for name in named[kind]))
        for index, kind in enumerate(kinds, facts.blocks - len(kinds))
    ]


def whole_arrays(facts: ModelFacts, training: Training) -> Iterator[tuple[tuple[int, ...], int]]:
    """The shapes of the weights of a block that are trained without adapters, and of how many
    blocks."""
    for kind, count in facts.counts_of_last(training.blocks).items():
        for shape in arrays_named(facts.alone[kind], training.targets, training.experts):
            yield shape, count


def adapter_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of the trained parameters as the model computes with them, and of their gradients."""
    return bytes_with(facts, training, number_bytes(facts, training))


def number_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of a trained number as the model computes with it."""
    whole = training.adapter.is_whole
    return facts.float_bytes if whole else MATRIX_BYTES[training.adapter_dtype]


def whole_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of the gradients of a block whose weights are trained; 0 with adapters."""
    if not training.adapter.is_whole:
        return 0
    return adapter_bytes(facts, training) // training.blocks


def working_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of the working copy of whole weights on disk."""
    return bytes_with(facts, training, MATRIX_BYTES[training.adapter_dtype])


def held_bytes(facts: ModelFacts, training: Training, plan: Plan) -> int:
    """Bytes of the trained parameters in memory beside the weights: those of adapters, or masters
    of whole weights that have another dtype."""
    if not training.adapter.is_whole:
        return adapter_bytes(facts, training) + norms_bytes(facts, training)
    number = MATRIX_BYTES[training.adapter_dtype]
    same = number == facts.float_bytes or plan.weights_on_disk
    return 0 if same else bytes_with(facts, training, number)


def float32_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of the trained parameters if they are in float32, as sums of gradients are."""
    return bytes_with(facts, training, FLOAT32_BYTES)


def copied_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of the copies of bfloat16 matrices that a float32 graph keeps for its backward pass."""
    mixed = facts.float_bytes > MATRIX_BYTES[training.adapter_dtype]
    mixed = mixed and not training.adapter.is_whole
    return float32_bytes(facts, training) if mixed else 0


@memoized
def bytes_with(facts: ModelFacts, training: Training, matrix_bytes: int) -> int:
    """Bytes of the trained parameters; matrix_bytes: of a number of A and B. Vectors are always
    in float32. Of whole weights, all numbers have these bytes."""
    if training.adapter.is_whole:
        return matrix_bytes * sum(n * count for n, count in arrays_of(facts, training))
    parts = adapted_parts(facts, training)
    of_blocks = sum(count * block_bytes(layers, training, matrix_bytes) for layers, count in parts)
    return of_blocks + sum(bytes_outside(training, matrix_bytes))


def bytes_outside(training: Training, matrix_bytes: int) -> list[int]:
    """Bytes of what is trained of each layer outside of the blocks; matrix_bytes: as of
    `bytes_with`."""
    return [
        (matrix_bytes if array.is_whole else FLOAT32_BYTES)
        * sum(rows * columns * count for rows, columns, count in array.matrices(training.ranks))
        for array in training.vocabulary
    ]


def block_bytes(layers: list[Size], training: Training, matrix_bytes: int) -> int:
    """Bytes of the trained parameters of a block with these adapters."""
    vectors = FLOAT32_BYTES * sum(o for _, o, _ in layers) * len(training.adapter.vectors)
    return vectors + matrix_bytes * sum(rank * (i + o) for i, o, rank in layers)


@memoized
def largest_block_bytes(facts: ModelFacts, training: Training, matrix_bytes: int) -> int:
    """The same of the block with most; of whole weights, of each block."""
    if training.adapter.is_whole:
        return bytes_with(facts, training, matrix_bytes) // training.blocks
    parts = adapted_parts(facts, training)
    return max((block_bytes(layers, training, matrix_bytes) for layers, _ in parts), default=0)


@memoized
def norms_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of weight norms, which are kept between updates."""
    if not training.adapter.has_norms:
        return 0
    parts = adapted_parts(facts, training)
    return FLOAT32_BYTES * sum(count * sum(o for _, o, _ in layers) for layers, count in parts)


@memoized
def optimizer_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of the optimizer states. Adafactor keeps one row and one column per matrix."""
    training = training.active
    kind = OPTIMIZERS[training.optimizer]
    if not kind.factored:
        of_one = sum(count * state_bytes(n, training) for n, count in arrays_of(facts, training))
        return kind.states * of_one
    if training.adapter.is_whole:
        return FLOAT32_BYTES * sum(
            count * (math.prod(s[:-1]) + math.prod((*s[:-2], s[-1])) if len(s) > 1 else s[0])
            for s, count in whole_arrays(facts, training)
        )
    numbers = 0
    for layers, count in adapted_parts(facts, training):
        vectors = len(training.adapter.vectors)
        of_block = sum(i + o + 2 * rank + o * vectors for i, o, rank in layers)
        numbers += count * of_block
    numbers += sum((rows + columns) * count for rows, columns, count in matrices_outside(training))
    return FLOAT32_BYTES * numbers


def arrays_of(facts: ModelFacts, training: Training) -> Iterator[tuple[int, int]]:
    """The number of values of each trained array of a block, and of how many blocks."""
    if training.adapter.is_whole:
        yield from ((math.prod(shape), count) for shape, count in whole_arrays(facts, training))
        return
    for layers, count in adapted_parts(facts, training):
        for inputs, outputs, rank in layers:
            yield rank * inputs, count
            yield rank * outputs, count
            for _ in training.adapter.vectors:
                yield outputs, count
    for rows, columns, count in matrices_outside(training):
        yield rows * columns, count


def matrices_outside(training: Training) -> list[tuple[int, int, int]]:
    """The trained arrays outside of the blocks, as of `VocabularyArray.matrices`."""
    return [each for array in training.vocabulary for each in array.matrices(training.ranks)]


def state_bytes(values: int, training: Training) -> int:
    """Bytes of a state of an array: 4 for each value, or 1 and a scale for each block."""
    if training.optimizer_bits == 32 or values < FEWEST_QUANTIZED:
        return FLOAT32_BYTES * values
    blocks = -(-values // QUANTIZED_BLOCK)
    return blocks * (QUANTIZED_BLOCK + FLOAT32_BYTES)


def gradient_bytes(
    facts: ModelFacts, training: Training, plan: Plan, micro_batches: int
) -> tuple[int, int]:
    """Bytes of the gradients while blocks are computed forward, and when all blocks are done.

    micro_batches: per step. If there is more than one, their gradients are summed. On disk, only
    those of one block are in memory.
    """
    training = training.active
    adapters, matrix_bytes = adapter_bytes(facts, training), number_bytes(facts, training)
    outside = bytes_outside(training, matrix_bytes)
    of_block = max([largest_block_bytes(facts, training, matrix_bytes), *outside])
    if plan.gradients_on_disk:
        return 0, of_block
    earlier = float32_bytes(facts, training) if micro_batches > 1 else 0
    if earlier == 0 or plan.engine == "fused":
        # A tied array has a gradient from the head, to which that of the embedding is added.
        pairs = zip(outside, training.vocabulary, strict=True)
        twice = sum(size for size, array in pairs if array.is_tied)
        return earlier, earlier + adapters + twice
    return earlier, earlier + of_block


def head_gradient_bytes(training: Training) -> int:
    """Bytes of the gradients of what is trained of the head, which are there at once."""
    sizes = bytes_outside(training, MATRIX_BYTES[training.adapter_dtype])
    every = zip(sizes, training.vocabulary, strict=True)
    return sum(size for size, array in every if array.is_tied or not array.is_embedding)


@memoized
def largest_array(facts: ModelFacts, training: Training) -> int:
    """Values of the largest trained array."""
    return max((values for values, count in arrays_of(facts, training) if count), default=0)


def reduction_bytes(facts: ModelFacts, training: Training, plan: Plan) -> int:
    """Bytes while gradients are summed over processes, beside those held: some of them in one
    array, and their sum, which arrives in another; of a large array, only its sum. Gradients on
    disk are read first.
    """
    some, read = min(REDUCTION_BYTES, float32_bytes(facts, training)), plan.gradients_on_disk
    return max((2 + read) * some, (1 + read) * FLOAT32_BYTES * largest_array(facts, training))


def update_bytes(facts: ModelFacts, training: Training, plan: Plan) -> int:
    """Bytes of new values and temporaries of an update, for the parameters updated together, and of
    what is read from disk for them.
    """
    largest, kind = largest_array(facts, training), OPTIMIZERS[training.optimizer]
    is_float32 = training.adapter_dtype == "float32"
    most = UPDATE_BYTES if is_float32 and training.optimizer_bits == 32 else UPDATE_BYTES_ROUNDED
    outside = bytes_outside(training, FLOAT32_BYTES)
    together = min(most, max([largest_block_bytes(facts, training, FLOAT32_BYTES), *outside]))
    together = max(together, FLOAT32_BYTES * largest)
    read = together * plan.gradients_on_disk
    read += together * (training.adapter.is_whole and plan.weights_on_disk)
    if plan.states_on_disk:
        read += kind.states * together * training.optimizer_bits // 32
    if training.optimizer_bits == 8 and kind.work_in_8_bits is not None:
        one, other = kind.work_in_8_bits
        one_bytes = FLOAT32_BYTES * largest
        return read + one * one_bytes + other * (together - one_bytes)
    return read + int((kind.work if is_float32 else kind.work_in_bfloat16) * together)
