"""Run a function over chunks of tokens, one after another, forward and backward.

Shapes: B rows, T tokens per row, n tokens per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from your_ai.nets.mlx_types import custom_function

Step = Callable[..., tuple[mx.array, mx.array]]
"""(state, *pieces, *constants) -> (next state, output of the chunk).

pieces: (B, n, ...), the sequences' tokens of a chunk. The output is (B, n, ...).
"""


def in_chunks(
    step: Step,
    tokens: int,
    state: mx.array,
    sequences: Sequence[mx.array],
    constants: Sequence[mx.array] = (),
) -> tuple[mx.array, mx.array]:
    """Run `step` on chunks of `tokens` tokens -> output (B, T, ...), last state.

    step: a module's function, or one that is made once; programs are kept by it.
    state: float32; the state before the first token.
    sequences: (B, T, ...) each. constants: used by all chunks.

    Differentiable in the state, the sequences and the constants. The backward pass keeps the
    state before each chunk, not what a chunk computes.
    """
    found = _over_chunks(step, tokens, len(sequences))(state, *sequences, *constants)
    return found[0], found[1]


@lru_cache
def _over_chunks(step: Step, tokens: int, count: int) -> Callable[..., tuple[mx.array, ...]]:
    """Make f(state, *sequences, *constants) -> output, last state, states between chunks.

    count: the number of sequences.
    """

    @custom_function
    def run(state: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
        sequences, constants = arrays[:count], arrays[count:]
        outputs: list[mx.array] = []
        states: list[mx.array] = []
        done = [state]
        for rows in _chunks(sequences[0].shape[1], tokens):
            # Begin a chunk when the one before it is computed, so that few are in memory.
            pieces = mx.depends([x[:, rows] for x in sequences], done)
            state, output = step(state, *pieces, *constants)
            outputs.append(output)
            states.append(state)
            done = [state, output]
        return mx.concatenate(outputs, axis=1), state, *states[:-1]

    @run.vjp
    def run_vjp(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, ...]:
        first, *arrays = primals
        sequences, constants = arrays[:count], arrays[count:]
        cotangent, of_state = cotangents[:2]
        states = [first, *results[2:]]
        chunks = list(_chunks(sequences[0].shape[1], tokens))
        pieces_of: list[list[mx.array]] = [[] for _ in sequences]
        sums = [mx.zeros(x.shape, mx.float32) for x in constants]
        done = [cotangent]  # prevents mx.compile from sharing what the forward pass computed
        for state, rows in zip(reversed(states), reversed(chunks), strict=True):
            given = [state, *(x[:, rows] for x in sequences), cotangent[:, rows]]
            *given, of_output = mx.depends(given, done)
            given += constants
            _, grads = mx.vjp(step, given, [of_state, of_output])
            of_state, *more = grads
            for found, grad in zip(pieces_of, more, strict=False):
                found.insert(0, grad)
            sums = [total + grad for total, grad in zip(sums, more[count:], strict=True)]
            done = [of_state, *more[:count], *sums]
        return (
            of_state,
            *(mx.concatenate(found, axis=1) for found in pieces_of),
            *(total.astype(x.dtype) for total, x in zip(sums, constants, strict=True)),
        )

    return run


def _chunks(tokens: int, step: int) -> Iterator[slice]:
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))
