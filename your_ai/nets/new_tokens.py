"""Tokens that a run adds to the tokenizer of its model, and trains.

The tokenizer with them is in the run's folder, so every command reads the same ids, also if the
file that named the tokens changes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.files import atomic_folder, read_text, sha256
from your_ai.gates.text import counted, shortened, shown
from your_ai.gates.untrusted import read_json
from your_ai.nets.tokenizer import open_tokenizer
from your_ai.nets.vocabulary import MOST_TOKENS
from your_ai.run.checkpoint import write_json

RECORD = "new_tokens.json"  # beside the files of the tokenizer: what spelled each new token
LIST_BYTES = 1 << 24  # maximum size of a file with tokens
GROWS_BY = 64  # embeddings grow by a multiple of this, as matrix products of GPUs want
FILE_NAME = re.compile(r"[^<>,]+\.[A-Za-z]{2,5}")  # a value that is rather a file than one token
OPTIONS = ("add_tokens", "add_special_tokens")


@dataclass(frozen=True)
class NewTokens:
    """The tokens that were added to a tokenizer."""

    spelled: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By its id, the tokens that spelled the text of a new one before."""
    files: dict[str, str] = field(default_factory=dict)
    """The checksum of the tokenizer with them, by its name in a model's folder."""

    def trained(self, vocabulary: int) -> tuple[int, ...]:
        """The tokens whose rows are trained, ascending: these, and all that the base does not have.

        vocabulary: the rows of the base. Free ones, which padded sizes leave, are used first.
        """
        if not self.spelled:
            return ()
        last = max(self.spelled)
        count = vocabulary if last < vocabulary else -(-(last + 1) // GROWS_BY) * GROWS_BY
        return tuple(sorted({*self.spelled, *range(vocabulary, count)}))


def tokenizer_with_new(
    config: TrainConfig, folder: Path, place: Path, *, is_resumed: bool = False
) -> tuple[Any, NewTokens]:
    """The tokenizer of the model in `folder` with the tokens that the settings add to it.

    place: the folder of that tokenizer, which is written unless it is there.
    is_resumed: it must be there, because the tokens may no longer be those that were trained.
    Raises UserError if the tokens cannot be added.
    """
    if not (config.add_tokens or config.add_special_tokens):
        return open_tokenizer(folder), NewTokens()
    if is_resumed and not place.is_dir():
        raise UserError(f"{place}: is missing; restore it, or start a new run")
    if not place.is_dir():
        tokenizer = open_tokenizer(folder)
        spelled = added(tokenizer, *(texts_of(config, option) for option in OPTIONS))
        with atomic_folder(place) as written:
            tokenizer.save_pretrained(str(written))
            write_json(written / RECORD, {"spelled": {str(n): ids for n, ids in spelled.items()}})
    record = read_json(place / RECORD, "it says what spelled the new tokens")
    try:
        spelled = {int(n): tuple(map(int, ids)) for n, ids in record["spelled"].items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{place / RECORD}: is damaged; start a new run") from error
    return open_tokenizer(folder, place), NewTokens(spelled, files_of_tokenizer(place))


def files_of_tokenizer(place: Path) -> dict[str, str]:
    """The checksum of a tokenizer with new tokens; empty if there is none in `place`."""
    file = place / "tokenizer.json"
    return {file.name: sha256(file)} if file.is_file() else {}


def texts_of(config: TrainConfig, option: str) -> list[str]:
    """The texts that an option names: in the lines of a file, or separated by commas."""
    value = getattr(config, option)
    path, flag = os.path.expanduser(value), f"--{option.replace('_', '-')}"
    if os.path.isfile(path):
        try:
            content = read_text(Path(path), LIST_BYTES).removeprefix("\ufeff")  # a byte order mark
            texts = content.replace("\r\n", "\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UserError(f"{flag} {value}: cannot be read ({reason})") from error
    elif os.path.isdir(path):
        raise UserError(f"{flag} {shortened(value)}: is a folder; give a file of tokens")
    elif FILE_NAME.fullmatch(value) or (os.sep in value and not value.startswith("<")):
        raise UserError(
            f"{flag} {shortened(value)}: there is no such file; a token of this text can be given "
            "in a file"
        )
    else:
        texts = [text.strip() for text in value.split(",")]
    found = [text for text in texts if text.strip()]
    if value and not found:
        raise UserError(f"{flag} {shortened(value)}: names no token")
    for text, count in Counter(found).items():
        if count > 1:
            raise UserError(f"{flag}: {shown(text)} is there twice")
    return found


def added(tokenizer: Any, plain: list[str], special: list[str]) -> dict[int, tuple[int, ...]]:
    """Add tokens to a tokenizer, and return what spelled each before, by its id."""
    known, texts = tokenizer.get_vocab(), [*plain, *special]
    for text, count in Counter(texts).items():
        if text in known or count > 1:
            where = "already a token of this model" if text in known else "there twice"
            raise UserError(f"--add-tokens: {shown(text)} is {where}; leave it out")
    spelled = {text: tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    tokenizer.add_tokens(plain)
    tokenizer.add_tokens(special, special_tokens=True)
    ids = dict(zip(texts, tokenizer.convert_tokens_to_ids(texts), strict=True))
    taken = set(known.values())
    for text, number in ids.items():
        if number in taken or not 0 <= number < MOST_TOKENS:
            raise UserError(f"--add-tokens: the tokenizer of this model cannot add {shown(text)}")
        if tokenizer.encode(text, add_special_tokens=False)[-1:] != [number]:
            raise UserError(
                f"--add-tokens: {shown(text)} is not read as one token once it is added; use a "
                "text that is not a part of another token"
            )
    if len({*ids.values()}) < len(texts):
        raise UserError(f"--add-tokens: {counted(len(texts), 'token')} got fewer ids")
    return {number: spelled[text] for text, number in ids.items()}
