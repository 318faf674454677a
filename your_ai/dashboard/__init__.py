"""The display of a run: its events are folded into a state, and the state is drawn."""
