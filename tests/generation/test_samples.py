"""Several answers to many prompts: each a function of its prompt, its seed and its index."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.conftest import chat_prompt
from tests.generation.test_generate import train_in
from your_ai.errors import RunError, UserError
from your_ai.generation import generate, samples
from your_ai.generation.generate import Prompt, Sampling
from your_ai.generation.samples import SampledAnswer, check_num_samples, sampled, sizes_of
from your_ai.nets.saved_adapter import open_trained

SAMPLING = Sampling(max_tokens=12, temperature=1.0, top_p=0.9, seed=7)
TEXTS = ("Question 1", "Which question is this, and which one is next?", "Q")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tiny_model):
    """(network, tokenizer) of a trained run."""
    run = train_in(tmp_path_factory.mktemp("runs"), tiny_model)
    return generate.load_run(open_trained(str(run.path)))


@pytest.fixture(scope="module")
def asked(loaded) -> list[list[int]]:
    return [chat_prompt(loaded[1], text) for text in TEXTS]


def answers(
    loaded, asked, count: int = 1, rows: int = 1, sampling: Sampling = SAMPLING
) -> list[SampledAnswer]:
    return list(sampled(*loaded, [(tokens, sampling) for tokens in asked], count, rows))


def test_samples_depend_neither_on_their_number_nor_on_the_wave(loaded, asked):
    alone = [one for tokens in asked for one in answers(loaded, [tokens], 4)]
    assert len({one.text for one in alone}) == len(alone)
    for count, rows in ((1, 5), (2, 1), (2, 64), (4, 5), (4, 64)):
        expected = [one.text for one in alone if one.sample < count]
        assert [one.text for one in answers(loaded, asked, count, rows)] == expected


def test_samples_come_in_their_order(loaded, asked):
    """Although some end before those in front of them."""
    sampling = replace(SAMPLING, max_tokens=60, temperature=1.5)
    found = answers(loaded, asked, 3, 64, sampling)
    assert [(one.prompt, one.sample) for one in found] == [
        (p, s) for p in range(3) for s in range(3)
    ]


def test_the_first_sample_is_the_answer_that_is_streamed(loaded, asked):
    for sampling in (SAMPLING, replace(SAMPLING, temperature=0.0)):
        for tokens, found in zip(asked, answers(loaded, asked, 1, 64, sampling), strict=True):
            streamed = list(generate.respond(*loaded, tokens, sampling))
            assert found.text == "".join(response.text for response in streamed)
            assert found.tokens == len(streamed)
            assert found.finish_reason == streamed[-1].finish_reason


def test_other_seeds_give_other_samples(loaded, asked):
    first, second = (
        {one.text for one in answers(loaded, asked, 3, 9, replace(SAMPLING, seed=seed))}
        for seed in (0, 1)
    )
    assert not first & second


def test_each_prompt_has_its_own_limit_of_tokens(loaded, asked):
    own = [replace(SAMPLING, max_tokens=most) for most in (3, 9, 1)]
    whole = answers(loaded, asked, 2)
    for rows in (1, 6):
        found = list(sampled(*loaded, list(zip(asked, own, strict=True)), 2, rows))
        for cut, one in zip(found, whole, strict=True):
            most = own[cut.prompt].max_tokens
            assert cut.tokens == min(most, one.tokens)
            assert one.text.startswith(cut.text.rstrip("�"))
            assert (cut.finish_reason == "length") == (one.tokens >= most)


def test_no_prompts_have_no_answers(loaded):
    assert answers(loaded, []) == []


def test_tokens_outside_the_vocabulary_are_refused(loaded):
    with pytest.raises(UserError, match="the prompt"):
        answers(loaded, [[3, 10**6]])


def test_running_out_of_memory_says_what_helps(loaded, asked, monkeypatch):
    full = RuntimeError("[metal::malloc] Unable to allocate 9 bytes.")
    monkeypatch.setattr(samples, "complete", Mock(side_effect=full))
    with pytest.raises(RunError, match=r"out of memory .* smaller --max-tokens"):
        answers(loaded, asked)


@pytest.mark.parametrize(
    ("number", "temperature", "message"),
    [
        (0, 1.0, "--num-samples 0: must be at least 1"),
        (-3, 0.0, "--num-samples -3: must be at least 1"),
        (2, 0.0, "--num-samples 2: at temperature 0 all samples are the same"),
    ],
)
def test_a_number_of_samples_that_makes_no_sense_is_refused(number, temperature, message):
    with pytest.raises(UserError, match=message):
        check_num_samples(number, Sampling(temperature=temperature))
    check_num_samples(1, Sampling())


def test_sizes_count_the_longest_prompt_and_a_limited_number_of_rows():
    prompts = [Prompt("", [{"role": "user", "content": text}]) for text in ("ab", "abcdef")]
    sizes = sizes_of(prompts, 99, 5)
    assert (sizes.new_tokens, sizes.group, sizes.rows) == (99, 5, 10)
    assert sizes.prompt_tokens == prompts[1].most_tokens
    assert sizes_of(prompts, 99, 10**6).rows == samples.MOST_TOGETHER
