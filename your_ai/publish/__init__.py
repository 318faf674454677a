"""What a run has learned, on the hub: its files, its card, and the push itself."""
