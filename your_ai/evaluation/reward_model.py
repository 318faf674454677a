"""A trained reward model, ready to score texts."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from your_ai.config import REWARD, TrainConfig
from your_ai.data.batches import RowsAt, by_length, few_edges, micro_batches
from your_ai.data.columns import layout_of
from your_ai.data.encode import EncodedRow, Encoder, to_score
from your_ai.data.examples import Examples, RowCounts, fit
from your_ai.data.preferences import parse_to_score
from your_ai.data.records import read_records
from your_ai.data.rows import Row
from your_ai.data.sources import STDIN
from your_ai.engine.build import build_engine
from your_ai.engine.measure_costs import measure_costs
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import Opened, open_model
from your_ai.errors import UserError
from your_ai.evaluation.compare import hold
from your_ai.gates.text import counted
from your_ai.gates.token_ids import vocabulary_of
from your_ai.memory import allocator
from your_ai.memory.budget import Measuring, budget_of_evaluation, limit_of, row_limit
from your_ai.memory.facts import facts_of
from your_ai.memory.limit import MemoryLimit
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.nets import model, saved_adapter
from your_ai.nets.numerics import compute_dtype
from your_ai.nets.saved_adapter import Trained, put_trained_rows, training_of
from your_ai.objectives.reward import ScoreRegression

ROWS_TOGETHER = 64  # rows of a file that are scored together, in the order of their length
NAME, PAIR_NAMES = ("reward",), ("reward_chosen", "reward_rejected")  # of the scores of a row


@dataclass(frozen=True)
class RewardModel:
    """Scores texts, each by its last hidden state."""

    name: str
    """Of the run."""
    encoder: Encoder
    engine: Engine
    rows_at: RowsAt
    max_seq_length: int
    positions: int | None
    """The length of its learned position table; None without one."""

    def encode(self, row: Row, too_long: str = "error") -> list[EncodedRow]:
        """The texts of a row: two for a pair. Raises UserError for one that cannot be scored."""
        texts = []
        most, limit = self.max_seq_length, f"--max-seq-length {self.max_seq_length}"
        if self.positions is not None and self.positions < most:
            most, limit = self.positions, counted(self.positions, "position embedding")
        for text in self.encoder.encode_all(row):
            count = len(text.tokens)
            if too_long == "error" and count > most:
                raise UserError(
                    f"{row.where}: {counted(count, 'token')}, more than the {limit} of "
                    f"{self.name}; shorten it, or use --too-long truncate"
                )
            fitted, _ = next(fit(text, most, too_long, row.where))
            if fitted is None:
                raise UserError(f"{row.where}: no answer is within {limit}")
            texts.append(to_score(fitted))
        return texts

    def scores(self, texts: Sequence[EncodedRow]) -> np.ndarray:
        """(n,) float64 scores of encoded texts, which end where `to_score` ends them.

        No text may have more inputs than the model has learned positions.
        """
        examples = examples_of(texts)
        order, found = by_length(examples), np.zeros(len(texts))
        edges = few_edges(max(self.max_seq_length, int(examples.lengths.max())))
        if self.positions is not None:  # MLX would read what pads a row from beyond their table
            edges = np.minimum(edges, self.positions)
        done = 0
        for batch in micro_batches(examples, order, self.rows_at, edges):
            count = batch.trained_tokens  # one for each text
            values = self.engine.log_probabilities(batch)
            mx.eval(values)
            found[order[done : done + count]] = np.array(values)[:count]
            done += count
        return found


def score_rows(
    run: Trained,
    rows: str | Path | Iterable[dict[str, Any]],
    too_long: str,
    batch_size: int,
    max_memory_gb: float | None,
) -> Iterator[dict[str, Any]]:
    """The rows, each with its reward, or of a pair with reward_chosen and reward_rejected.

    rows: a file, - for standard input, or the rows themselves. Some are scored together. The
    columns and the prompt template are those of the run.

    Raises UserError for a row that cannot be scored, and if the model does not fit.
    """
    scorer = load_reward_model(run, max_memory_gb, batch_size)
    records: Iterator[tuple[str, dict[str, Any]]]
    if not isinstance(rows, str | Path):
        records = ((f"row {number}", record) for number, record in enumerate(rows, 1))
        yield from score_records(scorer, records, run.config, too_long)
    elif str(rows) == STDIN:
        with tempfile.TemporaryDirectory() as folder:  # private data: deleted in any case
            path = Path(folder, "stdin.data")
            with path.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            try:
                if not path.stat().st_size:
                    raise UserError("score -: standard input is empty")
                records = read_records(path, scorer.encoder.limit)
                yield from score_records(scorer, records, run.config, too_long)
            except UserError as error:
                raise UserError(str(error).replace(str(path), "standard input")) from error
    else:
        records = read_records(Path(rows).expanduser(), scorer.encoder.limit)
        yield from score_records(scorer, records, run.config, too_long)


def score_records(
    scorer: RewardModel,
    records: Iterable[tuple[str, dict[str, Any]]],
    config: TrainConfig,
    too_long: str,
) -> Iterator[dict[str, Any]]:
    """Score rows as `score_rows` does; records: with the place of each, for messages."""
    layout = layout_of(config.columns, config.prompt_template)
    records = iter(records)
    while part := list(islice(records, ROWS_TOGETHER)):
        texts = []
        for where, record in part:
            row = parse_to_score(layout.row_of(record, where), where)
            texts.append(scorer.encode(row, too_long))
            check_names(record, names_of_scores(texts[-1]), where)
        values = iter(scorer.scores([text for each in texts for text in each]).tolist())
        for (_, record), each in zip(part, texts, strict=True):
            yield {**record, **{name: next(values) for name in names_of_scores(each)}}


def names_of_scores(texts: Sequence[EncodedRow]) -> tuple[str, ...]:
    """The columns that get the scores of the texts of a row."""
    return PAIR_NAMES if len(texts) == 2 else NAME


def check_names(record: Mapping[str, object], names: Sequence[str], where: str) -> None:
    """Raise UserError if a row has a column that its score would overwrite."""
    taken = [name for name in names if name in record]
    if taken:
        raise UserError(
            f"{where}: has the column {taken[0]} already, where score writes its own; rename or "
            "remove yours"
        )


def examples_of(texts: Sequence[EncodedRow]) -> Examples:
    return Examples(
        tokens=np.concatenate([text.tokens for text in texts]).astype(np.uint32),
        trained=np.concatenate([text.trained for text in texts]),
        starts=np.cumsum([0, *(len(text.tokens) for text in texts)]),
        weights=np.ones(len(texts), np.float32),
        tally=RowCounts(),
    )


def check_reward_run(run: Trained, label: str) -> None:
    """Raise UserError, whose message begins with `label`, if a run is not a reward model."""
    if run.config.objective != REWARD or not saved_adapter.has_score_head(run.adapter):
        raise UserError(
            f"{label}: {run.folder.name} is not a reward model (its objective is "
            f"{run.config.objective}); train one with --objective reward"
        )


def weights_of(run: Trained, limit: MemoryLimit | None = None) -> Path:
    """The folder with the weights that the run trained with, quantized now if it is missing."""
    return model_folder(*run.source, limit)


def put_reward_model(opened: Opened, run: Trained) -> None:
    """Add the adapter and the score head of a reward model to its base. No weight is read."""
    saved_adapter.put_adapter(opened.network, run.adapter)
    width = facts_of(opened.folder, opened.dtype.size).hidden
    saved_adapter.put_trained_score_head(opened.network, run.adapter, width)


def load_reward_model(
    run: Trained,
    max_memory_gb: float | None = None,
    batch_size: int = 8,
) -> RewardModel:
    """Load a reward model with its base, inside a memory limit.

    Raises UserError if the run is not a reward model, or does not fit.
    """
    check_reward_run(run, "score")
    limit = limit_of(max_memory_gb)
    config, folder = run.config, weights_of(run, limit)
    opened = open_model(folder, compute_dtype(config.dtype))
    put_trained_rows(opened.network, run.adapter)  # the encoder asks for their tokens
    encoder = encoder_of(run, opened, opened.tokenizer(run.tokenizer_files), limit)
    blocks = len(opened.network.layers)
    budget = budget_of_evaluation(
        training_of(run.adapter, config, blocks),
        folder,
        opened.dtype,
        [config.max_seq_length],
        batch_size,
        limit,
        can_stream=opened.can_stream,
        score_head=True,
        measuring=Measuring(partial(measure_costs, opened.network, config)),
    )
    hold(budget)
    put_reward_model(opened, run)
    plan = budget.choice.option.plan
    engine = engine_of(opened, plan.engine)
    rows_at = partial(plan.rows, batch_size=batch_size)
    positions = model.learned_positions(opened.network)
    return RewardModel(run.folder.name, encoder, engine, rows_at, config.max_seq_length, positions)


def encoder_of(run: Trained, opened: Opened, tokenizer: Any, limit: MemoryLimit) -> Encoder:
    rows = row_limit(run.config.max_row_bytes, limit)
    return Encoder(tokenizer, True, vocabulary_of(opened.network), rows, "rated")


def engine_of(opened: Opened, plan: str) -> Engine:
    """The engine that scores with the opened network, which has an adapter and a score head."""
    keys, objective = model.DropoutKeys([None]), ScoreRegression()
    built = build_engine(opened.network, keys, plan, tensors=opened.tensors, objective=objective)
    allocator.free()
    return built.engine
