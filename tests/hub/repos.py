"""Data of the local hub: repositories, accounts, requests and injected faults."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass
class Repo:
    """A repository."""

    files: dict[str, bytes]
    """Contents by path."""
    sha: str = "a" * 40
    gated: bool = False
    """Files are only served with `token`."""
    token: str = "right"
    private: bool = False
    """Only visible to accounts that may read the owner's repositories."""
    branches: dict[str, Repo] = field(default_factory=dict)
    """Branches other than main."""
    messages: list[str] = field(default_factory=list)
    """Messages of the pushed commits."""

    def at(self, revision: str) -> Repo | None:
        """The repository at a revision."""
        if revision in ("main", self.sha):
            return self
        heads = (head for name, head in self.branches.items() if revision in (name, head.sha))
        return next(heads, None)


@dataclass
class Fault:
    """A fault to inject in the responses for a file."""

    cuts: list[int] = field(default_factory=list)
    """Close the connection after this many bytes, for each of the next responses."""
    statuses: list[int] = field(default_factory=list)
    """The HTTP statuses of the next responses."""
    content: bytes | None = None
    """Sent instead of the file."""
    claims: int | None = None
    """A wrong Content-Length."""
    bytes_per_s: float | None = None
    """Maximum speed."""
    no_ranges: bool = False
    """Ignore Range headers and send the whole file."""
    hangs_at: int | None = None
    """The byte of the file before which to wait for `Hub.go_on`."""
    loses_answer: bool = False
    """Do what was requested, but send no response."""


@dataclass
class Request:
    """A request that the hub received, and how it answered."""

    method: str
    path: str
    host: str
    authorization: str | None
    start: int = 0
    """The first requested byte."""
    status: int = 200
    sent_bytes: int = 0
    """Bytes of the response body that were sent."""
    body: bytes = b""
    """The request body."""


@dataclass
class Account:
    """An account on the hub."""

    name: str
    role: str = "write"
    """The role of its token: write, read or fineGrained."""
    orgs: dict[str, str] = field(default_factory=dict)
    """Its role in each organization."""

    def role_in(self, owner: str) -> str | None:
        """The account's role for repositories of `owner`; None: cannot see private ones."""
        role = "write" if owner == self.name else self.orgs.get(owner)
        return "read" if role is not None and self.role == "read" else role


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
