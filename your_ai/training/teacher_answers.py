"""Answers that a teacher writes to the prompts of the data, before a run trains them.

They are data files in the run's folder, a row of prompt + completion for each answer. They can be
read and edited, and trained by other runs. Until a file is whole, what was written is beside it,
so that a run that is killed goes on from there. The teacher is gone before the student is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from your_ai.config import ABOUT, TrainConfig, flag
from your_ai.data.encode import Encoder
from your_ai.data.lines import RowLimit, as_line, read_first_row
from your_ai.data.preferences import kind_of
from your_ai.data.prompts import PromptRows
from your_ai.data.rows import Chat, Question, Row
from your_ai.data.sources import Splits
from your_ai.engine.weights import open_model, prepare_for_generation
from your_ai.errors import RESUME, UserError
from your_ai.evaluation.rows import teacher_prompt_of
from your_ai.evaluation.teacher import find_teacher
from your_ai.files import (
    TEMPORARY,
    open_to_append,
    read_text,
    replace_text,
    sha256,
    write_all,
)
from your_ai.gates.paths import naming_failures
from your_ai.gates.text import counted, model_name, now_and_then
from your_ai.gates.token_ids import vocabulary_of
from your_ai.generation.generate import (
    check_answers,
    checksums_of_model,
    context_tokens,
    facts_with,
)
from your_ai.generation.rewarded import asked_of
from your_ai.generation.rollouts import Completion, RolloutPrompt, complete, sampler_of
from your_ai.memory import allocator
from your_ai.memory.budget import python_bytes, row_limit, waves_within
from your_ai.memory.limit import MemoryLimit, rounded_up
from your_ai.memory.sample import in_gb
from your_ai.memory.workload import RolloutSizes
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.nets.numerics import compute_dtype
from your_ai.nets.saved_adapter import Trained, put_adapter
from your_ai.rewards.builtin import check_expected
from your_ai.rewards.chosen import Rewards, chosen_rewards
from your_ai.rewards.names import parse_rewards
from your_ai.rewards.rollout import Rollout
from your_ai.rng import derive_seed
from your_ai.run import events
from your_ai.run.folder import RunFolder
from your_ai.training.distributed import Ranks

MADE_OF = ".made-of.json"  # what decides the answers, beside them
MADE_OF_BYTES = 1 << 20
UNFINISHED = ".part"  # ends the name of a file of answers that is not whole
TOGETHER = 128  # answers that are written together, at most: a run that is killed loses so many
# Columns of a prompt's row that its prompt is made of, or that would be read beside it.
REPLACED = {
    *("prompt", "completion", "messages", "conversations", "instruction", "input", "output"),
    *("system", "history", "tools", "functions", "text", "label", "chosen", "rejected", "score"),
}


def answered(
    config: TrainConfig,
    found: Splits,
    log: events.EventLog,
    folder: RunFolder,
    limit: MemoryLimit,
    ranks: Ranks,
) -> Splits:
    """The rows with answers of the teacher, which are written first if they are not there.

    found: the rows with prompts. Test rows stay as they are, if they have answers.
    Raises UserError.
    """
    asked = {split: path for split, path in found.files.items() if split != "test"}
    files = {split: folder.answers / f"{split}.jsonl" for split in asked}
    if (test := found.files.get("test")) is not None:
        if kind_of(read_first_row(test, RowLimit(config.max_row_bytes))) == "answers":
            files["test"] = test
        elif config.exact_match:
            raise UserError(f"{flag('exact_match')}: the test rows have no answers ({test})")
        else:
            log.write(events.Notice(text=f"{test.name}: has no answers, so it is not used"))
    if ranks.is_first:
        write_missing(config, asked, log, folder, limit)
    ranks.share_files(folder, folder.answers.name)
    return Splits(files, found.notes, asked)


def write_missing(
    config: TrainConfig,
    asked: Mapping[str, Path],
    log: events.EventLog,
    folder: RunFolder,
    limit: MemoryLimit,
) -> None:
    """Write the files of answers that are not there. asked: the prompts, by split."""
    fixed = {n: value for n, value in config.fixed_on_resume().items() if decides_answers(n)}
    made_of = {
        "data": {split: sha256(path) for split, path in asked.items()},
        "settings": fixed,
    }
    check_same(folder, made_of)
    left = [split for split in asked if not (folder.answers / f"{split}.jsonl").exists()]
    if not left:
        return
    teacher = find_teacher(config.teacher or config.model)
    made_of["teacher"] = checksums_of(teacher, config)
    check_same(folder, made_of)
    before = [last_of(part_of(folder, split)) for split in left]
    rewards = None
    if config.reward:
        rewards = chosen_rewards(config, sum(written.calls for written, _ in before))
    with contextlib.closing(rewards) if rewards else contextlib.nullcontext():
        writer = load_writer(config, teacher, asked, log, limit, rewards)
        with naming_failures(folder.answers, RESUME):
            folder.answers.mkdir(exist_ok=True)
            replace_text(folder.answers / MADE_OF, json.dumps(made_of))
        for split in left:
            writer.write(split, folder)
    del writer
    allocator.free()


def decides_answers(name: str) -> bool:
    """Return whether a setting decides what a teacher writes."""
    return bool(ABOUT[name].objectives) or name in ("seed", "dtype")


def checksums_of(teacher: Path | Trained, config: TrainConfig) -> dict[str, str]:
    """The checksums of the files that decide what a teacher writes."""
    prompt = {}
    if config.teacher_prompt:
        prompt["prompt"] = hashlib.sha256(teacher_prompt_of(config).encode()).hexdigest()
    return checksums_of_model(teacher) | prompt


def check_same(folder: RunFolder, made_of: Mapping[str, Mapping[str, str]]) -> None:
    """Raise UserError if answers that were written before are made of something else."""
    path = folder.answers / MADE_OF
    if not path.exists():
        return
    try:
        before = json.loads(read_text(path, MADE_OF_BYTES))
        changed = {
            kind: sorted(n for n in {*before[kind], *now} if before[kind].get(n) != now.get(n))
            for kind, now in made_of.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is damaged; restore it, or start a new run") from error
    for kind, names in changed.items():
        if names:
            raise UserError(
                f"--resume {folder.name}: the {kind} changed since the teacher began to answer "
                f"({', '.join(names)}); restore it, or start a new run"
            )


# What was written


@dataclass(frozen=True)
class Written:
    """Answers of a teacher to some prompts that follow each other in their file."""

    past: int
    """The index of the prompt after them."""
    rows: list[dict[str, Any]]
    """With the answers, as they are trained."""
    cut: int
    """Prompts up to `past` without a row, since all answers were cut off or empty."""
    calls: int
    """To the judge, up to `past`."""


def part_of(folder: RunFolder, split: str) -> Path:
    """The file of answers that is not whole."""
    return folder.answers / f"{split}.jsonl{UNFINISHED}"


def written_in(path: Path) -> Iterator[tuple[Written, int]]:
    """The whole parts of an unfinished file, and in bytes where each ends; none without a file."""
    end = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            try:
                written = Written(**json.loads(line))
            except (ValueError, TypeError, RecursionError):  # it was cut short
                return
            end += len(line)
            yield written, end


def last_of(path: Path) -> tuple[Written, int]:
    """The last of `written_in`."""
    last = Written(0, [], 0, 0), 0
    for last in written_in(path):  # noqa: B007
        pass
    return last


def row_with(content: Mapping[str, Any], question: Question, answer: str) -> dict[str, Any]:
    """A row with the prompt of a question, an answer to it, and the row's other columns."""
    prompt = question.prompt
    tools = prompt.tools if isinstance(prompt, Chat) else None
    asked = prompt.messages if isinstance(prompt, Chat) else prompt
    others = {name: value for name, value in content.items() if name not in REPLACED}
    return {"prompt": asked, "completion": answer} | ({"tools": tools} if tools else {}) | others


# Write


def load_writer(
    config: TrainConfig,
    teacher: Path | Trained,
    asked: Mapping[str, Path],
    log: events.EventLog,
    limit: MemoryLimit,
    rewards: Rewards | None,
) -> Writer:
    """Load the teacher, once all prompts are known to be good.

    Raises UserError for a prompt that it cannot answer, and if it does not fit into the limit.
    """
    rows = row_limit(config.max_row_bytes, limit)
    name = config.teacher or config.model
    log.write(events.Stage(text=f"loading the teacher {model_name(name)}"))
    source = (teacher, None) if isinstance(teacher, Path) else teacher.source
    adapter = None if isinstance(teacher, Path) else teacher.adapter
    files = None if isinstance(teacher, Path) else teacher.tokenizer_files
    dtype = compute_dtype(config.dtype)
    opened = open_model(model_folder(*source, limit), dtype)
    folder, tokenizer = opened.folder, opened.tokenizer(files)
    check_answers(opened.network, tokenizer, folder)
    writer = Writer(
        config=config,
        network=opened.network,
        encoder=Encoder(tokenizer, vocabulary=vocabulary_of(opened.network), limit=rows),
        system=teacher_prompt_of(config) if config.teacher_prompt else "",
        context=context_tokens(folder),
        prompts={split: PromptRows(path, rows) for split, path in asked.items()},
        rewards=rewards,
        log=log,
    )
    longest = writer.check_prompts()
    answers = sum(len(found.offsets) for found in writer.prompts.values())
    answers *= config.answers_from_teacher
    sizes = RolloutSizes(
        prompt_tokens=longest,
        new_tokens=config.max_new_tokens,
        group=config.answers_from_teacher,
        rows=min(TOGETHER, answers),
    )
    facts = facts_with(adapter, folder, dtype)
    plan, needed = waves_within(facts, sizes, limit.limit_bytes, opened.can_stream)
    if plan is None:
        raise UserError(
            f"--teacher {name}: to answer, it needs at least "
            f"{in_gb(rounded_up(needed))}, but the limit is {in_gb(limit.limit_bytes)}; raise "
            "--max-memory, or lower --max-new-tokens"
        )
    allocator.set_limits(limit.limit_bytes, needed, python_bytes())
    if adapter is not None:
        put_adapter(opened.network, adapter)
    prepare_for_generation(opened, plan.streams)
    writer.wave = plan.wave
    return writer


@dataclass
class Writer:
    """A teacher that writes the answers of a run."""

    config: TrainConfig
    network: nn.Module
    encoder: Encoder
    system: str
    """The text of --teacher-prompt, or ""."""
    context: int | None
    """Maximum tokens of prompt and answer; None if not known."""
    prompts: dict[str, PromptRows]
    """By split."""
    rewards: Rewards | None
    """What chooses among the answers to a prompt; None if all are trained."""
    log: events.EventLog
    wave: int = 1
    """Answers that are written together."""
    tokens: int = 0
    """Written so far, in this process."""

    def check_prompts(self) -> int:
        """The tokens of the longest prompt.

        Raises UserError for one that has no room for an answer, or lacks what a reward needs.
        """
        names = parse_rewards(self.config.reward) if self.config.reward else ()
        longest = 0
        for found in self.prompts.values():
            for index in range(len(found.offsets)):
                _, row = found.read(index)
                assert isinstance(row.content, Question)
                check_expected(names, self.encoder.expected_of(row.content, row.where), row.where)
                longest = max(longest, self.checked_length(row))
        return longest

    def checked_length(self, row: Row) -> int:
        """The tokens of a prompt. Raises UserError if none are left for an answer."""
        config, own = self.config, len(self.encoder.encode(row).tokens)
        if config.too_long == "error" and own + config.max_new_tokens > config.max_seq_length:
            raise UserError(  # now, and not after hours
                f"{row.where}: {counted(own, 'token')}, {own + config.max_new_tokens:,} with "
                f"--max-new-tokens {config.max_new_tokens}, more than --max-seq-length "
                f"{config.max_seq_length}; raise it, lower --max-new-tokens, or leave this row out"
            )
        seen = len(self.seen(row)) if self.system else own
        if self.context is not None and seen >= self.context:
            raise UserError(
                f"{row.where}: has {counted(seen, 'token')}; the teacher's context is "
                f"{self.context}"
            )
        return seen

    def seen(self, row: Row) -> Any:
        """(T,) the tokens of a prompt as the teacher reads it."""
        row = self.encoder.after_prompt(row, self.system) if self.system else row
        return self.encoder.encode(row).tokens

    def write(self, split: str, folder: RunFolder) -> None:
        """Write the answers of a split, from where they were left. Raises UserError, RunError."""
        path, part = folder.answers / f"{split}.jsonl", part_of(folder, split)
        count = len(self.prompts[split].offsets)
        step = max(1, self.wave // self.config.answers_from_teacher)
        done, end = last_of(part)
        with naming_failures(part, RESUME):
            file = open_to_append(part)
        with file:
            os.ftruncate(file.fileno(), end)
            while done.past < count:
                done = self.after(done, split, range(done.past, min(done.past + step, count)))
                line = json.dumps(asdict(done), default=str).encode() + b"\n"
                with naming_failures(part, RESUME):
                    write_all(file.fileno(), line)
                    os.fsync(file.fileno())
        rows = 0
        temporary = path.with_name(f"{TEMPORARY}{path.name}")
        with naming_failures(path, RESUME), temporary.open("w", encoding="utf-8") as whole:
            for written, _ in written_in(part):
                for row in written.rows:
                    rows += 1
                    whole.write(as_line(row))
            whole.flush()
            os.fsync(whole.fileno())
        limit = f"--max-new-tokens {self.config.max_new_tokens}"
        if not rows:
            temporary.unlink()
            raise UserError(
                f"{part}: every answer of the teacher was cut off at {limit}, or empty; start a "
                "new run with a higher number"
            )
        with naming_failures(path, RESUME):
            os.replace(temporary, path)
            part.unlink()
        if done.cut:
            left_out = f"{counted(done.cut, 'prompt')} of {count:,} left out"
            text = f"{path.name}: {left_out}: all answers were cut off at {limit}, or empty"
            self.log.write(events.Notice(text=text))
        self.log.write(events.Notice(text=f"the teacher wrote {counted(rows, 'answer')}: {path}"))

    def after(self, before: Written, split: str, indices: range) -> Written:
        """Answer the prompts at these indices, which come after those `before`."""
        questions = [self.prompts[split].read(index) for index in indices]
        groups = self.completions(split, indices, [row for _, row in questions])
        texts = [
            {s: text for s in sorted(group) if (text := self.text_of(group[s]))} for group in groups
        ]
        calls = 0
        if self.rewards is not None:
            texts, calls = self.best(self.rewards, split, indices, groups, texts)
        rows = [
            row_with(content, question.content, text)
            for (content, question), found in zip(questions, texts, strict=True)
            for text in found.values()
            if isinstance(question.content, Question)
        ]
        cut = before.cut + sum(not found for found in texts)
        return Written(indices.stop, rows, cut, before.calls + calls)

    def completions(
        self, split: str, indices: range, rows: Sequence[Row]
    ) -> list[dict[int, Completion]]:
        """The samples of each prompt, by their index; each has a seed of its own."""
        config, count = self.config, len(self.prompts[split].offsets)
        prompts = []
        for index, row in zip(indices, rows, strict=True):
            tokens = self.seen(row)
            room = config.max_new_tokens if self.context is None else self.context - len(tokens)
            samples = range(config.answers_from_teacher)
            seeds = tuple(derive_seed(config.seed, "teacher", split, index, s) for s in samples)
            prompts.append(RolloutPrompt(tokens, seeds, room))
        groups: list[dict[int, Completion]] = [{} for _ in prompts]

        def text() -> str:
            done = indices.start + sum(len(g) == config.answers_from_teacher for g in groups)
            what = f"{counted(count, 'prompt')} ({split}), {self.tokens:,} tokens"
            return f"the teacher answers: {done:,} of {what}"

        report = now_and_then(lambda text: self.log.write(events.Stage(text=text)), text)

        def progress(rows: int) -> None:
            self.tokens += rows
            report()

        self.log.write(events.Stage(text=text()))
        sampler = sampler_of(config.temperature, config.top_p, config.top_k)
        stops, most = self.encoder.tokenizer.eos_token_ids, config.max_new_tokens
        for found in complete(self.network, prompts, sampler, stops, most, self.wave, progress):
            groups[found.prompt][found.sample] = found
        allocator.free(collect=False)
        return groups

    def text_of(self, completion: Completion) -> str:
        """The text of an answer; "" if it was cut off, or has only spaces."""
        if not completion.stopped:
            return ""
        tokens = list(completion.tokens[:-1])
        text = str(self.encoder.tokenizer.decode(tokens, skip_special_tokens=True))
        return text if text.strip() else ""

    def best(
        self,
        rewards: Rewards,
        split: str,
        indices: range,
        groups: Sequence[Mapping[int, Completion]],
        texts: Sequence[Mapping[int, str]],
    ) -> tuple[list[dict[int, str]], int]:
        """The text with the highest reward of each prompt, and the calls to the judge.

        The first of several with the highest. A missing reward is lower than any other.
        """
        rollouts, places = [], []
        for group, (index, found) in enumerate(zip(indices, texts, strict=True)):
            asked = asked_of(self.prompts[split], index, self.encoder)
            for sample, text in found.items():
                count = len(groups[group][sample].tokens)
                rollouts.append(
                    Rollout(completion=text, tokens=count, truncated=False, group=group, **asked)
                )
                places.append((group, sample))
        result = rewards.begin(rollouts, 0).result()
        for text in dict.fromkeys(result.notices):
            self.log.write(events.Notice(text=text))
        totals = dict(zip(places, result.totals, strict=True))

        def worth(group: int, sample: int) -> tuple[bool, float]:
            total = totals[group, sample]
            return total is not None, total or 0.0

        chosen = []
        for group, found in enumerate(texts):
            first = max(found, key=partial(worth, group), default=None)
            chosen.append({} if first is None else {first: found[first]})
        return chosen, int(result.counts.get("judge/calls", 0))
