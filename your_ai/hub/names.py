"""Find the repository id of a model on this machine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from your_ai.errors import UserError
from your_ai.hub.find import REPO
from your_ai.hub.record import read_record
from your_ai.hub.registry import aliases_like, known


@dataclass(frozen=True)
class HubName:
    """A model on the hub. revision: a commit, or None if not known."""

    repo: str
    revision: str | None = None


def hub_name(folder: Path, named: str) -> HubName | None:
    """Return the hub name of the model in `folder`; None if not known.

    named: the name of the model in the run's settings.
    """
    with contextlib.suppress(UserError):  # a damaged record gives no name
        record = read_record(folder)
        if record is not None:
            return HubName(record.repo, record.revision)
    snapshot = folder.absolute()
    cached = snapshot.parent.parent.name
    repo = cached.removeprefix("models--").replace("--", "/", 1)
    if snapshot.parent.name == "snapshots" and cached != repo and REPO.fullmatch(repo):
        return HubName(repo, snapshot.name)
    found = aliases_like(named)
    if len(found) == 1:
        return HubName(known()[found[0]].repo)
    if REPO.fullmatch(named) and not Path(named).exists():
        return HubName(named)
    return None
