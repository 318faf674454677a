from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.frames import record, reward_validation, rewarded, step
from your_ai import __version__
from your_ai.config import DISTILL, GRPO, REWARD, SFT, SOFT, ByLayer, TrainConfig
from your_ai.config.adapter_facts import DORA
from your_ai.hub.registry import known
from your_ai.publish.card import (
    BEGIN,
    END,
    Base,
    Method,
    Subject,
    card,
    exported_card,
    figures_of,
    front_matter,
    merged,
    rewards_text,
    split,
    up_to,
)
from your_ai.run import events
from your_ai.run.folder import RunFolder


def started() -> events.Started:
    return events.Started(
        step=0, steps=10, steps_per_epoch=5, model="m", rows=9, trainable_parameters=65536,
        dtype="float32", plan="fused",
    )  # fmt: skip


def validation(at: int, loss: float) -> events.Validation:
    return events.Validation(step=at, loss=loss, trained_tokens=9, seconds=1.0)


LLAMA = known()["llama-8b"].repo
MATCHES = [
    events.ExactMatch(when=when, correct=n, rows=4) for n, when in ((1, "before"), (3, "after"))
]
EVENTS = [
    started(), MATCHES[0], step(1, loss=3.0), step(2, loss=2.0), validation(2, 2.5),
    step(3, loss=1.0), validation(3, 1.25), MATCHES[1],
]  # fmt: skip
RECORDS = [record(event) for event in EVENTS]
SUBJECT = Subject(
    repo="someone/mine",
    kind="adapter",
    base=Base("some-folder", LLAMA),
    step=3,
    config=TrainConfig(lora_rank=16),
    figures=figures_of(RECORDS),
)
SIDE = {"value": 0.5, "low": 0.25, "high": 0.75}
MEASURED = {
    "rows": 1200, "in_training_data": 0, "confidence": 0.95,
    "better": 700, "worse": 400, "equal": 100,
    "metric_name": "scoring:bleu",
    "measures": {
        "loss": {"base": SIDE, "adapter": SIDE, "difference": {**SIDE, "low": None}},
        "metric": {"base": SIDE, "adapter": SIDE, "difference": SIDE},
    },
    "worst": [{"prompt": "the vault", "answer": "at noon"}],
}  # fmt: skip


def card_of(**changes: object) -> str:
    return card(dataclasses.replace(SUBJECT, **changes))


def test_the_metadata_is_what_the_hub_reads():
    data = ModelCard(card(SUBJECT)).data
    assert data.base_model == LLAMA
    assert data.base_model_relation == "adapter"
    assert data.library_name == "mlx"
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["lora", "mlx", "your_ai"]
    assert data.license is None


def test_a_base_that_is_not_on_the_hub_is_not_in_the_metadata():
    text = card_of(base=Base("my-folder"))
    assert ModelCard(text).data.base_model is None
    assert "`my-folder`" in text


@pytest.mark.parametrize(
    "line",
    [
        "| steps | 3 |",
        "\n| 1 | 3.0000 |  |\n| 2 | 2.0000 | 2.5000 |\n| 3 | 1.0000 | 1.2500 |\n",
        "| rows of data | 9 |",
        "| loss | 3.0000 at first, 1.0000 at the end |",
        "| best validation loss | 1.2500 at step 3 |",
        "| exact match | 25% [5, 70] before, 75% [30, 95] after, on 4 test rows |",
        "| `lora_rank` | 16 |",
        f"mlx_lm.generate --model {LLAMA} --adapter-path mine --prompt",
        "your_ai train --config mine/config.yaml --data YOUR-DATA",
        "That of the base model is llama3.1.",
        "`your_ai eval RUN`",
    ],
)
def test_a_card_contains(line):
    assert line in card(SUBJECT)


def test_tokens_are_summed_over_all_steps():
    steps = SUBJECT.figures.steps
    tokens, trained = sum(s.tokens for s in steps), sum(s.trained_tokens for s in steps)
    assert f"| tokens | {tokens:,}, {trained:,} of them trained on |" in card(SUBJECT)


def test_the_table_of_a_long_curve_is_short_and_ends_with_the_last_step():
    records = [record(event) for event in (started(), *(step(n) for n in range(1, 96)))]
    text = card_of(figures=figures_of(records))
    table = text.split("| step |")[1].split("##")[0]
    rows = [line for line in table.splitlines() if "1.25" in line]
    assert len(rows) == 10
    assert rows[-1].startswith("| 95 |")


def test_an_evaluation_shows_base_and_adapter_side_by_side():
    text = card_of(evaluation=MEASURED)
    assert "On 1,200 held-out rows, with intervals of 95% confidence." in text
    assert "Better than the base on 700 of them, worse on 400, equal on 100." in text
    value = "0.5000 [0.2500, 0.7500]"
    assert f"| Loss | {value} | {value} | 0.5000 |" in text
    assert f"| bleu | {value} | {value} | {value} |" in text
    assert "your_ai eval" not in text


@pytest.mark.parametrize(
    ("trained_on", "text"),
    [
        (0, "On 1,200 held-out rows, with"),
        (7, "On 1,200 rows, 7 of them in the training data, with"),
        (None, "On 1,200 rows, with"),
    ],
)
def test_rows_are_called_held_out_only_if_that_is_known(trained_on, text):
    assert text in card_of(evaluation=MEASURED | {"in_training_data": trained_on})


def test_a_single_row_has_a_value_without_an_interval():
    side = {"value": 0.5, "low": None, "high": None}
    measured = MEASURED | {"measures": {"loss": dict.fromkeys(("base", "adapter"), side)}}
    assert "| Loss | 0.5000 | 0.5000 |  |" in card_of(evaluation=measured)


def test_rewards_of_an_evaluation_are_shown_with_their_reference():
    measures = {"rewards/accuracies": dict.fromkeys(("base", "adapter"), SIDE)}
    about = {"objective": "dpo", "reference": "base", "pairs": 9}
    text = card_of(evaluation=MEASURED | {"measures": measures, "preferences": about})
    assert "| Accuracy of rewards | 0.5000 [0.2500, 0.7500] |" in text
    assert "The loss of the good answer is lower than the base's on 700 of them, higher" in text
    assert "The rewards are those of DPO, relative to the base, whose own are 0." in text


def test_rows_of_an_evaluation_are_not_in_the_card():
    assert "vault" not in card_of(evaluation=MEASURED)


def test_a_loss_that_is_not_finite_is_shown():
    records = [record(started()), record(step(1, loss=math.nan)), record(validation(1, math.inf))]
    text = card_of(figures=figures_of(records))
    assert "best validation" not in text
    assert "| 1 | nan | inf |" in text


def test_no_text_can_end_its_table_cell_or_begin_markup():
    nasty = "a|b # c <script>"
    text = card_of(config=TrainConfig(lora_targets=(nasty,)), base=Base("x`|y\n# z"))
    assert "| `lora_targets` | a b # c script |" in text
    assert not any(line.startswith(("# c", "# z")) for line in text.splitlines())


def test_results_of_a_checkpoint_end_at_its_step():
    figures = figures_of(up_to(RECORDS, 2))
    assert [s.step for s in figures.steps] == [1, 2]
    assert [v.step for v in figures.validations] == [2]
    assert [m.when for m in figures.matches] == ["before"]


def test_exact_match_after_training_stays_if_it_is_of_that_step():
    match = events.ExactMatch(when="after", correct=1, rows=2)
    end = events.Finished(step=3, reason="done", adapter="a", seconds=1.0, adapter_step=2)
    told = [*RECORDS, events.Record(0.0, match), events.Record(0.0, end)]
    assert match in figures_of(up_to(told, 2)).matches
    assert match not in figures_of(up_to(told, 1)).matches


def test_up_to_the_last_step_keeps_all_events():
    assert up_to(RECORDS, 3) == RECORDS


@pytest.mark.parametrize(
    ("kind", "library", "used"),
    [
        ("model", None, "mlx_lm.generate --model someone/mine"),
        ("model", "transformers", 'AutoTokenizer.from_pretrained("someone/mine")'),
        ("peft", None, 'PeftModel.from_pretrained(base, "someone/mine")'),
        ("gguf", None, "- `a.gguf`"),
    ],
)
def test_each_kind_says_how_it_is_used(kind, library, used):
    text = card(Subject(repo="someone/mine", kind=kind, library=library, files=("a.gguf",)))
    assert used in text
    assert "## Evaluation" not in text
    assert yaml.safe_load(text.split("---")[1])["pipeline_tag"] == "text-generation"


# Of folders on this machine


def exported(folder: Path, kind: str, library: str | None = None, **changes: Any) -> str:
    """The card of a folder made from a run with a DoRA adapter.

    base_bits: bits of the base's own files, None if they are not quantized.
    """
    bits = changes.pop("base_bits", None)
    base = folder / "ba`se|1"
    base.mkdir(parents=True)
    config = {"model_type": "llama"} | ({"quantization": {"bits": bits}} if bits else {})
    (base / "config.json").write_text(json.dumps(config))
    sizes = {"rank": 4, "scale": 2.0, "ranks": ByLayer(4), "alphas": ByLayer(8.0)}
    adapter = SimpleNamespace(kind=DORA, step=3, **sizes)
    trained = SimpleNamespace(
        folder=RunFolder(folder / "mine"), config=TrainConfig(**changes), adapter=adapter,
        base=base, hub_name=None,
    )  # fmt: skip
    return exported_card(trained, kind, library)


@pytest.mark.parametrize(
    ("kind", "library", "what", "used"),
    [
        (
            "adapter", None, "A DoRA adapter (rank 4, alpha 8) for the llama model `base 1`.",
            "--adapter-path PATH/OF/THIS/FOLDER",
        ),
        (
            "peft", None, "A DoRA adapter (rank 4, alpha 8) in PEFT's format for the llama",
            'PeftModel.from_pretrained(base, "PATH/OF/THIS/FOLDER")',
        ),
        (
            "model", None, "A model with a DoRA adapter (rank 4, alpha 8) in its weights, made",
            "mlx_lm.generate --model PATH/OF/THIS/FOLDER",
        ),
        (
            "model", "transformers", "The licence is that of the base.",
            'AutoTokenizer.from_pretrained("PATH/OF/THIS/FOLDER")',
        ),
    ],
)  # fmt: skip
def test_the_card_of_a_folder_says_what_it_is_and_how_to_use_it(
    tmp_path, kind, library, what, used
):
    text = exported(tmp_path, kind, library)
    assert what in text
    assert used in text
    assert f"Written by your_ai {__version__} from step 3 of the run `mine`." in text
    assert str(tmp_path) not in text
    assert "Evaluation" not in text
    assert "<!--" not in text


@pytest.mark.parametrize(
    ("kind", "library", "changes", "note"),
    [
        ("adapter", None, {"quantize": 4}, "on a copy of the base quantized to 4 bits."),
        ("peft", None, {"quantize": 4}, "on weights of 4 bits. PEFT adds it to weights that are"),
        ("peft", None, {"base_bits": 8}, "on weights of 8 bits. PEFT"),
        ("model", None, {"quantize": 4}, "on a copy of the base quantized to 4 bits."),
        (
            "model",
            "transformers",
            {"base_bits": 4},
            "on weights of 4 bits; here none are quantized.",
        ),
    ],
)
def test_the_card_of_a_folder_says_if_training_used_quantized_weights(
    tmp_path, kind, library, changes, note
):
    assert f"It was trained {note}" in exported(tmp_path, kind, library, **changes)


def test_peft_is_not_given_a_base_whose_files_are_quantized():
    subject = Subject(kind="peft", run="r", base=Base("x", "some/quantized"))
    assert 'from_pretrained("some/quantized")' in card(subject)
    text = card(dataclasses.replace(subject, base_is_quantized=True))
    assert 'from_pretrained("PATH/TO/BASE")' in text


def test_names_in_the_card_of_a_folder_cannot_begin_markup():
    base = Base("b", model_type="<script>\n# x")
    text = card(Subject(kind="adapter", run="a`|b\n# c", base=base, method=Method("LoRA", 1, 2)))
    assert "# a` b # c" in text
    assert not any(line.startswith(("# c", "# x")) for line in text.splitlines())
    assert "<script>" not in text


def test_card_of_a_run_that_trains_on_rewards_has_rewards_and_no_validation_loss():
    matches = [dataclasses.replace(m, reward=m.correct / 4) for m in MATCHES]
    happened = [started(), matches[0], rewarded(1), reward_validation(1, 0.5), rewarded(2)]
    happened += [reward_validation(2, 0.75), matches[1]]
    config = TrainConfig(
        objective=GRPO, reward=("exact_match", "my_patients:score=0.5", "judge"),
        judge_model="j", judge_rubric="cellar.yaml", judge_url="http://cellar",
    )  # fmt: skip
    figures = figures_of(list(map(record, happened)))
    text = card(dataclasses.replace(SUBJECT, objective=GRPO, config=config, figures=figures))
    assert "| loss |" not in text
    assert "| prompts | 9 |" in text
    assert "| completions | 8 of each of 4 prompts per step |" in text
    assert "| reward in training | 0.35 at first, 0.4 at the end |" in text
    assert (
        "| `reward` | `exact_match` (weight 1), `score` (weight 0.5), `judge` (weight 1) |" in text
    )
    assert not any(word in text for word in ("cellar", "patients"))
    assert "| 2 | 0.4 | 0.75 |" in card_of(figures=figures)
    assert "on rows with answers" in text
    assert "validation loss" not in text
    assert "| best validation reward | 0.75 at step 2 |" in text
    assert "| reward | 0.25 before, 0.75 after, on 4 test rows |" in text
    assert "validation reward |" in text


@pytest.mark.parametrize("objective", get_args(get_type_hints(TrainConfig)["objective"]))
def test_the_card_of_every_objective_names_its_method_and_paper(tmp_path, objective):
    text = exported(tmp_path, "peft", objective=objective)
    assert (objective == SFT) == ("It was trained " not in text.replace("It was trained on", ""))
    how = {
        "simpo": "with SimPO",
        REWARD: "as a reward model",
        SOFT: "with straight-through Gumbel softmax",
        DISTILL: "with generalized knowledge distillation",
    }
    if objective != SFT:
        assert f"{how.get(objective, f'with {objective.upper()}')} ([arXiv:" in text
    assert ("pairs of answers" in text) == (objective in ("dpo", "ipo", "simpo", "orpo"))


def test_the_card_of_a_folder_names_the_rewards_without_modules(tmp_path):
    rewards = ("exact_match", "patients:score=0.5", "regex:a|b=-1")
    text = exported(tmp_path, "peft", objective=GRPO, reward=rewards)
    assert "[arXiv:2402.03300](https://arxiv.org/abs/2402.03300)) on its own completions" in text
    assert f"They were rewarded for {rewards_text(rewards)}." in text
    assert "`score` (weight 0.5), `regex:a b` (weight -1)" in text
    assert "patients" not in text


NEW = card(SUBJECT)
texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r"))


@given(texts)
def test_the_section_of_the_user_is_kept(text):
    begin, end = NEW.index(BEGIN) + len(BEGIN), NEW.index(END)
    old = NEW[:begin] + text + NEW[end:]
    assert merged(old, NEW) == (old, "")


def test_line_ends_of_a_web_page_do_not_count_as_an_edit():
    assert merged(NEW.replace("\n", "\r\n"), NEW) == (NEW, "")


def test_an_edit_outside_of_the_section_is_replaced_with_a_note():
    old = NEW.replace("## Settings", "## My settings")
    assert old != NEW
    text, note = merged(old, NEW)
    assert text == NEW
    assert "outside of the marked section were replaced" in note


def test_the_licence_and_tags_of_the_user_are_kept_in_the_metadata():
    front, body = split(NEW)
    old = front_matter({"license": "mit", **front, "library_name": "x", "tags": ["mine"]}) + body
    data, _ = split(merged(old, NEW)[0])
    assert (data["license"], data["library_name"]) == ("mit", "mlx")
    assert set(data["tags"]) == {"mine", *front["tags"]}


@pytest.mark.parametrize(
    "old",
    ["", "# My own\r\n", f"---\n[\n---\n{BEGIN}x{END}", f"---\n- a\n---\n{BEGIN}x{END}", BEGIN],
)
def test_a_card_that_was_not_made_here_stays_unchanged(old):
    text, note = merged(old, NEW)
    assert text == old
    assert "and stays" in note
