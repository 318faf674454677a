"""Results that are whole or not there: where they may be put, and how large ones are written."""
