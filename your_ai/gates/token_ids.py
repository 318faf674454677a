"""How many tokens a model has, and the gate for the ids that it is given. No mlx here.

MLX does not look whether an embedding has a row for an id: beyond the last row it reads
whatever memory is there, or the process dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from your_ai.errors import UserError
from your_ai.gates.text import shortened

if TYPE_CHECKING:
    import mlx.nn as nn

EMBEDDINGS = (  # what architectures call the table of their tokens
    *("embed", "embed_in", "embed_tokens", "embedding", "embeddings", "wte"),
    *("tok_embeddings", "token_embeddings", "word_embeddings"),
)
HEADS = ("lm_head", "output", "embed_out")


def rows_of(model: nn.Module, names: tuple[str, ...]) -> int | None:
    """The fewest rows of the tables of these names beside the blocks; None where there is none."""
    found = []
    for path, module in model.named_modules():
        *owners, leaf = path.split(".")
        if leaf in names and not any(owner.isdecimal() for owner in owners):
            if "weight" in module:
                found.append(module["weight"].shape[0])
            elif "rows" in vars(module):  # which stay in their file
                found.append(vars(module)["rows"].shape[0])
    return min(found, default=None)


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens a model has: the rows of its embedding, or of its head if these are fewer.

    Of the arrays, whatever its config.json says. None where the embedding's name is not known.
    """
    found = rows_of(model, EMBEDDINGS)
    return found if found is None else min(found, rows_of(model, HEADS) or found)


def check_ids(ids: Any, vocabulary: int | None, tokenizer: Any, where: str) -> None:
    """Raise UserError, which begins with `where`, for a token that the model does not have.

    ids: integers; vocabulary: how many tokens the model has, None where it is not known.
    """
    if vocabulary is None or not len(ids):
        return
    least, most = int(np.min(ids)), int(np.max(ids))
    if least < 0 or most >= vocabulary:
        number = least if least < 0 else most
        text = shortened(str(tokenizer.convert_ids_to_tokens([number])[0])) if number >= 0 else ""
        raise UserError(
            f"{where}: has token {number}{f' ({text})' if text else ''}, but the model has "
            f"{vocabulary}; use the tokenizer that the model was made with, or a model whose "
            "embedding was resized for added tokens"
        )
