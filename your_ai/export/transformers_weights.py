"""Turn mlx-lm's tensors into those of transformers, lazily, by the rules of the model type."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from your_ai.export.transformers_names import (
    Add,
    Flatten,
    Join,
    Rename,
    Rule,
    Swap,
    TransformersModel,
    Unstack,
)
from your_ai.modelfiles.shards import Lazy

Arrays = dict[str, mx.array]
HEAD_WEIGHT = "lm_head.weight"
DTYPES = ("dtype", "torch_dtype")
# Settings of the whole model that also hold for the text model inside it.
SHARED = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", *DTYPES)


def as_transformers(lazy: Lazy, known: TransformersModel) -> Lazy:
    """Return the model with the names, tensors and config.json of transformers, not computed."""
    arrays, pieces, held_bytes = lazy.arrays, 1, 0
    in_pieces = {id(arrays[name]): found for name, found in lazy.pieces.items()}
    for rule in known.rules:
        found = applied(rule, arrays)
        changed = [a for name, a in arrays.items() if matches(rule, name)]
        if changed and not isinstance(rule, Rename):
            pieces = max(pieces, len(rule.parts) if isinstance(rule, Join) else 1)
            whole = held_with(rule) + any(id(array) in in_pieces for array in changed)
            held_bytes += whole * max(array.nbytes for array in changed)
        arrays = found
    config = config_for(lazy.config, known, HEAD_WEIGHT in arrays)
    input_bytes = pieces * lazy.input_bytes + held_bytes
    kept = {name: in_pieces[id(a)] for name, a in arrays.items() if id(a) in in_pieces}
    return replace(lazy, arrays=arrays, config=config, input_bytes=input_bytes, pieces=kept)


def held_with(rule: Rule) -> int:
    """The number of inputs of a rule that are in memory beside its result.

    The tensors that are made of one stack follow each other and keep it in memory. A shard can
    begin within one stack and end within another.
    """
    return 2 if isinstance(rule, Unstack) else len(rule.parts) if isinstance(rule, Join) else 1


def applied(rule: Rule, arrays: Arrays) -> Arrays:
    """Return the tensors after a rule, in the same order."""
    match rule:
        case Rename():
            return {renamed(name, rule.part, rule.theirs): array for name, array in arrays.items()}
        case Unstack():
            return unstacked(rule, arrays)
        case Join():
            return joined(rule, arrays)
        case Swap():
            return changed_by(rule, arrays, lambda array: array.swapaxes(1, 2))
        case Flatten():
            return changed_by(rule, arrays, lambda array: array.flatten(0, 1))
        case Add():
            return changed_by(rule, arrays, lambda array: array + rule.number)


def parts_of(rule: Rule) -> tuple[str, ...]:
    return rule.parts if isinstance(rule, Join | Add) else (rule.part,)


def matches(rule: Rule, name: str) -> bool:
    """Return whether the rule changes the tensor of this name."""
    return has_part(name, parts_of(rule))


def has_part(name: str, parts: tuple[str, ...]) -> bool:
    return any(f".{part}." in f".{name}." for part in parts)


def renamed(name: str, part: str, theirs: str) -> str:
    """Replace a part of a name."""
    return re.sub(rf"(?<![^.]){re.escape(part)}(?![^.])", theirs, name)


def changed_by(rule: Rule, arrays: Arrays, change: Callable[[mx.array], mx.array]) -> Arrays:
    return {n: change(array) if matches(rule, n) else array for n, array in arrays.items()}


def unstacked(rule: Unstack, arrays: Arrays) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        if matches(rule, name):
            for index in range(len(array)):
                found[renamed(name, rule.part, rule.theirs.format(index))] = array[index]
        else:
            found[name] = array
    return found


def joined(rule: Join, arrays: Arrays) -> Arrays:
    """Return the tensors with one in place of the first part's, and none of the other parts."""
    found, first = Arrays(), rule.parts[0]
    for name, array in arrays.items():
        whole = renamed(name, first, rule.theirs)
        if whole != name:
            pieces = [arrays[renamed(name, first, part)] for part in rule.parts]
            if rule.alternating:
                found[whole] = mx.stack(pieces, rule.axis + 1).flatten(rule.axis, rule.axis + 1)
            else:
                found[whole] = mx.concatenate(pieces, rule.axis)
        elif not matches(rule, name):
            found[name] = array
    return found


def config_for(config: dict[str, Any], known: TransformersModel, has_head: bool) -> dict[str, Any]:
    """The config.json that transformers reads. has_head: the head is not the embedding."""
    if known.inner:
        text = {k: value for k, value in config["text_config"].items() if k not in DTYPES}
        config = text | {key: config[key] for key in SHARED if key in config}
    settings = {k: v(config) if callable(v) else v for k, v in known.config.items()}
    settings = {key: value for key, value in settings.items() if value is not None}
    settings |= {"architectures": [known.head], "tie_word_embeddings": not has_head}
    return config | settings
