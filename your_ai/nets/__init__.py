"""Models: loaded, given LoRA layers, taken apart into blocks and a head."""
