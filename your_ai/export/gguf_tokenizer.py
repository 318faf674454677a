"""A tokenizer as llama.cpp has it: byte-level BPE, or SentencePiece's BPE.

llama.cpp knows how a byte-level tokenizer splits a text by a name alone, so that is found by
what the tokenizer makes of a text that the known ones split differently. Of SentencePiece's
it wants scores, by which it merges what is next to each other; Hugging Face's tokenizers have
the merges themselves, in the order of those scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from your_ai.errors import UserError

if TYPE_CHECKING:
    import gguf
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = (
    rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters of several scripts, digits in runs, contractions in both cases, marks, spaces.
PROBE = (
    "I've don't IT'S WE'LL you'D café naïve ﬁne Ｆｕｌｌ  NASA iPhone fooBar ÉcoleÀ "
    "1 22 333 4444 3.14 "
    "x=1;y/=2//z\n\n\n  indented\t\ttabs \r\n\r\nend   \n !!!??... ...\n'''\"\"\" <tag/> ½ ² Ⅷ "
    "нещо на Български 我想在apple工作1314天～ 日本語テスト 한국어 ไทย हिन्दी العربية ស្អាច "
    "🚀 👨‍👩‍👧 e\u0301 \u00a0 nbsp \u2003em/\n/path//\n"
)
UNDERLINE = "▁"  # SentencePiece's for a space
BYTES = dict.fromkeys(f"<0x{byte:02X}>" for byte in range(256))
MISSING = 0.01  # of the merges of a SentencePiece model: those of pieces that were renamed
OTHERS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")  # ways of BPE
NEEDED = "GGUF holds byte-level BPE and SentencePiece's BPE"
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")


@dataclass(frozen=True)
class Vocabulary:
    """model, pre: llama.cpp's names; merges: of byte-level BPE; scores: of SentencePiece's.

    tokens, types: of each row of the embedding; adds_space: before a text.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    adds_space: bool


def add_tokenizer(writer: gguf.GGUFWriter, base: Path, tokenizer: Any, rows: int) -> None:
    """Describe a tokenizer to llama.cpp.

    tokenizer: as mlx-lm has loaded it; rows: of the embedding. Raises UserError for one that
    llama.cpp does not have.
    """
    vocabulary = vocabulary_of(base, tokenizer, rows)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.model == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.adds_space)
    else:
        writer.add_token_merges(vocabulary.merges)
    add_special(writer, base, tokenizer, rows)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def vocabulary_of(base: Path, tokenizer: Any, rows: int) -> Vocabulary:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{base}: its tokenizer is not one of Hugging Face's fast ones; {NEEDED}")
    parts = json.loads(backend.to_str())
    model = parts["model"]
    if model["type"] != "BPE" or any(model.get(key) for key in OTHERS):
        raise UserError(f"{base}: its tokenizer is {model['type']}; {NEEDED}")
    if model.get("byte_fallback"):
        return sentencepiece(base, tokenizer, parts, rows)
    return byte_level(base, backend, parts, rows)


# Byte-level BPE


def byte_level(base: Path, backend: Tokenizer, parts: dict[str, Any], rows: int) -> Vocabulary:
    model, normalizer = parts["model"], parts["normalizer"]
    pre = pre_of(backend, bool(model.get("ignore_merges")))
    # llama.cpp leaves it out, for Qwen's as well.
    plain = normalizer is None or normalizer == {"type": "NFC"}
    if pre is None or not plain or (parts["decoder"] or {}).get("type") != "ByteLevel":
        raise UserError(
            f"{base}: its tokenizer splits a text in a way that is none of those known from "
            f"llama.cpp ({', '.join(name for name, _, _ in splitters())}); GGUF cannot hold it"
        )
    from gguf import TokenType

    tokens, types = padding(rows)
    for token, index in model["vocab"].items():
        if index < rows:
            tokens[index], types[index] = token, TokenType.NORMAL
    put_added(parts, tokens, types)
    merges = [" ".join(pair) for pair in model["merges"]]
    return Vocabulary("gpt2", pre, tokens, types, merges, [], adds_space=False)


def splitters() -> Iterator[tuple[str, bool, PreTokenizer]]:
    """llama.cpp's names of ways to split a text, if merges are ignored for whole tokens, and it."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    def by(pattern: str) -> PreTokenizer:
        split = Split(Regex(pattern), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])

    gpt2 = ByteLevel(add_prefix_space=False)
    yield "gpt-2", False, gpt2
    yield "smollm", False, Sequence([Digits(individual_digits=True), gpt2])
    yield "qwen2", False, by(QWEN2)
    yield "llama-bpe", True, by(LLAMA3)
    yield "smaug-bpe", False, by(LLAMA3)
    yield "tekken", True, by(TEKKEN)


def pre_of(backend: Tokenizer, ignores_merges: bool) -> str | None:
    """llama.cpp's name for how a tokenizer splits a text, None where it is none of them."""
    if backend.pre_tokenizer is None:
        return None
    found = backend.pre_tokenizer.pre_tokenize_str(PROBE)
    for name, ignores, splitter in splitters():
        if ignores == ignores_merges and splitter.pre_tokenize_str(PROBE) == found:
            return name
    return None


# SentencePiece's


def sentencepiece(base: Path, tokenizer: Any, parts: dict[str, Any], rows: int) -> Vocabulary:
    model, added = parts["model"], {token["content"] for token in parts["added_tokens"]}
    pieces = normalized(tokenizer.backend_tokenizer, PROBE)
    spaced = PROBE.replace(" ", UNDERLINE)
    known = pieces in ([spaced], [UNDERLINE + spaced])
    if not known or not BYTES.keys() <= model["vocab"].keys() or not merges_all(model, added):
        raise UserError(
            f"{base}: its tokenizer falls back to bytes, but is not SentencePiece's; GGUF "
            "cannot hold it"
        )
    from gguf import TokenType

    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        ranks.setdefault(left + right, rank)
    tokens, types = padding(rows)
    scores = [0.0] * rows
    for token, index in model["vocab"].items():
        if index < rows:
            tokens[index] = token
            types[index] = TokenType.BYTE if token in BYTES else TokenType.NORMAL
            scores[index] = -float(ranks.get(token, len(ranks)))
    put_added(parts, tokens, types)
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
    # llama.cpp does it after every special token, so at the start of a chat as well.
    once = (parts["pre_tokenizer"] or {}).get("prepend_scheme") == "first"
    adds_space = pieces != [spaced] and not (once and tokenizer.chat_template)
    return Vocabulary("llama", "default", tokens, types, [], scores, adds_space)


def normalized(backend: Tokenizer, text: str) -> list[str]:
    """The pieces of a text that are merged for themselves."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def merges_all(model: dict[str, Any], added: set[str]) -> bool:
    """Whether any two tokens that make a third are merged, as SentencePiece does.

    added: tokens that are found before.
    """
    vocab, merges = model["vocab"].keys() - added, {tuple(pair) for pair in model["merges"]}
    made = {left + right for left, right in merges}
    wanted = [
        (token[:cut], token[cut:])
        for token in made
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return sum(pair not in merges for pair in wanted) <= MISSING * len(wanted)


# Of both


def padding(rows: int) -> tuple[list[str], list[int]]:
    """Tokens and types of an embedding's rows that are no token's."""
    from gguf import TokenType

    return [f"[PAD{row}]" for row in range(rows)], [TokenType.UNUSED] * rows


def put_added(parts: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    """Put in the tokens that are found in a text before it is split.

    Some models have more of them than rows: of images, that they were not made for. Those of
    SentencePiece's spaces are in no text before its spaces are replaced; they stay what they are.
    """
    from gguf import TokenType

    for token in parts["added_tokens"]:
        index, text = token["id"], token["content"]
        if index >= len(tokens) or (types[index] == TokenType.NORMAL and UNDERLINE in text):
            continue
        tokens[index] = text
        types[index] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED


def add_special(writer: gguf.GGUFWriter, base: Path, tokenizer: Any, rows: int) -> None:
    """Tell which tokens begin and end texts, and whether that is done unasked."""
    ids = {kind: getattr(tokenizer, f"{kind}_token_id", None) for kind in SPECIAL}
    ids = {kind: index for kind, index in ids.items() if index is not None and index < rows}
    around = added_around(base, tokenizer, ids)
    ends = sorted(end for end in tokenizer.eos_token_ids if end < rows and end != ids.get("eos"))
    if "eos" not in ids and ends:
        ids["eos"] = ends.pop(0)
    if ends:
        ids["eot"] = ends[0]
    if "bos" not in ids and "eos" in ids:
        ids["bos"] = ids["eos"]  # llama.cpp would take a token by its number
    for kind, index in ids.items():
        getattr(writer, f"add_{kind}_token_id")(index)
    writer.add_add_bos_token(around[0])
    writer.add_add_eos_token(around[1])


def added_around(base: Path, tokenizer: Any, ids: dict[str, int]) -> tuple[bool, bool]:
    """Whether a text is begun, and whether it is ended, with a token of its own."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    begin, end = [ids.get("bos")], [ids.get("eos")]
    for adds_bos in (False, True):
        for adds_eos in (False, True):
            if begin * adds_bos + plain + end * adds_eos == whole:
                return adds_bos, adds_eos
    raise UserError(
        f"{base}: its tokenizer puts other tokens around a text than those that begin and end "
        "one; GGUF cannot hold it"
    )
