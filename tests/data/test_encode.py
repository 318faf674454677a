"""The trained tokens of each row, with many kinds of chat templates."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.conftest import DEMO_FOLDER
from your_ai.data import answers, encode
from your_ai.data.encode import EncodedRow, Encoder
from your_ai.data.rows import Chat, Pair, Question, Row, Text, parse_row
from your_ai.data.turns import whole_tool
from your_ai.errors import UserError

# Templates with different difficulties, each followed by its special tokens.

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' ~ tools | tojson ~ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

# A BOS token, blank lines after headers, two end tokens.
HEADERS = (
    "{{ bos_token }}"
    "{% for m in messages %}{{ '<|head|>' ~ m.role ~ '<|/head|>\n\n' ~ m.content ~ '<|eot|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
HEADERS_TOKENS = ("<|bos|>", "<|eos|>", "<|eot|>", "<|head|>", "<|/head|>")

# No generation prompt; the answer follows a space.
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' ~ m.content ~ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are known') }}{% endif %}"
    "{% endfor %}"
)
INST_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]")

STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('No system role here') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% endfor %}"
) + CHATML

# Reasoning is shown only in the last turn: rendering a chat up to an earlier turn gives another
# text than the whole chat has there.
REASONING = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ text }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REASONING_TOKENS = (*CHATML_TOKENS, "<think>", "</think>")

THINKING = REASONING.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")

# The last turn always begins with reasoning, which may be empty.
EMPTY_REASONING = REASONING.replace(
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ text }}",
    "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in text %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ text }}",
)

# As Qwen3: reasoning is a field of the message, and shown only after the last question.
REASONING_FIELD = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{% if m.reasoning_content and loop.index0 > ns.asked %}"
    "{{ '<think>\n' ~ m.reasoning_content.strip() ~ '\n</think>\n\n' }}{% endif %}"
    "{{ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The text of earlier turns is changed, so they cannot be located.
SHOUTING = REASONING.replace("text.split('</think>')[-1].lstrip()", "text | upper")

DATED = "{{ 'Today is ' ~ strftime_now('%d %B %Y') ~ '.\n' }}" + CHATML

TRIMMED = CHATML.replace("m.content }}", "m.content | trim }}")

UNENDED = (
    "{% for m in messages %}{{ m.role ~ ':\n' ~ m.content ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


def make_tokenizer(
    template: str | None,
    tokens: tuple[str, ...] = CHATML_TOKENS,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    ends: tuple[str, ...] = (),
    change: Callable[[Tokenizer], None] = lambda backend: None,
) -> TokenizerWrapper:
    """The demo's tokenizer with other special tokens and another template.

    ends: tokens that end a turn, in addition to `eos`.
    change: applied to the `tokenizers` object.
    """
    backend = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in tokens])
    change(backend)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return TokenizerWrapper(tokenizer, eos_token_ids=[backend.token_to_id(t) for t in (eos, *ends)])


def add_bos(bos: str) -> Callable[[Tokenizer], None]:
    """Put `bos` before the text, like the tokenizers of models with a BOS token."""

    def change(backend: Tokenizer) -> None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )

    return change


def trim_offsets(backend: Tokenizer) -> None:
    """Leave spaces out of the offsets of tokens."""
    backend.post_processor = processors.ByteLevel(trim_offsets=True)


def normalize(backend: Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()


TOKENIZERS: dict[str, Callable[[], TokenizerWrapper]] = {
    "chatml": lambda: make_tokenizer(CHATML),
    "headers": lambda: make_tokenizer(
        HEADERS,
        HEADERS_TOKENS,
        eos="<|eos|>",
        bos="<|bos|>",
        ends=("<|eot|>",),
        change=add_bos("<|bos|>"),
    ),
    "inst": lambda: make_tokenizer(INST, INST_TOKENS, "</s>", "<s>", change=add_bos("<s>")),
    "strict": lambda: make_tokenizer(STRICT),
    "reasoning": lambda: make_tokenizer(REASONING, REASONING_TOKENS),
    "thinking": lambda: make_tokenizer(THINKING, REASONING_TOKENS),
    "dated": lambda: make_tokenizer(DATED),
    "trimmed": lambda: make_tokenizer(TRIMMED),
    "offsets": lambda: make_tokenizer(CHATML, change=trim_offsets),
}


# Templates and tokenizers that not every test is for.
OTHERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "none": ((None,), {}),
    "none with bos": ((None, INST_TOKENS, "</s>", "<s>"), {"change": add_bos("<s>")}),
    "empty reasoning": ((EMPTY_REASONING, REASONING_TOKENS), {}),
    "reasoning field": ((REASONING_FIELD, REASONING_TOKENS), {}),
    "unended without line ends": (
        (UNENDED.replace(" ~ '\n' }}{% endfor", " }}{% endfor"),),
        {"change": trim_offsets},
    ),
    "normalized": ((CHATML,), {"change": normalize}),
}


# The trained text of a turn, if it is not the answer and its end token.
TRAINED: dict[str, Callable[[str], str]] = {
    "headers": lambda answer: answer + "<|eot|>",
    "inst": lambda answer: " " + answer + "</s>",
    "trimmed": lambda answer: answer.strip() + "<|im_end|>",
}


def trained_of_turn(name: str, answer: str) -> str:
    return TRAINED.get(name, lambda answer: answer + "<|im_end|>")(answer)


@pytest.fixture(scope="module")
def tokenizers(demo_tokenizer: TokenizerWrapper) -> dict[str, TokenizerWrapper]:
    made = {name: make() for name, make in TOKENIZERS.items()}
    others = {name: make_tokenizer(*given, **more) for name, (given, more) in OTHERS.items()}
    return {**made, **others, "demo": demo_tokenizer}


def chat_row(*contents: str, system: str | None = None, **more: Any) -> Row:
    """A chat with these contents, alternately of the user and of the assistant."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = cycle(["user", "assistant"])
    messages += [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return Row("data.jsonl:7", Chat(messages, **more), 1.0)


def row_of(content: Chat | Pair | Text) -> Row:
    return Row("data.jsonl:7", content, 1.0)


def turns_of(*turns: tuple[str, str]) -> Row:
    """A chat of messages with these roles and contents."""
    return row_of(Chat([{"role": role, "content": content} for role, content in turns]))


def notes_of(tokenizer: Any, row: Row) -> list[str]:
    """What is said about a row."""
    encoder = Encoder(tokenizer)
    encoder.encode(row)
    return encoder.notes.lines()


def spell(tokenizer: Any, encoded: EncodedRow) -> str:
    """The tokens in order, with + before trained tokens and - before others."""
    texts = tokenizer.convert_ids_to_tokens(encoded.tokens.tolist())
    return " ".join("-+"[int(on)] + text for text, on in zip(texts, encoded.trained, strict=True))


def trained_texts(tokenizer: Any, encoded: EncodedRow) -> list[str]:
    """The text of each run of trained tokens."""
    runs = groupby(
        zip(encoded.tokens.tolist(), encoded.trained, strict=True), key=lambda pair: pair[1]
    )
    return [decode(tokenizer, [token for token, _ in run]) for on, run in runs if on]


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


# Each format, token by token, with the demo's tokenizer


def said(*roles: str) -> Row:
    """A chat of turns that all say ok."""
    return row_of(Chat([{"role": role, "content": "ok"} for role in roles]))


SPELLED = {
    "the answer and its end token": (
        chat_row("hi there", "ok"),
        "-<|user|> -hi -Ġthe -re -<|end|> -<|assistant|> +o +k +<|end|>",
    ),
    "no system turn": (
        chat_row("hi", "ok", system="no"),
        "-<|system|> -n -o -<|end|> -<|user|> -hi -<|end|> -<|assistant|> +o +k +<|end|>",
    ),
    "every assistant turn": (
        chat_row("hi", "ok", "re", "no"),
        "-<|user|> -hi -<|end|> -<|assistant|> +o +k +<|end|> "
        "-<|user|> -re -<|end|> -<|assistant|> +n +o +<|end|>",
    ),
    "no turn before first_trained": (
        chat_row("hi", "ok", "re", "no", first_trained=3),
        "-<|user|> -hi -<|end|> -<|assistant|> -o -k -<|end|> "
        "-<|user|> -re -<|end|> -<|assistant|> +n +o +<|end|>",
    ),
    "a question at the end": (
        chat_row("hi", "ok", "re"),
        "-<|user|> -hi -<|end|> -<|assistant|> +o +k +<|end|> -<|user|> -re -<|end|>",
    ),
    "an answer at the beginning": (
        said("assistant", "user"),
        "-<|assistant|> +o +k +<|end|> -<|user|> -o -k -<|end|>",
    ),
    "two consecutive answers": (
        said("user", "assistant", "assistant"),
        "-<|user|> -o -k -<|end|> -<|assistant|> +o +k +<|end|> -<|assistant|> +o +k +<|end|>",
    ),
    "an answer equal to its question": (
        said("user", "assistant", "user", "assistant"),
        "-<|user|> -o -k -<|end|> -<|assistant|> +o +k +<|end|> "
        "-<|user|> -o -k -<|end|> -<|assistant|> +o +k +<|end|>",
    ),
    "a pair is a chat if there is a template": (
        row_of(Pair("hi", "ok")),
        "-<|user|> -hi -<|end|> -<|assistant|> +o +k +<|end|>",
    ),
    "text but its first token": (row_of(Text("hi there")), "-hi +Ġthe +re +<|end|>"),
    "no second end token": (row_of(Text("hi there<|end|>")), "-hi +Ġthe +re +<|end|>"),
    "all tokens of one character": (
        chat_row("é", "😀é"),
        "-<|user|> -Ã -© -<|end|> -<|assistant|> +ð +Ł +ĺ +Ģ +Ã +© +<|end|>",
    ),
    "spaces and newlines of an answer": (
        chat_row("hi", "  ok\n\n  ok \n"),
        "-<|user|> -hi -<|end|> -<|assistant|> +Ġ +Ġ +o +k +Ċ +Ċ +Ġ +Ġ +o +k +Ġ +Ċ +<|end|>",
    ),
}


@pytest.mark.parametrize(("row", "spelled"), SPELLED.values(), ids=SPELLED)
def test_what_is_trained_of_each_format(demo_tokenizer, row, spelled):
    encoded = Encoder(demo_tokenizer).encode(row)
    assert spell(demo_tokenizer, encoded) == spelled
    assert (encoded.tokens.dtype, encoded.trained.dtype) == (np.uint32, np.bool_)


def test_a_tool_call_that_the_template_omits_is_refused():
    row = chat_row("hi", "")
    row.content.messages[1]["tool_calls"] = [{"function": {"name": "f", "arguments": {}}}]
    with pytest.raises(UserError, match=r"messages\[1\]: .* omits tool_calls"):
        Encoder(make_tokenizer(UNENDED, CHATML_TOKENS)).encode(row)


def test_a_message_with_weight_0_is_not_trained(demo_tokenizer):
    row = chat_row("hi", "ok", "re", "no")
    row.content.messages[1]["weight"] = 0
    assert spell(demo_tokenizer, Encoder(demo_tokenizer).encode(row)) == (
        "-<|user|> -hi -<|end|> -<|assistant|> -o -k -<|end|> "
        "-<|user|> -re -<|end|> -<|assistant|> +n +o +<|end|>"
    )
    row.content.messages[3]["weight"] = 0
    with pytest.raises(UserError, match="no token to train"):
        Encoder(demo_tokenizer).encode(row)


def test_an_earlier_answer_that_begins_in_a_token_is_named_with_an_example():
    template = CHATML.replace("assistant\n' }}{% endif", "assistant ' }}{% endif")
    tokenizer = make_tokenizer(template.replace("'\n' ~ m.content", "' ' ~ m.content"))
    row = chat_row("a", "the one", "b", "the two")
    (note,) = notes_of(tokenizer, row)
    assert note.startswith("later answers are trained after other tokens than in generation")
    assert note.endswith("(trained: ' |the', in generation: ' the')")
    row.content.messages[1]["weight"] = 0  # as the note offers
    assert notes_of(tokenizer, row) == []


def test_an_answer_after_other_turns_than_in_generation_is_named_with_an_example():
    tokenizer = make_tokenizer(REASONING_FIELD, REASONING_TOKENS)
    asked = {"role": "user", "content": "a"}
    thought = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    said = {"role": "assistant", "content": "d"}
    encoder = Encoder(tokenizer)
    encoded = encoder.encode(row_of(Chat([asked, thought, said, asked, said])))
    assert trained_texts(tokenizer, encoded) == ["d<|im_end|>"]
    _, note = encoder.notes.lines()
    assert note.startswith("answers whose earlier turns look different in generation are not")
    assert "(trained: 'assistant\\nb<|im_end|>" in note
    assert "in generation: 'assistant\\n<think>\\nc" in note
    encoded = Encoder(tokenizer).encode(row_of(Chat([asked, thought, said])))  # as it offers
    assert trained_texts(tokenizer, encoded)[-1] == "d<|im_end|>"


def test_a_key_of_calls_that_the_template_omits_is_named():
    shown = "{{ call.function.name }}{{ call.function.arguments | tojson }}"
    tokenizer = make_tokenizer(CHATML.replace("{{ call.function | tojson }}", shown))
    call = {"type": "function", "function": {"name": "f", "arguments": {"f": 1}, "mode": "strict"}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert notes_of(tokenizer, row_of(Chat([{"role": "user", "content": "a"}, said]))) == [
        "the key mode of calls is not used: 1 row, the first in data.jsonl:7"
    ]


@pytest.mark.parametrize("shown", [True, False])
def test_the_names_of_speakers_are_named_if_the_template_omits_them(shown):
    template = CHATML.replace("m.role ~", "(m.name or m.role) ~") if shown else CHATML
    asked, said = {"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant"}
    found = notes_of(make_tokenizer(template), row_of(Chat([asked, {**said, "content": "b"}])))
    note = "the key name of messages is not used: 1 row, the first in data.jsonl:7"
    assert found == ([] if shown else [note])


def test_keys_without_effect_are_named_though_the_template_has_such_words():
    """What is rendered says it, not the template's code."""
    mentions = "{% if 0 %}{{ m['image'] }}{{ m.text }}{{ call['result'] }}{% endif %}"
    tokenizer = make_tokenizer(CHATML + mentions)
    function = {"name": "f", "arguments": {}, "mode": "f"}
    calls = [{"type": "function", "function": function, "result": "q"}]
    asked = {"role": "user", "content": "q", "image": "q", "text": "q"}
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    found = notes_of(tokenizer, row_of(Chat([asked, said])))
    assert [note.partition(":")[0] for note in found] == [
        "the key result of calls is not used",
        "the key image of messages is not used",
        "the key text of messages is not used",
    ]


def test_a_key_that_had_an_effect_is_not_rendered_again(monkeypatch):
    encoder = Encoder(make_tokenizer(CHATML.replace("m.role ~", "(m.name or m.role) ~")))
    asked, said = {"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant"}
    row = row_of(Chat([asked, {**said, "content": "b"}]))
    encoder.encode(row)
    rendered, render = [], encoder.template.render
    monkeypatch.setattr(
        encoder.template, "render", lambda *a, **k: rendered.append(a) or render(*a, **k)
    )
    encoder.encode(row)
    assert all("name" in messages[0] for messages, *_ in rendered if messages)


def test_messages_of_roles_that_are_no_role_of_an_answer_are_named():
    encoder = Encoder(make_tokenizer(CHATML))
    turns = [("user", "a"), ("asistente", "b"), ("user", "c"), ("assistant", "d")]
    encoder.encode(turns_of(*turns))
    (note,) = encoder.notes.lines()
    assert note.startswith("messages of the role asistente are shown, and not trained: 1 row")
    with pytest.raises(UserError, match=r"its roles are user, asistente, and that of an answer is"):
        encoder.encode(turns_of(*turns[:3]))


def test_tags_that_the_template_writes_around_a_message_are_there_once():
    tagged = "('<result>\n' ~ m.content ~ '\n</result>' if m.role == 'tool' else m.content)"
    template = CHATML.replace("m.content }}", tagged + " }}")
    tokenizer = make_tokenizer(template)
    result = "<result>\n42\n</result>"
    encoder = Encoder(tokenizer)
    encoded = encoder.encode(
        turns_of(("user", "a"), ("tool", result), ("assistant", "<result>b</result>"))
    )
    text = tokenizer.decode(encoded.tokens.tolist())
    assert text.count("<result>") == 2
    assert result in text
    (note,) = encoder.notes.lines()
    assert note.startswith("messages with <result> around them have it only once: 1 row")


def test_a_prompt_that_is_a_transcript_becomes_messages():
    tokenizer = make_tokenizer(CHATML)
    encoder = Encoder(tokenizer)
    prompt = "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q2\n\nAssistant:"
    encoded = encoder.encode(row_of(Pair(prompt, " a2")))
    chat = Encoder(tokenizer).encode(chat_row("q1", "a1", "q2", "a2"))
    assert encoded.tokens.tolist() == chat.tokens.tolist()
    assert trained_texts(tokenizer, encoded) == ["a2<|im_end|>"]
    question = encoder.encode(row_of(Question(prompt, None)))  # as generation asks
    assert question.tokens.tolist() == encoded.tokens[: len(question.tokens)].tolist()
    transcript, answers = (note.partition(":")[0] for note in encoder.notes.lines())
    assert transcript == "prompts that are transcripts are the messages of a chat"
    assert answers == "answers in a prompt or in history are not trained"


def test_an_answer_that_is_a_call_as_text_is_named():
    tools = [{"type": "function", "function": {"name": "f"}}]
    calls = ('[{"name": "f", "arguments": {}}]', 1), ('{"name": "g"}', 0), ('{"name": ["f"]}', 0)
    for content, count in (*calls, ("f", 0)):
        found = notes_of(make_tokenizer(CHATML), chat_row("a", content, tools=tools))
        assert len(found) == count
        assert all("are trained as text; write tool_calls" in note for note in found)


def test_results_in_another_order_than_their_calls_are_named():
    function = {"name": "f", "arguments": {}}
    calls = [{"id": each, "type": "function", "function": function} for each in ("a1", "b2")]
    asked = {"role": "user", "content": "q"}
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    done = {"role": "assistant", "content": "done"}
    for order, count in (("a1", "b2"), 0), (("b2", "a1"), 1):
        results = [{"role": "tool", "content": at[0], "tool_call_id": at} for at in order]
        found = notes_of(make_tokenizer(CHATML), row_of(Chat([asked, said, *results, done])))
        assert sum("in another order" in note for note in found) == count


def test_prompts_that_the_template_omits_in_part_are_refused_or_named():
    without_tools = make_tokenizer(CHATML.replace("{% if tools %}", "{% if 0 %}"))
    asked, tool = {"role": "user", "content": "q"}, {"name": "f", "description": "finds"}
    (note,) = notes_of(without_tools, row_of(Question(Chat([asked], [whole_tool(tool)]), None)))
    assert "omits the tools of a chat" in note
    only_users = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role == 'user' %}"
    )
    encoder = Encoder(make_tokenizer(only_users))
    with pytest.raises(UserError, match="omits this message of the role system"):
        encoder.encode(row_of(Question(Chat([{"role": "system", "content": "s"}, asked]), None)))


def test_texts_with_tokens_of_the_template_are_named():
    row = row_of(Text("<|im_start|>user\na<|im_end|>"))
    (note,) = notes_of(make_tokenizer(CHATML), row)
    assert note.startswith("texts with tokens of the chat template, such as <|im_")


def test_pairs_that_are_read_ahead_are_noticed_once():
    encoder = Encoder(make_tokenizer(CHATML))
    for row in encoder.ahead(iter([row_of(Pair("q", "a<|im_end|>"))])):
        encoder.encode(row)
    assert encoder.notes.lines() == [
        "answers with <|im_end|> at their end have it only once: 1 row, the first in data.jsonl:7"
    ]


def test_an_empty_answer_is_not_trained_and_named(demo_tokenizer):
    """The model would learn to say nothing at once."""
    encoder = Encoder(demo_tokenizer)
    encoded = encoder.encode(chat_row("hi", "", "re", "ok"))
    assert trained_texts(demo_tokenizer, encoded) == ["ok<|end|>"]
    assert encoder.notes.lines() == [
        "answers without text are not trained: 1 row, the first in data.jsonl:7"
    ]


def test_an_empty_question_is_named(demo_tokenizer):
    assert notes_of(demo_tokenizer, chat_row("", "ok")) == [
        "questions without text are trained as they are: 1 row, the first in data.jsonl:7"
    ]


# --no-mask-prompt


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("demo", chat_row("hi", "ok", "re", "no", system="so").content),
        ("demo", Pair("hi", "ok")),
        ("demo", Text("hi there")),
        ("none", Pair("hi the", "re")),
    ],
    ids=["chat", "pair", "text", "pair without a template"],
)
def test_without_a_mask_all_tokens_except_the_first_are_trained(tokenizers, name, content):
    encoded = Encoder(tokenizers[name], mask_prompt=False).encode(row_of(content))
    assert encoded.trained.tolist() == [False] + [True] * (len(encoded.tokens) - 1)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_mask_does_not_change_the_tokens(tokenizers, name):
    row = chat_row("hi", "ok", "re", "no")
    masked = Encoder(tokenizers[name]).encode(row)
    unmasked = Encoder(tokenizers[name], mask_prompt=False).encode(row)
    np.testing.assert_array_equal(masked.tokens, unmasked.tokens)


# Other templates, token by token


SPELLED_BY_OTHERS = {
    "newlines after turns, not trained": ("chatml", chat_row("hi", "ok", "re", "no"), (
        "-<|im_start|> -us -er -Ċ -hi -<|im_end|> -Ċ "
        "-<|im_start|> -ass -is -t -ant -Ċ +o +k +<|im_end|> -Ċ "
        "-<|im_start|> -us -er -Ċ -re -<|im_end|> -Ċ "
        "-<|im_start|> -ass -is -t -ant -Ċ +n +o +<|im_end|> -Ċ"
    )),
    "one bos token": ("headers", chat_row("hi", "ok"), (
        "-<|bos|> -<|head|> -us -er -<|/head|> -Ċ -Ċ -hi -<|eot|> "
        "-<|head|> -ass -is -t -ant -<|/head|> -Ċ -Ċ +o +k +<|eot|>"
    )),
    "a space before the answer, trained": ("inst", chat_row("hi", "the", "re", "no"), (
        "-<s> -[INST] -Ġ -hi -[/INST] +Ġthe +</s> -[INST] -Ġre -[/INST] +Ġn +o +</s>"
    )),
    "without the reasoning of the generation prompt": ("thinking", chat_row("hi", "no"), (
        "-<|im_start|> -us -er -Ċ -hi -<|im_end|> -Ċ "
        "-<|im_start|> -ass -is -t -ant -Ċ +n +o +<|im_end|> -Ċ"
    )),
    "not the generation prompt": ("thinking", chat_row("hi", "<think>\nb</think>no"), (
        "-<|im_start|> -us -er -Ċ -hi -<|im_end|> -Ċ "
        "-<|im_start|> -ass -is -t -ant -Ċ -<think> -Ċ +b +</think> +n +o +<|im_end|> -Ċ"
    )),
    "a text after the bos token": (
        "headers", row_of(Text("hi there")), "-<|bos|> +hi +Ġthe +re +<|eos|>"
    ),
    "no second bos token": (
        "headers", row_of(Text("<|bos|>hi there")), "-<|bos|> +hi +Ġthe +re +<|eos|>"
    ),
    "a pair without a template": (
        "none", row_of(Pair("hi the", "re")), "-hi -Ġthe +re +<|im_end|>"
    ),
    "one bos token without a template": (
        "none with bos", row_of(Pair("hi", "re")), "-<s> -hi +re +</s>"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "row", "spelled"), SPELLED_BY_OTHERS.values(), ids=SPELLED_BY_OTHERS
)
def test_only_answers_and_their_ends_are_trained_with_other_templates(
    tokenizers, name, row, spelled
):
    assert spell(tokenizers[name], Encoder(tokenizers[name]).encode(row)) == spelled


def test_without_an_end_token_only_the_turn_is_trained():
    tokenizer = make_tokenizer(UNENDED)
    encoded = Encoder(tokenizer).encode(chat_row("hi", "ok", "re", "no"))
    assert [text.rstrip("\n") for text in trained_texts(tokenizer, encoded)] == ["ok", "no"]


# Without surrogates, which are not text, and private use characters, which the encoder uses.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Co")), max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_exactly_the_answers_are_trained_for_any_text(tokenizers, name, turns):
    turns[-1] = (turns[-1][0], turns[-1][1] + "a")  # at least one answer that is not blank
    row = chat_row(*(text for turn in turns for text in turn))
    if name in ("reasoning", "thinking"):  # these remove leading spaces of earlier turns
        expected = [a.lstrip() for _, a in turns[:-1]] + [turns[-1][1]]
    else:
        expected = [answer for _, answer in turns]
    expected = [answer for answer in expected if answer.strip()]
    encoded = Encoder(tokenizers[name]).encode(row)
    assert trained_texts(tokenizers[name], encoded) == [trained_of_turn(name, a) for a in expected]


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"thinking"}))
def test_the_trained_tokens_follow_the_rendered_prompt(tokenizers, name):
    tokenizer, row = tokenizers[name], chat_row("hi", "ok", "re", "no")
    encoder = Encoder(tokenizer)
    encoded = encoder.encode(row)
    given = tokenizer.encode(encoder.prompt_of(row).rendered, add_special_tokens=False)
    assert encoded.tokens[: len(given)].tolist() == given
    assert trained_texts(
        tokenizer, EncodedRow(encoded.tokens[len(given) :], encoded.trained[len(given) :])
    ) == [trained_of_turn(name, "no")]


# Tools


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "the result"},
    {"role": "assistant", "content": "ok"},
]


def test_tools_are_passed_to_the_template(tokenizers):
    encoded = Encoder(tokenizers["chatml"]).encode(row_of(Chat(TOOL_CHAT, tools=TOOLS)))
    text = decode(tokenizers["chatml"], encoded.tokens.tolist())
    assert text.startswith('<|im_start|>system\n[{"type": "function", "function": {"name": "add"')


def test_the_error_names_a_tool_call_that_cannot_be_located(tokenizers):
    """The template drops the turn's reasoning, but the generation prompt begins with it."""
    call_turn = {**TOOL_CHAT[1], "content": "<think>so</think>"}
    row = row_of(Chat([TOOL_CHAT[0], call_turn, *TOOL_CHAT[2:]]))
    with pytest.raises(UserError, match=r"^data\.jsonl:7: messages\[1\]: .* omits its reasoning"):
        Encoder(tokenizers["thinking"]).encode(row)


# Reasoning


def test_an_earlier_answer_whose_reasoning_a_template_drops_is_not_trained(tokenizers):
    """The model would learn to answer without reasoning, which it begins with in generation."""
    row = chat_row("hi", "<think>a</think>ok", "re", "<think>b</think>no")
    encoder = Encoder(tokenizers["reasoning"])
    encoded = encoder.encode(row)
    assert "the reasoning of earlier answers, which are not trained" in encoder.notes.lines()[0]
    assert spell(tokenizers["reasoning"], encoded) == (
        "-<|im_start|> -us -er -Ċ -hi -<|im_end|> -Ċ "
        "-<|im_start|> -ass -is -t -ant -Ċ -o -k -<|im_end|> -Ċ "
        "-<|im_start|> -us -er -Ċ -re -<|im_end|> -Ċ "
        "-<|im_start|> -ass -is -t -ant -Ċ +<think> +b +</think> +n +o +<|im_end|> -Ċ"
    )


def with_reasoning(row: Row, *reasoning: str | None) -> Row:
    """The row with reasoning_content in its answers."""
    answers = [m for m in row.content.messages if m["role"] == "assistant"]
    for message, text in zip(answers, reasoning, strict=True):
        message["reasoning_content"] = text
    return row


CALLED = '{"name": "add", "arguments": {"a": 1}}<|im_end|>'
FOUND = {
    "calls, and not their results": (
        "chatml", row_of(Chat(TOOL_CHAT, tools=TOOLS)), [CALLED, "ok<|im_end|>"]
    ),
    "calls in history that is rewritten": (
        "reasoning", row_of(Chat(TOOL_CHAT)), [CALLED, "ok<|im_end|>"]
    ),
    "calls if the template adds reasoning": (
        "empty reasoning", row_of(Chat(TOOL_CHAT)),
        [CALLED, "<think>\n\n</think>\n\nok<|im_end|>"],
    ),
    "no turn whose reasoning is dropped": (
        "reasoning", chat_row("hi", "<think>a</think>", "re", "no"), ["no<|im_end|>"]
    ),
    # It is found in the text, as that of other turns; so the template is tried.
    "no turn whose reasoning is dropped and found elsewhere": (
        "reasoning", chat_row("ok", "<think>ok</think>ok", "ok", "ok"), ["ok<|im_end|>"]
    ),
    "a field of reasoning where the template shows it": (
        "reasoning field", with_reasoning(chat_row("hi", "ok", "re", "no"), "dropped", " b\n"),
        ["<think>\nb\n</think>\n\nno<|im_end|>"],
    ),
    "spaces missing from the offsets": (
        "offsets", chat_row("hi  hi ", "if so:\n    return  0 "),
        ["if so:\n    return  0 <|im_end|>"],
    ),
    "a trailing space": ("unended without line ends", chat_row("hi\n", "ok "), ["ok "]),
    "an answer shortened by normalization": (
        "normalized", chat_row("e\u0301" * 3, "e\u0301" * 3 + "a"), ["é" * 3 + "a<|im_end|>"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "row", "trained"), FOUND.values(), ids=FOUND)
def test_what_is_trained_is_found_in_what_the_template_made_of_it(tokenizers, name, row, trained):
    assert trained_texts(tokenizers[name], Encoder(tokenizers[name]).encode(row)) == trained


@pytest.mark.parametrize("masked", [True, False])
def test_a_field_of_reasoning_that_the_template_omits_is_refused(demo_tokenizer, masked):
    row = with_reasoning(chat_row("hi", "ok"), "because")
    with pytest.raises(UserError, match=r"messages\[1\]: .* omits its reasoning; remove it"):
        Encoder(demo_tokenizer, mask_prompt=masked).encode(row)
    for nothing in ("", " \n", None):
        Encoder(demo_tokenizer).encode(with_reasoning(chat_row("hi", "ok"), nothing))


def test_a_rewritten_turn_with_a_field_of_reasoning_is_located():
    """Its reasoning is trained, too, or the row is refused."""
    drops = REASONING_FIELD.replace("loop.index0 > ns.asked", "loop.last")
    tokenizer = make_tokenizer(drops, REASONING_TOKENS)
    row = chat_row("hi", "ok")
    row.content.messages.append({"role": "tool", "content": "result"})
    row.content.messages.append({"role": "assistant", "content": "no"})
    with pytest.raises(UserError, match="omits its reasoning"):
        Encoder(tokenizer).encode(with_reasoning(row, "first thought", "second"))


def test_a_turn_that_cannot_be_located_is_only_trained_without_a_mask():
    tokenizer, row = make_tokenizer(SHOUTING, REASONING_TOKENS), chat_row("hi", "ok", "re", "no")
    with pytest.raises(UserError, match=r"^data\.jsonl:7: messages\[1\]: .*--no-mask-prompt"):
        Encoder(tokenizer).encode(row)
    assert Encoder(tokenizer, mask_prompt=False).encode(row).trained[1:].all()


# Dates


def test_the_date_in_templates_is_fixed(tokenizers):
    encoded = Encoder(tokenizers["dated"]).encode(chat_row("hi", "ok"))
    text = decode(tokenizers["dated"], encoded.tokens.tolist())
    assert text.startswith("Today is 26 July 2024.\n<|im_start|>user")


def test_the_date_string_of_templates_is_fixed():
    tokenizer = make_tokenizer("{{ date_string | default('no date') ~ '\n' }}" + CHATML)
    encoded = Encoder(tokenizer).encode(chat_row("hi", "ok"))
    assert decode(tokenizer, encoded.tokens.tolist()).startswith("26 Jul 2024\n")


# Tokenizers with special offsets


def test_truncation_and_padding_of_the_tokenizer_are_turned_off():
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    encoded = Encoder(tokenizer).encode(chat_row("hi", "ok"))
    assert trained_texts(tokenizer, encoded) == ["ok<|im_end|>"]
    assert len(encoded.tokens) == 17


def test_a_tokenizer_without_a_fast_backend_is_refused():
    class Slow:
        eos_token_ids = (0,)

    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Encoder(Slow()).encode(row_of(Text("hi")))


@pytest.mark.parametrize(
    ("spaces", "expected"),
    [
        ("always", "-<|user|> -▁ -h -i -<|end|> -<|assistant|> +▁ +<0xC3> +<0xA9> +<|end|>"),
        ("never", "-<|user|> -h -i -<|end|> -<|assistant|> +<0xC3> +<0xA9> +<|end|>"),
    ],
)
def test_a_sentencepiece_style_tokenizer_is_supported(spaces, expected):
    """This kind puts a space before words and splits unknown characters into bytes."""
    letters = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces)
    backend.add_special_tokens([AddedToken(t) for t in ("<|user|>", "<|assistant|>", "<|end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    wrapped = TokenizerWrapper(tokenizer)
    assert spell(wrapped, Encoder(wrapped).encode(chat_row("hi", "é"))) == expected


# A template that is a function of mlx-lm, which accepts only known options


@pytest.mark.parametrize("template", [None, INST], ids=["alone", "before-a-template"])
def test_a_template_may_be_a_function(template):
    def render(messages, add_generation_prompt=False, tools=None, enable_thinking=False):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n" * add_generation_prompt

    inner = make_tokenizer(template)._tokenizer
    tokenizer = TokenizerWrapper(inner, chat_template=render)
    encoded = Encoder(tokenizer).encode(chat_row("hi", "ok", "re", "no"))
    assert trained_texts(tokenizer, encoded) == ["ok<|im_end|>", "no<|im_end|>"]


# No template


# Rows that cannot be trained

HALF = "a \ud83d b"  # A JSON escape can be half of an emoji. Tokenizers do not accept it.
NOTHING = {
    "no assistant turn": Chat([{"role": "user", "content": "hi"}]),
    "no trained turn": chat_row("hi", "ok", first_trained=2).content,
    "empty answer": chat_row("hi", "").content,
    "blank answer": chat_row("hi", " \n ").content,
    "empty completion": Pair("hi", ""),
    "blank completion": Pair("hi", " \n"),
    "empty text": Text(""),
    "blank text": Text(" \n "),
}
REFUSED = {
    **{name: ("demo", content, "no token to train") for name, content in NOTHING.items()},
    "empty completion without a template": ("none", Pair("hi", ""), "no token to train"),
    "chat without a template": ("none", chat_row("hi", "ok").content, "a chat, but .* no chat tem"),
    "a system turn that the template rejects": (
        "strict",
        chat_row("hi", "ok", system="so").content,
        r"the .*chat template .*\(No system role here\)",
    ),
    "turns that the template rejects": (
        "strict",
        said("user", "user", "assistant").content,
        r"the .*chat template .*\(Roles must alternate\)",
    ),
    **{
        f"half a surrogate pair in a {name}": ("demo", content, "")
        for name, content in (
            ("text", Text(HALF)),
            ("pair", Pair("hi", HALF)),
            ("chat", chat_row("hi", HALF).content),
        )
    },
}


@pytest.mark.parametrize(("name", "content", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_row_that_cannot_be_trained_is_refused_with_its_place(tokenizers, name, content, reason):
    with pytest.raises(UserError, match=rf"^data\.jsonl:7: {reason}"):
        Encoder(tokenizers[name]).encode(row_of(content))


# Prompts for samples


def test_the_prompt_of_a_chat_is_everything_before_the_last_answer(tokenizers):
    prompt = Encoder(tokenizers["chatml"]).prompt_of(chat_row("hi", "ok", "re", "no"))
    assert (prompt.asked, prompt.expected) == ("re", "no")
    assert prompt.rendered == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nre<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_prompt_of_a_pair_without_a_template_is_unchanged():
    prompt = Encoder(make_tokenizer(None)).prompt_of(row_of(Pair("hi", "ok")))
    assert (prompt.asked, prompt.rendered, prompt.expected) == ("hi", "hi", "ok")


@pytest.mark.parametrize(
    "content", [Text("hi"), chat_row("hi", "ok", "re").content], ids=["text", "question-last"]
)
def test_a_row_without_a_question_has_no_prompt(demo_tokenizer, content):
    assert Encoder(demo_tokenizer).prompt_of(row_of(content)) is None


def test_a_chat_with_too_many_turns_is_refused(tokenizers, monkeypatch):
    """Each turn is rendered with all turns before it, so the time grows quadratically."""
    monkeypatch.setattr(answers, "SPANS_SECONDS", 0.1)
    chat = Chat([{"role": role, "content": "a"} for role in ("user", "assistant")] * 5000)
    row = Row("data.jsonl:7", chat, 1.0)
    with pytest.raises(UserError, match=r"^data\.jsonl:7: finding the answers in 10,000 messages"):
        Encoder(tokenizers["chatml"]).encode(row)
    assert len(Encoder(tokenizers["chatml"], mask_prompt=False).encode(row).tokens) > 10_000


def test_token_ids_equals_tokenizer_encode_for_long_texts(demo_tokenizer):
    for text in ("Two words", "Two words " * 5000):
        for special in (True, False):
            expected = demo_tokenizer.encode(text, add_special_tokens=special)
            assert encode.token_ids(demo_tokenizer, text, "a row", special) == expected


@pytest.mark.parametrize("more", [{}, {"system": "be kind"}])
def test_end_tokens_that_answers_have_already_are_there_once(more):
    tokenizer = make_tokenizer(CHATML)
    asked, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a<|im_end|>"}
    for row in (
        {"messages": [asked, said]},
        {"prompt": [asked], "completion": [said]},
        {"prompt": "q", "completion": "a<|im_end|>\n"},
    ):
        encoder = Encoder(tokenizer)
        encoded = encoder.encode(parse_row(row | more, "f.jsonl:1"))
        assert trained_texts(tokenizer, encoded) == ["a<|im_end|>"]
        assert "have it only once" in encoder.notes.lines()[0]
