"""What the rows that a model reads and writes leave in the caches of its blocks. No mlx here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowCache:
    """A cache of one row: of keys and values, or of the state of a recurrence."""

    fixed: int
    """Bytes that do not depend on the tokens."""
    of_token: int
    """Bytes of each token."""
    window: int = 0
    """Tokens that are kept at most; 0 for all."""

    def bytes_at(self, tokens: int, together: int = 1) -> int:
        """The bytes after so many tokens. together: that were read at once, at the end; a window
        keeps all of these, and what the first of them reaches."""
        most = self.window - 1 + together if self.window else tokens
        return self.fixed + self.of_token * min(tokens, most)
