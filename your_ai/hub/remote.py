"""What a repo of the hub holds, its bytes, and what went wrong, in words.

Through what huggingface_hub documents: its session, headers and errors. Its own functions for
whole files begin each anew in a process that follows a killed one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from your_ai.errors import UserError
from your_ai.files import write_at
from your_ai.hub.check import WEIGHTS, found_instead, has_tokenizer
from your_ai.hub.find import WANTED

DEFAULT_REVISION = "main"
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


def ask(repo: str, revision: str) -> Listing:
    """What the hub has of a repo. Raises UserError for one that holds no model for your_ai.

    The errors of the hub's client come through.
    """
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(
        repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    )
    found = []
    for sibling in info.siblings or []:
        check_path(repo, sibling.rfilename)
        hashed = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
        if is_wanted(sibling.rfilename) and sibling.size is not None and hashed is not None:
            found.append(RemoteFile(sibling.rfilename, sibling.size, hashed))
    names = [sibling.rfilename for sibling in info.siblings or []]
    refuse(repo, names, [file.name for file in found])
    found.sort(key=lambda file: (file.name != "config.json", file.size_bytes, file.name))
    return Listing(repo=repo, revision=str(info.sha), files=tuple(found))


def is_wanted(path: str) -> bool:
    """Whether a model needs a file: those in folders are of other formats."""
    hidden = path.startswith(".")
    return "/" not in path and not hidden and any(fnmatch(path, pattern) for pattern in WANTED)


def check_path(repo: str, path: str) -> None:
    """Raise UserError for a path that would lead out of the folder it is put into."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable():
        raise UserError(f"{repo}: has a file {path!r}, which would leave its folder; refused")


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
    from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers

    try:
        opened = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(part, error) from error
    try:
        done = os.fstat(opened).st_size
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if done:
            headers["Range"] = f"bytes={done}-"
        url = hf_hub_url(listing.repo, file.name, revision=listing.revision)
        wait_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=wait_s) as response:
            hf_raise_for_status(response)
            if done and response.status_code != 206:  # who answers knows no ranges
                done = 0
                os.ftruncate(opened, 0)
            for chunk in response.iter_bytes():
                if done + len(chunk) > file.size_bytes:
                    os.ftruncate(opened, 0)  # nothing tells which of its bytes are right
                    raise Cut(f"the hub sent more than the {file.size_bytes} bytes of {file.name}")
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
    status = status_of(error)
    if status is not None:
        return status in PASSING
    return isinstance(error, Cut) or "TransportError" in kinds_of(error)


def reason_of(error: Exception) -> str:
    """What went wrong, in a few words."""
    status = status_of(error)
    if status is not None:
        return f"the hub answered {status}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
    return UserError(f"{name}: {repo} could not be fetched ({reason_of(error)}); try again later")
