"""Rewards of completions: built-in ones, the user's functions, and a judge. No MLX."""
