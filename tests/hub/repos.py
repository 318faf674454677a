"""What the hub of the tests holds, who may do what there, and what goes wrong."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass
class Repo:
    """files: contents by path; gated: nothing is given without `token`.

    private: only who may read its owner's repos sees it; branches: the others than main;
    messages: of the commits that were pushed.
    """

    files: dict[str, bytes]
    sha: str = "a" * 40
    gated: bool = False
    token: str = "right"
    private: bool = False
    branches: dict[str, Repo] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def at(self, revision: str) -> Repo | None:
        """The repo as it is at a revision."""
        if revision in ("main", self.sha):
            return self
        heads = (head for name, head in self.branches.items() if revision in (name, head.sha))
        return next(heads, None)


@dataclass
class Fault:
    """What goes wrong with a file.

    cuts: after so many bytes of each of the next answers; statuses: of the next answers;
    content: sent instead; claims: a Content-Length that is not true; bytes_per_s: at most;
    no_ranges: answers with the whole file whatever was asked; hangs_at: the byte of the file
    before which it waits, for `Hub.go_on`; loses_answer: does what it was asked to, and does
    not say so.
    """

    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    content: bytes | None = None
    claims: int | None = None
    bytes_per_s: float | None = None
    no_ranges: bool = False
    hangs_at: int | None = None
    loses_answer: bool = False


@dataclass
class Request:
    """start: the first byte that was asked for; sent_bytes: of the body; body: received."""

    method: str
    path: str
    host: str
    authorization: str | None
    start: int = 0
    status: int = 200
    sent_bytes: int = 0
    body: bytes = b""


@dataclass
class Account:
    """role: of its token: write, read or fineGrained; orgs: its role in each."""

    name: str
    role: str = "write"
    orgs: dict[str, str] = field(default_factory=dict)

    def role_in(self, owner: str) -> str | None:
        """What it may do with the repos of `owner`; None: not even see the private ones."""
        role = "write" if owner == self.name else self.orgs.get(owner)
        return "read" if role is not None and self.role == "read" else role


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
