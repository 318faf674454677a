"""A run behind mlx-lm's server, for programs that speak OpenAI's protocol."""
