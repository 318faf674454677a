"""Conversations: what the model reads between its answers is what the chat template puts there."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from tests.conftest import with_tokenizer_of_demo
from tests.data.test_encode import make_tokenizer
from tests.data.test_four_rules import TEMPLATES, TEXT
from your_ai.data.encode import Encoder
from your_ai.data.sampled_chat import CannotGoOn, SampledChat

END = "<e>"
TOKENS = ("<s>", END, "<think>", "</think>", "<tool_call>")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of a thing.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: make_tokenizer(text, TOKENS, END) for name, text in TEMPLATES.items()}


def begun(tokenizer: Any, asked: str, tools: Any = None, **given: Any) -> SampledChat:
    messages = [{"role": "user", "content": asked}]
    return SampledChat(Encoder(tokenizer), tools, messages, "rows:1", **given)


def answered(tokenizer: Any, answer: str, **given: Any) -> tuple[SampledChat, int]:
    """A conversation after a first answer, and the last token of that."""
    conversation, turn = begun(tokenizer, "Q", **given), ids_of(tokenizer, answer)
    conversation.begin()
    conversation.hear(turn, True)
    return conversation, turn[-1]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


REWRITING = ("deepseek", "qwen-3")  # that show answers otherwise once others follow


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {*REWRITING}))
@settings(max_examples=25, deadline=None)
@given(said=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), asked=TEXT)
def test_what_is_read_is_what_the_template_renders(tokenizers, name, said, asked):
    """Rule 3 of rows, over several turns: the prompt, answers as the template writes them and what
    is between are the tokens of the prompt that generation builds of the same messages."""
    tokenizer = tokenizers[name]
    conversation = begun(tokenizer, f"Q {asked}")
    ids, template = conversation.begin().tolist(), conversation.encoder.template
    (end,) = ids_of(tokenizer, END)
    for answer, question in said:
        message = {"role": "assistant", "content": f"A {answer}"}
        before = conversation.text
        through = template.render([*conversation.messages, message], None, "")
        if not through.startswith(before) or END not in through[len(before) :]:
            pytest.fail("the template is none of those that only append")
        turn = ids_of(tokenizer, through[len(before) :].rpartition(END)[0] + END)
        conversation.hear(turn, True)
        conversation.messages[-1] = message  # as the template takes it
        heard = conversation.see([{"role": "user", "content": f"Q {question}"}], end)
        assert not heard.is_prompt
        ids += [*turn, *heard.ids.tolist()]
    again = begun(tokenizer, "")
    again.messages = conversation.messages
    assert ids == again.begin().tolist()


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory) -> Any:
    """The demo's tokenizer with a template of the field, as mlx-lm loads it."""

    def make(name: str) -> Any:
        folder = with_tokenizer_of_demo(tmp_path_factory.mktemp("tokenizer"))
        text = TEMPLATES[name].replace(END, "<|end|>").replace("<s>", "<|assistant|>")
        (folder / "chat_template.jinja").write_text(text)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["tool_parser_type"] = "json_tools"
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return load(folder)

    return make


def test_calls_are_read_and_what_the_tool_says_follows(with_tools):
    tokenizer = with_tools("qwen-25")
    assert tokenizer.has_tool_calling
    conversation = begun(tokenizer, "What does a lamp cost?", [TOOL])
    assert "price" in tokenizer.decode(conversation.begin().tolist())
    call = '<tool_call>\n{"name": "price", "arguments": {"thing": "lamp"}}\n</tool_call><|end|>'
    turn = ids_of(tokenizer, call)
    message = conversation.hear(turn, True)
    (found,) = message["tool_calls"]
    assert found["function"] == {"name": "price", "arguments": {"thing": "lamp"}}
    assert message["content"] == ""
    answer = {"role": "tool", "name": "price", "content": "12 euros", "tool_call_id": found["id"]}
    heard = conversation.see([answer], turn[-1])
    text = tokenizer.decode(heard.ids.tolist())
    assert "12 euros" in text
    assert text.rstrip().endswith("assistant") or "assistant" in text[-20:]
    assert not heard.is_prompt


@pytest.mark.parametrize(
    "written",
    ["<tool_call>{bad</tool_call>", '<tool_call>[1]</tool_call>', "<tool_call>",
     '<tool_call>{"arguments": {}}</tool_call>',
     '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
     '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'],
)  # fmt: skip
def test_calls_that_cannot_be_read_stay_text(with_tools, written):
    tokenizer = with_tools("qwen-25")
    conversation = begun(tokenizer, "Q", [TOOL])
    conversation.begin()
    message = conversation.hear(ids_of(tokenizer, written), False)
    assert "tool_calls" not in message
    assert conversation.malformed == 1
    assert message["content"].startswith("<tool_call>")


def test_a_template_that_drops_reasoning_splits_the_conversation_or_is_refused(tokenizers):
    tokenizer = tokenizers["qwen-3"]
    for rewritten in ("split", "refuse"):
        said = f"<think>\nbecause\n</think>\n\nyes{END}"
        conversation, end = answered(tokenizer, said, rewritten=rewritten)
        more = [{"role": "user", "content": "and?"}]
        if rewritten == "refuse":
            with pytest.raises(CannotGoOn, match="--rewritten-turns split"):
                conversation.see(more, end)
            continue
        heard = conversation.see(more, end)
        assert heard.is_prompt
        text = tokenizer.decode(heard.ids.tolist())
        assert "because" not in text
        assert "yes" in text
        assert "and?" in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_others_say_has_no_tokens_of_the_template(tokenizers, name):
    encoder = Encoder(tokenizers[name])
    added, counts = encoder.is_added, []
    for said in ("".join(encoder.added_tokens) + END * 2, "good"):
        conversation, end = answered(tokenizers[name], f"A{END}", rewritten="split")
        heard = conversation.see([{"role": "user", "content": said}], end)
        counts.append(int(added[np.minimum(heard.ids, len(added) - 1)].sum()))
    assert counts[0] == counts[1]


def test_an_answer_that_ends_otherwise_ends_the_conversation(tokenizers):
    conversation, end = answered(tokenizers["chatml"], "A<s>")
    with pytest.raises(CannotGoOn, match="<s>"):
        conversation.see([{"role": "user", "content": "B"}], end)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.booleans())
def test_any_answer_is_a_message(with_tools_qwen, text, stopped):
    conversation = begun(with_tools_qwen, "Q", [TOOL])
    conversation.begin()
    ids = ids_of(with_tools_qwen, f"<tool_call>{text}</tool_call>") or [3]
    message = conversation.hear(ids, stopped)
    assert isinstance(message["content"], str)
    json.dumps(message)


@pytest.fixture(scope="module")
def with_tools_qwen(with_tools) -> Any:
    return with_tools("qwen-25")


def test_no_text_that_is_heard_has_the_template_s_tokens(with_tools):
    tokenizer = with_tools("qwen-25")
    encoder = Encoder(tokenizer)
    end = "<|end|>"
    assert end in encoder.added_tokens
    conversation = begun(tokenizer, "Q", [TOOL])
    said = {"role": "tool", "name": f"f{end}", "content": f"x{end}"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": f"1{end}"}}}
    conversation.append([{"role": "assistant", "content": "", "tool_calls": [call]}, said])
    assert end not in str(conversation.messages)
