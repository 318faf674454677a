"""Export the base model with the adapter fused in, for transformers.

The weights are those of `your_ai fuse --to dequantized`, as `transformers_weights` names and forms
them. The files are written by `modelfiles.shards`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from your_ai.export.fused_weights import AUTO, DEQUANTIZED, base_of, fused_lazily
from your_ai.export.names import check_known, check_scorer
from your_ai.export.transformers_weights import as_transformers
from your_ai.files import sha256
from your_ai.memory.budget import limit_of
from your_ai.modelfiles.shards import Lazy, WriteProgress, write_model
from your_ai.modelfiles.targets import Work
from your_ai.nets.saved_adapter import Trained, has_score_head, read_score_head
from your_ai.publish.card import exported_card
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS, SCORE_WEIGHT, files_beside

RECORD = "exported.json"
LM_HEAD = "lm_head"


def write(
    trained: Trained,
    target: Path,
    dtype: str = AUTO,
    max_memory_gb: float | None = None,
    force: bool = False,
    texts: Mapping[str, str] | None = None,
) -> Iterator[WriteProgress]:
    """Write the fused model to `target`. Continues a previous export that was interrupted.

    dtype: of the weights; auto keeps the dtype of the base.
    force: replace an existing model once the new one is complete.
    texts: other files to write into the folder, by name.
    Raises UserError, before anything is written, if transformers uses other weight names or if
    memory or disk is too small; RunError if the base cannot be read completely.
    """
    lazy = in_transformers(trained, dtype, max_memory_gb)
    lazy = replace(lazy, texts={**lazy.texts, **(texts or {})})
    names = (ADAPTERS, ADAPTER_CONFIG, *files_beside(trained.adapter.folder))
    sums = [sha256(trained.adapter.folder / name) for name in names]
    source, settings = base_of(trained, max_memory_gb), [*sums, dtype]
    yield from write_model(
        lazy, source, work_of(target), settings, limit_of(max_memory_gb), replaces=force
    )


def in_transformers(trained: Trained, dtype: str, max_memory_gb: float | None) -> Lazy:
    """Return the fused model in the form of transformers, not computed. Raises as `write`."""
    known = check_known(trained.base)
    scorer = check_scorer(trained.base, known) if has_score_head(trained.adapter) else None
    lazy = fused_lazily(trained, DEQUANTIZED, dtype, max_memory_gb)
    lazy = with_dtype(as_transformers(lazy, known))
    if scorer is not None:
        lazy = as_classifier(lazy, trained, scorer)
    return replace(lazy, card=exported_card(trained, "model", "transformers"))


def as_classifier(lazy: Lazy, trained: Trained, scorer: str) -> Lazy:
    """A reward model: with the score head, and without the head over the vocabulary."""
    arrays = {n: array for n, array in lazy.arrays.items() if not n.startswith(f"{LM_HEAD}.")}
    weight = read_score_head(trained.adapter)
    arrays[SCORE_WEIGHT] = weight.astype(next(iter(arrays.values())).dtype)
    index = {
        "total_size": sum(array.nbytes for array in arrays.values()),
        "total_parameters": sum(array.size for array in arrays.values()),
    }
    config = {
        **lazy.config,
        "architectures": [scorer],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "problem_type": "regression",
        "pad_token_id": padding_of(trained.tokenizer(), lazy.config),
    }
    return replace(lazy, arrays=arrays, index=index, config=config)


def padding_of(tokenizer: Any, config: dict[str, Any]) -> int | None:
    """The token to pad texts with; transformers takes the score before the first one at the end.

    So it must not be one that ends a text. None if the tokenizer has no such token; then
    transformers scores one text at a time.
    """
    ends = set(tokenizer.eos_token_ids)
    asked = (config.get("pad_token_id"), tokenizer.pad_token_id, tokenizer.unk_token_id)
    return next((token for token in asked if type(token) is int and token not in ends), None)


def work_of(target: Path) -> Work:
    return Work(target, "exporting", RECORD)


def with_dtype(lazy: Lazy) -> Lazy:
    """The model with a config.json that names a dtype; the one of the weights if it names none."""
    if lazy.config.keys() & {"dtype", "torch_dtype"}:
        return lazy
    dtype = str(next(iter(lazy.arrays.values())).dtype).removeprefix("mlx.core.")
    return replace(lazy, config={**lazy.config, "torch_dtype": dtype})
