"""A training run: prepared, trained step by step, measured, saved."""
