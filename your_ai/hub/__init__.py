"""Models by name: where they lie, whether they are whole, and how they get here."""
