"""What depends on sizes alone is computed once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from your_ai.memory.memoized import memoized


@dataclass(frozen=True)
class Sizes:
    blocks: int
    calls: list[tuple[int, int]]

    @memoized
    def times(self, number: int, more: int = 0) -> int:
        self.calls.append((number, more))
        return self.blocks * number + more


@memoized
def half_of(sizes: Sizes) -> float:
    sizes.calls.append((0, 0))
    return sizes.blocks / 2


def test_each_result_is_computed_once():
    sizes = Sizes(4, [])
    assert [sizes.times(2), sizes.times(2), sizes.times(3)] == [8, 8, 12]
    assert [sizes.times(2, more=1), sizes.times(2, more=1)] == [9, 9]
    assert [half_of(sizes), half_of(sizes)] == [2, 2]
    assert sizes.calls == [(2, 0), (3, 0), (2, 1), (0, 0)]


def test_other_sizes_have_results_of_their_own():
    sizes = Sizes(4, [])
    assert half_of(sizes) == 2
    assert half_of(replace(sizes, blocks=6)) == 3


def test_results_are_no_part_of_an_object():
    sizes = Sizes(4, [])
    half_of(sizes)
    assert sizes == Sizes(4, [(0, 0)])
    assert "half_of" not in repr(sizes)
