"""Models: loading, adapter layers, splitting into blocks and a head, saved adapters."""
