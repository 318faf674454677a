"""Model cards: the README.md of a repository on the hub, and of an exported or fused folder.

A card names no file, folder or row of the user.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from your_ai import __version__
from your_ai.config import ABOUT, DEMO, DISTILL, GENERATING, GRPO, SFT, SOFT, TrainConfig
from your_ai.config import REWARD as REWARD_MODEL
from your_ai.dashboard.history import read_history
from your_ai.dashboard.measures import match_share
from your_ai.dashboard.metric_table import REWARD, is_rewarded, other_values, plain
from your_ai.dashboard.view import duration, validation_name, validation_text
from your_ai.gates.text import counted, loss_text, model_name, shortened, size_text
from your_ai.gates.untrusted import read_json
from your_ai.hub.registry import alias_of, known
from your_ai.rewards.names import RUN, WITH_ARGUMENT, is_function, parse_rewards
from your_ai.run import events

if TYPE_CHECKING:  # it loads MLX
    from your_ai.nets.saved_adapter import Trained


# The section of a card that belongs to the user, between two marks. Pure


BEGIN = "<!-- yours: a push keeps what you write between this mark and the next -->"
END = "<!-- end of yours -->"
YOURS = re.compile(f"{re.escape(BEGIN)}(.*){re.escape(END)}", re.DOTALL)
SEAL = re.compile(r"<!-- made by your_ai ([0-9a-f]{16}); [^\n]*-->")
FRONT = re.compile(r"\A\s*---\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)  # as on the hub


def merged(old: str, new: str) -> tuple[str, str]:
    """The new card with the user's section of the old one, and a note for the user.

    The note is empty if nothing of the user's is lost. A card without such a section is the
    user's own and stays unchanged.
    """
    front, body = split(old.replace("\r\n", "\n"))
    own = YOURS.search(body)
    if own is None or front is None:
        return (
            old,
            "README.md was not made by your_ai and stays; delete it there to get a model card",
        )
    fresh, rest = split(new)
    assert fresh is not None
    tags = [
        *fresh.get("tags", []),
        *(tag for tag in listed(front.get("tags")) if isinstance(tag, str)),
    ]
    data = {**front, **fresh, "tags": list(dict.fromkeys(tags))}
    text = front_matter(data) + YOURS.sub(lambda _: own[0], rest)
    seal = SEAL.search(body)
    if seal is None or seal[1] != checksum(body):
        return text, "edits of README.md outside of the marked section were replaced"
    return text, ""


def split(text: str) -> tuple[dict[str, Any] | None, str]:
    """The front matter of a card and its body; None if the front matter cannot be read."""
    found = FRONT.match(text)
    if found is None:
        return {}, text
    try:
        data = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError, ValueError):
        return None, text
    return (data or {}) if isinstance(data, dict | None) else None, text[found.end() :].lstrip("\n")


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def checksum(body: str) -> str:
    """A checksum of everything outside of the user's section, without spaces at line ends."""
    text = YOURS.sub("", SEAL.sub("", body))
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def front_matter(data: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
    return f"---\n{text}---\n\n"


CARD = "README.md"
CardKind = Literal["adapter", "model", "peft", "gguf"]

PIPELINES = {REWARD_MODEL: "text-classification"}  # of objectives that give no text
HERE = "PATH/OF/THIS/FOLDER"
CURVE_POINTS = 10  # in the table of the loss
SETTINGS = tuple(name for name, about in ABOUT.items() if about.in_card)
TITLES = {
    "rewards/accuracies": "Accuracy of rewards",
    "rewards/auc": "AUC of rewards",
    "rewards/margins": "Margin of rewards",
    "rewards/chosen": "Reward, chosen",
    "rewards/rejected": "Reward, rejected",
    "logps/accuracies": "Accuracy of log-probabilities",
    "logps/mean_accuracies": "Accuracy of log-probabilities per token",
    "logps/chosen": "Log-probability, chosen",
    "logps/rejected": "Log-probability, rejected",
    "scores/error": "Mean error of scores",
    "scores/correlation": "Correlation of scores",
    "scores/mean": "Mean score",
    "loss": "Loss",
    "perplexity": "Perplexity",
    "exact_match": "Exact match",
}
DONE_IN_STEPS = (events.Step, events.Validation, events.Skipped)
SIDES = ("base", "adapter", "difference")


@dataclass(frozen=True)
class Base:
    """The base model."""

    name: str
    repo: str | None = None
    """Repository on the hub, if known."""
    model_type: str | None = None


@dataclass(frozen=True)
class Method:
    """The kind of adapter by which the base is changed, with rank and scale."""

    name: str
    """The title of the kind of adapter."""
    rank: int
    """0 without matrices, if the weights themselves were trained."""
    alpha: float
    """As the run was given it; with rsLoRA the scale is alpha / sqrt(rank)."""
    rslora: bool = False
    by_layer: str = ""
    """Rank and scale in words, of an adapter whose layers differ."""

    @property
    def sizes(self) -> str:
        """Rank and scale in words."""
        if self.by_layer:
            return self.by_layer
        text = f"rank {self.rank}, alpha {self.alpha:g}"
        scale = self.alpha / math.sqrt(self.rank)
        return f"{text}, rsLoRA: scale {scale:g}" if self.rslora else text


@dataclass(frozen=True, kw_only=True)
class CardFigures:
    """Results of a training run up to the step of the adapter."""

    steps: Sequence[events.Step]
    """In order."""
    validations: Sequence[events.Validation]
    """In order."""
    best: events.Validation | None = None
    """The best validation."""
    rows: int | None = None
    """Rows of training data."""
    parameters: int | None = None
    """Trainable parameters."""
    matches: tuple[events.ExactMatch, ...] = ()
    """Exact match before and after training, if measured."""

    @property
    def on_rewards(self) -> bool:
        """True if the run trained on rewards."""
        return any(is_rewarded(step.metrics) for step in self.steps)

    @property
    def peak_bytes(self) -> int | None:
        sizes = [step.highest_bytes or step.process_bytes for step in self.steps]
        return max((size for size in sizes if size is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a card. Whatever is None is not known."""

    kind: CardKind
    repo: str | None = None
    """Repository that is pushed to; None for a folder on this machine."""
    run: str = ""
    """Name of the run, for a folder on this machine."""
    base: Base | None = None
    method: Method | None = None
    objective: str = SFT
    """What training optimized."""
    step: int | None = None
    config: TrainConfig | None = None
    figures: CardFigures | None = None
    library: str | None = None
    """Library that loads the files, if it is not the usual one of the kind."""
    evaluation: Mapping[str, Any] | None = None
    """Results of `your_ai eval` for this step."""
    files: Sequence[str] = ()
    """Names of the files with weights."""
    notes: Sequence[str] = ()
    """Sentences that follow the introduction."""
    base_is_quantized: bool = False
    """The files of the base are quantized, so that PEFT cannot load them."""

    @property
    def name(self) -> str:
        return self.repo.split("/")[1] if self.repo is not None else cell(self.run)


def exported_card(
    trained: Trained, kind: CardKind, library: str | None = None, note: str = ""
) -> str:
    """The card of a folder that was exported or fused from a run.

    note: a sentence about the weights of a fused model, or about the end token of an adapter.
    """
    config = read_json(trained.base / "config.json", "a model folder has one")
    found, copied = config.get("quantization"), trained.config.quantize
    bits = copied or (found.get("bits") if isinstance(found, dict) else None)
    notes = [*origin_notes(trained), *([note] if note else [])]
    if bits and kind == "peft":
        notes.append(
            f"It was trained on weights of {bits} bits. PEFT adds it to weights that are not "
            "quantized, so answers may differ a little."
        )
    elif bits and library == "transformers":
        notes.append(f"It was trained on weights of {bits} bits; here none are quantized.")
    elif copied:
        notes.append(f"It was trained on a copy of the base quantized to {copied} bits.")
    if kind == "model":
        notes.append("The licence is that of the base.")
    return card(
        Subject(
            kind=kind,
            run=trained.folder.name,
            base=dataclasses.replace(base_of(trained), model_type=str(config.get("model_type"))),
            method=method_of(trained),
            objective=objective_of(trained),
            step=trained.adapter.step,
            library=library,
            notes=notes,
            base_is_quantized=copied is None and bits is not None,
        )
    )


def base_of(trained: Trained) -> Base:
    """The base by its repository on the hub if known, else by the name of its folder."""
    found = trained.hub_name
    name = DEMO if trained.config.model == DEMO else trained.base.absolute().name
    return Base(name, found.repo if found is not None else None)


def method_of(trained: Trained) -> Method:
    adapter = trained.adapter
    if adapter.kind.is_whole:
        return Method(adapter.kind.title, 0, 0.0, False)
    rslora = trained.config.use_rslora
    divisor = math.sqrt(adapter.rank) if rslora else adapter.rank
    alpha, text = adapter.scale * divisor, ""
    if adapter.ranks.patterns or adapter.alphas.patterns:
        text = f"rank {shortened(adapter.ranks.text)}, alpha {shortened(adapter.alphas.text)}"
    return Method(adapter.kind.title, adapter.rank, alpha, rslora, text)


def figures_of(records: Sequence[events.Record]) -> CardFigures:
    """The results of a training run, from its events."""
    past = read_history(records)
    state = past.state
    matches = tuple(m for m in (state.match_before, state.match_after) if m is not None)
    return CardFigures(
        steps=past.steps,
        validations=past.validations,
        best=state.best_validation,
        rows=state.started.rows if state.started else None,
        parameters=state.started.trainable_parameters if state.started else None,
        matches=matches,
    )


def up_to(records: Iterable[events.Record], step: int) -> list[events.Record]:
    """The events without steps and measurements after `step`.

    An exact match after training stays if it is of the adapter of `step`.
    """
    kept, reached, match = [], 0, None
    for record in records:
        event = record.event
        if isinstance(event, events.ExactMatch):
            match = record
        elif isinstance(event, events.Finished) and event.adapter_step == step and match:
            kept += [match] * (match not in kept)
        if isinstance(event, events.Started | events.Step | events.Validation | events.Skipped):
            reached = event.step
        last_words = isinstance(event, events.ExactMatch) and event.when == "after"
        if reached <= step or not (last_words or isinstance(event, DONE_IN_STEPS)):
            kept.append(record)
    return kept


def card(subject: Subject) -> str:
    """The whole card. One that is pushed has a section for the user to write."""
    parts = [
        f"# {subject.name}",
        introduction(subject),
        "## How to use it",
        *usage(subject),
        *training(subject),
    ]
    if subject.repo is not None:
        parts += [*evaluation(subject), user_section(subject)]
    body = "\n\n".join(parts) + "\n"
    if subject.repo is not None:
        kept = "a push replaces everything outside of your section"
        body = f"<!-- made by your_ai {checksum(body)}; {kept} -->\n\n{body}"
    return front_matter(metadata(subject)) + body


def metadata(subject: Subject) -> dict[str, Any]:
    """The metadata that the hub reads. The user has to add the licence."""
    from huggingface_hub import ModelCardData

    library = subject.library or {"peft": "peft", "gguf": None}.get(subject.kind, "mlx")
    relation = {"model": "finetune", "gguf": None}.get(subject.kind, "adapter")
    repo = subject.base.repo if subject.base else None
    more: dict[str, Any] = {"base_model_relation": relation} if repo and relation else {}
    data: dict[str, Any] = ModelCardData(
        base_model=repo,
        library_name=library,
        pipeline_tag=PIPELINES.get(subject.objective, "text-generation"),
        tags=[
            *(["lora"] if subject.kind != "model" else []),
            *([subject.objective] if subject.objective != SFT else []),
            *filter(None, [library]),
            "your_ai",
        ],
        **more,
    ).to_dict()
    return data


def introduction(subject: Subject) -> str:
    method, base = subject.method, subject.base
    adapter = f"A {method.name if method else 'LoRA'} adapter"
    sizes = f" ({method.sizes})" if method and method.rank else ""
    what = {
        "adapter": f"{adapter}{sizes}",
        "peft": f"{adapter}{sizes} in PEFT's format",
        "gguf": "GGUF files",
        "model": f"A model with a{adapter[1:]}{sizes} in its weights"
        if method is None or method.rank
        else "A model whose own weights were trained",
    }[subject.kind]
    of = ""
    if base is not None:
        of = f"{', made from' if subject.kind == 'model' else ' for'} {linked(base)}"
    by = "Written by your_ai."
    if subject.repo is None:
        step = f"step {subject.step:,} of " if subject.step is not None else ""
        by = f"Written by your_ai {__version__} from {step}the run {code(subject.run)}."
    elif subject.config is not None and subject.step is not None:
        by = f"Trained with your_ai through MLX: {counted(subject.step, 'step')}."
    return " ".join([f"{what}{of}.", by, *subject.notes])


def linked(base: Base) -> str:
    if base.repo:
        return f"[{base.repo}](https://huggingface.co/{base.repo})"
    kind = f"the {cell(base.model_type)} model " if base.model_type else ""
    return f"{kind}{code(base.name)}"


def usage(subject: Subject) -> list[str]:
    """Commands or code that use the files."""
    repo, base = subject.repo, subject.base
    place, folder = (repo, subject.name) if repo else (HERE, HERE)
    fetch = [f"hf download {repo} --local-dir {folder}"] if repo else []
    ask = '--prompt "..."'
    if subject.kind == "gguf":
        files = "\n".join(f"- {code(file)}" for file in subject.files)
        return [fenced("\n".join(fetch)), f"For llama.cpp and what is built on it:\n\n{files}"]
    scores = subject.objective == REWARD_MODEL
    kind = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    if subject.kind == "model" and subject.library == "transformers":
        load = f"{kind}.from_pretrained({json.dumps(place)})"
        take = f"from transformers import {kind}, AutoTokenizer"
        tokenizer = f"AutoTokenizer.from_pretrained({json.dumps(place)})"
        return [fenced(f"{take}\n\ntokenizer = {tokenizer}\nmodel = {load}", "python")]
    if subject.kind == "model":
        return [fenced(f"mlx_lm.generate --model {place} {ask}")]
    model = "PATH/TO/BASE" if base is None else base.repo or f"PATH/TO/{cell(base.name)}"
    if subject.kind == "peft":
        model = "PATH/TO/BASE" if subject.base_is_quantized else model
        return [
            fenced(
                f"from peft import PeftModel\nfrom transformers import {kind}\n\n"
                f"base = {kind}.from_pretrained({json.dumps(model)}{', num_labels=1' * scores})\n"
                f"model = PeftModel.from_pretrained(base, {json.dumps(place)})",
                "python",
            )
        ]
    ask = f"mlx_lm.generate --model {shlex.quote(model)} --adapter-path {folder} {ask}"
    if scores:
        found = ["Its score head is in score_head.safetensors. With your_ai, in a run's folder:"]
        found.append(fenced("\n".join([*fetch, "your_ai score RUN rows.jsonl"])))
    else:
        found = [fenced("\n".join([*fetch, ask]))]
    if subject.config is not None:
        again = f"your_ai train --config {folder}/config.yaml --data YOUR-DATA"
        found += ["The same training on your own data, with your_ai:", fenced(again)]
    return found


def training(subject: Subject) -> list[str]:
    """Results and settings, as far as they are known."""
    parts = []
    if subject.figures is not None and subject.figures.steps:
        rows = figure_rows(subject.figures, subject.config)
        parts += ["## Training", table(("", ""), rows)]
        parts.append(curve_table(subject.figures))
    if subject.config is not None:
        settings = dataclasses.asdict(subject.config)
        names = (name for name in SETTINGS if subject.config.uses(name))
        chosen = [(name, settings[name]) for name in names if settings[name] not in (None, "")]
        texts = {"reward": rewards_text} if subject.config.reward else {}
        rows = [(code(name), texts.get(name, shown)(value)) for name, value in chosen]
        parts += ["## Settings", table(("setting", "value"), rows)]
        parts.append("`config.yaml` has all of them.")
    return parts


def figure_rows(figures: CardFigures, config: TrainConfig | None) -> list[tuple[str, str]]:
    """Names and values of the results. config: the settings of the run, if it trained."""
    steps, on_rewards = figures.steps, figures.on_rewards
    tokens, trained = (sum(getattr(s, n) for s in steps) for n in ("tokens", "trained_tokens"))
    rows = [
        ("steps", f"{steps[-1].step:,}"),
        (
            "prompts" if on_rewards else "rows of data",
            f"{figures.rows:,}" if figures.rows is not None else "",
        ),
        ("completions", completions_text(config) if on_rewards and config is not None else ""),
        ("tokens", f"{tokens:,}, {trained:,} of them trained on"),
        ("trainable parameters", f"{figures.parameters:,}" if figures.parameters else ""),
        progress_row(steps),
    ]
    if (best := figures.best) is not None:
        text = f"{validation_text(best, best.loss)} at step {best.step:,}"
        rows.append((f"best {validation_name(best)}", text))
        for name, value in other_values(best).items() if best.best else ():
            rows.append(
                (f"best {cell(without_module(name))}", f"{value:.4g} at step {best.step:,}")
            )
    if figures.matches:
        shares = " before, ".join(match_share(match) for match in figures.matches)
        tested = counted(figures.matches[-1].rows, "test row")
        rows.append(("exact match", f"{shares} after, on {tested}"))
        rewards = [plain(m.reward) for m in figures.matches if m.reward is not None]
        if rewards:
            rows.append(("reward", f"{' before, '.join(rewards)} after, on {tested}"))
    rows.append(("peak memory", size_text(figures.peak_bytes) if figures.peak_bytes else ""))
    rows.append(("training time", duration(sum(step.seconds for step in steps))))
    return [(name, value) for name, value in rows if value]


def progress_row(steps: Sequence[events.Step]) -> tuple[str, str]:
    """The loss of the first and the last step, or their mean rewards."""
    rewards = [step.metrics[REWARD] for step in steps if REWARD in step.metrics]
    if rewards:
        return (
            "reward in training",
            f"{plain(rewards[0])} at first, {plain(rewards[-1])} at the end",
        )
    first, last = (loss_text(step.loss) for step in (steps[0], steps[-1]))
    return "loss", "" if is_rewarded(steps[-1].metrics) else f"{first} at first, {last} at the end"


def completions_text(config: TrainConfig) -> str:
    prompts = counted(config.prompts_per_step, "prompt")
    same = config.updates_per_batch
    reused = f", trained in {same} steps each" if same > 1 else ""
    return f"{config.rollouts} of each of {prompts} per step{reused}"


def curve_table(figures: CardFigures) -> str:
    """A few steps of the curve and the last one, each with the validation before it."""
    steps = figures.steps
    every = -(-len(steps) // CURVE_POINTS)
    rows, seen = [], list(figures.validations)
    for step in steps[::-1][::every][::-1]:
        before = [v for v in seen if v.step <= step.step]
        seen = [v for v in seen if v.step > step.step]
        validated = validation_text(before[-1], before[-1].loss) if before else ""
        reward = step.metrics.get(REWARD)
        value = loss_text(step.loss) if not figures.on_rewards else ""
        rows.append((f"{step.step:,}", value if reward is None else plain(reward), validated))
    name = validation_name(figures.validations[-1]) if figures.validations else "validation loss"
    return table(("step", "reward" if figures.on_rewards else "loss", name), rows)


def evaluation(subject: Subject) -> list[str]:
    """The base compared with the adapter, if it was measured for this step."""
    if subject.step is None:
        return []
    found = subject.evaluation
    if found is None:
        on_prompts = subject.objective in GENERATING
        command = "your_ai eval RUN --data FILE" if on_prompts else "your_ai eval RUN"
        what = "rows with answers" if on_prompts else "held-out rows"
        return [
            "## Evaluation",
            f"Not measured yet: `{command}` compares base and adapter on {what}, "
            "and the next push adds the result here.",
        ]
    rows = []
    for name, sides in found["measures"].items():
        title = TITLES.get(name, str(found.get("metric_name") or name).rpartition(":")[2])
        rows.append((cell(title), *(interval(sides.get(side)) for side in SIDES)))
    trained_on = found.get("in_training_data")  # None if not known
    text = f"On {found['rows']:,} {'held-out rows' if trained_on == 0 else 'rows'}"
    if trained_on:
        text += f", {trained_on:,} of them in the training data"
    if isinstance(found.get("confidence"), float):
        text += f", with intervals of {100 * found['confidence']:g}% confidence"
    counts = [found.get(name) for name in ("better", "worse", "equal")]
    if all(isinstance(count, int) for count in counts):
        better, worse, equal = counts
        text += (
            f". The loss of the good answer is lower than the base's on {better:,} of them, higher "
            f"on {worse:,}, equal on {equal:,}"
            if isinstance(found.get("preferences"), dict)
            else f". Better than the base on {better:,} of them, worse on {worse:,}, equal on "
            f"{equal:,}"
        )
    return ["## Evaluation", f"{text}.{about_rewards(found)}", table(("", *SIDES), rows)]


def about_rewards(found: Mapping[str, Any]) -> str:
    """A sentence about what the rewards of an evaluation compare; "" if there are none."""
    about = found.get("preferences")
    if not isinstance(about, dict) or about.get("objective") == "":
        return ""
    references = {
        "base": "relative to the base, whose own are 0",
        "start": "relative to the adapter that the training started from",
    }
    reference = references.get(str(about.get("reference")), "without a reference")
    objective = str(about.get("objective"))
    name = OBJECTIVE_NAMES.get(objective, cell(objective).upper())
    return f" The rewards are those of {name}, {reference}."


def interval(side: Any) -> str:
    """`0.5 [0.4, 0.6]`, or `0.5` for a single row; "" if it was not measured."""
    if not isinstance(side, dict):
        return ""
    found = [side.get(name) for name in ("value", "low", "high")]
    value, low, high = (loss_text(n) if isinstance(n, int | float) else "" for n in found)
    return f"{value} [{low}, {high}]" if value and low and high else value


def user_section(subject: Subject) -> str:
    """The section that the user fills in."""
    alias = alias_of(subject.base.repo) if subject.base and subject.base.repo else None
    of_base = f" That of the base model is {known()[alias].licence}." if alias else ""
    return "\n\n".join(
        (
            BEGIN,
            "## Data",
            "Describe your data here: where it comes from, who may use it, what it is good for.",
            "## Licence and limits",
            f"Name your licence here, and as `license:` at the top of this file.{of_base}",
            END,
        )
    )


# Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(text: str, language: str = "bash") -> str:
    return f"```{language}\n{text}\n```"


def shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return cell(", ".join(map(str, value)))
    if isinstance(value, bool):
        return "on" if value else "off"
    return cell(str(value))


# Sentences about the training


# The paper of each objective but supervised fine-tuning, at arXiv.
PAPERS = {
    "dpo": "2305.18290",
    "ipo": "2310.12036",
    "simpo": "2405.14734",
    "orpo": "2403.07691",
    "kto": "2402.01306",
    GRPO: "2402.03300",
    REWARD_MODEL: "2203.02155",
    SOFT: "1611.01144",
    DISTILL: "2306.13649",
}
ROWS = {  # what the rows of the data are, by their kind
    "answers": "answers",
    "pairs": "pairs of answers",
    "labels": "answers labeled as good or bad",
    "prompts": "its own completions of prompts",
    "tasks": "its own conversations with an environment",
    "rated": "answers that were compared or scored",
}
OBJECTIVE_NAMES = {
    "simpo": "SimPO",
    REWARD_MODEL: "as a reward model",
    SOFT: "straight-through Gumbel softmax",
    DISTILL: "generalized knowledge distillation",
}


def objective_of(trained: Trained) -> str:
    """The objective of the run; that of supervised fine-tuning for one that trained nothing."""
    return SFT if trained.folder.untrained else trained.config.objective


def origin_notes(trained: Trained) -> list[str]:
    """Sentences about how the adapter was made, beyond supervised fine-tuning of the base."""
    if trained.folder.untrained == "merged":
        return ["It was merged from other adapters."]
    notes, objective = [], objective_of(trained)
    if objective != SFT:
        rows = ROWS[trained.config.row_kind]
        name = OBJECTIVE_NAMES.get(objective, objective.upper())
        paper = PAPERS[objective]
        link = f"[arXiv:{paper}](https://arxiv.org/abs/{paper})"
        how = name if objective == REWARD_MODEL else f"with {name}"
        notes.append(f"It was trained {how} ({link}) on {rows}.")
    if objective == SOFT:
        notes.append(
            f"They were scored by the reward model {code(named_run(trained.config.reward_model))}."
        )
    if objective == DISTILL:
        asked = trained.config.teacher
        teacher = code(named_run(asked) if asked.startswith("run:") else model_name(asked))
        teacher = teacher if asked else "the base with a prompt that it does not see"
        notes.append(f"Its teacher was {teacher}.")
    if objective == GRPO and trained.config.reward:
        notes.append(f"They were rewarded for {rewards_text(trained.config.reward)}.")
    if trained.config.from_adapter:
        notes.append("Its training began from another adapter.")
    return notes


def end_note(token: str) -> str:
    """A sentence about the end token that training added to those of the base; empty if none."""
    if not token:
        return ""
    text = "".join(token.replace("`", "").split())  # code keeps its brackets, as `code` does not
    return (
        f"Answers end with `{text}`, which is no end token of the base: generate with "
        "`--extra-eos-token` in mlx-lm, or with `eos_token_id` in transformers."
    )


def named_run(reward: str) -> str:
    """A reward `run:PATH` as `run:NAME`, without the folders of this machine; others stay."""
    kind, colon, path = reward.partition(":")
    return f"{kind}:{Path(path).name}" if colon and kind.strip() == RUN else reward


def rewards_text(texts: Sequence[str]) -> str:
    """Rewards with their weights. Of a function, only its own name."""
    found = []
    for each in parse_rewards(texts):
        found.append(f"{code(without_module(named_run(each.name)))} (weight {each.weight:g})")
    return ", ".join(found)


def without_module(name: str) -> str:
    """The name of a reward or a metric; of a function, without the user's module."""
    own = name.partition(":")[0] not in WITH_ARGUMENT and is_function(name)
    return name.rpartition(":")[2] if own else name


def code(text: str) -> str:
    return f"`{cell(text).replace('`', '')}`"


def cell(text: str) -> str:
    """A text that cannot end a table cell or begin markup."""
    return re.sub(r"[|<>\[\]\s]+", " ", text).strip()
