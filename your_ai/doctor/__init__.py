"""The machine: what it is, what it lacks, and what a model made on the spot does on it."""
