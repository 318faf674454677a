"""Mixers whose time is linear in the tokens, computed in chunks for training.

A mixer carries a state from token to token. mlx-lm's own code loops over the tokens, and the
backward pass then keeps the state of each of them. Here a chunk of tokens is computed at once;
only the states between chunks are kept, and a chunk is computed again in the backward pass.
"""
