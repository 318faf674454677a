"""Rows of questions and answers about documents, which a model writes and checks.

Chunks are asked about in batches. What came of a batch is a line of a file in a folder beside the
result, so that a process that is killed goes on from there. The result is written at the end, of
these lines alone. All that is sampled depends on the seed, the chunk and what is asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from filecmp import cmp
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from your_ai.config import TrainConfig
from your_ai.config.requests import CHUNK_TOKENS, MadeData, MakeDataRequest
from your_ai.data.chat_template import THOUGHT
from your_ai.data.chunks import Chunk, chunks_of, documents_in
from your_ai.data.documents import Passage, read_document
from your_ai.data.encode import token_ids
from your_ai.data.lines import as_line
from your_ai.data.near_duplicates import NearDuplicates
from your_ai.data.questions import (
    VERSION,
    Answered,
    ask_for_questions,
    ask_for_verdict,
    fault_of,
    is_yes,
    parse_answered,
    training_row,
)
from your_ai.errors import AGAIN, UserError
from your_ai.files import (
    open_to_append,
    read_text,
    replace_text,
    sha256,
    sync,
    write_all,
)
from your_ai.gates.paths import naming_failures
from your_ai.gates.text import counted, now_and_then, shortened
from your_ai.gates.token_ids import check_ids, vocabulary_of
from your_ai.generation.generate import (
    Sampling,
    checksums_of_model,
    context_tokens,
    load,
    memory_explained,
    model_or_run,
    prompt_tokens,
)
from your_ai.generation.rollouts import RolloutPrompt, complete
from your_ai.generation.samples import MOST_TOGETHER, answer_of
from your_ai.memory import allocator
from your_ai.memory.workload import RolloutSizes
from your_ai.nets.saved_adapter import Trained
from your_ai.nets.tokenizer import open_tokenizer
from your_ai.rng import derive_seed

MADE_OF, PART = "made-of.json", "batches.jsonl"  # in the folder of unfinished progress
MADE_OF_BYTES = 1 << 26
MOST_CHUNKS = 16  # of a batch: what a process loses that is killed
PLACE_TOKENS = 48  # of the place of a chunk, and where its words meet
FEWEST_TOKENS = 16  # of a chunk
VERDICT_TOKENS = 8  # of a model that does not reason first
UNREAD = "questions that the reply does not have"
CUT_OFF = "cut off at --max-tokens"
UNSUPPORTED = "the model does not find the answer supported by the text"
NEAR_DUPLICATE = "near-duplicate of another question"
NO_PAIR = Answered("", "")


class TextReply(NamedTuple):
    """A reply of the model."""

    text: str
    is_whole: bool
    """Whether it ended by itself, and not at the limit of tokens."""


Ask = Callable[[Sequence[tuple[str, int]], bool], list[TextReply]]
"""(prompts with their seeds, whether verdicts are asked for) -> the replies."""


def make_rows(request: MakeDataRequest) -> MadeData:
    """Make a file of rows. Raises UserError and RunError; see `your_ai.make_data`."""
    out = Path(request.out).expanduser()
    check_out(out, request.force)
    found = model_or_run(request.model, "--with")
    documents = readable_in(request)
    tokenizer = found.tokenizer() if isinstance(found, Trained) else open_tokenizer(found)

    def count(text: str) -> int:
        return len(token_ids(tokenizer, text, "a document", special=False))

    tokens = request.chunk_tokens
    if tokens is None:
        base = found.base if isinstance(found, Trained) else found
        tokens = chunk_tokens_for(context_tokens(base), tokenizer, request)
        request = replace(request, chunk_tokens=tokens)
    chunks = [
        chunk
        for path, passages in documents.items()
        for chunk in chunks_of(str(path), passages, tokens, count)
    ]
    made_of = {
        "documents": {str(path): sha256(path) for path in documents},
        "model": checksums_of_model(found),
        "settings": {**request.deciding(), "version": VERSION},
    }
    with Progress(out, made_of) as progress:
        if progress.past < len(chunks):
            if os.path.lexists(out):
                check_out(out, request.force, unfinished=False)
            ask = loaded(found, chunks, request, progress)
            request.on_note(f"{progress.folder}: keeps what is done, so that this command goes on")
            write_batches(chunks, ask, request, progress)
        return finish(progress, out, len(chunks), len(documents), request)


def chunk_tokens_for(context: int | None, tokenizer: Any, request: MakeDataRequest) -> int:
    """The tokens of chunks that fit into the context of a model, at most CHUNK_TOKENS; as many if
    hardly any do: `loaded` refuses them."""
    if context is None:
        return CHUNK_TOKENS
    asked = ask_for_questions(Chunk("", str(request.documents[0]), "", 0, 0), request.questions)
    beside = len(prompt_tokens(tokenizer, [{"role": "user", "content": asked}]))
    room = context - request.reply_tokens - beside - PLACE_TOKENS
    return min(CHUNK_TOKENS, room) if room >= FEWEST_TOKENS else CHUNK_TOKENS


def check_out(out: Path, force: bool, unfinished: bool = True) -> None:
    """Raise UserError if a file of rows cannot be written there.

    unfinished: it may be there where there is progress, as that of a process that was killed last.
    """
    if out.suffix != ".jsonl":
        raise UserError(f"--out {out}: give the name of a .jsonl file")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    for path in (out, dropped_beside(out)):
        if not os.path.lexists(path):
            continue
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path}: is not a regular file; give another name")
        if not force and not (unfinished and progress_of(out).is_dir()):
            raise UserError(f"{path}: exists; give another name, or --force to overwrite it")


def dropped_beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}.dropped{out.suffix}")


def progress_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


def readable_in(request: MakeDataRequest) -> dict[Path, list[Passage]]:
    """The passages of each document; one in a folder that cannot be read is named and left out."""
    passages, refusal = dict[Path, list[Passage]](), None
    for path, is_named in documents_in(request.documents):
        try:
            passages[path] = read_document(path)
        except UserError as error:
            if is_named:
                raise
            refusal = error
            request.on_note(f"left out: {error}")
    if refusal is not None and not passages:
        raise refusal
    return passages


# What is done


class Progress:
    """The batches of chunks that are done, in a folder beside the result.

    One process at a time has it. Raises UserError if it is of other arguments, or in use.
    """

    def __init__(self, out: Path, made_of: dict[str, dict[str, Any]]) -> None:
        self.folder = progress_of(out)
        self.made_of = made_of
        self.past = 0
        """The number of chunks that are done."""
        self.rows = 0
        self.dropped = Counter[str]()
        self.seen = NearDuplicates()
        self.plan: dict[str, int] = {}
        """Chunks of a batch, and rows that are generated together; none before the first batch."""
        self.file: BinaryIO | None = None
        if (self.folder / MADE_OF).exists():
            before = self.checked()
            self.open()
            whole = 0
            for batch, end in self.batches():
                whole = end
                for number, row in enumerate(batch["rows"], self.rows + 1):
                    self.seen.add(row["messages"][0]["content"], number)
                self.count(batch)
            assert self.file is not None
            with naming_failures(self.folder, AGAIN):
                os.ftruncate(self.file.fileno(), whole)
            self.plan = before["plan"]

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()

    def checked(self) -> dict[str, Any]:
        """Read what is recorded of the arguments, if these are the same now."""
        path = self.folder / MADE_OF
        try:
            before = json.loads(read_text(path, MADE_OF_BYTES))
            changed = [
                name
                for kind, now in self.made_of.items()
                for name in sorted({*before[kind], *now})
                if before[kind].get(name) != now.get(name)
            ]
            assert {type(before["plan"][name]) for name in ("together", "wave")} == {int}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError):
            raise UserError(f"{path}: is damaged; delete the folder to begin anew") from None
        if changed:
            raise UserError(
                f"{self.folder}: is unfinished with other arguments or files "
                f"({shortened(', '.join(changed))}); give the same, or delete the folder"
            )
        return before  # type: ignore[no-any-return]

    def open(self) -> None:
        with naming_failures(self.folder, AGAIN):
            self.file = open_to_append(self.folder / PART)
        try:
            fcntl.flock(self.file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{self.folder}: another process is making these rows") from error

    def begin(self, wave: int) -> None:
        """Begin with the first batch, unless one was begun before.

        wave: rows that fit together now. What was begun keeps its batches, as sums in a batch of
        another size are rounded differently.
        """
        if self.plan:
            self.plan["wave"] = min(wave, self.plan["wave"])
            return
        self.plan = {"together": min(wave, MOST_CHUNKS), "wave": wave}
        with naming_failures(self.folder, AGAIN):
            self.folder.mkdir(exist_ok=True)
            self.open()
            if os.path.getsize(self.folder / PART) and (self.folder / MADE_OF).exists():
                raise UserError(f"{self.folder}: another process has made these rows")
            assert self.file is not None
            os.ftruncate(self.file.fileno(), 0)
            replace_text(self.folder / MADE_OF, json.dumps({**self.made_of, "plan": self.plan}))

    def batches(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the batches that are done, and in bytes where each ends."""
        end = 0
        with contextlib.suppress(FileNotFoundError), (self.folder / PART).open("rb") as file:
            for line in file:
                try:
                    batch = json.loads(line)
                except ValueError:  # it was cut short
                    return
                end += len(line)
                yield batch, end

    def write(self, batch: dict[str, Any]) -> None:
        assert self.file is not None
        with naming_failures(self.folder, AGAIN):
            write_all(self.file.fileno(), json.dumps(batch).encode() + b"\n")
            os.fsync(self.file.fileno())
        self.count(batch)

    def count(self, batch: dict[str, Any]) -> None:
        """Count a batch that is done."""
        self.past, self.rows = batch["past"], self.rows + len(batch["rows"])
        self.dropped.update(each["reason"] for each in batch["dropped"])


def finish(
    progress: Progress, out: Path, chunks: int, documents: int, request: MakeDataRequest
) -> MadeData:
    """Write the result of all batches, and what was dropped; delete the progress."""
    dropped = dropped_beside(out)
    with naming_failures(out, AGAIN):
        for path, key in ((dropped, "dropped"), (out, "rows")):
            whole = progress.folder / path.name
            with whole.open("w", encoding="utf-8") as file:
                for batch, _ in progress.batches():
                    file.writelines(map(as_line, batch[key]))
                file.flush()
                os.fsync(file.fileno())
            if not whole.stat().st_size:
                continue
            if path.exists() and not request.force and not cmp(whole, path, shallow=False):
                raise UserError(f"{path}: exists; move it, or give --force to overwrite it")
            os.replace(whole, path)
        sync(out.absolute().parent)
        shutil.rmtree(progress.folder)
    reasons = dict(progress.dropped.most_common())
    if not progress.rows:
        why = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        raise UserError(f"{out}: no row was made of {counted(chunks, 'chunk')} ({why}): {dropped}")
    return MadeData(out, progress.rows, chunks, documents, reasons, dropped)


# Ask


def loaded(
    found: Path | Trained, chunks: Sequence[Chunk], request: MakeDataRequest, progress: Progress
) -> Ask:
    """Load the model, begin with the progress, and return a function that asks the model.

    Raises UserError if the model does not fit into memory, or a chunk not into its context.
    """
    trained = found if isinstance(found, Trained) else None
    base = found if isinstance(found, Path) else found.base
    source = (base, None) if trained is None else trained.source
    files = None if trained is None else trained.tokenizer_files
    context, most = context_tokens(base), request.reply_tokens
    tokenizer = open_tokenizer(base, files)

    def tokens_of(prompt: str) -> list[int]:
        return prompt_tokens(tokenizer, [{"role": "user", "content": prompt}])

    longest = max(len(tokens_of(ask_for_questions(c, request.questions))) for c in chunks)
    if context is not None and longest + most > context:
        raise UserError(
            f"--chunk-tokens {request.chunk_tokens}: with the instructions and a reply of {most} "
            f"tokens, {longest + most:,} are needed; the model's context is {context:,}; lower it, "
            "--questions or --max-tokens"
        )
    rows = min(MOST_TOGETHER, len(chunks) * request.questions)
    network, tokenizer, wave = load(
        TrainConfig() if trained is None else trained.config,
        source,
        None if trained is None else trained.adapter,
        request.max_memory,
        RolloutSizes(longest + most, most, 1, rows),  # the answers are in the prompts of verdicts
        files,
    )
    progress.begin(wave)
    vocabulary, stops = vocabulary_of(network), tokenizer.eos_token_ids
    reasons = THOUGHT in str(getattr(tokenizer, "chat_template", "") or "")
    sampling = Sampling(temperature=request.temperature, top_p=request.top_p)
    greedy = Sampling(temperature=0.0)

    def ask(prompts: Sequence[tuple[str, int]], is_verdict: bool) -> list[TextReply]:
        limit = VERDICT_TOKENS if is_verdict and not reasons else most
        asked, replies = list[RolloutPrompt](), [TextReply("", False)] * len(prompts)
        places = list[int]()
        for place, (prompt, seed) in enumerate(prompts):
            tokens = tokens_of(prompt)
            check_ids(tokens, vocabulary, tokenizer, "the prompt")
            room = limit if context is None else min(limit, context - len(tokens))
            if room > 0:
                places.append(place)
                asked.append(RolloutPrompt(np.array(tokens), (seed,), room))
        sampler = (greedy if is_verdict else sampling).sampler
        with memory_explained():
            for done in complete(network, asked, sampler, stops, limit, progress.plan["wave"]):
                replies[places[done.prompt]] = TextReply(
                    answer_of(tokenizer, done).text, done.stopped
                )
        allocator.free(collect=False)
        return replies

    return ask


def write_batches(
    chunks: Sequence[Chunk], ask: Ask, request: MakeDataRequest, progress: Progress
) -> None:
    """Ask about the chunks that are left, batch by batch."""
    report = now_and_then(
        request.on_note,
        lambda: (
            f"{progress.past:,} of {counted(len(chunks), 'chunk')}: "
            f"{counted(progress.rows, 'row')}, {progress.dropped.total():,} dropped"
        ),
    )
    while progress.past < len(chunks):
        end = min(progress.past + progress.plan["together"], len(chunks))
        progress.write(batch_of(range(progress.past, end), chunks, ask, request, progress))
        report()


def batch_of(
    indices: range, chunks: Sequence[Chunk], ask: Ask, request: MakeDataRequest, progress: Progress
) -> dict[str, Any]:
    """Make the rows of these chunks, with what is dropped of them."""
    prompts = [
        (ask_for_questions(chunks[i], request.questions), derive_seed(request.seed, "make", i))
        for i in indices
    ]
    pairs, dropped = list[tuple[Chunk, Answered]](), list[dict[str, Any]]()

    def drop(chunk: Chunk, reason: str, pair: Answered = NO_PAIR, detail: str = "") -> None:
        detailed = {"detail": detail} if detail else {}
        dropped.append(
            {
                "reason": reason,
                **detailed,
                "question": pair.question,
                "answer": pair.answer,
                "source": chunk.where,
            }
        )

    for index, reply in zip(indices, ask(prompts, False), strict=True):
        chunk = chunks[index]
        found, is_cut = parse_answered(reply.text, reply.is_whole)
        for pair in found[: request.questions]:
            if fault := fault_of(pair, chunk):
                drop(chunk, fault[0], pair, fault[1])
            else:
                pairs.append((chunk, pair))
        for _ in range(request.questions - len(found)):
            drop(chunk, CUT_OFF if is_cut else UNREAD, detail=reply.text)
    if request.check:
        asked = [(ask_for_verdict(*each), 0) for each in pairs]
        verdicts = ask(asked, True) if asked else []
        for (chunk, pair), verdict in zip(pairs, verdicts, strict=True):
            if not is_yes(verdict.text):
                drop(chunk, UNSUPPORTED, pair, verdict.text)
        pairs = [each for each, v in zip(pairs, verdicts, strict=True) if is_yes(v.text)]
    rows = list[dict[str, Any]]()
    for chunk, pair in pairs:
        number = progress.rows + len(rows) + 1
        if (like := progress.seen.add(pair.question, number)) is not None:
            drop(chunk, NEAR_DUPLICATE, pair, f"row {like}")
        else:
            rows.append(training_row(pair, chunk))
    return {"past": indices.stop, "rows": rows, "dropped": dropped}
