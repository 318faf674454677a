"""Helpers that read GGUF files back, and tokenizers to write into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, PreTokenizer, Split

from tests.conftest import DEMO_FOLDER, TOKENIZER_FILES, make_model
from your_ai.export.gguf import write_adapter
from your_ai.export.gguf_tokenizer import BYTES, PROBE
from your_ai.nets.saved_adapter import Trained

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
ROWS = 900  # embedding rows, more than the tokenizers have tokens
CORPUS = [*(DEMO_FOLDER / "data" / "train.jsonl").read_text().splitlines()[:150], *[PROBE] * 9]
RUNS = Regex("▁+[^▁]*|[^▁]+")  # a word with all spaces before it


def adapter_file(trained: Trained, folder: Path) -> Path:
    """The adapter of a run in a GGUF file."""
    write_adapter(trained, folder / "a.gguf")
    return folder / "a.gguf"


def fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file in float32, with numpy's order of dimensions."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def byte_level(
    splitter: PreTokenizer, ignores_merges: bool = False, begins: bool = False
) -> Tokenizer:
    """A trained byte-level BPE. begins: every text starts with <|user|>."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet,
                            show_progress=False),
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if begins:
        tokenizer.post_processor = begun_by("<|user|>", SPECIAL.index("<|user|>"))
    return tokenizer


def sentencepiece(prefix: str = "always", complete: bool = True) -> Tokenizer:
    """A BPE like those converted from SentencePiece models, with <s> before a text.

    prefix: when a space is put before a text: always, first, never, or normalizer (as in older
    files). complete: any two tokens that together form a third are merged.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = Split(RUNS, behavior="isolated")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", "<|user|>", *BYTES, *reversed(model["vocab"])]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in model["merges"]]
    if complete:
        merges = [
            (piece[:cut], piece[cut:])
            for piece in map("".join, merges)
            for cut in range(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab
        ]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if prefix == "normalizer":
        spaces = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|user|>"])
    tokenizer.post_processor = begun_by("<s>", vocab["<s>"])
    return tokenizer


def begun_by(token: str, index: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, index)]
    )


def with_tokenizer(
    folder: Path, tokenizer: Tokenizer, template: str | None = TEMPLATE, **named: str
) -> Path:
    """A small llama with this tokenizer. named: special tokens such as bos_token."""
    base = make_model(folder, bits=None, vocab_size=ROWS, num_hidden_layers=1, eos_token_id=None)
    for name in TOKENIZER_FILES:
        (base / name).unlink()
    tokenizer.save(str(base / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", **named}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (base / "chat_template.jinja").write_text(template)
    return base
