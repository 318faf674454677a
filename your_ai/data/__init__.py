"""Rows -> examples -> batches. Nothing here imports mlx: batches are numpy arrays."""
