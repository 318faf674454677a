"""What is known of an adapter or a model -> its card, the README.md of its repo. Pure.

A card names no file, folder or row of the user's.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from your_ai.config import TrainConfig
from your_ai.dashboard.history import decimal, finite, read
from your_ai.dashboard.view import duration, memory, percent
from your_ai.hub.registry import alias_of, known
from your_ai.publish.user_section import BEGIN, END, front_matter, sealed
from your_ai.run import events

CARD = "README.md"
CardKind = Literal["adapter", "model", "peft", "gguf"]

CURVE_POINTS = 10  # in a table, where no picture can be drawn
SETTINGS = (
    *("lora_rank", "lora_alpha", "lora_layers", "lora_targets", "lora_dropout", "use_dora"),
    *("optimizer", "learning_rate", "lr_schedule", "warmup_steps", "weight_decay"),
    *("max_grad_norm", "batch_size", "grad_accumulation", "max_seq_length", "packing"),
    *("mask_prompt", "dtype", "quantize", "seed"),
)
TITLES = {"loss": "Loss", "perplexity": "Perplexity", "exact_match": "Exact match"}
DONE_IN_STEPS = (events.Step, events.Validation, events.Skipped)
SIDES = ("base", "adapter", "difference")


@dataclass(frozen=True)
class Base:
    """The model that was trained on: its name, and its id on the hub where that is known."""

    name: str
    repo: str | None = None


@dataclass(frozen=True, kw_only=True)
class CardFigures:
    """What is told of a training: its steps up to the adapter's, as they counted.

    steps, validations: in order; rows: of the training data; matches: exact match before and
    after, where it was measured.
    """

    steps: Sequence[events.Step]
    validations: Sequence[events.Validation]
    rows: int | None = None
    parameters: int | None = None
    matches: tuple[events.ExactMatch, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        held = [step.highest_bytes or step.process_bytes for step in self.steps]
        return max((size for size in held if size is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a card is about.

    step, config, figures, evaluation: None where they are not known; library: that reads it,
    where it is not the kind's own; curves: names of the pictures in the repo; evaluation: what
    `your_ai eval` found for this step; files: names of the weights.
    """

    repo: str
    kind: CardKind
    base: Base | None = None
    step: int | None = None
    config: TrainConfig | None = None
    figures: CardFigures | None = None
    library: str | None = None
    curves: Sequence[str] = ()
    evaluation: Mapping[str, Any] | None = None
    files: Sequence[str] = ()


def figures_of(records: Sequence[events.Record]) -> CardFigures:
    """The figures of a training, from its events."""
    past = read(records)
    state = past.state
    matches = tuple(m for m in (state.match_before, state.match_after) if m is not None)
    return CardFigures(
        steps=past.steps,
        validations=past.validations,
        rows=state.started.rows if state.started else None,
        parameters=state.started.trainable_parameters if state.started else None,
        matches=matches,
    )


def up_to(records: Iterable[events.Record], step: int) -> list[events.Record]:
    """The events without what was done, or measured, after `step`."""
    kept, reached = [], 0
    for record in records:
        event = record.event
        if isinstance(event, events.Started | events.Step | events.Validation | events.Skipped):
            reached = event.step
        last_words = isinstance(event, events.ExactMatch) and event.when == "after"
        if reached <= step or not (last_words or isinstance(event, DONE_IN_STEPS)):
            kept.append(record)
    return kept


def card(subject: Subject) -> str:
    """The whole card, with a part for the user that is still to be written."""
    parts = [
        f"# {subject.repo.split('/')[1]}",
        introduction(subject),
        "## How to use it",
        *usage(subject),
        *training(subject),
        *evaluation(subject),
        own_part(subject),
    ]
    body = "\n\n".join(parts) + "\n"
    return front_matter(metadata(subject)) + sealed(body)


def metadata(subject: Subject) -> dict[str, Any]:
    """What the hub reads of a card. The licence is for the user to give."""
    from huggingface_hub import ModelCardData

    library = subject.library or {"peft": "peft", "gguf": None}.get(subject.kind, "mlx")
    relation = {"model": "finetune", "gguf": None}.get(subject.kind, "adapter")
    repo = subject.base.repo if subject.base else None
    data = ModelCardData(
        base_model=repo,
        library_name=library,
        pipeline_tag="text-generation",
        tags=[*(["lora"] if subject.kind != "model" else []), *filter(None, [library]), "your_ai"],
        **({"base_model_relation": relation} if repo and relation else {}),
    )
    return data.to_dict()


def introduction(subject: Subject) -> str:
    what = {
        "adapter": "A LoRA adapter",
        "peft": "A LoRA adapter in PEFT's format",
        "gguf": "GGUF files",
        "model": "A model, a LoRA adapter fused into it",
    }[subject.kind]
    if subject.kind == "adapter" and subject.config is not None and subject.config.use_dora:
        what = "A DoRA adapter"
    base = subject.base
    of = ""
    if base is not None:
        where = (
            f"[{base.repo}](https://huggingface.co/{base.repo})" if base.repo else code(base.name)
        )
        of = f" for {where}" if subject.kind != "model" else f", made of {where}"
    by = "Written by your_ai."
    if subject.config is not None and subject.step is not None:
        by = f"Trained with your_ai through MLX: {subject.step:,} steps."
    return f"{what}{of}. {by}"


def usage(subject: Subject) -> list[str]:
    """How to run it elsewhere, as commands."""
    repo, name = subject.repo, subject.repo.split("/")[1]
    ask = '--prompt "..."'
    if subject.kind == "gguf":
        files = "\n".join(f"- {code(file)}" for file in subject.files)
        fetch = f"hf download {repo} --local-dir {name}"
        return [fenced(fetch), f"For llama.cpp and what is built on it:\n\n{files}"]
    if subject.kind == "model" and subject.library == "transformers":
        load = f"AutoModelForCausalLM.from_pretrained({json.dumps(repo)})"
        take = "from transformers import AutoModelForCausalLM, AutoTokenizer"
        tokenizer = f"AutoTokenizer.from_pretrained({json.dumps(repo)})"
        text = f"{take}\n\ntokenizer = {tokenizer}\nmodel = {load}"
        return [fenced(text, "python")]
    if subject.kind == "model":
        return [fenced(f"mlx_lm.generate --model {repo} {ask}")]
    base = subject.base
    model = "PATH/TO/BASE" if base is None else base.repo or f"PATH/TO/{cell(base.name)}"
    if subject.kind == "peft":
        return [
            fenced(
                "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
                f"base = AutoModelForCausalLM.from_pretrained({json.dumps(model)})\n"
                f"model = PeftModel.from_pretrained(base, {json.dumps(repo)})",
                "python",
            )
        ]
    found = [
        fenced(
            f"hf download {repo} --local-dir {name}\n"
            f"mlx_lm.generate --model {shlex.quote(model)} --adapter-path {name} {ask}"
        )
    ]
    if subject.config is not None:
        again = f"your_ai train --config {name}/config.yaml --data YOUR-DATA"
        found += ["The same training on data of your own, with your_ai:", fenced(again)]
    return found


def training(subject: Subject) -> list[str]:
    """Figures, curves and settings, as far as they are known."""
    parts = []
    if subject.figures is not None and subject.figures.steps:
        parts += ["## Training", table(("", ""), figure_rows(subject.figures))]
        if subject.curves:
            pictures = [f"![{title_of(name)}]({name})" for name in subject.curves]
            parts.append("\n".join(pictures))
        else:
            parts.append(curve_table(subject.figures))
    if subject.config is not None:
        settings = dataclasses.asdict(subject.config)
        told = [(code(name), settings[name]) for name in SETTINGS]
        rows = [(name, shown(value)) for name, value in told if value is not None]
        parts += ["## Settings", table(("setting", "value"), rows)]
        parts.append("`config.yaml` has all of them.")
    return parts


def figure_rows(figures: CardFigures) -> list[tuple[str, str]]:
    steps = figures.steps
    tokens, trained = (sum(getattr(s, n) for s in steps) for n in ("tokens", "trained_tokens"))
    rows = [
        ("steps", f"{steps[-1].step:,}"),
        ("rows of data", f"{figures.rows:,}" if figures.rows is not None else ""),
        ("tokens", f"{tokens:,}, of which {trained:,} were learned"),
        ("trainable parameters", f"{figures.parameters:,}" if figures.parameters else ""),
        ("loss", f"{decimal(steps[0].loss)} at first, {decimal(steps[-1].loss)} at last"),
    ]
    best = min(finite(figures.validations), key=lambda v: v.loss, default=None)
    if best is not None:
        rows.append(("best validation loss", f"{decimal(best.loss)} at step {best.step:,}"))
    if figures.matches:
        shares = " before, ".join(percent(match) for match in figures.matches)
        rows.append(("exact match", f"{shares} after, on {figures.matches[-1].rows:,} test rows"))
    rows.append(("memory at most", memory(figures.peak_bytes) if figures.peak_bytes else ""))
    rows.append(("time in steps", duration(sum(step.seconds for step in steps))))
    return [(name, value) for name, value in rows if value]


def curve_table(figures: CardFigures) -> str:
    """A few steps of the curve, the last among them, with the last validation before each."""
    steps = figures.steps
    every = -(-len(steps) // CURVE_POINTS)
    rows, seen = [], list(figures.validations)
    for step in steps[::-1][::every][::-1]:
        before = [v for v in seen if v.step <= step.step]
        seen = [v for v in seen if v.step > step.step]
        rows.append(
            (f"{step.step:,}", decimal(step.loss), decimal(before[-1].loss) if before else "")
        )
    return table(("step", "loss", "validation loss"), rows)


def evaluation(subject: Subject) -> list[str]:
    """The base against the adapter, where it was measured for this step."""
    if subject.step is None:
        return []
    found = subject.evaluation
    if found is None:
        return [
            "## Evaluation",
            "Not measured yet: `your_ai eval RUN` compares base and adapter on held-out rows, "
            "and the next push tells of it here.",
        ]
    rows = []
    for name, sides in found["measures"].items():
        title = TITLES.get(name, str(found.get("metric_name") or name).rpartition(":")[2])
        rows.append((cell(title), *(interval(sides.get(side)) for side in SIDES)))
    trained_on = found.get("in_training_data")  # None where that is not known
    text = f"On {found['rows']:,} {'held-out rows' if trained_on == 0 else 'rows'}"
    if trained_on:
        text += f", {trained_on:,} of which it was trained on"
    if isinstance(found.get("confidence"), float):
        text += f", with intervals of {100 * found['confidence']:g}% confidence"
    counts = [found.get(name) for name in ("better", "worse", "equal")]
    if all(isinstance(count, int) for count in counts):
        better, worse, equal = counts
        text += (
            f". Better than the base on {better:,} of them, worse on {worse:,}, equal on {equal:,}"
        )
    return ["## Evaluation", f"{text}.", table(("", *SIDES), rows)]


def interval(side: Any) -> str:
    """`0.5 [0.4, 0.6]`, or `0.5` alone of one row; "" where it was not measured."""
    if not isinstance(side, dict):
        return ""
    found = [side.get(name) for name in ("value", "low", "high")]
    value, low, high = (decimal(n) if isinstance(n, int | float) else "" for n in found)
    return f"{value} [{low}, {high}]" if value and low and high else value


def own_part(subject: Subject) -> str:
    """What only the user can say, to be filled in."""
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


def code(text: str) -> str:
    return f"`{cell(text).replace('`', '')}`"


def cell(text: str) -> str:
    """A text that ends no cell and begins no markup."""
    return re.sub(r"[|<>\[\]\s]+", " ", text).strip()


def shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return cell(", ".join(map(str, value)))
    if isinstance(value, bool):
        return "on" if value else "off"
    return cell(str(value))


def title_of(name: str) -> str:
    """`Learning rate` for curves-learning-rate.png."""
    return name.rpartition(".")[0].partition("-")[2].replace("-", " ").capitalize()
