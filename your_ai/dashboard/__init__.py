"""What a run looks like: its events folded into a state, and that state drawn."""
