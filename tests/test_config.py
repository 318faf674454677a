from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.config import (
    ABOUT,
    FIELDS,
    OBJECTIVES_WITH,
    TrainConfig,
    build,
    flag,
    resolve,
    resumed,
    to_yaml,
)
from your_ai.errors import UserError
from your_ai.files import packaged
from your_ai.gates.yaml_files import read_yaml


def test_flags_override_the_file_and_the_file_overrides_defaults(own_folder):
    (own_folder / "c.yaml").write_text("data: d\nbatch_size: 3\nlora_rank: 5\n")
    config = resolve({"lora_rank": "7"}, "c.yaml")
    assert (config.data, config.batch_size, config.lora_rank) == ("d", 3, 7)
    assert config.lora_alpha == FIELDS["lora_alpha"].default


def test_no_flags_give_the_demo():
    assert resolve({}, None).model == "demo"
    assert resolve({"max_steps": "3"}, None).max_steps == 3


def test_model_demo_gives_the_demo():
    assert resolve({"model": "demo"}, None) == resolve({}, None)
    assert resolve({"model": "demo", "data": "d"}, None).exact_match is False


@pytest.mark.parametrize("objective", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_an_objective_alone_gives_the_demo_with_rows_for_it(objective):
    config = resolve({"objective": objective}, None)
    data = "demo-labels" if objective == "kto" else "demo-pairs"
    assert (config.model, config.data, config.objective) == ("demo", data, objective)


def test_data_without_a_model_gives_the_default_model():
    assert resolve({"data": "d"}, None).model == "llama-8b"


def test_config_survives_a_yaml_round_trip():
    config = TrainConfig(data="d", lora_layers="all", lora_targets=("a", "b"), quantize=4)
    assert build(read_text(to_yaml(config)), "x") == config


def read_text(text: str) -> dict:
    import yaml

    return yaml.safe_load(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"batch_size": "abc"}, "--batch-size: expected a whole number or auto, found 'abc'"),
        ({"batch_size": "1.5"}, "--batch-size: expected a whole number"),
        ({"batch_size": "0"}, "--batch-size 0: must be at least 1"),
        ({"learning_rate": "-1"}, "--learning-rate -1.0: must be above 0"),
        ({"beta": "0.2"}, "--beta: --objective sft does not use it; it is for dpo, ipo, simpo"),
        ({"objective": "dpo", "beta": "0"}, "--beta 0.0: must be at least 1e-06"),
        ({"objective": "ipo", "label_smoothing": "0.1"}, "--label-smoothing: --objective ipo"),
        ({"objective": "dpo", "label_smoothing": "0.5"}, "at least 0 and under 0.5"),
        ({"objective": "orpo", "reference": "none"}, "--reference: --objective orpo"),
        ({"objective": "dpo", "too_long": "split"}, "--too-long split: --objective dpo"),
        ({"objective": "dpo", "lora_dropout": "0.1"}, "--lora-dropout: not supported"),
        ({"objective": "kto", "neftune_alpha": "5"}, "--neftune-alpha: not supported"),
        ({"objective": "dpo", "exact_match": True}, "--exact-match: not supported"),
        ({"objective": "kto", "reference": "none"}, "--reference: --objective kto"),
        ({"objective": "ipo", "beta": "1e-300"}, "--beta 1e-300: must be at least 1e-06"),
        ({"objective": "dpo", "mask_prompt": False}, "--no-mask-prompt: not supported"),
        (
            {"objective": "kto", "kto_desirable_weight": "0", "kto_undesirable_weight": "0"},
            "one must be above 0",
        ),
        ({"objective": "dpo", "kto_desirable_weight": "2"}, "--kto-desirable-weight: --objective"),
        ({"best_metric": "accuracy"}, "--best-metric accuracy: --objective sft compares no"),
        (
            {"objective": "dpo", "best_metric": "exact_match"},
            "--best-metric 'exact_match': not supported with --objective dpo; use loss, accuracy",
        ),
        ({"best_metric": "margins"}, "must be loss, .*; did you mean margin?"),
        ({"learning_rate": "nan"}, "--learning-rate nan"),
        ({"learning_rate": "inf"}, "--learning-rate inf"),
        ({"lora_layers": "0"}, "--lora-layers 0: must be at least 1, or all"),
        ({"lora_layers": "some"}, "expected a whole number or all or auto, found 'some'"),
        ({"lora_dropout": "1"}, "--lora-dropout 1.0: must be at least 0 and under 1"),
        ({"lora_targets": ","}, "--lora-targets: is empty"),
        ({"optimizer": "adamx"}, "--optimizer: expected adamw or adam"),
        ({"optimizer": "adammw"}, r"did you mean adamw\?$"),
        ({"objective": "dppo"}, r"did you mean dpo\?$"),
        ({"too_long": "eror"}, r"did you mean error\?$"),
        ({"optimizer": "adam", "weight_decay": "0.1"}, "--weight-decay: --optimizer adam does not"),
        ({"adapter_dtype": "float16"}, "--adapter-dtype: expected float32 or bfloat16"),
        ({"optimizer_bits": "7"}, "--optimizer-bits: expected 32 or 8, found '7'"),
        ({"optimizer_bits": "8", "optimizer": "sgd"}, "--optimizer-bits 8: --optimizer sgd keeps"),
        ({"quantize": "3"}, "--quantize: expected 4 or 8, found '3'"),
        ({"max_seq_length": "1"}, "--max-seq-length 1: must be at least 2"),
        ({"keep": "0"}, "--keep 0: must be at least 1"),
        ({"max_grad_norm": "nan"}, "--max-grad-norm nan"),
        ({"lr_end": "-1", "lr_schedule": "linear"}, "--lr-end -1.0: must be at least 0"),
        ({"lr_end": "1e-7"}, "--lr-end: --lr-schedule constant does not use it; choose linear or"),
        ({"lr_decay_steps": "9"}, "--lr-decay-steps: --lr-schedule constant does not use it"),
        (
            {"lr_decay_steps": "0", "lr_schedule": "linear"},
            "--lr-decay-steps 0: must be at least 1",
        ),
        ({"lr_decay_rate": "2"}, "--lr-decay-rate 2.0: must be above 0 and at most 1"),
        (
            {"warmup_init": "1e-7", "warmup_steps": "0"},
            "--warmup-init: there is no warm-up; give --warmup-steps",
        ),
        ({"adam_beta1": "1"}, "--adam-beta1 1.0: must be at least 0 and under 1"),
        ({"adam_epsilon": "0"}, "--adam-epsilon 0.0: must be above 0"),
        ({"adam_beta2": "0.9", "optimizer": "sgd"}, "--adam-beta2: --optimizer sgd does not use"),
        ({"loraplus_ratio": "nan"}, "--loraplus-ratio nan"),
        ({"neftune_alpha": "inf"}, "--neftune-alpha inf: must be at most"),
        ({"neftune_alpha": "5", "prefix_cache": "disk"}, "--neftune-alpha: the noise changes"),
        ({"layerwise_lr_decay": "0"}, "--layerwise-lr-decay 0.0: must be above 0 and at most 1"),
        ({"layerwise_lr_decay": "1.5"}, "--layerwise-lr-decay 1.5: must be above 0 and at most 1"),
        ({"layerwise_lr_decay": "nan"}, "--layerwise-lr-decay nan"),
    ],
)
def test_invalid_values_are_named(flags, message):
    with pytest.raises(UserError, match=message):
        resolve({"data": "d", **flags}, None)


def test_texts_that_look_like_numbers_are_quoted():
    """mlx_lm.lora makes PyYAML read 1e5 as a number, for the whole process."""
    text = to_yaml(TrainConfig(run="1e5", columns=("0E0",)))
    assert '"1e5"' in text
    assert '"0E0"' in text


WHOLE = st.integers() | st.integers(-(10**60), 10**60)
ANY = (
    st.none() | st.booleans() | WHOLE | st.floats() | st.text(max_size=20)
    | st.sampled_from(["9" * 5000, "a" * 5000, 10**5000, "1e999", "\0", "\x1b[31m", "٣", [], {}])
    | st.lists(st.text(max_size=5) | st.integers(), max_size=3)
)  # fmt: skip


@given(name=st.sampled_from(sorted(FIELDS)), value=ANY)
def test_any_value_is_within_its_bounds_or_refused(name, value):
    try:
        config = build({name: value}, "c.yaml")
    except UserError as error:
        message = str(error)
        assert len(message) < 500 and "\n" not in message  # noqa: PT018
        assert name in message or flag(name) in message
        return
    kept = getattr(config, name)
    if isinstance(kept, float) or (isinstance(kept, int) and name != "seed"):
        assert 0 <= kept < 1 << 33
    assert build(read_text(to_yaml(config)), "x") == config


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 2e-4), ({"objective": "sft"}, 2e-4), ({"objective": "kto"}, 2e-5),
        ({"objective": "dpo", "learning_rate": "1e-3"}, 1e-3),
    ],
)  # fmt: skip
def test_the_default_learning_rate_is_that_of_the_objective(settings, rate):
    assert resolve({"data": "d", **settings}, None).learning_rate == rate


def test_number_with_thousands_of_digits_is_not_a_text():
    with pytest.raises(UserError, match=r"^c\.yaml: push_to: expected a text"):
        build({"push_to": 10**5000}, "c.yaml")


BOUNDS = {name: about.bounds for name, about in ABOUT.items() if about.bounds is not None}
# Those that no other setting must agree with.
CLOSED = [n for n, b in BOUNDS.items() if isinstance(b.least, int) and not (b.above or b.under)]
TOGETHER = ("lr_end", "lr_decay_steps", "warmup_init", "beta", "answers_from_teacher")
ALONE = [n for n in CLOSED if n not in TOGETHER]

# Settings without which they have no meaning.
NEEDED = {
    "blocks_per_period": {"adapter": "full"},
    "period": {"adapter": "full", "blocks_per_period": 1},
    "embedding_learning_rate": {"train": "head"},
    "max_turns": {"tools": "t"},
    "tool_output_characters": {"tools": "t"},
    "discount": {"tools": "t", "credit": "turn"},
}


@pytest.mark.parametrize("name", ALONE)
def test_number_outside_its_bounds_is_refused(name):
    least, most, *_ = BOUNDS[name]
    users = {"objective": OBJECTIVES_WITH.get(name, ("sft",))[0], **NEEDED.get(name, {})}
    assert getattr(build({**users, name: str(most)}, "x"), name) == most
    assert getattr(build({**users, name: least}, "x"), name) == least
    for value in (most + 1, 10**12 * (most + 1), 10**5000):
        with pytest.raises(UserError, match=rf"^{flag(name)} .*: must be at most {most:,}"):
            build({**users, name: value}, "x")
    with pytest.raises(UserError, match=rf"^{flag(name)} .*: must be at least {least}"):
        build({**users, name: least - 1}, "x")


def test_large_int_is_kept_exactly():
    assert build({"seed": 2**63 + 1}, "x").seed == 2**63 + 1
    assert build({"seed": str(2**63 + 1)}, "x").seed == 2**63 + 1


def test_max_row_bytes_may_change_on_resume():
    assert resumed(TrainConfig(data="d"), {"max_row_bytes": "9"}).max_row_bytes == 9
    assert "max_row_bytes" not in TrainConfig().fixed_on_resume()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize: 3", "c.yaml: unknown key batchsize; did you mean batch_size?"),
        ("learning-rate: 3", "unknown key learning-rate; did you mean learning_rate?"),
        ("batch_size: many", "c.yaml: batch_size: expected a whole number or auto, found 'many'"),
        ("use_dora: 1", "use_dora: expected true or false, found 1"),
        ("- 1", "expected `key: value` lines"),
        ("a: [", "c.yaml:1: is not valid YAML"),
        ("lora_rank: 0", "--lora-rank 0"),
    ],
)
def test_invalid_config_files_are_named(own_folder, text, message):
    (own_folder / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        resolve({"data": "d"}, "c.yaml")


def test_yaml_reads_1e_4_as_a_number(own_folder):
    (own_folder / "c.yaml").write_text("learning_rate: 1e-4\ndata: d")  # a string in YAML 1.1
    assert resolve({}, "c.yaml").learning_rate == 1e-4


@pytest.mark.parametrize(
    ("flags", "preset", "message"),
    [
        ({}, "nope", r"--config nope: .*presets: .*demo"),
        ({}, "demo-dpp", r"no such file or preset: /.*; did you mean demo-dpo\?$"),
        ({"model": "some/model"}, None, "--data is missing"),
        ({"from_adapter": "x", "data": "d"}, None, "^--from x: only works with train and plan"),
    ],
)
def test_presets_and_settings_that_cannot_be_used_are_refused(flags, preset, message):
    with pytest.raises(UserError, match=message):
        resolve(flags, preset)


def test_resume_may_change_the_number_of_steps_but_not_the_seed():
    saved = TrainConfig(data="d", max_steps=4, epochs=None, seed=1)
    assert resumed(saved, {"max_steps": "9"}) == dataclasses.replace(saved, max_steps=9)
    assert resumed(saved, {"seed": "1"}) == saved
    with pytest.raises(UserError, match="--seed 2: the run started with 1"):
        resumed(saved, {"seed": "2"})


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        ({"processes": "1"}, (1, ())),
        ({"processes": "3"}, (3, ())),
        ({"hosts": "c,d"}, (1, ("c", "d"))),
        ({"supervise": False}, (1, ())),  # under mlx.launch
        ({"processes": "2", "supervise": True}, (2, ())),
        ({}, (1, ("a", "b"))),
    ],
)
def test_on_resume_a_new_way_to_start_processes_replaces_the_old_one(flags, ways):
    saved = TrainConfig(data="d", hosts=("a", "b"), sync="data")
    found = resumed(saved, flags)
    assert (found.processes, found.hosts) == ways
    assert found.sync == ("data" if found.hosts else "off")


@pytest.mark.parametrize(("objective", "beta"), [("dpo", 0.1), ("simpo", 2.0)])
def test_a_refused_resume_names_the_default_in_effect(objective, beta):
    saved = TrainConfig(data="d", objective=objective)
    assert resumed(saved, {"beta": str(beta)}) == saved
    with pytest.raises(UserError, match=f"--beta 0.5: the run started with {beta}, which cannot"):
        resumed(saved, {"beta": "0.5"})


def test_a_resume_with_another_objective_names_the_objective_alone():
    saved = TrainConfig(data="d", run="r", objective="dpo")
    flags = {"beta": "1", "simpo_gamma": "1", "learning_rate": "1", "objective": "simpo"}
    with pytest.raises(UserError) as caught:
        resumed(saved, flags)
    assert str(caught.value) == (
        "--objective simpo: the run started with dpo, which cannot change on --resume; start a new "
        "run, with --from r from its adapter"
    )


@pytest.mark.parametrize(
    ("flags", "may"),
    [
        ({"seed": "8"}, "--epochs, --max-steps, --max-memory, --plan"),
        ({"epochs": "9", "seed": "8", "save_every": "5"}, "--epochs, --save-every"),
    ],
)
def test_a_refused_resume_names_a_few_settings_that_may_change(flags, may):
    with pytest.raises(UserError) as caught:
        resumed(TrainConfig(data="d", run="r"), flags)
    assert str(caught.value) == (
        f"--seed 8: the run started with 0, which cannot change on --resume (these may: {may}); "
        "leave it out, or start a new run, with --from r from its adapter"
    )


@pytest.mark.parametrize(
    ("text", "gb"),
    [
        *(("8", 8), ("8GB", 8), ("8 gb", 8), ("0.5g", 0.5), ("500MB", 0.5), ("1e3 M", 1)),
        *(("8GiB", 8 * 2**30 / 1e9), ("512MiB", 2**29 / 1e9), (8, 8), ("1_0", 10)),
    ],
)
def test_memory_may_have_a_unit(text, gb):
    assert resolve({"max_memory": text, "data": "d"}, None).max_memory == pytest.approx(gb)


@pytest.mark.parametrize("text", ["GB", "8kB", "8GBs", "8 8GB", "", "MB500", "8TB"])
def test_memory_that_is_no_size_is_refused_with_examples(text):
    with pytest.raises(UserError, match=r"--max-memory: expected .* such as 8 or 500MB, found"):
        resolve({"max_memory": text, "data": "d"}, None)


def test_a_resume_refuses_the_settings_of_another_objective():
    saved = TrainConfig(data="d", objective="dpo")
    with pytest.raises(UserError, match="--simpo-gamma: --objective dpo does not use it"):
        resumed(saved, {"simpo_gamma": "0.5"})


@pytest.mark.parametrize(
    ("saved", "given", "limits"),
    [
        ((4, None), {"epochs": 2}, (None, 2)),
        ((None, 3), {"max_steps": 9}, (9, None)),
        ((4, 3), {"max_steps": 9, "epochs": 2}, (9, 2)),
        ((4, 3), {"seed": 0}, (4, 3)),
        ((None, "auto"), {"max_steps": 9}, (9, "auto")),
    ],
)
def test_on_resume_a_limit_in_steps_replaces_one_in_epochs(saved, given, limits):
    steps, epochs = saved
    found = resumed(TrainConfig(data="d", max_steps=steps, epochs=epochs), given)
    assert (found.max_steps, found.epochs) == limits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "orpo", "label_smoothing": "0"}, "--label-smoothing: --objective orpo"),
        ({"objective": "dpo", "simpo_gamma": "0.5"}, "--simpo-gamma: --objective dpo does not"),
        ({"sft_weight": 0}, "--sft-weight: --objective sft does not use it; it is for dpo"),
        ({"objective": "kto", "reference": "start"}, "--reference: --objective kto"),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_given_setting_of_another_objective_is_refused_if_it_is_the_default(
    own_folder, settings, message, in_file
):
    preset = "c.yaml" if in_file else None
    (own_folder / "c.yaml").write_text("".join(f"{n}: {v}\n" for n, v in settings.items()))
    with pytest.raises(UserError, match=message):
        resolve({"data": "d"} | ({} if in_file else settings), preset)


def test_a_setting_of_a_preset_is_refused_for_another_objective(own_folder):
    (own_folder / "c.yaml").write_text("data: d\nobjective: dpo\nlabel_smoothing: 0\n")
    assert resolve({}, "c.yaml").objective == "dpo"
    with pytest.raises(UserError, match="--label-smoothing: --objective ipo does not use it"):
        resolve({"objective": "ipo"}, "c.yaml")


@pytest.mark.parametrize("objective", ["sft", "orpo"])
def test_the_settings_of_a_run_are_a_preset_for_every_objective(own_folder, objective):
    (own_folder / "c.yaml").write_text(to_yaml(TrainConfig(data="d", objective="dpo")))
    assert resolve({"objective": objective}, "c.yaml").objective == objective
    with pytest.raises(UserError, match="--label-smoothing: --objective"):
        resolve({"objective": objective, "label_smoothing": "0"}, "c.yaml")


@pytest.mark.parametrize("preset", sorted(p.stem for p in packaged("configs").glob("*.yaml")))
def test_presets_are_valid_and_commented(preset):
    path = packaged("configs") / f"{preset}.yaml"
    build(read_yaml(path), str(path))
    assert path.read_text().startswith("#")


def test_old_runs_did_not_start_from_an_adapter():
    assert "from_adapter" not in TrainConfig().fixed_on_resume()
    assert TrainConfig(from_adapter="x").fixed_on_resume()["from_adapter"] == "'x'"


def test_an_objective_whose_demo_begins_with_an_adapter_takes_its_settings():
    asked = []

    def settings_of_adapter(source, model):
        asked.append(source)
        return {"from_adapter": source, "lora_rank": 4}

    config = resolve({"objective": "grpo"}, None, settings_of_adapter=settings_of_adapter)
    assert asked == ["demo"]
    assert (config.from_adapter, config.lora_rank) == ("demo", 4)


def test_a_choice_of_numbers_is_read_from_text():
    assert resolve({"data": "d", "optimizer_bits": "8"}, None).optimizer_bits == 8
