"""Conversations: what was sampled turn by turn with caches is what one pass over it says."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import make_model
from tests.generation.test_rollouts import prompts_of
from tests.nets.mixers import models
from your_ai.engine.weights import open_model
from your_ai.generation.rollouts import Completion, Reply, RolloutPrompt, complete, sampler_of
from your_ai.rng import derive_seed

# Attention, windows, a recurrent mixer beside attention, one alone, experts, grouped masks.
ARCHITECTURES = ("llama", "gemma3_text", "qwen3_moe", "gemma2", "qwen3_next", "mamba2", "falcon_h1")
TURNS, MOST = 3, 6
VOCABULARY = models.VOCABULARY  # the smallest of all
PROMPTS = prompts_of([5, 1, 33, 12], vocabulary=VOCABULARY)


class Partner:
    """Answers with random tokens, of each row the same in every run, from threads of its own."""

    def __init__(self, turns: int = TURNS, parts: bool = False, slow: float = 0.0) -> None:
        self.turns, self.parts, self.slow = turns, parts, slow
        self.count: dict[tuple[int, int], int] = {}
        self.heard: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self.idle_s = 0.0
        self.pool = ThreadPoolExecutor(8)
        self.slept = threading.Event()

    def ask(
        self, place: tuple[int, int], turn: tuple[int, ...], stopped: bool
    ) -> Future[Reply | None]:
        self.heard.setdefault(place, []).append(turn)
        number = self.count[place] = self.count.get(place, 0) + 1
        return self.pool.submit(self.made, place, number)

    def reply(self, place: tuple[int, int], found: Future[Reply | None]) -> Reply | None:
        return found.result()

    def made(self, place: tuple[int, int], number: int) -> Reply | None:
        if number >= self.turns:
            return None
        rng = random.Random(derive_seed(7, "reply", *place, number))
        self.slept.wait(self.slow * (place == (0, 0)))
        length = rng.choice([1, 2, 5, 11, 40])
        tokens = tuple(rng.randrange(3, VOCABULARY) for _ in range(length))
        return Reply(tokens, rng.choice([1, 3, MOST]), self.parts and number == 2)

    def waited(self, seconds: float) -> None:
        self.idle_s += seconds


@pytest.fixture(scope="module")
def network_of(tmp_path_factory) -> Any:
    made = {}

    def make(architecture: str = "llama") -> Any:
        if architecture in made:
            return made[architecture]
        if architecture in models.MODELS:
            network = models.make(architecture)
        else:
            place = tmp_path_factory.mktemp("models") / architecture
            folder = make_model(place, architecture, None, factor=1.5)
            network = open_model(folder, mx.float32).network
        network.eval()
        made[architecture] = network
        return made[architecture]

    return make


def conversations(
    network: Any, partner: Partner, rows_at_once: int = 100, asked: Any = PROMPTS, **more: Any
) -> dict[tuple[int, int, int], Completion]:
    """The parts of all rows, in the order in which the rows end."""
    sampler = sampler_of(1.0)
    found = complete(network, asked, sampler, (), MOST, rows_at_once, answering=partner, **more)
    return {
        (each.prompt, each.sample, number): part
        for each in found
        for number, part in enumerate((each, *each.more))
    }


def sampled(each: Completion) -> list[int]:
    return [token for start, end in each.spoken for token in each.tokens[start:end]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_was_sampled_with_caches_is_what_one_pass_says(network_of, architecture, monkeypatch):
    """The log-probability of each sampled token, when it was sampled, and over the whole text."""
    network = network_of(architecture)
    when_sampled: dict[tuple[int, int], float] = {}
    genuine = sampler_of(1.0)

    def noting(logits: mx.array, keys: mx.array) -> mx.array:
        """What is sampled ahead of a reply is sampled again after it."""
        found = genuine(logits, keys)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        scores = mx.take_along_axis(scores, found[:, None], axis=-1)[:, 0]
        for high, low, score in np.column_stack([np.array(keys, float), np.array(scores)]).tolist():
            when_sampled[int(high), int(low)] = score
        return found

    partner = Partner()
    found = list(complete(network, PROMPTS, noting, (), MOST, 5, answering=partner))
    assert len(found) == 8
    for each in found:
        assert len(each.spoken) == TURNS
        assert sampled(each) == [
            t for turn in partner.heard[each.prompt, each.sample] for t in turn
        ]
        asked = PROMPTS[each.prompt]
        whole = np.concatenate([asked.tokens, each.tokens]).astype(np.int32)
        logits = network(mx.array(whole[None]))[0]
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        before = len(asked.tokens) - 1
        places = [p for start, end in each.spoken for p in range(start, end)]
        wanted = [scores[before + p, each.tokens[p]].item() for p in places]
        seed = asked.seeds[each.sample]
        at = [when_sampled[(seed >> 32) ^ n, seed & 0xFFFFFFFF] for n in range(len(wanted))]
        assert at == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_depend_neither_on_the_wave_nor_on_when_answers_come(network_of, architecture):
    network = network_of(architecture)
    alone = conversations(network, Partner(), 1)
    for rows, partner in ((3, Partner()), (100, Partner()), (100, Partner(slow=0.3))):
        found = conversations(network, partner, rows)
        assert {k: each.tokens for k, each in found.items()} == {
            k: each.tokens for k, each in alone.items()
        }


def test_a_new_part_has_a_prompt_of_its_own_and_shares_no_tokens(network_of):
    network, partner = network_of(), Partner(turns=4, parts=True)
    found = conversations(network, partner)
    assert {key[2] for key in found} == {0, 1}
    for (prompt, sample, part), each in found.items():
        turns = partner.heard[prompt, sample]
        assert sampled(each) == [t for turn in (turns[2:] if part else turns[:2]) for t in turn]
        assert bool(each.own_prompt) == bool(part)
        if part:
            low = conversations(network, Partner(turns=1), asked=[
                RolloutPrompt(np.array(each.own_prompt), (PROMPTS[prompt].seeds[sample],))
            ])  # fmt: skip
            assert len(low) == 1


def test_a_row_that_waits_does_not_hold_the_others(network_of):
    """It is answered once all others have asked for the last time."""
    partner = Partner(slow=60.0)

    def step(rows: int) -> None:
        asked = [count for place, count in partner.count.items() if place != (0, 0)]
        if asked.count(TURNS) == 7:
            partner.slept.set()

    *_, last = conversations(network_of(), partner, step=step)
    assert last == (0, 0, 0)
    assert 0 < partner.idle_s < 30


def test_an_answer_that_fails_ends_the_sampling(network_of):
    partner = Partner()
    partner.made = lambda *_: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        conversations(network_of(), partner)


def test_step_is_called_while_all_rows_wait_and_may_end_it(network_of):
    partner, calls = Partner(slow=5.0), []

    def step(rows: int) -> None:
        calls.append(rows)
        if rows == 0:
            partner.slept.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversations(network_of(), partner, step=step)
    assert calls[-1] == 0
