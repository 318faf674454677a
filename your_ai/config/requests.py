"""Requests of the commands about a run: what they are asked for, declared once.

A command line, a function of `import your_ai` and a tool of `mcp` are made of a request's fields:
of those that `setting` declares. The others are only for Python. This module does not import mlx.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from your_ai.config.names import ALL_LINEAR, DEMO, flag
from your_ai.config.setting import LARGEST, About, Bounds, Tool, check_bounds, known, setting
from your_ai.config.settings import ABOUT, FIELDS, TrainConfig
from your_ai.errors import UserError

RunLike = str | PathLike[str] | None  # a name, a folder or a `your_ai.Run`; None: the newest
Rows = Iterable[dict[str, Any]]
Message = dict[str, Any]

RUN_OF_TOOLS = Tool("Name of the run, as `train` and `runs` return it.")
NEWEST = About(
    "The run: its name in runs/, or its folder; default: the newest.",
    metavar="RUN", argument=True, agents="run",
    tool=RUN_OF_TOOLS,
)  # fmt: skip
LATEST = About("The run; default: the newest.", argument=True, agents="run", tool=RUN_OF_TOOLS)
RUN = About(
    "The run: its name in runs/, or its folder.", metavar="RUN", argument=True, agents="run"
)
CHECKPOINT = About(
    "Use this checkpoint: step-000120, best, or latest; default: the finished adapter.",
    agents="text",
    tool=Tool("step-000120, best or latest; default: the finished adapter."),
)
MODEL = About("Folder of the run's model, if it was moved.")
GIGABYTES = "GB"  # the metavar of a size, which may have a unit
MAX_MEMORY = About(
    "Memory limit of this process, in GB.", metavar=GIGABYTES, tool=ABOUT["max_memory"].tool
)
COLUMNS = About(
    ABOUT["columns"].help.replace(
        "default: guessed from their names", "default: as the run's, or guessed from their names"
    ),
    metavar="NAMES",
)
BATCH_SIZE = Bounds(1)
TOKENS_PER_QUESTION = 160  # of a reply with questions and answers
SYSTEM = About("System prompt; default: that of the training rows, if all have the same.")
MAX_TOKENS = About("Maximum tokens per answer.")
TEMPERATURE = About("Sampling temperature; 0 = greedy.")
TOP_P = About(
    "Nucleus sampling: draw from the most likely tokens with this total probability; 1 = all."
)
SEED = About("Sampling seed; the same seed gives the same answer.")


def ignore(value: object) -> None:
    """Take what nobody asked for."""


Parameters = Callable[[Any], Iterable[inspect.Parameter]]


def expanded(
    function: Callable[..., Any], of_request: Parameters
) -> tuple[dict[str, Any], inspect.Signature]:
    """The requests among a function's parameters, by name, and its signature with their fields.

    of_request: makes the parameters that stand in the place of a request; in that of `**` stand
    those of `TrainConfig`.
    """
    whole = inspect.signature(function, eval_str=True)
    requests: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in whole.parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            parameters += of_request(TrainConfig)
        elif is_dataclass(parameter.annotation):
            requests[parameter.name] = parameter.annotation
            parameters += of_request(parameter.annotation)
        elif parameter.name == "self":
            parameters.append(parameter)
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    return requests, whole.replace(parameters=parameters)


CHUNK_TOKENS = 512  # of a document, at most, that are asked about together


def like(name: str, **about: Any) -> Any:
    """A field that is the setting `name` of a run."""
    return setting(FIELDS[name].default, ABOUT[name].help, **about)


def same(name: str) -> Any:
    """A field that is the setting `name` of a run, with the same bounds."""
    return setting(FIELDS[name].default, ABOUT[name])


@dataclass(frozen=True, kw_only=True)
class SurveyRequest:
    """The rows that `data` shows, and the settings of a run that decide what it sees of them."""

    data: str = setting(MISSING, ABOUT["data"].help, argument=True, metavar="DATA")
    model: str | None = setting(
        None, "Model whose tokenizer and chat template to use; default: llama-8b."
    )
    valid: str = like("valid")
    columns: Sequence[str] = like("columns", metavar="NAMES")
    prompt_template: str = like("prompt_template")
    mask_prompt: bool = like("mask_prompt")
    max_seq_length: int = like("max_seq_length")
    too_long: str = like("too_long")
    objective: str = like("objective")
    draw: int = setting(3, "Number of rows to show.", bounds=Bounds(0, 1000))


@dataclass(frozen=True)
class MakeDataRequest:
    """The documents of which rows are made, the model that writes them, and how."""

    documents: Sequence[str | PathLike[str]] = setting(
        MISSING,
        "Documents, or folders of them: .pdf, .docx, .epub, .html, .md, .txt.",
        argument=True,
        metavar="DOCS",
    )
    _: KW_ONLY
    model: str = setting(
        MISSING,
        "Model that writes and checks: an alias, a folder, a Hugging Face id, or run:NAME.",
        option=("--with",),
        metavar="MODEL",
    )
    out: str | PathLike[str] = setting(
        MISSING, "File of rows to write, .jsonl.", option=("--out", "-o"), metavar="FILE"
    )
    questions: int = setting(3, "Questions about each chunk.", bounds=Bounds(1, 50))
    chunk_tokens: int | None = setting(
        None,
        f"Maximum tokens of the chunks that documents are cut into; default: {CHUNK_TOKENS}, or "
        "what the model's context leaves.",
        bounds=Bounds(16, 1 << 20),
    )
    check: bool = setting(
        True, "Ask the model whether the text supports each answer, and drop those it does not."
    )
    max_tokens: int | None = setting(
        None, "Maximum tokens of a reply; default: 160 for each question.", bounds=Bounds(1)
    )
    temperature: float = setting(0.7, TEMPERATURE)
    top_p: float = setting(0.95, TOP_P)
    seed: int = setting(0, "Sampling seed; the same seed makes the same rows.", bounds=Bounds(0))
    max_memory: float | None = setting(None, MAX_MEMORY)
    force: bool = setting(False, "Overwrite the file when the new one is complete.")
    on_note: Callable[[str], object] = ignore
    """Called with what the user should know, and how far it is."""

    def __post_init__(self) -> None:
        if isinstance(self.documents, str | PathLike):
            object.__setattr__(self, "documents", (self.documents,))
        check_bounds(self)

    @property
    def reply_tokens(self) -> int:
        """Maximum tokens of a reply with all questions of a chunk."""
        return self.max_tokens or TOKENS_PER_QUESTION * self.questions

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the rows, by name."""
        names = "questions", "chunk_tokens", "check", "reply_tokens", "temperature", "top_p", "seed"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class MadeData:
    """The rows that were made, and what was dropped."""

    path: Path
    rows: int
    chunks: int
    documents: int
    dropped: dict[str, int]
    """By reason, the most frequent first."""
    dropped_path: Path
    """The file with what was dropped; not there if nothing was."""


@dataclass(frozen=True)
class EvaluateRequest:
    """The rows on which base and adapter are compared, and how."""

    run: RunLike = field(metadata=known(NEWEST))
    data: str | Path | None = setting(
        None,
        "A file of rows in any form, or a folder with test or valid rows; default: the run's own "
        "data.",
        agents="data",
        tool=Tool("A .jsonl file, or a folder with test or valid rows; default: the run's."),
    )
    _: KW_ONLY
    columns: Sequence[str] = setting((), COLUMNS)
    metric: str | None = setting(
        None,
        "Your own metric, as module:function, called with answer, expected and row; answers are "
        "generated for it.",
        agents="code",
        tool=Tool("Your own metric as module:function, if the server allows code."),
    )
    environment: str | None = setting(
        None,
        "Hold a conversation with this environment for each row: module:Class of yours, or "
        "verifiers:NAME; default: the run's. See docs/environments.md.",
        agents="code",
    )
    tools: Sequence[str] | None = setting(
        None,
        "Hold a conversation with these tools for each row, as for `train`; default: the run's.",
        agents="code",
        metavar="NAMES",
    )
    success_reward: float | None = setting(
        None,
        "The reward from which on a conversation is a success; default: 1.",
        bounds=Bounds(-LARGEST, LARGEST),
    )
    teacher: str | None = setting(
        None,
        "Also compare the predictions with those of this model: an alias, a folder, a Hugging Face "
        "id, or run:RUN; with the same tokens.",
        agents="model",
        tool=Tool("Also compare the predictions with those of this model, or run:RUN."),
    )
    max_memory: float | None = setting(None, MAX_MEMORY)
    batch_size: int | None = setting(
        None, "Rows per batch, if they fit; default: the run's.", bounds=BATCH_SIZE
    )
    resamples: int = setting(
        2000, "Bootstrap resamples for the intervals.", bounds=Bounds(1, 100_000)
    )
    confidence: float = setting(0.95, "Confidence level of the intervals.")
    seed: int = setting(0, "Seed of the bootstrap.", bounds=Bounds(0))
    worst: int = setting(
        3,
        "Number of worst rows to list, with the answers of base and adapter.",
        bounds=Bounds(0),
        tool=Tool("How many of the worst rows to list.", Bounds(0, 100)),
    )
    max_tokens: int | None = setting(
        None,
        "Maximum tokens per answer; default for --metric: twice the expected answer's, plus 128.",
        bounds=Bounds(1),
    )
    checkpoint: str | None = setting(None, CHECKPOINT)
    model: str | None = setting(None, MODEL)
    on_progress: Callable[[Any], object] = ignore
    """Called with the `EvaluationProgress` so far."""
    on_note: Callable[[str], object] = ignore
    """Called with what the user should know."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not 0 < self.confidence < 1:
            raise UserError(f"--confidence {self.confidence:g}: must be above 0 and below 1")


@dataclass(frozen=True)
class ScoreRequest:
    """The rows that a reward model scores."""

    run: RunLike = field(metadata=known(NEWEST))
    rows: str | Path | Rows = setting(
        "-",
        "File with rows in any form that --data takes; - is standard input, with a JSON object "
        "per line.",
        argument=True,
        metavar="FILE",
    )
    _: KW_ONLY
    columns: Sequence[str] = setting((), COLUMNS)
    too_long: str = setting(
        "error",
        "What to do with a row that is longer than the run's --max-seq-length: error or truncate.",
    )
    batch_size: int = setting(8, "Rows per batch, if they fit.", bounds=BATCH_SIZE)
    max_memory: float | None = setting(None, MAX_MEMORY)
    checkpoint: str | None = setting(None, CHECKPOINT)
    model: str | None = setting(None, MODEL)
    on_note: Callable[[str], object] = ignore
    """Called with what the user should know."""

    def __post_init__(self) -> None:
        if self.too_long not in ("error", "truncate"):
            raise UserError(f"--too-long {self.too_long}: must be error or truncate")
        check_bounds(self)
        if self.max_memory is not None and not 0 < self.max_memory < math.inf:
            raise UserError(f"--max-memory {self.max_memory}: must be a number above 0")


@dataclass(frozen=True)
class GenerateRequest:
    """The prompt or conversation to answer, and the settings of the answer."""

    run: RunLike = field(metadata=known(NEWEST))
    prompt: str | Sequence[Message] = ""
    """A prompt, or a conversation of messages with role and content."""
    _: KW_ONLY
    system: str | None = setting(None, SYSTEM)
    adapter: bool = setting(True, "Use the adapter, or only the base model.")
    max_tokens: int = setting(256, MAX_TOKENS)
    temperature: float = setting(0.0, TEMPERATURE)
    top_p: float = setting(1.0, TOP_P)
    seed: int = setting(0, SEED)
    max_memory: float | None = setting(None, MAX_MEMORY)
    checkpoint: str | None = setting(None, CHECKPOINT)
    model: str | None = setting(None, MODEL)


@dataclass(frozen=True)
class ReportRequest:
    """A page about a run."""

    run: RunLike = field(metadata=known(LATEST))
    out: Path | str | None = setting(
        None,
        "File to write; default: report.html in the run's folder.",
        option=("--out", "-o"),
        agents="page",
        tool=Tool("File to write, .html; default: report.html in the run's folder."),
    )


@dataclass(frozen=True)
class ChatRequest:
    """The settings of a conversation."""

    run: RunLike = field(metadata=known(NEWEST))
    _: KW_ONLY
    system: str | None = setting(None, SYSTEM)
    max_tokens: int = setting(512, MAX_TOKENS)
    temperature: float = setting(0.0, TEMPERATURE)
    top_p: float = setting(1.0, TOP_P)
    seed: int = setting(0, SEED)
    tools: Sequence[str] = same("tools")
    max_turns: int = same("max_turns")
    tool_timeout_s: float = same("tool_timeout_s")
    tool_output_characters: int = same("tool_output_characters")
    trust_code: bool = same("trust_code")
    max_memory: float | None = setting(None, MAX_MEMORY)
    checkpoint: str | None = setting(None, CHECKPOINT)
    model: str | None = setting(None, MODEL)

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class ServeRequest:
    """The address at which a run is served, and the settings of its answers."""

    run: str = field(metadata=known(RUN))
    _: KW_ONLY
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines connect.")
    port: int = setting(8080, "Port; 0 = any free one.", bounds=Bounds(0, 65535))
    max_tokens: int = setting(512, "Maximum tokens per answer, if a request does not set it.")
    temperature: float = setting(0.0, TEMPERATURE)
    top_p: float = setting(1.0, TOP_P)
    allowed_origins: Sequence[str] = setting(
        (),
        "Web pages that may use the server, in addition to this machine's own: http://HOST:PORT, "
        "separated by commas, or * for all.",
        metavar="ORIGINS",
    )
    checkpoint: str | None = setting(None, CHECKPOINT)
    model: str | None = setting(None, MODEL)
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "info logs each request; debug also logs its contents."
    )


@dataclass(frozen=True)
class TinkerRequest:
    """A model that training loops of other people use over Tinker's API, and the largest of what
    they may ask for, for which its memory is planned."""

    _: KW_ONLY
    model: str = setting(DEMO, "The base model: an alias, an id of the hub, or a folder.")
    name: str = setting("", "What loops call it, such as Qwen/Qwen3-8B; default: as --model.")
    host: str = setting("127.0.0.1", "Address to listen on; others than this machine need --token.")
    port: int = setting(8000, "Port; 0 = any free one.", bounds=Bounds(0, 65535))
    token: str = setting("", "What clients must send as TINKER_API_KEY; without: anything.")
    max_memory: float | None = setting(None, MAX_MEMORY)
    max_seq_length: int = setting(2048, "Tokens of the longest text.", bounds=Bounds(32, 1 << 20))
    rank: int = setting(32, "The highest rank of LoRA.", bounds=Bounds(1, 512))
    batch_size: int = setting(8, "Texts whose gradients are computed together.", bounds=Bounds(1))
    samples: int = setting(32, "Completions generated together.", bounds=Bounds(1, 4096))
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Data type of the computation; auto is bfloat16 on a GPU, else float32."
    )
    plan: Literal["auto", "fused", "staged", "streamed"] = setting("auto", ABOUT["plan"].help)
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "info logs each request; debug also shows tracebacks."
    )


@dataclass(frozen=True)
class FuseRequest:
    """The run to fuse, and the model to write."""

    run: RunLike = field(metadata=known(NEWEST))
    out: Path | None = setting(
        None, "The folder to write; default: RUN-fused.", argument=True, metavar="OUT"
    )
    _: KW_ONLY
    to: str = setting(
        "auto",
        "Precision of the adapted layers of a quantized base: 4, 5, 6 or 8 bits, same (unchanged), "
        "or auto (8 bits); other layers stay as they are. dequantized: the whole model without "
        "quantization.",
    )
    dtype: str = setting(
        "auto",
        "Data type of weights that are not quantized: float32, bfloat16 or float16; auto is the "
        "base's.",
    )
    checkpoint: str | None = setting(None, CHECKPOINT)
    model: str | None = setting(None, MODEL)
    max_memory: float | None = setting(None, MAX_MEMORY)
    force: bool = setting(False, "Replace an existing model when the new one is complete.")
    measure: bool = setting(True, "Compare the result with base + adapter on rows of the run.")


GGUF_KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k")
DTYPES = {  # of a fused model, by format
    "hf": ("float32", "bfloat16", "float16"),
    "gguf": GGUF_KINDS,
    "ollama": GGUF_KINDS,
    "lmstudio": (*GGUF_KINDS, "mlx"),
}
FIXED = {  # what a format other than gguf writes
    "hf": "fused always",
    "mlx": "the adapter",
    "peft": "the adapter",
    "ollama": "fused, unless you give --adapter-for",
    "lmstudio": "fused always",
}


@dataclass(frozen=True)
class ExportRequest:
    """The run to export, and the tool it is for."""

    run: RunLike = field(metadata=known(NEWEST))
    _: KW_ONLY
    to: Literal["mlx", "peft", "gguf", "hf", "ollama", "lmstudio"] = setting(
        MISSING,
        "mlx or peft: the adapter for mlx-lm or PEFT; gguf: the adapter or the fused model for "
        "llama.cpp; hf: the fused model for transformers; ollama: a folder for ollama create; "
        "lmstudio: the fused model, where LM Studio looks for it.",
    )
    out: Path | None = setting(
        None, "Output path; default: made of RUN and the format, or LM Studio's folder."
    )
    fused: bool = setting(False, "With --to gguf: export the fused model, not the adapter.")
    dtype: str | None = setting(
        None,
        "Data type of a fused model. hf: float32, bfloat16, float16; gguf, ollama, lmstudio: f32, "
        "f16, bf16, q8_0, q4_0, and with llama-quantize q4_k_m, q5_k_m, q6_k; lmstudio: also mlx, "
        "the default on Apple silicon.",
        words=tuple(dict.fromkeys(name for names in DTYPES.values() for name in names)),
    )
    llama_quantize: Path | None = setting(
        None, "llama.cpp's program llama-quantize; default: the one on PATH."
    )
    converter: Literal["auto", "llama.cpp"] = setting(
        "auto",
        "What makes a GGUF file: llama.cpp for its own scripts; auto takes them only for "
        "architectures that your_ai does not write itself.",
    )
    llama_cpp: Path | None = setting(
        None,
        "A checkout of llama.cpp with its scripts convert_*_to_gguf.py; default: those on PATH, or "
        "Homebrew's.",
    )
    adapter_for: str | None = setting(
        None,
        "With --to ollama: write only the adapter, for this model of Ollama (or .gguf file), which "
        "must be the run's base.",
        metavar="NAME",
    )
    force: bool = setting(False, "Replace an existing model or adapter.")
    checkpoint: str | None = setting(None, CHECKPOINT)
    model: str | None = setting(None, MODEL)
    max_memory: float | None = setting(
        None, "Memory limit in GB, when a fused model is exported.", metavar=GIGABYTES
    )

    @property
    def is_fused(self) -> bool:
        """True if a whole model is written, not only the adapter."""
        if self.to == "ollama":
            return self.adapter_for is None
        return self.fused or self.to in ("hf", "lmstudio")

    @property
    def kind(self) -> str | None:
        """The data type in small letters; llama.cpp writes Q4_K_M."""
        return None if self.dtype is None else self.dtype.lower()

    def __post_init__(self) -> None:
        """Raise UserError for options that do not apply to the format."""
        to, dtype = self.to, self.kind
        if self.fused and to != "gguf":
            raise UserError(f"--fused only works with --to gguf; --to {to} is {FIXED[to]}")
        if self.adapter_for is not None and to != "ollama":
            raise UserError(f"--adapter-for only works with --to ollama, not with --to {to}")
        for name in ("dtype", "max_memory", "llama_quantize"):
            if getattr(self, name) is not None and not self.is_fused:
                raise UserError(
                    f"{flag(name)} needs a fused model; --to {to} writes only the adapter"
                )
        if self.llama_quantize is not None and (to == "hf" or dtype in (None, "mlx")):
            raise UserError("--llama-quantize: also give a --dtype that it makes, such as q4_k_m")
        for name, asked in (("converter", self.converter != "auto"), ("llama_cpp", self.llama_cpp)):
            if asked and (to not in ("gguf", "ollama", "lmstudio") or dtype == "mlx"):
                raise UserError(f"{flag(name)}: --to {to} writes no GGUF file here; leave it out")
        if dtype is not None and dtype not in DTYPES[to]:
            raise UserError(f"--dtype {dtype}: --to {to} takes {', '.join(DTYPES[to])}")


@dataclass(frozen=True)
class PushRequest:
    """The files to push to the hub, and the repository."""

    run: str = setting(
        MISSING, "The run, or a folder that fuse or export wrote.", argument=True, metavar="RUN"
    )
    repo: str = setting(MISSING, "The repo on the hub.", argument=True, metavar="ORG/NAME")
    _: KW_ONLY
    public: bool = setting(False, "Make a new repo public; default: private.")
    checkpoint: str | None = setting(None, CHECKPOINT)
    model: str | None = setting(None, MODEL)
    revision: str | None = setting(None, "Branch to push to; created if it does not exist.")
    message: str = setting("", "Commit message.")
    dry_run: bool = setting(False, "Push nothing; write the files to a new folder.")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The step to measure, and what to compare it with."""

    objective: str = setting("sft", "What is learned: sft, dpo, ipo, simpo, orpo or grpo.")
    shape: str | None = setting(
        None,
        "Shape of a model that is made with random weights; large ones take gigabytes on the disk.",
    )
    model: str | None = setting(None, "Model to measure instead of a shape.")
    bits: int = setting(4, "Bits the shape is quantized to: 4 or 8; 0 = not quantized.")
    dtype: str = setting("float32", "float32, bfloat16 or float16.")
    seq_len: int = setting(256, "Sequence length, in tokens.", bounds=Bounds(2))
    batch_size: int = setting(1, "Rows, pairs of rows, or prompts per step.", bounds=Bounds(1))
    rollouts: int = setting(4, "Completions of each prompt, with grpo.", bounds=Bounds(2))
    kl_beta: float = setting(0.1, "Weight of the KL divergence, with grpo.", bounds=Bounds(0.0))
    lora_rank: int = setting(16, "Rank of the adapters.", bounds=Bounds(1))
    lora_layers: str = setting("all", "Number of last blocks to adapt, or all.")
    lora_targets: Sequence[str] = setting(
        (ALL_LINEAR,), "Layers to adapt, as for `train`. [default: all-linear]", metavar="NAMES"
    )
    optimizer_bits: int = setting(32, "Bits of the optimizer's states of our plans, 32 or 8.")
    adapter_dtype: str = setting(
        "float32", "Data type of the adapters of our plans, float32 or bfloat16."
    )
    plan: Sequence[str] = setting(
        ("fused",),
        "Plans of your_ai to measure, separated by commas; auto@1.4: the fastest with an estimated "
        "MLX peak of at most 1.4 GB. [default: fused]",
        metavar="NAMES",
    )
    supervised: float | None = setting(
        None,
        "Fraction of each row's tokens that is trained on, or generated; default: 1, or 0.5 for "
        "pairs, 0.75 for grpo.",
        bounds=Bounds(0.0, 1.0),
    )
    steps: int = setting(4, "Steps in each of two rounds.", bounds=Bounds(2))
    against: Sequence[str] | None = setting(
        None,
        "What to compare with, separated by commas: mlx-lm, mlx-lm-checkpoint, mlx-lm-lora, "
        "mlx-lm-lora-checkpoint; or none; default: the first two, or none for pairs.",
        metavar="NAMES",
    )
    max_memory: float | None = setting(
        None, "Memory limit of each process, in GB.", metavar=GIGABYTES
    )
    processes: int = setting(
        1,
        "Measure how a step scales from one process to this many, without peers.",
        bounds=Bounds(1),
    )
