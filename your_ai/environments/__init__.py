"""Environments of conversations: tools, the user's classes, and a sandbox for code. No MLX.

The user's code runs in processes of its own (`pool` starts `host`, which starts one process for
each conversation), never in the training process.
"""
