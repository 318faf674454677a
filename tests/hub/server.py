"""A hub on localhost that speaks the protocol of huggingface_hub, with injected faults.

All requests, and the number of bytes sent, are recorded in `requests`. Large files are served from
another host name, as on the real hub: the client is redirected there. Uploads are in
tests.hub.uploads.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable

from tests.hub.repos import Account, Fault, Repo, Request, git_hash
from tests.hub.uploads import Uploads

LFS_SUFFIX = ".safetensors"
ANSWERS = re.compile(
    r"/(?P<repo>(datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>refs/convert/[^/]+|[^/]+)/(?P<file>.+)"
)
ASKED = re.compile(
    r"/api/(models/)?(?P<repo>(datasets/)?[^/]+/[^/]+)/(?P<what>revision|tree)"
    r"/(?P<revision>refs/convert/[^/]+|[^/]+)"
)
BLOCK_BYTES = 1 << 14


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: object) -> None:
        """Ignore clients that disconnected."""


class Hub:
    """The server.

    faults: by file name, or "api" for requests that are not for a file.
    odd: functions that answer instead, by the same names. They may break the protocol.
    accounts: by token. Without accounts, everybody has access.
    large: uploaded files by sha256.
    """

    def __init__(self) -> None:
        self.odd: dict[str, Callable[[Answerer], None]] = {}
        self.repos: dict[str, Repo] = {}
        self.faults: dict[str, Fault] = {}
        self.accounts: dict[str, Account] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.go_on = threading.Event()
        self.hanging = threading.Event()
        self.server = Server(("127.0.0.1", 0), type("OwnAnswerer", (Answerer,), {"hub": self}))
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Hub:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self, file: str) -> int:
        """The total number of bytes of a file that were sent."""
        return sum(request.sent_bytes for request in self.requests if request.path.endswith(file))

    def gets(self, file: str) -> list[Request]:
        """The requests that were answered with content of a file."""
        return [
            r
            for r in self.requests
            if r.method == "GET" and r.path.endswith(file) and r.status in (200, 206)
        ]


def described(path: str, content: bytes, name: str, oid: str) -> dict[str, object]:
    """A file as the API describes it. name, oid: the keys for its path and its git hash."""
    entry: dict[str, object] = {name: path, "size": len(content), oid: git_hash(content)}
    if path.endswith(LFS_SUFFIX):
        sha = hashlib.sha256(content).hexdigest()
        hashed = "sha256" if oid == "blobId" else "oid"
        entry["lfs"] = {hashed: sha, "size": len(content), "pointerSize": 130}
    return entry


class Answerer(Uploads, http.server.BaseHTTPRequestHandler):
    """The request handler of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each response waits 40 ms for the client's ACK
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def end_headers(self) -> None:
        if self.close_connection:  # else the client may ask again before it notices
            self.send_header("Connection", "close")
        super().end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)  # an absolute URL if this server is the proxy
        path = self.note(url.path)
        api, file = ASKED.fullmatch(path), ANSWERS.fullmatch(path)
        what = file["file"] if file else "api"
        fault = self.hub.faults.get(what, Fault())
        if what in self.hub.odd:
            self.close_connection = True
            with contextlib.suppress(OSError):  # the client disconnected
                self.hub.odd[what](self)
        elif fault.statuses:
            self.fail(fault.statuses.pop(0))
        elif path.startswith("/elsewhere/"):
            self.send_elsewhere(path.removeprefix("/elsewhere"))
        elif path == "/api/whoami-v2":
            self.say_who()
        elif not self.is_known():
            self.fail(401, message="Invalid credentials in Authorization header")
        elif api:
            self.describe(api)
        elif file:
            self.send_or_redirect(file)
        else:
            self.fail(404)

    def fail(self, status: int, code: str | None = None, message: str | None = None) -> None:
        self.asked.status = status
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if message is not None:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def repo(self, found: re.Match[str]) -> Repo | None:
        """The requested repository. If there is none, sends an error response."""
        repo = self.hub.repos.get(found["repo"])
        if repo is None or (repo.private and self.role_for(found["repo"]) is None):
            self.fail(401 if self.asked.authorization is None else 404, "RepoNotFound")
        elif repo.at(found["revision"]) is None:
            self.fail(404, "RevisionNotFound")
        else:
            return repo.at(found["revision"])
        return None

    def describe(self, found: re.Match[str]) -> None:
        repo = self.repo(found)
        if repo is None:
            return
        if found["what"] == "tree":
            answer: object = [
                {"type": "file", **described(path, content, "path", "oid")}
                for path, content in repo.files.items()
            ]
        else:
            siblings = [
                described(path, content, "rfilename", "blobId")
                for path, content in repo.files.items()
            ]
            answer = {"id": found["repo"], "sha": repo.sha, "siblings": siblings, "tags": []}
            answer["private"] = self.hub.repos[found["repo"]].private
        self.answer(answer)

    def send_or_redirect(self, found: re.Match[str]) -> None:
        repo = self.repo(found)
        if repo is None:
            return
        content = repo.files.get(found["file"])
        if content is None:
            self.fail(404, "EntryNotFound")
            return
        if repo.gated and self.asked.authorization != f"Bearer {repo.token}":
            self.fail(403 if self.asked.authorization else 401, "GatedRepo")
            return
        if not found["file"].endswith(LFS_SUFFIX):
            self.send_file(found["file"], content, repo)
            return
        self.asked.status = 302
        self.send_response(302)
        self.identify(found["file"], content, repo)
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Location", f"http://localhost:{self.hub.port}/elsewhere{self.asked.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_elsewhere(self, path: str) -> None:
        found = ANSWERS.fullmatch(path)
        assert found is not None
        repo = self.hub.repos[found["repo"]]
        self.send_file(found["file"], repo.files[found["file"]], repo)

    def identify(self, name: str, content: bytes, repo: Repo) -> None:
        lfs = name.endswith(LFS_SUFFIX)
        etag = hashlib.sha256(content).hexdigest() if lfs else git_hash(content)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Repo-Commit", repo.sha)

    def send_file(self, name: str, content: bytes, repo: Repo) -> None:
        fault = self.hub.faults.get(name, Fault())
        if fault.statuses:
            self.fail(fault.statuses.pop(0))
            return
        body = content if fault.content is None else fault.content
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and not fault.no_ranges else 0
        self.asked.start = start
        self.asked.status = 206 if start else 200
        self.send_response(self.asked.status)
        self.identify(name, content, repo)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        length = len(body) - start if fault.claims is None else fault.claims - start
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "GET":
            self.send_body(body, start, fault)

    def send_body(self, body: bytes, start: int, fault: Fault) -> None:
        end = len(body)
        if fault.cuts:
            end = min(end, start + fault.cuts.pop(0))
        at = start
        while at < end:
            stop = min(end, at + BLOCK_BYTES)
            if fault.hangs_at is not None and at < fault.hangs_at:
                stop = min(stop, fault.hangs_at)
            elif fault.hangs_at is not None and not self.hub.go_on.is_set():
                self.hub.hanging.set()
                self.hub.go_on.wait()
            try:
                self.wfile.write(body[at:stop])
            except OSError:  # the client disconnected
                break
            self.asked.sent_bytes += stop - at
            at = stop
            if fault.bytes_per_s is not None:
                time.sleep(BLOCK_BYTES / fault.bytes_per_s)
        if at < len(body) or fault.claims is not None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
