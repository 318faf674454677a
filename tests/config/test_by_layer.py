"""Numbers by layer: `--lora-rank 16,mlp=32,block.0-3=8`."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.config import AUTO, TrainConfig, build, coerce, defaults, resolve, to_yaml
from your_ai.config.by_layer import ByLayer, LayerPattern, values_by_layer
from your_ai.errors import UserError
from your_ai.gates.yaml_files import read_yaml

WORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
NAMES = (
    st.lists(WORDS, min_size=1, max_size=3)
    .map(".".join)
    .filter(
        lambda name: not name.startswith("block.")  # a block, if a number follows
    )
)
NUMBERS = st.one_of(
    st.integers(1, 65_536), st.floats(1e-6, 1e9, allow_nan=False, allow_infinity=False)
)
BLOCKS = st.one_of(st.none(), st.tuples(st.integers(0, 999), st.integers(0, 999)).map(sorted))
PATTERNS = st.builds(
    lambda value, name, blocks: LayerPattern(value, name, blocks and tuple(blocks)),
    NUMBERS, st.one_of(st.just(""), NAMES), BLOCKS,
).filter(lambda pattern: pattern.text)  # fmt: skip
LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.experts.up_proj", "up_proj")


@given(st.one_of(st.just(AUTO), NUMBERS), st.lists(PATTERNS, max_size=6).map(tuple))
def test_text_is_read_back_as_it_was(default, patterns):
    numbers = ByLayer(default, patterns)
    assert ByLayer.of(numbers.text) == numbers
    assert ByLayer.of(numbers.text).text == numbers.text


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 6), st.sampled_from(LAYERS)),
        st.sampled_from([4, 8, 8, 8, 16.5]),
        min_size=1,
    )
)
def test_patterns_give_each_layer_its_value(values):
    found = ByLayer.of(values_by_layer(values).text)
    assert {place: found.at(place) for place in values} == values


def test_one_value_has_no_patterns():
    assert values_by_layer({(0, "a"): 8, (1, "b"): 8}).setting == 8


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0, "self_attn.q_proj"), 8),
        ((3, "self_attn.k_proj"), 8),
        ((4, "self_attn.q_proj"), 16),
        ((0, "mlp.up_proj"), 8),  # the last counts
        ((4, "mlp.up_proj"), 32),
        ((4, "block.mlp.up_proj"), 32),
        ((4, "my_mlp.up_proj"), 16),
        ((5, "mlp.up_proj"), 2),
    ],
)
def test_last_pattern_that_selects_a_layer_counts(place, value):
    assert ByLayer.of("16, mlp=32,block.0-3=8,block.5.mlp=2").at(place) == value


def test_full_path_in_a_block_selects_one_layer():
    numbers = ByLayer.of("1,self_attn.q_proj=2")
    assert [numbers.at((0, n)) for n in ("self_attn.q_proj", "cross_attn.q_proj")] == [2, 1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (16, 16), ("16", 16), ("auto", "auto"), ({"default": 8}, 8), ("16, mlp=32", "16,mlp=32"),
        ({"default": "auto", "block.3-3": 4}, "auto,block.3=4"), ("16.0,mlp=8.0", "16,mlp=8"),
    ],
)  # fmt: skip
def test_values_have_one_form(value, expected):
    assert coerce("lora_rank", value, "x") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("eight", "expected a whole number or auto"),
        ("16,mlp", "'mlp' is no PATTERN=VALUE; give DEFAULT,PATTERN=VALUE"),
        ("16,=4", "'4' is no PATTERN=VALUE"),
        ("16,mlp=", "'' is no number"),
        ("16,mlp=nan", "nan is no number"),
        ("16,mlp=" + 400 * "9", "999.* is no number"),
        ("16,block.0-=4", "'block.0-' is no PATTERN=VALUE"),
        ("16,block.3-1=4", "the first block is after the last"),
        ("mlp=4", "'mlp=4' is no number"),
        ({"mlp": 4}, "the default is missing"),
        ({"default": 4, "mlp": [4]}, r"\[4\] is no number"),
    ],
)
def test_malformed_values_are_refused(value, message):
    with pytest.raises(UserError, match=f"^--lora-rank.*{message}"):
        coerce("lora_rank", value, "--lora-rank")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": "16,mlp=2.5"}, "--lora-rank mlp=2.5: must be a whole number"),
        ({"lora_rank": "16,mlp=0"}, "--lora-rank mlp=0: must be at least 1"),
        ({"lora_rank": "70000,mlp=4"}, "--lora-rank 70000: must be at most 65,536"),
        ({"lora_alpha": "32,block.0=0"}, "--lora-alpha block.0=0: must be above 0"),
        ({"lora_alpha": "auto,mlp=3"}, "--lora-alpha auto: only the rank may be automatic"),
    ],
)
def test_numbers_out_of_bounds_are_named(settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        build(settings, "test")


def test_yaml_may_have_a_mapping_and_is_written_as_a_text(own_folder):
    (own_folder / "c.yaml").write_text("data: d\nlora_rank: {default: 16, mlp: 32}\n")
    config = resolve({}, "c.yaml")
    assert config.lora_rank == "16,mlp=32"
    (own_folder / "d.yaml").write_text(to_yaml(config))
    assert build(read_yaml(own_folder / "d.yaml"), "test") == config


LAYERS_OF_TWO = [(block, name) for block in (2, 3) for name in ("self_attn.q_proj", "mlp.up_proj")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4,q_prj=8", "--lora-rank q_prj=8: no adapted layer has q_prj in its path; did you mean "
         "q_proj.*the layers are mlp.up_proj, self_attn.q_proj"),
        ("4,block.0-1=8", "--lora-rank block.0-1=8: selects no adapted layer; adapted are blocks"),
        ("4,block.1.mlp=8", "--lora-rank block.1.mlp=8: selects no adapted layer"),
    ],
)  # fmt: skip
def test_pattern_of_no_layer_is_refused(text, message):
    with pytest.raises(UserError, match=f"^{message}"):
        ByLayer.of(text).check("--lora-rank", LAYERS_OF_TWO)


def chosen(config, rank, count):
    found = defaults.resolved(config, 10, False, 3, rank, count, blocks=4)
    return found.lora_rank, found.lora_alpha


def test_automatic_rank_keeps_the_scale_of_the_layers_that_have_it():
    config = TrainConfig(lora_rank="auto,mlp=32", lora_alpha="32,q_proj=4")
    assert chosen(config, 16, 4) == ("16,mlp=32", "32,q_proj=4")
    assert chosen(config, 4, 4) == ("4,mlp=32", "8,mlp=32,q_proj=4")


def test_patterns_of_blocks_that_get_no_adapters_go():
    config = TrainConfig(lora_rank="8,block.0-1=4,block.1-2=2", lora_layers=AUTO)
    assert chosen(config, 8, 2) == ("8,block.1-2=2", 32.0)


def test_what_was_chosen_is_used_again():
    config = TrainConfig(lora_rank="auto,block.0=4", lora_layers=AUTO)
    before = dataclasses.replace(config, lora_rank="4", lora_alpha=8.0, lora_layers=2)
    found = defaults.recorded(config, before)
    assert (found.lora_rank, found.lora_alpha, found.lora_layers) == ("4", 8.0, 2)


def test_plain_numbers_stay_what_they_are():
    config = TrainConfig()
    assert chosen(config, 8, 4) == (8, 16.0)
    assert chosen(dataclasses.replace(config, lora_rank=5, lora_alpha=3.0), 5, 4) == (5, 3.0)
    assert isinstance(chosen(TrainConfig(lora_rank=5), 5, 4)[0], int)
