"""Find models by name, check that they are complete, and download them."""
