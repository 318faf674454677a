"""Hostile requests to a live server: what each sends, and which statuses are allowed."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ASKED = [{"role": "user", "content": "Question 1"}]
GOOD = {"messages": ASKED, "max_tokens": 2}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MOST_S = 10.0  # for an answer
LEFT = 0  # instead of a status: the connection was closed without an answer


@dataclass(frozen=True)
class Hostile:
    """A request, as bytes."""

    name: str
    pieces: tuple[bytes, ...]
    """The data to send, with `pause_s` between the pieces."""
    allowed: tuple[int, ...]
    """The allowed statuses of the answer."""
    pause_s: float = 0.0
    ends: bool = False
    """Whether the client closes its sending side after the data."""
    leaves: bool = False
    """Whether the client disconnects without reading the answer."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    seconds: float


def head(method: str = "POST", path: str = CHAT, version: str = "HTTP/1.1", **more: Any) -> bytes:
    """The head of a request. A header that is None is left out; a tuple repeats the header."""
    headers = {"Host": "127.0.0.1", **{name.replace("_", "-"): text for name, text in more.items()}}
    lines = [f"{method} {path} {version}"]
    for name, text in headers.items():
        for each in text if isinstance(text, tuple) else (text,):
            lines += [] if each is None else [f"{name}: {each}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def post(body: Any, path: str = CHAT, **headers: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path=path, **{"Content_Length": len(data), **headers}) + data


def one(name: str, data: bytes, *allowed: int, **more: Any) -> Hostile:
    return Hostile(name, (data,), allowed, **more)


def lengths(rng: random.Random) -> Iterator[Hostile]:
    body = json.dumps(GOOD).encode()
    digits = [digit.encode().decode("latin-1") for digit in "٣²"]
    texts = [
        *("-1", "+700000000", "0x10", "1e3", "5.0", "", "5, 5", "5 5", "1_000", *digits),
        *("9" * 5000, f"-{rng.randrange(10**9)}"),
    ]
    for text in texts:
        yield one(f"length {text[:12]}", head(Content_Length=text) + body, 400)
    large = str(rng.randrange(1 << 25, 1 << 60))
    yield one("length too large", head(Content_Length=large) + body, 413)
    yield one("length twice", head(Content_Length=(len(body), len(body))) + body, 400)
    yield one("lengths that differ", head(Content_Length=(len(body), 3)) + body, 400)
    yield one("no length", head() + body, 411)
    chunked = b"5\r\nhello\r\n" * 2 + b"0\r\n\r\n"
    yield one("chunked", head(Transfer_Encoding="chunked") + chunked, 411)
    both = head(Transfer_Encoding="chunked", Content_Length=len(chunked)) + chunked
    yield one("chunked with a length", both, 400)
    yield one("endless chunks", head(Transfer_Encoding="chunked") + b"1\r\na\r\n" * 300_000, 411)
    yield one("a body that ends early", head(Content_Length=1000) + body, 400, ends=True)
    yield one("a body of 40 MB", head(Content_Length=40_000_000) + b" " * 40_000_000, 413)


def heads(rng: random.Random) -> Iterator[Hostile]:
    body = json.dumps(GOOD).encode()
    many = {f"X_{n}": "a" for n in range(rng.randrange(101, 5000))}
    yield one("thousands of headers", head(**many), 431)
    yield one("a long header", head(X_Long="a" * rng.randrange(9000, 10**6)), 431)
    yield one("headers of 1 MB", head(**{f"X_{n}": "a" * 8000 for n in range(99)}), 431)
    yield one("a long path", head("GET", "/" + "a" * rng.randrange(9000, 10**6)), 414)
    yield one("no end of a line", b"G" * 100_000, 414)
    yield one("HTTP/0.9", b"GET /v1/models\r\n\r\n", 400)
    yield one("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505)
    yield one("HTTP/9.9", head("GET", "/v1/models", "HTTP/9.9"), 505)
    yield one("no HTTP", head("GET", "/v1/models", "FTP/1.1"), 400)
    yield one("bytes", rng.randbytes(2000) + b"\n\r\n", 400, 414)
    yield one("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\r\n", 400)
    yield one("an empty line first", b"\r\n" + head("GET", "/v1/models"), 400)
    for method in ("PUT", "DELETE", "TRACE", "HEAD", "PATCH", "BREW"):
        yield one(method, head(method), 405)
    yield one("CONNECT", head("CONNECT", "evil.example:443"), 400)
    yield one("OPTIONS *", head("OPTIONS", "*"), 400)
    yield one("a lower case method", head("post"), 400)
    yield one("a path that is no ASCII", head("GET", "/v1/modèls"), 400)
    yield one("an absolute path", head("GET", "http://127.0.0.1/v1/models"), 400)
    yield one("a foreign target", head("GET", "http://evil.example/v1/models"), 400)
    yield one("a path with NUL", b"GET /v1/\0models HTTP/1.1\r\nHost: localhost\r\n\r\n", 400)
    yield one("a path with ESC", b"GET /\x1b[2J HTTP/1.1\r\nHost: localhost\r\n\r\n", 400)
    yield one("a way out", head("GET", "/v1/models/../../etc/passwd"), 404)
    yield one("an unknown path", head("GET", "/" + rng.choice(string.ascii_letters)), 404)
    yield one("a POST elsewhere", post(GOOD, "/v1/models"), 404)
    yield one("a lone CR", b"GET /health HTTP/1.1\r\nHost: localhost\rX: y\r\n\r\n", 400)
    yield one("a folded header", b"GET /health HTTP/1.1\r\nHost: localhost\r\n X: y\r\n\r\n", 400)
    yield one("a space in a name", b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400)
    yield one("no colon", b"GET /health HTTP/1.1\r\nHost: localhost\r\nnothing\r\n\r\n", 400)
    yield one("no Host", head("GET", "/health", Host=None), 400)
    yield one("two Hosts", head("GET", "/health", Host=("localhost", "evil.example")), 400)
    yield one("expects miracles", head(Expect="miracles", Content_Length=len(body)) + body, 417)
    yield one("pipelined", post(GOOD) + post(GOOD), 200)
    smuggled = head(Content_Length=0) + head("GET", "/v1/models")
    yield one("a request in a body", smuggled, 400)
    yield one("leaves at once", b"", LEFT, ends=True)
    yield one("leaves in its head", head()[:-20], LEFT, ends=True)


def senders(rng: random.Random) -> Iterator[Hostile]:
    name = "".join(rng.choices(string.ascii_lowercase, k=8))
    for host in (f"{name}.example", "localhost.evil.example", "a b", ""):
        yield one(f"Host {host}", head("GET", "/v1/models", Host=host), 403)
    for origin in (f"http://{name}.example", "http://localhost.evil.example", "null", "*", ""):
        yield one(f"Origin {origin}", post(GOOD, Origin=origin), 403)


def bodies(rng: random.Random) -> Iterator[Hostile]:
    def raw(text: str) -> bytes:
        return json.dumps(GOOD).encode()[:-1] + b", " + text.encode() + b"}"

    deep = rng.randrange(65, 900)
    for name, data in {
        "no JSON": rng.randbytes(rng.randrange(1, 5000)),
        "no UTF-8": b'{"prompt": "\xff\xfe"}',
        "a number": b"1",
        "JSON of 16 MB that is cut": b'{"prompt": "' + b"a" * ((1 << 24) - 100),
        "5,000 digits": raw(f'"seed": {"9" * 5000}'),
        "5,000 digits somewhere": raw(f'"other": [{"9" * 5000}]'),
        "NaN": raw('"temperature": NaN'),
        "1e999": raw('"temperature": 1e999'),
        "20,000 lists": raw(f'"tools": {"[" * 20_000}{"]" * 20_000}'),
        "20,000 objects": raw('"tools": ' + '{"a": ' * 20_000 + "1" + "}" * 20_000),
        f"{deep} lists": raw(f'"other": {"[" * deep}{"]" * deep}'),
        "a million lists": raw(f'"other": [{"[]," * 1_000_000}1]'),
        "three million texts": raw('"other": [' + '"", ' * 3_000_000 + "1]"),
        "a key twice": raw('"max_tokens": 3'),
        "a key twice within": raw('"other": {"a": 1, "a": 2}'),
        "half a character": raw('"user": "\\ud800"'),
        "half a character as a key": raw('"\\udfff": 1'),
    }.items():
        yield one(name, post(data), 400)
    for name, text in {"NUL": "a\0b", "ESC": "\x1b]52;c;aGk=\x07", "bidi": "\u202eabc"}.items():
        yield one(f"{name} in a text", post({**GOOD, "messages": said(text)}), 200)
    yield one("a long prompt", post({"prompt": "a b " * 4_000_000}, COMPLETION), 400)
    yield one("one long word", post({"prompt": "a" * 16_000_000}, COMPLETION), 400)
    yield one("a long chat", post({**GOOD, "messages": said("é" * 2_000_000)}), 400)
    yield one("a prompt of no text", post({"prompt": ["a"]}, COMPLETION), 400)
    yield one("no prompt", post({}, COMPLETION), 400)
    yield one("an empty prompt", post({"prompt": ""}, COMPLETION), 400)


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def fields(rng: random.Random) -> Iterator[Hostile]:
    wrong: list[tuple[str, list[Any]]] = [
        ("model", [3, ["a"], {}, True]),
        ("adapters", [3, ["a"]]),
        ("draft_model", [3, {}]),
        ("max_tokens", ["5", 0, -1, 1.5, 10**30, True, [5]]),
        ("max_completion_tokens", ["5", 0, 10**12, True]),
        ("temperature", ["hot", -1, 10**12, [1], True]),
        ("top_p", ["a", 2, -1]),
        ("top_k", [-1, 1.5, 10**9, "a"]),
        ("min_p", [2, -1, {}]),
        ("seed", [-1, 1.5, 1 << 64, "a", True]),
        ("stop", [3, [3], {"a": 1}, ["a"] * 1000, "a" * 100_000]),
        ("logit_bias", [3, [1], {"a": 1}, {"-1": 1}, {"99999999": 1}, {"٣": 1}, {"1": "x"}]),
        ("logit_bias", [{"1": None}, {"9" * 5000: 1}, {"1": True}]),
        ("logprobs", ["yes", 3]),
        ("top_logprobs", [99, -2, "a", 1.5]),
        ("n", [2, 10**9, "a"]),
        ("stream", ["yes", 1]),
        ("stream_options", [3, ["a"], {"include_usage": "yes"}]),
        ("chat_template_kwargs", [3, ["a"], {"chat_template": "{{ 1 }}"}, {"tokenize": False}]),
        ("chat_template_kwargs", [{"tools": []}, {"conversation": []}, {"return_tensors": "np"}]),
        ("response_format", [3, "json", {}, {"type": 3}]),
        ("tools", [3, {}, ["a"], [{}], [{"function": 3}], [{"function": {"name": 3}}]]),
        ("tool_choice", [3, ["a"], "zzz"]),
        ("role_mapping", [3, ["a"], {"user": 3}]),
        ("repetition_penalty", ["a", -1, True]),
        ("repetition_context_size", [-1, 1.5, 10**30]),
        ("presence_penalty", ["a", 10**30]),
        ("presence_context_size", [10**30]),
        ("frequency_context_size", ["a", -5]),
        ("xtc_probability", ["a", 2]),
        ("xtc_threshold", [0.9, "a"]),
        ("num_draft_tokens", [-1, "a"]),
    ]
    for name, values in wrong:
        yield one(f"{name} {type(v := rng.choice(values)).__name__}", post({**GOOD, name: v}), 400)
    for name in ("model", "adapters", "draft_model"):
        path = rng.choice(["/etc/passwd", "../..", "mlx-community/x", "https://evil.example/m", ""])
        yield one(f"another {name}", post({**GOOD, name: path}), 404)
    call = {"function": {"name": "f", "arguments": "[" * 5000}}
    for name, messages in {
        "no messages": None,
        "messages of text": "hello",
        "null content": said(None),
        "an image": said([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]),
        "an image file": said([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
        "deep arguments": [{"role": "assistant", "content": None, "tool_calls": [call]}],
    }.items():
        yield one(name, post({**GOOD, "messages": messages}), 400)


def manners(rng: random.Random) -> Iterator[Hostile]:
    endless = {"messages": ASKED, "max_tokens": 10**9, "logit_bias": {"1": -100}, "stream": True}
    yield one("leaves a stream", post(endless), LEFT, 200, leaves=True)
    unread = post({**endless, "stream": False})
    yield one("leaves an answer", unread, LEFT, 200, leaves=True)
    cut = head(Content_Length=10**7) + b" " * rng.randrange(10**6)
    yield one("leaves a large body", cut, LEFT, leaves=True)


def slow(rng: random.Random) -> Iterator[Hostile]:
    """Requests that take as long as the server allows."""
    trickle = tuple(bytes([letter]) for letter in head()[:-4] + b"\r\nX-Y: " + b"z" * 100)
    yield Hostile("a head that trickles", trickle, (408,), pause_s=0.2)
    body = (head(Content_Length=10_000), *(b" " for _ in range(100)))
    yield Hostile("a body that trickles", body, (408,), pause_s=0.2)
    yield Hostile("says nothing", (b"",), (408,))
    yield Hostile("a head without an end", (b"GET /health HTTP/1.1\r\nHost: a\r\n",), (408,))
    yield Hostile("waits with its body", (head(Content_Length=10),), (408,))


KINDS: dict[str, Callable[[random.Random], Iterator[Hostile]]] = {
    kind.__name__: kind for kind in (lengths, heads, senders, bodies, fields, manners)
}


def send(port: int, hostile: Hostile) -> Answer:
    """Send a request and read the whole answer."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            for piece in hostile.pieces:
                connection.sendall(piece)
                time.sleep(hostile.pause_s)
            if hostile.ends:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the request was refused early
        data = read_some(connection) if hostile.leaves else read_all(connection)
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", data)
    body = data.partition(b"\r\n\r\n")[2]
    return Answer(int(found[1]) if found else LEFT, body, time.monotonic() - began)


def read_some(connection: socket.socket) -> bytes:
    """Read what arrives immediately."""
    connection.settimeout(0.3)
    try:
        return connection.recv(100)
    except TimeoutError:
        return b""


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def fault(hostile: Hostile, answer: Answer) -> str | None:
    """Say what is wrong with an answer, or None."""
    if answer.status not in hostile.allowed:
        return f"{hostile.name}: {answer.status}, not {hostile.allowed}: {answer.body[:200]!r}"
    if answer.seconds > MOST_S:
        return f"{hostile.name}: took {answer.seconds:.1f} s"
    if answer.status >= 400 and answer.body:
        error = json.loads(answer.body)["error"]
        if not error["message"] or not error["type"] or len(error["message"]) > 2000:
            return f"{hostile.name}: {error}"
    return None


def is_well(port: int) -> bool:
    """Whether the server still answers a good request."""
    answer = send(port, one("good", post(GOOD), 200))
    return answer.status == 200 and b"choices" in answer.body
