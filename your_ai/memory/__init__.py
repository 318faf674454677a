"""What memory a run holds."""
