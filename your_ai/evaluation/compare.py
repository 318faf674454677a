"""Compare base and adapter row by row, with one model in memory, under a memory limit.

First the model gets freshly initialized adapter layers, which change nothing, and is measured:
this is the base. Then the layers get the learned weights, and the model is measured again. If an
objective compares with the adapter that the run started from, that is measured in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.config import REWARD, TrainConfig
from your_ai.config.adapter_facts import MATRICES
from your_ai.config.adapter_starts import starting_of
from your_ai.data.batches import RowsAt
from your_ai.data.encode import Encoder, SamplePrompt, token_ids
from your_ai.data.examples import Examples
from your_ai.data.lines import file_of_first_row
from your_ai.data.preferences import Kind
from your_ai.engine.build import Built, build_engine
from your_ai.engine.measure_costs import measure_costs
from your_ai.engine.prefix import Store
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import Opened, open_model, start_vocabulary
from your_ai.errors import RunError, UserError
from your_ai.evaluation.custom_metric import Metric
from your_ai.evaluation.dataset_scores import ExampleScores, scored
from your_ai.evaluation.rows import (
    EncodedRows,
    EvaluationRows,
    cut_text,
    in_training_data,
    load_rows,
    seen_by_teacher,
)
from your_ai.evaluation.teacher import (
    Teacher,
    TeacherModel,
    build_teacher,
    compared_as,
    named_teacher,
    nameless_store,
    open_teacher,
    taught,
)
from your_ai.gates.token_ids import vocabulary_of
from your_ai.generation.generate import Sampling, answer_room
from your_ai.generation.samples import MOST_TOGETHER, sampled
from your_ai.hub.find import find_model, fingerprint, tokenizer_fingerprint
from your_ai.memory import allocator
from your_ai.memory.budget import (
    Measuring,
    budget_of_evaluation,
    fused_budget,
    limit_of,
    row_limit,
)
from your_ai.memory.plan import Budget
from your_ai.memory.workload import Plan, RolloutSizes, TeacherSizes, keeps_softmax, words
from your_ai.modelfiles.quantized_copies import make_copy, place_of_copy
from your_ai.nets import model, saved_adapter
from your_ai.nets.numerics import compute_dtype
from your_ai.nets.parts import empty
from your_ai.nets.saved_adapter import Adapter, Trained, read_adapter, training_of
from your_ai.objectives.chosen import needs_reference
from your_ai.run import checkpoint

T = TypeVar("T")
SHOWN_TOKENS = 128  # of an answer that is only shown, which is cut to fewer characters


class EvaluationProgress(NamedTuple):
    """The current work of the evaluation, and how far it is. `total` is 0 if unknown."""

    doing: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """Settings of a measurement of rows."""

    batch_size: int
    """Rows that go through the model together, if they fit."""
    max_memory_gb: float | None = None
    """Memory limit of the process; None for the machine's default."""
    metric: Metric | None = None
    """If set, answers are generated and scored."""
    max_tokens: int | None = None
    """Maximum tokens of an answer; None derives it from the length of the expected answer."""
    to_show: Callable[[Comparison], Sequence[int]] | None = None
    """Chooses the rows, by index, whose answers are generated where there is no metric."""
    engine: str = "auto"
    """The engine to plan with, or auto."""
    teacher: str | None = None
    """A model, or run:NAME, whose predictions are compared too."""

    @property
    def most_new_tokens(self) -> int | None:
        """Maximum tokens of an answer; None for one that follows the expected answer's."""
        return SHOWN_TOKENS if self.max_tokens is None and self.metric is None else self.max_tokens


@dataclass(frozen=True)
class RowMeasures:
    """The measurements of one model, base or adapter, over m rows."""

    losses: np.ndarray
    """(m,) float64: the sum of the losses of a row's trained tokens; 0 without a good answer. Of a
    reward model, the negative score."""
    exact: np.ndarray
    """(m,) bool: whether every token of the answer is the most likely one."""
    scores: np.ndarray | None = None
    """(m,) float64: the metric's scores, NaN for rows that ask nothing; None without a metric."""
    answers: dict[int, str] | None = None
    """The generated answers by row index: to all rows that ask for a metric, or to those that
    `Request.to_show` chose; None if nothing is generated."""
    bad_losses: np.ndarray | None = None
    """(m,) float64: as `losses`, of the rows' bad answers; None if there is none."""
    divergences: np.ndarray | None = None
    """(m,) float64: the sum of the divergences from a teacher at a row's trained tokens, without
    those of a bad answer; None without a teacher."""
    agreements: np.ndarray | None = None
    """(m,) float64: at how many of these the most likely token is the teacher's."""


@dataclass(frozen=True)
class Comparison:
    """The measurements of base and adapter on the same rows."""

    rows: EvaluationRows
    base: RowMeasures
    adapter: RowMeasures
    metric_name: str | None
    leaked: int | None
    """How many of the rows the run was trained on; None if unknown."""
    plan: str
    """The memory plan in words."""
    notes: tuple[str, ...]
    """Messages for the user."""
    start: RowMeasures | None = None
    """The adapter that the run started from, if the run's rewards compare with it."""
    teacher: str | None = None
    """The model whose predictions are compared, as it was named."""


@dataclass(frozen=True)
class AskedTeacher:
    """The model whose predictions are compared with those of base and adapter."""

    model: TeacherModel
    opened: tuple[Opened, int]
    """As `open_teacher` returns it."""
    seen: Examples | None
    """The rows as it sees them, if that is not as the run does."""

    def sizes(self, base: Path, dtype: mx.Dtype, config: TrainConfig) -> TeacherSizes:
        longest = 0 if self.seen is None else int(self.seen.lengths.max())
        sizes = self.model.sizes(base, dtype.size)
        return replace(sizes, longest=longest, softmax=keeps_softmax(config))

    def built(
        self,
        plan: Plan,
        store: Callable[[int], Store],
        examples: Examples,
        config: TrainConfig,
    ) -> Teacher:
        found = build_teacher(self.model, *self.opened, plan, store, None, compared_as(config))
        if self.seen is not None:
            found.reads(examples, self.seen)
        return found


def compare(
    run: Trained, path: Path, request: Request
) -> Generator[EvaluationProgress, None, Comparison]:
    """Measure the rows of a file with the run's base and with its adapter, or with the model that
    the run left.

    Raises UserError for a bad row, an adapter that does not fit the model, a memory limit that
    is too small, or a metric that fails.
    """
    config, (folder, bits), whole = run.config, run.source, run.adapter.kind.is_whole
    named = teacher_to_compare(run, request)
    if whole:
        folder = find_model(config.model)
    doing = "repacking the model" if bits is None else "quantizing the model"
    memory = limit_of(request.max_memory_gb)
    for step in make_copy(folder, bits, memory):
        yield EvaluationProgress(doing, step.done_bytes, step.total_bytes)
    folder = place_of_copy(folder, bits)
    yield EvaluationProgress(f"reading {Path(file_of_first_row(path)).name}")
    dtype = compute_dtype(config.dtype)
    opened = open_model(folder, dtype)
    network, tokenizer = opened.network, opened.tokenizer(run.tokenizer_files)
    files = fingerprint(folder) if whole else run.files()
    tokenized_by = tokenizer_fingerprint(files, tokenizer.eos_token_ids)
    saved_adapter.put_trained_rows(network, run.adapter)
    limit = row_limit(config.max_row_bytes, memory)
    kind = kind_to_measure(config)
    encoder = Encoder(tokenizer, config.mask_prompt, vocabulary_of(network), limit, kind)
    rows = rows_to_measure(path, config, request, encoder, tokenized_by)
    start = start_of(run) if rows.has_preferences else None
    is_reward = config.objective == REWARD
    asked = None
    if named is not None:
        given, seen = rows.trained.examples, None
        if config.teacher_prompt:
            given = seen = seen_by_teacher(path, config, encoder, tokenized_by, given)
        room = int(given.lengths.max())
        asked = AskedTeacher(named, open_teacher(named, opened, tokenizer, room), seen)
    most = max(len(rows.trained.examples), len(rows.answers.examples))
    request = replace(request, batch_size=min(request.batch_size, most))
    yield EvaluationProgress("checking whether the rows are in the training data")
    leaked = in_training_data(rows, config, tokenized_by)
    most = max(int(found.examples.lengths.max()) for found in (rows.trained, rows.answers))
    model.check_positions(network, most, f"{path}: --max-seq-length {config.max_seq_length}")
    allocator.free()  # the memory that tokenizing used

    budget_for = partial(
        budget_of_evaluation,
        replace(
            training_of(run.adapter, config, len(network.layers)),
            vocabulary=model.vocabulary_sizes(network, config),
        ),
        folder,
        dtype,
        sorted({*rows.trained.lengths, *rows.answers.lengths}),
        request.batch_size,
        memory,
        can_stream=opened.can_stream,
        score_head=is_reward,
        teacher=None if asked is None else asked.sizes(folder, dtype, config),
        measuring=Measuring(partial(measure_costs, network, with_adapters(config))),
    )
    sized = partial(answer_sizes, rows, network, tokenizer, request)
    sizes = None if request.metric is None else sized(range(len(rows)))
    budget = budget_for(answers=sizes, engine=request.engine)
    hold(budget)
    teacher = None
    if asked is not None:
        store = nameless_store(run.folder.path, rows.trained.examples, dtype)
        teacher = asked.built(budget.choice.option.plan, store, rows.trained.examples, config)
        reading = teacher.fill(teacher.seen_of(rows.trained.examples))
        yield from with_progress("teacher: predictions", reading, len(rows.trained.examples))
    start_vocabulary(opened, {})
    untrained = {} if whole else put_new_layers(network, run)
    if is_reward:
        saved_adapter.put_trained_score_head(network, run.adapter, budget.workload.facts.hidden)
    engine = budget.choice.option.plan.engine
    built = built_to_measure(opened, engine, config, teacher)
    allocator.free()
    if built.plan != engine:  # the model cannot be split into parts
        budget = fused_budget(budget)
        hold(budget)
    plan = budget.choice.option.plan
    rows_at = partial(plan.rows, batch_size=request.batch_size)
    ready = Ready(network, tokenizer, built.engine, rows_at, plan.wave, teacher)
    base, started = (yield from measure_rows("base", ready, rows, request)), None
    if start is not None:
        saved_adapter.set_arrays(network, read_adapter(start))
        alone = ready._replace(teacher=None)
        started = yield from measure_rows("start", alone, rows, replace(request, metric=None))
    if whole:
        empty(network)  # others refer to it, and only one model fits
        del built, ready
        allocator.free()
        opened = open_model(run.base, dtype)
        built = built_to_measure(opened, plan.engine, config, teacher)
        ready = Ready(opened.network, tokenizer, built.engine, rows_at, plan.wave, teacher)
    else:
        saved_adapter.set_arrays(network, run.adapter)
    adapter = yield from measure_rows("adapter", ready, rows, request)
    texts = cut_text(rows, config), start_text(config, started), rounding_text(run.adapter)
    notes = (*budget.limit.notices, *texts)
    text = words(plan, max(budget.workload.lengths))
    name = None if request.metric is None else request.metric.name
    notes = tuple(filter(None, notes))
    found = Comparison(rows, base, adapter, name, leaked, text, notes, started, request.teacher)
    if whole or is_reward:
        return found

    def sized_budget(places: list[int]) -> Budget:
        return budget_for(answers=sized(places), engine=plan.engine)

    return (yield from with_worst_answers(found, ready, request, sized_budget, untrained))


def with_worst_answers(
    found: Comparison,
    ready: Ready,
    request: Request,
    sized_budget: Callable[[list[int]], Budget],
    untrained: dict[str, mx.array],
) -> Generator[EvaluationProgress, None, Comparison]:
    """The comparison with answers to the rows that are shown, if they can be given; with a note if
    not.

    sized_budget: the budget of answers to some rows. untrained: as in `with_answers`.
    """
    if request.metric is not None or request.to_show is None:
        return found
    chosen = [place for place in request.to_show(found) if found.rows.asks[place]]
    try:
        if chosen:
            budget = sized_budget(chosen)
            hold(budget)
            ready = ready._replace(wave=budget.choice.option.plan.wave)
            found = yield from with_answers(found, ready, request, chosen, untrained)
    except (UserError, RunError) as error:  # what was measured is not lost for that
        note = f"no answers to the worst rows are shown: {error}"
        return replace(found, notes=(*found.notes, note))
    return found


def kind_to_measure(config: TrainConfig) -> Kind:
    """The kind of rows that are read: answers or rated ones if the run trained such, else any."""
    return config.row_kind if config.row_kind in ("answers", "rated") else "any"


def teacher_to_compare(run: Trained, request: Request) -> TeacherModel | None:
    """The teacher that was named, whose weights are not in memory with those of the run."""
    if request.teacher is None:
        return None
    return replace(named_teacher(request.teacher, run.config, run.files()), shares_base=False)


def rows_to_measure(
    path: Path, config: TrainConfig, request: Request, encoder: Encoder, tokenized_by: str
) -> EvaluationRows:
    """Read the rows of a file. Raises UserError if they cannot be measured as asked."""
    rows = load_rows(path, config, encoder, tokenized_by)
    if request.metric is not None and config.objective == REWARD:
        raise UserError("--metric: the run is a reward model, which scores answers and gives none")
    if request.teacher is not None and config.objective == REWARD:
        raise UserError("--teacher: the run is a reward model, which scores answers and gives none")
    if request.metric is not None and not rows.asks.any():
        raise UserError(f"{path}: no row asks for an answer; --metric needs rows that do")
    return rows


def built_to_measure(
    opened: Opened, engine: str, config: TrainConfig, teacher: Teacher | None
) -> Built:
    """The engine of a model, which compares its predictions with those of a teacher if there is
    one. Raises UserError if they cannot be compared."""
    keys = model.DropoutKeys([None])
    if teacher is None:
        return build_engine(opened.network, keys, engine, tensors=opened.tensors)
    return build_engine(
        opened.network,
        keys,
        engine,
        tensors=opened.tensors,
        objective=compared_as(config),
        teacher=teacher.target,
    )


def with_answers(
    found: Comparison,
    ready: Ready,
    request: Request,
    chosen: Sequence[int],
    untrained: dict[str, mx.array],
) -> Generator[EvaluationProgress, None, Comparison]:
    """Add the answers to the chosen rows. The model has the adapter; afterwards it is the base."""
    _, answers = yield from answered("adapter", ready, found.rows, request, chosen)
    model.set_adapters(ready.network, as_base(ready.network, untrained))
    _, of_base = yield from answered("base", ready, found.rows, request, chosen)
    return replace(
        found,
        base=replace(found.base, answers=of_base),
        adapter=replace(found.adapter, answers=answers),
    )


class Ready(NamedTuple):
    """A model that is ready to be measured."""

    network: nn.Module
    tokenizer: Any
    engine: Engine
    rows_at: RowsAt
    """How many rows of a given sequence length go through together."""
    wave: int = 1
    """How many answers are generated together."""
    teacher: Teacher | None = None
    """What the predictions are compared with, which has read the rows."""


def start_of(run: Trained) -> Path | None:
    """The folder of the adapter that the run's rewards compare with; None if it is no adapter.

    Raises UserError if its files are damaged or missing.
    """
    if run.is_adjusted or not (run.config.has_first_adapter and needs_reference(run.config)):
        return None
    place = run.folder.start
    if (fault := checkpoint.fault(place, (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG))) is None:
        return place
    raise UserError(f"{fault}; the rewards of this run compare with this adapter: restore it")


def start_text(config: TrainConfig, started: RowMeasures | None) -> str:
    """A notice if the base is not what the run started from, and that was not measured."""
    start = starting_of(config.init)
    if start is not None and start.adjusts_base:
        return f"base is the model as the run started from it (--init {config.init})"
    if not config.has_first_adapter or started is not None:
        return ""
    return "base is the model without an adapter; the run started from another adapter"


def rounding_text(adapter: Adapter) -> str:
    """A notice if the layers of the base are rounded as those of the adapter are."""
    how = adapter.rounding and f"--qat {adapter.rounding}"
    return how and f"base is the model with its adapted layers rounded as in training ({how})"


def with_adapters(config: TrainConfig) -> TrainConfig:
    """The settings with small adapters, which count as what a pass without any needs, if the run
    trained whole weights."""
    if not config.adapter_kind.is_whole:
        return config
    return replace(config, adapter="lora", lora_rank=1, blocks_per_period=None)


def hold(budget: Budget) -> None:
    chosen = budget.choice.option
    beside_bytes = chosen.estimate.beside_bytes
    allocator.set_limits(budget.limit.limit_bytes, chosen.needed_bytes, beside_bytes)


def put_new_layers(network: nn.Module, run: Trained) -> dict[str, mx.array]:
    """Put freshly initialized adapter layers on a model; return what `as_base` needs of them.

    Those of a run with base weights of its own are what it started from: both make up the model.
    Raises UserError if the adapter does not fit, before anything is measured.
    """
    saved_adapter.put_layers(network, run.adapter)
    new = saved_adapter.read_first(run.folder).arrays if run.is_adjusted else None
    new = new or model.adapter_arrays(network)
    saved_adapter.set_arrays(network, run.adapter)
    model.set_adapters(network, new)
    if run.is_adjusted:
        return new
    return {name: array for name, array in new.items() if not name.endswith(MATRICES)}


def as_base(network: nn.Module, untrained: dict[str, mx.array]) -> dict[str, mx.array]:
    """Adapters with which the model computes what its base does.

    A product with a B of zeros changes nothing, so only the vectors had to be kept.
    """
    return {
        name: untrained.get(name, mx.zeros_like(array) if name.endswith("lora_b") else array)
        for name, array in model.adapter_arrays(network).items()
    }


def measure_rows(
    name: str, ready: Ready, rows: EvaluationRows, request: Request
) -> Generator[EvaluationProgress, None, RowMeasures]:
    """Measure the rows with the model in its current state."""
    scores = answers = None
    if request.metric is not None:
        scores, answers = yield from answered(name, ready, rows, request, range(len(rows)))

    def score_part(
        what: str, part: EncodedRows, engine: Engine
    ) -> Generator[EvaluationProgress, None, ExampleScores]:
        steps = scored(engine, part.examples, ready.rows_at)
        return with_progress(f"{name}: {what}", steps, len(part.examples))

    teacher, divergences, agreements = ready.teacher, None, None
    engine = ready.engine if teacher is None else taught(ready.engine, teacher)
    found = yield from score_part("losses", rows.trained, engine)
    if teacher is not None:
        divergences = rows.trained.summed(found.divergences, len(rows))
        agreements = rows.trained.summed(found.agreements, len(rows))
    losses = rows.trained.summed(found.losses, len(rows))
    has_bad = rows.trained.is_bad.any()
    bad = rows.trained.summed(found.losses, len(rows), bad=True) if has_bad else None
    if rows.answers is not rows.trained:
        found = yield from score_part("exact match", rows.answers, ready.engine)
    exact = np.ones(len(rows), bool)
    exact[rows.answers.row_of[~found.exact & ~rows.answers.is_bad]] = False
    return RowMeasures(losses, exact, scores, answers, bad, divergences, agreements)


def with_progress(
    doing: str, steps: Generator[int, None, T], total: int
) -> Generator[EvaluationProgress, None, T]:
    """Return what `steps` returns; yield its counts as progress."""
    while True:
        try:
            done = next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
        yield EvaluationProgress(doing, done, total)


def answered(
    name: str, ready: Ready, rows: EvaluationRows, request: Request, chosen: Sequence[int]
) -> Generator[EvaluationProgress, None, tuple[np.ndarray | None, dict[int, str]]]:
    """Answer those of the chosen rows that ask for it; return the answers by row index.

    Also returns the metric's scores, (m,), NaN for rows without an answer; None without a metric.
    """
    metric, answers = request.metric, dict[int, str]()
    scores = None if metric is None else np.full(len(rows), np.nan)
    tokenizer, reading = ready.tokenizer, rows.questions(chosen)
    doing, total = f"{name}: answers", int(rows.asks[list(chosen)].sum())
    yield EvaluationProgress(doing, 0, total)
    while wave := list(islice(reading, ready.wave)):  # other rows stay in the file
        limits = [
            answer_room(ready.network, tokenizer, prompt, request.most_new_tokens)[0]
            for *_, prompt in wave
        ]
        asked = [
            (prompt_ids(tokenizer, prompt), Sampling(max_tokens=limit))
            for (*_, prompt), limit in zip(wave, limits, strict=True)
        ]
        for found in sampled(ready.network, tokenizer, asked, rows_at_once=len(wave)):
            place, row, content, prompt = wave[found.prompt]
            answers[place] = answer = found.text.strip()
            if metric is not None and scores is not None:
                scores[place] = metric.score(answer, prompt.expected, content, row.where)
            yield EvaluationProgress(doing, len(answers), total)
    return scores, answers


def prompt_ids(tokenizer: Any, prompt: SamplePrompt) -> list[int]:
    return token_ids(tokenizer, prompt.rendered, "a row", special=False)


def answer_sizes(
    rows: EvaluationRows,
    network: nn.Module,
    tokenizer: Any,
    request: Request,
    chosen: Sequence[int],
) -> RolloutSizes:
    """The answers to the chosen rows that ask for one, for the memory that generating takes."""
    prompt_tokens = new_tokens = 0
    for *_, prompt in rows.questions(chosen):
        answer, both = answer_room(network, tokenizer, prompt, request.most_new_tokens)
        prompt_tokens = max(prompt_tokens, both - answer)
        new_tokens = max(new_tokens, answer)
    together = min(MOST_TOGETHER, int(rows.asks[list(chosen)].sum()))
    return RolloutSizes(prompt_tokens, new_tokens, group=1, rows=together)
