"""The studio: pages on which everything can be done that the command line does for a run."""
