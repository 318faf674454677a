"""Which layers a value of --lora-targets selects."""

from __future__ import annotations

import pytest

from your_ai.config.names import selects


@pytest.mark.parametrize(
    ("target", "name", "plain", "expert", "asked"),
    [  # of a dense layer; of routed experts, without and with --lora-experts
        ("all-linear", "mlp.switch_mlp.up_proj", True, False, True),
        ("up_proj", "mlp.switch_mlp.up_proj", True, False, True),
        ("switch_mlp.up_proj", "mlp.switch_mlp.up_proj", True, True, True),
        ("mlp.switch_mlp.up_proj", "mlp.switch_mlp.up_proj", True, True, True),
        ("mlp.up_proj", "mlp.switch_mlp.up_proj", False, False, False),
        ("p_proj", "mlp.switch_mlp.up_proj", False, False, False),
    ],
)
def test_experts_are_selected_by_a_path_or_if_they_are_asked_for(
    target, name, plain, expert, asked
):
    assert selects(target, name) == plain
    assert selects(target, name, is_expert=True) == expert
    assert selects(target, name, is_expert=True, experts=True) == asked
