"""Untrusted chat templates."""

from __future__ import annotations

import resource
import signal
import threading
import time

import pytest

from tests.conftest import DEMO_FOLDER
from your_ai.data import template
from your_ai.data.template import TemplateRefused, render
from your_ai.errors import UserError
from your_ai.nets.tokenizer import open_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]
ROOM = 1_200_000_000


@pytest.fixture
def error_of(monkeypatch):
    """A function that renders a template and returns the error."""
    tokenizer = open_tokenizer(DEMO_FOLDER)

    def fail(text: str, seconds: float = 20.0, **options) -> str:
        monkeypatch.setattr(template, "SECONDS", seconds)
        with pytest.raises(UserError, match=r"^rows:3: ") as caught:
            render(tokenizer, MESSAGES, "rows:3", ROOM, chat_template=text, **options)
        assert len(str(caught.value)) < 500
        return str(caught.value)

    return fail


LOOPS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "a power, when it is compiled": "{{ 9**(9**9) }}",
    "a power, when it runs": "{% set n = 9 %}{{ n**(n**n) }}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_endless_template_is_stopped(error_of, name):
    began = time.monotonic()
    assert "takes more than 0.3 s" in error_of(LOOPS[name], 0.3)
    assert time.monotonic() - began < 5


BOMBS = {
    "a product": "{{ 'a' * 10**10 }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
}


@pytest.mark.skipif("sys.platform != 'linux'", reason="macOS does not limit address space")
@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_uses_too_much_memory_is_stopped(error_of, name):
    assert "takes more than 1,200 MB" in error_of(BOMBS[name])


def test_an_error_of_a_template_is_one_short_line(error_of):
    text = error_of("{{ raise_exception('no\n' ~ 'x' * 9999) }}")
    assert "rejects the messages (no xxx" in text
    assert "\n" not in text
    for other in ("{% if %}", "{{ messages[9].content.x.y }}", "{{ ''.__class__.__mro__ }}",
                  "{% for i in range(10**9) %}{% endfor %}", "{{ " + "(" * 5000 + " }}",
                  "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"):  # fmt: skip
        assert "rejects the messages" in error_of(other)


def test_a_template_that_is_too_long_is_refused(error_of):
    assert "1,000,002 characters" in error_of("{##}" + "x" * 999_998)


def test_a_text_that_is_too_long_is_refused(error_of):
    error = error_of("{{ 'a' * 5000 }}", most_characters=4999)
    assert "renders 5,000 characters" in error


def test_limits_and_timers_are_restored(monkeypatch):
    tokenizer = open_tokenizer(DEMO_FOLDER)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    others, _ = signal.setitimer(signal.ITIMER_REAL, 100)  # such as the timer of a test runner
    try:
        assert "Hi" in render(tokenizer, MESSAGES, "rows:3", ROOM)
        with pytest.raises(TemplateRefused):
            render(tokenizer, MESSAGES, "rows:3", ROOM, chat_template="{{ raise_exception('x') }}")
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
    finally:
        signal.setitimer(signal.ITIMER_REAL, others)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before


def test_rendering_works_in_another_thread():
    tokenizer = open_tokenizer(DEMO_FOLDER)
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(render(tokenizer, MESSAGES, "rows:3", ROOM))
    )
    thread.start()
    thread.join()
    assert "Hi" in found[0]
