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
