"""The user's side of runs: the process that outlives training, and what shows and lists runs."""
