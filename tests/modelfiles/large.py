"""Models too large for a test's memory, and processes whose memory is measured from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import psutil

from tests.conftest import with_tokenizer_of_demo

MB = 10**6
LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 768, "torch_dtype": "float16",
}  # fmt: skip


def make_large(folder: Path, bits: int | None = None, blocks: int = 12) -> Path:
    """Write a model with float16 weights block by block, so that it is never in memory as a whole.

    bits: bits per weight of a quantized model; None for float16.
    """
    folder.mkdir()
    inner, hidden = LARGE["intermediate_size"], LARGE["hidden_size"]
    wide = mx.random.normal((inner, hidden)).astype(mx.float16)
    square, keys, norm = wide[:hidden], wide[: hidden // 2], wide[0]
    qkvo = {"q": square, "k": keys, "v": keys, "o": square}
    block = {
        **{f"self_attn.{name}_proj": array for name, array in qkvo.items()},
        "mlp.gate_proj": wide,
        "mlp.up_proj": wide + 1,
        "mlp.down_proj": mx.contiguous(wide.T),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), norm),
    }
    rest = {"model.embed_tokens": wide[: LARGE["vocab_size"]], "model.norm": norm}
    parts = [rest] + [
        {f"model.layers.{index}.{name}": array for name, array in block.items()}
        for index in range(blocks)
    ]
    for index, part in enumerate(parts):
        arrays = {f"{name}.weight": array for name, array in part.items()}
        if bits is not None:
            arrays = quantized(arrays, bits)
        mx.save_safetensors(str(folder / f"model-{index}.safetensors"), arrays)
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **LARGE}
    config["num_hidden_layers"] = blocks
    if bits is not None:
        config["quantization"] = {"group_size": 64, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    return with_tokenizer_of_demo(folder)


def quantized(arrays: dict[str, mx.array], bits: int) -> dict[str, mx.array]:
    found = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            found[name] = array
        else:
            names = (name, name.replace("weight", "scales"), name.replace("weight", "biases"))
            found |= zip(names, mx.quantize(array, group_size=64, bits=bits), strict=True)
    return found


def watched(process: subprocess.Popen) -> int:
    """The peak memory of a process until it ends, in bytes, measured from outside."""
    most = 0
    while process.poll() is None:
        try:
            if sys.platform == "linux":  # VmHWM is the peak, so no moment is missed
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
                most = max(most, *found)
            else:
                most = max(most, psutil.Process(process.pid).memory_info().rss)
        except (OSError, psutil.Error, TypeError):  # the process has just ended
            pass
        time.sleep(0.005)
    return most
