"""Compare base and adapter as policies: one conversation with an environment or tools for each row.

The answers are the most likely tokens, so that both measurements are a pure function of the model,
the rows and the seed of the run. The model is in memory once: the base first, then the adapter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from your_ai.config import TrainConfig
from your_ai.config.requests import EvaluateRequest
from your_ai.data.encode import Encoder
from your_ai.data.lines import RowLimit, files_in
from your_ai.data.preferences import parser_of
from your_ai.data.prompts import PromptRows
from your_ai.data.rows import Question
from your_ai.environments.pool import EnvironmentPool
from your_ai.errors import UserError
from your_ai.evaluation import record
from your_ai.evaluation.bootstrap import Interval, paired
from your_ai.evaluation.compare import EvaluationProgress
from your_ai.evaluation.summary import excerpt, finite_or_none, head, share_intervals
from your_ai.gates.text import counted
from your_ai.generation.conversations import (
    CUT_OFF,
    NO_ROOM,
    NO_TURNS,
    Conversations,
    environments_of,
    task_of,
)
from your_ai.generation.generate import load
from your_ai.generation.rewarded import asked_of, collect
from your_ai.generation.rollouts import RolloutPrompt, complete, sampler_of
from your_ai.generation.samples import MOST_TOGETHER
from your_ai.hub.find import find_model
from your_ai.memory import allocator
from your_ai.memory.workload import RolloutSizes
from your_ai.nets import model
from your_ai.nets.parts import empty
from your_ai.nets.saved_adapter import Trained
from your_ai.rewards.builtin import check_expected
from your_ai.rewards.chosen import Rewards, chosen_rewards
from your_ai.rewards.names import ENVIRONMENT, NEEDS_EXPECTED, RUN, parse_reward
from your_ai.rng import derive_seed
from your_ai.run.rollout_files import DONE

MOST_KEPT = 256  # conversations that are in memory together
ALIKE = 1e-9  # rewards that differ by less are equal
FAILED = "error"  # how the others end
# The settings of a run that a conversation with another environment keeps.
KEPT = (
    "model", "data", "valid", "columns", "prompt_template", "max_row_bytes", "max_seq_length",
    "max_new_tokens", "max_turns", "tool_timeout_s", "tool_output_characters", "rewritten_turns",
    "trust_code", "dtype", "seed", "judge_model", "judge_url", "judge_rubric", "judge_concurrency",
    "judge_max_calls", "judge_timeout_s",
)  # fmt: skip


def acting(config: TrainConfig, request: EvaluateRequest) -> TrainConfig:
    """The settings of a run's conversations, with the environment or the tools of the request.

    Without both they are the run's, which may have none. Those of another environment keep the
    rewards of a run with an environment; those of tools keep all that no environment gives, or are
    exact_match. Raises UserError for what does not fit.
    """
    if request.environment or request.tools:
        given = config.reward if config.environment or request.tools else ()
        if request.tools:
            given = tuple(t for t in given if parse_reward(t).kind != ENVIRONMENT)
        config = TrainConfig(
            objective="grpo",
            environment=request.environment or "",
            tools=tuple(request.tools or ()),
            reward=given or (("exact_match",) if request.tools else ()),
            **{name: getattr(config, name) for name in KEPT},
        )
    if not config.converses:
        if request.success_reward is not None:
            raise UserError("--success-reward: only works with --environment or --tools")
        return config
    for name in ("metric", "teacher"):
        if getattr(request, name) is not None:
            raise UserError(f"--{name}: conversations are measured by their rewards; leave it out")
    return (
        config if request.max_tokens is None else replace(config, max_new_tokens=request.max_tokens)
    )


@dataclass
class PolicyMeasures:
    """The conversations of one model, base or adapter, over m rows."""

    rewards: np.ndarray
    """(m,) float64: the totals; NaN if missing, as where the environment failed."""
    parts: dict[str, np.ndarray]
    """(m,) float64 by reward, as `rewards`, without the weights."""
    turns: np.ndarray
    """(m,) float64: the turns of the model."""
    ended: list[str]
    """By row: DONE, the option of the limit that ended it, or what went wrong."""
    said: dict[int, list[str]] = field(default_factory=dict)
    """Of the rows to show: what was said, a line for each message."""

    @property
    def reasons(self) -> dict[str, int]:
        """Counts of how conversations ended."""
        known = (DONE, NO_ROOM, NO_TURNS, CUT_OFF)
        return dict(Counter(why if why in known else FAILED for why in self.ended))


@dataclass(frozen=True)
class ComparedPolicies:
    """The conversations of base and adapter on the same rows."""

    sha256: str
    """Of the file of the rows."""
    places: list[str]
    """The file and line that each row came from, for messages."""
    config: TrainConfig
    base: PolicyMeasures
    adapter: PolicyMeasures

    @cached_property
    def lost(self) -> np.ndarray:
        """(m,) the rewards that the adapter lost; 0 if both are equal, NaN if one is missing."""
        found = self.base.rewards - self.adapter.rewards
        return np.where(np.abs(found) <= ALIKE, 0.0, found)

    def where(self, row: int) -> str:
        return self.places[row].rpartition("/")[2]


def converse(
    run: Trained, config: TrainConfig, path: Path, request: EvaluateRequest
) -> Generator[EvaluationProgress, None, ComparedPolicies]:
    """Hold the conversations of the rows of a file with the run's base, then with its adapter.

    config: as of `acting`. Close the generator to end the environments. Raises UserError for a row
    or an environment that cannot be used, or a memory limit that is too small.
    """
    rows = PromptRows(path, RowLimit(config.max_row_bytes), parser_of(config.row_kind))
    rewards = chosen_rewards(config)
    environments = None
    try:
        tokenizer = run.tokenizer()
        check_rewarded(rewards, rows, Encoder(tokenizer), bool(run.config.reward))
        environments = environments_of(config, tokenizer, {"test": rows})
        assert environments is not None
        whole = run.adapter.kind.is_whole
        source = find_model(run.config.model) if whole else run.base, run.config.quantize
        held = PolicyRun(config, rows, rewards, environments, request)
        base = yield from held.measure("base", source, None, None)
        held.before = base.rewards
        files = run.tokenizer_files
        adapter = yield from held.measure("adapter", run.source, run.adapter, files)
    finally:
        rewards.close()
        if environments is not None:
            environments.shutdown()
    return ComparedPolicies(rows.index.sha256, held.places, config, base, adapter)


def check_rewarded(rewards: Rewards, rows: PromptRows, encoder: Encoder, is_of_run: bool) -> None:
    """Raise UserError if a reward cannot be computed. is_of_run: whether the run has rewards."""
    for name in rewards.names:
        if name.kind == RUN:
            raise UserError(
                f"--reward {name.name}: eval holds conversations without reward models; measure "
                "another reward, that of an environment, with --environment"
            )
    if not any(name.kind in NEEDS_EXPECTED for name in rewards.names):
        return
    for index in range(len(rows.offsets)):
        _, row = rows.read(index)
        assert isinstance(row.content, Question)
        expected = encoder.expected_of(row.content, row.where)
        if expected is None and not is_of_run:
            raise UserError(
                f"{row.where}: has no expected answer, and the run has no --reward, so that "
                "nothing says what is right; add a column answer to the rows, or use an "
                "--environment, which gives rewards"
            )
        check_expected(rewards.names, expected, row.where)


@dataclass
class PolicyRun:
    """Conversations with both models: their environments, and what rewards them."""

    config: TrainConfig
    rows: PromptRows
    rewards: Rewards
    environments: EnvironmentPool
    request: EvaluateRequest
    places: list[str] = field(default_factory=list)
    """As of `ComparedPolicies`, once they are read."""
    before: np.ndarray | None = None
    """(m,) the rewards of the base, once they are known."""

    def measure(
        self, name: str, source: tuple[Path, int | None], adapter: Any, files: Path | None
    ) -> Generator[EvaluationProgress, None, PolicyMeasures]:
        """Load a model, and hold all conversations with it. The arguments are as of `load`."""
        config, total = self.config, len(self.rows.offsets)
        yield EvaluationProgress(f"{name}: loading the model")
        together = min(self.request.batch_size or MOST_TOGETHER, total)
        sizes = RolloutSizes(config.max_seq_length, 1, 1, together, converses=True)
        limit = self.request.max_memory
        network, tokenizer, wave = load(config, source, adapter, limit, sizes, files)
        most = config.max_seq_length
        model.check_positions(network, most, f"--max-seq-length {most}")
        unknown = np.full(total, np.nan)
        parts = {each.name: unknown.copy() for each in self.rewards.names}
        found = PolicyMeasures(unknown.copy(), parts, unknown.copy(), [""] * total)
        encoder = Encoder(tokenizer)
        for start in range(0, total, MOST_KEPT):
            part = range(start, min(start + MOST_KEPT, total))
            yield from self.talk(name, network, encoder, wave, part, found)
        empty(network)  # one model at a time
        allocator.free()
        return found

    def talk(
        self,
        name: str,
        network: Any,
        encoder: Encoder,
        wave: int,
        part: Sequence[int],
        found: PolicyMeasures,
    ) -> Generator[EvaluationProgress, None, None]:
        """Hold the conversations of some rows, whose measures are put into `found`."""
        config, tokenizer = self.config, encoder.tokenizer
        asked = [asked_of(self.rows, row, encoder) for row in part]
        self.places[part[0] :] = [each["where"] for each in asked]
        seed = partial(derive_seed, config.seed, "environment", "test", 0)
        tasks = [task_of(config, *self.rows.read(row), seed(row)) for row in part]
        talks = Conversations(self.environments, encoder, config, tasks)
        prompts = [RolloutPrompt(np.zeros(0, np.uint32), (0,)) for _ in part]
        stops, new = tokenizer.eos_token_ids, config.max_new_tokens
        said, doing = [], f"{name}: conversations"
        yield EvaluationProgress(doing, part[0], len(self.rows.offsets))
        for each in complete(network, prompts, sampler_of(0), stops, new, wave, answering=talks):
            said.append(each)
            yield EvaluationProgress(doing, part[0] + len(said), len(self.rows.offsets))
        self.rewards.missing_calls = 0  # those that failed are counted, and end nothing here
        collected = collect(encoder, self.rewards, asked, prompts, iter(said), 0, talks)
        records = collected.records(part, collected.pending.result())
        for (place, _), earned in zip(collected.ordered, records, strict=True):
            own = talks.of[place, 0]
            found.rewards[earned.row] = np.nan if earned.reward is None else earned.reward
            for reward, value in earned.rewards.items():
                found.parts[reward][earned.row] = np.nan if value is None else value
            found.turns[earned.row] = len(own.rewards)
            found.ended[earned.row] = own.ended
            if self.before is not None:
                found.said[earned.row] = [
                    line_of_message(message) for message in own.begun.messages
                ]
        if self.before is not None:
            shown = worst_first(self.before - found.rewards, self.request.worst)
            found.said = {row: found.said[row] for row in shown}


def line_of_message(message: dict[str, Any]) -> str:
    """A message on one line, with its calls."""
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls", ())
    ]
    return f"{message['role']}: {excerpt(' '.join([str(message['content']), *calls]))}"


def worst_first(lost: np.ndarray, most: int) -> list[int]:
    """The indices of the rows that lost most, of those that lost anything."""
    return [row for row in np.argsort(-lost, kind="stable").tolist() if lost[row] > ALIKE][:most]


def measures_of_policies(
    found: ComparedPolicies, settings: EvaluateRequest
) -> dict[str, dict[str, Interval]]:
    """The means of base, adapter and their difference over the rows, by measure.

    success is the share of conversations whose reward is at least --success-reward, and unfinished
    that of those which did not end as done; both are of all rows, also where the environment
    failed, which is no success. Rewards are over the rows where both are known.
    """
    base, adapter = found.base, found.adapter
    least = success_reward(settings) - ALIKE
    named = base.parts if len(base.parts) > 1 else ()
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "success": (base.rewards >= least, adapter.rewards >= least),  # NaN is not
        "reward": (base.rewards, adapter.rewards),
        **{f"rewards/{name}": (base.parts[name], adapter.parts[name]) for name in named},
        "turns": (base.turns, adapter.turns),
        "unfinished": (is_unfinished(base), is_unfinished(adapter)),
    }
    means = {}
    for name, values in pairs.items():
        known = np.isfinite(values[0]) & np.isfinite(values[1])
        if not known.any():
            continue
        ones = np.ones(known.sum())
        of = paired(values[0][known], values[1][known], ones, settings.resamples, settings.seed)
        means[name] = of.intervals(settings.confidence)
        if name in record.SHARES:
            means[name] |= share_intervals(means[name], known, settings)
    return means


def is_unfinished(measured: PolicyMeasures) -> np.ndarray:
    """(m,) bool: whether each conversation ended otherwise than done."""
    return np.array([why != DONE for why in measured.ended])


def success_reward(settings: EvaluateRequest) -> float:
    return 1.0 if settings.success_reward is None else settings.success_reward


def summarize_conversations(
    run: Trained, found: ComparedPolicies, settings: EvaluateRequest
) -> dict[str, Any]:
    """Return the object that is stored as evaluation.json (see `record`)."""
    lost, config = found.lost, found.config
    named = (
        f"--environment {config.environment}"
        if config.environment
        else (f"--tools {','.join(config.tools)}")
    )
    return {
        **head(
            run,
            settings,
            measures_of_policies(found, settings),
            data=files_in(found.where(row) for row in range(len(lost))),
            data_sha256=found.sha256,
            rows=len(lost),
            trained_tokens=0,
        ),
        "metric_name": None,
        "better": int((lost < 0).sum()),
        "worse": int((lost > 0).sum()),
        "equal": int((lost == 0).sum()),
        "in_training_data": None,
        "conversations": {
            "with": named,
            "success_reward": success_reward(settings),
            **{
                system: {
                    "ended": each.reasons,
                    "without_reward": int(np.isnan(each.rewards).sum()),
                }
                for system, each in (("base", found.base), ("adapter", found.adapter))
            },
        },
        "worst": [
            {
                "where": found.where(row),
                "by": ["reward"],
                "base_reward": finite_or_none(found.base.rewards[row]),
                "adapter_reward": finite_or_none(found.adapter.rewards[row]),
                "turns": found.adapter.said[row],
            }
            for row in worst_first(lost, settings.worst)
        ],
    }


def notes_on_policies(run: Trained, found: ComparedPolicies) -> list[str]:
    """Messages for the user about the measurements."""
    texts = []
    if run.config.has_first_adapter:
        texts.append("base is the model without an adapter, which is not what the run started from")
    for name, each in (("base", found.base), ("adapter", found.adapter)):
        missing = np.flatnonzero(np.isnan(each.rewards)).tolist()
        if missing:
            why = each.ended[missing[0]]
            count = f"{len(missing):,} of {counted(len(each.rewards), 'conversation')}"
            texts.append(
                f"{name}: {count} without a reward, which are no success; the first, "
                f"{found.where(missing[0])}, ended: {why}"
            )
    return texts
