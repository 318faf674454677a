"""Read file lists and files from the hub, and explain its errors.

Uses only documented parts of huggingface_hub: its session, headers and errors. Its own download
functions start each file from the beginning after the process was killed.
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
from typing import Any, Literal

from your_ai.errors import UserError, class_names, named_errors
from your_ai.files import write_at
from your_ai.gates.text import shown
from your_ai.gates.untrusted import MB, clash, is_hash, parse_json, path_fault
from your_ai.hub.check import TEMPLATES, WEIGHTS, found_instead, has_tokenizer, model_file_fault
from your_ai.hub.find import WANTED

DEFAULT_REVISION = "main"
LISTING_BYTES = 64 * MB  # maximum size of a repository's file list
MOST_FILES = 10_000  # maximum number of files in a model
MOST_FILE_BYTES = 1 << 50
SLOW_AFTER_S, SLOWEST_BYTES_PER_S = 5.0, 1000  # for responses that are not files
NO_ADDRESS = "is not an address"
ERROR_HEADERS = ("X-Error-Code", "X-Error-Message")
CUTS = ("disconnected", "peer closed", "incomplete", "ConnectionTerminated")
PASSING = (408, 429, 500, 502, 503, 504)  # temporary errors: another attempt may succeed


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    size_bytes: int
    hash: str
    """sha256 of a large (LFS) file, git's blob hash of a small file."""
    path: str = ""
    """Its path in the repository, if it has another name here."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of a model or dataset to download."""

    repo: str
    revision: str
    """The commit."""
    files: tuple[RemoteFile, ...]
    """In the order of download."""
    kind: Literal["model", "dataset"] = "model"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class ConnectionCut(Exception):
    """The hub sent fewer or more bytes than it announced."""


class TooManyBytes(ConnectionCut):
    """The hub sent more bytes than it announced."""


# The hub's address and responses


def check_endpoint() -> None:
    """Raise UserError if HF_ENDPOINT is not a valid address. Does not use the network."""
    check_address(os.environ.get("HF_ENDPOINT"))
    from huggingface_hub import constants  # imported here: the import fails on a bad address

    check_address(constants.ENDPOINT)


def check_address(value: str | None) -> None:
    """Raise UserError if a value of HF_ENDPOINT is not a valid address."""
    fault = None if value is None else address_fault(value)
    if value is not None and fault is not None:
        raise UserError(
            f"HF_ENDPOINT '{shown(value)}': {fault}; set it to the address of a hub, like "
            "https://huggingface.co, or unset it"
        )


def check_environment() -> None:
    """Raise UserError if the import of huggingface_hub would fail because of HF_ENDPOINT."""
    value = os.environ.get("HF_ENDPOINT")
    if value is not None and address_fault(value) == NO_ADDRESS:
        check_address(value)


def address_fault(value: str) -> str | None:
    """Say why a text is not the http or https address of a server; None if it is one."""
    try:
        parts = urllib.parse.urlsplit(value)
        port = parts.port
    except ValueError:
        return NO_ADDRESS
    if parts.scheme not in ("http", "https"):
        return "does not begin with https:// or http://"
    if not parts.hostname or port == 0:
        return "has no host name"
    if not value.isascii() or not value.isprintable() or " " in value or "\\" in value:
        return "has characters that are not allowed in an address"
    return "has a query" if parts.query or parts.fragment else None


@contextlib.contextmanager
def answered(url: str, headers: dict[str, str], **options: Any) -> Iterator[Any]:
    """Send a GET request to the hub and give the response, before its body is read.

    Raises UserError for a redirect from https to http, or a body with a content encoding.
    Errors of huggingface_hub are not converted. The body of an error response is not read.
    """
    from huggingface_hub import constants, get_session, hf_raise_for_status

    options = {"timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, **options}
    headers = headers | {"Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, **options) as response:
        if response.status_code not in (200, 206):
            kept = {n: response.headers[n][:500] for n in ERROR_HEADERS if n in response.headers}
            empty = type(response)(response.status_code, headers=kept, request=response.request)
            hf_raise_for_status(empty)
            raise UserError(f"the hub answered {response.status_code}; check HF_ENDPOINT")
        schemes = [step.url.scheme for step in (*response.history, response)]
        if "http" in schemes[schemes.index("https") :] if "https" in schemes else False:
            raise UserError("the hub redirects from https to http; check HF_ENDPOINT")
        if response.headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
            raise UserError("the hub sent encoded bytes, which were not requested")
        yield response


def read_answer(url: str, headers: dict[str, str], most: int, **options: Any) -> bytes:
    """Return the body of the hub's response.

    Raises like `answered`, and UserError for more than `most` bytes or a very slow response.
    """
    body, began = bytearray(), time.monotonic()
    with answered(url, headers, **options) as response:
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > most:
                raise UserError(f"the hub's answer is larger than {most // MB} MB; refused")
            took_s = time.monotonic() - began
            if took_s > SLOW_AFTER_S and len(body) < SLOWEST_BYTES_PER_S * took_s:
                raise UserError("the hub's answer comes too slowly; try again later")
    return bytes(body)


def ask(repo: str, revision: str) -> Listing:
    """Get the list of a repository's files.

    Raises UserError if the repository has no model that your_ai can use, or if the hub does not
    answer with a file list. Errors of huggingface_hub are not converted.
    """
    return listing_of(repo, described(repo, revision))


def described(
    repo: str, revision: str, kind: Literal["model", "dataset"] = "model", **options: Any
) -> dict[str, Any]:
    """Get the hub's description of a repository.

    `sha` is a hash and `siblings` a list of objects; other entries may have any type.
    Raises UserError for any other answer. Errors of huggingface_hub are not converted.
    """
    check_endpoint()
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    place = f"{constants.ENDPOINT}/api/{kind}s/{repo}/revision"
    url = f"{place}/{urllib.parse.quote(revision, safe='')}"
    return object_in(
        repo, read_answer(url, build_hf_headers(), LISTING_BYTES, params={"blobs": True}, **options)
    )


def object_in(repo: str, body: bytes) -> dict[str, Any]:
    """Parse the hub's answer for `described`. Raises UserError."""
    try:
        content = parse_json(body, unique=True)
    except ValueError as error:
        reason = str(error)
        raise UserError(f"{repo}: the hub gave no list of files ({shown(reason)})") from error
    siblings = content.get("siblings", []) if isinstance(content, dict) else None
    if not isinstance(siblings, list) or not all(isinstance(s, dict) for s in siblings):
        raise UserError(f"{repo}: the hub gave no list of files; check HF_ENDPOINT")
    if not is_hash(content.get("sha")):
        raise UserError(f"{repo}: the hub gave no commit hash; check HF_ENDPOINT")
    return {**content, "siblings": siblings}


def listing_of(repo: str, content: dict[str, Any]) -> Listing:
    """Return the files to download from a description. Raises UserError if there is no model."""
    siblings = content["siblings"]
    names = [sibling.get("rfilename") for sibling in siblings]
    for name in names:
        if (fault := path_fault(name)) is not None:
            raise UserError(f"{repo}: has a file '{shown(name)}', which {fault}; refused")
    found = [file for sibling in siblings if (file := file_of(repo, sibling)) is not None]
    if len(found) > MOST_FILES:
        raise UserError(f"{repo}: has {len(found)} files, more than any real model; refused")
    if (same := clash(file.name for file in found)) is not None:
        first, second = map(shown, same)
        raise UserError(
            f"{repo}: has '{first}' and '{second}', one file on some file systems; refused"
        )
    refuse(repo, names, [file.name for file in found])
    found.sort(key=lambda file: (file.name != "config.json", file.size_bytes, file.name))
    return Listing(repo=repo, revision=content["sha"], files=tuple(found))


def file_of(repo: str, sibling: dict[str, Any]) -> RemoteFile | None:
    """Return a file of the hub's answer; None if it is not needed or not fully described."""
    name, size_bytes, large = sibling["rfilename"], sibling.get("size"), sibling.get("lfs")
    if not is_wanted(name):
        return None
    if (fault := model_file_fault(name)) is not None:
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
    """Return whether a model needs the file. Files in other subfolders belong to other formats."""
    folder, _, name = path.rpartition("/")
    wanted = ("*.jinja",) if folder == TEMPLATES else () if folder else WANTED
    return not name.startswith(".") and any(fnmatch(name, pattern) for pattern in wanted)


def refuse(repo: str, names: list[str], wanted: list[str]) -> None:
    """Raise UserError if the repository has no model that your_ai can train."""
    if not any(fnmatch(name, WEIGHTS) for name in wanted):
        found = found_instead(name for name in names if "/" not in name)
        raise UserError(f"{repo}: has no {WEIGHTS}, {found}; choose a repo with safetensors")
    if "config.json" not in wanted:
        raise UserError(f"{repo}: has no config.json; is it a language model?")
    if not has_tokenizer(wanted):
        raise UserError(f"{repo}: has no tokenizer; is it a language model?")


def receive(listing: Listing, file: RemoteFile, part: Path) -> Iterator[int]:
    """Append the missing bytes of a file to `part`. Yields its size after each write.

    Raises UserError if `part` cannot be written, Cut if the size is wrong, and errors of
    huggingface_hub.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    with named_errors(part, "written"):
        opened = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        done = os.fstat(opened).st_size
        headers = build_hf_headers()
        if done:
            headers["Range"] = f"bytes={done}-"
        url = hf_hub_url(
            listing.repo, file.path or file.name, repo_type=listing.kind, revision=listing.revision
        )
        with answered(url, headers) as response:
            if done and response.status_code != 206:  # the server does not support ranges
                done = 0
                os.ftruncate(opened, 0)
            for chunk in response.iter_raw():
                if done + len(chunk) > file.size_bytes:
                    os.ftruncate(opened, 0)  # it is unknown which bytes are right
                    raise TooManyBytes(
                        f"the hub sent more than {file.size_bytes} bytes for {file.name}"
                    )
                with named_errors(part, "written"):
                    write_at(opened, memoryview(chunk), done)
                done += len(chunk)
                yield done
    finally:
        os.close(opened)
    if done != file.size_bytes:
        raise ConnectionCut(f"the hub sent only {done} of {file.size_bytes} bytes of {file.name}")


def status_of(error: Exception) -> int | None:
    """The HTTP status of an error of huggingface_hub, if it has one."""
    return getattr(getattr(error, "response", None), "status_code", None)


def is_unreachable(error: Exception) -> bool:
    return bool(class_names(error) & {"ConnectError", "ConnectTimeout", "ProxyError"})


def is_passing(error: Exception) -> bool:
    """Return whether another attempt may succeed."""
    status, kinds = status_of(error), class_names(error)
    if status is not None:
        return status in PASSING
    if kinds & {"RemoteProtocolError"}:  # an interrupted response, or not HTTP at all
        return any(text in str(error) for text in CUTS)
    if kinds & {"UnsupportedProtocol", "LocalProtocolError", "DecodingError"}:
        return False
    return isinstance(error, ConnectionCut) or "TransportError" in kinds


def reason_of(error: Exception) -> str:
    """Say what went wrong, in a few words."""
    status = status_of(error)
    if status is not None:
        return f"the hub answered {status}"
    lines = str(error).strip().splitlines()
    return shown(lines[0]) if lines else type(error).__name__


def explain(error: Exception, name: str, repo: str, revision: str) -> UserError:
    """Turn an error of huggingface_hub into a UserError that says what to do.

    name: the model's name as the user gave it.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{name}: {repo} is gated; accept its license on {constants.ENDPOINT}/{repo}, "
            "log in with `hf auth login`, and try again"
        )
    if isinstance(error, errors.DisabledRepoError):
        return UserError(f"{name}: {repo} is disabled on the hub; choose another")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{name}: {repo} has no revision {revision}; omit --revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"{name}: {repo} is not on the hub; if it is private, log in first: `hf auth login`"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"{name}: HF_HUB_OFFLINE is set; unset it to download {repo}")
    if status_of(error) in (401, 403):
        return UserError(
            f"{name}: this account may not download {repo}; log in again: `hf auth login`"
        )
    if is_unreachable(error):
        return UserError(
            f"{name}: the hub cannot be reached at {constants.ENDPOINT} ({reason_of(error)}); "
            "check the network, HF_ENDPOINT and proxies"
        )
    if class_names(error) & {"UnsupportedProtocol", "InvalidURL", "TooManyRedirects"}:
        return UserError(
            f"{name}: the hub at {constants.ENDPOINT} redirects to an invalid address "
            f"({reason_of(error)}); check HF_ENDPOINT"
        )
    return UserError(
        f"{name}: {repo} could not be downloaded ({reason_of(error)}); try again later"
    )
