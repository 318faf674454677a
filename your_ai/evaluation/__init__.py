"""Measure what a run has learned: run its model over rows with and without the adapter."""
