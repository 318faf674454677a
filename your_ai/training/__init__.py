"""The training process: prepare, train step by step, validate, save, act on memory."""
