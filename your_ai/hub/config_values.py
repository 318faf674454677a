"""Check the numbers in a config.json before anything is built or estimated from them.

The bounds are far above any published model. With them, a wrong or malicious number gives a
one-line error instead of a machine that is out of memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.gates.text import counted, shown
from your_ai.gates.untrusted import BLOCK, DTYPE_BITS, EXPERT, Entry, is_number

MOST_BLOCKS = 1024
MOST_EXPERTS = 100_000
MOST_WIDTH = 1 << 20
MOST_VOCABULARY = 1 << 26
MOST_SIZE = 1 << 31  # for any other size

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads")
SINGLE = (*LAYERS, *HIDDEN, *HEADS, "vocab_size")  # never a list, in any architecture
# (minimum, maximum) of the integers that decide how much is built, by config key.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
WHOLE: dict[str, tuple[int, int]] = {
    **dict.fromkeys(LAYERS, (1, MOST_BLOCKS)),
    **dict.fromkeys((*HIDDEN, *HEADS), (1, MOST_WIDTH)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), (0, MOST_WIDTH)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner"), (0, MOST_WIDTH)),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank"), (0, MOST_WIDTH)),
    **dict.fromkeys(EXPERT_COUNTS, (0, MOST_EXPERTS)),
    "num_experts_per_tok": (0, MOST_EXPERTS),
    "vocab_size": (1, MOST_VOCABULARY),
}
# (exclusive minimum, maximum) of the other numbers that the computation depends on.
REAL: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), (0.0, 1e18)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (-1e-12, 1e3)),
    **dict.fromkeys(("norm_eps", "norm_epsilon"), (-1e-12, 1e3)),
    "partial_rotary_factor": (-1e-12, 1e3),
    "max_position_embeddings": (-1e-12, 1e12),
}
SIZE = re.compile(r"(?:num|n)_.*|.*_(?:size|dim|rank|layers|heads|experts|width|depth|window)")
ROPE = ("rope_scaling", "rope_parameters")
ROPE_ABOVE_ZERO = ("factor", "rope_theta", "original_max_position_embeddings")
PARTS = ("text_config", "language_config", "llm_config")  # objects for the text model
# Names of the number of experts that a token uses.
EXPERTS_USED = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)
MOST_BITS, MOST_GROUP = 32, 1 << 16
# For these, mlx-lm divides the hidden size by the number of heads if `head_dim` is missing.
DIVIDED = ("llama", "mistral", "qwen2", "smollm3", "phi3")
MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
PARTS_DEEP = 2


def check_config_values(
    path: Path, config: dict[str, Any], entries: Iterable[Entry] | None = None
) -> None:
    """Raise UserError, with the file and the key, for numbers that no real model has.

    entries: the model's tensors, if known. The number of blocks is compared with them.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{path}: has no model_type; is it a language model?")
    if not MODEL_TYPE.fullmatch(kind):
        raise UserError(f"{path}: model_type {shown(kind)}: is not the name of an architecture")
    code = config.get("model_file")
    if code is not None:
        raise UserError(
            f"{path}: model_file {shown(code)}: the model needs its own Python code, which "
            "your_ai never runs; use a model that mlx-lm supports"
        )
    check_part(path, config, "")
    for name in PARTS:
        part = config.get(name)
        if part is not None and not isinstance(part, dict):
            raise wrong(path, name, part, "an object")
        if part is not None:
            check_part(path, part, f"{name}.")
    if entries is not None:
        check_tensors(path, config, entries)


def check_part(path: Path, config: dict[str, Any], at: str) -> None:
    """Check one object of a config.json. at: a prefix for messages, such as `text_config.`."""
    for key, value in config.items():
        if key in WHOLE:
            least, most = WHOLE[key]
            for number in [value] if key in SINGLE and value is not None else flat(value):
                if type(number) is not int or not least <= number <= most:
                    raise wrong(path, at + key, number, f"a whole number from {least} to {most}")
        elif key in REAL:
            above, highest = REAL[key]
            for number in flat(value):
                if not is_finite(number) or not above < number <= highest:
                    raise wrong(path, at + key, number, f"a number above 0, at most {highest:g}")
        elif SIZE.fullmatch(key):
            for number in flat(value):
                if isinstance(number, int | float) and not abs(number) <= MOST_SIZE:
                    raise wrong(path, at + key, number, f"at most {MOST_SIZE}")
        elif key in ROPE and value is not None:
            check_rope(path, at + key, value)
        elif key in ("quantization", "quantization_config") and value is not None:
            check_quantization(path, at + key, value)
    check_heads(path, config, at)
    check_experts(path, config, at)


def flat(value: Any) -> list[Any]:
    """Return the values of a key as a list: one value, or those of a list or an object.

    Nulls are left out. Some architectures give a value per block, or per kind of block.
    """
    if isinstance(value, dict):
        value = list(value.values())
    values = value if isinstance(value, list) else [value]
    return [number for number in values if number is not None]


def is_finite(value: Any) -> bool:
    """Return whether an untrusted value is a finite number."""
    return is_number(value) and (isinstance(value, int) or math.isfinite(value))


def check_rope(path: Path, key: str, value: Any, deep: int = 0) -> None:
    if not isinstance(value, dict):
        raise wrong(path, key, value, "an object")
    for name, number in value.items():
        at = f"{key}.{shown(name)}"
        if isinstance(number, dict) and deep < PARTS_DEEP:
            check_rope(path, at, number, deep + 1)
            continue
        for found in flat(number):
            if not is_number(found):
                continue
            if not is_finite(found) or not abs(found) <= 1e18:
                raise wrong(path, at, found, "a finite number")
            if name in ROPE_ABOVE_ZERO and found <= 0:
                raise wrong(path, at, found, "a number above 0")


def check_quantization(path: Path, key: str, value: Any) -> None:
    """Check the quantization of the model, and of each layer that has its own settings."""
    if not isinstance(value, dict):
        raise wrong(path, key, value, "an object")
    for part in (value, *(inner for inner in value.values() if isinstance(inner, dict))):
        bits, group = part.get("bits"), part.get("group_size")
        if bits is not None and (type(bits) is not int or not 1 <= bits <= MOST_BITS):
            raise wrong(path, f"{key}.bits", bits, f"a whole number from 1 to {MOST_BITS}")
        least = 1 if key.endswith("quantization") else -1  # other libraries: -1 is a whole row
        if group is not None and (type(group) is not int or not least <= group <= MOST_GROUP):
            raise wrong(path, f"{key}.group_size", group, f"a whole number up to {MOST_GROUP}")


def check_heads(path: Path, config: dict[str, Any], at: str) -> None:
    """Raise UserError if sizes that the architecture divides are not divisible."""
    if config.get("model_type") not in DIVIDED:
        return
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    keys = config.get("num_key_value_heads")
    if not isinstance(heads, int):
        return
    if isinstance(hidden, int) and not config.get("head_dim") and hidden % heads:
        raise wrong(path, f"{at}num_attention_heads", heads, f"a divisor of {hidden}")
    if isinstance(keys, int) and (keys == 0 or heads % keys):
        raise wrong(path, f"{at}num_key_value_heads", keys, f"a divisor of {heads}")


def check_experts(path: Path, config: dict[str, Any], at: str) -> None:
    """Raise UserError if a token uses more experts than there are."""
    counts = [n for name in EXPERT_COUNTS for n in flat(config.get(name)) if isinstance(n, int)]
    for name in EXPERTS_USED:
        for used in flat(config.get(name)):
            if any(counts) and isinstance(used, int) and used > max(counts):
                raise wrong(path, at + name, used, f"at most {max(counts)}, the number of experts")


def check_tensors(path: Path, config: dict[str, Any], entries: Iterable[Entry]) -> None:
    """Raise UserError if the files have far fewer blocks than the config says.

    Some architectures use a block more than once, or have blocks without weights, so a smaller
    difference is allowed. mlx-lm then reports missing tensors when it loads the model.
    """
    blocks = 0
    for entry in entries:
        for pattern, most in ((BLOCK, MOST_BLOCKS), (EXPERT, MOST_EXPERTS)):
            match = pattern.search(entry.name)
            if match is None:
                continue
            if len(match[1]) > len(str(most)) or int(match[1]) > most:
                raise UserError(f"{path.parent}: has a tensor {shown(entry.name)}; is it damaged?")
            if pattern is BLOCK:
                blocks = max(blocks, int(match[1]) + 1)
    for key in LAYERS:
        stated = text_part(config).get(key, config.get(key))
        if isinstance(stated, int) and blocks and stated > 2 * blocks + 16:
            found = counted(blocks, "block")
            raise UserError(f"{path}: {key} {stated}: the model's files have only {found}")


def wrong(path: Path, key: str, value: Any, wanted: str) -> UserError:
    return UserError(f"{path}: {key} {shown(value)}: must be {wanted}")


# What a config says


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a multimodal model's config that are about its text model."""
    parts = (config.get(name) for name in PARTS)
    return next((part for part in parts if isinstance(part, dict)), {})


def experts_used(text: Mapping[str, Any]) -> int:
    """The number of routed experts that a token uses; of the block that uses most."""
    parts = [text, text.get("ffn_config") or {}]
    for part, name in product(parts, EXPERTS_USED):
        used = part.get(name) if isinstance(part, dict) else None
        numbers: list[Any] = used if isinstance(used, list) else [used]
        if all(isinstance(number, int) for number in numbers) and any(numbers):
            return int(max(numbers))
    return 1


# How a config.json says that a model is quantized: in mlx-lm's words, or in another library's


# As mlx-lm reads them, by the name of the method or of the format of compressed-tensors.
OTHER_METHODS: dict[str, dict[str, Any]] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4-pack-quantized": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp4-pack-quantized": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "pack-quantized": {"group_size": 32, "bits": 4, "mode": "affine"},
}
SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
UNSAFE = re.compile(r"\)[*+{?]|\\\d")  # repeated groups can take forever to match
MOST_PATTERN = 200
MLX_GROUPS = (128, 64, 32)


def method_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of another library than mlx-lm; empty if there is none."""
    found = config.get("quantization_config") or text_part(config).get("quantization_config")
    if config.get("quantization") or not isinstance(found, dict):
        return {}
    return found if found.get("quant_method") else {}


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model's layers for MLX, as in `quantization`; empty if there are none.

    Weights that mlx-lm dequantizes when it loads them, as most of FP8, are not quantized.
    """
    if isinstance(own := config.get("quantization"), dict):
        return own
    found = method_of(config)
    name = str(found.get("quant_method"))
    if name == "compressed-tensors":
        name = str(found.get("format"))
    if name == "fp8" and found.get("scale_fmt") == "ue8m0":
        blocks = found.get("weight_block_size") or ()
        return OTHER_METHODS["mxfp8"] if blocks == [32, 32] else {}
    if name == "modelopt":
        settings = inner_part(found)
        is_nvfp4 = settings.get("quant_algo") == "NVFP4"
        return OTHER_METHODS["nvfp4-pack-quantized"] if is_nvfp4 else {}
    if name in ("awq", "gptq"):
        size = found.get("group_size") or MLX_GROUPS[0]
        group = next((each for each in MLX_GROUPS if size % each == 0), MLX_GROUPS[0])
        return {"group_size": group, "bits": found.get("bits") or 4, "mode": "affine"}
    return OTHER_METHODS.get(name, {})


def inner_part(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that holds the settings: ModelOpt has them one level deeper."""
    inner = found.get("quantization")
    return inner if isinstance(inner, dict) else found


def is_left(layer: str, config: Mapping[str, Any]) -> bool:
    """Return whether another library has left a linear layer as it was, by its name in MLX.

    All of them leave embeddings, and the head unless they say so.
    """
    found = method_of(config)
    settings = inner_part(found)
    lists = [settings.get(key) for key in SKIPPED]
    names = [name for given in lists if isinstance(given, list) for name in given]
    if layer.endswith("embed_tokens") or (layer.endswith("lm_head") and not found.get("lm_head")):
        return True
    return any(names_layer(str(name), layer) for name in names)


def names_layer(pattern: str, layer: str) -> bool:
    """Return whether an entry of a list of layers names this one: part of its name, or pattern."""
    if pattern.startswith("re:"):
        if UNSAFE.search(pattern) or len(pattern) > MOST_PATTERN:
            return False
        try:
            return re.match(pattern[3:], layer) is not None
        except re.error:
            return False
    if "*" in pattern:
        return fnmatch(layer, pattern) or fnmatch(layer, f"{pattern}.*")
    return f".{pattern}." in f".{layer}."


# The bytes of tensors, and how quantized layers are grouped


GROUP_SIZE = 64  # MLX's default for quantized weights
MODE_GROUP_SIZES = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}  # of modes other than affine
FLOATS = ("F64", "F32", "F16", "BF16")


def group_size_of(quantization: dict[str, Any]) -> int:
    """Weights per group, of a model or a layer that is quantized in this way."""
    default = MODE_GROUP_SIZES.get(str(quantization.get("mode")), GROUP_SIZE)
    return int(quantization.get("group_size") or default)


def tensor_bytes(
    entry: Entry, float_bytes: int, bits: int | None, group_size: int = GROUP_SIZE
) -> int:
    """Bytes of a tensor whose floats have `float_bytes` each.

    bits: of matrices that are quantized, None for no quantization. Each group of weights
    takes a scale and a bias in addition.
    """
    count = math.prod(entry.shape)
    if entry.kind not in FLOATS:
        return count * DTYPE_BITS[entry.kind] // 8
    matrix = entry.name.endswith(".weight") and len(entry.shape) in (2, 3)
    if bits is not None and matrix and entry.shape[-1] % group_size == 0:
        return count * bits // 8 + 2 * float_bytes * count // group_size
    return count * float_bytes
