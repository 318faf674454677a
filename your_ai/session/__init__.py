"""The user's side of runs: the supervisor of training, the display of a run, the list of runs."""
