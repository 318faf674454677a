"""The walk over both heads, compared with whole logits in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import peak_of
from tests.objectives.plain import exp, log_softmax, plain_divergence
from tests.scheduling import compute_in_order
from your_ai.config.divergences import DivergenceKind, divergence_of
from your_ai.nets.divergence import Compared, compare, softmax_of
from your_ai.nets.head import Function, LayerRows, LinearHead, TargetHead
from your_ai.nets.rounding import dense, quantization_of

DIVERGENCES = ("forward", "reverse", "jsd:0.1", "jsd:0.5", "jsd:0.9")
WIDTHS = {"wider": (64, 96), "narrower": (64, 32)}  # of the student and its teacher
TOLERANCE = 1e-5
S, V = 24, 300


class Side(NamedTuple):
    """A model at S positions."""

    inputs: mx.array
    layer: nn.Module
    after: Function | None = None

    def head(self, tokens: int, **more: Any) -> LinearHead:
        """With slices of about that many tokens."""
        rows = LayerRows(self.layer)
        size = 4 * tokens * max(len(self.inputs), rows.shape[1])
        return LinearHead(rows, after=self.after, slice_bytes=size, **more)

    def logits(self, inputs: mx.array) -> mx.array:
        """(S, V) in float64, without those of padding."""
        weight, bias = (array.astype(mx.float64) for array in dense_of(self.layer))
        products = inputs @ weight.T + bias
        return (products if self.after is None else self.after(products))[:, :V]


def dense_of(layer: nn.Module) -> tuple[mx.array, mx.array]:
    """(V, D) the weight, and (V,) the bias or zeros."""
    found = quantization_of(layer)
    arrays = {name: layer[name] for name in ("weight", "scales", "biases") if name in layer}
    weight = dense(arrays, {} if found is None else found.options)
    return weight, layer.get("bias", mx.zeros(len(weight)))


def softcap(logits: mx.array) -> mx.array:
    return 5 * mx.tanh(logits / 5)


def side(width: int, seed: int, *, rows: int = V, biased: bool = False, scale: float = 2.0) -> Side:
    """A model whose logits have about that standard deviation."""
    keys = mx.random.split(mx.random.key(seed), 3)
    layer = nn.Linear(width, rows, bias=biased)
    layer.weight = scale / math.sqrt(width) * mx.random.normal((rows, width), key=keys[0])
    if biased:
        layer.bias = mx.random.normal((rows,), key=keys[1])
    return Side(mx.random.normal((S, width), key=keys[2]), layer)


def quantized(made: Side) -> Side:
    return made._replace(layer=nn.QuantizedLinear.from_linear(made.layer, 32, 4))


def in_dtype(made: Side, dtype: mx.Dtype) -> Side:
    made.layer.set_dtype(dtype)
    return made._replace(inputs=made.inputs.astype(dtype))


def with_padding(made: Side, value: float) -> Side:
    """With large logits of the rows beyond the vocabulary."""
    made.layer.weight[V:] = value
    return made


def two_sides(heads: str, widths: str) -> tuple[Side, Side]:
    (own, other) = WIDTHS[widths]
    if heads == "plain":
        return side(own, 0), side(other, 1)
    if heads == "biases":
        return side(own, 0, biased=True), side(other, 1, biased=True)
    if heads == "soft caps":
        student = side(own, 0, scale=6.0)._replace(after=softcap)
        return student, side(other, 1)._replace(after=lambda z: 2 * softcap(z))
    if heads == "4 bits":
        return quantized(side(own, 0)), quantized(side(other, 1, biased=True))
    if heads == "padded student":
        return with_padding(side(own, 0, rows=V + 70), 9.0), side(other, 1)
    if heads == "padded teacher":
        return side(own, 0), with_padding(side(other, 1, rows=V + 70), 9.0)
    raise ValueError(heads)


HEADS = ("plain", "biases", "soft caps", "4 bits", "padded student", "padded teacher")


def walked(
    student: Side, teacher: Side, kind: DivergenceKind, temperature: float = 1.0, **more: Any
) -> Compared:
    target = TargetHead(teacher.head(64), V)
    args = student.inputs, teacher.inputs, student.head(64), target, kind, temperature
    return compare(*args, **more)


class Whole(NamedTuple):
    """The definitions, from whole logits in float64."""

    divergences: np.ndarray
    gradients: np.ndarray
    metrics: dict[str, float]


def whole(student: Side, teacher: Side, kind: DivergenceKind, temperature: float = 1.0) -> Whole:
    with mx.stream(mx.cpu):
        inputs, states = (made.inputs.astype(mx.float64) for made in (student, teacher))
        theirs = log_softmax(teacher.logits(states) / temperature)

        def divergences(inputs: mx.array) -> mx.array:
            mine = log_softmax(student.logits(inputs) / temperature)
            return temperature**2 * plain_divergence(kind, mine, theirs)

        grads = mx.grad(lambda inputs: divergences(inputs).sum())(inputs)
        mine = log_softmax(student.logits(inputs) / temperature)
        found = divergences(inputs)
        metrics = {
            "divergence": found.mean(),
            "agreement": (mine.argmax(-1) == theirs.argmax(-1)).astype(mx.float64).mean(),
            "entropy": -(exp(mine) * mine).sum(-1).mean(),
            "entropy/teacher": -(exp(theirs) * theirs).sum(-1).mean(),
        }
        mx.eval(found, grads, metrics)
    return Whole(np.array(found), np.array(grads), {n: v.item() for n, v in metrics.items()})


def error_of(found: mx.array, expected: np.ndarray) -> float:
    """The norm of the difference, relative to that of what is expected."""
    distance = np.linalg.norm(np.array(found.astype(mx.float32), np.float64) - expected)
    return float(distance / np.linalg.norm(expected))


def assert_close(found: Compared, expected: Compared | Whole, most: float = TOLERANCE) -> None:
    assert error_of(found.divergences, np.array(expected.divergences)) < most
    assert error_of(found.gradients, np.array(expected.gradients)) < most


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_walk_gives_divergences_gradients_and_metrics_of_whole_logits(
    name, heads, widths, temperature
):
    student, teacher = two_sides(heads, widths)
    kind = divergence_of(name)
    found = walked(student, teacher, kind, temperature)
    expected = whole(student, teacher, kind, temperature)
    assert_close(found, expected)
    sums = found.metrics(mx.ones(S, mx.bool_))
    means = {name: (value / count).item() for name, (value, count) in sums.items()}
    assert means == pytest.approx(expected.metrics, rel=TOLERANCE)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_without_gradients_the_divergences_are_the_same(name):
    student, teacher = two_sides("4 bits", "wider")
    kind = divergence_of(name)
    found = walked(student, teacher, kind, gradient=False)
    assert found.gradients.shape == ()
    assert mx.array_equal(found.divergences, walked(student, teacher, kind).divergences)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_softmax_beside_the_states_takes_the_place_of_a_walk(dtype):
    """And has no other parts in it, to the bit."""
    student, teacher = (in_dtype(made, dtype) for made in two_sides("biases", "wider"))
    target, states = TargetHead(teacher.head(64), V), teacher.inputs
    alone = [softmax_of([part], target, 2.0).beside(part) for part in (states[:7], states[7:])]
    together = softmax_of([states[:7], states[7:]], target, 2.0).beside(states)
    assert mx.array_equal(mx.concatenate(alone).view(mx.uint8), together.view(mx.uint8))
    kind = divergence_of("jsd:0.3")
    expected = walked(student, teacher, kind, 2.0)
    found = walked(student, teacher._replace(inputs=together), kind, 2.0)
    for one, other in zip(found.teacher, expected.teacher, strict=True):
        assert mx.allclose(one, other, rtol=1e-5)
    assert error_of(found.gradients, np.array(expected.gradients)) < TOLERANCE


@pytest.mark.parametrize("rising", [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_largest_logits_may_be_in_the_first_or_last_slice(name, rising):
    """The logits of each slice are about 13 above, or below, those of the slice before; less where
    the models are opposed, as they would have no token in common, and jsd no gradient."""
    student, teacher = two_sides("biases", "wider")
    slope = 0.2 if rising[0] == rising[1] else 0.02
    for made, up in zip((student, teacher), rising, strict=True):
        made.layer.bias = made.layer.bias + slope * mx.arange(V)[:: 1 if up else -1]
    kind = divergence_of(name)
    assert_close(walked(student, teacher, kind), whole(student, teacher, kind))


@pytest.mark.parametrize("shifts", [(4096.0, 0.0), (0.0, -4096.0), (-4096.0, 4096.0)])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_constant_added_to_all_logits_changes_nothing(name, shifts):
    """Weights and biases are multiples of 1/32, and inputs integers, so that logits are exact."""
    sides = two_sides("biases", "wider")
    for made in sides:
        made.layer.weight = mx.round(4 * made.layer.weight) / 32
        made.layer.bias = mx.round(4 * made.layer.bias) / 32
    sides = [made._replace(inputs=mx.round(made.inputs)) for made in sides]
    kind = divergence_of(name)
    before = walked(*sides, kind)
    for made, shift in zip(sides, shifts, strict=True):
        made.layer.bias = made.layer.bias + shift
    assert_close(walked(*sides, kind), before)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_student_that_equals_its_teacher_has_no_divergence(name, dtype):
    student = in_dtype(side(64, 0, biased=True), dtype)
    found = walked(student, student, divergence_of(name), 2.0)
    assert mx.abs(found.divergences).max() < 1e-6
    assert mx.abs(found.gradients).max() < 1e-9
    agreement, count = found.metrics(mx.ones(S, mx.bool_))["agreement"]
    assert agreement.item() == count.item() == S


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_of_nearly_equal_models_are_about_as_good_as_those_of_whole_float32_logits(name):
    """At a divergence of about 1e-4, where the rounding of the logits counts most."""
    student, teacher = side(64, 0, scale=3.0), side(64, 0, scale=3.0)
    noise = mx.random.normal(teacher.layer.weight.shape, key=mx.random.key(9))
    teacher.layer.weight = teacher.layer.weight + 0.002 * noise
    kind = divergence_of(name)
    expected = whole(student, teacher, kind)
    assert expected.divergences.mean() < 3e-4
    theirs = nn.log_softmax(teacher.layer(teacher.inputs))

    def in_float32(inputs: mx.array) -> mx.array:
        q, p = nn.log_softmax(student.layer(inputs)), theirs
        m = mx.logaddexp(p + math.log(kind.share), q + math.log(1 - kind.share))
        kl = lambda p, q: (mx.exp(p) * (p - q)).sum()  # noqa: E731
        found = {"forward": lambda: kl(p, q), "reverse": lambda: kl(q, p),
                 "jsd": lambda: kind.share * kl(p, m) + (1 - kind.share) * kl(q, m)}  # fmt: skip
        return found[kind.name]()

    usual = error_of(mx.grad(in_float32)(student.inputs), expected.gradients)
    found = walked(student, teacher, kind)
    assert error_of(found.gradients, expected.gradients) < min(1.25 * usual, 1e-4)
    assert np.abs(np.array(found.divergences) - expected.divergences).max() < 3e-7


@pytest.mark.parametrize(("dtype", "bound"), [(mx.float16, 4e-3), (mx.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_half_precision_stays_near_float32(name, dtype, bound):
    student, teacher = (in_dtype(made, dtype) for made in two_sides("soft caps", "wider"))
    found = walked(student, teacher, divergence_of(name))
    assert found.gradients.dtype == found.divergences.dtype == mx.float32
    assert_close(found, whole(student, teacher, divergence_of(name)), bound)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_float16_sums_of_large_rows_do_not_overflow(name):
    """All tokens are about as likely, and all rows are large: their plain sum is above 65,504."""
    tokens = 2000
    student, teacher = side(8, 0, rows=tokens), side(8, 1, rows=tokens, scale=0.5)
    student.layer.weight = mx.full((tokens, 8), 300.0) + student.layer.weight
    student, teacher = (
        in_dtype(made._replace(inputs=made.inputs / 1024), mx.float16)
        for made in (student, teacher)
    )
    heads = student.head(1000), TargetHead(teacher.head(1000), tokens)
    found = compare(student.inputs, teacher.inputs, *heads, divergence_of(name))
    assert mx.isfinite(found.gradients).all()
    assert mx.isfinite(found.divergences).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tokens_that_both_models_exclude_add_nothing(name):
    """By a bias of minus infinity, in the middle of the vocabulary."""
    student, teacher = two_sides("biases", "wider")
    kind, kept = divergence_of(name), np.flatnonzero(np.arange(V) % 100 < 90)
    fewer = [
        made._replace(layer=nn.Linear(made.inputs.shape[1], len(kept)))
        for made in (student, teacher)
    ]
    for made, short in zip((student, teacher), fewer, strict=True):
        short.layer.weight, short.layer.bias = (
            made.layer[name][mx.array(kept)] for name in ("weight", "bias")
        )
        made.layer.bias[mx.array(np.setdiff1d(np.arange(V), kept))] = -mx.inf
    target = TargetHead(fewer[1].head(64), len(kept))
    expected = compare(*(m.inputs for m in fewer), fewer[0].head(64), target, kind)
    found = walked(student, teacher, kind)
    assert_close(found, expected)
    real = mx.ones(S, mx.bool_)
    for name, (value, _) in expected.metrics(real).items():
        assert found.metrics(real)[name][0].item() == pytest.approx(value.item(), rel=TOLERANCE)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_nonfinite_inputs_give_a_nonfinite_divergence(name, bad):
    for at in (0, 1):
        sides = list(two_sides("plain", "wider"))
        sides[at].inputs[3, 5] = bad
        found = walked(*sides, divergence_of(name)).divergences
        assert np.flatnonzero(~np.isfinite(np.array(found))).tolist() == [3]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(DIVERGENCES),
    seed=st.integers(0, 1000),
    scales=st.tuples(*[st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0])] * 2),
    temperature=st.sampled_from([0.1, 1.0, 7.0]),
)
def test_divergences_are_within_their_bounds(name, seed, scales, temperature):
    student, teacher = (side(8, seed + i, scale=scale) for i, scale in enumerate(scales))
    kind = divergence_of(name)
    found = np.array(walked(student, teacher, kind, temperature).divergences) / temperature**2
    largest = max(np.abs(np.array(m.layer(m.inputs))).max() for m in (student, teacher))
    rounding = 1e-6 * (1 + largest / temperature)
    assert (found >= -rounding).all()
    if kind.name == "jsd":  # the mixture has at least its share of each of both
        b = kind.share
        most = -b * math.log(b) - (1 - b) * math.log(1 - b)
        assert (found <= most + rounding).all()


@pytest.mark.memory
@pytest.mark.parametrize("name", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_memory_does_not_grow_with_the_vocabulary(name, compiled):
    """The logits of one model would be 10 and 41 MB, 1,024 bytes a token of the vocabulary."""
    compute_in_order()
    count, peaks = 256, {}
    for tokens in (10_000, 40_000):
        student, teacher = side(64, 0, rows=tokens), side(96, 1, rows=tokens)
        inputs, states = (mx.random.normal((count, width)) for width in (64, 96))
        heads = [made._replace(inputs=inputs).head(200) for made in (student, teacher)]
        mx.eval(inputs, states, student.layer.parameters(), teacher.layer.parameters())

        def walk(
            inputs: mx.array, states: mx.array, heads: Any = heads, tokens: int = tokens
        ) -> list[mx.array]:
            target = TargetHead(heads[1], tokens)
            found = compare(inputs, states, heads[0], target, divergence_of(name))
            return [found.divergences, found.gradients]

        function = mx.compile(walk) if compiled else walk
        mx.eval(function(inputs, states))
        peaks[tokens] = peak_of(partial(function, inputs, states))
    assert peaks[10_000] < 4 * count * 10_000 / 3
    # A few operations begin together: it may be two slices of 200 tokens more, however many tokens.
    assert peaks[40_000] - peaks[10_000] < 15 * 30_000
