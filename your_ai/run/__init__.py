"""The run folder: its files, its events, its checkpoints."""
