"""What a repo of the hub holds, its bytes, and what went wrong, in words.

Through what huggingface_hub documents: its session, headers and errors. Its own functions for
whole files begin each anew in a process that follows a killed one.
"""

from __future__ import annotations

import contextlib
import os
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.files import write_at
from your_ai.gates.foreign import MB, clash, is_hash, name_fault, parse_json, path_fault
from your_ai.gates.text import shown
from your_ai.hub.check import WEIGHTS, found_instead, has_tokenizer
from your_ai.hub.find import WANTED

DEFAULT_REVISION = "main"
LISTING_BYTES = 64 * MB  # of the hub's answer to what a repo holds
MOST_FILES = 10_000  # of a model
MOST_FILE_BYTES = 1 << 50
SLOW_AFTER_S, SLOWEST_BYTES_PER_S = 5.0, 1000  # of an answer that is not a file
NO_ADDRESS = "is no address"
ERROR_HEADERS = ("X-Error-Code", "X-Error-Message")
CUTS = ("disconnected", "peer closed", "incomplete", "ConnectionTerminated")
PASSING = (408, 429, 500, 502, 503, 504)  # answers that another try may change


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repo. hash: sha256 of a large one, git's hash of a blob of a small one."""

    name: str
    size_bytes: int
    hash: str


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of a model that are wanted, in the order they are fetched; revision: the commit."""

    repo: str
    revision: str
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Cut(Exception):
    """The hub sent less, or more, than it said."""


class Excess(Cut):
    """The hub sent more than it said."""


# The hub's address, and its answers


def check_endpoint() -> None:
    """Raise UserError where HF_ENDPOINT is not the address of a hub. Asks nobody."""
    check_address(os.environ.get("HF_ENDPOINT"))
    from huggingface_hub import constants  # late, since what is no address ends its import

    check_address(constants.ENDPOINT)


def check_address(value: str | None) -> None:
    """Raise UserError where a value of HF_ENDPOINT is not the address of a hub."""
    fault = None if value is None else address_fault(value)
    if value is not None and fault is not None:
        raise UserError(
            f"HF_ENDPOINT '{shown(value)}': {fault}; give the address of a hub, like "
            "https://huggingface.co, or unset it"
        )


def check_environment() -> None:
    """Raise UserError where HF_ENDPOINT would end the import of the hub's client."""
    value = os.environ.get("HF_ENDPOINT")
    if value is not None and address_fault(value) == NO_ADDRESS:
        check_address(value)


def address_fault(value: str) -> str | None:
    """Why a text is not the http or https address of a server; None where it is."""
    try:
        parts = urllib.parse.urlsplit(value)
        port = parts.port
    except ValueError:
        return NO_ADDRESS
    if parts.scheme not in ("http", "https"):
        return "does not begin with https:// or http://"
    if not parts.hostname or port == 0:
        return "names no host"
    if not value.isascii() or not value.isprintable() or " " in value or "\\" in value:
        return "has characters that no address has"
    return "has a query" if parts.query or parts.fragment else None


@contextlib.contextmanager
def answered(url: str, headers: dict[str, str], **options: Any) -> Iterator[Any]:
    """A hub's answer to GET, whose body is not read yet and is sent as it is.

    Raises UserError for one that came through a redirect from https to http, or whose body is
    encoded. The errors of the hub's client come through; the body of an error is not read.
    """
    from huggingface_hub import constants, get_session, hf_raise_for_status

    options = {"timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, **options}
    headers = headers | {"Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, **options) as response:
        if response.status_code not in (200, 206):
            told = {n: response.headers[n][:500] for n in ERROR_HEADERS if n in response.headers}
            empty = type(response)(response.status_code, headers=told, request=response.request)
            hf_raise_for_status(empty)
            raise UserError(f"the hub answered {response.status_code}; check HF_ENDPOINT")
        schemes = [step.url.scheme for step in (*response.history, response)]
        if "http" in schemes[schemes.index("https") :] if "https" in schemes else False:
            raise UserError("the hub redirects from https to http; check HF_ENDPOINT")
        if response.headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
            raise UserError("the hub sends encoded bytes, which it was not asked for")
        yield response


def read_answer(url: str, headers: dict[str, str], most: int, **options: Any) -> bytes:
    """The body of a hub's answer. Raises as `answered` does, and UserError for more than `most`
    bytes, or fewer in a second than any line sends."""
    body, began = bytearray(), time.monotonic()
    with answered(url, headers, **options) as response:
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > most:
                raise UserError(f"the hub's answer is larger than {most // MB} MB; not read")
            took_s = time.monotonic() - began
            if took_s > SLOW_AFTER_S and len(body) < SLOWEST_BYTES_PER_S * took_s:
                raise UserError("the hub's answer comes too slowly; try again later")
    return bytes(body)


def ask(repo: str, revision: str) -> Listing:
    """What the hub has of a repo. Raises UserError for one that holds no model for your_ai, and
    for an answer that is no listing.

    The errors of the hub's client come through.
    """
    return listing_of(repo, described(repo, revision))


def described(repo: str, revision: str, **options: Any) -> dict[str, Any]:
    """What the hub says of a repo: `sha`, a hash, `siblings`, objects, and more of any kind.

    Raises UserError for another answer. The errors of the hub's client come through.
    """
    check_endpoint()
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    place = f"{constants.ENDPOINT}/api/models/{repo}/revision"
    url = f"{place}/{urllib.parse.quote(revision, safe='')}"
    return object_in(
        repo, read_answer(url, build_hf_headers(), LISTING_BYTES, params={"blobs": True}, **options)
    )


def object_in(repo: str, body: bytes) -> dict[str, Any]:
    """What `described` gives, from the bytes of an answer. Raises UserError."""
    try:
        content = parse_json(body, unique=True)
    except ValueError as error:
        reason = str(error)
        raise UserError(f"{repo}: the hub gave no listing ({shown(reason)})") from error
    siblings = content.get("siblings", []) if isinstance(content, dict) else None
    if not isinstance(siblings, list) or not all(isinstance(s, dict) for s in siblings):
        raise UserError(f"{repo}: the hub gave no listing of files; check HF_ENDPOINT")
    if not is_hash(content.get("sha")):
        raise UserError(f"{repo}: the hub names no commit; check HF_ENDPOINT")
    return {**content, "siblings": siblings}


def listing_of(repo: str, content: dict[str, Any]) -> Listing:
    """The files in what `described` gives. Raises UserError for what is no model."""
    siblings = content["siblings"]
    names = [sibling.get("rfilename") for sibling in siblings]
    for name in names:
        if (fault := path_fault(name)) is not None:
            raise UserError(f"{repo}: has a file '{shown(name)}', which {fault}; refused")
    found = [file for sibling in siblings if (file := file_of(repo, sibling)) is not None]
    if len(found) > MOST_FILES:
        raise UserError(f"{repo}: has {len(found)} files, more than any model; refused")
    if (same := clash(file.name for file in found)) is not None:
        first, second = map(shown, same)
        raise UserError(f"{repo}: has '{first}' and '{second}', which may be one file; refused")
    refuse(repo, names, [file.name for file in found])
    found.sort(key=lambda file: (file.name != "config.json", file.size_bytes, file.name))
    return Listing(repo=repo, revision=content["sha"], files=tuple(found))


def file_of(repo: str, sibling: dict[str, Any]) -> RemoteFile | None:
    """A file of a hub's answer, None where it is not wanted or the hub does not describe it."""
    name, size_bytes, large = sibling["rfilename"], sibling.get("size"), sibling.get("lfs")
    if not is_wanted(name):
        return None
    if (fault := name_fault(name)) is not None:
        raise UserError(f"{repo}: has a file '{shown(name)}', which {fault}; refused")
    if large is not None and not isinstance(large, dict):
        raise UserError(f"{repo}: {shown(name)}: the hub does not describe it; refused")
    hashed = sibling.get("blobId") if large is None else large.get("sha256")
    if size_bytes is None or hashed is None:
        return None
    if type(size_bytes) is not int or not 0 <= size_bytes <= MOST_FILE_BYTES:
        raise UserError(f"{repo}: {shown(name)}: has a size of {shown(size_bytes)}; refused")
    if not is_hash(hashed) or (large is not None and len(hashed) != 64):
        raise UserError(f"{repo}: {shown(name)}: has a hash '{shown(hashed)}'; refused")
    return RemoteFile(name, size_bytes, hashed)


def is_wanted(path: str) -> bool:
    """Whether a model needs a file: those in folders are of other formats."""
    hidden = path.startswith(".")
    return "/" not in path and not hidden and any(fnmatch(path, pattern) for pattern in WANTED)


def refuse(repo: str, names: list[str], wanted: list[str]) -> None:
    """Raise UserError where there is no model that your_ai could train."""
    if not any(fnmatch(name, WEIGHTS) for name in wanted):
        found = found_instead(name for name in names if "/" not in name)
        raise UserError(f"{repo}: has no {WEIGHTS}, {found}; choose a repo with safetensors")
    if "config.json" not in wanted:
        raise UserError(f"{repo}: has no config.json; is it a language model?")
    if not has_tokenizer(wanted):
        raise UserError(f"{repo}: has no tokenizer; is it a language model?")


def receive(listing: Listing, file: RemoteFile, part: Path) -> Iterator[int]:
    """Add to `part` what it lacks of a file; the bytes in it, ever again.

    Raises UserError where it cannot be written, Cut, and the errors of the hub's client.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    try:
        opened = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise unwritable(part, error) from error
    try:
        done = os.fstat(opened).st_size
        headers = build_hf_headers()
        if done:
            headers["Range"] = f"bytes={done}-"
        url = hf_hub_url(listing.repo, file.name, revision=listing.revision)
        with answered(url, headers) as response:
            if done and response.status_code != 206:  # who answers knows no ranges
                done = 0
                os.ftruncate(opened, 0)
            for chunk in response.iter_raw():
                if done + len(chunk) > file.size_bytes:
                    os.ftruncate(opened, 0)  # nothing tells which of its bytes are right
                    raise Excess(
                        f"the hub sent more than the {file.size_bytes} bytes of {file.name}"
                    )
                try:
                    write_at(opened, memoryview(chunk), done)
                except OSError as error:
                    raise unwritable(part, error) from error
                done += len(chunk)
                yield done
    finally:
        os.close(opened)
    if done != file.size_bytes:
        raise Cut(f"the hub sent {done} of {file.size_bytes} bytes of {file.name}")


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror})")


def status_of(error: Exception) -> int | None:
    """The status of the answer that an error of the hub's client is about."""
    return getattr(getattr(error, "response", None), "status_code", None)


def kinds_of(error: Exception) -> set[str]:
    """The names of an error's classes: the client's transport is httpx or, later, httpx2."""
    return {kind.__name__ for kind in type(error).__mro__}


def is_unreachable(error: Exception) -> bool:
    return bool(kinds_of(error) & {"ConnectError", "ConnectTimeout", "ProxyError"})


def is_passing(error: Exception) -> bool:
    """Whether it may go well the next time."""
    status, kinds = status_of(error), kinds_of(error)
    if status is not None:
        return status in PASSING
    if kinds & {"RemoteProtocolError"}:  # a cut, or no HTTP at all
        return any(text in str(error) for text in CUTS)
    if kinds & {"UnsupportedProtocol", "LocalProtocolError", "DecodingError"}:
        return False
    return isinstance(error, Cut) or "TransportError" in kinds


def reason_of(error: Exception) -> str:
    """What went wrong, in a few words."""
    status = status_of(error)
    if status is not None:
        return f"the hub answered {status}"
    lines = str(error).strip().splitlines()
    return shown(lines[0]) if lines else type(error).__name__


def explain(error: Exception, name: str, repo: str, revision: str) -> UserError:
    """An error of the hub's client as what the user can do. name: of the model, as given."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{name}: {repo} is gated; accept its licence on {constants.ENDPOINT}/{repo}, "
            "log in with `hf auth login`, and try again"
        )
    if isinstance(error, errors.DisabledRepoError):
        return UserError(f"{name}: {repo} is disabled on the hub; choose another model")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{name}: {repo} has no revision {revision}; leave --revision out")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(f"{name}: no {repo} on the hub; a private one needs `hf auth login` first")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"{name}: HF_HUB_OFFLINE is set; unset it to fetch {repo}")
    if status_of(error) in (401, 403):
        return UserError(
            f"{name}: the hub does not let this account fetch {repo}; log in anew: `hf auth login`"
        )
    if is_unreachable(error):
        return UserError(
            f"{name}: the hub cannot be reached at {constants.ENDPOINT} ({reason_of(error)}); "
            "check the network, HF_ENDPOINT and proxies"
        )
    if kinds_of(error) & {"UnsupportedProtocol", "InvalidURL", "TooManyRedirects"}:
        return UserError(
            f"{name}: the hub at {constants.ENDPOINT} redirects to what is no address of a server "
            f"({reason_of(error)}); check HF_ENDPOINT"
        )
    return UserError(f"{name}: {repo} could not be fetched ({reason_of(error)}); try again later")
