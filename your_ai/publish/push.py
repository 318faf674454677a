"""Pushes files to a repository of the hub in one commit, through huggingface_hub.

A push that was interrupted leaves at most a new repository without files. The same command
repeats it, and sends no large file twice.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from your_ai.errors import RunError, UserError
from your_ai.gates.untrusted import MB, parse_json
from your_ai.hub.find import REPO
from your_ai.hub.remote import (
    check_endpoint,
    described,
    is_passing,
    is_unreachable,
    read_answer,
    reason_of,
    status_of,
)
from your_ai.publish.card import CARD, merged

if TYPE_CHECKING:
    from your_ai.publish.contents import Contents

MAIN = "main"
ASK_S = 5.0  # for the check of the account before training
WAIT_S = 120.0  # for other answers: the hub needs time for a commit of many files
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
ACCOUNT_BYTES, CARD_BYTES = MB, 16 * MB  # of the hub's answers
READERS = ("read", "no_access")  # roles that may not write


@dataclass(frozen=True, kw_only=True)
class Pushed:
    url: str
    """URL of the repository."""
    private: bool
    changed: bool
    """Whether there was anything new."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


# Checks before a push


def check_repo(repo: str, label: str) -> None:
    """Raise UserError, which begins with `label`, if `repo` is not a name like ORG/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not REPO.fullmatch(repo):
        raise UserError(f"{label}: is not a repository name; write it as ORG/NAME")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        reason = str(error).split(": '")[0].rstrip(".")
        raise UserError(f"{label}: the hub does not allow this name ({reason})") from error


def check_token(repo: str) -> None:
    """Raise UserError if a push is not possible: offline, or not logged in."""
    check_endpoint()
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{repo}: HF_HUB_OFFLINE is set; unset it to push")
    try:
        token = get_token()
    except Exception as error:  # of any kind: some tokens are requested or renewed here
        raise UserError(f"{repo}: no token for the hub ({reason_of(error)}); {LOG_IN}") from error
    if not token:
        raise UserError(f"{repo}: you are not logged in to the hub; {LOG_IN}")


def check_account(repo: str) -> str:
    """Ask the hub whether the user may push to `repo`, in one quick request.

    Return a note if the hub cannot say now, else "". Raises UserError if the user may not.
    """
    check_repo(repo, f"--push-to {repo}")
    check_token(repo)
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    url = f"{constants.ENDPOINT}/api/whoami-v2"
    try:
        account = parse_json(read_answer(url, build_hf_headers(), ACCOUNT_BYTES, timeout=ASK_S))
    except Exception as error:  # of any kind, also from the transport
        if status_of(error) in (401, 403):
            raise explained(error, repo, "") from error
        reason = reason_of(error)
        return f"--push-to {repo}: not checked, because the hub does not answer now ({reason})"
    check_rights(repo, account)
    return ""


def check_rights(repo: str, account: Any) -> None:
    """Raise UserError if the hub's answer about an account means that it may not push.

    A fine-grained token may hide some of its rights; then the push itself shows it.
    """
    try:
        name, role = account["name"], account["auth"]["accessToken"]["role"]
        roles = {org["name"].lower(): org.get("roleInOrg", "") for org in account["orgs"]}
    except (LookupError, TypeError, AttributeError):
        return  # another kind of login
    if role == "read":
        raise UserError(f"{repo}: your token for the hub can only read; create one that can write")
    owner = repo.split("/")[0]
    if role != "write" or owner.lower() == name.lower():
        return
    if roles.get(owner.lower(), READERS[0]) in READERS:
        yours = ", ".join([name, *(org for org, role in roles.items() if role not in READERS)])
        raise UserError(f"{repo}: {name} may not write to {owner}; push to one of: {yours}")


# The push


def push(
    contents: Contents,
    repo: str,
    again: str,
    *,
    public: bool = False,
    revision: str | None = None,
    message: str = "",
) -> Pushed:
    """Create the repository if it is missing, and send everything in one commit.

    again: the command that repeats the push, for error messages.
    public: make a new repository public instead of private.
    revision: a branch, created if it is missing.

    Raises UserError if the user has to fix something, RunError if another try may succeed.
    """
    check_repo(repo, repo)
    check_token(repo)
    from huggingface_hub import CommitOperationAdd, HfApi, get_session

    api, branch = HfApi(), revision or MAIN
    get_session().timeout = WAIT_S
    with quiet() as warned:
        try:
            is_new = make(api, repo, branch, public)
            info = described(repo, branch, timeout=WAIT_S)
            files, notes = dict(contents.files), list(contents.notes)
            if any(sibling.get("rfilename") == CARD for sibling in info["siblings"]):
                ours = made.decode() if isinstance(made := files[CARD], bytes) else ""
                theirs = read_card(repo, info["sha"])
                text, note = merged(theirs, ours)
                notes += [f"{repo}: {note}"] if note else []
                if text == theirs:
                    del files[CARD]  # so the hub does not check it again
                else:
                    files[CARD] = text.encode("utf-8", "replace")
            if public and info.get("private") and not is_new:
                notes.append(f"{repo}: stays private; --public only works for a new repository")
            done = api.create_commit(
                repo,
                [CommitOperationAdd(name, content) for name, content in files.items()],
                commit_message=message or f"{contents.what}, by your_ai",
                revision=branch,
                parent_commit=info["sha"],
            )
        except (UserError, RunError):
            raise
        except Exception as error:  # of any kind, also from the transport and hf_xet
            raise explained(error, repo, again) from error
    at = f"/tree/{branch}" if branch != MAIN else ""
    return Pushed(
        url=f"{api.endpoint}/{repo}{at}",
        private=bool(info.get("private")),
        changed=done.oid != info["sha"],
        notes=(*notes, *warned),
    )


def make(api: Any, repo: str, branch: str, public: bool) -> bool:
    """Create the repository and the branch if they are missing; whether the repository is new."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    is_new = False
    try:
        described(repo, branch, timeout=WAIT_S)
    except RepositoryNotFoundError:
        is_new = True
        api.create_repo(repo, private=not public, exist_ok=True)
    except RevisionNotFoundError:
        pass
    else:
        return False
    if branch != MAIN:
        api.create_branch(repo, branch=branch, exist_ok=True)
    return is_new


def read_card(repo: str, commit: str) -> str:
    """The README.md of a repository."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repo, CARD, revision=commit)
    answer = read_answer(url, build_hf_headers(), CARD_BYTES, timeout=WAIT_S)
    return answer.decode("utf-8-sig", "replace")


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Silence the client; give its warnings, one line each, when the block has ended.

    Progress bars are only shown on terminals.
    """
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    level = logging.get_verbosity()
    found: list[str] = []
    to_hide = not sys.stderr.isatty() and not are_progress_bars_disabled()
    logging.set_verbosity_error()
    if to_hide:
        disable_progress_bars()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        texts = [" ".join(str(warning.message).split()) for warning in caught]
        found += [text for text in texts if CARD in text]
    finally:
        logging.set_verbosity(level)
        if to_hide:
            enable_progress_bars()


def explained(error: Exception, repo: str, again: str) -> UserError | RunError:
    """Turn an error of the hub's client into a message that says what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # from the upload of a large file
    status, owner = status_of(error), repo.split("/")[0]
    said = first_line(getattr(error, "server_message", None) or "")
    because = f" ({said})" if said else ""
    once_more = f"try again: {again}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"{repo}: HF_HUB_OFFLINE is set; unset it to push")
    if isinstance(error, errors.LocalTokenNotFoundError):
        return UserError(f"{repo}: you are not logged in to the hub; {LOG_IN}")
    if status == 401:
        return UserError(f"{repo}: the hub does not take your token; {LOG_IN}")
    if status == 403:
        return UserError(
            f"{repo}: the hub does not let you write to {owner}{because}; give your token that "
            "right, or push to your own name"
        )
    if status == 404:
        return UserError(f"{repo}: is not on the hub, or not visible to this account{because}")
    if status in (409, 412):
        return RunError(f"{repo}: somebody else changed it just now; {once_more}")
    if is_unreachable(error):
        return UserError(
            f"{repo}: the hub cannot be reached at {constants.ENDPOINT} ({reason_of(error)}); "
            f"check the network, HF_ENDPOINT and proxies, then {once_more}"
        )
    if is_passing(error) or isinstance(error, json.JSONDecodeError):
        return RunError(f"{repo}: the push was interrupted ({reason_of(error)}); {once_more}")
    if status is not None:
        return UserError(f"{repo}: the hub refused the push with {status}{because}")
    if isinstance(error, ValueError) and "README.md" in str(error):
        lines = " ".join(str(error).split())
        return UserError(f"{repo}: {lines} Fix the metadata of README.md there, then {once_more}")
    reason = first_line(str(error)) or type(error).__name__
    return RunError(f"{repo}: the push failed ({reason}); {once_more}")


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else ""
