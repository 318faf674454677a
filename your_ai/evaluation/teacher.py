"""The teacher of a distillation: what a student compares its predictions with.

Of each trained token, the teacher gives the input of its head's linear layer. What is trained reads
texts; the teacher may read others, with the same answers: with `--teacher-prompt`, it sees a prompt
that the student does not. A text is known by its tokens, so that a micro-batch of any source
finds what the teacher made of it.

Shapes: n tokens of a text, m of them trained, S targets of a micro-batch, D width of the teacher.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.config import DISTILL, TrainConfig
from your_ai.config.checks import check_teacher_given
from your_ai.config.divergences import (
    FORWARD,
    JSD,
    REVERSE,
    SAMPLED,
    DivergenceKind,
    divergence_of,
)
from your_ai.data.batches import MULTIPLE, Batch, by_length, round_up
from your_ai.data.examples import Examples
from your_ai.engine.build import build_engine
from your_ai.engine.prefix import DiskStore, Store, check_room, digest_of
from your_ai.engine.protocol import Engine
from your_ai.engine.staged import groups, texts_of
from your_ai.engine.weights import Opened, open_model
from your_ai.errors import UserError, named_errors
from your_ai.files import sha256
from your_ai.gates.text import counted
from your_ai.gates.token_ids import vocabulary_of
from your_ai.generation.generate import model_or_run
from your_ai.hub.find import fingerprint
from your_ai.memory import allocator
from your_ai.memory.estimate import teacher_group_bytes
from your_ai.memory.facts import facts_of
from your_ai.memory.sizes import HEAD_ROWS
from your_ai.memory.workload import NO_ADAPTER, Plan, TeacherSizes
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.nets import losses, saved_adapter
from your_ai.nets.divergence import Softmax, softmax_of
from your_ai.nets.head import LinearHead, ResizedRows, SomeTrained, TargetHead
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import DropoutKeys, learned_positions
from your_ai.nets.parts import skeleton
from your_ai.nets.saved_adapter import (
    Trained,
    base_files,
    keeps_weights,
    shares_weights,
    training_of,
)
from your_ai.nets.tokenizer import first_difference, spelled
from your_ai.objectives.distill import Distillation, SampledDivergence
from your_ai.objectives.objective import Objective, Sums
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS

# Of a text of the student, with its trained places -> a row of examples that the teacher reads
# instead.
Others = dict[bytes, tuple[Examples, int]]
TOKENIZER = "tokenizer.json"
STATES = "teacher"  # the folder of a teacher's hidden states, inside the run folder


@dataclass(frozen=True)
class TeacherModel:
    """The teacher that a run names, before its weights are read."""

    label: str
    """The option that names it, for messages."""
    folder: Path
    """With its weights."""
    trained: Trained | None
    """The run that it is; None for a model as it was downloaded."""
    shares_base: bool
    """Whether its weights, but an adapter, are those of the model that is trained."""
    shares_tokenizer: bool = True
    """Whether the files of its tokenizer are those of that model."""

    @property
    def checksums(self) -> dict[str, str]:
        """The checksums of the files that decide its predictions."""
        found = {} if self.shares_base else fingerprint(self.folder)
        if self.trained is None:
            return found
        folder = self.trained.adapter.folder
        return found | {name: sha256(folder / name) for name in (ADAPTERS, ADAPTER_CONFIG)}

    def sizes(self, base: Path, float_bytes: int) -> TeacherSizes:
        """The sizes that the memory estimate needs; base: the folder of the trained model."""
        facts = facts_of(base if self.shares_base else self.folder, float_bytes)
        training = NO_ADAPTER
        if self.trained is not None:
            training = training_of(self.trained.adapter, self.trained.config, facts.blocks)
        return TeacherSizes(training=training, facts=None if self.shares_base else facts)


def teacher_of(config: TrainConfig, base: Path, files: dict[str, str]) -> TeacherModel | None:
    """The teacher of a run; None for other runs than distillations. Raises UserError.

    base: the folder of the model that is trained; files: the checksums of its files.
    """
    if config.objective != DISTILL:
        return None
    check_teacher_given(config)
    if not config.teacher:
        if not keeps_weights(config):
            raise UserError(
                "--teacher-prompt: the base model changes with --train, --add-tokens or --init; "
                "name a --teacher"
            )
        return TeacherModel("--teacher-prompt", base, None, shares_base=True)
    return named_teacher(config.teacher, config, files)


def named_teacher(teacher: str, config: TrainConfig, files: dict[str, str]) -> TeacherModel:
    """The teacher of this name. Raises UserError.

    config: of the run that is trained; files: the checksums of the files of its model, whose
    weights are shared if they are the same.
    """
    found, label = find_teacher(teacher), f"--teacher {teacher}"
    if isinstance(found, Path):
        same = base_files(fingerprint(found)) == base_files(files)
        shared = same and config.quantize is None and keeps_weights(config)
        return TeacherModel(label, found, None, shared, has_tokenizer_of(found, files))
    if found.adapter.kind.is_whole:
        return TeacherModel(label, found.base, None, False, has_tokenizer_of(found.base, files))
    shared, own = shares_weights(found, config, files), found.tokenizer_files is not None
    same = not own and has_tokenizer_of(found.base, files)
    return TeacherModel(label, model_folder(*found.source), found, shared, same)


def has_tokenizer_of(folder: Path, files: dict[str, str]) -> bool:
    """Return whether a model has the tokens of the model that is trained, by their files: to load
    a second tokenizer takes memory that no plan counts."""
    theirs = fingerprint(folder).get(TOKENIZER)
    return theirs is not None and theirs == files.get(TOKENIZER)


def find_teacher(name: str) -> Path | Trained:
    """The folder of the model that --teacher names, or the run. Raises UserError."""
    return model_or_run(name, "--teacher")


def open_teacher(
    teacher: TeacherModel, student: Opened, tokenizer: Any, longest: int
) -> tuple[Opened, int]:
    """The network of a teacher, with its adapter, and the tokens that both know. No weight is read.

    student: before it gets adapters, so that its weights can be shared. tokenizer: the student's.
    longest: tokens of the longest text that the teacher reads.
    Raises UserError if the teacher has other tokens, too few positions, or weights that cannot be
    streamed.
    """
    most = vocabulary_of(student.network) or LARGEST
    known = 1 + max(spelled(tokenizer, most).values())
    if teacher.shares_base:
        opened = replace(student, network=skeleton(student.network))
    else:
        opened = open_model(teacher.folder, student.dtype)
        if not opened.can_stream:
            raise UserError(
                f"{teacher.label}: its weights are converted on load, so they cannot be streamed; "
                "convert it with `mlx_lm.convert` first"
            )
        most = min(most, vocabulary_of(opened.network) or LARGEST)
        known = min(known, most)
    if not teacher.shares_tokenizer:
        files = None if teacher.trained is None else teacher.trained.tokenizer_files
        known, difference = shared_tokens(tokenizer, opened.tokenizer(files), most)
        if difference:
            raise UserError(
                f"{teacher.label}: its tokenizer differs from the student's: {difference}; use a "
                "teacher with the same tokens"
            )
    places = learned_positions(opened.network)
    if places is not None and round_up(longest - 1, MULTIPLE) > places:
        raise UserError(
            f"{teacher.label}: the longest text that it reads has {counted(longest, 'token')}, but "
            f"it has {counted(places, 'position embedding')}; use shorter rows, or a shorter "
            "--teacher-prompt"
        )
    if teacher.trained is not None:
        saved_adapter.put_adapter(opened.network, teacher.trained.adapter)
    opened.network.freeze()
    return opened, known


def longest_text(texts: Iterable[Examples], config: TrainConfig) -> int:
    """Tokens of the longest text that the teacher of a run reads, at most; 0 if there is none.

    texts: the rows as it reads them, or their prompts.
    """
    longest = max((int(found.lengths.max()) for found in texts), default=0)
    # Completions are read instead of the answers, or after the prompts.
    return longest + config.max_new_tokens if longest and config.samples_completions else longest


def shared_tokens(ours: Any, theirs: Any, most: int) -> tuple[int, str]:
    """The number of tokens, from the first, that two tokenizers share, and their first difference,
    in words.

    Tokens below `most` whose id or text only one of them has, such as those for images, are no
    difference: beyond the last that both have, they count as padding.
    """
    mine, its = spelled(ours, most), spelled(theirs, most)
    ids, texts = {*mine.values()} & {*its.values()}, mine.keys() & its.keys()

    def common(tokens: dict[str, int]) -> dict[str, int]:
        return {text: id for text, id in tokens.items() if id in ids or text in texts}

    return 1 + max(ids, default=0), first_difference(common(mine), common(its))


LARGEST = 1 << 32  # no token has this id
SOFTMAX_ROWS = 256  # positions of a text whose logits are computed together


def evaluated(state: list[mx.array]) -> list[mx.array]:
    mx.eval(state)
    return state


class Seen(NamedTuple):
    """A text as the teacher reads it."""

    tokens: np.ndarray
    """(n,) its inputs: all but the last token."""
    positions: np.ndarray
    """(m,) the places of the inputs that predict the trained tokens."""

    @property
    def key(self) -> np.ndarray:
        """(n + m,) int32, under which the states at the positions are stored."""
        return np.concatenate([self.tokens, self.positions]).astype(np.int32)

    @staticmethod
    def of(examples: Examples, row: int) -> Seen:
        example = examples[row]
        return Seen(np.asarray(example.tokens[:-1]), np.flatnonzero(example.trained[1:]))


@dataclass
class Teacher:
    """A teacher that is ready to be asked."""

    engine: Engine
    target: TargetHead
    store: Store
    together: int | None
    """Trained tokens whose states may be stored together; None if the store keeps all."""
    group_tokens: int
    """Tokens of texts that go through its blocks together, at least."""
    softmax_at: float | None = None
    """The temperature of the softmaxes that are stored beside the states; None if none are."""
    make_room: Callable[[], object] = lambda: None
    """Frees the streamed weights of the student before those of the teacher are read."""
    others: Others = field(default_factory=dict)
    """The texts that it reads instead of rows of the data."""
    others_of_step: Others = field(default_factory=dict)
    """The same of the completions of a step."""

    @property
    def kept(self) -> bool:
        """True if the store keeps what it has from step to step."""
        return self.together is None

    def reads(self, own: Examples, seen: Examples, *, in_step: bool = False) -> None:
        """From now on, or in this step, read a row of `seen` where the student reads that row of
        `own`."""
        others = self.others_of_step if in_step else self.others
        for row in range(len(own)):
            others[digest_of(Seen.of(own, row).key)] = seen, row

    def seen_in(self, batch: Batch) -> list[Seen]:
        """The texts of a micro-batch as the teacher reads them, in the order of their targets."""
        found, width = [], batch.tokens.shape[1]
        at = batch.positions[: batch.trained_tokens]
        for span in texts_of(batch):
            start = span.row * width + span.start
            own = at[(at >= start) & (at < start + len(span.tokens))] - start
            if not len(own):
                continue
            found.append(self.instead_of(Seen(span.tokens, own)))
        return found

    def instead_of(self, text: Seen) -> Seen:
        """The text that it reads instead of one of the student, which may be the same."""
        digest = digest_of(text.key)
        other = self.others_of_step.get(digest) or self.others.get(digest)
        return text if other is None else Seen.of(*other)

    def look(self, texts: Iterable[Seen]) -> None:
        """Compute the states of the texts that are not stored, block by block for many together.

        Raises RunError if the disk is full.
        """
        head_inputs = self.engine.head_inputs
        assert head_inputs is not None
        missing = {digest_of(t.key): t for t in texts if not self.store.has(t.key)}
        waiting, done = list(missing.values()), 0
        if waiting:
            self.make_room()
        for group in groups([text.tokens for text in waiting], self.group_tokens):
            found: list[mx.array] = []
            for states in head_inputs(group):
                at = waiting[done + len(found)].positions
                found.append(states[mx.array(at.astype(np.int32))])
            for text, states in zip(waiting[done:], self.with_softmax(found), strict=False):
                self.store.put(text.key, states)
            done += len(found)
        if waiting:
            self.engine.drop()
            allocator.free(collect=False)

    def with_softmax(self, found: list[mx.array]) -> Iterable[mx.array]:
        """The states of texts, (m, D) each, with the softmax of their logits beside them if the
        objective needs it. That of a text does not depend on the others, to the bit."""
        if self.softmax_at is None:
            return found
        most = min(SOFTMAX_ROWS, self.target.head.rows.shape[1])
        parts = [states[i : i + most] for states in found for i in range(0, len(states), most)]
        beside: list[mx.array] = []
        while parts:  # together, as many as the head takes
            count = max(1, sum(n <= HEAD_ROWS for n in accumulate(map(len, parts))))
            softmax = softmax_of(parts[:count], self.target, self.softmax_at, evaluated)
            beside.append(softmax.beside(mx.concatenate(parts[:count])))
            mx.eval(beside[-1])
            del parts[:count]
        ends = [*accumulate(map(len, found))]
        return mx.split(mx.concatenate(beside), ends[:-1])

    def fill(self, texts: Iterable[Seen]) -> Generator[int, None, None]:
        """`look` at texts in groups; yields how many are done."""
        waiting: list[Seen] = []
        done = tokens = 0
        for done, text in enumerate(texts, 1):
            waiting.append(text)
            tokens += len(text.tokens)
            if tokens >= self.group_tokens:
                self.look(waiting)
                waiting, tokens = [], 0
                yield done
        if waiting:
            self.look(waiting)
            yield done

    def seen_of(self, examples: Examples) -> Iterator[Seen]:
        """The texts of examples as it reads them, the longest first."""
        return (self.instead_of(Seen.of(examples, row)) for row in by_length(examples))

    def begin_step(self) -> None:
        """Forget what is only needed in the step before."""
        self.others_of_step.clear()
        if not self.kept:
            self.store.close()

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass micro-batches on, whose texts are read together: as many as may be stored."""
        if self.together is None:
            yield from batches
            return
        group: list[Batch] = []
        for batch in batches:
            if sum(b.trained_tokens for b in [*group, batch]) > self.together:
                yield from self.looked_at(group)
                group = []
            group.append(batch)
        yield from self.looked_at(group)

    def looked_at(self, group: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches, whose states alone are stored."""
        self.store.close()
        self.look(text for batch in group for text in self.seen_in(batch))
        return group

    def states(self, batch: Batch) -> mx.array:
        """(S, D), of any real target where there is none."""
        texts = self.seen_in(batch)
        self.look(texts)
        found = [self.stored(text) for text in texts]
        empty = len(batch.targets) - batch.trained_tokens
        states = mx.concatenate([*found, mx.repeat(found[0][:1], empty, axis=0)])
        mx.eval(states)
        return states

    def stored(self, text: Seen) -> mx.array:
        """(m, D); computed again if what is stored is damaged."""
        found = self.store.get(text.key)
        if found is None or len(found) != len(text.positions):
            self.look([text])
            found = self.store.get(text.key)
        assert found is not None
        return found

    def log_probabilities(self, batch: Batch) -> np.ndarray:
        """(S,) float32, of the targets."""
        head, rows = self.target.head, ResizedRows(self.target.head.rows, self.target.vocabulary)
        plain = LinearHead(rows, after=head.after)  # the states are those of its linear layer
        found = losses.chunked_losses(self.states(batch), mx.array(batch.targets), plain)
        return -np.array(found)

    def teach(self, batch: Batch, *, sampled: bool) -> Batch:
        """The micro-batch with what an objective needs of the teacher."""
        if sampled:
            return batch.with_columns({"reference": self.log_probabilities(batch)})
        return replace(batch, teacher=self.states(batch))


def build_teacher(
    teacher: TeacherModel,
    opened: Opened,
    known: int,
    plan: Plan,
    store: Callable[[int], Store],
    together: int | None,
    objective: Objective,
) -> Teacher:
    """Build the engine of a teacher, for a student under a plan.

    known: tokens that both know. store: width of its states -> where they are kept. together: as of
        `Teacher`. objective: of the student.
    Raises UserError if the teacher has no such head.
    """
    resident = teacher.shares_base and plan.engine != "streamed"
    built = build_engine(
        opened.network,
        DropoutKeys([None]),
        "staged" if resident else "streamed",
        tensors=opened.tensors,
        resident=plan.teacher_blocks,
        blocks_ahead=plan.teacher_ahead,
        holds_vocabulary=plan.engine == "fused",  # its graph cannot read files
    )
    head = built.head
    if not isinstance(head, LinearHead) or built.engine.head_inputs is None:
        raise UserError(
            f"{teacher.label}: this model cannot be split into blocks and a linear head; use "
            "another teacher"
        )
    if isinstance(head.rows, SomeTrained):
        raise UserError(
            f"{teacher.label}: its head is trained; make a model of it first (your_ai fuse), and "
            "name that"
        )
    width, softmax_at = head.rows.shape[1], None
    if isinstance(objective, Distillation) and objective.divergence.name == JSD:
        width, softmax_at = width + Softmax.columns(opened.dtype), objective.temperature
    found = facts_of(opened.folder, opened.dtype.size)
    group = teacher_group_bytes(found, plan) // (found.hidden * opened.dtype.size)
    allocator.free()
    target = TargetHead(head, known)
    return Teacher(built.engine, target, store(width), together, group, softmax_at)


def nameless_store(folder: Path, examples: Examples, dtype: mx.Dtype) -> Callable[[int], Store]:
    """Return f(width) -> a store for what a teacher makes of examples, in files without a name.

    They are on the disk of `folder`, and end with this process. Raises UserError if it is too full.
    """

    def make(width: int) -> Store:
        tokens = int(examples.trained.sum())
        check_room(folder, tokens, width, dtype, "--teacher")
        with named_errors(folder, "written"), tempfile.TemporaryDirectory(dir=folder) as place:
            return DiskStore(Path(place), {}, width, dtype)

    return make


def compared_as(config: TrainConfig) -> Distillation:
    """The comparison with a teacher in an evaluation: that of a run which is a distillation, or
    else the forward KL divergence."""
    divergence, temperature = DivergenceKind(FORWARD), 1.0
    if config.objective == DISTILL:
        divergence, temperature = divergence_of(config.divergence), config.temperature_distill
    if divergence.name == SAMPLED:  # which estimates
        divergence = DivergenceKind(REVERSE)
    return Distillation(divergence=divergence, temperature=temperature)


def is_sampled(objective: Objective) -> bool:
    """Return whether an objective needs the teacher's log-probabilities of the targets alone."""
    return isinstance(objective, SampledDivergence)


def taught(engine: Engine, teacher: Teacher) -> Engine:
    """The engine of a student, whose micro-batches get what its objective needs of the teacher."""
    teacher.make_room = engine.forget
    teach = partial(teacher.teach, sampled=is_sampled(engine.objective))

    def given(batch: Batch) -> Batch:
        return teach(batch) if batch.trained_tokens else batch

    def add(batch: Batch, scale: float, step_seed: int, found: Callable[[Arrays], None]) -> Sums:
        assert engine.by_block is not None
        return engine.by_block(given(batch), scale, step_seed, found)

    return replace(
        engine,
        gradients=lambda batch, *args: engine.gradients(given(batch), *args),
        loss=lambda batch: engine.loss(given(batch)),
        ahead=teacher.ahead,
        score=lambda batch: engine.score(given(batch)),
        by_block=None if engine.by_block is None else add,
    )
