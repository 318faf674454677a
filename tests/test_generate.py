from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm import generate as mlx_lm_generate
from mlx_lm import load as mlx_lm_load

from tests.conftest import train
from your_ai import generate
from your_ai.memory.estimate import generation_bytes
from your_ai.memory.facts import facts_of
from your_ai.model import load_base
from your_ai.trained import open_trained


@pytest.fixture
def run(configure):
    return train(configure(max_steps=3, learning_rate=0.05, save_every=1))


def test_the_answer_is_mlx_lms_own(run, tiny_model):
    network, tokenizer = generate.load_run(open_trained("r"))
    prompt = generate.chat_prompt(tokenizer, "Question 3")
    ours = "".join(generate.stream(network, tokenizer, prompt, max_tokens=12))
    theirs, their_tokenizer = mlx_lm_load(str(tiny_model), adapter_path=str(run.adapter))
    assert ours == mlx_lm_generate(theirs, their_tokenizer, prompt, max_tokens=12)


def test_the_base_answers_without_the_adapter(run, tiny_model):
    network, tokenizer = generate.load_run(open_trained("r"), adapted=False)
    base, _ = mlx_lm_load(str(tiny_model))
    tokens = mx.array([generate.chat_prompt(tokenizer, "Question 3")])
    adapted, _ = generate.load_run(open_trained("r"))
    assert mx.allclose(network(tokens), base(tokens), rtol=1e-5, atol=1e-5)
    assert not mx.allclose(network(tokens), adapted(tokens), rtol=1e-3, atol=1e-3)


def test_sampling_depends_on_the_seed(run):
    network, tokenizer = generate.load_run(open_trained("r"), adapted=False)

    def sample(seed: int) -> str:
        return "".join(generate.stream(network, tokenizer, [3, 5], 20, temperature=1.5, seed=seed))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_long_prompt_takes_no_more_than_estimated(tiny_model):
    network, tokenizer = load_base(tiny_model, mx.float32)
    mx.eval(network.parameters())
    prompt = [5] * 1500
    list(generate.stream(network, tokenizer, prompt[:300], 2))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    list(generate.stream(network, tokenizer, prompt, 4))
    taken = mx.get_peak_memory() - before
    scores_of_all_at_once = 4 * 1500**2 * 4
    assert taken < generation_bytes(facts_of(tiny_model, 4), 1504) < scores_of_all_at_once
