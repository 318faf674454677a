"""Serves a run with mlx-lm's server, which implements the OpenAI API.

This server accepts less than mlx-lm's. It has only the run's model, which is loaded before the
first request. Whatever a request names, it loads no other model, adapter or image, and it lists no
other model. Web pages from other hosts cannot use it.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import logging
import shlex
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    ModelProvider,
)

from your_ai import __version__
from your_ai.errors import RunError, UserError, first_line
from your_ai.gates.text import printable, shortened
from your_ai.gates.token_ids import vocabulary_of
from your_ai.generation.generate import Sampling, context_tokens, load_run
from your_ai.memory.sizes import PREFILL_TOKENS
from your_ai.nets.saved_adapter import Trained
from your_ai.serving import wire
from your_ai.serving.handler import DEFAULT, Answering, Asked, Handler
from your_ai.serving.wire import LimitedServer, Origins, RequestRefused

LOG_CHARACTERS = 4000  # of a log entry
CACHE_ENTRIES = 10  # conversations whose KV caches are kept
CACHE_BYTES = 1 << 30  # maximum of all KV caches that are kept
POLL_S = 0.2
GRACE_S = 2.0  # for answers in flight, when the server stops
BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\n\r\n"
    + json.dumps(
        {"error": {"message": "too many connections; try again", "type": "server_error"}}
    ).encode()
)


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


class Answers(Answering):
    """Generates with the one model, whatever name a request gives, so that requests are batched."""

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
        return context, self.until_stopped(request, context, responses)

    def until_stopped(
        self, request: Asked, context: GenerationContext, responses: Iterator[Any]
    ) -> Iterator[Any]:
        """Yield the responses until the server stops or the client leaves."""
        for response in responses:
            if self.is_stopping:
                context.stop()
            elif wire.has_left(request.connection):
                context.stop()  # ends the generation
                raise ConnectionAbortedError
            yield response


class Server(LimitedServer):
    """Listens when it is created; answers requests when `answers` is set."""

    answers: Answers

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, Handler, BUSY)

    def finish_request(self, request: Any, client_address: Any) -> None:
        handler = functools.partial(Handler, system_fingerprint=f"your_ai-{__version__}")
        handler(self.answers, request, client_address, self)


def listen(host: str, port: int) -> Server:
    """Return a listening server. Raises UserError if the address is not available."""
    try:
        return Server(host, port)
    except socket.gaierror as error:
        raise UserError(f"--host {host}: is not a known address ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--port {port}: is in use; choose another, or 0 for any free port"
            ) from error
        raise UserError(f"--host {host} --port {port}: {error.strerror}") from error


def serve(server: Server, answers: Answers, received: Sequence[int]) -> bool:
    """Answer requests until there is a signal in `received`, then stop the answers in progress.

    Returns whether all other threads have ended; a second signal does not wait for them.
    Raises RunError if the generation thread fails, e.g. when memory runs out.
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
