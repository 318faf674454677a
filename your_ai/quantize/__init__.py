"""Models quantized shard by shard, in little memory, and kept for the runs that ask for them."""
