"""The longest row that fits, and rows of the 8B shape that are tiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.memory.test_plan import GB, LLAMA, WORKLOAD
from your_ai.memory.mixer_facts import ATTENTION, MixerFacts
from your_ai.memory.plan import MOST, STEP, DoesNotFit, choose, longest_of, longest_rows

HEADS = MixerFacts(
    kind=ATTENTION, heads=32, kv_heads=8, key_dim=128, value_dim=128, cached=2048
)  # fmt: skip
TILED = replace(LLAMA, kinds=(replace(LLAMA.kinds[0], mixers=(HEADS,)),))
WHOLE = replace(LLAMA, kinds=(replace(LLAMA.kinds[0], mixers=(replace(HEADS, untiled=True),)),))


@pytest.mark.parametrize("most", [0, STEP, 3 * STEP, 4 * STEP, 1000 * STEP, MOST, 2 * MOST])
def test_bisection_finds_the_last_length_that_fits(most):
    assert longest_of(lambda tokens: tokens <= most) == min(most, MOST)


def test_a_length_that_fits_beyond_one_that_does_not_is_found():
    assert longest_of(lambda tokens: tokens <= STEP or 4 * STEP <= tokens <= 6 * STEP) == 6 * STEP


def test_the_longest_row_fits_and_the_next_does_not():
    workload = replace(WORKLOAD, facts=TILED)
    rows = list(longest_rows(workload, (GB // 10, 4 * GB, 8 * GB)))
    assert rows[0].tokens == 0
    assert rows[0].choice is None
    assert 0 < rows[1].tokens < rows[2].tokens
    for row in rows[1:]:
        assert row.choice.option.needed_bytes <= row.limit_bytes
        more = replace(workload, lengths=(row.tokens + STEP,), batch_size=1)
        with pytest.raises(DoesNotFit):
            choose(more, row.limit_bytes)


def test_rows_of_131072_tokens_of_the_8b_shape_fit_into_26_gb_in_float32():
    training = replace(WORKLOAD.training, blocks=32)
    workload = replace(
        WORKLOAD, facts=replace(TILED, float_bytes=4), training=training, batch_size=1
    )
    (row,) = longest_rows(workload, (int(26.3 * GB),))
    assert row.tokens >= 131_072
    (whole,) = longest_rows(replace(workload, facts=replace(WHOLE, float_bytes=4)), (26 * GB,))
    assert whole.tokens < 65_536  # blocks that cannot be tiled
