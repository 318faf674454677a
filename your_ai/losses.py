"""Losses, as sums over targets: whoever has the whole batch divides, once.

Shapes: S targets, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

Head = Callable[[mx.array], mx.array]  # (1, S, D) hidden states -> (1, S, V) logits

CHUNK_BYTES = 8 << 20  # of float32 logits; MLX holds a few chunks at a time
CHUNK_ROWS = 128  # at least: every chunk reads the whole head
BLOCK = 128


def cross_entropy_sum(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """The sum over targets of weight x -log softmax(logits)[target], in float32.

    logits: (S, V); targets: (S,) int; weights: (S,), 0 for padding.
    """
    logits = logits.astype(mx.float32)
    scores = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1)
    return sum_in_blocks((mx.logsumexp(logits, axis=-1) - scores) * weights)


def sum_in_blocks(values: mx.array) -> mx.array:
    """The sum of (S,) values, by sums of blocks.

    One running float32 sum of many like values loses digits: 70,000 times log 4 comes
    out 6e-4 too small on the CPU backend, and the losses of an untrained model are alike.
    """
    padded = mx.pad(values, (0, -len(values) % BLOCK))
    return padded.reshape(-1, BLOCK).sum(axis=1).sum()


def chunks(hidden: mx.array, head: Head) -> Iterator[slice]:
    """Runs of rows of `hidden`, (S, D), whose float32 logits take about CHUNK_BYTES."""
    vocabulary = head(hidden[None, :1]).shape[-1]  # its shape alone: nothing is computed
    rows = max(CHUNK_ROWS, CHUNK_BYTES // (4 * vocabulary))
    for start in range(0, hidden.shape[0], rows):
        yield slice(start, start + rows)


def chunked_loss(hidden: mx.array, targets: mx.array, weights: mx.array, head: Head) -> mx.array:
    """cross_entropy_sum of head(hidden), chunk by chunk, to be evaluated and not trained."""
    losses: list[mx.array] = []
    for part in chunks(hidden, head):
        (rows,) = mx.depends([hidden[part]], losses[-1:]) if losses else (hidden[part],)
        losses.append(cross_entropy_sum(head(rows[None])[0], targets[part], weights[part]))
    return mx.stack(losses).sum()


def chunked_predictions(hidden: mx.array, head: Head) -> mx.array:
    """(S,) the likeliest token of each row of `hidden`, (S, D), chunk by chunk."""
    found: list[mx.array] = []
    for part in chunks(hidden, head):
        (rows,) = mx.depends([hidden[part]], found[-1:]) if found else (hidden[part],)
        found.append(head(rows[None])[0].argmax(-1))
    return mx.concatenate(found)


def trainable_loss(
    hidden: mx.array, targets: mx.array, weights: mx.array, scale: mx.array, head: Head
) -> mx.array:
    """cross_entropy_sum of head(hidden), whose gradient in `hidden` comes out times `scale`.

    The full logits never exist: each chunk's loss and gradient are computed together,
    in the forward pass, and only the (S, D) gradient is kept. (A chunked loss that is
    differentiated as a whole computes all logits again, or keeps them.) The scale is
    inside, so that float16 gradients are scaled before they are rounded. The head is
    frozen: it gets no gradient.
    """

    def loss(rows: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        value = cross_entropy_sum(head(rows[None])[0], targets, weights)
        return value * scale, value

    @mx.custom_function
    def forward(hidden: mx.array) -> tuple[mx.array, mx.array]:
        values: list[mx.array] = []
        grads: list[mx.array] = []
        for part in chunks(hidden, head):
            rows = hidden[part]
            if grads:  # one chunk after the other
                (rows,) = mx.depends([rows], [values[-1], grads[-1]])
            (_, value), grad = mx.value_and_grad(loss)(rows, targets[part], weights[part])
            values.append(value)
            grads.append(grad)
        return mx.stack(values).sum(), mx.concatenate(grads)

    @forward.vjp
    def backward(primals, cotangents, outputs):
        return cotangents[0].astype(outputs[1].dtype) * outputs[1]

    return forward(hidden)[0]
