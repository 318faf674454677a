"""Pushes a run or a folder to the Hugging Face Hub, and writes model cards."""
