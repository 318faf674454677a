"""What a run is to do: its settings, rows, schedule and sizes, before there is a plan or a model.

Nothing here computes with MLX. Of the model it uses only what the files say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from your_ai.config import (
    ALL_LINEAR,
    DISTILL,
    GRPO,
    Resolved,
    TrainConfig,
    defaults,
    flag,
    last_step,
)
from your_ai.data.batches import TARGET_LEVELS, Schedule, make_schedule
from your_ai.data.examples import Examples
from your_ai.data.preferences import kind_of
from your_ai.data.prompts import PromptRows
from your_ai.data.sources import Splits
from your_ai.engine.weights import Opened
from your_ai.errors import UserError
from your_ai.evaluation.teacher import TeacherModel, teacher_of
from your_ai.files import sha256
from your_ai.gates.text import counted, shown
from your_ai.hub.find import fingerprint
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.workload import StepSizes
from your_ai.nets import model
from your_ai.nets.new_tokens import NewTokens, tokenizer_with_new
from your_ai.nets.tokenizer import end_notes
from your_ai.objectives.chosen import objective_of
from your_ai.objectives.objective import Objective
from your_ai.rewards.chosen import Rewards, chosen_rewards
from your_ai.rewards.names import reward_texts
from your_ai.run import events
from your_ai.run.checkpoint import list_checkpoints
from your_ai.run.folder import RunFolder
from your_ai.run.rollout_files import missing_in_a_row
from your_ai.training.reward_models import RewardRun, reward_runs
from your_ai.training.run_data import RunData, read_data

# Which rows each step of a run trains, and what that says about the time of a step


def schedule_of(config: TrainConfig, data: RunData) -> Schedule:
    """The schedule of the rows that each step trains."""
    packed_tokens = config.max_seq_length if config.packing else None
    examples = data.examples["train"]
    together = objective_of(config).rows_together
    rows = len(examples) // together
    return make_schedule(
        examples,
        defaults.batch_size(config, rows) * together,
        defaults.rows_per_step(config, rows) * together,
        config.seed,
        packed_tokens,
        together,
        config.updates_per_batch,
    )


def step_sizes(config: TrainConfig, data: RunData) -> StepSizes:
    """The sizes of the steps, by the training rows; nothing without rows."""
    if config.generates or "train" not in data.examples or not len(data.examples["train"]):
        return StepSizes()
    schedule = schedule_of(config, data)
    counts = np.bincount(schedule.buckets, minlength=len(schedule.edges))
    lengths = [
        (int(t), int(n) * schedule.rows_together)
        for t, n in zip(schedule.edges, counts, strict=True)
        if n
    ]
    padded, tally = sum(t * n for t, n in lengths), data.examples["train"].tally
    share = tally.trained_tokens / padded if tally.trained_tokens else 1.0
    return StepSizes(
        rows_of_length=tuple(lengths),
        trained_share=min(1.0, float(np.ceil(TARGET_LEVELS * share)) / TARGET_LEVELS),
        steps=last_step(config, schedule.steps_per_epoch),
    )


MOST_IMBALANCE = 4 / 3  # between good and bad answers in KTO; the bound that its authors suggest
TOKENS_AT_ONCE = 1 << 20  # of the data
HIGHER_RATE = 2.5  # times the learning rate, for a run that learned too little


@dataclass(frozen=True)
class Job:
    """The work that a run is to do."""

    asked: TrainConfig
    """The settings as they were given."""
    config: TrainConfig
    """The settings with batch size and epochs as they were decided."""
    data: RunData
    schedule: Schedule
    steps: int
    files: dict[str, str]
    """The checksums of the model's files."""
    reward_runs: list[RewardRun]
    teacher: TeacherModel | None
    tokenizer: Any
    new: NewTokens = field(default_factory=NewTokens)
    """The tokens that the run adds to those of its model."""
    splits: Splits = field(default_factory=lambda: Splits({}))
    """The files of its rows."""

    @property
    def objective(self) -> Objective:
        return objective_of(self.config)

    @property
    def rows(self) -> int:
        """Rows of the training data, or pairs of texts."""
        return len(self.data.examples["train"]) // self.objective.rows_together

    def with_adapters(self, rank: int, blocks: int, of: int) -> ResolvedJob:
        """The job with adapters of this rank in the last blocks of a model that has `of`."""
        epoch, validated = self.schedule.steps_per_epoch, "valid" in self.data.examples
        config = defaults.resolved(self.config, self.rows, validated, epoch, rank, blocks, of)
        return ResolvedJob(**vars(self) | {"config": config})

    def depends_on(self) -> dict[str, dict[str, str]]:
        """Checksums and values that must be the same when the run is resumed, by kind."""
        return {
            "model": self.files | {f"tokenizer/{name}": s for name, s in self.new.files.items()},
            "data": self.splits.checksums(),
            "settings": self.config.fixed_on_resume(),
            **{f"reward model {run.name}": run.checksums for run in self.reward_runs},
            **({} if self.teacher is None else {"teacher": self.teacher_files()}),
        }

    def teacher_files(self) -> dict[str, str]:
        """The checksums of what decides what the teacher predicts."""
        assert self.teacher is not None
        prompt = self.config.teacher_prompt
        return self.teacher.checksums | (
            {"prompt": sha256(Path(prompt).expanduser())} if prompt else {}
        )

    def notices(self) -> list[str]:
        """Notices on the settings for the user."""
        given, found = self.asked, []
        if not isinstance(given.warmup_steps, str) and given.warmup_steps >= self.steps:
            steps = counted(self.steps, "step")
            found.append(f"--warmup-steps {given.warmup_steps}: the run has only {steps}")
        if given.max_steps is not None and given.max_steps > self.steps:
            steps = counted(self.steps, "step")
            found.append(f"--max-steps {given.max_steps}: --epochs ends the run after {steps}")
        if given.patience and "valid" not in self.data.examples:
            found.append("--patience: has no effect, because there are no validation rows")
        if given.objective == "kto":
            found.append(imbalance(given, self.data.examples["train"]))
        return [text for text in found if text]


class ResolvedJob(Job):
    """A job whose plan is known, and with it all its settings."""

    config: Resolved


def job_of(
    config: TrainConfig,
    base: Path,
    opened: Opened,
    log: events.EventLog,
    limit: MemoryLimit,
    folder: RunFolder,
    splits: Splits,
) -> Job:
    """Read the rows of the splits, and decide what depends on them. Raises UserError.

    base: the folder of the model as it was downloaded; opened: as it is trained; it gets layers for
    what is trained of its vocabulary. limit: of the memory of this process.
    """
    network = opened.network
    is_resumed = bool(list_checkpoints(folder.checkpoints))
    tokenizer, new = tokenizer_with_new(
        config, opened.folder, folder.tokenizer, is_resumed=is_resumed
    )
    model.train_vocabulary(network, config, new)
    model.adapted_layers(network, config)  # checks the settings of the adapters
    files = fingerprint(base)
    runs, teacher = reward_runs(config, files), teacher_of(config, base, files)
    for text in end_notes(opened.folder, tokenizer):
        log.write(events.Notice(text=text))
    all_files = files | new.files
    data = read_data(config, network, tokenizer, all_files, log.write, limit, splits.files)
    rows = len(data.examples["train"]) // objective_of(config).rows_together
    sized = defaults.sized(config, rows, "valid" in data.examples)
    schedule = schedule_of(sized, data)
    steps = last_step(sized, schedule.steps_per_epoch)
    found = Job(config, sized, data, schedule, steps, files, runs, teacher, tokenizer, new, splits)
    for text in [*found.notices(), unused_tokens(found)]:
        if text:
            log.write(events.Notice(text=text))
    return found


def unused_tokens(job: Job) -> str:
    """A notice if some new tokens are in no training row; else an empty text."""
    ids = list(job.new.spelled)
    if not ids or "train" not in job.data.examples:
        return ""
    seen = np.zeros(max(ids) + 1, bool)
    tokens = job.data.examples["train"].tokens
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        some = tokens[start : start + TOKENS_AT_ONCE]
        seen[some[some < len(seen)]] = True
    unused = [token for token in ids if not seen[token]]
    if not unused:
        return ""
    first = shown(job.tokenizer.convert_ids_to_tokens(unused[:1])[0])
    count = counted(len(unused), "new token")
    return f"{count} of {len(ids)} in no training row, such as {first}: they learn nothing"


def rewards_of(config: TrainConfig, log: events.EventLog, folder: Path) -> Rewards | None:
    """The rewards of a run that generates completions; None for other runs.

    log: says how often the judge was asked before the run was interrupted.
    folder: of the run, with the rewards that it has written.

    Raises UserError if there are none, or the judge cannot be asked.
    """
    if not config.samples_completions:
        return None
    if config.objective == DISTILL:  # nothing but the teacher
        return Rewards((), {})
    if config.objective == GRPO and not reward_texts(config):
        raise UserError("--reward is missing: what a completion earns, e.g. exact_match")
    records, _ = events.tail(log.path, 0, (events.Step, events.Validation))
    counted_in = (r.event for r in records if isinstance(r.event, events.Step | events.Validation))
    calls = (event.metrics.get("judge/calls", 0) for event in counted_in)
    return chosen_rewards(config, int(sum(calls)), missing_in_a_row(folder, config.rollouts))


def imbalance(config: TrainConfig, examples: Examples) -> str:
    """A notice if good and bad answers count very differently in KTO; else an empty text."""
    answers = examples.columns["labels"][:: objective_of(config).rows_together]
    good, bad = int(answers.sum()), int((~answers).sum())
    counts = f"{counted(good, 'good answer')} and {counted(bad, 'bad one')}"
    if not (good and bad):
        return f"{counts}: kto learns from both, so add rows with the other label"
    sums = good * config.kto_desirable_weight, bad * config.kto_undesirable_weight
    if max(sums) <= MOST_IMBALANCE * min(sums):
        return ""
    few = "kto_desirable_weight" if sums[0] < sums[1] else "kto_undesirable_weight"
    weight = max(sums) / (good if sums[0] < sums[1] else bad)
    return f"{counts}: they count the same with {flag(few)} {weight:.2g}"


def have_answers(prompts: Mapping[str, PromptRows]) -> bool:
    """Return whether the first row that an evaluation would take has an answer; True if no prompts.

    prompts: the rows of the prompts, by split.
    """
    for split in ("test", "valid", "train"):
        if split in prompts:
            return kind_of(prompts[split].read(0)[0]) is not None
    return True


def ways_to_learn_more(config: TrainConfig, adapters: model.Adapters, blocks: int) -> str:
    """Settings to try if a run barely learns, without those that it has.

    blocks: number of blocks of the model.
    """
    targets = [] if ALL_LINEAR in config.lora_targets else ["--lora-targets all-linear"]
    layers = ["--lora-layers all"] if adapters.config["num_layers"] < blocks else []
    longer = "--epochs" if config.max_steps is None else "--max-steps"
    rate = f"a higher --learning-rate, such as {HIGHER_RATE * config.learning_rate:g}"
    ways = [rate, " ".join(targets + layers), f"or more {longer}"]
    return ", ".join(filter(None, ways))
