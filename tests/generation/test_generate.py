from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import generate as mlx_lm_generate
from mlx_lm import load as mlx_lm_load

from tests.conftest import (
    chat,
    chat_prompt,
    load_base,
    make_model,
    peak_of,
    train_once,
    working_in,
    write_rows,
)
from tests.modelfiles.large import watched
from your_ai.config import TrainConfig, build
from your_ai.engine.weights import stream as stream_weights
from your_ai.engine.weights import tensors_of
from your_ai.errors import RunError, UserError
from your_ai.generation import generate
from your_ai.generation.generate import Sampling
from your_ai.memory.estimate import weights_bytes
from your_ai.memory.estimate_generation import generation_bytes
from your_ai.memory.facts import facts_of
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RunFolder

READ = generate.prompt_reader(TrainConfig())

WHOLE_TEXT = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


def train_in(folder: Path, base: Path, **settings) -> RunFolder:
    """Train a run r in `folder`, and return it with an absolute path."""
    rows = [chat(f"Question {i}", f"Answer {i}" * (i + 1)) for i in range(4)]
    write_rows(folder / "data" / "train.jsonl", rows)
    values = {
        "model": str(base), "data": str(folder / "data"), "run": "r", "max_steps": 3,
        "learning_rate": 0.05, "batch_size": 2, "lora_rank": 4, "lora_targets": "q_proj",
        "warmup_steps": 0, "supervise": False, "samples": 0,
    }  # fmt: skip
    with working_in(folder):
        return RunFolder(train_once(build({**values, **settings}, "test")).path.absolute())


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model):
    return train_in(tmp_path_factory.mktemp("runs"), tiny_model)


class Parrot(nn.Module):
    """A model that answers every prompt of the demo chat template with `text`."""

    def __init__(self, tokenizer, text: str) -> None:
        super().__init__()
        self.layers = []
        end = tokenizer.eos_token_id
        self.script = [*tokenizer.encode(text, add_special_tokens=False), end, end]
        self.header = tokenizer.convert_tokens_to_ids("<|assistant|>")
        self.said = 0
        self.size = len(tokenizer)

    def __call__(self, tokens, cache=None):
        self.said = 0 if tokens[0, -1].item() == self.header else self.said + 1
        spoken = self.script[min(self.said, len(self.script) - 1)]
        return mx.broadcast_to(mx.arange(self.size) == spoken, (1, tokens.shape[1], self.size)) * 9


def said(network, tokenizer, prompt: list[int], max_tokens: int, **options) -> str:
    sampling = Sampling(max_tokens=max_tokens, **options)
    return "".join(r.text for r in generate.respond(network, tokenizer, prompt, sampling))


def test_answer_equals_that_of_mlx_lm(run, tiny_model):
    network, tokenizer = generate.load_run(open_trained(str(run.path)))
    prompt = chat_prompt(tokenizer, "Question 3")
    ours = said(network, tokenizer, prompt, 12)
    theirs, their_tokenizer = mlx_lm_load(str(tiny_model), adapter_path=str(run.adapter))
    assert ours == mlx_lm_generate(theirs, their_tokenizer, prompt, max_tokens=12)


def test_base_answers_without_the_adapter(run, tiny_model):
    network, tokenizer = generate.load_run(open_trained(str(run.path)), adapted=False)
    base, _ = mlx_lm_load(str(tiny_model))
    tokens = mx.array([chat_prompt(tokenizer, "Question 3")])
    adapted, _ = generate.load_run(open_trained(str(run.path)))
    expected = base(tokens)
    # Products of dequantized weights add up in another order, which depends on the machine.
    rounding = 1e-5 * mx.abs(expected).max()
    assert mx.abs(network(tokens) - expected).max() < rounding
    assert mx.abs(adapted(tokens) - expected).max() > 100 * rounding


def test_sampling_depends_on_the_seed(run):
    network, tokenizer = generate.load_run(open_trained(str(run.path)), adapted=False)

    def sample(seed: int) -> str:
        return said(network, tokenizer, [3, 5], 20, temperature=1.5, seed=seed)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_small_top_p_takes_the_most_likely_token(tiny_model):
    network, tokenizer = load_base(tiny_model, mx.float32)

    def sample(**options) -> str:
        return said(network, tokenizer, [3, 5], 20, **options)

    assert sample(temperature=1.5, seed=1, top_p=1e-6) == sample()
    assert sample(temperature=1.5, seed=1, top_p=1.0) != sample()


@pytest.mark.memory
def test_memory_of_a_long_prompt_is_below_the_estimate(tiny_model):
    network, tokenizer = load_base(tiny_model, mx.float32)
    mx.eval(network.parameters())
    prompt = [5] * 1500
    said(network, tokenizer, prompt[:300], 2)
    taken = peak_of(lambda: said(network, tokenizer, prompt, 4))
    scores_of_all_at_once = 4 * 1500**2 * 4
    assert taken < generation_bytes(facts_of(tiny_model, 4), 1504) < scores_of_all_at_once


@pytest.mark.memory
def test_streamed_head_computes_no_logits_of_the_prompt(tmp_path):
    """They would be V unused numbers per token."""
    folder = make_model(tmp_path / "m", "qwen2-tied", vocab_size=32_000)
    network, tokenizer = load_base(folder, mx.float32)
    tensors = tensors_of(network, folder)
    whole = said(network, tokenizer, [5] * 300, 4)
    network, tokenizer = load_base(folder, mx.float32)
    stream_weights(network, tensors)
    found = []
    taken = peak_of(lambda: found.append(said(network, tokenizer, [5] * 300, 4)))
    assert found == [whole]
    facts = facts_of(folder, 4)
    estimate = generation_bytes(facts, 304) + weights_bytes(facts, "streamed")
    assert taken < estimate < 256 * 32_000 * 4
    assert network(mx.array([[1, 2, 3]])).shape[1] == 3  # all positions again


def test_pieces_never_split_a_character(demo_tokenizer):
    text = "naïve 😀 世界 ünï"
    prompt = chat_prompt(demo_tokenizer, "Say it")
    parrot = Parrot(demo_tokenizer, text)
    responses = generate.respond(parrot, demo_tokenizer, prompt, Sampling(max_tokens=99))
    pieces = [response.text for response in responses if response.text]
    assert len(demo_tokenizer.encode("😀", add_special_tokens=False)) > 1
    assert "".join(pieces) == text
    assert len(pieces) > 5


def test_last_piece_has_the_finish_reason(demo_tokenizer):
    parrot = Parrot(demo_tokenizer, "one two three")
    prompt = chat_prompt(demo_tokenizer, "Say it")
    whole = list(generate.respond(parrot, demo_tokenizer, prompt, Sampling()))
    cut = list(generate.respond(parrot, demo_tokenizer, prompt, Sampling(max_tokens=2)))
    assert [r.finish_reason for r in whole] == [None] * (len(whole) - 1) + ["stop"]
    assert [r.finish_reason for r in cut] == [None, "length"]


def test_out_of_memory_is_reported(demo_tokenizer):
    class Large(Parrot):
        def __call__(self, tokens, cache=None):
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with pytest.raises(RunError, match=r"out of memory .*a smaller --max-tokens"):
        said(Large(demo_tokenizer, "x"), demo_tokenizer, [3, 5], 4)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": float("nan")},
        {"seed": -1}, {"seed": 1 << 64},
    ],
)  # fmt: skip
def test_sampling_values_out_of_range_are_refused(values):
    (name,) = values
    with pytest.raises(UserError, match="--" + name.replace("_", "-")):
        Sampling(**values)


def test_find_base_returns_settings_and_model_folder(run, tiny_model):
    config, base = generate.find_base_model(str(run.path))
    assert (config.run, base) == ("r", tiny_model)


@given(st.lists(WHOLE_TEXT, min_size=1))
def test_json_prompts_are_read_unchanged(texts):
    lines = "".join(json.dumps({"prompt": text}) + "\n\n" for text in texts)
    prompts = generate.read_prompts("p.jsonl", lines.encode(), READ)
    assert [prompt.text for prompt in prompts] == texts
    assert prompts[-1].where == f"p.jsonl:{2 * len(texts) - 1}"


def test_each_text_line_is_a_prompt():
    prompts = generate.read_prompts("p.txt", "\ufeffone\r\n\n  two {\n".encode(), READ)
    assert [(p.where, p.text) for p in prompts] == [("p.txt:1", "one"), ("p.txt:3", "two {")]


def test_json_on_stdin_is_detected_by_its_first_line():
    assert generate.read_prompts("stdin", b'{"prompt": "one"}', READ)[0].text == "one"
    assert generate.read_prompts("p.txt", b'{"prompt": "one"}', READ)[0].text == '{"prompt": "one"}'


def test_final_answer_is_removed_from_messages():
    said = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user", "assistant")]
    (prompt,) = generate.read_prompts("p.jsonl", json.dumps({"messages": said}).encode(), READ)
    assert prompt.messages == said[:-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:2: is not valid JSON"),
        ("[]", "p.jsonl:2: expected a JSON object"),
        ('{"x": 1}', "p.jsonl:2: has no prompt; keys found: x"),
        ('{"prompt": " "}', "p.jsonl:2: prompt: is empty"),
        ('{"prompt": {}}', "p.jsonl:2: prompt: expected text"),
        ('{"messages": []}', "p.jsonl:2: messages: expected a list"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "p.jsonl:2: prompt: has only messages",
        ),
        ('{"prompt": "\\ud800"}', "p.jsonl:2: .*half of a character"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "p.jsonl:2: .*half of a char"),
    ],
)
def test_error_names_the_bad_line(line, message):
    with pytest.raises(UserError, match=message):
        generate.read_prompts("p.jsonl", f'{{"prompt": "good"}}\n{line}\n'.encode(), READ)


def test_prompts_of_a_table_are_found_by_their_columns(own_folder):
    path = own_folder / "asked.csv"
    path.write_text("id,Frage,Antwort\n1,Wo ist Oslo?,im Norden\n2,Wer?,niemand\n")
    found = generate.read_table(path, generate.prompt_reader(TrainConfig(), ("prompt=Frage",)))
    assert [prompt.text for prompt in found] == ["Wo ist Oslo?", "Wer?"]
    with pytest.raises(UserError, match="--columns prompt=Frage"):
        generate.read_table(path, READ)


@pytest.mark.parametrize(
    ("data", "message"), [(b"a\n\xff\n", "p.txt:2: is not UTF-8"), (b" \n\n", "contains no prompt")]
)
def test_bad_text_file_is_refused(data, message):
    with pytest.raises(UserError, match=message):
        generate.read_prompts("p.txt", data, READ)


def test_system_prompt_is_added_unless_one_exists():
    asked = [{"role": "user", "content": "q"}]
    spoken = generate.with_system(asked, "Be brief.")
    assert [m["content"] for m in spoken] == ["Be brief.", "q"]
    assert generate.with_system(spoken, "Be long.") == spoken
    assert generate.with_system(asked, "") == asked


def test_without_a_template_messages_are_joined_as_plain_text(tmp_path):
    folder = make_model(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    _, tokenizer = load_base(folder, mx.float32)
    said = [("user", "Once upon"), ("assistant", " a time"), ("user", "Then")]
    tokens = generate.prompt_tokens(tokenizer, [{"role": r, "content": c} for r, c in said])
    assert tokenizer.decode(tokens) == "Once upon a time\nThen"
    assert tokenizer.decode(chat_prompt(tokenizer, "Once upon")) == "Once upon"


def test_template_error_is_reported(tmp_path):
    folder = make_model(tmp_path / "m")
    refusing = "{{ raise_exception('System role not supported') }}"
    (folder / "chat_template.jinja").write_text(refusing)
    _, tokenizer = load_base(folder, mx.float32)
    with pytest.raises(
        UserError, match=r"p:3: .*template rejects the messages \(System role not supported"
    ):
        generate.prompt_tokens(tokenizer, [{"role": "user", "content": "q"}], "p:3")


def test_context_length_is_read_from_config_json(tmp_path, tiny_model):
    assert generate.context_tokens(tiny_model) == 2048
    for config, most in (
        ({"n_ctx": 64}, 64),
        ({"max_position_embeddings": 2048, "n_positions": 64}, 64),  # as long is GPT-2's table
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert generate.context_tokens(tmp_path) == most


def test_rows_are_asked_as_answers_are_trained_and_as_rollouts_are():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"prompt": "c", "messages": said}
    assert READ(row, "here").messages == said[:1]
    rollouts = generate.prompt_reader(TrainConfig(objective="grpo"))
    assert rollouts(row, "here").text == "c"
    alpaca = {"instruction": "a", "input": "b", "answer": "c"}
    assert READ(alpaca, "here").text == "a\n\nb"


def test_prompts_are_asked_without_what_the_template_writes(demo_tokenizer):
    prompt = "\n\nHuman: a\n\nAssistant: b<|end|>\n\nHuman: c\n\nAssistant:"
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    chat = [{"role": role, "content": text} for role, text in turns]
    asked = [{"role": "user", "content": prompt}]
    found = generate.prompt_tokens(demo_tokenizer, asked, is_text=True)
    assert found == generate.prompt_tokens(demo_tokenizer, chat)


@pytest.mark.parametrize(("tools", "told"), [(None, True), ([], False)])
def test_note_on_tools_of_rows_is_for_prompts_that_have_them(own_folder, tools, told):
    row = {**chat("Question", "Answer"), "tools": [{"function": {"name": "price"}}]}
    write_rows(own_folder / "data" / "train.jsonl", [row])
    config = TrainConfig(model="demo", data=str(own_folder / "data"))
    form, note = generate.form_of_prompts(config, None, tools)
    assert ("1 tool of the training rows" in note) == told
    assert bool(form.tools) == told


def test_note_names_the_tools_of_a_run():
    assert generate.note_on_tools(TrainConfig()) == ""
    note = generate.note_on_tools(TrainConfig(objective="grpo", tools=("shop:price", "python")))
    assert "--tools shop:price,python lets the model call them" in note


@pytest.mark.memory
@pytest.mark.parametrize("use_dora", [False, True])
def test_the_process_stays_in_the_least_limit_that_is_accepted(tmp_path, use_dora):
    """With an adapter that is larger than the room that the estimate leaves."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
    base = make_model(tmp_path / "m", bits=None, **sizes)
    settings = {"lora_rank": 512, "lora_targets": "all-linear", "use_dora": use_dora}
    run = train_in(tmp_path, base, max_steps=1, **settings)
    asked = [*(sys.executable, "-m", "your_ai", "generate", str(run.path), "--prompt", "Hello"),
             *("--max-tokens", "4", "--max-memory")]  # fmt: skip
    refused = subprocess.run([*asked, "0.05"], capture_output=True, text=True, check=False)
    least = re.search(r"at least ([0-9.]+) GB", refused.stderr)
    assert least is not None, refused.stderr
    process = subprocess.Popen([*asked, least[1]], stdout=subprocess.DEVNULL)
    assert watched(process) <= 1e9 * float(least[1])
    assert process.returncode == 0
