"""Describe a tokenizer to llama.cpp: byte-level BPE or SentencePiece BPE.

llama.cpp identifies the way a byte-level tokenizer splits text only by a name. This module
finds the name by splitting a probe text that every known splitter splits differently. For
SentencePiece, llama.cpp wants scores that decide which neighboring pieces merge first. Hugging
Face tokenizers store the merges themselves, in the order of those scores.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from your_ai.errors import UserError
from your_ai.nets.tokenizer import turn_end_of

if TYPE_CHECKING:
    import gguf
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
START = r"[^\r\n\p{L}\p{N}]?"
WORDS = rf"{START}\p{{L}}+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
DIGIT, DIGITS = r"\p{N}", r"\p{N}{1,3}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|{DIGITS}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|{DIGIT}|{REST}"
QWEN35 = (
    rf"{CONTRACTIONS}|{START}[\p{{L}}\p{{M}}]+|{DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
TEKKEN = rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|{DIGIT}|{SLASHES}"
GPT4O = (
    rf"{START}{UPPER}*{LOWER}+{CONTRACTIONS}?|{START}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|{DIGITS}|{SLASHES}"
)
KANA = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{SPACES}"
)
CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
SEED = rf"{CONTRACTIONS}|{WORDS}|{DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
EXAONE = (
    rf"{CONTRACTIONS}|{START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{DIGIT}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# llama.cpp's name, whether whole tokens ignore merges, and the expressions, each of which splits
# what those before it left. Of splitters that split alike, one is here.
SPLITTERS: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("gpt-2", False, (GPT2,)),
    ("smollm", False, (DIGIT, GPT2)),
    ("qwen2", False, (QWEN2,)),
    ("qwen35", False, (QWEN35,)),
    ("llama-bpe", True, (LLAMA3,)),
    ("smaug-bpe", False, (LLAMA3,)),
    ("tekken", True, (TEKKEN,)),
    ("gpt-4o", False, (GPT4O,)),
    ("deepseek-v3", False, (DIGITS, KANA, DEEPSEEK)),
    ("deepseek-coder", False, CODER),
    ("falcon", False, FALCON),
    ("seed-coder", False, (SEED,)),
    ("exaone-moe", False, (EXAONE,)),
    ("minicpm5", True, (DIGITS, QWEN2.replace(DIGIT + "|", DIGIT + "+|"))),
    ("ufakzeka", False, (rf"{WORDS}|{DIGIT}|{REST}",)),
    ("laguna", False, (r"[^\n]+|[\n]+", QWEN2)),
    ("bloom", False, (BLOOM,)),
    ("viking", False, (BLOOM, DIGIT)),
)
# Letters of several scripts, runs of digits, contractions in both cases, combining marks, spaces.
PROBE = (
    "I've don't IT'S WE'LL you'D café naïve ﬁne Ｆｕｌｌ  NASA iPhone fooBar ÉcoleÀ "
    "1 22 333 4444 3.14 1234567 a1b22 "
    "x=1;y/=2//z\n\n\n  indented\t\ttabs \r\n\r\nend   \n !!!??... ...\n'''\"\"\" <tag/> ½ ² Ⅷ "
    "нещо на Български 我想在apple工作1314天～ 日本語テスト 한국어 ไทย हिन्दी العربية ស្អាច "
    "🚀 👨‍👩‍👧 e\u0301 \u00a0 nbsp \u2003em/\n/path//\n .\n\n(x)\n#def'tis  7"
)
UNDERLINE = "▁"  # SentencePiece writes a space like this
BYTES = dict.fromkeys(f"<0x{byte:02X}>" for byte in range(256))
# The share of a SentencePiece model's merges that may be missing, because pieces were renamed.
MISSING = 0.01
OTHERS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")  # unsupported BPE variants
NEEDED = "GGUF supports only byte-level BPE and SentencePiece BPE"
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a tokenizer in llama.cpp's form."""

    model: str
    """llama.cpp's name of the kind of tokenizer."""
    pre: str
    """llama.cpp's name of the way text is split."""
    tokens: list[str]
    """One per row of the embedding."""
    types: list[int]
    """One per row of the embedding."""
    merges: list[str]
    """For byte-level BPE."""
    scores: list[float]
    """For SentencePiece."""
    adds_space: bool
    """Whether a space is put before every text."""


def add_tokenizer(writer: gguf.GGUFWriter, base: Path, tokenizer: Any, rows: int) -> None:
    """Write the description of a tokenizer to a GGUF file.

    tokenizer: as loaded by mlx-lm; rows: of the embedding. Raises UserError if llama.cpp does
    not support the tokenizer.
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
        raise UserError(f"{base}: its tokenizer is not a Hugging Face fast tokenizer; {NEEDED}")
    parts = json.loads(backend.to_str())
    model = parts["model"]
    if model["type"] != "BPE" or any(model.get(key) for key in OTHERS):
        raise UserError(f"{base}: its tokenizer is {model['type']}; {NEEDED}")
    if model.get("byte_fallback"):
        return sentencepiece(base, tokenizer, parts, rows)
    return byte_level(base, backend, parts, rows)


# Byte-level BPE


def byte_level(base: Path, backend: Tokenizer, parts: dict[str, Any], rows: int) -> Vocabulary:
    model, pre = parts["model"], pre_of(backend)
    if pre is None:
        raise UserError(
            f"{base}: its tokenizer splits text in a way that GGUF export does not support "
            f"(supported: {', '.join(name for name, _, _ in SPLITTERS)}); use another format"
        )
    from gguf import TokenType

    tokens, types = padding(rows)
    for token, index in model["vocab"].items():
        if index < rows:
            tokens[index], types[index] = token, TokenType.NORMAL
    put_added(parts, tokens, types)
    merges = [" ".join(pair) for pair in model["merges"]]
    return Vocabulary("gpt2", pre, tokens, types, merges, [], adds_space=False)


def splitter_of(patterns: tuple[str, ...]) -> PreTokenizer:
    """The splitter of a byte-level tokenizer that splits by these expressions."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def pre_of(backend: Tokenizer) -> str | None:
    """llama.cpp's name for the way a tokenizer splits text; None if it is unknown.

    llama.cpp applies no normalizer, not even Qwen's NFC, which changes few texts.
    """
    plain, decoder = PROBE, backend.decoder
    if backend.normalizer is not None:
        plain = backend.normalizer.normalize_str(PROBE)
    pieces = pieces_of(backend.pre_tokenizer, plain)
    if plain not in (PROBE, unicodedata.normalize("NFC", PROBE)):
        return None
    if decoder is None or decoder.decode(pieces) != plain:
        return None
    names = {
        ignores: name
        for name, ignores, patterns in SPLITTERS
        if pieces_of(splitter_of(patterns), plain) == pieces
    }
    found = names.get(backend.model.ignore_merges)
    if found is None and names and merging_makes_all(backend):
        return next(iter(names.values()))
    return found


def merging_makes_all(backend: Tokenizer) -> bool:
    """Return whether merging makes each token of its own text: then ignoring merges is the same.

    Tokens that are matched before merging do not count.
    """
    from tokenizers import Tokenizer

    parts = json.loads(backend.to_str())
    added = {token["content"] for token in parts["added_tokens"]}
    parts["model"]["ignore_merges"] = False
    model = Tokenizer.from_str(json.dumps(parts)).model
    whole = parts["model"]["vocab"].keys() - added
    return all(len(model.tokenize(token)) == 1 for token in whole)


# SentencePiece BPE


def sentencepiece(base: Path, tokenizer: Any, parts: dict[str, Any], rows: int) -> Vocabulary:
    model, added = parts["model"], {token["content"] for token in parts["added_tokens"]}
    pieces = normalized(tokenizer.backend_tokenizer, PROBE)
    spaced = PROBE.replace(" ", UNDERLINE)
    known = pieces in ([spaced], [UNDERLINE + spaced])
    if not known or not BYTES.keys() <= model["vocab"].keys() or not merges_all(model, added):
        raise UserError(
            f"{base}: its tokenizer falls back to bytes, but is not a SentencePiece tokenizer; "
            f"{NEEDED}"
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
    # llama.cpp adds the space after every special token, so also at the start of a chat.
    once = (parts["pre_tokenizer"] or {}).get("prepend_scheme") == "first"
    adds_space = pieces != [spaced] and not (once and tokenizer.chat_template)
    return Vocabulary("llama", "default", tokens, types, [], scores, adds_space)


def normalized(backend: Tokenizer, text: str) -> list[str]:
    """Split a text into the pieces inside which tokens are merged."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return pieces_of(backend.pre_tokenizer, text)


def pieces_of(splitter: PreTokenizer | None, text: str) -> list[str]:
    return [text] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(text)]


def merges_all(model: dict[str, Any], added: set[str]) -> bool:
    """Return whether any two tokens that together form a third are merged, as in SentencePiece.

    added: tokens that are matched before merging.
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


# Both kinds


def padding(rows: int) -> tuple[list[str], list[int]]:
    """Placeholder tokens and types for embedding rows without a token."""
    from gguf import TokenType

    return [f"[PAD{row}]" for row in range(rows)], [TokenType.UNUSED] * rows


def put_added(parts: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    """Add the tokens that are matched in a text before it is split.

    Some models have more added tokens than rows, e.g. image tokens of a model without images;
    the extra ones are skipped. Tokens made of SentencePiece's space character keep their type,
    because no text contains that character before spaces are replaced.
    """
    from gguf import TokenType

    for token in parts["added_tokens"]:
        index, text = token["id"], token["content"]
        if index >= len(tokens) or (types[index] == TokenType.NORMAL and UNDERLINE in text):
            continue
        tokens[index] = text
        types[index] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED


def add_special(writer: gguf.GGUFWriter, base: Path, tokenizer: Any, rows: int) -> None:
    """Write which tokens begin and end a text, and whether they are added automatically."""
    found = {kind: getattr(tokenizer, f"{kind}_token_id", None) for kind in SPECIAL}
    ids = {kind: index for kind, index in found.items() if index is not None and index < rows}
    around = added_around(base, tokenizer, ids)
    ends = sorted(end for end in tokenizer.eos_token_ids if end < rows and end != ids.get("eos"))
    if "eos" not in ids and ends:
        ids["eos"] = ends.pop(0)
    if ends:
        turn_end = turn_end_of(tokenizer)
        ids["eot"] = turn_end if turn_end in ends else ends[0]
    if "bos" not in ids and "eos" in ids:
        ids["bos"] = ids["eos"]  # otherwise llama.cpp would use a default token id
    for kind, index in ids.items():
        getattr(writer, f"add_{kind}_token_id")(index)
    writer.add_add_bos_token(around[0])
    writer.add_add_eos_token(around[1])


def added_around(base: Path, tokenizer: Any, ids: dict[str, int]) -> tuple[bool, bool]:
    """Return whether the tokenizer adds the bos token before a text, and the eos token after it.

    Other tokens before a text are left to the chat template if it begins with them.
    """
    plain, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    begin, end = [ids.get("bos")], [ids.get("eos")]
    for adds_bos in (False, True):
        for adds_eos in (False, True):
            if begin * adds_bos + plain + end * adds_eos == whole:
                return adds_bos, adds_eos
    before = whole[: len(whole) - len(plain)]
    template = str(tokenizer.chat_template)
    if before + plain == whole and template.startswith(tokenizer.decode(before)):
        return False, False
    raise UserError(
        f"{base}: its tokenizer adds other tokens around a text than its bos and eos tokens, "
        "which GGUF does not support"
    )
