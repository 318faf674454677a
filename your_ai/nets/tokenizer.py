"""Open the tokenizer of a model, with its chat template and its end tokens.

Every command opens tokenizers here, so all of them train, count and stop at the same tokens.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from mlx_lm.utils import load_tokenizer
from transformers import dynamic_module_utils

from your_ai.data.template import LEAST_BYTES, render
from your_ai.errors import UserError, first_line
from your_ai.gates.text import shortened, shown
from your_ai.gates.untrusted import read_json
from your_ai.hub.check import check_tokenizer_files

TOKENIZER_CLASS = re.compile(r"(?!Auto|Rag)\w*(?:Tokenizer|TokenizerFast|Backend)")
GENERATION = "generation_config.json"
# Files whose chat template transformers reads for processors only, the preferred one first.
PROCESSORS = ("chat_template.json", "processor_config.json")
QUESTIONS, ANSWERS = ("\ue000", "\ue001"), ("\ue002", "\ue003")  # in no template

dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # refuse custom code of a model without asking


def open_tokenizer(folder: Path, files: Path | None = None) -> Any:
    """Open the tokenizer of a model folder (an mlx-lm TokenizerWrapper).

    files: the folder with its files, if they are not those of the model.

    Its `eos_token_ids` are those of the model, and the token that ends a turn in its chat template.
    Never runs code from the folder, and never prompts. Raises UserError if it cannot be loaded.
    """
    files = files or folder
    check_tokenizer_files(files)
    try:
        check_class(files)
        options = {"trust_remote_code": False, **template_of_processor(files)}
        tokenizer = load_tokenizer(files, options, eos_token_ids=configured_ends(folder))
        free_copies(tokenizer)
        ends = list(tokenizer.eos_token_ids)
    except UserError:
        raise
    except Exception as error:  # transformers raises any type for a broken tokenizer
        if "custom code" in str(error) or "trust_remote_code" in str(error):
            raise needs_code(folder) from error
        reason = shortened(first_line(error))
        raise UserError(f"{folder}: its tokenizer cannot be loaded ({reason})") from error
    wrong = [end for end in ends if type(end) is not int or not 0 <= end < 1 << 32]
    if wrong:
        raise UserError(f"{folder}: eos_token_id {shortened(repr(wrong[0]))}: is not a token id")
    turn_end = turn_end_of(tokenizer)
    if turn_end is not None:
        tokenizer.eos_token_ids = {*ends, turn_end}
    return tokenizer


class TokenTexts(Sequence[str]):
    """The text of each token, by id, as a tokenizer looks it up."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __getitem__(self, token: Any) -> Any:
        return self.tokenizer.convert_ids_to_tokens(token)


def free_copies(tokenizer: Any) -> None:
    """Free the copies of its vocabulary that a tokenizer (an mlx-lm TokenizerWrapper) keeps in
    Python: 40 MB for 152k tokens.

    transformers keeps what its backend was built from, and mlx-lm the text of each token.
    """
    own, detokenizer = (vars(tokenizer)[name] for name in ("_tokenizer", "_detokenizer"))
    if isinstance(own, transformers.TokenizersBackend):
        vars(own).pop("_vocab", None)
    if isinstance(detokenizer, BPEStreamingDetokenizer):
        detokenizer.tokenmap = TokenTexts(own)


def configured_ends(folder: Path) -> Any:
    """`eos_token_id` of generation_config.json, else of config.json, as in mlx-lm; unchecked."""
    with contextlib.suppress(UserError):  # mlx-lm, too, ignores a damaged generation_config.json
        if ends := content_of(folder / GENERATION).get("eos_token_id"):
            return ends
    return content_of(folder / "config.json").get("eos_token_id")


def content_of(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    return read_json(path, "") if path.is_file() else {}


def template_of_processor(folder: Path) -> dict[str, Any]:
    """The chat template that only the model's processor has, as an option of transformers.

    Empty if the tokenizer has one of its own, or there is none.
    """
    own = content_of(folder / "tokenizer_config.json").get("chat_template")
    if own or (folder / "chat_template.jinja").is_file():
        return {}
    templates = (content_of(folder / name).get("chat_template") for name in PROCESSORS)
    return next(({"chat_template": template} for template in templates if template), {})


def turn_end_of(tokenizer: Any) -> int | None:
    """The token that ends a turn of the assistant in the chat template; None if there is none.

    It follows an answer both before another question and at the end of a chat: an end token of the
    tokenizer, else the first added token.
    """
    tails = answer_tails(tokenizer)
    added = {text: token for text, token in tokenizer.get_added_vocab().items() if text.strip()}
    if tails is None or not added:
        return None
    shared = os.path.commonprefix(tails)  # noqa: RUF071 (compares characters, as wanted)
    longest_first = sorted(added, key=len, reverse=True)
    found = [added[text] for text in re.findall("|".join(map(re.escape, longest_first)), shared)]
    known = [token for token in found if token in tokenizer.eos_token_ids]
    return next(iter(known or found), None)


def answer_tails(tokenizer: Any) -> tuple[str, str] | None:
    """The texts that the chat template writes after an answer: up to the next question, at the end.

    None without a chat template, or if it does not show the texts of such a chat.
    """
    if not tokenizer.has_chat_template:
        return None
    chat = [
        {"role": role, "content": text}
        for turn in zip(QUESTIONS, ANSWERS, strict=True)
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    try:
        text = render(tokenizer, chat, "", LEAST_BYTES)
    except UserError:  # the rows will show what is wrong
        return None
    if any(text.count(part) != 1 for part in (*QUESTIONS, *ANSWERS)):
        return None
    between = text.partition(ANSWERS[0])[2].partition(QUESTIONS[1])[0]
    return between, text.partition(ANSWERS[1])[2]


def end_notes(folder: Path, tokenizer: Any) -> list[str]:
    """Notes on the tokens that end an answer, one line each.

    folder: of the model; tokenizer: from `open_tokenizer`.
    """
    tails = answer_tails(tokenizer)
    if tails is None:
        return []
    if (end := added_end(folder, tokenizer)) is not None:
        (text,) = tokenizer.convert_ids_to_tokens([end])
        return [
            f"the chat template ends an answer with {shown(text)}, which is no end token of the "
            "model; your_ai trains it and stops there, in this run and its exports"
        ]
    texts = tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))
    if any(text and text in tails[1] for text in texts):
        return []
    written = shortened(repr(tails[1].strip())) if tails[1].strip() else "nothing"
    return [
        f"the chat template ends the last answer with {written}, not with a token: the model does "
        "not learn where to stop; use a model whose chat template ends answers with a token"
    ]


def added_end(folder: Path, tokenizer: Any) -> int | None:
    """The token that ends a turn, if the model's files do not name it as an end token."""
    ends, turn_end = configured_ends(folder), turn_end_of(tokenizer)
    known = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    return None if turn_end in known else turn_end


def added_end_text(folder: Path) -> str:
    """The text of `added_end`; empty if there is none, also if the tokenizer cannot be loaded."""
    with contextlib.suppress(UserError):
        tokenizer = open_tokenizer(folder)
        if (end := added_end(folder, tokenizer)) is not None:
            text: str = tokenizer.convert_ids_to_tokens([end])[0]
            return text
    return ""


def check_class(folder: Path) -> None:
    """Raise UserError if a tokenizer's class names an object of transformers of another kind.

    transformers looks the name up among all its objects and calls the result, and ignores
    trust_remote_code there.
    """
    for name in ("tokenizer_config.json", "config.json"):
        path = folder / name
        kind = content_of(path).get("tokenizer_class")
        known = isinstance(kind, str) and (
            TOKENIZER_CLASS.fullmatch(kind) or not hasattr(transformers, kind)
        )
        if kind is not None and not known:
            raise UserError(f"{path}: tokenizer_class {shown(kind)}: is not a tokenizer")


def needs_code(folder: Path) -> UserError:
    return UserError(
        f"{folder}: its tokenizer is custom Python code (auto_map in tokenizer_config.json), "
        "which your_ai never runs; use a model whose tokenizer is built into transformers"
    )


def spelled(tokenizer: Any, most: int) -> dict[str, int]:
    """The tokens below `most` of a tokenizer, with their ids."""
    return {token: number for token, number in tokenizer.get_vocab().items() if number < most}


def first_difference(mine: dict[str, int], its: dict[str, int]) -> str:
    """The first token that two tokenizers spell differently, in words; "" if none."""
    if mine == its:
        return ""
    by_id = sorted({*mine.items()} ^ {*its.items()}, key=lambda item: (item[1], item[0]))
    token, number = by_id[0]
    other = {index: text for text, index in (its if mine.get(token) == number else mine).items()}
    has = shown(other[number]) if number in other else "nothing"
    return f"token {number} is {shown(token)} in one and {has} in the other"
