"""The steps of a run with `--objective soft`: sampled, written, scored, and trained through.

The tokens of a step are a pure function of the adapters, the seed and the step, and are written
before the gradients. So a run that is killed and resumed trains the same completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from mlx.utils import tree_flatten

from your_ai.config import TrainConfig
from your_ai.config.checks import credit_of
from your_ai.data.batches import MULTIPLE, Batch, RowsAt, micro_batches, round_up
from your_ai.engine.gradients import Gradients
from your_ai.generation.rollouts import Completion, RolloutPrompt
from your_ai.objectives.objective import Totals
from your_ai.rng import derive_seed
from your_ai.run.rollout_files import RolloutRecord, read_rollouts, rollout_file, write_rollouts
from your_ai.soft.engine import SoftEngine, column_engine, sweep_engine
from your_ai.soft.roles import Sampled, SoftSettings
from your_ai.training.rollouts import RolloutSource, completion_examples
from your_ai.training.soft_networks import SoftNetworks
from your_ai.training.steps import RewardMeter, StepWork

RESIDUAL = "credit/residual"  # the metric of what sweeps left out


@dataclass
class SoftSource:
    """Makes the steps of a run."""

    source: RolloutSource
    """Rewards, writes and measures completions."""
    networks: SoftNetworks
    _engines: dict[float, SoftEngine] = field(default_factory=dict)
    """By temperature; only the last one."""

    preparing: str = "preparing the first step"

    @property
    def meter(self) -> RewardMeter:
        return self.source

    def step(self, index: int, rows_at: RowsAt) -> StepWork:
        """The completions of step `index` (from 0), and how to train through them.

        Raises GivenUp.
        """
        source = self.source
        source.begin()
        path = rollout_file(source.folder.path, index + 1)
        records = read_rollouts(path)
        if records is None:
            records = self.generated(index)
            write_rollouts(path, records)
        source.show_best(records, index + 1)
        source.in_step("computing gradients")
        batches = self.batches(records, rows_at)

        def add(scale: float, seed: int, total: Gradients) -> Totals:
            return self.gradients(records, index, rows_at, scale, total)

        metrics = source.metrics(records)
        if source.trainer.config.temperature_end is not None:
            metrics["temperature"] = self.temperature(index)
        denominator = source.trainer.engine.objective.denominator(batches)
        return StepWork(batches, denominator, add, metrics)

    def temperature(self, index: int) -> float:
        """The temperature of step `index` (from 0)."""
        return temperature_at(self.source.trainer.config, index, self.source.trainer.steps)

    def engine(self, index: int) -> SoftEngine:
        """The engine at the temperature of a step."""
        tau = self.temperature(index)
        if tau not in self._engines:
            self._engines.clear()
            settings = settings_of(self.source.trainer.config, tau, self.source)
            roles, columns = self.networks.roles, self.networks.columns
            engine = sweep_engine(roles, settings)
            if columns is not None:
                engine = column_engine(roles, settings, columns)
            self._engines[tau] = engine
        return self._engines[tau]

    # -- generate and score

    def generated(self, index: int) -> list[RolloutRecord]:
        """Sample a completion for each prompt of the step, and score it."""
        self.source.in_step("generating completions")
        trainer = self.source.trainer
        rows = np.sort(trainer.schedule.rows_of(index)).tolist()
        prompts = [RolloutPrompt(np.array(trainer.schedule.examples[r].tokens), (0,)) for r in rows]
        keys = self.keys(rows, index)
        sampled = self.sampled(prompts, keys, index)
        return self.source.rewarded(trainer.prompts["train"], rows, prompts, sampled, index + 1)

    def keys(self, rows: Sequence[int], index: int) -> np.ndarray:
        """(B,) uint32, of the noise of these rows in step `index`."""
        seed = self.source.trainer.config.seed
        keys = [derive_seed(seed, "soft", index, row) % 2**32 for row in rows]
        return np.array(keys, np.uint32)

    def sampled(
        self, prompts: Sequence[RolloutPrompt], keys: np.ndarray, index: int
    ) -> Iterator[Completion]:
        """The completions, in waves that fit into memory."""
        trainer = self.source.trainer
        engine, stops = self.engine(index), trainer.tokenizer.eos_token_ids
        wave = trainer.wave
        for start in range(0, len(prompts), wave):
            part = slice(start, start + wave)
            tokens = [prompt.tokens for prompt in prompts[part]]
            found = engine.sample(tokens, keys[part], trainer.config.max_new_tokens, stops)
            for row, length in enumerate(found.lengths.tolist()):
                own = tuple(found.tokens[row, :length].tolist())
                yield Completion(start + row, 0, own, own[-1] in stops)

    # -- train

    def gradients(
        self,
        records: Sequence[RolloutRecord],
        index: int,
        rows_at: RowsAt,
        scale: float,
        total: Gradients,
    ) -> Totals:
        """Add the gradients of `scale` times the loss of a step to `total`; return its sums."""
        trainer = self.source.trainer
        examples, engine = trainer.schedule.examples, self.engine(index)
        weights = examples.weights[[record.row for record in records]].astype(np.float64)
        keys = self.keys([record.row for record in records], index)
        totals = Totals()
        for part in parts_of(records, examples.lengths, rows_at):
            chosen = [records[place] for place in part]
            prompts = [np.array(examples[record.row].tokens) for record in chosen]
            sums, grads = engine.gradients(
                prompts, sampled_of(chosen), keys[part], weights[part], scale
            )
            found = dict(tree_flatten(grads))
            del grads
            total.add(found, sums)
            totals.add(sums)
        shown = {"kl": "kl"}
        if trainer.config.soft_credit != "exact":
            shown["credit_residual"] = RESIDUAL
        if not trainer.config.straight_through:
            shown["reward"] = "reward_relaxed"
        totals.metrics = {
            new: totals.metrics[old] for old, new in shown.items() if old in totals.metrics
        }
        return totals

    def batches(self, records: Sequence[RolloutRecord], rows_at: RowsAt) -> list[Batch]:
        """The micro-batches of a step, for their sizes."""
        rows = [record.row for record in records]
        weights = self.source.trainer.schedule.examples.weights[rows]
        examples = completion_examples(self.source.texts(records), weights, {})
        order = np.argsort(-examples.lengths, kind="stable")
        return list(micro_batches(examples, order, rows_at, self.source.edges(examples)))


def settings_of(config: TrainConfig, tau: float, source: RolloutSource) -> SoftSettings:
    """The settings of the engine. A signal that asks the run to stop ends the step between two
    tokens, also while its gradients are computed: it is computed again when the run resumes.
    """
    credit = credit_of(config.soft_credit)
    assert credit is not None
    return SoftSettings(
        tau=tau,
        relaxed=not config.straight_through,
        kl_beta=config.kl_beta,
        credit=credit,
        step=lambda rows: source.check_stop(),
    )


def temperature_at(config: TrainConfig, index: int, steps: int) -> float:
    """The temperature of step `index` (from 0): it changes linearly to --temperature-end."""
    end = config.temperature_end
    if end is None or steps < 2:
        return config.temperature
    share = min(1.0, index / (steps - 1))
    return config.temperature + share * (end - config.temperature)


def parts_of(
    records: Sequence[RolloutRecord], prompt_lengths: np.ndarray, rows_at: RowsAt
) -> list[list[int]]:
    """The places of the completions that are trained together, similar lengths together."""
    lengths = [int(prompt_lengths[r.row]) + len(r.tokens) for r in records]
    order = sorted(range(len(records)), key=lambda place: -lengths[place])
    found, start = [], 0
    while start < len(order):
        padded = round_up(lengths[order[start]], MULTIPLE)  # as `SoftRows` does, and the plan
        count = max(1, rows_at(padded))
        found.append(order[start : start + count])
        start += count
    return found


def sampled_of(records: Sequence[RolloutRecord]) -> Sampled:
    lengths = np.array([len(record.tokens) for record in records], np.int32)
    tokens = np.zeros((len(records), int(lengths.max())), np.int32)
    for row, record in enumerate(records):
        tokens[row, : len(record.tokens)] = record.tokens
    return Sampled(tokens, lengths)
