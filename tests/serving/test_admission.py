from __future__ import annotations

import pytest

from your_ai.serving.admission import check_body

GOOD = {
    "model": "r", "messages": [], "max_tokens": 5, "temperature": 0.5, "top_p": 1, "top_k": 9,
    "stop": ["a", ""], "seed": (1 << 64) - 1, "logit_bias": {"0": -100, "9": 1.5}, "n": 1,
    "xtc_threshold": 0.5, "stream": True, "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False}, "user": "u",
}  # fmt: skip


def test_what_can_be_answered_passes():
    check_body(GOOD, 10)
    check_body({}, 10)
    check_body({"stop": "end", "seed": None, "stream_options": None, "n": None}, 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", ["a"]),
        ("temperature", float("nan")),
        ("top_p", float("inf")),
        ("max_tokens", 10**30),
        ("repetition_penalty", -(10**30)),
        ("stop", 3),
        ("stop", [3]),
        ("stop", {"a": "b"}),
        ("logit_bias", [1]),
        ("logit_bias", {"10": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": float("nan")}),
        ("top_k", 10),
        ("xtc_threshold", 0.51),
        ("n", 2),
        ("seed", -1),
        ("seed", 1 << 64),
        ("chat_template_kwargs", 3),
        ("chat_template_kwargs", {"chat_template": ""}),
        ("stream_options", 3),
    ],
)
def test_what_would_end_the_server_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} "):
        check_body(GOOD | {name: value}, 10)
