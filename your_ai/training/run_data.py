"""The rows of a run, checked and tokenized, and the sizes that decide its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from your_ai.config import AUTO, DISTILL, EXACT_MATCH, LOSS, REWARD_METRICS, TrainConfig, flag
from your_ai.data.batches import bucket_edges, few_edges
from your_ai.data.encode import Encoder, SamplePrompt
from your_ai.data.examples import Examples, RowCounts, check_weights, load_examples
from your_ai.data.lines import RowLimit, file_of_first_row, files_of_rows
from your_ai.data.notes import Notes
from your_ai.data.preferences import parser_of
from your_ai.data.prompts import PromptRows
from your_ai.data.rows import Question, Row, read_rows, with_progress
from your_ai.data.sources import Splits, find_splits
from your_ai.errors import UserError
from your_ai.evaluation import dataset_scores
from your_ai.evaluation.compare import Ready
from your_ai.evaluation.custom_metric import Metric, load_metric
from your_ai.evaluation.rows import EvaluationRows, load_rows, seen_by_teacher
from your_ai.gates.text import counted
from your_ai.gates.token_ids import vocabulary_of
from your_ai.generation import generate
from your_ai.generation.generate import answer_room
from your_ai.hub.find import store, tokenizer_fingerprint
from your_ai.memory import allocator
from your_ai.memory.budget import row_limit
from your_ai.memory.limit import MemoryLimit
from your_ai.nets import model
from your_ai.rewards.builtin import check_expected
from your_ai.rewards.names import needs_expected, parse_rewards, reward_texts
from your_ai.run import events
from your_ai.run.stopping import Stop

# What --keep-best and --patience compare: the validation loss, the accuracy or margin that a
# validation of preferences finds with it, or what is measured here


METRIC_ROWS = 64  # validation rows that are answered for a function of the user's


@dataclass(frozen=True)
class RowToAnswer:
    """A validation row to answer."""

    prompt: SamplePrompt
    content: dict[str, Any]
    """The JSON object of the row."""
    where: str
    """Its file and line."""


@dataclass(frozen=True)
class BestMetric:
    """The rows to measure, and how."""

    name: str
    """The value of --best-metric."""
    rows: EvaluationRows
    function: Metric | None = None
    """The user's function; None for exact match."""
    questions: tuple[RowToAnswer, ...] = ()
    """The rows to answer for the user's function."""

    @property
    def prompts(self) -> list[SamplePrompt]:
        """The prompts that are answered in each validation."""
        return [asked.prompt for asked in self.questions]


def best_metric_of(
    config: TrainConfig, valid: Path, encoder: Encoder, tokenizer_sha256: str
) -> BestMetric | None:
    """Load the validation rows that --best-metric measures; None for what a validation finds.

    Raises UserError if no row asks for an answer, or for a function that cannot be imported.
    """
    name = config.best_metric
    if name == LOSS or name in REWARD_METRICS:
        return None
    function = None if name == EXACT_MATCH else load_metric(name, "--best-metric")
    rows = load_rows(valid, config, encoder, tokenizer_sha256)
    asking = rows.has_answer if function is None else rows.asks
    if not asking.any():
        raise UserError(
            f"--best-metric {name}: no row of {files_of_rows(valid, encoder.limit)} asks for an "
            "answer; use validation rows with prompts, or --best-metric loss"
        )
    if function is None:
        return BestMetric(name, rows)
    questions = (
        RowToAnswer(prompt, content, row.where)
        for _, row, content, prompt in islice(rows.questions(), METRIC_ROWS)
    )
    return BestMetric(name, rows, function, tuple(questions))


def check_margin(config: TrainConfig, valid: Path, examples: Examples, limit: RowLimit) -> None:
    """Raise UserError for --best-metric margin if all validation rows have the same label."""
    labels = examples.columns.get("labels")
    if config.best_metric != "margin" or labels is None:
        return
    if len(set(labels[examples.weights > 0].tolist())) == 1:
        raise UserError(
            f"--best-metric margin: the labels of {files_of_rows(valid, limit)} are all the same, "
            "so there is no margin; use validation rows with both, or --best-metric accuracy"
        )


def measured(best: BestMetric, ready: Ready, stop: Stop) -> float | None:
    """The value for the current adapter; None if asked to stop.

    Raises UserError if the user's function fails.
    """
    if best.function is None:
        return exact_match(best.rows, ready, stop)
    scores = []
    for asked in best.questions:
        if stop:
            return None
        limit, _ = generate.answer_room(ready.network, ready.tokenizer, asked.prompt)
        answer = generate.answer(ready.network, ready.tokenizer, asked.prompt.rendered, limit)
        scores.append(
            best.function.score(answer, asked.prompt.expected, asked.content, asked.where)
        )
    return float(np.mean(scores))


def exact_match(rows: EvaluationRows, ready: Ready, stop: Stop) -> float | None:
    """The share of the rows with an answer of which every token is the most likely one."""
    answers = rows.answers
    exact = dataset_scores.exact_examples(ready.engine, answers.examples, ready.rows_at, stop)
    if exact is None:
        return None
    right = rows.has_answer.copy()
    right[answers.row_of[~exact]] = False
    return float(right.sum() / rows.has_answer.sum())


AUTO_TOKENS = 256  # of an answer to a prompt of --samples auto


@dataclass(frozen=True)
class RunData:
    """The data of a run, and the sizes that decide its memory."""

    examples: dict[str, Examples]
    """The tokenized rows of each split."""
    samples: list[SamplePrompt]
    """The prompts for sample answers."""
    best_metric: BestMetric | None
    """What --best-metric measures; None for the loss."""
    lengths: list[int]
    """The sequence length T of every bucket."""
    tokens: int
    """Tokens of all texts together."""
    answer_tokens: int
    """Tokens of the longest prompt to answer, with its answer; 0 if nothing is generated."""
    prompts: dict[str, PromptRows] | None = None
    """The rows of the prompts, by split, of a run that generates completions."""
    seen: dict[str, Examples] | None = None
    """The same rows by split as a teacher reads them, with a prompt of its own."""
    mixed_prompt_tokens: int = 0
    """Tokens of the longest prompt in a run that generates completions in some of its steps."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt whose completions are generated; 0 if none are."""
        if self.prompts is None:
            return self.mixed_prompt_tokens
        return max((int(found.lengths.max()) for found in self.examples.values()), default=0)


def check_splits(config: TrainConfig) -> Splits:
    """The files of --data by split. Raises UserError if a required one is missing."""
    splits = find_splits(config)
    if config.exact_match and "test" not in splits.files:
        raise UserError(f"{flag('exact_match')}: --data {config.data} has no test.jsonl")
    if config.samples not in (0, AUTO) and not {"test", "valid"} & splits.files.keys():
        raise UserError(
            f"{flag('samples')} {config.samples}: there are no test rows, and no row is held out"
        )
    if config.best_metric != LOSS and "valid" not in splits.files:
        raise UserError(
            f"--best-metric {config.best_metric}: there are no validation rows; give some with "
            "--valid, or use --best-metric loss"
        )
    return splits


def all_seen_by_teacher(
    config: TrainConfig,
    splits: dict[str, Path],
    examples: dict[str, Examples],
    encoder: Encoder,
    files: dict[str, str],
) -> dict[str, Examples] | None:
    """The rows of each split as the teacher sees them; None if it sees the student's.

    files: as in `read_data`.
    """
    if config.objective != DISTILL or not config.teacher_prompt:
        return None
    tokenized_by = tokenizer_fingerprint(files, encoder.tokenizer.eos_token_ids)
    return {
        name: seen_by_teacher(
            path,
            config,
            replace(encoder, mask_prompt=config.mask_prompt or name == "test"),
            tokenized_by,
            None if config.generates else examples[name],
        )
        for name, path in splits.items()
    }


def read_data(
    config: TrainConfig,
    network: nn.Module,
    tokenizer: Any,
    files: dict[str, str],
    write: Callable[[events.Event], None],
    memory: MemoryLimit,
    splits: dict[str, Path],
) -> RunData:
    """The tokenized rows of a run, for `train` and `plan`.

    files: the checksums of the model's files. splits: the files of the rows.
    write: receives events about progress and shortened rows.
    memory: the limit of this process.

    Raises UserError for rows that cannot be trained.
    """
    limit = row_limit(config.max_row_bytes, memory)
    vocabulary = vocabulary_of(network)
    encoder = Encoder(tokenizer, config.mask_prompt, vocabulary, limit, config.trained_kind)
    samples = samples_of(config, splits, encoder, network)
    used = {n: path for n, path in splits.items() if n != "test" or config.exact_match}
    prompts = {}
    if config.generates:  # before the examples, which must be those of the same files
        parse = parser_of(config.row_kind)
        prompts = {name: PromptRows(path, limit, parse) for name, path in used.items()}
        check_unchanged(prompts)
    examples = {
        name: load_split(name, path, config, encoder, files, write) for name, path in used.items()
    }
    seen = all_seen_by_teacher(config, used, examples, encoder, files)
    noticed = Notes()
    for found in examples.values():
        noticed.add_all(found.notes)
    for text in noticed.lines():
        write(events.Notice(text=text))
    best = checked_metric(config, splits, examples, encoder, files)
    scored, asked = [*examples.values()], list[SamplePrompt]()
    if best is not None:
        scored, asked = [*scored, best.rows.answers.examples], [*best.prompts]
    longest = max(int(found.lengths.max()) for found in scored)
    longest = max(longest, config.max_seq_length) if config.packing else longest
    model.check_positions(network, longest, f"--max-seq-length {config.max_seq_length}")
    allocator.free()  # memory that tokenizing left
    if config.generates:
        asking = prompts_of_run(config, network, prompts, examples, samples, encoder)
        return replace(asking, seen=seen)
    lengths = {int(t) for found in scored for t in bucket_edges(found.lengths - 1)}
    most = 0
    if config.samples_completions:
        most, edges = completions_of_rows(config, network, splits, examples)
        lengths |= edges
    rooms = [sample_room(config, network, tokenizer, prompt) for prompt in samples]
    rooms += [answer_room(network, tokenizer, prompt) for prompt in asked]
    return RunData(
        examples=examples,
        samples=samples,
        best_metric=best,
        lengths=sorted(lengths),
        tokens=sum(int((found.lengths - 1).sum()) for found in examples.values()),
        answer_tokens=max((both for _, both in rooms), default=0),
        seen=seen,
        mixed_prompt_tokens=most,
    )


def completions_of_rows(
    config: TrainConfig,
    network: nn.Module,
    splits: Mapping[str, Path],
    examples: Mapping[str, Examples],
) -> tuple[int, set[int]]:
    """The tokens of the longest prompt of rows with answers, and the sequence lengths of its
    completions. Raises UserError if they are too long."""
    longest = {name: int(found.prompt_lengths.max()) for name, found in examples.items()}
    name = max(longest, key=lambda name: longest[name])
    total = longest[name] + config.max_new_tokens
    if total > config.max_seq_length:
        raise UserError(
            f"{splits[name]}: the longest prompt has {counted(longest[name], 'token')}, {total:,} "
            f"with --max-new-tokens {config.max_new_tokens}, more than --max-seq-length "
            f"{config.max_seq_length}; raise it, or lower --max-new-tokens"
        )
    model.check_positions(network, total, f"--max-new-tokens {config.max_new_tokens}")
    return longest[name], {int(few_edges(total - 1)[-1])}


def samples_of(
    config: TrainConfig, splits: dict[str, Path], encoder: Encoder, network: nn.Module
) -> list[SamplePrompt]:
    """The prompts of --samples: of the first test rows that have one, or else validation rows."""
    path = splits.get("test", splits.get("valid"))
    if path is None or config.sample_count == 0:
        return []
    rows = read_rows(path, encoder.limit, parser_of(encoder.kind))
    asked = (prompt for prompt in map(encoder.prompt_of, rows) if prompt is not None)
    found = list(islice(asked, config.sample_count))
    if config.samples != AUTO:
        return found
    return [s for s in found if has_room(config, network, encoder.tokenizer, s)]


def checked_metric(
    config: TrainConfig,
    splits: dict[str, Path],
    examples: dict[str, Examples],
    encoder: Encoder,
    files: dict[str, str],
) -> BestMetric | None:
    """The metric that --best-metric names, once the weights of all rows are known to be good."""
    for name in ("train", "valid"):
        if name in splits:
            check_weights(name, splits[name], examples[name], encoder.limit)
    if "valid" not in splits:
        return None
    check_margin(config, splits["valid"], examples["valid"], encoder.limit)
    tokenized_by = tokenizer_fingerprint(files, encoder.tokenizer.eos_token_ids)
    return best_metric_of(config, splits["valid"], encoder, tokenized_by)


def prompts_of_run(
    config: TrainConfig,
    network: nn.Module,
    prompts: dict[str, PromptRows],
    examples: dict[str, Examples],
    samples: list[SamplePrompt],
    encoder: Encoder,
) -> RunData:
    """The data of a run that generates completions of these prompts.

    Raises UserError for a prompt that is too long, or that lacks what a reward needs.
    """
    longest = max(int(found.lengths.max()) for found in examples.values())
    total = longest + config.max_new_tokens
    if config.converses:  # their prompts are known when they begin
        total = config.max_seq_length
    if total > config.max_seq_length:
        name = next(n for n, found in examples.items() if found.lengths.max() == longest)
        _, row = prompts[name].read(int(examples[name].lengths.argmax()))
        raise UserError(
            f"{row.where}: {counted(longest, 'token')}, {total:,} with --max-new-tokens "
            f"{config.max_new_tokens}, more than --max-seq-length {config.max_seq_length}; raise "
            "it, lower --max-new-tokens, or leave this row out"
        )
    model.check_positions(network, total, f"--max-new-tokens {config.max_new_tokens}")
    check_unchanged(prompts)
    texts = reward_texts(config)
    names = parse_rewards(texts) if texts else ()
    if needs_expected(names):
        for found in prompts.values():
            for index in range(len(found.offsets)):
                _, row = found.read(index)
                assert isinstance(row.content, Question)
                check_expected(names, encoder.expected_of(row.content, row.where), row.where)
    rooms = (answer_room(network, encoder.tokenizer, prompt) for prompt in samples)
    shortest = min(int(found.lengths.min()) for found in examples.values())
    edges = few_edges(total - 1)
    return RunData(
        examples=examples,
        samples=samples,
        best_metric=None,
        lengths=edges[edges >= (0 if config.converses else shortest)].tolist(),
        tokens=0,
        answer_tokens=max((both for _, both in rooms), default=0),
        prompts=prompts,
    )


def check_unchanged(prompts: dict[str, PromptRows]) -> None:
    """Read what the rows are, or raise UserError if they changed since."""
    for found in prompts.values():
        found.check()


def rollouts_planned(config: TrainConfig, seq_len: int | None) -> RunData:
    """The sizes of a run that generates completions, without its data.

    seq_len: tokens of a prompt with its completion; by default --max-seq-length.
    """
    total = max(seq_len or config.max_seq_length, config.max_new_tokens + 2)
    lengths = few_edges(total - 1).tolist()
    prompt = np.array([0, total - config.max_new_tokens])
    empty = np.zeros(0)
    one = Examples(empty, empty, prompt, np.ones(1, np.float32), RowCounts())
    return RunData({"train": one}, [], None, lengths[-1:], 0, 0, prompts={})


def load_split(
    name: str,
    path: Path,
    config: TrainConfig,
    encoder: Encoder,
    files: dict[str, str],
    write: Callable[[events.Event], None],
) -> Examples:
    """The examples of one file; writes one notice if rows were shortened.

    Test rows are always masked, because an exact match compares only the answer.
    """

    def reading(rows: Iterator[Row]) -> Iterator[Row]:
        write(events.Stage(text=f"reading {Path(file_of_first_row(path, encoder.limit)).name}"))
        return with_progress(rows, path, encoder.limit, lambda t: write(events.Stage(text=t)))

    examples = load_examples(
        path,
        replace(encoder, mask_prompt=config.mask_prompt or name == "test", notes=Notes()),
        tokenizer_fingerprint(files, encoder.tokenizer.eos_token_ids),
        config.max_seq_length,
        config.too_long,
        store() / "cache",
        reading,
    )
    tally = examples.tally
    if cut := tally.cut_text(f"--max-seq-length {config.max_seq_length}"):
        text = f"{files_of_rows(path, encoder.limit).rpartition('/')[2]}: {cut}"
        if tally.dropped:
            text += f"; {counted(tally.dropped, 'piece')} with nothing left to train: dropped"
        write(events.Notice(text=text))
    return examples


def sample_room(
    config: TrainConfig, network: nn.Module, tokenizer: Any, sample: SamplePrompt
) -> tuple[int, int]:
    """The room of `answer_room`, but short for --samples auto, for whose answers nobody asked."""
    answer, both = answer_room(network, tokenizer, sample)
    shorter = min(answer, AUTO_TOKENS) if config.samples == AUTO else answer
    return shorter, both - answer + shorter


def has_room(config: TrainConfig, network: nn.Module, tokenizer: Any, sample: SamplePrompt) -> bool:
    """Return whether the model has positions for an answer to the prompt."""
    try:
        sample_room(config, network, tokenizer, sample)
    except UserError:
        return False
    return True
