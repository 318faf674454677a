"""Training objectives: each computes a loss sum and weights from log-probabilities."""
