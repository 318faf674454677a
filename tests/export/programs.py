"""A stand-in for llama-quantize: it does what the program is known to do with what your_ai gives
it, and refuses everything else."""

from __future__ import annotations

QUANTIZE = '''
"""llama.cpp's llama-quantize IN OUT TYPE, for rows that are no multiple of 256: it then takes Q5_0
for Q4_K, Q5_1 for Q5_K and Q8_0 for Q6_K, and F16 for rows that are no multiple of 32."""
import sys

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, GGMLQuantizationType, LlamaFileType, quants

TYPES = {"Q4_0": "Q4_0", "Q4_K_M": "Q5_0", "Q5_K_M": "Q5_1", "Q6_K": "Q8_0"}
given, made, kind = sys.argv[1:]
reader, own = GGUFReader(given), {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
writer = GGUFWriter(made, reader.fields["general.architecture"].contents())
for name, field in reader.fields.items():
    value = field.contents()
    if name in own or name == "general.architecture":
        continue
    if name == "general.file_type":
        value = int(LlamaFileType[f"MOSTLY_{kind}"])
    sub = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
    writer.add_key_value(name, value, field.types[0], sub)
names = {tensor.name for tensor in reader.tensors}
head = "output.weight" if "output.weight" in names else "token_embd.weight"
for tensor in reader.tensors:
    rows = quants.dequantize(tensor.data, tensor.tensor_type)
    wanted = "Q8_0" if tensor.name == head else TYPES[kind]
    if rows.ndim == 1:
        wanted = "F32"
    elif rows.shape[-1] % 32:
        wanted = "F16"
    data = quants.quantize(rows, GGMLQuantizationType[wanted])
    writer.add_tensor(tensor.name, data, raw_dtype=GGMLQuantizationType[wanted])
    print(f"[{tensor.name}] converting to {wanted}", flush=True)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
'''

CONVERT = '''
"""llama.cpp's convert_hf_to_gguf.py and convert_lora_to_gguf.py: all tensors, under their names."""
import argparse
import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--outfile", type=Path)
parser.add_argument("--outtype", choices=["f32", "f16", "bf16", "q8_0"])
parser.add_argument("--model-name")
parser.add_argument("--base", type=Path)
parser.add_argument("folder", type=Path)
given = parser.parse_args()
config = json.loads(((given.base or given.folder) / "config.json").read_text())
assert not config.get("num_nextn_predict_layers")
assert "quantization" not in config and not list(given.folder.glob("*.py"))
kinds = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
writer = gguf.GGUFWriter(given.outfile, config["model_type"])
writer.add_type("adapter" if given.base else "model")
writer.add_name(given.model_name or "adapter")
writer.add_string("test.architecture", config["architectures"][0])
writer.add_string("test.files", " ".join(sorted(path.name for path in given.folder.iterdir())))
if not given.base:
    writer.add_file_type(gguf.LlamaFileType[kinds[given.outtype]])
for file in sorted(given.folder.glob("*.safetensors")):
    for name, array in mx.load(str(file)).items():
        kind = "F32" if array.ndim == 1 else given.outtype.upper()
        kind = "F16" if kind == "Q8_0" and array.shape[-1] % 32 else kind
        kind = gguf.GGMLQuantizationType[kind]
        data = gguf.quantize(np.array(array.astype(mx.float32)), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        print(f"{name} --> {kind.name}", flush=True)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
'''
