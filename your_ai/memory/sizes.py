"""Sizes of the slices in which a model is computed, shared by the engines and the estimates."""

from __future__ import annotations

DEQUANTIZED_SLICE_BYTES = 2 << 20  # slice of a quantized weight; a few exist at a time
HEAD_SLICE_BYTES = 4 << 20  # slice of the head, of its weights or of the logits
SOFTMAX_BYTES = 16  # of a softmax that is kept beside the hidden states of a teacher
HEAD_ROWS = 1024  # hidden states that go through the head together: enough to keep it cheap
FEWEST_FEATURES = 512  # minimum features of an MLP slice, so that matmuls stay efficient
SLICE_STEP = 128  # slices are multiples of this many features, to keep quantization groups whole
# Query positions of attention computed together. More waste work above the diagonal; fewer slow
# the matmuls.
QUERY_BLOCK = 64
LEAN_QUERY_BLOCK = 32  # for engines that save memory: 30% less memory, 15% more time
FEWEST_QUERIES = 16  # minimum, for any sequence length
SCORE_BYTES = 16 << 20  # attention scores of one query block; about five such arrays are alive
# Micro-batches of more than TILED_FROM tokens run through a block in tiles of about TILE_TOKENS, if
# the block keeps no outputs. Tiles of 256 take 40% less memory, but dequantize weights too often.
TILED_FROM = 1024
TILE_TOKENS = 512
# Attention scores of one query block of a tile, against another tile; about twelve are alive.
TILE_SCORE_BYTES = 2 << 20
CPU_TOKENS = 96  # sequence length from which query blocks are faster on the CPU
METAL_TOKENS = 192  # from here they use 40% less memory in 6% more time (measured on the CPU)
UPDATE_BYTES = 4 << 20  # parameters that the optimizer updates together,
UPDATE_BYTES_ROUNDED = 1 << 20  # and with 8-bit states or bfloat16, which are float32 meanwhile
REDUCTION_BYTES = 16 << 20  # gradients in float32 that are summed over processes together
QUANTIZED_BLOCK = 256  # values of an optimizer state in 8 bits that share a scale
FEWEST_QUANTIZED = 4096  # values of an optimizer state; smaller ones stay in float32
PREFILL_TOKENS = 256  # tokens of a prompt processed together
CACHE_STEP = 256  # tokens by which the KV cache of mlx-lm grows
BATCH_STEP = 32  # the same where rows are sampled together
# Tokens per chunk of the mixers of nets.mixers.
DELTA_CHUNK = 64  # gated delta rule, a decay per head
VECTOR_DELTA_CHUNK = 32  # gated delta rule, a decay per feature
LINEAR_CHUNK = 64  # Mamba 2 and lightning attention
RWKV_CHUNK = 32  # RWKV-7
SELECTIVE_CHUNK = 16  # Mamba 1
LRU_CHUNK = 128  # RG-LRU


# How a long row is cut into tiles of tokens: one answer for the engines and the estimates


FEWEST_TILE_TOKENS = 64  # of each row, however many rows there are


def tiles_of(rows: int, tokens: int) -> list[slice[int, int, None]]:
    """The tiles of B rows of T tokens, of about equal size; one tile if they are not long."""
    if rows * tokens <= TILED_FROM:
        return [slice(0, tokens)]
    most = max(TILE_TOKENS // rows, min(FEWEST_TILE_TOKENS, TILE_TOKENS))
    count = -(-tokens // most)
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
