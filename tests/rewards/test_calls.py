from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rewards import server as faults
from tests.rewards.server import JudgeServer
from your_ai.errors import UserError
from your_ai.rewards.calls import (
    REPLY_BYTES,
    CallError,
    ChatClient,
    ChatReply,
    reply_in,
    retry_after,
)

ASKED = [{"role": "user", "content": "Grade it."}]
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"required": ["a"]}}}


@pytest.fixture
def client(server):
    client = ChatClient("fake", server.url, timeout_s=2.0)
    yield client
    client.close()


def failed(client: ChatClient, server: JudgeServer, fault) -> CallError:
    server.odd = [fault]
    with pytest.raises(CallError) as error:
        client.ask(ASKED, FORMAT)
    return error.value


def test_a_call_sends_the_question_and_returns_text_and_tokens(client, server):
    server.odd = [faults.says("hello")]
    assert client.ask(ASKED, FORMAT) == ChatReply("hello", 1000, 10)
    [request] = server.requests
    assert request == {
        "model": "fake", "messages": ASKED, "temperature": 0, "response_format": FORMAT,
    }  # fmt: skip
    assert server.keys == ["Bearer none"]


def test_the_key_of_the_environment_is_sent(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " abc\n")
    client = ChatClient("fake", server.url, timeout_s=2.0)
    client.ask(ASKED, FORMAT)
    assert server.keys == ["Bearer abc"]
    client.close()


def test_the_url_of_the_environment_is_used(server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    client = ChatClient("fake", None, timeout_s=2.0)
    client.ask(ASKED, FORMAT)
    assert (client.url, len(server.requests)) == (server.url, 1)
    client.close()


@pytest.mark.parametrize(
    ("code", "is_transient"),
    [(400, False), (401, False), (403, False), (404, False), (422, False), (408, True),
     (409, True), (429, True), (500, True), (502, True), (503, True), (529, True)],
)  # fmt: skip
def test_statuses_that_may_pass_are_told_from_others(client, server, code, is_transient):
    error = failed(client, server, faults.status(code, "why\x1b[2J\nnot"))
    assert (error.status, error.is_transient) == (code, is_transient)
    assert str(error) == f"HTTP {code}: why␛[2J␊not"
    assert len(server.requests) == 1


def test_a_redirect_to_nowhere_is_an_error(client, server):
    error = failed(client, server, lambda answerer: answerer.send(302, b""))
    assert (str(error), error.is_transient) == ("HTTP 302", False)


def test_a_quota_that_is_used_up_does_not_pass(client, server):
    error = failed(client, server, faults.status(429, code_name="insufficient_quota"))
    assert not error.is_transient


@pytest.mark.parametrize("name", ["temperature", "response_format"])
def test_a_parameter_that_the_server_refuses_is_left_out_from_then_on(client, server, name):
    server.odd = [faults.status(400, f"Unsupported value: '{name}'"), *[faults.says("x")] * 2]
    client.ask(ASKED, FORMAT)
    client.ask(ASKED, FORMAT)
    assert [name in request for request in server.requests] == [True, False, False]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.sends(b"<html>"), "its response is not a chat completion"),
        (faults.sends(b""), "its response is not a chat completion"),
        (faults.sends(b'{"choices": []}'), "its response is not a chat completion"),
        (faults.sends(b" " * (REPLY_BYTES + 1)), "its response is too long"),
        (lambda answerer: answerer.send(503, b"<html>"), "HTTP 503"),
        (lambda answerer: answerer.send(503, b"x" * (REPLY_BYTES + 1)), "its response is too long"),
        (faults.disconnect, "no connection"),
    ],
)
def test_garbage_and_cuts_may_pass(client, server, fault, message):
    error = failed(client, server, fault)
    assert error.is_transient
    assert str(error).startswith(message)


@pytest.mark.parametrize("fault", [faults.hang, faults.drip(200), faults.drip(500)])
def test_a_reply_that_does_not_come_or_never_ends_is_given_up(server, fault):
    client = ChatClient("fake", server.url, timeout_s=0.15)
    error = failed(client, server, fault)
    assert (str(error), error.is_transient) == ("no reply within 0.15 s, --judge-timeout-s", True)
    server.go_on.set()
    client.close()


def test_a_server_that_is_not_there_may_come(server):
    server.stop()
    client = ChatClient("fake", server.url, timeout_s=2.0)
    with pytest.raises(CallError, match=r"^no connection .*refused") as error:
        client.ask(ASKED, FORMAT)
    assert error.value.is_transient
    assert error.value.status is None
    client.close()
    server.start()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None), ("3", 3), ("0.5", 0.5), ("-3", 0), ("nan", None), ("inf", None),
        ("soon", None), ("", None),
        ("Thu, 01 Jan 2026 00:00:10 GMT", 10), ("Thu, 01 Jan 2026 00:00:00 GMT", 0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0),
    ],
)  # fmt: skip
def test_retry_after_has_seconds_or_a_date(text, seconds):
    assert retry_after(text, 1767225600) == seconds


@given(st.text())
def test_any_retry_after_is_seconds_or_none(text):
    found = retry_after(text, 0)
    assert found is None or 0 <= found < float("inf")


@given(st.binary() | st.sampled_from([b'{"choices":[{"message":{"content":3}}]}', b"[]", b"null"]))
def test_any_body_is_a_reply_or_an_error(data):
    try:
        found = reply_in(data)
    except CallError:
        return
    assert found == ChatReply("", 0, 0)


@pytest.mark.parametrize(
    "url", ["localhost:8080/v1", "ftp://host/v1", "http://", "http://h:99999/", "http://a b/", "x"]
)
def test_what_is_not_a_url_is_an_error(server, url):
    with pytest.raises(UserError, match=r"^--judge-url .*: is not a URL"):
        ChatClient("fake", url, timeout_s=1.0)


def test_openai_without_a_key_is_an_error_that_says_what_to_set(server, monkeypatch):
    with pytest.raises(UserError, match=r"OPENAI_API_KEY is not set; set it, or give --judge-url"):
        ChatClient("fake", None, timeout_s=1.0)
    monkeypatch.setenv("OPENAI_API_KEY", "a\nb")
    with pytest.raises(UserError, match=r"OPENAI_API_KEY has characters"):
        ChatClient("fake", None, timeout_s=1.0)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"needs the package openai; in the checkout of your_ai, run: pip install '.\[judge",
    ):
        ChatClient("fake", "http://localhost:1/v1", timeout_s=1.0)
