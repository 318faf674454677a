from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import generate

from tests.conftest import DEMO_FOLDER, chat, chat_prompt, load_base, write_rows
from tests.evaluation.conftest import carry_out
from your_ai.data.encode import Encoder
from your_ai.data.examples import load_examples
from your_ai.data.rows import read_rows
from your_ai.engine.fused import fused_engine
from your_ai.evaluation import dataset_scores as measures
from your_ai.nets import model
from your_ai.nets.split import split as split_in_two
from your_ai.objectives.sft import SUPERVISED
from your_ai.run.stopping import Stop


@pytest.fixture(scope="module")
def demo():
    network, tokenizer = load_base(DEMO_FOLDER, mx.float32)
    engine = fused_engine(network, split_in_two(network), model.DropoutKeys([None]), SUPERVISED)
    return network, tokenizer, engine


def encode(tokenizer, path):
    return load_examples(path, Encoder(tokenizer), "t", 256, "error", path.parent / "cache")


def greedy(network, tokenizer, question):
    return generate(network, tokenizer, chat_prompt(tokenizer, question), max_tokens=40)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_exact_match_agrees_with_greedy_generation(own_folder, demo, batch_size):
    network, tokenizer, engine = demo
    questions = ["Please send two red cups to Oslo.", "Write nine in digits.", "Which city?"]
    rows = []
    for question in questions:
        text = greedy(network, tokenizer, question)
        rows += [chat(question, text), chat(question, text + "."), chat(question, "x" + text)]
    examples = encode(tokenizer, write_rows(own_folder / "t.jsonl", rows))
    assert measures.exact_matches(engine, examples, lambda _: batch_size, Stop()) == len(questions)


def test_the_mean_loss_does_not_depend_on_the_batch_size(own_folder, demo):
    _, tokenizer, engine = demo
    rows = [chat("Question " * i, "Answer " * (1 + i % 4), weight=1 + i) for i in range(1, 12)]
    examples = encode(tokenizer, write_rows(own_folder / "t.jsonl", rows))
    one = measures.mean_loss(engine, examples, lambda _: 1, Stop())
    five = measures.mean_loss(engine, examples, lambda _: 5, Stop())
    assert five.loss == pytest.approx(one.loss, rel=1e-5)
    assert five.trained_tokens == one.trained_tokens == examples.tally.trained_tokens


def test_a_stop_signal_ends_an_evaluation(own_folder, demo):
    _, tokenizer, engine = demo
    examples = encode(tokenizer, write_rows(own_folder / "t.jsonl", [chat("a", "b")]))
    stop = Stop()
    stop.received = 2
    assert measures.mean_loss(engine, examples, lambda _: 1, stop) is None
    assert measures.exact_matches(engine, examples, lambda _: 1, stop) is None


def test_the_demo_model_cannot_do_its_task_before_training(own_folder, demo):
    _, tokenizer, engine = demo
    rows = (DEMO_FOLDER / "data" / "test.jsonl").read_text().splitlines()[:24]
    examples = encode(tokenizer, write_rows(own_folder / "t.jsonl", rows))
    assert measures.exact_matches(engine, examples, lambda _: 16, Stop()) < 0.1 * len(examples)


def test_the_demo_splits_share_no_answers():
    answers = {
        split: {
            row.content.messages[-1]["content"]
            for row in read_rows(DEMO_FOLDER / "data" / f"{split}.jsonl")
        }
        for split in ("train", "valid", "test")
    }
    assert not answers["train"] & answers["valid"]
    assert not answers["train"] & answers["test"]
    assert not answers["valid"] & answers["test"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_of_each_example_agree_with_its_full_logits(own_folder, demo, batch_size):
    """The reference takes one row at a time and computes all of its logits."""
    network, tokenizer, engine = demo
    rows = [chat("Question " * i, "Answer " * (1 + i % 4), weight=i) for i in range(5)]
    examples = encode(tokenizer, write_rows(own_folder / "t.jsonl", rows))
    found = carry_out(measures.scored(engine, examples, lambda _: batch_size))
    for example, loss in zip(examples, found.losses, strict=True):
        logits = network(mx.array(example.tokens[None, :-1]))[0]
        losses = nn.losses.cross_entropy(logits, mx.array(example.tokens[1:]))
        assert loss == pytest.approx(np.array(losses)[example.trained[1:]].sum(), rel=1e-5)


def test_only_the_greedy_answer_is_marked_exact(own_folder, demo):
    network, tokenizer, engine = demo
    text = greedy(network, tokenizer, "Which city?")
    rows = [chat("Which city?", answer) for answer in (text + ".", text, "x" + text)]
    examples = encode(tokenizer, write_rows(own_folder / "t.jsonl", rows))
    found = carry_out(measures.scored(engine, examples, lambda _: 2))
    assert found.exact.tolist() == [False, True, False]


def test_no_more_than_one_shape_stays_compiled(own_folder, demo):
    """MLX keeps compiled functions until they are dropped explicitly."""
    _, tokenizer, engine = demo
    rows = [chat("Question " * i, "Answer " * (1 + i % 5)) for i in range(1, 30)]
    examples = encode(tokenizer, write_rows(own_folder / "t.jsonl", rows))
    kept, most = set(), []

    def score(batch):
        kept.add((batch.tokens.shape, batch.targets.shape))
        most.append(len(kept))
        return mx.zeros(len(batch.targets)), mx.zeros(len(batch.targets))

    carry_out(measures.scored(replace(engine, score=score, drop=kept.clear), examples, lambda _: 4))
    assert set(most) == {1}
