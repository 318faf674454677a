"""The four rules of rows, for random chats and the shapes of templates in the field: nothing is
lost silently, and what generation sees is what was trained before the answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_encode import make_tokenizer
from your_ai.data.encode import Encoder
from your_ai.data.preferences import parser_of
from your_ai.data.rows import parse_row
from your_ai.errors import UserError
from your_ai.generation.generate import parse_prompt, prompt_tokens

EXAMPLES = 2000 if os.environ.get("YOUR_AI_SLOW") else 60
# As templates of the field behave, in small: what they show, refuse and rewrite.
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}

WORDS = ["lamp", "two chairs", "Zürich", "多謝", "é", " x ", "a\nb", "\n4", '{"n": 3}', "'q'", "🙂"]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join)
MAYBE = st.one_of(st.just(""), TEXT)
ARGUMENTS = st.sampled_from(
    ['{"city": "Oslo"}', {"city": "Oslo"}, "", None, "null", "{}",
     {"days": 3, "deep": {"of": ["tief", 0.5, None]}}])  # fmt: skip
COUNT = st.sampled_from([1, 1, 2])
OTHERS = st.sampled_from(
    ["tool", "function", "observation", "ipython", "tool_response", "narrator"]
)


@st.composite
def turns(draw: Any) -> list[dict[str, Any]]:
    found = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer", "System"]))
        found.append({"role": role, "content": draw(TEXT)})
    for number in range(draw(st.integers(1, 3))):
        user = draw(st.sampled_from(["user", "human"]))
        found.append({"role": user, "content": f"q{number} {draw(TEXT)}"})
        answer: dict[str, Any] = {"role": draw(st.sampled_from(["assistant", "bot", "gpt"]))}
        answer["content"] = draw(MAYBE)
        if draw(st.integers(0, 3)) == 0:
            name = draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"]))
            answer[name] = f"because {draw(TEXT)}"
        elif draw(st.integers(0, 3)) == 0:
            answer["content"] = f"<think>so {draw(TEXT)}</think>{answer['content']}"
        if draw(st.integers(0, 3)) == 0:
            calls = [{"name": "get_rain", "arguments": draw(ARGUMENTS)} for _ in range(draw(COUNT))]
            flat = draw(st.booleans())
            more = {"result": "y9y"} if draw(st.booleans()) else {}
            answer["tool_calls"] = [
                {**(c if flat else {"type": "function", "function": c}), **more} for c in calls
            ]
            found += [answer, {"role": draw(OTHERS), "content": f"r{number} {draw(TEXT)}"}]
            answer = {"role": "assistant", "content": f"then {draw(TEXT)}"}
        if draw(st.integers(0, 3)) == 0:  # templates have such words in them
            name = draw(st.sampled_from(["image", "text", "result", "name", "citation"]))
            found[-1][name] = f"x{number}x"
        if draw(st.integers(0, 5)) == 0:
            answer["weight"] = draw(st.sampled_from([0, 1, None]))
        found.append(answer)
    return found


PLACE = {"place_name": {"type": "string", "description": "of a place"}}
PARAMETERS = {"type": "object", "properties": PLACE}
TOOL = {"name": "get_rain", "description": "of a city", "parameters": PARAMETERS}
CHATS = st.tuples(
    turns(), st.sampled_from([None, [TOOL], [{"type": "function", "function": TOOL}]])
)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    tokens = ("<s>", "<e>", "<think>", "</think>")
    return {name: make_tokenizer(text, tokens, "<e>") for name, text in TEMPLATES.items()}


def plain(text: str) -> str:
    return "".join(text.split()).lower()


def is_in(piece: str, text: str) -> bool:
    escaped = piece.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    ascii_only = piece.encode("unicode_escape").decode()
    return any(plain(p) in plain(text) for p in (piece, escaped, ascii_only)) or (
        all(plain(word) in plain(text) or not word.isascii() for word in piece.split())
    )


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(chat=CHATS)
def test_nothing_is_lost_silently_and_prompts_are_what_was_trained_before(tokenizers, name, chat):
    messages, tools = chat
    tokenizer = tokenizers[name]
    encoder = Encoder(tokenizer)
    row = parse_row({"messages": messages} | ({"tools": tools} if tools else {}), "f.jsonl:1")
    encoded = encoded_or_refused(encoder, row)
    if encoded is None:
        return
    said = " ".join(encoder.notes.lines())
    text = tokenizer.decode(encoded.tokens.tolist())
    for message in messages:
        thought, _, content = message["content"].rpartition("</think>")
        beside_call = message.get("tool_calls") and "beside tool calls" in said
        assert is_in(content, text) or beside_call
        reasons = [message.get(key) or "" for key in ("reasoning_content", "reasoning", "thinking")]
        for reason in (*reasons, thought.removeprefix("<think>")):
            assert is_in(reason, text) or "reasoning" in said
        for call in message.get("tool_calls", ()):
            arguments = str(call.get("function", call)["arguments"])
            assert "get_rain" in text
            assert "y9y" in text or "result" not in call or "the key result of calls" in said
            assert all(word in text for word in ("Oslo", "3", "tief", "0.5") if word in arguments)
        for key in {"image", "text", "result", "name", "citation"} & message.keys():
            assert (
                is_in(message[key], text)
                or f"the key {key} of messages" in said
                or (key == "name" and message["role"] not in ("user", "human"))
            )  # with its call
        assert message["role"] != "narrator" or "the role narrator" in said
    for word in ("of a city", "place_name", "of a place"):
        assert not tools or word in text or "tools" in said
    ends = [at for at in range(1, len(encoded.tokens)) if encoded.trained[at]]
    firsts = [at for at in ends if not encoded.trained[at - 1]]
    prompts = [
        tokenizer.encode(
            encoder.template.render(row.content.messages[:at], row.content.tools, "",
                                    answer_next=True), add_special_tokens=False)
        for at, message in enumerate(row.content.messages) if message["role"] == "assistant"
        and can_begin(encoder, row, at)
    ]  # fmt: skip
    for first in firsts:
        before = encoded.tokens[:first].tolist()
        assert before in prompts or "generation" in said
    assert (encoded.trained.sum() > 0) == bool(firsts)


def encoded_or_refused(encoder: Encoder, row: Any) -> Any:
    try:
        return encoder.encode(row)
    except UserError as error:
        text = str(error)
    assert text.startswith("f.jsonl:1: ")
    assert "\n" not in text
    return None


def can_begin(encoder: Encoder, row: Any, at: int) -> bool:
    try:
        encoder.template.render(row.content.messages[:at], row.content.tools, "", answer_next=True)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=max(8, EXAMPLES // 10), deadline=None)
@given(chats=st.lists(CHATS, max_size=3), texts=st.lists(st.tuples(TEXT, MAYBE), max_size=3))
def test_rows_that_are_read_ahead_are_encoded_as_each_alone(tokenizers, name, chats, texts):
    given_rows = [
        *({"messages": m} | ({"tools": t} if t else {}) for m, t in chats),
        *({"prompt": prompt, "completion": answer} for prompt, answer in texts),
        *({"prompt": p, "chosen": f"so {a}", "rejected": f"not {a}"} for p, a in texts),
    ]
    encoders = Encoder(tokenizers[name], kind="any"), Encoder(tokenizers[name], kind="any")
    rows = [parser_of("any")(row, f"f.jsonl:{n}") for n, row in enumerate(given_rows, 1)]
    for row in encoders[0].ahead(rows):
        ahead, alone = (all_or_refusal(encoder, row) for encoder in encoders)
        assert ahead == alone
    assert encoders[0].notes.lines() == encoders[1].notes.lines()


def all_or_refusal(encoder: Encoder, row: Any) -> Any:
    try:
        return [(e.tokens.tolist(), e.trained.tolist()) for e in encoder.encode_all(row)]
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=max(8, EXAMPLES // 10), deadline=None)
@given(chat=CHATS, text=TEXT, system=st.sampled_from(["", "be kind"]), history=st.booleans())
def test_generate_asks_as_was_trained(tokenizers, name, chat, text, system, history):
    messages, tools = chat
    more = ({"system": system} if system else {}) | ({"tools": tools} if tools else {})
    rows = [
        {"messages": messages, **more},
        {"prompt": text, "completion": "yes", **more}
        | ({"history": [["before", "then"]]} if history else {}),
        {"prompt": f"<s>user {text}", "completion": "yes"},
    ]
    tokenizer, encoder = tokenizers[name], Encoder(tokenizers[name])
    for row in rows:
        try:
            trained = encoder.prompt_of(parse_row(row, "f.jsonl:1"))
            asked = parse_prompt(row, "f.jsonl:1")
            found = prompt_tokens(tokenizer, asked.messages, "", asked.tools, asked.is_text)
        except UserError:
            continue
        if trained is not None:
            assert found == tokenizer.encode(trained.rendered, add_special_tokens=False)
