"""What `tune` searches. Loads nothing, so that a form can say it beside a setting."""

from __future__ import annotations

SLOWEST, FASTEST = 0.25, 10.0  # learning rates that are searched, as multiples of the default
RANKS = (4, 8, 16, 32)
LAYER_DIVISORS = (1, 2)  # all blocks, the last half
SCHEDULES = ("constant", "linear", "cosine")
SEARCHED = {  # the settings, and what is tried of each in words
    "learning_rate": f"{SLOWEST:g} to {FASTEST:g} times the default",
    "lora_rank": ", ".join(map(str, RANKS)),
    "lora_layers": "all blocks, and the last half",
    "lr_schedule": ", ".join(SCHEDULES),
}
