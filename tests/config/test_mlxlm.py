"""Files of mlx-lm mean here what they mean to mlx-lm, which is run beside."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as mlx_optimizers
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm import lora
from mlx_lm.tuner.datasets import CacheDataset, load_dataset
from mlx_lm.tuner.trainer import iterate_batches
from mlx_lm.tuner.utils import build_schedule, linear_to_lora_layers

from tests.conftest import EXTRA, SMALL, call, chat, write_rows
from your_ai import api
from your_ai.config import TrainConfig, build, defaults, mlxlm, resolve
from your_ai.data import sources
from your_ai.data.encode import Encoder
from your_ai.data.examples import fit
from your_ai.data.hub_datasets import SplitRows, parse_name
from your_ai.data.rows import read_rows
from your_ai.data.sources import find_splits
from your_ai.errors import UserError
from your_ai.nets.model import adapter_arrays, add_adapters
from your_ai.session import attach
from your_ai.training import optimizer

EXAMPLE = """
model: mlx_model
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw:
    betas: [0.9, 0.98]
    eps: 1e-6
    weight_decay: 0.05
    bias_correction: true
data: chats
seed: 0
num_layers: 16
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
resume_adapter_file: null
adapter_path: "adapters"
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 100
  warmup_init: 1e-7
  arguments: [1e-5, 800, 1e-7]
"""
FILES = {
    "example": EXAMPLE,
    "defaults": "{train: true, data: chats, iters: 600}",
    "dora": """
{data: chats, fine_tune_type: dora, num_layers: -1, iters: 300,
lora_parameters: {rank: 12, scale: 10, dropout: 0.05},
lr_schedule: {name: exponential_decay, arguments: [1e-4, 0.99]}}
""",
    "accumulated": """
{data: chats, batch_size: 2, iters: 103, grad_accumulation_steps: 4, num_layers: 4,
optimizer: adamw, lr_schedule: {name: linear_schedule, arguments: [1e-4, 1e-6, 20]},
grad_checkpoint: true, mask_prompt: true}
""",
    "columns": """
{data: pairs, prompt_feature: input, completion_feature: output, mask_prompt: true, num_layers: 8,
batch_size: 1, iters: 50, learning_rate: 5e-5, report_to: wandb, project_name: mine}
""",
    "texts": """
{data: texts, max_seq_length: 24, optimizer: sgd, optimizer_config: {sgd: {weight_decay: 0.1}},
lr_schedule: {name: step_decay, warmup: 3, arguments: [1e-2, 0.5, 10]}, iters: 60,
lora_parameters: {keys: [mlp.gate_proj, mlp.down_proj], rank: 4, scale: 2.5, dropout: 0.1}}
""",
    "rising": """
{data: chats, test: true, iters: 40,
lr_schedule: {name: linear_schedule, arguments: [0, 1e-5, 25]},
lora_parameters: {rank: 8, alpha: 16, scale: 2.0, dropout: 0}}
""",
    "experts": "{model: qwen3_moe, data: chats, num_layers: 2, optimizer: muon, seed: 7, iters: 9}",
    "dataset": """
hf_dataset: {path: someone/pairs, prompt_feature: input, completion_feature: output}
batch_size: 2
iters: 20
""",
    "datasets": """
train: true
hf_dataset:
  - path: someone/pairs
    train_split: "train[:4]"
    valid_split: "train[-3:]"
    prompt_feature: input
    completion_feature: output
  - {path: someone/more, train_split: "train[50%:]", valid_split: "validation",
     prompt_feature: input, completion_feature: output}
batch_size: 1
iters: 20
mask_prompt: true
""",
}
WORDS = "A lamp for the hall is sent by post"


def pairs(first: int, count: int) -> list[dict[str, str]]:
    return [{"input": f"Ask {i} " * (i % 4 + 1), "output": f"Say {i}"} for i in range(first, count)]


@pytest.fixture(autouse=True)
def all_data(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders and datasets that the files name, for this program and for mlx-lm."""
    chats = [
        chat(f"Ask {i}" + " please" * (2 * i), f"Answer {i}" * (i // 3 + 1)) for i in range(12)
    ]
    texts = [{"text": f"{WORDS} {i}. " * (i % 5 + 1)} for i in range(12)]
    for name, rows in {"chats": chats, "pairs": pairs(0, 12), "texts": texts}.items():
        write_rows(own_folder / name / "train.jsonl", rows)
        write_rows(own_folder / name / "valid.jsonl", rows[:4])
        write_rows(own_folder / name / "test.jsonl", rows[4:6])
    write_rows(own_folder / "hub" / "pairs" / "train-00000.jsonl", pairs(0, 7))
    write_rows(own_folder / "hub" / "pairs" / "train-00001.jsonl", pairs(7, 13))
    write_rows(own_folder / "hub" / "more" / "train-00000.jsonl", pairs(20, 30))
    write_rows(own_folder / "hub" / "more" / "valid-00000.jsonl", pairs(30, 32))

    def found(name: str) -> Path:
        return own_folder / "hub" / parse_name(name).repo.partition("/")[2]

    monkeypatch.setattr(sources, "find_dataset", found)
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda path, split: hub_rows(own_folder / "hub" / path[8:], split)
    monkeypatch.setitem(sys.modules, "datasets", fake)


def hub_rows(folder: Path, split: str) -> list[dict]:
    """What the datasets package gives for `train[:80%]`."""
    name, _, part = split.rstrip("]").partition("[")
    files = sorted(folder.glob(f"{name.replace('validation', 'valid')}-*"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def place(text: str) -> int | None:
        percent = re.fullmatch(r"(-?\d+)%", text)
        if percent:
            return round(int(percent[1]) * len(rows) / 100)
        return int(text) if text else None

    return rows[slice(*map(place, part.split(":")))] if part else rows


def theirs(text: str) -> types.SimpleNamespace:
    """The arguments with which mlx-lm trains, as its main function makes them."""
    found = yaml.load(text, lora.yaml_loader)
    defaults = {k: v for k, v in lora.CONFIG_DEFAULTS.items() if found.get(k) is None}
    return types.SimpleNamespace(**found | defaults | {"train": True})


def ours(text: str) -> tuple[TrainConfig, list[str]]:
    Path("c.yaml").write_text(text)
    notes: list[str] = []
    return resolve({}, "c.yaml", on_note=notes.append), notes


@cache
def network(kind: str) -> nn.Module:
    shape = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 16}
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    config = {"model_type": kind, **SMALL, **EXTRA[kind], **shape}
    return module.Model(module.ModelArgs.from_dict(config))


def fresh_network(config: TrainConfig) -> nn.Module:
    model = network("qwen3_moe" if config.model == "qwen3_moe" else "llama")
    model = type(model)(model.args)  # parameters are lazy and never computed
    model.freeze()
    return model


def test_a_full_fine_tune_trains_whole_weights_of_the_same_blocks():
    config, _ = ours("{fine_tune_type: full, num_layers: 2, iters: 9}")
    assert (config.adapter, config.lora_layers, config.lora_targets) == ("full", 2, ("all-linear",))


@pytest.fixture(params=FILES)
def both(request: pytest.FixtureRequest) -> tuple[TrainConfig, types.SimpleNamespace]:
    """What a file means here, and to mlx-lm."""
    return ours(FILES[request.param])[0], theirs(FILES[request.param])


def test_steps_are_the_updates_of_mlx_lm(both):
    config, args = both
    updates = sum(it % args.grad_accumulation_steps == 0 for it in range(1, args.iters + 1))
    assert (config.max_steps, defaults.sized(config, rows=1).epochs) == (updates, None)
    assert defaults.rows_per_step(config, rows=1) == args.batch_size * args.grad_accumulation_steps


def test_every_step_has_the_learning_rate_of_mlx_lm(both):
    config, args = both
    count = config.max_steps
    rates = [optimizer.learning_rate(config, step, count) for step in range(count)]
    if args.lr_schedule is None:
        assert rates == [args.learning_rate] * count
    else:
        expected = build_schedule(args.lr_schedule)(mx.arange(count, dtype=mx.uint64)).tolist()
        assert rates == pytest.approx(expected, rel=1e-5, abs=1e-6 * max(expected))


def test_adapters_have_the_names_and_shapes_of_mlx_lm(both):
    config, args = both
    mine, reference = fresh_network(config), fresh_network(config)
    use_dora = args.fine_tune_type == "dora"
    add_adapters(mine, config)
    linear_to_lora_layers(reference, args.num_layers, args.lora_parameters, use_dora)
    found = {path: array.shape for path, array in adapter_arrays(mine).items()}
    assert found == {path: array.shape for path, array in adapter_arrays(reference).items()}
    scales = [scales_of(model) for model in (mine, reference)]
    assert scales[0] == pytest.approx(scales[1])
    assert config.lora_dropout == args.lora_parameters["dropout"]


def scales_of(model: nn.Module) -> dict[str, float]:
    return {path: m.scale for path, m in model.named_modules() if "lora_a" in m}


def test_the_rows_and_trained_tokens_are_those_of_mlx_lm(both, demo_tokenizer):
    config, args = both
    files = find_splits(config).files
    train, valid, _ = load_dataset(args, demo_tokenizer)
    for split, dataset in (("train", train), ("valid", valid)):
        encoder = Encoder(demo_tokenizer, config.mask_prompt)
        found = sorted(
            (tuple(piece.tokens.tolist()), tuple(piece.trained.nonzero()[0].tolist()))
            for row in read_rows(files[split])
            for piece, _ in fit(encoder.encode(row), config.max_seq_length, config.too_long, "")
        )
        size = args.batch_size if split == "train" else 1
        assert found == sorted(their_rows(CacheDataset(dataset), size, args.max_seq_length))


def their_rows(dataset: CacheDataset, batch_size: int, most: int) -> list[tuple]:
    """(tokens, places of the trained ones) of each row; mlx-lm also trains a padding token."""
    found = []
    for batch, spans in iterate_batches(dataset, batch_size, most):
        for tokens, (offset, length) in zip(batch.tolist(), spans.tolist(), strict=True):
            places = range(1, len(tokens))  # of the targets; see default_loss
            trained = [p for p in places if offset <= p <= length and p != length]
            found.append((tuple(tokens[:length]), tuple(trained)))
    return found


def test_the_optimizer_is_the_one_of_mlx_lm(both):
    config, args = both
    kinds = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
    options = args.optimizer_config.get(args.optimizer, {})
    options = {k: float(v) if isinstance(v, str) else v for k, v in options.items()}
    expected = getattr(mlx_optimizers, kinds[args.optimizer])(config.learning_rate, **options)
    mine = optimizer.build_optimizer(config, {"a": mx.zeros((2, 2))}).rule
    public = {k: v for k, v in vars(expected).items() if not k.startswith("_")}
    assert type(mine) is type(expected)
    assert public == {k: v for k, v in vars(mine).items() if not k.startswith("_")}
    assert config.max_grad_norm == 0


def test_the_first_update_of_mlx_has_step_0_of_the_schedule():
    schedule = build_schedule(
        {"name": "cosine_decay", "warmup": 2, "warmup_init": 1e-3, "arguments": [0.1, 5, 0.01]}
    )
    used = mlx_optimizers.SGD(schedule)
    text = (
        "lr_schedule: {name: cosine_decay, warmup: 2, warmup_init: 1e-3, arguments: [0.1,5,0.01]}"
    )
    config, _ = ours(f"data: chats\niters: 9\n{text}")
    for step in range(9):
        used.apply_gradients({"a": mx.zeros(1)}, {"a": mx.zeros(1)})
        rate = optimizer.learning_rate(config, step, 9)
        assert used.learning_rate.item() == pytest.approx(rate, rel=1e-5)


@given(
    name=st.sampled_from(sorted(mlxlm.SCHEDULES)),
    rate=st.floats(1e-6, 1e-2),
    end=st.floats(0, 1e-2),
    decay=st.floats(0.5, 1),
    length=st.integers(1, 40),
    warmup=st.integers(0, 10),
    first=st.floats(0, 1e-2),
)
def test_any_schedule_has_the_rates_of_mlx(name, rate, end, decay, length, warmup, first):
    arguments = {
        "cosine_decay": [rate, length, end],
        "linear_schedule": [rate, end, length],
        "exponential_decay": [rate, decay],
        "step_decay": [rate, decay, length],
    }[name]
    given = {"name": name, "arguments": arguments, "warmup": warmup, "warmup_init": first}
    settings = mlxlm.translated({"iters": 60, "lr_schedule": given}, "c.yaml").settings
    config = build(settings, "c.yaml")
    expected = build_schedule(given)(mx.arange(60, dtype=mx.uint64)).tolist()
    rates = [optimizer.learning_rate(config, step, 60) for step in range(60)]
    assert rates == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_defaults_are_those_of_mlx_lm():
    assert mlxlm.DEFAULTS == lora.CONFIG_DEFAULTS


def test_each_key_is_told_with_what_it_became():
    _, notes = ours(FILES["accumulated"])
    became = "data: --data chats --valid folder; iters, grad_accumulation_steps: --max-steps 25"
    assert notes[0].startswith(f"c.yaml is a file of mlx-lm; {became} --grad-accumulation 4;")
    assert "optimizer: --optimizer adamw --max-grad-norm 0.0 --weight-decay 0.01" in notes[0]
    assert notes[1].startswith("not in c.yaml, so as in mlx-lm: --model Qwen/Qwen3-0.6b")
    beginnings = [note.partition(":")[0] for note in notes[2:]]
    assert beginnings == [
        *("iters", "grad_accumulation_steps", "mask_prompt", "lora_parameters", "train"),
        *("grad_checkpoint", "not as in mlx-lm"),
    ]
    assert "keys is missing: all linear layers are adapted" in notes[5]
    assert "the last 3 iterations of 103" in notes[2]


def test_every_key_of_mlx_lm_is_translated_or_explained():
    in_groups = {key for keys, _ in mlxlm.GROUPS for key in keys}
    assert set(mlxlm.KEYS) == in_groups | mlxlm.NOT_USED.keys() | mlxlm.SWITCHES.keys() | {"train"}


def test_keys_of_older_versions_are_those_of_today():
    old = "{lora_layers: 3, use_dora: true, adapter_file: a.npz, wandb: cats, iters: 9}"
    new = "{num_layers: 3, fine_tune_type: dora, adapter_path: a.npz, report_to: wandb, iters: 9}"
    (config, notes), (wanted, _) = ours(old), ours(new)
    assert config == wanted
    assert "lora_layers: is num_layers in mlx-lm now" in notes


def test_flags_win_over_the_file():
    Path("c.yaml").write_text(FILES["defaults"])
    config = resolve({"max_steps": "3", "lora_layers": "2"}, "c.yaml")
    assert (config.max_steps, config.lora_layers, config.lora_rank) == (3, 2, 8)


def test_an_adapter_to_begin_with_is_named_by_its_file():
    given = {"data": "chats", "resume_adapter_file": "adapters/0000100_adapters.safetensors"}
    found = mlxlm.translated(given, "c.yaml").settings["from_adapter"]
    assert found == "adapters/0000100_adapters.safetensors"


def test_other_files_of_a_folder_are_not_read():
    write_rows(Path("chats/train_more.jsonl"), [chat("a", "b")])
    config, notes = ours(FILES["defaults"])
    assert (config.data, config.valid) == ("chats/train.jsonl", "chats/valid.jsonl")
    assert any("only train.jsonl and valid.jsonl of chats" in note for note in notes)


def test_data_that_is_no_folder_is_a_dataset_of_the_hub():
    config, _ = ours("iters: 9")
    assert (config.data, config.valid) == ("hf:mlx-community/WikiSQL", "folder")


def test_an_own_file_is_not_one_of_mlx_lm():
    assert not mlxlm.is_mlxlm({"model": "m", "data": "d", "lr_schedule": "cosine", "seed": 1})
    assert mlxlm.is_mlxlm({"data": "d", "lr_schedule": {"name": "cosine_decay"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{iters: 9, lora_rank: 8}", "lora_rank: is a key of your_ai, but iters is one of mlx-lm"),
        ("{lora_layers: 4, num_layers: 8, iters: 9}", "lora_layers: contradicts num_layers"),
        ("{use_dora: true, fine_tune_type: lora}", "use_dora: contradicts fine_tune_type"),
        ("{use_dora: 1, iters: 9}", "use_dora: expected true or false, found 1"),
        ("{iters: 9, num_layer: 8}", "unknown key num_layer; did you mean num_layers"),
        ("{iters: many}", "iters: expected a whole number from 1 to .*, found 'many'"),
        ("{iters: 3, grad_accumulation_steps: 4}", "iters: 3 is less than grad_accum"),
        ("{iters: 3, batch_size: []}", r"batch_size: expected a whole number or auto, found \[\]"),
        ("{iters: 3, mask_prompt: 1}", "mask_prompt: expected true or false, found 1"),
        ("{fine_tune_type: half}", "fine_tune_type: expected lora or dora or full, found 'half'"),
        ("{num_layers: some}", "num_layers: expected a whole number, -1 for all"),
        ("{lora_parameters: 8}", "lora_parameters: expected `key: value` lines, found 8"),
        ("{lora_parameters: {rank: 8, alpha: 9}}", "scale is missing, .*; mlx-lm does not use alp"),
        ("{lora_parameters: {r: 8}}", "lora_parameters: unknown key r"),
        ("{iters: 9, optimizer: lion}", "optimizer: expected one of adam, .*, found 'lion'"),
        ("{iters: 9, optimizer: adafactor}", "relative_step True: only false is supported"),
        ("{optimizer: sgd, optimizer_config: {sgd: {momentum: 0.9}}}", "momentum 0.9: only 0.0"),
        ("{optimizer_config: {adam: {weight_decay: 1}}}", "adam: unknown key weight_decay"),
        ("{optimizer_config: {adam: {betas: 1}}}", "betas: expected two numbers, found 1"),
        ("{lr_schedule: {name: cosine}}", "name: expected one of .*, found 'cosine'"),
        ("{lr_schedule: {name: {a: 1}}}", "lr_schedule: name: expected one of"),
        ("{lr_schedule: {name: cosine_decay, arguments: [1]}}", "expected a list of 2 or 3 numb"),
        ("{lr_schedule: {name: step_decay, arguments: [1, 1, x]}}", "expected a number, found 'x'"),
        ("{hf_dataset: {path: billsum}}", "hf_dataset: path: expected OWNER/NAME, found 'billsum'"),
        ("{hf_dataset: {path: a/b, split: c}}", "hf_dataset: unknown key split"),
        ("{hf_dataset: {path: a/b, config: {data_dir: c}}}", "config: unknown key data_dir"),
        ("{iters: 9, prompt_feature: a, text_feature: b}", "rows of one kind are expected"),
        ("{iters: 9, train: 3, test: 3}", "test: expected true or false, found 3"),
    ],
)
def test_wrong_files_are_named(text, message):
    with pytest.raises(UserError, match=message) as caught:
        ours(text)
    assert str(caught.value).startswith("c.yaml: ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["1e-5", "9" * 5000, "\0", "\x1b[31m", "a/b"]) | st.builds(lambda: 10**5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["name", "arguments", "rank", "scale", "dropout", "keys", "adam", "path"]),
        inner, max_size=4,
    ),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(sorted(mlxlm.KEYS)), VALUES, min_size=1, max_size=3))
@example({"batch_size": 10**5000})
@example({"val_batches": 10**5000})
@example({"iters": 10**5000, "grad_accumulation_steps": 10**5001})
def test_any_file_is_translated_or_refused(values):
    problem = ""
    try:
        found = mlxlm.translated(values, "c.yaml")
        build(found.settings, "c.yaml")
    except UserError as error:
        problem = str(error)
    assert "\n" not in problem
    assert len(problem) < 600


def test_plan_and_train_print_the_notes(capsys, tiny_model, monkeypatch):
    monkeypatch.setattr(attach, "train_and_show", lambda *_, **__: 0)
    Path("c.yaml").write_text(f"model: {tiny_model}\ndata: chats\niters: 9\nnum_layers: 2\n")
    assert call("plan", "--config", "c.yaml", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert err.startswith("note: c.yaml is a file of mlx-lm; model: --model ")
    assert api.plan("c.yaml").notes[0] == err.splitlines()[0].removeprefix("note: ")
    assert call("train", "--config", "c.yaml", "--run", "a") == 0
    assert capsys.readouterr().err == err
    api.train("c.yaml", run="b", show=False)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("train", (0, 10)),
        ("train[2:]", (2, 10)),
        ("train[:-3]", (0, 7)),
        ("train[-3:]", (7, 10)),
        ("train[:25%]", (0, 2)),  # 2.5 rounds to the even one, as in the datasets package
        ("train[-15%:]", (8, 10)),
        ("train[:99]", (0, 10)),
        ("train[-99:2]", (0, 2)),
    ],
)
def test_rows_of_a_split_are_those_of_the_datasets_package(text, bounds):
    rows = parse_name(f"hf:a/b#{text}").rows
    assert rows.bounds(10) == bounds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train[5]", "expected hf:OWNER/NAME"),
        ("train[:5]+test", "expected hf:OWNER/NAME"),
        ("train[1:50%]", "expected hf:OWNER/NAME"),
        ("", "expected hf:OWNER/NAME"),
        ("train_sft", "the split is none of train, validation, test"),
    ],
)
def test_rows_of_another_form_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_name(f"hf:a/b#{text}")


def test_no_row_that_is_left_is_an_error():
    with pytest.raises(UserError, match="pairs: the train split has 13 rows, none of them"):
        find_splits(TrainConfig(data="hf:someone/pairs#train[50:]", valid="none"))


def test_rows_of_a_dataset_are_used_to_validate():
    columns = ("prompt=input", "completion=output")
    config = TrainConfig(data="pairs", valid="hf:someone/pairs#train[-2:]", columns=columns)
    rows = list(read_rows(find_splits(config).files["valid"]))
    assert [row.content.completion for row in rows] == ["Say 11", "Say 12"]
    name = "hf:someone/more#validation[:1]"
    files = find_splits(TrainConfig(data=name, columns=columns), to_train=False).files
    assert [row.content.completion for row in read_rows(files["valid"])] == ["Say 30"]
    assert SplitRows("train").bounds(0) == (0, 0)
