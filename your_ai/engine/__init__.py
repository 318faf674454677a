"""Engines that compute the gradients of a step; every engine computes the same gradients."""
