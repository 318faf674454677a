"""Models: loading, LoRA and DoRA layers, splitting into blocks and a head, saved adapters."""
