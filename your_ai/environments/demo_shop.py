"""The price list of the embedded demo's shop, as a tool (`--tools`)."""

from __future__ import annotations

import hashlib

is_pure = True


def price(colour: str, item: str) -> int:
    """Look up what one item costs.

    Args:
        colour: Its colour.
        item: The item, in the singular.
    """
    digest = hashlib.sha256(f"{colour} {item}".encode()).digest()
    return 2 + digest[0] % 19
