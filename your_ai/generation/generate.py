"""Generate text with mlx-lm, from a model with or without the adapter of a run."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import stream_generate
from mlx_lm.generate import GenerationResponse

from your_ai.config import TrainConfig
from your_ai.config.requests import ChatRequest, GenerateRequest
from your_ai.data.answers import ChatAnswers
from your_ai.data.chat_template import ChatTemplate
from your_ai.data.columns import layout_of
from your_ai.data.encode import SamplePrompt, chat_of_transcript, end_texts, token_ids
from your_ai.data.lines import ROW_LIMIT, RowLimit, decode_line
from your_ai.data.look import CommonForm, common_form
from your_ai.data.notes import Notes
from your_ai.data.prompts import is_prompt_row, parse_prompts
from your_ai.data.records import read_records, suffix_of
from your_ai.data.rows import Chat, Question
from your_ai.data.template import TemplateRefused
from your_ai.data.turns import SYSTEM
from your_ai.engine.weights import last_position_only, open_model, prepare_for_generation
from your_ai.errors import RunError, UserError, first_line, is_memory_error
from your_ai.files import sha256
from your_ai.gates.text import counted, quoted, shortened
from your_ai.gates.token_ids import EMBEDDINGS, HEADS, check_ids, rows_of, vocabulary_of
from your_ai.gates.untrusted import read_json
from your_ai.generation.rollouts import Sampler, keys_at, sampler_of, seed_keys
from your_ai.hub.find import find_model, fingerprint
from your_ai.memory.budget import WavePlan, limit_generation, limit_of, plan_waves
from your_ai.memory.facts import ModelFacts, facts_of
from your_ai.memory.sizes import PREFILL_TOKENS
from your_ai.memory.workload import RolloutSizes
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.nets.model import learned_positions
from your_ai.nets.numerics import compute_dtype
from your_ai.nets.saved_adapter import Adapter, Trained, check_generates, open_trained, put_adapter
from your_ai.rewards.names import RUN
from your_ai.rng import derive_seed
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS
from your_ai.run.folder import find

TEMPLATE_BYTES = 1 << 30  # maximum memory of a chat template
ROLES_OF_PROMPTS = ("prompt", "messages", "system")
PROMPT_CHARACTERS = 4_000_000  # maximum length of one prompt
TEMPLATE_TOKENS = 200  # upper estimate of the tokens a chat template adds per message
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
TABLES = (".csv", ".tsv", ".xlsx", ".parquet", ".arrow")
ANSWER_TOKENS = 128  # an answer may have this many tokens more than twice the expected one
SEEDS = 1 << 64  # MLX accepts seeds below this

Message = dict[str, Any]  # role and content, as chat templates expect


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of sampling. Raises UserError for a value out of range."""

    max_tokens: int = 256
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose total probability is this; 1 for all tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"--max-tokens {self.max_tokens}: must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature {self.temperature}: must be a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed < SEEDS:
            raise UserError(f"--seed {self.seed}: must be at least 0 and below 2^64")

    @property
    def sampler(self) -> Sampler:
        return sampler_of(self.temperature, self.top_p)

    def seed_of(self, sample: int) -> int:
        """The seed of a sample, from 0, of any prompt."""
        return derive_seed(self.seed, "sample", sample)


def sampling_of(request: GenerateRequest | ChatRequest) -> Sampling:
    """The sampling of answers to a request. Raises UserError."""
    return Sampling(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
    )


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer."""

    where: str
    """The source: `--prompt`, `stdin` or file:line."""
    messages: list[Message]
    tools: list[Any] | None = None
    is_text: bool = False
    """Whether it is a text, which may have the tokens of the chat template already."""
    as_is: bool = False
    """Whether it is continued as it is, without the chat template."""

    @property
    def text(self) -> str:
        """The last question."""
        content: str = self.messages[-1]["content"]
        return content

    @property
    def most_tokens(self) -> int:
        """An upper bound of the number of tokens: a token has at least one byte."""
        texts = [str(message.get("content", "")) for message in self.messages]
        texts += [json.dumps(self.tools)] if self.tools else []
        return sum(len(text.encode()) for text in texts) + TEMPLATE_TOKENS * len(texts)


ReadPrompt = Callable[[dict[str, Any], str], Prompt]


def read_prompts(path: str, data: bytes, read: ReadPrompt) -> list[Prompt]:
    """Read the prompts from the bytes of a file, one per line; blank lines are skipped.

    A line is a row as JSON if the file is .jsonl, or if it is stdin and begins with an object;
    otherwise it is text. read: makes the prompt of a row. Raises UserError with the file and line.
    """
    lines = [line.strip() for line in data.removeprefix(b"\xef\xbb\xbf").splitlines()]
    numbered = [(f"{path}:{n}", line) for n, line in enumerate(lines, start=1) if line]
    if not numbered:
        raise UserError(f"{path}: contains no prompt")
    if path.endswith(".jsonl") or (path == "stdin" and numbered[0][1].startswith(b"{")):
        return [read(decode_line(line, where), where) for where, line in numbered]
    return [text_prompt(decoded(line, where), where) for where, line in numbered]


def parse_prompt(row: dict[str, Any], where: str) -> Prompt:
    """Parse a row with a prompt as training does, or a row of answers without its last answer."""
    content = parse_prompts(row, where).content
    assert isinstance(content, Question)
    if isinstance(content.prompt, str):
        return text_prompt(content.prompt, where)
    for message in content.prompt.messages:
        check_text(message["content"], where)
    return Prompt(where, content.prompt.messages, content.prompt.tools)


def has_columns(path: str) -> bool:
    """Return whether a file has rows with columns, by its name."""
    return is_table(path) or path.endswith(".jsonl")


def is_table(path: str) -> bool:
    """Return whether a file has columns, by its name."""
    return suffix_of(Path(path)) in TABLES


def prompt_reader(config: TrainConfig, columns: Sequence[str] = ()) -> ReadPrompt:
    """Return the function that makes prompts of rows, (record, where) -> Prompt, as those of a run
    were made.

    columns: the value of --columns, if given. A row that has a prompt, and not the columns of
    --prompt-template, is used as it is. If a row has whole messages, too, these count where the run
    trained answers.
    """
    own = [c for c in config.columns if c.partition("=")[0].strip() in ROLES_OF_PROMPTS]
    template = "" if columns else config.prompt_template
    layout = layout_of(columns or own, template, "prompts")

    def read(record: dict[str, Any], where: str) -> Prompt:
        if not config.generates and isinstance(record.get("messages"), list):
            record = {name: value for name, value in record.items() if name != "prompt"}
        is_ready = is_prompt_row(record) and not layout.rendered <= record.keys()
        return parse_prompt(record if is_ready else layout.row_of(record, where), where)

    return read


def read_table(path: Path, read: ReadPrompt) -> list[Prompt]:
    """Read the prompts of a table (CSV, Parquet ...). read: makes the prompt of a row.

    Raises UserError with the place of a row that has none.
    """
    return [read(record, where) for where, record in read_records(path, ROW_LIMIT)]


def text_prompt(text: str, where: str) -> Prompt:
    if not text.strip():
        raise UserError(f"{where}: is empty; enter some text")
    return Prompt(where, [{"role": "user", "content": check_text(text, where)}], is_text=True)


def decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text") from error


def check_text(text: str, where: str) -> str:
    """Check a text and return it.

    Raises UserError for a lone surrogate, which tokenizers refuse, and for a text that is longer
    than any model can read: tokenizing needs about 200 times its size in memory.
    """
    if len(text) > PROMPT_CHARACTERS:
        raise UserError(f"{where}: has more than {PROMPT_CHARACTERS:,} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: is not UTF-8 text, or contains half of a character") from error
    return text


def with_system(messages: list[Message], system: str) -> list[Message]:
    """Put a system prompt before the messages, unless it is empty or they already have one."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def asked_with(prompt: Prompt, form: CommonForm) -> Prompt:
    """The prompt in the form that the rows of a run have: after their system prompt, unless there
    is one; or as it is, if it and they are plain texts."""
    messages = with_system(prompt.messages, form.system)
    is_text = prompt.is_text and len(messages) == 1
    is_plain = prompt.is_text and prompt.tools is None  # a row's own tools are as in the row
    tools = form.tools if is_plain else prompt.tools
    is_text = is_text and tools is None
    as_is = is_text and form.is_text
    return replace(prompt, messages=messages, tools=tools, is_text=is_text, as_is=as_is)


def form_of_prompts(
    config: TrainConfig, system: str | None, tools: list[Any] | None = None
) -> tuple[CommonForm, str]:
    """The form of a run's prompts, and what the user should know of it; "" if nothing.

    system: the system prompt, "" for none; None for that of the rows which the run trained.
    tools: those that prompts have; None for those of the rows.
    """
    form = common_form(config)
    notes = []
    if not form.is_known and system is None:
        notes.append(
            f"the training rows cannot be read again ({shortened(config.data)}): if all had the "
            "same system prompt, give it with --system"
        )
    if system is None and form.system:
        begun = quoted(form.system, 60)
        notes.append(f"the system prompt of the training rows is used: {begun} (--system sets it)")
    if tools is not None:
        form = replace(form, tools=tools)
    elif form.tools:
        notes.append(f"prompts have the {counted(len(form.tools), 'tool')} of the training rows")
    if form.is_text and not system:
        notes.append("the training rows are plain texts: prompts are continued as they are")
    return form if system is None else replace(form, system=system), "; ".join(notes)


def note_on_template(config: TrainConfig) -> str:
    """The note for prompts that are typed to a run whose prompts a template made; "" for others."""
    if not config.prompt_template:
        return ""
    made = f"--prompt-template {shortened(config.prompt_template)}"
    return f"the prompts of the training rows were made by {made}; this one is used as it is"


def note_on_tools(config: TrainConfig) -> str:
    """The note for prompts without the tools that a run was trained with; "" for others."""
    if not config.tools:
        return ""
    named = shortened(",".join(config.tools))
    return f"the run was trained with tools; --tools {named} lets the model call them"


def find_base_model(run: str, base: str | None = None) -> tuple[TrainConfig, Path]:
    """The settings of a run and the folder of its base model; the run needs no adapter.

    base: the current location of the base model, if it has moved.
    """
    config = find(run).read_config()
    return config, find_model(base or config.model)


def model_or_run(name: str, option: str) -> Path | Trained:
    """The folder of the model that an option names, or the run: `run:NAME`. Raises UserError."""
    kind, _, run = name.partition(":")
    try:
        if kind != RUN or not run:
            return find_model(name)
        trained = open_trained(run)
        check_generates(trained.adapter)
        return trained
    except UserError as error:
        reason = str(error).removeprefix(f"--model {name}: ")
        raise UserError(f"{option} {name}: {reason}") from error


def checksums_of_model(found: Path | Trained) -> dict[str, str]:
    """The checksums of the files that decide what a model, or the adapter of a run, generates."""
    if isinstance(found, Path):
        return fingerprint(found)
    own = [found.adapter.folder / name for name in (ADAPTERS, ADAPTER_CONFIG)]
    return found.files() | {path.name: sha256(path) for path in own if path.exists()}


def load_run(
    trained: Trained, adapted: bool = True, max_memory_gb: float | None = None, tokens: int = 2048
) -> tuple[nn.Module, Any]:
    """Load the model of a run and its tokenizer, as `load` does; `adapted`: with its adapter."""
    adapter = trained.adapter if adapted else None
    files = trained.tokenizer_files if adapted else None
    whole = trained.adapter.kind.is_whole
    base = find_model(trained.config.model) if whole and not adapted else trained.base
    source = trained.source if adapted else (base, trained.config.quantize)
    return load(trained.config, source, adapter, max_memory_gb, tokens, files)[:2]


def load(
    config: TrainConfig,
    source: tuple[Path, int | None],
    adapter: Adapter | None,
    max_memory_gb: float | None,
    room: int | RolloutSizes,
    tokenizer_files: Path | None = None,
) -> tuple[nn.Module, Any, int]:
    """Load a model with the dtype of a run, and its tokenizer.

    Returns also how many completions fit together.

    source: the folder of the model, and the bits that it is quantized to first, or None.
    max_memory_gb: memory limit of the process, including the KV cache. A model that does not fit is
    read from its files block by block for every token. Raises UserError if that does not fit
    either.
    room: the tokens of one prompt and answer, or all completions, which are generated in waves;
    without max_memory_gb, these fit into what the machine has.
    tokenizer_files: as `Trained.tokenizer_files`.
    """
    if max_memory_gb is not None and not (math.isfinite(max_memory_gb) and max_memory_gb > 0):
        raise UserError(f"--max-memory {max_memory_gb}: must be a number above 0")
    if adapter is not None:
        check_generates(adapter)
    dtype = compute_dtype(config.dtype)
    base = model_folder(*source, limit_of(max_memory_gb))
    opened = open_model(base, dtype)
    model, tokenizer = opened.network, opened.tokenizer(tokenizer_files)
    check_answers(model, tokenizer, base)
    plan = WavePlan(1, streams=False)
    if isinstance(room, RolloutSizes):
        facts = facts_with(adapter, base, dtype)
        plan = plan_waves(facts, room, max_memory_gb, opened.can_stream)
    elif max_memory_gb is not None:
        facts = facts_with(adapter, base, dtype)
        plan = WavePlan(1, limit_generation(facts, room, max_memory_gb, opened.can_stream))
    if adapter is not None:
        put_adapter(model, adapter)
    return prepare_for_generation(opened, plan.streams), tokenizer, plan.wave


def facts_with(adapter: Adapter | None, base: Path, dtype: mx.Dtype) -> ModelFacts:
    """The facts of the model in `base`, with the arrays of the adapter, which stay in memory, also
    where weights are streamed; those of its layers in float32, whatever their file has."""
    facts = facts_of(base, dtype.size)
    if adapter is None:
        return facts
    held = sum(mx.float32.size * array.size for array in adapter.arrays.values())
    held += sum(array.nbytes for array in adapter.vocabulary.values())
    return replace(facts, rest_bytes=facts.rest_bytes + held)


@dataclass(frozen=True)
class Answerer:
    """A loaded model that answers prompts, with or without the adapter of a run."""

    network: nn.Module
    tokenizer: Any
    context: int | None
    """Maximum tokens of prompt and answer; None if not known."""
    note: str = ""
    """What the user should know about the run."""
    rows_at_once: int = 1
    """How many answers fit together."""

    def fit(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[tuple[list[int], Sampling]]:
        """The tokens of each prompt, and the sampling limited to the context length.

        Raises UserError for a prompt that the model cannot take.
        """
        return [fit(self.tokenizer, prompt, sampling, self.context) for prompt in prompts]

    def respond(self, tokens: list[int], sampling: Sampling) -> Iterator[GenerationResponse]:
        return respond(self.network, self.tokenizer, tokens, sampling)


def open_answerer(run: str, room: int | RolloutSizes, request: GenerateRequest) -> Answerer:
    """Load the model of a run.

    room: longest prompt and answer, in tokens, for the request's max_memory; or all answers, if
    they are generated together. Raises UserError.
    """
    if request.checkpoint is not None and not request.adapter:
        raise UserError("--checkpoint: no adapter is used with --no-adapter; leave one out")
    used, note, files = None, "", None
    if request.adapter:
        trained = open_trained(run, request.checkpoint, request.model)
        config, base, used, note = trained.config, trained.base, trained.adapter, trained.note
        source, files = trained.source, trained.tokenizer_files
    else:
        config, base = find_base_model(run, request.model)
        source = base, config.quantize
    network, tokenizer, together = load(config, source, used, request.max_memory, room, files)
    return Answerer(network, tokenizer, context_tokens(base), note or "", together)


def check_answers(model: nn.Module, tokenizer: Any, base: Path) -> None:
    """Raise UserError if the model can generate tokens that it cannot read.

    Also if its chat template does not terminate: the threads of a server cannot be interrupted.
    """
    most, answers = rows_of(model, EMBEDDINGS), rows_of(model, HEADS)
    if most is not None and answers is not None and answers > most:
        head = counted(answers, "token")
        raise UserError(f"{base}: its head has {head}, but its embedding {most:,}")
    if tokenizer.has_chat_template:
        with contextlib.suppress(TemplateRefused):  # some templates need other messages
            prompt_tokens(tokenizer, [{"role": "user", "content": "Hello"}], str(base))


def context_tokens(base: Path) -> int | None:
    """The context length of a model: tokens of prompt and answer; None if not known.

    The least of those in config.json: one of them is the length of a table of positions, beyond
    which MLX would read other memory.
    """
    config = read_json(base / "config.json", "a model folder has one")
    text = {**config, **(config.get("text_config") or {})}
    found = [text[key] for key in CONTEXT if isinstance(text.get(key), int)]
    return min((length for length in found if length > 0), default=None)


def prompt_tokens(
    tokenizer: Any,
    messages: list[Message],
    where: str = "the conversation",
    tools: list[Any] | None = None,
    is_text: bool = False,
    as_is: bool = False,
) -> list[int]:
    """The tokens of a chat up to the answer, as training has them before the answer.

    is_text: the only message is used as it is if it has tokens of the chat template. as_is: it is
    used as it is. Without a chat template, the messages are joined into one text; each user turn
    begins on a new line.
    Raises UserError if the template refuses the chat.
    """
    template = ChatTemplate(tokenizer, RowLimit(room_bytes=TEMPLATE_BYTES))
    spoken = chat_of_transcript(messages[0]["content"]) if is_text else None
    is_whole = (
        is_text
        and spoken is None
        and tokenizer.has_chat_template
        and template.wrote(messages[0]["content"])
    )
    if tokenizer.has_chat_template and not (is_whole or as_is):
        if spoken is not None:
            messages = spoken.messages[: spoken.first_trained]
        answers = ChatAnswers(template, end_texts(tokenizer), Notes())
        messages = answers.once(Chat(messages, tools), where).messages
        text = template.render(messages, tools, where, answer_next=True)
        opening = messages[:1] if messages[0]["role"] == SYSTEM else []
        if template.left_out(opening, None, text).contents:
            raise UserError(
                f"{where}: the model's chat template omits system prompts; leave it out, or write "
                "it into the question"
            )
        tokens = token_ids(tokenizer, text, where, special=False)
    else:
        text = ""
        for message in messages:
            begins = text and not text.endswith("\n") and message["role"] != "assistant"
            text += ("\n" if begins else "") + message["content"]
        bos = tokenizer.bos_token
        tokens = token_ids(tokenizer, text, where, not (bos and text.startswith(bos)))
    if not tokens:
        raise UserError(f"{where}: has no tokens")
    return tokens


def fit(
    tokenizer: Any, prompt: Prompt, sampling: Sampling, context: int | None
) -> tuple[list[int], Sampling]:
    """The tokens of the prompt, and the sampling limited to the model's context length."""
    tokens = prompt_tokens(
        tokenizer, prompt.messages, prompt.where, prompt.tools, prompt.is_text, prompt.as_is
    )
    if context is None:
        return tokens, sampling
    if len(tokens) >= context:
        raise UserError(
            f"{prompt.where}: has {counted(len(tokens), 'token')}; the model's context is {context}"
        )
    most = min(sampling.max_tokens, context - len(tokens))
    return tokens, replace(sampling, max_tokens=most)


def respond(
    model: nn.Module,
    tokenizer: Any,
    prompt: list[int],
    sampling: Sampling,
    cache: list[Any] | None = None,
) -> Iterator[GenerationResponse]:
    """Generate the answer token by token, as mlx-lm's responses; the last has a finish_reason.

    cache: mlx-lm's KV cache of the tokens before `prompt`. Whenever a token is yielded, the
    cache contains the prompt and every token up to that one.

    The answer is the first sample of its seed, as `samples.sampled` gives it.

    Raises UserError for a token id outside the vocabulary, RunError if memory runs out.
    """
    check_ids(prompt, vocabulary_of(model), tokenizer, "the prompt")
    with memory_explained(), last_position_only(model):
        yield from stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=sampling.max_tokens,
            sampler=first_sample(sampling),
            logits_processors=[in_float32],
            prefill_step_size=PREFILL_TOKENS,
            prompt_cache=cache,
        )


def first_sample(sampling: Sampling) -> Callable[[mx.array], mx.array]:
    """A function that mlx-lm calls for each token in turn: (1, V) logits -> (1,) the token."""
    sampler, keys, positions = sampling.sampler, seed_keys([sampling.seed_of(0)]), count()

    def sample(logits: mx.array) -> mx.array:
        return sampler(logits, keys_at(keys, mx.array([next(positions)], mx.uint32)))

    return sample


def in_float32(tokens: mx.array, logits: mx.array) -> mx.array:
    """The logits, as mlx-lm should normalize them: in bfloat16, that would round them again."""
    return logits.astype(mx.float32)


@contextlib.contextmanager
def memory_explained() -> Iterator[None]:
    """Raise RunError, which says what helps, where memory runs out in the `with` block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_memory_error(error):
            raise
        raise RunError(
            f"out of memory ({first_line(error)}); use a shorter prompt, a smaller --max-tokens, "
            "or set --max-memory"
        ) from error


def answer(model: nn.Module, tokenizer: Any, prompt: str, max_tokens: int) -> str:
    """The whole answer to a rendered prompt, of the most likely tokens."""
    tokens = token_ids(tokenizer, prompt, "the prompt", special=False)
    responses = respond(model, tokenizer, tokens, Sampling(max_tokens=max_tokens))
    return "".join(response.text for response in responses).strip()


def answer_room(
    model: nn.Module, tokenizer: Any, sample: SamplePrompt, max_tokens: int | None = None
) -> tuple[int, int]:
    """Maximum tokens of the answer to a prompt, and of prompt and answer together.

    max_tokens: of the answer; by default twice those of the expected one, and some more.

    Raises UserError if the model has learned positions, and none is left for an answer.
    """
    answer = max_tokens
    if answer is None:
        answer = 2 * len(token_ids(tokenizer, sample.expected, "a row")) + ANSWER_TOKENS
    prompt = len(token_ids(tokenizer, sample.rendered, "a row", False))
    places = learned_positions(model)
    if places is not None:
        if prompt >= places:
            raise UserError(
                f"the prompt {quoted(sample.asked, 80)} has {counted(prompt, 'token')}, but the "
                f"model has {counted(places, 'position embedding')}, and none for an answer; "
                "shorten it, or leave this row out"
            )
        answer = min(answer, places - prompt)
    return answer, answer + prompt
