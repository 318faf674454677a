"""A connection to the server: checks its request, and refuses it in OpenAI's error format."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import Any

from mlx_lm.server import APIHandler, CompletionRequest, ResponseGenerator

from your_ai import __version__
from your_ai.errors import UserError, first_line
from your_ai.gates.text import shortened
from your_ai.gates.token_ids import check_ids
from your_ai.serving import admission, wire
from your_ai.serving.wire import LimitedServer, RequestRefused

DEFAULT = "default_model"  # mlx-lm's name for the model if a request names none
COMPLETIONS = ("/v1/completions",)
CHATS = ("/v1/chat/completions", "/chat/completions")


@dataclass
class Asked(CompletionRequest):
    """A request, and the connection it came from."""

    connection: socket.socket


class Answering(ResponseGenerator):
    """The answer generator that connections use."""

    model_provider: Any

    def room(self, request: CompletionRequest, given: dict[str, Any], wanted: int) -> int:
        """Maximum tokens of an answer, at most `wanted`. Raises RequestRefused if none fit.

        given: additional arguments for the chat template.
        """
        most = self.model_provider.context
        try:
            provider = self.model_provider
            ids = admission.prompt_ids(provider.tokenizer, request, given, most)
            check_ids(ids, provider.tokens, provider.tokenizer, "the prompt")
        except (ValueError, UserError) as error:
            raise RequestRefused(400, shortened(first_line(error))) from error
        except Exception as error:  # templates and tokenizers may raise anything
            reason = shortened(first_line(error))
            raise RequestRefused(400, f"the prompt cannot be read ({reason})") from error
        return wanted if most is None else min(wanted, most - len(ids))


class Handler(APIHandler):
    """mlx-lm's handler, for checked requests; one request per connection."""

    response_generator: Answering
    server: LimitedServer
    server_version = f"your_ai/{__version__}"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(wire.TimedReader(self.connection, wire.REQUEST_S))
        self.command, self.path, self.requestline = "", "", ""
        self.request_version, self.headers = "HTTP/1.0", Message()
        self.has_answered = self.is_read = False

    def handle(self) -> None:
        try:
            self.handle_one_request()
        except RequestRefused as refused:
            self.refuse(refused.status, refused.message)
        except TimeoutError:
            self.refuse(408, f"the request took more than {wire.REQUEST_S:.0f} s")

    def handle_one_request(self) -> None:
        """Answer. Raises RequestRefused if it is not allowed, TimeoutError for a slow client."""
        self.raw_requestline, head = wire.read_head(self.rfile)
        if not head:
            return
        rest, self.rfile = self.rfile, io.BytesIO(head)
        if not self.parse_request():
            return
        self.rfile = rest
        self.check_sender()
        answer: dict[str, Callable[[], object]]
        answer = {"GET": self.do_GET, "POST": self.do_POST, "OPTIONS": self.do_OPTIONS}
        if self.command not in answer:
            raise RequestRefused(405, f"{self.command} is not allowed; use GET or POST")
        answer[self.command]()
        self.wfile.flush()

    def check_sender(self) -> None:
        """Raise RequestRefused for a forbidden web page, or a host name of another machine."""
        origin = self.headers.get("Origin")
        if origin is not None and origin not in self.response_generator.cli_args.allowed_origins:
            raise RequestRefused(403, f"pages from {shortened(origin)} may not use this server")
        host = self.headers.get("Host")
        if host is not None and self.server.is_local and not wire.is_own(wire.host_of(host)):
            raise RequestRefused(403, f"{shortened(host)} is not a name of this machine")
        if self.headers.get("Expect", "100-continue").lower() != "100-continue":
            raise RequestRefused(417, "the server only supports Expect: 100-continue")

    def do_GET(self) -> None:
        if self.path != "/health" and self.path.split("?")[0].split("/")[1:3] != ["v1", "models"]:
            self.refuse_path()
        APIHandler.do_GET(self)

    def do_POST(self) -> None:
        if self.path not in (*COMPLETIONS, *CHATS):
            self.refuse_path()
        length = wire.body_length(self.headers)
        with self.server.bodies.taken(length):
            data = wire.read_body(self.rfile, length)
            self.is_read = True
            self.connection.settimeout(wire.ANSWER_S)
            try:
                body = admission.parse(data)
                vocabulary = self.response_generator.model_provider.vocabulary
                admission.check(body, vocabulary, self.path in CHATS)
            except ValueError as error:
                raise RequestRefused(400, shortened(first_line(error))) from error
            checked = json.dumps(body).encode()  # mlx-lm reads only what was checked
            self.headers.replace_header("Content-Length", str(len(checked)))
            self.rfile = io.BytesIO(checked)
            APIHandler.do_POST(self)

    def refuse_path(self) -> None:
        raise RequestRefused(404, f"there is nothing at {shortened(self.path)}")

    def validate_model_parameters(self) -> None:
        try:
            super().validate_model_parameters()
        except ValueError as error:
            raise RequestRefused(400, shortened(first_line(error))) from error
        if not (self.stream_options or {}).get("include_usage"):
            self.stream_options = None  # mlx-lm requires that key in stream_options

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        name = self.response_generator.model_provider.name
        if self.requested_model not in (name, DEFAULT):
            asked = shortened(self.requested_model)
            raise RequestRefused(404, f"no model {asked} here; this server has {name}")
        if self.adapter is not None or self.requested_draft_model != DEFAULT:
            raise RequestRefused(
                404, f"this server only has {name}, and no other adapters or draft models"
            )
        given = self.chat_template_kwargs or {}
        assert self.max_tokens is not None
        self.max_tokens = self.response_generator.room(request, given, self.max_tokens)
        super().handle_completion(Asked(**vars(request), connection=self.connection), stop_words)

    def handle_models_request(self) -> None:
        name = self.response_generator.model_provider.name
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "your_ai"}
        asked = self.path.split("?")[0].removeprefix("/v1/models").strip("/")
        if not asked:
            self.send_json(200, {"object": "list", "data": [model]})
        elif asked == name:
            self.send_json(200, model)
        else:
            raise RequestRefused(404, f"no model {shortened(asked)} here; this server has {name}")

    def refuse(self, status: int, message: str) -> None:
        """Send an error in OpenAI's format, so that clients show it; not after an answer."""
        if self.has_answered:
            return
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.connection.settimeout(wire.ANSWER_S)
        self.send_json(status, {"error": {"message": message, "type": kind}})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse in the same format what Python's handler refuses by itself."""
        self.refuse(code, message or "the request cannot be read")

    def send_response(self, code: int, message: str | None = None) -> None:
        self.has_answered = True
        super().send_response(code, message)

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        if not self.is_read:
            wire.linger(self.connection)

    def send_json(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        origin = self.headers.get("Origin")
        if origin is not None and origin in self.response_generator.cli_args.allowed_origins:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")
        if status == 405:
            self.send_header("Allow", "GET, POST, OPTIONS")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logging.info(format, *args)
