"""What a run has learned, in the formats of other tools, and adapters of theirs as runs."""
