"""Export runs to the formats of other tools, and import adapters of other tools as runs."""
