"""Recommendations for recorded machines fit, are ranked well, and improve with memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import shown
from tests.machines import CPU, CUDA, GIB, MACS, RECORDED
from your_ai.config import TrainConfig, defaults, resolve
from your_ai.doctor import recommend as recommending
from your_ai.doctor.machine import limit_of
from your_ai.doctor.recommend import (
    PYTHON_BYTES,
    RANKS,
    TIERS,
    MachineRoom,
    Recommendation,
    first_that_fits,
    recommend,
    room_here,
    room_of,
)
from your_ai.errors import UserError
from your_ai.gates.text import size_text
from your_ai.hub.registry import Known, known
from your_ai.memory.facts import ModelFacts, facts_of_known, layers_named
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.plan import with_adapters
from your_ai.memory.workload import WHOLE, DataSizes, ProcessFacts, words, workload_of

LIGHT_LOADED = """
import sys
from your_ai.doctor import recommend
from your_ai.hub.registry import known
from your_ai.memory import plan
weighed, weigh = [], plan.option_of
plan.option_of = lambda *args, **kwargs: weighed.append(1) or weigh(*args, **kwargs)
room = recommend.room_of(16)
found = recommend.recommend(room)
assert found
recommend.recommendations_table(room, found), recommend.recommendations_json(room, found)
assert 10 * len(known()) < len(weighed) < 100 * len(known()), len(weighed)  # a ms each
sys.exit(",".join(m for m in ("mlx", "mlx_lm", "numpy", "transformers") if m in sys.modules) or 0)
"""


# What is asked of several tests is found once: a room has a thousand plans to weigh.
recommended = functools.cache(recommend)


@pytest.fixture(scope="module", autouse=True)
def facts_found_once() -> Iterator[None]:
    """Each test asks for those of all known models."""
    found: dict[tuple[int, int], tuple[Known, ModelFacts]] = {}  # holds a model, for its id

    def facts(model: Known, float_bytes: int) -> ModelFacts:
        key = id(model), float_bytes
        if key not in found:
            found[key] = model, facts_of_known(model, float_bytes)
        return found[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recommending, "facts_of_known", facts)
        yield


def names(found: list[Recommendation], tier: str) -> list[str]:
    return [each.known.alias for each in found if each.tier == tier]


def tiers(found: list[Recommendation]) -> dict[str, int]:
    """The best rank of each model."""
    best: dict[str, int] = {}
    for each in found:
        best.setdefault(each.known.alias, RANKS[each.tier])
    return best


def facts_for(each: Recommendation, room: MachineRoom) -> ModelFacts:
    return facts_of_known(each.known, room.float_bytes)


def asked(each: Recommendation) -> TrainConfig:
    """The settings of its command."""
    program, verb, *flags = shlex.split(each.command)
    assert (program, verb) == ("your_ai", "train")
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return resolve({name[2:].replace("-", "_"): value for name, value in pairs}, None)


# Room


@pytest.mark.parametrize("gb", MACS)
def test_room_of_a_size_is_at_most_that_of_an_idle_mac(gb):
    ours = room_of(gb).limit.limit_bytes
    real = limit_of(MACS[gb]).limit_bytes
    assert 0.85 * real < ours <= real * 1.001  # 5.33 is a rounded 16 / 3
    assert room_of(gb).limit.notices == ()


@pytest.mark.parametrize("memory", [0, -1, float("nan"), float("inf")])
def test_an_invalid_size_is_refused(memory):
    with pytest.raises(UserError, match="must be a number above 0"):
        room_of(memory)


def test_room_here_is_the_memory_limit_of_a_run():
    assert room_here(MACS[16]).limit == limit_of(MACS[16])
    assert room_here(MACS[16]).float_bytes == 2


def test_the_free_memory_of_a_card_limits_the_room():
    room = room_here(CUDA)
    assert room.limit == limit_of(CUDA)
    assert room.limit.limit_bytes <= 0.95 * 23 * GIB


def test_on_the_cpu_floats_have_four_bytes_and_a_notice_warns():
    room = room_here(CPU)
    assert room.float_bytes == 4
    assert "no GPU" in room.limit.notices[-1]


def test_unknown_memory_asks_for_the_memory_option():
    with pytest.raises(UserError, match="give --memory"):
        room_here(dataclasses.replace(CPU, ram_bytes=None))


# What is recommended


@pytest.mark.parametrize("name", list(RECORDED)[:: 1 if os.environ.get("YOUR_AI_SLOW") else 3])
def test_the_planner_gives_the_same_plan_for_each_recommended_command(name):
    room = room_here(RECORDED[name])
    found = recommended(room)
    assert found
    for each in found:
        config, facts = asked(each), facts_for(each, room)
        assert config.model == each.known.alias
        assert layers_named(facts, config.lora_targets)
        data = DataSizes(lengths=(config.max_seq_length,))
        process = ProcessFacts(python_bytes=PYTHON_BYTES, sliced=room.sliced)
        workload = workload_of(config, facts, data, process)
        if each.known.model_type in WHOLE:
            workload = dataclasses.replace(workload, engine="fused")
        workload, choice = first_that_fits(
            with_adapters(workload, defaults.adapters(config, facts.blocks)), room.limit.limit_bytes
        )
        option = choice.option
        assert words(option.plan, each.seq_len) == each.plan
        assert option.needed_bytes == each.needed_bytes <= room.limit.limit_bytes
        assert each.peak_bytes == option.estimate.process_bytes <= each.needed_bytes
        assert each.seq_len == config.max_seq_length <= each.known.context
        assert (workload.training.blocks, workload.training.rank) == (each.layers, each.rank)
        assert each.batch == defaults.sized(config, 0).batch_size


@pytest.mark.parametrize("name", RECORDED)
def test_the_largest_model_with_weights_in_memory_comes_first_and_the_smallest_without_a_gpu(name):
    found = recommended(room_here(RECORDED[name]))
    assert found[0].tier == "full"
    assert (found[0].seq_len, found[0].targets) == (2048, ("all-linear",))
    sign = 1 if name == "CPU" else -1  # which starts with the smallest
    sizes = [float(f"{each.known.parameters:.3g}") for each in found]
    ranks = [(RANKS[each.tier], sign * size) for each, size in zip(found, sizes, strict=True)]
    assert ranks == sorted(ranks)
    for each in found:
        from_disk = "streamed" in each.plan or "disk" in each.plan
        is_whole = each.known.model_type in WHOLE
        assert from_disk == (each.tier in ("slow", "light") and not is_whole)


@pytest.mark.parametrize(
    ("gb", "first", "llama"),
    [
        (8, "qwen3-8b", "full"),
        (16, "qwen3-14b", "full"),
        (24, "gemma4-26b-a4b", "full"),
        (36, "qwen3.6-35b-a3b", "full"),
        (64, "llama-70b", "full"),
        (128, "gpt-oss-120b", "full"),
        (512, "gpt-oss-120b", "full"),
    ],
)
def test_recommendations_for_macs_by_size(gb, first, llama):
    found = recommended(room_of(gb))
    assert found[0].known.alias == first
    assert "llama-8b" in names(found, llama)


def test_an_8_gb_mac_streams_models_that_are_too_large():
    slow = [each for each in recommended(room_of(8)) if each.tier == "slow"]
    assert {"phi4", "gemma2-9b", "qwen3-14b"} <= {each.known.alias for each in slow}
    assert all("streamed" in each.plan or "on disk" in each.plan for each in slow)


def test_every_known_model_fits_into_128_gb():
    found = tiers(recommended(room_of(128)))
    assert found == dict.fromkeys(known(), RANKS["full"])


def test_nothing_is_recommended_if_no_model_fits():
    room = room_of(0.3)
    assert recommend(room) == []
    assert "no known model fits" in shown(recommending.recommendations_table(room, []))
    assert "no known model fits" in shown(recommending.recommendation_text(room, []))
    assert recommending.recommendations_json(room, [])["recommendations"] == []


@given(
    st.floats(0.3, 150),
    st.floats(0.3, 150),
    st.sampled_from([2, 4]),
    st.lists(st.sampled_from(sorted(known())), min_size=1, max_size=5, unique=True),
)
def test_more_memory_never_gives_worse_recommendations(a, b, float_bytes, aliases):
    models = [known()[alias] for alias in aliases]
    less, more = (
        recommend(MachineRoom(MemoryLimit(int(gb * 1e9), "asked"), float_bytes), models)
        for gb in sorted((a, b))
    )
    worst, best = tiers(less), tiers(more)
    assert worst.keys() <= best.keys()
    assert all(best[model] <= rank for model, rank in worst.items())
    assert set(names(less, "long")) <= set(names(more, "long"))
    if less:
        assert RANKS[more[0].tier] <= RANKS[less[0].tier]


def test_the_ranking_does_not_depend_on_the_order_of_the_models():
    models = list(known().values())
    random.Random(0).shuffle(models)
    assert recommend(room_of(16), models) == recommended(room_of(16))


def test_the_tier_of_a_model_improves_with_memory_to_spare():
    """The tiers of Llama 3.1 8B, the worst first."""
    model = [known()["llama-8b"]]
    limits = (0.6, 4.4, 5.2, 9.9)
    found = [recommend(MachineRoom(MemoryLimit(int(gb * 1e9), "")), model) for gb in limits]
    assert [each[0].tier for each in found] == ["light", "slow", "tight", "full"]


def test_a_short_context_is_not_exceeded():
    model = dataclasses.replace(known()["llama-1b"], context=512)
    (only,) = recommend(room_of(16), [model])
    assert only.seq_len == 512


@pytest.mark.parametrize("alias", list(known()))
def test_facts_of_a_known_model_agree_with_the_registry(alias):
    model = known()[alias]
    facts = facts_of_known(model, 2)
    assert facts.weights_bytes == model.bytes_on_disk
    text = {**model.config, **model.config.get("text_config", {})}
    assert (facts.blocks, facts.vocabulary) == (text["num_hidden_layers"], text["vocab_size"])


def test_recommending_imports_no_mlx_and_weighs_few_plans():
    done = subprocess.run(
        [sys.executable, "-c", LIGHT_LOADED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# Showing it


@pytest.mark.parametrize("gb", MACS)
def test_each_recommendation_is_shown_with_its_command(gb):
    room = room_of(gb)
    found = recommended(room)
    text = shown(recommending.recommendations_table(room, found))
    whole = " ".join(text.replace("\\\n", "").split())
    for each in found:
        assert f"{each.known.alias} {each.seq_len} {each.rank} {each.layers}" in whole
        assert each.command in whole
    assert max(map(len, text.splitlines())) <= 80
    for tier, title in TIERS.items():
        assert (title in text) == bool(names(found, tier))
    assert text.startswith(TIERS[found[0].tier])  # README: which models, and not what the limit is
    assert text.splitlines()[1].split()[:2] == ["model", "tokens"]


@pytest.mark.parametrize("gb", MACS)
def test_the_answer_is_one_model_with_one_command(gb):
    room = room_of(gb)
    found = recommended(room)
    text = shown(recommending.recommendation_text(room, found))
    assert text.startswith(f"{found[0].known.alias}, ")
    assert "\n\nlimit " in text[text.index("other models") :]
    assert text.count("your_ai train") == 1
    assert found[0].command in " ".join(text.replace("\\\n", "").split())
    assert f", least limit {size_text(found[0].needed_bytes)}; " in " ".join(text.split())
    assert f"{len({each.known.alias for each in found}) - 1} other models" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_answer_has_the_measured_seconds_if_there_are_any():
    room = room_of(16)
    found = recommended(room)
    assert "newest run" not in shown(recommending.recommendation_text(room, found))
    assert "about 12.3 s per step" in shown(recommending.recommendation_text(room, found, 12.345))
    assert "no other known model fits" in shown(recommending.recommendation_text(room, found[:1]))


def test_pairs_need_room_for_both_answers():
    (model,) = [each for each in known().values() if each.alias == "qwen2.5-0.5b"]
    answers, labels, pairs = (
        recommend(room_of(64), [model], objective)[0] for objective in ("sft", "kto", "dpo")
    )
    assert answers.needed_bytes == labels.needed_bytes < pairs.needed_bytes
    assert pairs.batch == answers.batch
    assert "--objective dpo" in pairs.command


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_long_command_can_still_be_copied(width):
    command = recommended(room_of(8))[-1].command
    lines = recommending.continued(command, width).split("\n")
    assert all(line.endswith("\\") for line in lines[:-1])
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines)) == shlex.split(command)


def test_json_contains_every_value():
    room = room_of(16)
    found = recommended(room)
    parsed = json.loads(json.dumps(recommending.recommendations_json(room, found)))
    assert parsed["limit_bytes"] == room.limit.limit_bytes
    assert len(parsed["recommendations"]) == len(found)
    first = parsed["recommendations"][0]
    assert first["alias"] == found[0].known.alias
    assert first["repo"] == found[0].known.repo
    assert first["needed_bytes"] == found[0].needed_bytes
    assert first["command"] == found[0].command
