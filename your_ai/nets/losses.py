"""Log-probabilities of the targets from a model's head, and the gradient of an objective.

The full logits are never allocated. A head in linear form (head.LinearHead) is computed in
slices of the vocabulary, any other head in chunks of the hidden states.

Shapes: S targets, D hidden size, V vocabulary, n tokens per slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from your_ai.memory.sizes import HEAD_ROWS
from your_ai.nets.divergence import Compared, compare
from your_ai.nets.head import (
    Function,
    Head,
    HeadSlice,
    LinearHead,
    ScoreHead,
    SomeTrained,
    TargetHead,
    TokenHead,
    trained_in,
)
from your_ai.nets.mlx_types import Arrays, custom_function
from your_ai.nets.numerics import exp, settled
from your_ai.objectives.objective import (
    GivenWeights,
    Metrics,
    Objective,
    ObjectiveWithTeacher,
    Scores,
    Sums,
    Targets,
    Weighed,
)

Weigh = Callable[[mx.array], Weighed]  # (S,) log-probabilities -> the loss and weights
# (rows of the hidden states, which they are) -> the sums, and the gradients of them and of the head
Piece = Callable[[mx.array, slice], tuple[Sums, mx.array, Arrays]]

CHUNK_BYTES = 8 << 20  # of float32 logits; a few chunks are in memory at a time
CHUNK_ROWS = 128  # minimum rows per chunk, because every chunk reads the whole head


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """(S,) -log softmax(logits)[target] of each target, in float32.

    logits: (S, V); targets: (S,) int.
    """
    logits = logits.astype(mx.float32)
    scores = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1)
    return mx.logsumexp(logits, axis=-1) - scores


def chunked_losses(hidden: mx.array, targets: mx.array, head: Head) -> mx.array:
    """(S,) cross_entropy of head(hidden), piece by piece, without gradients.

    With a ScoreHead, the negative scores, as they take the place of log-probabilities.
    """
    if isinstance(head, ScoreHead):
        return -head.scores(hidden)
    losses: list[mx.array] = []
    for part in chunks(hidden, head):
        rows = _in_turn(hidden[part], losses)
        if isinstance(head, LinearHead):
            softmax = _over_vocabulary(
                begin(head.inputs(rows), targets[part], gradient=False), head
            )
            losses.append(softmax_losses(softmax, head.logits(softmax.at_target)))
        else:
            losses.append(cross_entropy(head(rows[None])[0], targets[part]))
    return mx.concatenate(losses)


def chunked_loss(hidden: mx.array, targets: Targets, objective: Objective, head: Head) -> Sums:
    """The loss and metrics of the objective; hidden: (S, D) at the targets."""
    if (taught := lesson_of(targets, objective, head)) is None:
        found = chunked_losses(hidden, targets.tokens, head)
        return objective.weigh(Scores(-found), targets).sums
    every: list[Sums] = []
    for part in chunks(hidden, taught.head):
        rows = _in_turn(hidden[part], [sums.loss for sums in every])
        every.append(taught.sums(rows, targets.part(part)))
    return Sums.over(every)


def chunked_comparison(
    hidden: mx.array, targets: Targets, objective: Objective, head: Head
) -> tuple[mx.array, mx.array]:
    """(S,) float32 divergences from the predictions of the teacher at each target, and (S,) bool,
    whether the most likely token is the teacher's. hidden: (S, D) at the targets.
    """
    taught = lesson_of(targets, objective, head)
    assert taught is not None
    found: list[mx.array] = []
    agrees: list[mx.array] = []
    for part in chunks(hidden, taught.head):
        rows = _in_turn(hidden[part], found)
        compared = taught.compared(rows, targets.part(part), gradient=False)
        found.append(compared.divergences)
        agrees.append(compared.agrees)
    return mx.concatenate(found), mx.concatenate(agrees)


def chunked_predictions(hidden: mx.array, head: Head) -> mx.array:
    """(S,) the most likely token for each row of `hidden`, (S, D), piece by piece.

    With a ScoreHead, which predicts no tokens, zeros.
    """
    if isinstance(head, ScoreHead):
        return mx.zeros(len(hidden), mx.uint32)
    found: list[mx.array] = []
    for part in chunks(hidden, head):
        rows = _in_turn(hidden[part], found)
        if isinstance(head, LinearHead):
            found.append(_most_likely(head.inputs(rows), head))
        else:
            found.append(head(rows[None])[0].argmax(-1))
    return mx.concatenate(found)


def trainable_loss(
    hidden: mx.array, targets: Targets, objective: Objective, scale: mx.array, head: Head
) -> Sums:
    """The loss and metrics of the objective; the gradient of the loss is multiplied by `scale`.

    hidden: (S, D) at the targets. The gradient is computed together with the loss in the
    forward pass, and only its (S, D) array is kept. (Differentiating a chunked loss as a whole
    would compute all logits again, or keep them.)
    """
    names: list[str] = []
    trained = trained_in(head)
    count = 1 + len(trained)  # of gradients

    @custom_function
    def forward(hidden: mx.array, *_: mx.array) -> tuple[mx.array, ...]:
        sums, grad, of_head = loss_and_gradient(hidden, targets, objective, scale, head)
        return sums.loss, grad, *of_head.values(), *flat(sums.metrics, names)

    @forward.vjp
    def backward(primals: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> Any:
        grads = outputs[1 : 1 + count]
        return [cotangents[0].astype(grad.dtype) * grad for grad in grads]

    loss, *found = forward(hidden, *trained.values())
    return Sums(loss, unflat(found[count:], names))


def loss_and_gradient(
    hidden: mx.array, targets: Targets, objective: Objective, scale: mx.array, head: Head
) -> tuple[Sums, mx.array, Arrays]:
    """The loss and metrics, and the gradient with respect to `hidden` times `scale`, (S, D).

    The caller does not differentiate this function: that would keep every slice of a head that
    is read from a file. The scale is applied inside, so that float16 gradients are scaled
    before they are rounded. The third result has the gradients of what is trained of the head,
    times `scale`, by name in the model.
    """

    if "given" in targets.columns:
        objective = GivenWeights()

    if isinstance(head, ScoreHead):
        weighed = objective.weigh(Scores(head.scores(hidden)), targets)
        return weighed.sums, *head.gradients(hidden, weighed.weights, scale)

    def weigh_part(part: slice) -> Weigh:
        return lambda logp: objective.weigh(Scores(logp), targets.part(part))

    pieces: Iterable[slice] = chunks(hidden, head)
    if (taught := lesson_of(targets, objective, head)) is not None:

        def compared(rows: mx.array, part: slice) -> tuple[Sums, mx.array, Arrays]:
            return taught.gradients(rows, targets.part(part), scale)

        return _in_pieces(hidden, compared, pieces)

    of_piece: Callable[..., tuple[Sums, mx.array, Arrays]] = (
        _sliced if isinstance(head, LinearHead) else _differentiated
    )

    def weighed_by(weigh: Callable[[slice], Weigh]) -> Piece:
        return lambda rows, part: of_piece(rows, targets.tokens[part], weigh(part), scale, head)

    if objective.token_local:
        return _in_pieces(hidden, weighed_by(weigh_part), pieces)
    if isinstance(head, LinearHead):  # one pass over the vocabulary for all rows
        return _in_pieces(hidden, weighed_by(weigh_part), [slice(0, len(hidden))])
    scores = Scores(-chunked_losses(hidden, targets.tokens, head))
    weighed = objective.weigh(scores, targets)

    def known(part: slice) -> Weigh:
        return lambda _: Weighed(mx.array(0.0), weighed.weights[part])

    _, grad, of_head = _in_pieces(hidden, weighed_by(known), pieces)
    return weighed.sums, grad, of_head


def _in_pieces(
    hidden: mx.array, of_piece: Piece, pieces: Iterable[slice]
) -> tuple[Sums, mx.array, Arrays]:
    """The sums over all pieces, and the gradients of `hidden` and of the head, piece by piece."""
    found: list[Sums] = []
    grads: list[mx.array] = []
    total: Arrays = {}
    for part in pieces:
        rows = _in_turn(hidden[part], [sums.loss for sums in found], grads, list(total.values()))
        sums, grad, of_head = of_piece(rows, part)
        found.append(sums)
        grads.append(grad)
        total = {n: g + total[n] if n in total else g for n, g in of_head.items()}
    return Sums.over(found), mx.concatenate(grads), total


def chunks(hidden: mx.array, head: TokenHead) -> Iterator[slice]:
    """Cut the rows of `hidden`, (S, D), into chunks of about equal size.

    A chunk has up to HEAD_ROWS rows for a LinearHead, otherwise as many as have CHUNK_BYTES of
    logits.
    """
    count, max_rows = len(hidden), HEAD_ROWS
    if not isinstance(head, LinearHead):
        vocabulary = head(hidden[None, :1]).shape[-1]  # only the shape is used; never evaluated
        max_rows = max(CHUNK_ROWS, CHUNK_BYTES // (4 * vocabulary))
    rows = -(-count // -(-count // max_rows))
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _in_turn(rows: mx.array, *before: list[mx.array]) -> mx.array:
    """Return `rows`, made to depend on the last array of each list."""
    last = [arrays[-1] for arrays in before if arrays]
    return mx.depends([rows], last)[0] if last else rows


# -- target distributions, where an objective has no target tokens alone -------------------


class Lesson(NamedTuple):
    """A loss that compares the predictions of a head with those of a teacher."""

    objective: ObjectiveWithTeacher
    head: LinearHead
    teacher: TargetHead

    def sums(self, rows: mx.array, targets: Targets) -> Sums:
        """The loss and metrics; rows: (S, D) hidden states."""
        more = None
        if self.objective.sft_weight:
            more = chunked_losses(rows, targets.tokens, self.head)
        return self._weighed(self.compared(rows, targets, gradient=False), targets, more)[0]

    def gradients(
        self, rows: mx.array, targets: Targets, scale: mx.array
    ) -> tuple[Sums, mx.array, Arrays]:
        """The loss and metrics, and the gradient with respect to `rows` times `scale`, (S, D)."""
        found, more, of_tokens = self.compared(rows, targets, gradient=True), None, None
        if self.objective.sft_weight:
            (rows,) = mx.depends([rows], [found.gradients])

            def weigh(logp: mx.array) -> Weighed:
                return Weighed(-logp, self.objective.sft_weight * targets.weights)

            sums, of_tokens, _ = _sliced(rows, targets.tokens, weigh, scale, self.head)
            more = sums.loss
        sums, weights = self._weighed(found, targets, more)
        grad = (found.gradients * (weights * scale)[:, None]).astype(rows.dtype)
        if self.head.before is not None:
            _, (grad,) = mx.vjp(self.head.before, [rows], [grad])
        return sums, grad if of_tokens is None else grad + of_tokens, {}

    def compared(self, rows: mx.array, targets: Targets, gradient: bool) -> Compared:
        """Student and teacher at each target; rows: (S, D) hidden states."""
        inputs, objective = self.head.inputs(rows), self.objective
        of, temperature = objective.divergence, objective.temperature
        assert targets.teacher is not None
        given = inputs, targets.teacher, self.head, self.teacher, of, temperature
        return compare(*given, gradient=gradient)

    def _weighed(
        self, found: Compared, targets: Targets, more: mx.array | None
    ) -> tuple[Sums, mx.array]:
        """The sums and the weights of the targets; more: (S,) their cross-entropy, if it counts."""
        losses = found.divergences
        if more is not None:
            losses = losses + self.objective.sft_weight * more
        weighed = self.objective.weigh(Scores(-losses), targets)
        metrics = {**weighed.metrics, **found.metrics(targets.is_real)}
        return Sums(weighed.loss, metrics), weighed.weights


def lesson_of(targets: Targets, objective: Objective, head: Head) -> Lesson | None:
    """The comparison with a teacher, where its hidden states are given; else None."""
    if targets.teacher is None:
        return None
    if not (isinstance(head, LinearHead) and isinstance(objective, ObjectiveWithTeacher)):
        raise ValueError("hidden states of a teacher are given, but nothing compares with them")
    assert head.teacher is not None
    return Lesson(objective, head, head.teacher)


# -- in chunks of the hidden states -------------------------------------------------------


def _differentiated(
    rows: mx.array, tokens: mx.array, weigh: Weigh, scale: mx.array, head: Function
) -> tuple[Sums, mx.array, Arrays]:
    """The sums of a chunk and its gradient times `scale`.

    MLX differentiates the head; the gradient of the logits is written by hand, with one exp per
    logit.
    """
    names: list[str] = []

    @custom_function
    def loss(logits: mx.array) -> tuple[mx.array, ...]:
        z = logits.astype(mx.float32)
        top, index = z.max(-1, keepdims=True), tokens[:, None]
        shares = mx.exp(z - top)
        total = shares.sum(-1, keepdims=True)
        score = mx.take_along_axis(z, index, axis=-1)
        weighed = weigh((score - top - mx.log(total)).squeeze(-1))
        factor = (weighed.weights * scale)[:, None]
        at_target = (mx.take_along_axis(shares, index, axis=-1) / total - 1) * factor
        grad = mx.put_along_axis(shares * (factor / total), index, at_target, axis=-1)
        return weighed.loss, grad.astype(logits.dtype), *flat(weighed.metrics, names)

    @loss.vjp
    def backward(primals: Any, cotangents: Any, outputs: list[mx.array]) -> mx.array:
        return outputs[1]

    (value, _, *figures), grad = mx.value_and_grad(lambda rows: loss(head(rows[None])[0]))(rows)
    return Sums(value, unflat(figures, names)), grad, {}


def flat(metrics: Metrics, names: list[str]) -> list[mx.array]:
    """The sums and counts of `metrics` as a list of arrays; stores their names in `names`."""
    names[:] = metrics
    return [array for pair in metrics.values() for array in pair]


def unflat(figures: Sequence[mx.array], names: list[str]) -> Metrics:
    return dict(zip(names, zip(figures[::2], figures[1::2], strict=True), strict=True))


# -- in slices of the vocabulary ----------------------------------------------------------


class OnlineSoftmax(NamedTuple):
    """A softmax over the slices of the vocabulary so far, and its gradient.

    The largest logit so far is subtracted from all logits, and the sums are rescaled when it
    grows: the online softmax of Milakov & Gimelshein (2018), arXiv:1805.02867.
    """

    inputs: mx.array
    """(S, D), inputs of the linear layer."""
    targets: mx.array
    """(S, 1)"""
    seen: mx.array
    """(), the number of tokens so far. An array: a number would be a constant in the graph."""
    at_target: mx.array
    """(S, 1), output of the linear layer at the targets."""
    max_logit: mx.array
    """(S, 1) float32, the largest logit so far."""
    exp_sum: mx.array
    """(S, 1) float32, the sum of exp(logit - max_logit)."""
    grad_acc: mx.array
    """(S, D) float32, the sum of exp(logit - max_logit) x slope of `after` x row of the weight;
    () if no gradient is computed."""


def begin(inputs: mx.array, targets: mx.array, *, gradient: bool = True) -> OnlineSoftmax:
    """The state before the first slice; inputs: (S, D), from head.inputs.

    gradient: whether to compute the gradient too.
    """
    column = (len(inputs), 1)
    return OnlineSoftmax(
        inputs,
        targets[:, None],
        seen=mx.array(0, targets.dtype),
        at_target=mx.zeros(column, inputs.dtype),
        max_logit=mx.full(column, -mx.inf),
        exp_sum=mx.zeros(column),
        grad_acc=mx.zeros(inputs.shape if gradient else ()),
    )


def add(softmax: OnlineSoftmax, part: HeadSlice, head: LinearHead) -> OnlineSoftmax:
    """The state after the next slice. Its rows are used twice, with one exp per logit."""
    products, slopes = part.forward(softmax.inputs), None
    if softmax.grad_acc.ndim:
        logits, slopes = head.logits_and_slopes(products)
    else:
        logits = head.logits(products)
    logits = logits.astype(mx.float32)
    max_logit = mx.maximum(softmax.max_logit, logits.max(-1, keepdims=True))
    exps, shrink = exp(logits - max_logit), mx.exp(softmax.max_logit - max_logit)
    exp_sum = exps.sum(-1, keepdims=True)
    index = softmax.targets - softmax.seen
    count = as_input(part.count, index.dtype)
    inside = (index >= 0) & (index < count)
    found = mx.take_along_axis(products, mx.where(inside, index, 0), axis=-1)
    grad_acc = softmax.grad_acc
    if grad_acc.ndim:
        weights = exps if slopes is None else exps * slopes
        of_slice = part.sum_of_rows(weights, softmax.inputs.dtype, exp_sum)
        grad_acc = grad_acc * shrink + of_slice
    return OnlineSoftmax(
        softmax.inputs,
        softmax.targets,
        seen=softmax.seen + count,
        at_target=mx.where(inside, found, softmax.at_target),
        max_logit=max_logit,
        exp_sum=softmax.exp_sum * shrink + exp_sum,
        grad_acc=grad_acc,
    )


def as_input(number: int, dtype: mx.Dtype) -> mx.array:
    """(), the number as an input of compiled kernels. As a constant, each value needs its own."""
    return mx.arange(number, number + 1, dtype=dtype).squeeze(0)


def softmax_losses(softmax: OnlineSoftmax, logits: mx.array) -> mx.array:
    """(S,) the losses after the last slice; logits: (S, 1), at the targets."""
    return (softmax.max_logit + mx.log(softmax.exp_sum) - logits.astype(mx.float32)).squeeze(-1)


def finish(
    softmax: OnlineSoftmax, head: LinearHead, weigh: Weigh, scale: mx.array | float = 1.0
) -> tuple[Sums, mx.array, Arrays]:
    """After the last slice: the sums of the objective, and its gradients times `scale`.

    They are with respect to the inputs of the linear layer, (S, D), and to its trained rows.
    """
    softmax = OnlineSoftmax(*settled(softmax))  # so that the logits of the last slice are freed
    logits, slopes = head.logits_and_slopes(softmax.at_target)
    weighed = weigh(-softmax_losses(softmax, logits))
    rows = head.rows.gather(softmax.targets.squeeze(-1)).astype(mx.float32)
    rows = rows if slopes is None else rows * slopes
    factors = (weighed.weights * scale)[:, None]
    grad = ((softmax.grad_acc / softmax.exp_sum - rows) * factors).astype(softmax.inputs.dtype)
    return weighed.sums, grad, gradients_of_rows(softmax, head, factors, grad)


def gradients_of_rows(
    softmax: OnlineSoftmax, head: LinearHead, factors: mx.array, after: mx.array
) -> Arrays:
    """The gradients of what is trained of the rows of a head, by name in the model.

    That of row j is the sum over s of (softmax(logits_s)[j] - [j is the target]) x slope x factor
    x input. The softmax is known only after the last slice, so their logits are computed again.

    factors: (S, 1). after: is computed first.
    """
    rows = head.rows
    if not isinstance(rows, SomeTrained):
        return {}
    inputs, first, found = softmax.inputs, 0, dict[str, list[mx.array]]()
    ids, before = mx.array(rows.ids.astype("uint32")), [after]
    for count in rows.pieces:
        for start, stop in head.slices(len(inputs), count):
            inputs, factors = mx.depends([inputs, factors], before)
            part = rows.trained_part(first + start, first + stop, [inputs])
            logits, slopes = head.logits_and_slopes(part.forward(inputs))
            shares = mx.exp(logits.astype(mx.float32) - softmax.max_logit) / softmax.exp_sum
            targets = ids[first + start : first + stop] == softmax.targets
            shares = (shares - targets) * factors
            shares = shares if slopes is None else shares * slopes
            given = shares, inputs.astype(mx.float32)
            before = rows.add_gradients(found, first + start, *given)
        first += count
    return {
        name: (
            found[name][0] if len(found[name]) == 1 else mx.concatenate(found[name], rows.axis)
        ).astype(array.dtype)
        for name, array in rows.trained.items()
    }


def _sliced(
    rows: mx.array, tokens: mx.array, weigh: Weigh, scale: mx.array, head: LinearHead
) -> tuple[Sums, mx.array, Arrays]:
    """The sums of a chunk and its gradients times `scale`."""
    sums, grad, of_head = finish(
        _over_vocabulary(begin(head.inputs(rows), tokens), head), head, weigh, scale
    )
    if head.before is not None:
        _, (grad,) = mx.vjp(head.before, [rows], [grad])
    return sums, grad, of_head


def _over_vocabulary(softmax: OnlineSoftmax, head: LinearHead) -> OnlineSoftmax:
    """Run over all slices of the vocabulary, one after the other."""
    for start, stop in head.slices(len(softmax.inputs)):
        softmax = OnlineSoftmax(*settled(softmax))
        softmax = add(softmax, head.rows.part(start, stop, softmax), head)
    return softmax


def _most_likely(inputs: mx.array, head: LinearHead) -> mx.array:
    """(S,) the token with the largest logit; the first one if several are equal."""
    best, seen = mx.zeros(len(inputs), mx.uint32), mx.array(0, mx.uint32)
    top = mx.full(len(inputs), -mx.inf)
    for start, stop in head.slices(len(inputs)):
        inputs, best, top, seen = settled((inputs, best, top, seen))
        part = head.rows.part(start, stop, [top])
        logits = head.logits(part.forward(inputs))
        here = logits.argmax(-1, keepdims=True)
        largest = mx.take_along_axis(logits, here, axis=-1).squeeze(-1).astype(mx.float32)
        best = mx.where(largest > top, here.squeeze(-1) + seen, best)
        top, seen = mx.maximum(largest, top), seen + part.count
    return best
