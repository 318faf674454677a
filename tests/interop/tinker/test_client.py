"""What the SDK's clients give: losses, log-probabilities, completions, errors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import AdamParams, Datum, ModelInput, SamplingParams, TrainingClient

from tests.interop.tinker.served import LONGEST, NAME, RANK, Served

pytestmark = pytest.mark.interop
IDS = [40, 300, 77, 81, 67, 327, 96, 34, 500, 12, 411, 90, 203, 30, 55, 601]
ADAM = AdamParams(learning_rate=1e-2)
TOLERANCE = 1e-4  # between log-probabilities of generation and of training
ABSENT = "tinker://x:train:0/weights/y"
LONG = 400  # tokens of a completion that is not done at once


@pytest.fixture(scope="module")
def service(demo_server: Served) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=demo_server.url, api_key="tml-local") as client:
        yield client


@pytest.fixture(scope="module")
def model(service: tinker.ServiceClient) -> TrainingClient:
    """One that other tests may train."""
    return new_model(service, 1)


def new_model(service: tinker.ServiceClient, seed: int) -> TrainingClient:
    return service.create_lora_training_client(base_model=NAME, rank=RANK, seed=seed).result()


def text(ids: Sequence[int] = IDS, weight: float = 1.0) -> Datum:
    ids = list(ids)
    inputs = {"target_tokens": ids[1:], "weights": [weight] * (len(ids) - 1)}
    return Datum(model_input=ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def step(model: TrainingClient, data: list[Datum]) -> float:
    """One update; return the loss before it."""
    found = model.forward_backward(data, "cross_entropy")
    model.optim_step(ADAM).result()
    return found.result().metrics["loss:sum"]


def logprobs(model: TrainingClient, ids: Sequence[int] = IDS) -> np.ndarray:
    """(n - 1,) of all tokens but the first."""
    return (
        model.forward([text(ids)], "cross_entropy")
        .result()
        .loss_fn_outputs[0]["logprobs"]
        .to_numpy()
    )


def sample(client: tinker.SamplingClient, **options: Any) -> list[list[int]]:
    """The tokens of completions of the first tokens of `IDS`."""
    count = options.pop("num_samples", 1)
    params = SamplingParams(**{"max_tokens": 12, "seed": 3, **options})
    found = client.sample(ModelInput.from_ints(IDS[:5]), count, params).result()
    return [sequence.tokens for sequence in found.sequences]


def refused(call: Any) -> str:
    """The error of a call that must be refused with one line, at once or when it is its turn."""
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError)) as caught:
        call()
    error = caught.value
    message = error.body["detail"] if isinstance(error, tinker.APIStatusError) else error.message
    assert "\n" not in message
    return message


def test_losses_are_those_of_log_probabilities_and_fall(service: tinker.ServiceClient) -> None:
    model = new_model(service, 2)
    before = logprobs(model)
    found = model.forward_backward([text(weight=0.5)], "cross_entropy").result()
    np.testing.assert_allclose(found.loss_fn_outputs[0]["logprobs"].to_numpy(), before, atol=1e-5)
    assert found.metrics["loss:sum"] == pytest.approx(-0.5 * before.sum(), rel=1e-5)
    model.optim_step(ADAM).result()
    assert logprobs(model).sum() > before.sum() + 1


def test_gradients_add_up_until_the_step(service: tinker.ServiceClient) -> None:
    """Two requests, then an update, as one request with both texts."""
    one, two = new_model(service, 3), new_model(service, 3)
    for _ in range(2):
        one.forward_backward([text()], "cross_entropy")
        one.forward_backward([text(IDS[::-1])], "cross_entropy")
        one.optim_step(ADAM).result()
        step(two, [text(), text(IDS[::-1])])
    np.testing.assert_allclose(logprobs(one), logprobs(two), atol=1e-4)


def test_models_do_not_touch_each_other(service: tinker.ServiceClient) -> None:
    """Taking turns, each gives the losses that it gives by itself."""
    first, second, alone = (new_model(service, seed) for seed in (4, 5, 4))
    losses = []
    for _ in range(3):
        losses.append(step(first, [text()]))
        step(second, [text(IDS[::-1])])
    assert losses == [step(alone, [text()]) for _ in range(3)]


def test_a_custom_loss_trains_as_the_loss_that_it_computes(service: tinker.ServiceClient) -> None:
    def squares(data: list[Datum], found: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
        loss = sum((values**2).sum() for values in found)
        return loss, {"squares": float(loss)}

    custom, plain = new_model(service, 6), new_model(service, 6)
    before = logprobs(custom)
    found = custom.forward_backward_custom([text()], squares).result()
    custom.optim_step(ADAM).result()
    assert found.metrics["squares"] == pytest.approx((before**2).sum(), rel=1e-5)

    weighed = text()  # d(x^2) = 2x dx
    weights = tinker.TensorData.from_numpy((-2 * before).astype(np.float32))
    step(plain, [Datum(weighed.model_input, {**weighed.loss_fn_inputs, "weights": weights})])
    np.testing.assert_allclose(logprobs(custom), logprobs(plain), atol=1e-5)


def test_completions_have_the_log_probabilities_of_training(model: TrainingClient) -> None:
    """Of the prompt, and of what was sampled, whatever the temperature."""
    step(model, [text()])
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = IDS[:5]
    found = sampler.sample(
        ModelInput.from_ints(prompt), 3, SamplingParams(max_tokens=12, temperature=0.7, seed=1),
        include_prompt_logprobs=True,
    ).result()  # fmt: skip
    assert len(found.sequences) == 3
    for sequence in found.sequences:
        whole = logprobs(model, prompt + sequence.tokens)
        given = [*found.prompt_logprobs[1:], *sequence.logprobs]
        np.testing.assert_allclose(given, whole, atol=TOLERANCE)
    assert found.prompt_logprobs[0] is None
    computed = sampler.compute_logprobs(ModelInput.from_ints(IDS)).result()
    np.testing.assert_allclose(computed[1:], logprobs(model), atol=TOLERANCE)


def test_more_log_probabilities_are_those_of_training(model: TrainingClient) -> None:
    """The most likely tokens, given ones (dense and sparse), and draws, at the places of a prompt
    and of what was sampled."""
    step(model, [text()])
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt, count = IDS[:6], len(IDS[:6]) - 1
    targets = np.array([[3, -1], [4, 5], [-1, -1], [6, 7], [8, -1]])
    params = SamplingParams(max_tokens=4, seed=1)

    def sampled(**more: Any) -> Any:
        asked = ModelInput.from_ints(prompt)
        return sampler.sample(asked, 2, params, topk_prompt_logprobs=3, **more).result()

    found = sampled(
        topk_sample_logprobs=2, prompt_alt_tokens_k=4,
        target_prompt_logprobs=tinker.TensorData.from_numpy(targets),
    )  # fmt: skip

    def check(prefix: list[int], ids: Any, values: Any) -> None:
        wanted = [logprobs(model, [*prefix, int(token)])[-1] for token in ids]
        np.testing.assert_allclose(values, wanted, atol=TOLERANCE)

    assert found.topk_prompt_logprobs[0] is None
    alternatives = found.prompt_alt_tokens
    ids = np.array(alternatives.tokens.data).reshape(count, 4)
    scores = np.array(alternatives.logprobs.data).reshape(count, 4)
    own = np.array(found.target_prompt_logprobs.data).reshape(count, 2)
    for place in range(count):
        before = prompt[: place + 1]
        check(before, *zip(*found.topk_prompt_logprobs[place + 1], strict=True))
        check(before, ids[place], scores[place])
        asked = targets[place] >= 0
        check(before, targets[place][asked], own[place][asked])
        assert not own[place][~asked].any()
    for sequence in found.sequences:
        for place, best in enumerate(sequence.topk_logprobs):
            assert len(best) == 2
            check(prompt + sequence.tokens[:place], *zip(*best, strict=True))
    sparse = tinker.TensorData(
        data=[4, 8], dtype="int64", shape=[count, 9], sparse_crow_indices=[0, 0, 1, 1, 1, 2],
        sparse_col_indices=[0, 7],
    )  # fmt: skip
    again = sampled(target_prompt_logprobs=sparse, prompt_logprobs_last_n=2,
                    include_prompt_logprobs=True)  # fmt: skip
    assert again.target_prompt_logprobs.sparse_col_indices == [0, 7]
    np.testing.assert_allclose(again.target_prompt_logprobs.data, own[[1, 4], [0, 0]], atol=1e-4)
    assert [best is None for best in again.topk_prompt_logprobs] == [True] * 4 + [False] * 2


def test_the_base_gives_what_an_untrained_model_gives(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    computed = sampler.compute_logprobs(ModelInput.from_ints(IDS)).result()
    np.testing.assert_allclose(computed[1:], logprobs(new_model(service, 7)), atol=TOLERANCE)


def test_equal_seeds_give_equal_tokens(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    three = sample(sampler, num_samples=3)
    assert sample(sampler, num_samples=3) == three
    assert sample(sampler, num_samples=1) == three[:1]
    assert sample(sampler, num_samples=3, seed=4) != three
    assert len(set(map(tuple, three))) == 3


def test_top_k_and_top_p_leave_out_what_is_unlikely(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    [greedy] = sample(sampler, temperature=0.0)
    assert sample(sampler, top_k=1, num_samples=2) == [greedy, greedy]
    assert sample(sampler, top_p=1e-6, num_samples=2) == [greedy, greedy]
    assert sample(sampler, temperature=3.0) != [greedy]


def test_completions_stop_at_tokens_and_texts(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    [free] = sample(sampler, max_tokens=24, stop=[])  # no token ends it
    assert len(free) == 24
    at = free.index(free[6])
    assert sample(sampler, max_tokens=24, stop=[free[6]]) == [free[: at + 1]]
    tokenizer = sampler.get_tokenizer()
    wanted = tokenizer.decode(free[4:7])
    [stopped] = sample(sampler, max_tokens=24, stop=wanted)
    assert wanted in tokenizer.decode(stopped)
    assert wanted not in tokenizer.decode(stopped[:-1])
    assert stopped == free[: len(stopped)]


def test_why_completions_end_is_said(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt, [first] = ModelInput.from_ints(IDS[:5]), sample(sampler, max_tokens=1)
    params = SamplingParams(max_tokens=2, seed=3, stop=first)
    assert sampler.sample(prompt, 1, params).result().sequences[0].stop_reason == "stop"
    params = SamplingParams(max_tokens=2, seed=3, stop=[])
    assert sampler.sample(prompt, 1, params).result().sequences[0].stop_reason == "length"


def test_a_cancelled_request_is_not_computed(
    service: tinker.ServiceClient, demo_server: Served
) -> None:
    """One that waits behind another, and is the only one of its kind."""
    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt = ModelInput.from_ints(IDS[:5])
    first = sampler.sample(prompt, 8, SamplingParams(max_tokens=LONG, stop=[])).future()
    time.sleep(0.5)  # it runs
    began = time.monotonic()
    long = SamplingParams(max_tokens=LONG, stop=[], temperature=0.9)
    waiting = sampler.sample(prompt, 64, long).future()
    time.sleep(0.5)
    assert not first.done()
    assert waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result()
    first.result()
    until = time.monotonic() - began
    sample(sampler)
    assert time.monotonic() - began < 2 * until + 1  # not eight times as long


def test_the_tokenizer_is_that_of_the_base(model: TrainingClient) -> None:
    tokenizer = model.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("It is 1.")) == "It is 1."


def test_facts_of_a_model_and_the_server(
    service: tinker.ServiceClient, model: TrainingClient
) -> None:
    info = model.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (NAME, RANK, True)
    [served] = service.get_server_capabilities().supported_models
    assert (served.model_name, served.max_context_length) == (NAME, LONGEST)


def sampled_too_long(service: tinker.ServiceClient, model: TrainingClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    sampler.sample(ModelInput.from_ints(IDS), 1, SamplingParams(max_tokens=2 * LONGEST)).result()


WRONG = {
    "token": (
        lambda _, model: model.forward([text([1, 2, 5000])], "cross_entropy").result(),
        "5000",
    ),
    "too long": (
        lambda _, model: model.forward([text([5] * (LONGEST + 2))], "cross_entropy").result(),
        "--max-seq-length",
    ),
    "unknown loss": (
        lambda _, model: model.forward_backward([text()], "stable_reinforce").result(),
        "loss_fn stable_reinforce",
    ),
    "no gradients": (lambda _, model: model.optim_step(ADAM).result(), "forward_backward"),
    "too long completion": (sampled_too_long, "--max-seq-length"),
    "rank": (
        lambda service, _: service.create_lora_training_client(NAME, rank=400).result(),
        "--rank 400",
    ),
    "base": (lambda service, _: service.create_lora_training_client("other").result(), NAME),
    "path": (
        lambda _, model: model.load_state("tinker://x:train:0/weights/y").result(),
        "no saved",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_done_is_refused_in_one_line(
    service: tinker.ServiceClient, case: str
) -> None:
    """And the model can be used afterwards."""
    call, part = WRONG[case]
    model = new_model(service, 8)
    assert part in refused(lambda: call(service, model))
    assert step(model, [text()]) > 0
