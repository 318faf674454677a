"""One request to a server that speaks OpenAI's protocol, through the openai client.

The server is not trusted: what it sends is bounded in bytes and seconds.
"""

from __future__ import annotations

import email.utils
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from your_ai.errors import UserError, class_names
from your_ai.gates.text import shown
from your_ai.gates.untrusted import parse_json

OPENAI_URL = "https://api.openai.com/v1"
KEY, URL = "OPENAI_API_KEY", "OPENAI_BASE_URL"  # environment variables of the openai client
NO_KEY = "none"  # what is sent as the key to a server that needs none
REPLY_BYTES, REPLY_PARTS = 1 << 20, 10_000
CONNECT_S = 10.0
REASON_CHARACTERS = 160
TRANSIENT = (408, 409, 425, 429)  # statuses that may pass, besides 500 and more
OUT_OF_CREDIT = "insufficient_quota"  # a 429 that does not pass
# Parts of a request that some servers or models refuse -> what their messages then mention. The
# request is sent again without.
OPTIONAL = {
    "response_format": ("response_format", "schema", "structured", "grammar"),
    "temperature": ("temperature",),
}


@dataclass(frozen=True)
class ChatReply:
    """The reply of a model."""

    text: str
    """Empty if it gave no text."""
    input_tokens: int
    """0 if the server does not say."""
    output_tokens: int


class CallError(Exception):
    """A request without a reply. Its text is the reason, short and in one line."""

    def __init__(
        self,
        reason: str,
        status: int | None = None,
        is_transient: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.status = status
        """The HTTP status; None if there was no response."""
        self.is_transient = is_transient
        """Whether the same request may succeed later."""
        self.retry_after_s = retry_after_s
        """How long the server asks to wait."""


class ChatClient:
    """Asks one model of one server. May be used from several threads."""

    def __init__(
        self,
        model: str,
        url: str | None,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises UserError if openai is not installed, a key is needed, or the URL is not one.

        now, wall: the clocks, in seconds; wall is that of HTTP dates.
        """
        if importlib.util.find_spec("openai") is None:
            raise UserError(
                "--reward judge needs the package openai; in the checkout of your_ai, run: "
                "pip install '.[judge]'"
            )
        self.url = url or os.environ.get(URL) or OPENAI_URL
        check_url(self.url, "--judge-url" if url else URL)
        key = os.environ.get(KEY, "").strip()
        if not key and self.url == OPENAI_URL:
            raise UserError(
                f"--reward judge: {KEY} is not set; set it, or give --judge-url of a server that "
                "needs no key, e.g. http://localhost:8080/v1"
            )
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"--reward judge: {KEY} has characters that no key has; set it again")
        import openai

        self.model, self.timeout_s, self.now, self.wall = model, timeout_s, now, wall
        self.refused: set[str] = set()  # names in OPTIONAL
        try:
            self.client = openai.OpenAI(
                api_key=key or NO_KEY,
                base_url=self.url,
                timeout=openai.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
                max_retries=0,
                http_client=openai.DefaultHttpxClient(
                    event_hooks={"response": [self.refuse_error]}
                ),
            )
        except Exception as error:
            if "InvalidURL" not in class_names(error):
                raise
            raise not_a_url(self.url, "--judge-url" if url else URL) from error

    def ask(self, messages: list[dict[str, str]], response_format: dict[str, Any]) -> ChatReply:
        """Send one request and wait for its reply. Raises CallError."""
        optional = {"temperature": 0, "response_format": response_format}
        while True:
            sent = {name: v for name, v in optional.items() if name not in self.refused}
            try:
                return self.send(messages, sent)
            except CallError as error:
                said = str(error).lower() if error.status in (400, 422) else ""
                refused = [name for name in sent if any(word in said for word in OPTIONAL[name])]
                if not refused:
                    raise
                self.refused.add(refused[0])

    def send(self, messages: list[Any], optional: dict[str, Any]) -> ChatReply:
        import openai

        start = self.now()
        # Streaming of the body, not of tokens: so that its size and time can be bounded.
        create = self.client.chat.completions.with_streaming_response.create
        try:
            with create(model=self.model, messages=messages, **optional) as response:
                data = self.read(response, start)
        except CallError:
            raise
        except openai.APITimeoutError as error:
            raise self.late() from error
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, CallError):  # from refuse_error
                raise error.__cause__ from None
            raise disconnected(error.__cause__ or error) from error
        except openai.APIStatusError as error:  # of a status below 400, such as a redirect
            raise CallError(f"HTTP {error.status_code}", error.status_code) from error
        except Exception as error:
            names = class_names(error)
            if "TimeoutException" in names:
                raise self.late() from error
            if "HTTPError" in names:
                raise disconnected(error) from error
            raise
        return reply_in(data)

    def read(self, response: Any, start: float) -> bytes:
        """The body of a response. Raises CallError if it is too long or late.

        start: when the request was sent, by `now`.
        """
        data = bytearray()
        for part in response.iter_bytes():
            data += part
            if len(data) > REPLY_BYTES:
                raise CallError("its response is too long", response.status_code, True)
            if self.now() - start > self.timeout_s:
                raise self.late()
        return bytes(data)

    def late(self) -> CallError:
        return CallError(
            f"no reply within {self.timeout_s:g} s, --judge-timeout-s", is_transient=True
        )

    def refuse_error(self, response: Any) -> None:
        """Raise CallError for a response with an error. openai would read all of it, however long.

        The client calls this for each response.
        """
        status = response.status_code
        if status < 400:
            return
        try:
            body = parse_json(self.read(response, self.now()), parts=REPLY_PARTS)
        except ValueError:
            body = None
        error = body.get("error", body) if isinstance(body, dict) else None
        message = error
        if isinstance(error, dict):
            message = error.get("message") or error.get("detail")
        reason = shown(message, REASON_CHARACTERS) if isinstance(message, str) else ""
        is_transient = status >= 500 or status in TRANSIENT
        if isinstance(error, dict) and OUT_OF_CREDIT in (error.get("code"), error.get("type")):
            is_transient = False
        raise CallError(
            f"HTTP {status}: {reason}" if reason else f"HTTP {status}",
            status,
            is_transient,
            retry_after(response.headers.get("retry-after"), self.wall()),
        )

    def close(self) -> None:
        self.client.close()


def disconnected(error: BaseException) -> CallError:
    reason = shown(str(error) or type(error).__name__, REASON_CHARACTERS)
    return CallError(f"no connection ({reason})", is_transient=True)


def check_url(url: str, option: str) -> None:
    """Raise UserError if it is not an http or https URL with a host."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_valid = is_valid and (parts.port is None or parts.port > 0) and url.isprintable()
    except ValueError:
        is_valid = False
    if not is_valid or " " in url:
        raise not_a_url(url, option)


def not_a_url(url: str, option: str) -> UserError:
    return UserError(
        f"{option} {shown(url)}: is not a URL; give the server's address, e.g. "
        "http://localhost:8080/v1"
    )


def retry_after(text: str | None, now: float) -> float | None:
    """The seconds of a Retry-After header, which has seconds or an HTTP date; None if neither.

    now: seconds since 1970.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - now
        except (ValueError, TypeError, OverflowError, IndexError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None


def reply_in(data: bytes) -> ChatReply:
    """The reply in the body of a response. Raises CallError if it has none.

    A proxy or a server that starts may send anything, so this is worth another try.
    """
    try:
        body = parse_json(data, parts=REPLY_PARTS)
        message = body["choices"][0]["message"]
        text = message.get("content")
        usage = body.get("usage")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CallError("its response is not a chat completion", 200, is_transient=True) from error
    usage = usage if isinstance(usage, dict) else {}
    return ChatReply(
        text if isinstance(text, str) else "",
        count_of(usage.get("prompt_tokens")),
        count_of(usage.get("completion_tokens")),
    )


def count_of(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 40 else 0
