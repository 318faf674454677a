"""Rows -> examples -> batches. Does not import mlx: batches are numpy arrays."""
