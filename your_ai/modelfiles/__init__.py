"""Write models shard by shard, complete or not at all; quantize models."""
