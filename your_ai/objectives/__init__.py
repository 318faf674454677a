"""What a run learns: each objective turns a model's hidden states into a loss sum."""
