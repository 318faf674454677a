"""Generate text with a model, with or without the adapter of a run."""
