"""Text from a model, with or without a run's adapter."""
