"""Serves a run over the OpenAI API, with mlx-lm's server behind the gate of `web`.

This server accepts less than mlx-lm's. It has only the run's model, which is loaded before the
first request. Whatever a request names, it loads no other model, adapter or image, and it lists no
other model. Web pages from other hosts cannot use it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import io
import json
import logging
import secrets
import shlex
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from anyio import from_thread, to_thread
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    ModelProvider,
    ResponseGenerator,
)
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from your_ai import __version__
from your_ai.data.sampled_chat import read_calls
from your_ai.errors import RunError, UserError, first_line
from your_ai.gates.text import printable, shortened
from your_ai.gates.token_ids import check_ids, vocabulary_of
from your_ai.generation.generate import Sampling, context_tokens, load_run
from your_ai.memory.sizes import PREFILL_TOKENS
from your_ai.nets.saved_adapter import Trained
from your_ai.serving import admission, web
from your_ai.serving.web import Gate, Origins, RequestHead, RequestRefused, WebServer

DEFAULT = "default_model"  # mlx-lm's name for the model if a request names none
COMPLETIONS = "/v1/completions"
CHATS = ("/v1/chat/completions", "/chat/completions")
LOG_CHARACTERS = 4000  # of a log entry
CACHE_ENTRIES = 10  # conversations whose KV caches are kept
CACHE_BYTES = 1 << 30  # maximum of all KV caches that are kept
POLL_S = 0.2
GRACE_S = 2.0  # for answers in progress, when the server stops


def options(sampling: Sampling, origins: Origins) -> Namespace:
    """Return the options of mlx-lm's server; options without a choice have its defaults."""
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
    """Provides one model, and loads no other."""

    model_key: Any  # None in mlx-lm until it loads a model
    model: Any

    def __init__(self, trained: Trained, arguments: Namespace) -> None:
        super().__init__(arguments)
        self.name = trained.folder.name
        self.model_key = (self.name, None, None)
        self.model, self.tokenizer = load_run(trained)
        mx.eval(self.model.parameters())  # in this thread, to which lazy arrays belong
        self.is_batchable = all(hasattr(c, "merge") for c in make_prompt_cache(self.model))
        self.vocabulary = self.model(mx.zeros((1, 1), mx.int32)).shape[-1]
        self.tokens = vocabulary_of(self.model)
        self.context = context_tokens(trained.base)

    def load_default(self) -> None:
        pass

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[Any, Any]:
        return self.model, self.tokenizer


@dataclass
class Asked(CompletionRequest):
    """A request, and what its handler and its answer share."""

    left: threading.Event
    """Set when its client has left."""
    unread: list[str]
    """Calls in the answer that cannot be read, and that the text does not have yet."""


class Answers(ResponseGenerator):
    """Generates with the one model, whatever name a request gives, so that requests are batched."""

    model_provider: RunProvider

    def __init__(self, provider: RunProvider) -> None:
        self.is_stopping = False
        super().__init__(provider, LRUPromptCache(CACHE_ENTRIES, CACHE_BYTES))  # starts a thread

    def room(self, request: CompletionRequest, given: dict[str, Any], wanted: int) -> int:
        """Maximum tokens of an answer, at most `wanted`. Raises RequestRefused if none fit.

        given: additional arguments for the chat template.
        """
        provider = self.model_provider
        most = provider.context
        try:
            ids = admission.prompt_ids(provider.tokenizer, request, given, most)
            check_ids(ids, provider.tokens, provider.tokenizer, "the prompt")
        except (ValueError, UserError) as error:
            raise RequestRefused(400, shortened(first_line(error))) from error
        except Exception as error:  # templates and tokenizers may raise anything
            reason = shortened(first_line(error))
            raise RequestRefused(400, f"the prompt cannot be read ({reason})") from error
        return wanted if most is None else min(wanted, most - len(ids))

    def generate(
        self,
        request: CompletionRequest,
        generation_args: GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[GenerationContext, Iterator[Any]]:
        """Raise RequestRefused if mlx-lm cannot read the request, or if its thread has died."""
        assert isinstance(request, Asked)
        one = dataclasses.replace(generation_args.model, model=DEFAULT)
        try:
            context, responses = super().generate(
                request, dataclasses.replace(generation_args, model=one), progress_callback
            )
        except Exception as error:
            status = 400 if self.is_healthy else 503
            reason = shortened(first_line(error))
            raise RequestRefused(status, f"the request cannot be answered ({reason})") from error
        context.tool_parser = partial(self.read_calls, request.unread)
        return context, self.until_stopped(request, context, responses)

    def read_calls(
        self, unread: list[str], text: str, tools: list[Any] | None
    ) -> list[dict[str, Any]]:
        """The calls in a text, each a dict of id, name and arguments, as mlx-lm's formatter takes
        them; it would fail for calls without arguments. A text that cannot be read is `unread`, and
        so is each in the answer to a request without tools."""
        try:
            if not tools:
                raise ValueError("there are no tools to call")
            calls = read_calls(self.model_provider.tokenizer, text, tools)
        except ValueError:
            unread.append(text)
            return []
        # Mistral's templates take only ids of 9 letters and digits
        return [{"id": secrets.token_hex(5)[:9], **call["function"]} for call in calls]

    def until_stopped(
        self, request: Asked, context: GenerationContext, responses: Iterator[Any]
    ) -> Iterator[Any]:
        """Yield the responses until the server stops or the client leaves."""
        for response in responses:
            if self.is_stopping:
                context.stop()
            elif request.left.is_set():
                context.stop()  # ends the generation
                raise ConnectionAbortedError
            yield response


class AnswerBody(io.BufferedIOBase):
    """Sends what is written to it as pieces of an answer."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.send = send

    def write(self, data: Any) -> int:
        self.send({"type": "http.response.body", "body": bytes(data), "more_body": True})
        return len(data)


class Handler(APIHandler):
    """mlx-lm's handler of one request, as an app of ASGI: it runs in a thread and has no socket."""

    response_generator: Answers
    headers: Any
    send: Any  # Send; anyio wants to know that it is a coroutine function

    def __init__(self, answers: Answers, request: Request, body: bytes, gate: Gate) -> None:
        """Set what mlx-lm's handler reads, but do not read a request from a socket as it does."""
        self.response_generator = answers
        self.created = int(time.time())
        self.system_fingerprint = f"your_ai-{__version__}"
        self.path, self.asked, self.data = request.scope["path"], request.headers, body
        self.gate = gate
        self.left = threading.Event()
        self.unread: list[str] = []
        self.has_called = False  # a tool
        self.has_begun = False  # to answer
        self.answer_headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.send = send
        watching = asyncio.create_task(self.watch(receive))
        # A thread for every connection, so that clients that do not read hold up nobody.
        to_thread.current_default_thread_limiter().total_tokens = web.CONNECTIONS
        try:
            refused = await to_thread.run_sync(self.answer)
        except asyncio.CancelledError:
            if self.response_generator.is_stopping:
                return  # the connection was closed before its answer ended
            raise
        finally:
            watching.cancel()
        if refused is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await self.gate.refusal(refused, self.asked)(scope, receive, send)

    async def watch(self, receive: Receive) -> None:
        """Wait until the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    def answer(self) -> RequestRefused | None:
        """Answer the request, or return why it is refused; nothing was sent then."""
        try:
            checked = self.checked_body()
            self.headers = {"Content-Length": str(len(checked)), "Origin": self.asked.get("origin")}
            self.rfile, self.wfile = io.BytesIO(checked), AnswerBody(self.send_and_wait)
            self.do_POST()  # type: ignore[no-untyped-call]
        except RequestRefused as refused:
            return refused
        except ConnectionAbortedError:
            logging.debug("a client left")
        except Exception:
            if not self.response_generator.is_stopping:
                raise
            logging.debug("the server stopped during an answer")
            return None if self.has_begun else RequestRefused(503, "the server stops")
        return None

    def checked_body(self) -> bytes:
        """Return the request's body with only what was checked. Raises RequestRefused."""
        try:
            body = admission.parse(self.data)
            vocabulary = self.response_generator.model_provider.vocabulary
            admission.check(body, vocabulary, self.path in CHATS)
        except ValueError as error:
            raise RequestRefused(400, shortened(first_line(error))) from error
        return json.dumps(body).encode()

    def send_and_wait(self, message: Message) -> None:
        """Send a part of the answer. Waits until the client has received those before it."""
        from_thread.run(self.send, message)

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
        if self.body.get("tool_choice") == "none":
            request.tools = None
        given = self.chat_template_kwargs or {}
        assert self.max_tokens is not None
        self.max_tokens = self.response_generator.room(request, given, self.max_tokens)
        super().handle_completion(
            Asked(**vars(request), left=self.left, unread=self.unread), stop_words
        )

    def generate_response(
        self, text: str, finish_reason: Any, *counts: Any, **more: Any
    ) -> dict[str, Any]:
        """A part of an answer. Calls that cannot be read stay text, which mlx-lm would drop."""
        self.has_called |= bool(more.get("tool_calls"))
        if finish_reason == "tool_calls" and not self.has_called:
            finish_reason = "stop"
        tokenizer: Any = self.response_generator.model_provider.tokenizer
        end = "" if finish_reason == "length" else tokenizer.tool_call_end
        text += "".join(f"{tokenizer.tool_call_start}{each}{end}" for each in self.unread)
        self.unread.clear()
        return super().generate_response(text, finish_reason, *counts, **more)

    def send_response(self, code: int, message: str | None = None) -> None:
        self.status = code

    def send_header(self, keyword: str, value: str) -> None:
        self.answer_headers.append((keyword.lower().encode(), value.encode()))

    def end_headers(self) -> None:
        self.has_begun = True
        start = {"type": "http.response.start", "status": self.status}
        self.send_and_wait({**start, "headers": self.answer_headers})


def gate_of(origins: Origins, is_local: bool) -> Gate:
    """Return the gate for pages of `origins`. is_local: only this machine reaches the server."""

    def check(head: RequestHead) -> None:
        web.check_origin(head.headers, origins)
        host = head.headers.get("host")
        if host is not None and is_local:
            web.check_host(host, web.is_own)

    def refusal(refused: RequestRefused, asked: Headers) -> Response:
        """An error in OpenAI's format, so that clients show it."""
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        error = {"error": {"message": refused.message, "type": kind}}
        return JSONResponse(error, refused.status, cors(asked, origins))

    return Gate(("GET", "POST", "OPTIONS"), check, refusal)


def cors(asked: Headers, origins: Origins) -> dict[str, str]:
    """Return the headers that let a page of `origins` read the answer."""
    origin = asked.get("origin")
    if origin is None or origin not in origins:
        return {}
    names = ("Access-Control-Allow-Methods", "Access-Control-Allow-Headers")
    return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", **dict.fromkeys(names, "*")}


def routes_of(answers: Answers, origins: Origins, gate: Gate) -> list[Route]:
    name, created = answers.model_provider.name, int(time.time())

    def sent(request: Request, status: int, value: object) -> Response:
        return JSONResponse(value, status, cors(request.headers, origins))

    async def preflight(request: Request) -> Response:
        return Response(None, 204, cors(request.headers, origins))

    async def health(request: Request) -> Response:
        if answers.is_healthy:
            return sent(request, 200, {"status": "ok"})
        return sent(request, 503, {"status": "unavailable"})

    async def models(request: Request) -> Response:
        model = {"id": name, "object": "model", "created": created, "owned_by": "your_ai"}
        asked = request.path_params.get("name", "").strip("/")
        if not asked:
            return sent(request, 200, {"object": "list", "data": [model]})
        if asked == name:
            return sent(request, 200, model)
        message = f"no model {shortened(asked)} here; this server has {name}"
        return gate.refusal(RequestRefused(404, message), request.headers)

    async def complete(request: Request) -> ASGIApp:
        return Handler(answers, request, await request.body(), gate)

    return [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", models),
        *(Route(path, complete, methods=["POST"]) for path in (COMPLETIONS, *CHATS)),
        Route("/{path:path}", preflight, methods=["OPTIONS"]),
    ]


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UserError if the address is not available."""
    try:
        return web.listen(host, port)
    except socket.gaierror as error:
        raise UserError(f"--host {host}: is not a known address ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--port {port}: is in use; choose another, or 0 for any free port"
            ) from error
        raise UserError(f"--host {host} --port {port}: {error.strerror}") from error


def serve(listener: socket.socket, answers: Answers, received: Sequence[int]) -> bool:
    """Answer requests until there is a signal in `received`, then stop the answers in progress.

    listener: from `listen`.
    Returns whether all other threads have ended; a second signal does not wait for them.
    Raises RunError if the generation thread fails, e.g. when memory runs out.
    """
    origins: Origins = answers.cli_args.allowed_origins
    gate = gate_of(origins, web.is_local(listener))
    server = WebServer(listener, routes_of(answers, origins, gate), gate)
    while not received and answers.is_healthy:
        time.sleep(POLL_S)
    failed = not received
    server.ask_to_stop()
    answers.is_stopping = True
    threading.Thread(target=answers.stop_and_join, daemon=True).start()
    deadline = time.monotonic() + GRACE_S
    while threading.active_count() > 1 and len(received) < 2 and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if failed:
        raise RunError("the server cannot continue: its model failed, as logged above")
    return threading.active_count() == 1


def example(url: str, name: str) -> str:
    """Return a shell command that sends a request to the server."""
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
    header = "-H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions {header} -d {shlex.quote(json.dumps(body))}"


class LogLines(logging.Formatter):
    """Removes control characters from log entries, which may contain text from requests.

    Also removes tracebacks, except at level debug.
    """

    def format(self, record: logging.LogRecord) -> str:
        if not logging.getLogger().isEnabledFor(logging.DEBUG):
            record.exc_info = record.exc_text = None
        return shortened(printable(super().format(record)), LOG_CHARACTERS)
