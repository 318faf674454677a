"""Go templates made of chat templates, read by a stand-in for Ollama."""

from __future__ import annotations

import jinja2
import pytest

from tests.export.ollama_program import rendered
from your_ai.export import go_template
from your_ai.export.go_template import PLAIN, go_text, shape_of

TURN = "{% for m in messages %}"
END = "{% endfor %}"
ASK = "{% if add_generation_prompt %}"
FIRST_SYSTEM = (
    "{% set s = '' %}{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
)
# Chat templates of the kinds that models have, with the end of a turn.
CHATML = (
    TURN + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}" + END + ASK
    + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
QWEN = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are {{ \"\"\" a"
    "\u00a0model.<|im_end|>\n' }}{% endif %}" + CHATML
)
LLAMA3 = (
    "{{ bos_token }}" + TURN + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'"
    " + m.content|trim + '<|eot_id|>' }}" + END + ASK
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)  # fmt: skip
GEMMA_TURNS = (
    TURN + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'"
    " + (s + '\n\n' if loop.first and s else '') + m.content|trim + '<end_of_turn>\n' }}" + END
    + ASK + "{{ '<start_of_turn>model\n' }}{% endif %}"
)  # fmt: skip
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    + GEMMA_TURNS
)
GEMMA3 = "{{ bos_token }}" + FIRST_SYSTEM + GEMMA_TURNS
MISTRAL = (
    FIRST_SYSTEM + "{{ bos_token }}" + TURN + "{% if m.role == 'user' %}{{ '[INST] '"
    " + (s + '\n\n' if loop.last and s else '') + m.content + '[/INST]' }}{% else %}"
    "{{ ' ' + m.content + eos_token }}{% endif %}" + END
)
LLAMA2 = (
    FIRST_SYSTEM + TURN + "{% if m.role == 'user' %}{{ bos_token + '[INST] '"
    " + ('<<SYS>>\n' + s + '\n<</SYS>>\n\n' if loop.first and s else '') + m.content"
    " + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}" + END
)
PHI3 = (
    TURN + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}" + END + ASK
    + "{{ '<|assistant|>\n' }}{% endif %}"
)  # fmt: skip
PLAINLY = (
    TURN + "{{ {'user': 'Q: ', 'assistant': 'A: ', 'system': ''}[m.role] + m.content + '\n' }}"
    + END + ASK + "A:{% endif %}"
)  # fmt: skip
KNOWN = {
    "chatml": (CHATML, "<|im_end|>", "own"),
    "qwen": (QWEN, "<|im_end|>", "own"),
    "llama3": (LLAMA3, "<|eot_id|>", "own"),
    "gemma2": (GEMMA2, "<end_of_turn>", "none"),
    "gemma3": (GEMMA3, "<end_of_turn>", "first"),
    "mistral": (MISTRAL, "</s>", "last"),
    "llama2": (LLAMA2, "</s>", "first"),
    "phi3": (PHI3, "<|end|>", "own"),
    "plain": (PLAINLY, "<end>", "own"),
}
OTHERS = {
    "numbered turns": TURN + "{{ m.role }}{{ loop.index }}: {{ m.content }}\n" + END,
    "changed contents": TURN + "{{ m.role }}: {{ m.content|upper }}\n" + END,
    "one message": "{{ messages[-1].content }}",
    "repeated": TURN + "{{ m.content }}{{ m.content }}" + END,
    "by length": TURN + "{{ m.role[:1] }}{{ m.content }}{{ '!' if m.content|length < 2 }}" + END,
    "refuses": "{{ raise_exception('no chats') }}",
    "short chats": TURN + "{{ raise_exception('x') if loop.index > 4 }}{{ m.content }}" + END,
}  # fmt: skip


class ChatTokenizer:
    """A tokenizer with a chat template, as transformers runs it."""

    def __init__(self, template: str, end: str = "</s>") -> None:
        self.chat_template = template
        self.bos_token, self.end = "<s>", end
        self.eos_token_ids = {2}

    def decode(self, _: list[int]) -> str:
        return self.end

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):
        def refuse(text):
            raise jinja2.TemplateError(text)

        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        return environment.from_string(self.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token, eos_token=self.end,
        )  # fmt: skip


def chats(has_system: bool):
    """Other chats than those that the shape was compared on."""
    first = [{"role": "system", "content": "Be brief.\n{% x %}"}] if has_system else []
    turns = [
        {"role": "user", "content": "Wie geht's? `a` \\n {"},
        {"role": "assistant", "content": "}} 好 {{- -}}"},
        {"role": "user", "content": '"""'},
        {"role": "assistant", "content": "<|im_end|>"},
        {"role": "user", "content": "last"},
    ]
    return [first + turns[:count] for count in (1, 3, 5)]


@pytest.mark.parametrize("name", KNOWN)
def test_the_go_template_says_the_same_as_the_chat_template(name):
    template, end, place = KNOWN[name]
    tokenizer = ChatTokenizer(template, end)
    shape = shape_of(tokenizer)
    assert shape is not None
    assert shape.system_place == place
    for messages in (*chats(False), *(chats(True) if place != "none" else [])):
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert rendered(shape.go_template, messages) == wanted


def test_a_system_message_that_the_template_refuses_comes_before_the_first_question():
    shape = shape_of(ChatTokenizer(GEMMA2, "<end_of_turn>"))
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = rendered(shape.go_template, asked)
    assert "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n" in text


@pytest.mark.parametrize("name", OTHERS)
def test_a_chat_template_of_another_form_has_no_go_template(name):
    assert shape_of(ChatTokenizer(OTHERS[name])) is None


def test_each_turn_has_its_own_end_in_the_template():
    shape = shape_of(ChatTokenizer(CHATML, "<|im_end|>"))
    assert shape.user == ("<|im_start|>user\n", "<|im_end|>\n")
    assert shape.assistant == ("<|im_start|>assistant\n", "<|im_end|>\n")
    assert shape.generation == "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "text", ['a {{ b }} """ \\ \u00a0\u200d\n', "ends with {", '"""', "plain\n\ttext", "}}", "'"]
)
def test_any_text_can_be_in_a_template(text):
    template = f"{go_text(text)}{{{{ range .Messages }}}}{{{{ .Content }}}}{{{{ end }}}}"
    assert '"""' not in template
    assert go_template.is_kept(template)
    assert rendered(template, [{"role": "user", "content": "x"}]) == f"{text}x"


def test_without_a_chat_template_each_question_begins_a_line():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "R"},
    ]
    assert rendered(PLAIN, messages) == "S\nQA\nR"
