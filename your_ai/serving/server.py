"""A run behind mlx-lm's own server, which speaks OpenAI's protocol.

Ours differs in what it lets in. It has the run's model, loaded before it listens to anyone, and
loads no other, nor an adapter or an image, whatever a request names; it tells of no model but
that one; and web pages of other hosts cannot use it.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import ipaddress
import json
import logging
import shlex
import socket
import socketserver
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    ModelDescription,
    ModelProvider,
    ResponseGenerator,
)

from your_ai import __version__
from your_ai.errors import RunError, UserError
from your_ai.generate import Sampling, context_tokens, for_terminal, load_run
from your_ai.memory.estimate import PREFILL_TOKENS
from your_ai.serving.admission import check_body, prompt_of
from your_ai.trained import Trained

DEFAULT = "default_model"  # what mlx-lm calls the one of a request that names none
CACHE_ENTRIES = 10  # conversations whose keys and values are kept,
CACHE_BYTES = 1 << 30  # and most of it all together
POLL_S = 0.2
GRACE_S = 2.0  # for answers in flight, when the server stops
BODY_BYTES = 1 << 24  # most of a request: text alone
LOCAL_NAMES = ("localhost",)
LOCAL_ENDINGS = (".localhost", ".local", ".internal")  # which nobody can register


@dataclass(frozen=True)
class Origins:
    """The web pages that may use the server: those of this machine, and those named.

    A container, as mlx-lm's handler asks it. `*` names every page.
    """

    named: tuple[str, ...] = ()

    def __contains__(self, origin: object) -> bool:
        named = "*" in self.named or origin in self.named
        return named or (isinstance(origin, str) and is_loopback(host_of(origin)))


def host_of(url: str) -> str:
    """The host in `http://host:port`, or in `host:port`; "" where there is none."""
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine alone."""
    address = address_of(host)
    return host in LOCAL_NAMES if address is None else address.is_loopback


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_own(host: str) -> bool:
    """Whether a request to `host` meant this machine: no name that others can give it.

    Else a page could have its own name resolve to 127.0.0.1, and read what it is answered.
    """
    named = not host or is_loopback(host) or host.endswith(LOCAL_ENDINGS)
    return named or address_of(host) is not None


def options(sampling: Sampling, origins: Origins) -> Namespace:
    """What mlx-lm's server has of its command line; what is not ours to choose as it has it."""
    return Namespace(
        model=None,
        adapter_path=None,
        draft_model=None,
        num_draft_tokens=3,
        trust_remote_code=False,
        chat_template="",
        use_default_chat_template=False,
        chat_template_args={},
        temp=sampling.temperature,
        top_p=sampling.top_p,
        top_k=0,
        min_p=0.0,
        max_tokens=sampling.max_tokens,
        decode_concurrency=32,
        prompt_concurrency=8,
        prefill_step_size=PREFILL_TOKENS,
        prompt_cache_size=CACHE_ENTRIES,
        prompt_cache_bytes=CACHE_BYTES,
        kv_bits=None,
        kv_group_size=64,
        quantized_kv_start=0,
        pipeline=False,
        allowed_origins=origins,
    )


class RunProvider(ModelProvider):
    """Has one model, and loads no other."""

    def __init__(self, trained: Trained, arguments: Namespace) -> None:
        super().__init__(arguments)
        self.name = trained.folder.name
        self.model_key = (self.name, None, None)
        self.model, self.tokenizer = load_run(trained)
        mx.eval(self.model.parameters())  # here: a lazy array belongs to the thread that made it
        self.is_batchable = all(hasattr(c, "merge") for c in make_prompt_cache(self.model))
        self.vocabulary = self.model(mx.zeros((1, 1), mx.int32)).shape[-1]
        self.context = context_tokens(trained.base)

    def load_default(self) -> None:
        pass

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[Any, Any]:
        return self.model, self.tokenizer


class Answers(ResponseGenerator):
    """Answers from the one model, whatever name it was asked by, so that requests share a batch."""

    model_provider: RunProvider

    def __init__(self, provider: RunProvider) -> None:
        self.is_stopping = False
        super().__init__(provider, LRUPromptCache(CACHE_ENTRIES, CACHE_BYTES))  # starts a thread

    def generate(
        self,
        request: CompletionRequest,
        generation_args: GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[GenerationContext, Iterator[Any]]:
        one = ModelDescription(model=DEFAULT, draft=DEFAULT, adapter=None)
        most = self.room(request, generation_args)
        context, responses = super().generate(
            request,
            dataclasses.replace(generation_args, model=one, max_tokens=most),
            progress_callback,
        )
        return context, self.until_stopped(context, responses)

    def room(self, request: CompletionRequest, arguments: GenerationArguments) -> int:
        """The most tokens of an answer. Raises ValueError for a prompt that leaves none."""
        tokens = len(prompt_of(self.model_provider.tokenizer, request, arguments))
        most = self.model_provider.context
        if not tokens:
            raise ValueError("the prompt has no tokens")
        if most is None:
            return arguments.max_tokens
        if tokens >= most:
            raise ValueError(f"the prompt has {tokens} tokens; the model takes {most}")
        return min(arguments.max_tokens, most - tokens)

    def until_stopped(self, context: GenerationContext, responses: Iterator[Any]) -> Iterator[Any]:
        for response in responses:
            if self.is_stopping:
                context.stop()
            yield response


class Handler(APIHandler):
    """mlx-lm's, for the requests that may be answered."""

    response_generator: Answers
    server: Server
    server_version = f"your_ai/{__version__}"

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        origin = self.headers.get("Origin")
        allowed = self.response_generator.cli_args.allowed_origins
        if origin is not None and origin not in allowed:
            self.refuse(403, f"pages of {origin} may not use this server")
            return False
        host = self.headers.get("Host", "")
        if self.server.is_local and not is_own(host_of(host)):
            self.refuse(403, f"{host} is not a name of this machine")
            return False
        return True

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if size.isdecimal() and int(size) > BODY_BYTES:
            self.refuse(413, f"a request may have {BODY_BYTES} bytes")
            return
        try:
            super().do_POST()
        except (UnicodeDecodeError, RecursionError):  # of its body, which is read first
            self.refuse(400, "the request is no JSON that can be read")

    def validate_model_parameters(self) -> None:
        check_body(self.body, self.response_generator.model_provider.vocabulary)
        super().validate_model_parameters()
        if not (self.stream_options or {}).get("include_usage"):
            self.stream_options = None  # mlx-lm needs that key, where there are any

    def handle_chat_completions(self) -> CompletionRequest:
        """mlx-lm would fetch the images that a request names."""
        messages = self.body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                if not isinstance(part, dict) or part.get("type") != "text":
                    raise ValueError("content: this model takes text alone")
        return super().handle_chat_completions()

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        name = self.response_generator.model_provider.name
        if self.requested_model not in (name, DEFAULT):
            self.refuse(404, f"no model {self.requested_model} here; this server has {name}")
        elif self.adapter is not None or self.requested_draft_model != DEFAULT:
            self.refuse(404, f"this server has {name} alone, no other adapters or draft models")
        else:
            super().handle_completion(request, stop_words)

    def handle_models_request(self) -> None:
        name = self.response_generator.model_provider.name
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "your_ai"}
        asked = self.path.split("?")[0].removeprefix("/v1/models").strip("/")
        if not asked:
            self.send_json(200, {"object": "list", "data": [model]})
        elif asked == name:
            self.send_json(200, model)
        else:
            self.refuse(404, f"no model {asked} here; this server has {name}")

    def refuse(self, status: int, message: str) -> None:
        """In OpenAI's form, so that its clients show the message."""
        kind = {"message": message, "type": "invalid_request_error"}
        self.send_json(status, {"error": kind})

    def send_json(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        origin = self.headers.get("Origin")
        if origin is not None and origin in self.response_generator.cli_args.allowed_origins:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logging.info(format, *args)


class Server(ThreadingHTTPServer):
    """Listens from the start; answers once it is given `answers`."""

    answers: Answers

    def __init__(self, host: str, port: int) -> None:
        self.is_local = is_loopback(host)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """As HTTPServer has it, without a look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def finish_request(self, request: Any, client_address: Any) -> None:
        handler = functools.partial(Handler, system_fingerprint=f"your_ai-{__version__}")
        handler(self.answers, request, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.debug("a request failed, or its client left", exc_info=True)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        named = str(host)
        return f"http://{f'[{named}]' if ':' in named else named}:{port}"


def listen(host: str, port: int) -> Server:
    """Raises UserError where the address cannot be had."""
    try:
        return Server(host, port)
    except socket.gaierror as error:
        raise UserError(f"--host {host}: no such address ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: is in use; give another, or 0 for any") from error
        raise UserError(f"--host {host} --port {port}: {error.strerror}") from error


def serve(server: Server, answers: Answers, received: Sequence[int]) -> bool:
    """Answer until there is a signal in `received`, and then end the answers in flight.

    Returns whether every thread but this has ended; a second signal does not wait for them.
    Raises RunError where generation fails for good, as it does when memory runs out.
    """
    server.answers = answers
    accepting = threading.Thread(target=server.serve_forever, daemon=True)
    accepting.start()
    while not received and answers.is_healthy:
        time.sleep(POLL_S)
    failed = not received
    server.shutdown()
    server.server_close()
    answers.is_stopping = True
    threading.Thread(target=answers.stop_and_join, daemon=True).start()
    deadline = time.monotonic() + GRACE_S
    while threading.active_count() > 1 and len(received) < 2 and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if failed:
        raise RunError("the server cannot go on: its model failed, as logged above")
    return threading.active_count() == 1


def example(url: str, name: str) -> str:
    """A line for a shell that asks the server something."""
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
    header = "-H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions {header} -d {shlex.quote(json.dumps(body))}"


class LogLines(logging.Formatter):
    """Without what would steer a terminal, since requests are others' text.

    And without tracebacks, but for who asked for all there is.
    """

    def format(self, record: logging.LogRecord) -> str:
        if not logging.getLogger().isEnabledFor(logging.DEBUG):
            record.exc_info = record.exc_text = None
        return for_terminal(super().format(record))
