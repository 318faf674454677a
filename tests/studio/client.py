"""A browser of the studio without a browser: pages, forms and pieces of files over HTTP."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from urllib.parse import urlencode

from your_ai.serving.live_page import listen
from your_ai.serving.web import WebServer
from your_ai.studio.pages import Studio
from your_ai.studio.server import gate_of, own_token, routes_of


@dataclass(frozen=True)
class Got:
    """An answer."""

    status: int
    text: str
    headers: dict[str, str]

    @property
    def place(self) -> str:
        """The page that it sends to, below the root."""
        return re.sub("^/[^/]*/", "", self.headers.get("location", ""))

    @property
    def fault(self) -> str:
        """The error that it shows."""
        found = re.search(r'role="alert">(.*?)</p>', self.text, re.DOTALL)
        return unescape(found[1]) if found else ""


@dataclass(frozen=True)
class Client:
    """Somebody who opened the address of a studio."""

    studio: Studio
    server: WebServer

    def get(self, path: str, **headers: str) -> Got:
        return self.ask("GET", self.studio.root + path, **headers)

    def part(self, path: str) -> Got:
        return self.get(path, X_Part="1")

    def post(self, path: str, body: bytes | None = None, **form: str) -> Got:
        headers = {"Origin": self.server.url}
        if body is None:
            body = urlencode(form).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        return self.ask("POST", self.studio.root + path, body, **headers)

    def ask(self, method: str, target: str, body: bytes | None = None, **headers: str) -> Got:
        host, port = self.server.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=120)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body, named)
        answer = connection.getresponse()
        text = answer.read().decode()
        return Got(answer.status, text, {n.lower(): v for n, v in answer.getheaders()})


@contextmanager
def opened() -> Iterator[Client]:
    """Serve the studio of the current folder."""
    studio = Studio(own_token())
    server = WebServer(listen(None), routes_of(studio), gate_of(studio))
    try:
        yield Client(studio, server)
    finally:
        studio.close()
        server.stop()
