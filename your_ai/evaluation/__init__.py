"""What a run has learned, measured over rows: its model with the adapter and without."""
