"""A run's adapter in the weights of its base: a model of its own, and how near it comes."""
