"""How far a student's predictions are from a teacher's, over the whole vocabulary.

Of the teacher only the inputs of its head's linear layer are there. The rows of both heads are
walked in slices, so the logits of neither model are ever whole in memory. With the teacher's
probabilities p, the student's q, its logits z, and a temperature t that divides the logits of both:

    forward   KL(p|q) = sum p log(p / q)                     t dKL/dz = q - p
    reverse   KL(q|p) = sum q log(q / p)                     t dKL/dz = q (log(q / p) - KL)
    jsd:b     b KL(p|m) + (1 - b) KL(q|m), m = b p + (1 - b) q
              with r = log(q / m) and E = sum q r            t dJSD/dz = (1 - b) q (r - E)

All are multiplied by t^2, as by Hinton et al. (2015), arXiv:1503.02531, so that gradients keep
their size. The generalized JSD is that of Agarwal et al. (2023), arXiv:2306.13649. Each gradient is
c1 (sum w1 W) + c0 (sum w0 W), where the weights w of a slice do not depend on later slices, but for
the largest logits so far: forward and reverse need one walk. jsd needs p and q: a walk over the
student's head normalizes q first, and the normalization of p comes with the states of the teacher.

Shapes: S positions, D hidden size of the student, n tokens per slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from your_ai.config.divergences import FORWARD, JSD, DivergenceKind
from your_ai.memory.sizes import SOFTMAX_BYTES
from your_ai.nets.head import HeadSlice, LinearHead, TargetHead
from your_ai.nets.numerics import exp, settled
from your_ai.objectives.objective import Metrics

Settle = Callable[[list[mx.array]], list[mx.array]]  # returns the same arrays, as `settled`

LOWEST = -1e30  # below any logit; finite, so that differences are
TINY = 1e-37  # a probability that adds nothing to a divergence


class Softmax(NamedTuple):
    """The softmax of one model over the slices so far; (S, 1) each."""

    top: mx.array
    """The largest logit."""
    total: mx.array
    """The sum of e = exp(logit - top)."""
    moment: mx.array
    """The sum of e (logit - top)."""
    best: mx.array
    """uint32, the token of the largest logit."""

    @property
    def entropy(self) -> mx.array:
        return mx.log(self.total) - self.moment / self.total

    def beside(self, states: mx.array) -> mx.array:
        """(S, D) states of a teacher with the softmax of their logits, as columns of its bytes."""
        columns = [*self[:3], self.best.view(mx.float32)]
        return mx.concatenate([states, mx.concatenate(columns, axis=1).view(states.dtype)], axis=1)

    @staticmethod
    def columns(dtype: mx.Dtype) -> int:
        """The number of columns that `beside` adds to states of this dtype."""
        return SOFTMAX_BYTES // dtype.size

    @staticmethod
    def apart(states: mx.array, width: int) -> tuple[mx.array, Softmax | None]:
        """The first `width` columns of states, and the softmax that is beside them, if one is."""
        if states.shape[1] == width:
            return states, None
        columns = mx.contiguous(states[:, width:]).view(mx.float32)
        top, total, moment, best = mx.split(columns, 4, axis=1)
        return states[:, :width], Softmax(top, total, moment, mx.contiguous(best).view(mx.uint32))


class Compared(NamedTuple):
    """Student and teacher at S positions."""

    divergences: mx.array
    """(S,) float32."""
    gradients: mx.array
    """(S, D) float32, with respect to the inputs of the student's linear layer; () if none are
    computed."""
    student: Softmax
    teacher: Softmax

    @property
    def agrees(self) -> mx.array:
        """(S,) bool, whether both find the same token the most likely one."""
        return (self.student.best == self.teacher.best).squeeze(-1)

    def metrics(self, real: mx.array) -> Metrics:
        """Means over the positions at which `real`, (S,), is true."""
        figures = {
            "divergence": self.divergences,
            "agreement": self.agrees.astype(mx.float32),
            "entropy": self.student.entropy.squeeze(-1),
            "entropy/teacher": self.teacher.entropy.squeeze(-1),
        }
        count = real.sum()
        return {n: (mx.where(real, value, 0).sum(), count) for n, value in figures.items()}


def compare(
    inputs: mx.array,
    states: mx.array,
    head: LinearHead,
    target: TargetHead,
    divergence: DivergenceKind,
    temperature: float = 1.0,
    *,
    gradient: bool = True,
) -> Compared:
    """Compare the predictions of a student with those of its teacher.

    inputs: (S, D) of the student's linear layer. states: the same of the teacher, whose width may
    be another. For jsd, with their softmax beside them, if it is known: another walk over the
    teacher's head computes it.
    """
    states, known = Softmax.apart(states, target.head.rows.shape[1])
    pair = TwoHeads(inputs, states, head, target, temperature)
    if divergence.name == JSD:
        known = known or softmax_of([states], target, temperature)
        found = jsd(pair, known, divergence.share, gradient)
    else:
        found = kl(pair, divergence, gradient)
    factor = temperature * temperature
    slope = 1 / temperature  # of the divided logits
    return found._replace(
        divergences=found.divergences.squeeze(-1) * factor,
        gradients=found.gradients * (factor * slope),
    )


def softmax_of(
    parts: Sequence[mx.array],
    target: TargetHead,
    temperature: float = 1.0,
    between: Settle = settled,
) -> Softmax:
    """The softmax of the logits of a head, divided by the temperature, at the positions of all
    parts, (S, D) inputs of its linear layer each. What is found of a part does not depend on the
    others, to the bit, if none has more than D positions. between: called between two slices.
    """
    head, scale = target.head, 1 / temperature
    found = started(sum(map(len, parts)))
    for start, stop in within(head.slices(max(map(len, parts))), target.vocabulary):
        state = between(list(found))
        rows = head.rows.part(start, stop, state)
        products = [rows.forward(part) for part in parts]
        joined = products[0] if len(products) == 1 else mx.concatenate(products)
        found = stepped(Softmax(*state), scaled(head.logits(joined), scale), start).softmax
    return found


def within(slices: Iterator[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """The slices of the first `count` tokens."""
    for start, stop in slices:
        if start < count:
            yield start, min(stop, count)


def scaled(logits: mx.array, scale: float) -> mx.array:
    return mx.maximum(logits.astype(mx.float32) * scale, LOWEST)


class TwoHeads(NamedTuple):
    """The two models at S positions."""

    inputs: mx.array
    states: mx.array
    head: LinearHead
    target: TargetHead
    temperature: float

    def slices(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of slices of the tokens that both models know."""
        wider = max(self.head, self.target.head, key=lambda head: head.rows.shape[1])
        return within(wider.slices(len(self.inputs)), self.target.vocabulary)

    def logits(
        self, start: int, stop: int, after: list[mx.array]
    ) -> tuple[mx.array, mx.array, HeadSlice, mx.array | None]:
        """(S, n) float32 logits of the student and of the teacher, divided by the temperature; the
        rows of the student, and the slopes of its logits, None if those are 1. Computed only after
        the arrays `after`."""
        part = self.head.rows.part(start, stop, after)
        mine, slopes = self.head.logits_and_slopes(part.forward(self.inputs))
        head = self.target.head
        theirs = head.logits(head.rows.part(start, stop, after).forward(self.states))
        scale = 1 / self.temperature
        return scaled(mine, scale), scaled(theirs, scale), part, slopes


def started(count: int) -> Softmax:
    column = (count, 1)
    return Softmax(
        mx.full(column, LOWEST), mx.zeros(column), mx.zeros(column), mx.zeros(column, mx.uint32)
    )


class Step(NamedTuple):
    """A slice of the logits of one model, and how its maximum changes the sums before it."""

    softmax: Softmax
    """With the slice."""
    exps: mx.array
    """(S, n)"""
    below: mx.array
    """(S, n) logit - top, of the new top."""
    shrink: mx.array
    """(S, 1), the factor of sums before."""
    moved: mx.array
    """(S, 1), the old top - the new one."""


def stepped(softmax: Softmax, logits: mx.array, start: int) -> Step:
    """The softmax with one more slice, which begins at token `start`."""
    here = logits.argmax(-1, keepdims=True)
    largest = mx.take_along_axis(logits, here, axis=-1)
    top = mx.maximum(softmax.top, largest)
    below, moved = logits - top, softmax.top - top
    exps, shrink = exp(below), mx.exp(moved)
    moment = shrink * (softmax.moment + moved * softmax.total)
    found = Softmax(
        top,
        softmax.total * shrink + exps.sum(-1, keepdims=True),
        moment + (exps * below).sum(-1, keepdims=True),
        mx.where(largest > softmax.top, here.astype(mx.uint32) + start, softmax.best),
    )
    return Step(found, exps, below, shrink, moved)


def weighted(
    part: HeadSlice, weights: mx.array, slopes: mx.array | None, dtype: mx.Dtype
) -> mx.array:
    """(S, D) float32, the sum of weight x slope x row; weights: (S, n)."""
    return part.sum_of_rows(weights if slopes is None else weights * slopes, dtype)


def kl(pair: TwoHeads, divergence: DivergenceKind, gradient: bool) -> Compared:
    """The forward or the reverse KL divergence, in one walk.

    The difference of the logits is taken as d = (z - top of z) - (y - top of y), with the
    teacher's logits y: then it is small where the models are alike, and so is what cancels.
    """
    count, dtype = len(pair.inputs), pair.inputs.dtype
    forward = divergence.name == FORWARD
    student, teacher, cross = started(count), started(count), mx.zeros((count, 1))
    shape = pair.inputs.shape if gradient else ()
    first = second = mx.zeros(shape)
    for start, stop in pair.slices():
        *state, cross, first, second = settled([*student, *teacher, cross, first, second])
        student, teacher = Softmax(*state[:4]), Softmax(*state[4:])
        mine, theirs, part, slopes = pair.logits(start, stop, [cross, first])
        q, p = stepped(student, mine, start), stepped(teacher, theirs, start)
        # cross: the sum of e d, where e is that of the distribution that is averaged over.
        gap, change = q.below - p.below, q.moved - p.moved
        over, before = (p, teacher) if forward else (q, student)
        products = over.exps * gap
        cross = over.shrink * (cross + change * before.total)
        cross = cross + products.sum(-1, keepdims=True)
        student, teacher = q.softmax, p.softmax
        if gradient:
            own = weighted(part, q.exps, slopes, dtype)
            if forward:
                second = second * p.shrink + weighted(part, p.exps, slopes, dtype)
            else:
                moved = q.shrink * (second + change * first)
                second = moved + weighted(part, products, slopes, dtype)
            first = first * q.shrink + own
    logs = mx.log(student.total / teacher.total)
    if forward:
        found = logs - cross / teacher.total
        grads = first / student.total - second / teacher.total if gradient else first
    else:
        mean = cross / student.total
        found = mean - logs
        grads = (second - mean * first) / student.total if gradient else first
    return Compared(found, grads, student, teacher)


def jsd(pair: TwoHeads, teacher: Softmax, share: float, gradient: bool) -> Compared:
    """The generalized Jensen-Shannon divergence; teacher: its softmax.

    A walk over the student's head comes before the one over both.
    """
    count, dtype = len(pair.inputs), pair.inputs.dtype
    inputs = mx.depends([pair.inputs], [teacher.total])
    own = TargetHead(pair.head, pair.target.vocabulary)
    student = softmax_of(inputs, own, pair.temperature)
    of_student, of_teacher = mx.log(student.total), mx.log(teacher.total)
    found, mean = mx.zeros((count, 1)), mx.zeros((count, 1))
    first = second = mx.zeros(pair.inputs.shape if gradient else ())
    state = mx.depends([found, mean, first, second], [of_student, of_teacher])  # the walk before
    for start, stop in pair.slices():
        found, mean, first, second = settled(state)
        mine, theirs, part, slopes = pair.logits(start, stop, [found, first])
        mine, theirs = settled([mine - student.top - of_student, theirs - teacher.top - of_teacher])
        # log(q / p) from the logits, and log(q / m) with a log that is near 0: small where the
        # models are alike, as what cancels. Each part is settled, so that it is a kernel of its
        # own: those of compilers are fast if they neither broadcast many arrays nor call log.
        apart = mine - theirs
        (q,), (p,) = settled([exp(mine)]), settled([exp(theirs)])
        larger = mx.maximum(mx.maximum(p, q), TINY)
        (mixed,) = settled([mx.maximum((q + share * (p - q)) / larger, TINY)])
        (logs,) = settled([mx.log(mixed)])
        gap = mx.minimum(apart, 0) - logs
        (weights,) = settled([q * gap])
        of_q = weights.sum(-1, keepdims=True)
        of_p = (p * (gap - apart)).sum(-1, keepdims=True)
        found = found + share * of_p + (1 - share) * of_q
        mean = mean + of_q
        if gradient:
            first = first + weighted(part, q, slopes, dtype)
            second = second + weighted(part, weights, slopes, dtype)
        state = [found, mean, first, second]
    grads = (1 - share) * (second - mean * first) if gradient else first
    return Compared(found, grads, student, teacher)
