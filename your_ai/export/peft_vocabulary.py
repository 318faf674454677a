"""Trained rows of embeddings and heads in PEFT's form.

The rows of some tokens are `PATH.token_adapter.trainable_tokens_delta` (K, D), the values that
replace those of the tokens in `trainable_token_indices`. Modules in `modules_to_save` are whole:
`PATH.weight`. LoRA on an embedding is `PATH.lora_embedding_A` (r, V) and `.lora_embedding_B`
(D, r); on a head it has the names of other linear layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import UserError
from your_ai.gates.text import shown
from your_ai.gates.token_ids import EMBEDDINGS, HEADS, is_outside_blocks
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.saved_adapter import Adapter
from your_ai.nets.vocabulary import (
    ALL_ROWS,
    EMBEDDINGS_OF,
    HEAD_OF,
    MOST_TOKENS,
    NEW_ROWS,
    NEW_TOKENS,
    TRAINED_MODULES,
    in_pieces,
    vocabulary_layers,
)

# In adapter_config.json:
WHOLE, TOKENS, TIES = "modules_to_save", "trainable_token_indices", "ensure_weight_tying"
OF_EMBEDDINGS = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
OF_HEADS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
ENDS = {NEW_ROWS: "token_adapter.trainable_tokens_delta", ALL_ROWS: "weight"}


def vocabulary_arrays(adapter: Adapter, prefix: str) -> dict[str, mx.array]:
    """The trained arrays of the vocabulary in PEFT's file; prefix: of all names there."""
    rows = adapter.trained_rows.items()
    found = {f"{prefix}{path}.{ENDS[leaf]}": array for (path, leaf), array in rows}
    for path, parts in adapter.low_rank.items():
        ends = OF_EMBEDDINGS if name_of(path) in EMBEDDINGS else OF_HEADS
        found |= {f"{prefix}{path}.{ends[part]}": array.T for part, array in parts.items()}
    return found


def low_rank_names(arrays: Arrays, prefix: str) -> dict[str, tuple[str, str]]:
    """The names of LoRA on embeddings and heads in PEFT's file: path and part of each."""
    found = {}
    for name in arrays:
        for names, ends in ((EMBEDDINGS, OF_EMBEDDINGS), (HEADS, OF_HEADS)):
            for part, end in ends.items():
                path = name.removeprefix(prefix).removesuffix(f".{end}")
                if f"{prefix}{path}.{end}" == name and name_of(path) in names:
                    found[name] = path, part
    return {name: at for name, at in found.items() if is_outside_blocks(at[0])}


def settings_of_vocabulary(adapter: Adapter) -> dict[str, Any]:
    """PEFT's settings for the rows that are trained.

    A base that lacks some of the tokens must be resized first, as transformers does with
    `resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)`.
    """
    names = {leaf: [p for p, kind in adapter.trained_rows if kind == leaf] for leaf in ENDS}
    tokens = adapter.config.get(NEW_TOKENS, [])
    found: dict[str, Any] = {WHOLE: [name_of(path) for path in names[ALL_ROWS]] or None}
    found[TOKENS] = {name_of(path): tokens for path in names[NEW_ROWS]} or None
    return {**found, TIES: True} if names[ALL_ROWS] else found


def name_of(path: str) -> str:
    return path.rpartition(".")[2]


def names_read(path: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """The modules that are saved as a whole, by name. Raises UserError for others than embeddings
    and heads."""
    given = config.get(WHOLE) or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise UserError(f"{path}: {WHOLE}: must be a list of names")
    for name in given:
        if name not in (*EMBEDDINGS, *HEADS):
            raise UserError(
                f"{path}: {WHOLE} {shown(name)}: only embeddings and heads can be imported"
            )
    return tuple(given)


def tokens_read(path: Path, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tokens whose rows are trained, by the name of the layer. Raises UserError."""
    given = config.get(TOKENS) or {}
    given = given if isinstance(given, dict) else {"embed_tokens": given}
    for name, tokens in given.items():
        if not isinstance(tokens, list) or not all(
            type(token) is int and 0 <= token < MOST_TOKENS for token in tokens
        ):
            raise UserError(f"{path}: {TOKENS} {shown(name)}: must be a list of token ids")
        if len({*tokens}) < len(tokens):
            raise UserError(f"{path}: {TOKENS} {shown(name)}: names a token twice")
    if len({tuple(sorted(tokens)) for tokens in given.values()}) > 1:
        raise UserError(f"{path}: {TOKENS}: must be the same for all layers")
    return {name: tuple(tokens) for name, tokens in given.items()}


def with_tied_head(entries: dict[str, Any], network: nn.Module) -> dict[str, Any]:
    """The entries of adapter_config.json of an embedding that is trained with its tied head."""
    modules = entries.get(TRAINED_MODULES, [])
    if EMBEDDINGS_OF not in modules or vocabulary_layers(network)[1] is not None:
        return entries
    return {**entries, TRAINED_MODULES: [EMBEDDINGS_OF, HEAD_OF]}


def taken_apart(
    file: Path,
    arrays: Arrays,
    prefix: str,
    whole: tuple[str, ...],
    tokens: dict[str, tuple[int, ...]],
) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """The arrays of the layers, those of the vocabulary by their names here, and the entries of
    adapter_config.json.

    prefix: of all names in the file. Raises UserError if an array does not suit the settings.
    """
    rest, found, modules = dict(arrays), dict[str, mx.array](), set[str]()
    for name in arrays:
        path = name.removeprefix(prefix).removesuffix(".weight").removesuffix(".default")
        path = path.removesuffix(f".{WHOLE}")
        of_tokens = path.removesuffix(f".{ENDS[NEW_ROWS]}")
        if name_of(path) in whole and name.endswith(".weight"):
            leaf, count = ALL_ROWS, None
            modules.add(HEAD_OF if name_of(path) in HEADS else EMBEDDINGS_OF)
        elif of_tokens != path and name_of(of_tokens) in tokens:
            path, leaf, count = of_tokens, NEW_ROWS, len(tokens[name_of(of_tokens)])
        else:
            continue
        array = rest.pop(name)
        if array.ndim != 2 or (count is not None and len(array) != count):
            raise UserError(f"{file}: {shown(name)} has not the rows that its settings name")
        if not (mx.issubdtype(array.dtype, mx.floating) and mx.isfinite(array).all().item()):
            raise UserError(f"{file}: {shown(name)} contains other than finite numbers")
        if leaf == NEW_ROWS:
            ids = tokens[name_of(path)]
            array = array[mx.array(sorted(range(len(ids)), key=ids.__getitem__))]
        pieces = in_pieces(array.astype(mx.float32))
        found |= {f"{path}.{leaf}.{i}": piece for i, piece in enumerate(pieces)}
    missing = [n for n in (*whole, *tokens) if not any(f".{n}." in f".{name}" for name in found)]
    if missing:
        raise UserError(f"{file}: has no rows of {shown(missing[0])}, which its settings name")
    new = sorted(next(iter(tokens.values()), ()))
    entries = {NEW_TOKENS: new, TRAINED_MODULES: sorted(modules)}
    return rest, found, {name: value for name, value in entries.items() if value}
