"""Check token ids against the vocabulary size of a model. Does not import mlx.

MLX does not check that an embedding has a row for an id. For an id past the last row it reads
unrelated memory, or the process crashes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from your_ai.errors import UserError
from your_ai.gates.text import counted, shortened

if TYPE_CHECKING:
    import mlx.nn as nn

EMBEDDINGS = (  # names of the token embedding in different architectures
    *("embed", "embed_in", "embed_tokens", "embedding", "embeddings", "wte"),
    *("tok_embeddings", "token_embeddings", "word_embeddings"),
)
HEADS = ("lm_head", "output", "embed_out")


def rows_of(model: nn.Module, names: tuple[str, ...]) -> int | None:
    """The minimum number of rows of modules with these names outside the blocks, or None."""
    found = []
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in names and is_outside_blocks(path):
            if "weight" in module:
                found.append(module["weight"].shape[0])
            elif (
                rows := getattr(module, "rows", None)
            ) is not None:  # partly trained, or in a file
                found.append(rows.shape[0])
    return min(found, default=None)


def is_outside_blocks(path: str) -> bool:
    """Return whether the path of a module has no index of a block before its name."""
    return not any(owner.isdecimal() for owner in path.split(".")[:-1])


def vocabulary_of(model: nn.Module) -> int | None:
    """The vocabulary size of a model: the rows of its embedding, or of its head if fewer.

    Uses the shapes of the arrays, not config.json. None if the embedding is not found.
    """
    found = rows_of(model, EMBEDDINGS)
    return found if found is None else min(found, rows_of(model, HEADS) or found)


def check_ids(ids: Any, vocabulary: int | None, tokenizer: Any, where: str) -> None:
    """Raise UserError, whose message begins with `where`, for an id outside the vocabulary.

    ids: integers.
    vocabulary: the vocabulary size of the model, or None if not known.
    """
    if vocabulary is None or not len(ids):
        return
    least, most = int(np.min(ids)), int(np.max(ids))
    if least < 0 or most >= vocabulary:
        number = least if least < 0 else most
        text = shortened(str(tokenizer.convert_ids_to_tokens([number])[0])) if number >= 0 else ""
        raise UserError(
            f"{where}: has token id {number}{f' ({text})' if text else ''}, but the model has "
            f"{counted(vocabulary, 'token')}; use the model's own tokenizer, or a model whose "
            "embedding was resized for added tokens"
        )
