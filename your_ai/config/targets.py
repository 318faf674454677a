"""Which layers of a block a value of --lora-targets selects."""

from __future__ import annotations

from your_ai.config.names import ALL_LINEAR


def selects(target: str, name: str, *, is_expert: bool = False, experts: bool = False) -> bool:
    """Whether a target selects the layer at `name`, its path in a block.

    is_expert: whether these are weights of the routed experts of a mixture of experts. They are
        selected by a path such as `switch_mlp.up_proj`; by all-linear and by a name without a dot
        only with --lora-experts.
    experts: the value of --lora-experts.
    """
    if is_expert and not experts and "." not in target:
        return False
    return target == ALL_LINEAR or name == target or name.endswith("." + target)
