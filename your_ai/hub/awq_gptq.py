"""The layouts of AWQ and GPTQ checkpoints, read from config.json and the headers of the files.

A layer with I inputs, O outputs and G groups of inputs, at b bits:

    qweight   GPTQ: (I * b / 32, O); AWQ: (I, O * b / 32)
    qzeros    (G, O * b / 32), the zero point of each group
    scales    (G, O)
    g_idx     (I,), only GPTQ: the group of each input

A weight is scale * (value - zero point). MLX has the same weights as `weight` (O, I * b / 32),
`scales` and `biases` (O, G), so no precision of a value is lost. `modelfiles.repack` converts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.gates.text import shown
from your_ai.gates.untrusted import Entry
from your_ai.hub.config_values import MLX_GROUPS, method_of

METHODS = ("awq", "gptq")
PACKED_BITS = {"awq": (4,), "gptq": (2, 3, 4, 8)}
WORD_BITS = 32
PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class Packing:
    """Facts of a config.json about AWQ or GPTQ weights."""

    method: str
    """`awq` or `gptq`."""
    bits: int
    """Bits per weight, of layers that have no qzeros."""
    zeros_less_one: bool
    """Whether qzeros has each zero point minus one, as the first format of GPTQ does."""


@dataclass(frozen=True)
class PackedLayer:
    """The sizes of one layer."""

    bits: int
    inputs: int
    outputs: int
    group_size: int
    """Inputs of a group in the files."""
    mlx_group_size: int
    """Inputs of a group for MLX: a divisor of `group_size`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as in the `quantization` of a config.json."""
        return {"group_size": self.mlx_group_size, "bits": self.bits, "mode": "affine"}


def packing_of(folder: Path, config: Mapping[str, Any]) -> Packing | None:
    """The packing of a model's weights; None if it is neither AWQ nor GPTQ.

    Raises UserError for a kind of AWQ or GPTQ that cannot be read.
    """
    found = method_of(config)
    method = found.get("quant_method")
    if method not in METHODS:
        return None
    bits = found.get("bits", found.get("w_bit", 4))
    if bits not in PACKED_BITS[method]:
        known = ", ".join(map(str, PACKED_BITS[method]))
        raise refused(folder, method, f"{shown(bits)} bits are not supported, only {known}")
    if method == "awq":
        layout = found.get("version", "gemm")
        if str(layout).lower() != "gemm":
            raise refused(folder, method, f"version {shown(layout)} is not supported, only gemm")
        return Packing("awq", bits, zeros_less_one=False)
    layout = "marlin" if found.get("is_marlin_format") else found.get("checkpoint_format")
    if layout not in (None, "", "gptq", "gptq_v2"):
        text = f"checkpoint_format {shown(layout)} is not supported, only gptq and gptq_v2"
        raise refused(folder, method, text)
    return Packing("gptq", bits, zeros_less_one=layout != "gptq_v2")


def refused(folder: Path, method: str, why: str) -> UserError:
    return UserError(
        f"{folder}: {method.upper()} weights: {why}; use another version of this model"
    )


def packed_layers(
    folder: Path, packing: Packing, entries: Iterable[Entry]
) -> dict[str, PackedLayer]:
    """The packed layers by the names of their tensors. Raises UserError for unknown layouts."""
    by_name = {entry.name: entry for entry in entries}
    names = (name for name in by_name if name.endswith(".qweight"))
    return {
        name.removesuffix(".qweight"): packed_layer(
            folder, packing, by_name, name.removesuffix(".qweight")
        )
        for name in names
    }


def packed_layer(
    folder: Path, packing: Packing, by_name: Mapping[str, Entry], layer: str
) -> PackedLayer:
    """The sizes of a layer, from the shapes of its tensors, since layers may differ in bits."""
    names = {part: f"{layer}.{part}" for part in PARTS}
    found = {part: by_name[name] for part, name in names.items() if name in by_name}
    shapes = {part: entry.shape for part, entry in found.items()}
    kinds = {entry.kind for part, entry in found.items() if part != "scales"}
    qweight, scales = shapes["qweight"], shapes.get("scales", ())
    if len(qweight) != 2 or len(scales) != 2 or 0 in (*qweight, *scales) or kinds != {"I32"}:
        raise refused(folder, packing.method, f"the tensors of {shown(layer)} have another layout")
    groups, outputs = scales
    bits, inputs = sizes_in(packing, shapes)
    if not fit(packing, shapes, bits, inputs):
        raise refused(folder, packing.method, f"the tensors of {shown(layer)} do not fit together")
    size = inputs // groups
    mlx_size = next((group for group in MLX_GROUPS if size % group == 0), None)
    if mlx_size is None:
        why = f"{shown(layer)} has groups of {size} weights, and MLX's have 32, 64 or 128"
        raise refused(folder, packing.method, why)
    if outputs % WORD_BITS:
        why = f"{shown(layer)} has {outputs} outputs, not a multiple of {WORD_BITS}"
        raise refused(folder, packing.method, why)
    return PackedLayer(bits, inputs, outputs, size, mlx_size)


def sizes_in(packing: Packing, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """(bits, inputs) of a layer; shapes: of its tensors, by their names in it."""
    outputs, zeros = shapes["scales"][1], shapes.get("qzeros")
    bits = packing.bits if zeros is None else zeros[-1] * WORD_BITS // outputs
    words = shapes["qweight"][0]
    return bits, words if packing.method == "awq" else words * WORD_BITS // max(1, bits)


def fit(packing: Packing, shapes: Mapping[str, tuple[int, ...]], bits: int, inputs: int) -> bool:
    """Return whether the tensors of a layer are those of this many bits and inputs."""
    groups, outputs = shapes["scales"]
    wide = (inputs, outputs * bits // WORD_BITS)
    expected = {
        "qweight": wide if packing.method == "awq" else (shapes["qweight"][0], outputs),
        "scales": (groups, outputs),
        "qzeros": (groups, outputs * bits // WORD_BITS),
        "g_idx": (inputs,),
    }
    return (
        bits in PACKED_BITS[packing.method]
        and inputs * bits % WORD_BITS == outputs * bits % WORD_BITS == inputs % groups == 0
        and all(shape == expected[part] for part, shape in shapes.items())
    )


def as_in_mlx(
    folder: Path, config: dict[str, Any], entries: list[Entry]
) -> tuple[list[Entry], dict[str, Any]]:
    """The tensors and the configuration of a model after repacking; unchanged if it needs none.

    Raises UserError as `packed_layers` does.
    """
    packing = packing_of(folder, config)
    if packing is None:
        return entries, config
    layers = packed_layers(folder, packing, entries)
    found = [e for e in entries if e.name.rpartition(".")[0] not in layers or not is_packed(e.name)]
    for name, layer in layers.items():
        rows, groups = layer.outputs, layer.inputs // layer.mlx_group_size
        words = layer.inputs * layer.bits // WORD_BITS
        found.append(Entry(f"{name}.weight", "U32", (rows, words)))
        found += [Entry(f"{name}.{part}", "F16", (rows, groups)) for part in ("scales", "biases")]
    settings = {name: layer.settings for name, layer in layers.items()}
    return found, config | {"quantization": common(settings.values()) | settings}


def is_packed(name: str) -> bool:
    """Return whether a tensor has this name only in AWQ or GPTQ."""
    return name.rpartition(".")[2] in PARTS


def common(settings: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The settings of most layers."""
    counts = Counter(tuple(each.items()) for each in settings)
    return dict(counts.most_common(1)[0][0]) if counts else {"group_size": 128, "bits": 4}
