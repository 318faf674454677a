"""The sizes of the pieces that a model is computed in: engines cut by them, estimates use them."""

from __future__ import annotations

DEQUANTIZED_SLICE_BYTES = 2 << 20  # of a quantized weight; MLX holds a few of them at a time
HEAD_SLICE_BYTES = 4 << 20  # of the vocabulary: of weights, or of logits
HEAD_ROWS = 1024  # hidden states that meet the head together: enough to keep it cheap
FEWEST_FEATURES = 512  # of an MLP's slice, so that matrix products stay efficient
# Queries of attention at once; more waste work above the diagonal, fewer slow the matmuls.
QUERY_BLOCK = 64
LEAN_QUERY_BLOCK = 32  # where memory is dearer than time: 30% less of it, in 15% more time
FEWEST_QUERIES = 16  # however long the row
SCORE_BYTES = 16 << 20  # of a block's attention scores; some five arrays of that size are alive
CPU_TOKENS = 96  # of a row, from where on blocks of queries are faster on the CPU
METAL_TOKENS = 192  # from here on they hold 40% less, in 6% more time (measured on the CPU)
UPDATE_BYTES = 4 << 20  # of parameters that the optimizer updates together
PREFILL_TOKENS = 256  # of a prompt at once
CACHE_STEP = 256  # tokens by which keys and values grow in mlx-lm
