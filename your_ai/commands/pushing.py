"""`your_ai push`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from your_ai.commands.options import CHECKPOINT, MODEL, open_trained_with_note
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error

if TYPE_CHECKING:
    from your_ai.publish.contents import Contents


def push(
    run: Annotated[
        str, typer.Argument(help="The run, or a folder that fuse or export wrote.", metavar="RUN")
    ],
    repo: Annotated[str, typer.Argument(help="The repo on the hub.", metavar="ORG/NAME")],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repo public; default: private.")
    ] = False,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch to push to; created if it does not exist.")
    ] = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Push nothing; write the files to a new folder.")
    ] = False,
) -> None:
    """Push a run's adapter to the Hugging Face Hub, with a model card; never data or samples."""
    from your_ai.publish import push as pushing

    pushing.check_repo(repo, repo)
    if not dry_run:
        pushing.check_token(repo)
    contents = gather(run, repo, checkpoint, model)
    if dry_run:
        from your_ai.publish.contents import write

        for note in contents.notes:
            echo_error(f"note: {note}")
        echo(write(contents))
        return
    given = {
        "--checkpoint": checkpoint,
        "--model": model,
        "--revision": revision,
        "--message": message,
    }
    options = [part for name, value in given.items() if value for part in (name, value)]
    again = shlex.join(["your_ai", "push", run, repo, *options, *["--public"] * public])
    done = pushing.push(contents, repo, again, public=public, revision=revision, message=message)
    for note in done.notes:
        echo_error(f"note: {note}")
    seen = "private" if done.private else "public: everyone can see it"
    new = "" if done.changed else "; nothing had changed"
    echo(f"pushed to {done.url} ({seen}){new}")


def gather(run: str, repo: str, checkpoint: str | None, model: str | None) -> Contents:
    """Return the files to push. Raises UserError if there are none."""
    from your_ai.publish.contents import is_folder, of_folder, of_run

    if is_folder(run):
        for name, value in (("--checkpoint", checkpoint), ("--model", model)):
            if value is not None:
                raise UserError(f"{name} {value}: only works with a run, and {run} is a folder")
        return of_folder(Path(run), repo)

    trained = open_trained_with_note(run, checkpoint, model)
    return of_run(trained, repo)
