"""Sends the metrics of a run to wandb, SwanLab and TensorBoard, from a separate process."""
