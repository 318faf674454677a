from __future__ import annotations

import contextlib
import io
import socket
import time
from email.message import Message

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.serving import wire
from your_ai.serving.wire import Origins, RequestRefused


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost", True),
        ("https://127.0.0.1:443", True),
        ("http://[::1]:8080", True),
        ("http://chat.example", True),
        ("http://chat.example:8080", False),
        ("http://localhost.evil.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("http://localhost@evil.example", False),
        ("http://[::1", False),
        ("http://[::1].evil.example", False),
        ("http://[::1]evil.example", False),
        ("http://localhost.", False),
        ("http://localhost/", False),
        ("http://localhost:99999", False),
        ("http://localhost:", False),
        ("http://user@localhost", False),
        ("http://127.1", False),
        ("http://0x7f.0.0.1", False),
        ("http://2130706433", False),
        ("http://0177.0.0.1", False),
        ("http://[::ffff:127.0.0.1]", False),
        ("http://[::1%25lo]", False),
        ("http://localhost\\@evil.example", False),
        ("http://localhost\n", False),
        ("http://ｌocalhost", False),
        ("file://", False),
        ("http://LOCALHOST:3000", True),
        ("http://127.9.9.9", True),
        ("null", False),
        ("*", False),
        (None, False),
    ],
)
def test_allowed_origins(origin, allowed):
    assert (origin in Origins(("http://chat.example",))) == allowed
    assert origin in Origins(("*",))


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost:8080", True),
        ("127.0.0.1", True),
        ("[::1]:8080", True),
        ("192.168.1.5:8080", True),
        ("host.docker.internal:8080", True),
        ("", False),
        ("[::1].evil.example", False),
        ("mac.local", False),
        ("127.1", False),
        ("a@localhost", False),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
    ],
)
def test_own_host_names(host, own):
    assert wire.is_own(wire.host_of(host)) == own


def test_host_name_of_this_machine_is_its_own(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Mac.local")
    assert wire.is_own(wire.host_of("mac.local:8080"))


def headers(**texts: str) -> Message:
    found = Message()
    for name, text in texts.items():
        found[name.replace("_", "-")] = text
    return found


@given(st.text(max_size=30))
def test_body_length_is_plain_digits_or_refused(text):
    with contextlib.suppress(RequestRefused):
        length = wire.body_length(headers(Content_Length=text))
        assert 0 <= length <= wire.BODY_BYTES
        assert set(text.strip(" \t")) <= set("0123456789")


def test_body_length_statuses():
    assert wire.body_length(headers(Content_Length=" 12 ")) == 12
    for given_headers, status in (
        ({"Content_Length": "-1"}, 400),
        ({"Content_Length": "+5"}, 400),
        ({"Content_Length": "5", "Transfer_Encoding": "chunked"}, 400),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({}, 411),
        ({"Content_Length": str(wire.BODY_BYTES + 1)}, 413),
    ):
        with pytest.raises(RequestRefused) as refused:
            wire.body_length(headers(**given_headers))
        assert refused.value.status == status


@given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda b: b"GET / HTTP/1.0\r\n" + b))
def test_any_bytes_give_a_valid_head_or_are_refused(data):
    with contextlib.suppress(RequestRefused):
        line, rest = wire.read_head(io.BytesIO(data))
        assert (line, rest) == (b"", b"") or wire.REQUEST_LINE.fullmatch(line.strip())
        assert not set(line + rest) & (set(range(32)) - set(b"\r\n\t"))


def test_slow_client_raises_timeout_error():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = io.BufferedReader(wire.TimedReader(ours, 0.2))
        theirs.sendall(b"a")
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            reader.read(10)
        assert time.monotonic() - began < 2


def test_has_left_detects_a_closed_connection():
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(3)
        assert not wire.has_left(ours)
        theirs.sendall(b"a")
        assert not wire.has_left(ours)
        assert ours.recv(1) == b"a"
        theirs.close()
        assert wire.has_left(ours)
        assert ours.gettimeout() == 3


def test_large_bodies_share_one_allowance():
    allowance = wire.Allowance(10)
    with allowance.taken(6):
        with pytest.raises(RequestRefused) as refused, allowance.taken(6):
            pass
        assert refused.value.status == 503
        with allowance.taken(4):
            pass
    with allowance.taken(10):
        pass
