"""What is exported, read by those it is for, and their adapters imported."""
