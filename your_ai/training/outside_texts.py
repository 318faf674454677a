"""Texts that an outside loop trains on, and the micro-batches that are made of them.

Shapes: n tokens of a text, m of its targets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.data.batches import Batch, few_edges, padded_batch, padded_targets
from your_ai.data.target_columns import Columns
from your_ai.objectives.objective import Scores, Targets
from your_ai.objectives.outside import OUTSIDE, TOKEN_LOSSES


class OutsideText(NamedTuple):
    """A text with targets, and what the losses of these need."""

    tokens: np.ndarray
    """(n,) int32."""
    positions: np.ndarray
    """(m,) int32, the place of the token that predicts each target."""
    targets: np.ndarray
    """(m,) int32."""
    columns: Columns
    """(m,) float32 each: advantages, old, clip_low and clip_high."""
    counts: np.ndarray
    """(m,) bool, the tokens of the ratio of a whole text."""

    @property
    def nbytes(self) -> int:
        arrays = (self.tokens, self.positions, self.targets, self.counts, *self.columns.values())
        return sum(array.nbytes for array in arrays)


def loss_of(texts: Sequence[OutsideText], found: Sequence[np.ndarray], loss: str) -> float:
    """The sum of a loss of tokens, of known log-probabilities."""
    if not texts:
        return 0.0
    current = np.concatenate(found)
    columns = {n: mx.array(np.concatenate([t.columns[n] for t in texts])) for n in texts[0].columns}
    columns["loss"] = mx.full(current.shape, TOKEN_LOSSES.index(loss), mx.int32)
    columns["slot"] = mx.arange(len(current))
    unused = mx.zeros(current.shape, mx.int32)
    targets = Targets(unused, unused, mx.ones(current.shape), unused, columns)
    return float(OUTSIDE.weigh(Scores(mx.array(current)), targets).loss)


class TextPart(NamedTuple):
    """Targets of a text that are computed together: all, unless they are too many."""

    place: int
    """Of the text."""
    cut: slice

    def of(self, texts: Sequence[OutsideText]) -> OutsideText:
        text, cut = texts[self.place], self.cut
        columns = {name: values[cut] for name, values in text.columns.items()}
        return OutsideText(
            text.tokens, text.positions[cut], text.targets[cut], columns, text.counts[cut]
        )


def batches_of(
    texts: Sequence[OutsideText], rows_at: Callable[[int], int], loss: int
) -> Iterator[tuple[Batch, list[TextPart]]]:
    """Padded micro-batches of texts, the longest first, and the parts of texts in each.

    The plan counts one target for each token of its rows. Where tokens have several, there are
    fewer rows, and a text with more targets than that is computed several times.
    loss: the number of the loss of all targets.
    """
    longest = max((len(text.tokens) for text in texts), default=0)
    edges = few_edges(longest)
    waiting = deque(sorted(range(len(texts)), key=lambda place: -len(texts[place].tokens)))
    cut_at = 0  # targets of the first that waits that were computed
    while waiting:
        length = int(edges[np.searchsorted(edges, len(texts[waiting[0]].tokens))])
        rows = max(1, rows_at(length))
        parts: list[TextPart] = []
        count = 0
        while waiting and len(parts) < rows:
            left = len(texts[waiting[0]].targets) - cut_at
            if padded_targets(count + left, (len(parts) + 1) * length) > rows * length and parts:
                break
            end = cut_at + min(left, rows * length)
            parts.append(TextPart(waiting[0], slice(cut_at, end)))
            count += end - cut_at
            cut_at = 0 if end == cut_at + left else end
            if cut_at:
                break
            waiting.popleft()
        yield batch_of([part.of(texts) for part in parts], length, loss), parts


def batch_of(texts: Sequence[OutsideText], length: int, loss: int) -> Batch:
    """A micro-batch of texts padded to `length` tokens."""
    count = len(texts)
    tokens = np.zeros((count, length), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
    columns = {name: [text.columns[name] for text in texts] for name in texts[0].columns}
    trained = sum(len(text.targets) for text in texts)
    columns["loss"], columns["slot"] = [np.full(trained, loss)], [np.arange(trained)]
    return padded_batch(
        tokens,
        positions=[row * length + text.positions for row, text in enumerate(texts)],
        targets=[text.targets for text in texts],
        weights=[np.ones(len(text.targets)) for text in texts],
        columns=columns,
        rows=np.arange(count, dtype=np.uint32)[:, None],
        places=np.arange(length, dtype=np.uint32)[None],
        lengths=np.array([len(text.tokens) for text in texts]),
    )


def scatter(found: Sequence[np.ndarray], parts: Sequence[TextPart], values: np.ndarray) -> None:
    """Put the values of the targets of a micro-batch where their texts are."""
    start = 0
    for place, cut in parts:
        count = cut.stop - cut.start
        found[place][cut] = values[start : start + count]
        start += count
