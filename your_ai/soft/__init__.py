"""Differentiable generation: a policy trained through its own sampled tokens."""
