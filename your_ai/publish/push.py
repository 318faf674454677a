"""Files -> a repo of the hub, in one commit, through huggingface_hub.

Nothing of a push that was cut can be seen but a new repo without files: the same command
does it again, and sends no large file twice.
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
from your_ai.gates.foreign import MB, parse_json
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
from your_ai.publish.card import CARD
from your_ai.publish.user_section import merged

if TYPE_CHECKING:
    from your_ai.publish.contents import Contents

MAIN = "main"
ASK_S = 5.0  # for an answer to who we are, before training
WAIT_S = 120.0  # for any other answer: a commit of many files takes the hub a while
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
ACCOUNT_BYTES, CARD_BYTES = MB, 16 * MB  # of the hub's answers
READERS = ("read", "no_access")  # roles


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """url: of the repo; changed: whether there was anything new; notes: for the user."""

    url: str
    private: bool
    changed: bool
    notes: tuple[str, ...] = ()


# Before


def check_repo(repo: str, label: str) -> None:
    """Raise UserError, which begins with `label`, for what is no name of a repo, ORG/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not REPO.fullmatch(repo):
        raise UserError(f"{label}: is no repo of the hub; give your name there, too: ORG/NAME")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        reason = str(error).split(": '")[0].rstrip(".")
        raise UserError(f"{label}: is no name that the hub takes ({reason})") from error


def check_token(repo: str) -> None:
    """Raise UserError where nothing can be pushed from here: offline, or not logged in."""
    check_endpoint()
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{repo}: HF_HUB_OFFLINE is set; unset it to push")
    try:
        token = get_token()
    except Exception as error:  # of any kind: some tokens are asked for, and renewed
        raise UserError(f"{repo}: no token for the hub ({reason_of(error)}); {LOG_IN}") from error
    if not token:
        raise UserError(f"{repo}: you are not logged in to the hub; {LOG_IN}")


def check_account(repo: str) -> str:
    """Whether the hub knows who would push to `repo` and lets them, in one quick question.

    A note where that cannot be found out now, else "". Raises UserError where it is certain
    that they may not.
    """
    check_repo(repo, f"--push-to {repo}")
    check_token(repo)
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    url = f"{constants.ENDPOINT}/api/whoami-v2"
    try:
        account = parse_json(read_answer(url, build_hf_headers(), ACCOUNT_BYTES, timeout=ASK_S))
    except Exception as error:  # of any kind: its transport's come through
        if status_of(error) in (401, 403):
            raise told(error, repo, "") from error
        reason = reason_of(error)
        return f"--push-to {repo}: not checked, since the hub cannot be asked now ({reason})"
    check_rights(repo, account)
    return ""


def check_rights(repo: str, account: Any) -> None:
    """Raise UserError where what the hub tells of an account means that it may not push.

    A token with rights of its own kind (fine-grained) may hide some of them: the push tells.
    """
    try:
        name, role = account["name"], account["auth"]["accessToken"]["role"]
        roles = {org["name"].lower(): org.get("roleInOrg", "") for org in account["orgs"]}
    except (LookupError, TypeError, AttributeError):
        return  # of another kind of login
    if role == "read":
        raise UserError(f"{repo}: your token for the hub may only read; make one that may write")
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
    """Make the repo where it is not there, and send it all in one commit.

    again: the command that does it once more, for errors; public: a new repo, which is
    private else; revision: a branch, made where it is not there. Raises UserError for what
    the user can mend, RunError where another try may go well.
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
                ours = files[CARD].decode() if isinstance(files[CARD], bytes) else ""
                theirs = read_card(repo, info["sha"])
                text, note = merged(theirs, ours)
                notes += [f"{repo}: {note}"] if note else []
                if text == theirs:
                    del files[CARD]  # nor is it checked again by the hub
                else:
                    files[CARD] = text.encode("utf-8", "replace")
            if public and info.get("private") and not is_new:
                notes.append(f"{repo}: is private and stays so; --public is for a new repo")
            done = api.create_commit(
                repo,
                [CommitOperationAdd(name, content) for name, content in files.items()],
                commit_message=message or f"{contents.what}, by your_ai",
                revision=branch,
                parent_commit=info["sha"],
            )
        except (UserError, RunError):
            raise
        except Exception as error:  # of any kind: its transport's and those of hf_xet come through
            raise told(error, repo, again) from error
    at = f"/tree/{branch}" if branch != MAIN else ""
    return Pushed(
        url=f"{api.endpoint}/{repo}{at}",
        private=bool(info.get("private")),
        changed=done.oid != info["sha"],
        notes=(*notes, *warned),
    )


def make(api: Any, repo: str, branch: str, public: bool) -> bool:
    """Make the repo and the branch where they are not there; whether the repo is new."""
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
    """The README.md of a repo."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repo, CARD, revision=commit)
    answer = read_answer(url, build_hf_headers(), CARD_BYTES, timeout=WAIT_S)
    return answer.decode("utf-8-sig", "replace")


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Without the client's own words; its warnings, in a line each, once the block has ended.

    Bars of progress are for terminals.
    """
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    level, found = logging.get_verbosity(), []
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


def told(error: Exception, repo: str, again: str) -> UserError | RunError:
    """An error of the hub's client as what the user can do."""
    from huggingface_hub import constants, errors

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of the upload of a large file
    status, owner = status_of(error), repo.split("/")[0]
    said = first_line(getattr(error, "server_message", None) or "")
    because = f" ({said})" if said else ""
    once_more = f"do it again: {again}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(f"{repo}: HF_HUB_OFFLINE is set; unset it to push")
    if isinstance(error, errors.LocalTokenNotFoundError):
        return UserError(f"{repo}: you are not logged in to the hub; {LOG_IN}")
    if status == 401:
        return UserError(f"{repo}: the hub does not take your token; {LOG_IN}")
    if status == 403:
        return UserError(
            f"{repo}: the hub does not let you write to {owner}{because}; give your token that "
            "right, or push to a name of your own"
        )
    if status == 404:
        return UserError(f"{repo}: is not on the hub, or not for this account{because}")
    if status in (409, 412):
        return RunError(f"{repo}: was changed by another just now; {once_more}")
    if is_unreachable(error):
        return UserError(
            f"{repo}: the hub cannot be reached at {constants.ENDPOINT} ({reason_of(error)}); "
            f"check the network, HF_ENDPOINT and proxies, then {once_more}"
        )
    if is_passing(error) or isinstance(error, json.JSONDecodeError):
        return RunError(f"{repo}: the push was cut ({reason_of(error)}); {once_more}")
    if status is not None:
        return UserError(f"{repo}: the hub refused it with {status}{because}")
    if isinstance(error, ValueError) and "README.md" in str(error):
        lines = " ".join(str(error).split())
        return UserError(f"{repo}: {lines} Mend the top of README.md there, then {once_more}")
    reason = first_line(str(error)) or type(error).__name__
    return RunError(f"{repo}: the push failed ({reason}); {once_more}")


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else ""
