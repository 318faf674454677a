"""Settings of other libraries, which anybody may have written."""

from __future__ import annotations

import pytest

from your_ai.hub.config_values import is_left, names_layer, quantization_of

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": 32},
        {"quant_method": "modelopt", "quantization": True},
        {"quant_method": "compressed-tensors", "format": "x", "ignore": 7},
        {"quant_method": ["mxfp4"]},
    ],
)
def test_settings_of_another_kind_say_nothing(settings):
    config = {"quantization_config": settings}
    assert quantization_of(config) == {}
    assert not is_left(LAYER, config)


def test_patterns_name_layers():
    assert names_layer("re:.*self_attn.*", LAYER)
    assert names_layer("model.layers.*.self_attn", LAYER)
    assert names_layer("self_attn", LAYER)
    assert not names_layer("re:.*mlp.*", LAYER)


@pytest.mark.timeout(5)
def test_patterns_that_take_forever_are_not_tried():
    assert not names_layer("re:(.*.*)*(x+)+y", LAYER * 20)
    assert not names_layer("re:" + ".*" * 500 + "!", LAYER)
