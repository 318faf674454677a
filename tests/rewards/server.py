"""A server on localhost that speaks OpenAI's protocol, with injected faults."""

from __future__ import annotations

import http.server
import json
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

from tests.hub.server import Server

Answer = Callable[["Answerer"], None]


class Answerer(http.server.BaseHTTPRequestHandler):
    judge: JudgeServer
    body: dict[str, Any]

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        self.body = json.loads(self.rfile.read(size))
        with self.judge.lock:
            self.judge.requests.append(self.body)
            self.judge.keys.append(self.headers.get("authorization", ""))
            odd = self.judge.odd.pop(0) if self.judge.odd else self.judge.always
            self.judge.busy += 1
            self.judge.most_busy = max(self.judge.most_busy, self.judge.busy)
        try:
            if self.path != "/v1/chat/completions":
                self.send(404, {"detail": "Not Found"})
            else:
                (odd or Answerer.grade)(self)
        finally:
            with self.judge.lock:
                self.judge.busy -= 1

    def grade(self) -> None:
        self.say(self.judge.reply(self.body))

    def say(self, text: str | None) -> None:
        usage = {"prompt_tokens": 1000, "completion_tokens": 10}
        message = {"role": "assistant", "content": text}
        self.send(200, {"choices": [{"index": 0, "message": message}], "usage": usage})

    def send(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


class JudgeServer:
    """The server.

    odd: what answers the next requests instead, in this order; always: what answers the others.
    reply: the text that answers a request.
    """

    def __init__(self) -> None:
        self.odd: list[Answer] = []
        self.always: Answer | None = None
        self.reply: Callable[[dict], str] = grades(8)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.go_on = threading.Event()  # ends requests that hang
        self.port = 0
        self.start()

    def start(self) -> None:
        own = type("OwnAnswerer", (Answerer,), {"judge": self})
        self.server = Server(("127.0.0.1", self.port), own)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


def grades(value: float | Callable[[dict], float]) -> Callable[[dict], str]:
    """A reply with the same grade for each criterion of the request's schema."""

    def reply(body: dict) -> str:
        names = body["response_format"]["json_schema"]["schema"]["required"]
        return json.dumps(dict.fromkeys(names, value(body) if callable(value) else value))

    return reply


def grade_of(body: dict) -> int:
    """A grade that depends on what is graded: that it is not another one's."""
    return zlib.crc32(body["messages"][1]["content"].encode()) % 11


graded = grades(grade_of)


def status(code: int, message: str = "no", *, code_name: str = "", **headers: str) -> Answer:
    error = {"message": message, "code": code_name or None}
    return lambda answerer: answerer.send(code, {"error": error}, **headers)


def says(text: str | None) -> Answer:
    return lambda answerer: answerer.say(text)


def sends(data: bytes) -> Answer:
    return lambda answerer: answerer.send(200, data)


def hang(answerer: Answerer) -> None:
    """Send the head of a response, and nothing more."""
    answerer.send_response(200)
    answerer.send_header("content-length", "100")
    answerer.end_headers()
    answerer.wfile.flush()
    answerer.judge.go_on.wait(20)


def drip(code: int) -> Answer:
    """Send a byte now and then, so that no single wait is long."""

    def answer(answerer: Answerer) -> None:
        answerer.send_response(code)
        answerer.send_header("content-length", "10000")
        answerer.end_headers()
        while not answerer.judge.go_on.wait(0.02):
            answerer.wfile.write(b" ")
            answerer.wfile.flush()

    return answer


def disconnect(answerer: Answerer) -> None:
    answerer.close_connection = True
    answerer.connection.close()


def slowly(seconds: float) -> Answer:
    def answer(answerer: Answerer) -> None:
        time.sleep(seconds)
        answerer.grade()

    return answer
