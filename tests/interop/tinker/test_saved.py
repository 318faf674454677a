"""Saved models: loaded, listed, copied, deleted, and gone on from when the server was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pyrage
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import ModelInput, SamplingParams
from tinker_cookbook import weights

from tests.conftest import DEMO_FOLDER
from tests.interop.bases import load, make_base
from tests.interop.tinker.served import Served, serving
from tests.interop.tinker.test_client import IDS, logprobs, new_model, step, text
from your_ai.run.checkpoint import ADAPTERS

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def service(demo_server: Served) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=demo_server.url, api_key="tml-local") as client:
        yield client


def place_of(server: Served, path: str) -> Path:
    """The folder of a saved model."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    return server.folder / "runs" / model.replace(":", "-") / kind / name


def bytes_of(server: Served, path: str) -> bytes:
    """The adapters of a saved model."""
    return (place_of(server, path) / ADAPTERS).read_bytes()


def losses(model: tinker.TrainingClient, count: int) -> list[float]:
    return [step(model, [text(), text(IDS[::-1])]) for _ in range(count)]


def test_a_state_with_its_optimizer_goes_on_as_if_never_left(
    service: tinker.ServiceClient, demo_server: Served
) -> None:
    model = new_model(service, 1)
    losses(model, 3)
    path = model.save_state("middle").result().path
    other = service.create_training_client_from_state_with_optimizer(path).result()
    np.testing.assert_array_equal(logprobs(other), logprobs(model))
    again = other.save_state("again").result().path
    assert bytes_of(demo_server, again) == bytes_of(demo_server, path)
    assert losses(other, 3) == losses(model, 3)
    ends = [each.save_state("end").result().path for each in (model, other)]
    assert bytes_of(demo_server, ends[0]) == bytes_of(demo_server, ends[1])


def test_a_state_without_its_optimizer_has_the_same_weights_only(
    service: tinker.ServiceClient,
) -> None:
    model = new_model(service, 2)
    losses(model, 3)
    path = model.save_state("middle").result().path
    other = service.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(logprobs(other), logprobs(model))
    first, second = losses(model, 2), losses(other, 2)
    assert first[0] == second[0]  # before the update, in which Adam begins anew
    assert first[1] != second[1]


def test_a_saved_model_gives_the_completions_of_its_time(service: tinker.ServiceClient) -> None:
    """Also after the model was trained on."""
    model = new_model(service, 3)
    losses(model, 2)
    sampler = service.create_sampling_client(
        model.save_weights_for_sampler("now").result().path
    ).result()
    prompt, greedy = ModelInput.from_ints(IDS[:5]), SamplingParams(max_tokens=8, temperature=0)
    before = sampler.sample(prompt, 1, greedy).result().sequences[0]
    losses(model, 3)
    after = sampler.sample(prompt, 1, greedy).result().sequences[0]
    assert (before.tokens, before.logprobs) == (after.tokens, after.logprobs)


def test_saved_models_are_listed_copied_and_deleted(
    service: tinker.ServiceClient, demo_server: Served
) -> None:
    rest, model = service.create_rest_client(), new_model(service, 4)
    losses(model, 1)
    state = model.save_state("one").result().path
    sampler = model.save_weights_for_sampler("two").result().path
    run = state.removeprefix("tinker://").partition("/")[0]

    def listed() -> dict[str, str]:
        found = rest.list_checkpoints(run).result().checkpoints
        return {each.tinker_path: each.checkpoint_type for each in found}

    assert listed() == {state: "training", sampler: "sampler"}
    assert rest.get_training_run(run).result().lora_rank == 8
    copied = rest.copy_weights(state, "any").result()
    assert copied != state
    assert bytes_of(demo_server, copied) == bytes_of(demo_server, state)
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert listed() == {sampler: "sampler"}
    everything = rest.list_user_checkpoints(limit=100).result().checkpoints
    paths = {each.tinker_path for each in everything}
    assert copied in paths
    assert state not in paths


def test_a_killed_server_goes_on_from_the_last_saved_state(tmp_path: Path) -> None:
    """A client that loads it again gets the losses, and the bytes, of one that was not killed."""
    with serving(DEMO_FOLDER, tmp_path / "server") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        model = new_model(service, 5)
        losses(model, 2)
        path = model.save_state("last").result().path
        wanted = losses(model, 3)
        end = model.save_state("end").result().path
        model.forward_backward([text()], "cross_entropy")  # while it is killed
        server.process.kill()
    with serving(DEMO_FOLDER, tmp_path / "server") as server:
        with tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service:
            model = service.create_training_client_from_state_with_optimizer(path).result()
            assert losses(model, 3) == wanted
            again = model.save_state("end").result().path
        assert bytes_of(server, again) == bytes_of(server, end)


def test_a_sampler_cannot_be_trained_on_with_an_optimizer(service: tinker.ServiceClient) -> None:
    model = new_model(service, 6)
    losses(model, 1)
    path = model.save_weights_for_sampler("weights").result().path
    with pytest.raises(tinker.RequestFailedError, match="without an optimizer"):
        service.create_training_client_from_state_with_optimizer(path).result()
    assert step(model, [text()]) > 0


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
def test_external_weights_are_downloaded_as_adapters_of_peft_and_mlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """Both programs compute what the server does; a head that is not tied is adapted, too."""
    base = make_base(tmp_path / "base", "llama" if tied else "qwen2")
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with (
        serving(base, tmp_path / "server") as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service,
    ):
        model = new_model(service, 8)
        losses(model, 3)
        path = model.save_weights_external("end").result().path
        wanted = logprobs(model)
        out = tmp_path / "out"
        weights.download(tinker_path=path, output_dir=str(out), base_url=server.url)
    network = PeftModel.from_pretrained(load(base), out).eval()
    with torch.no_grad():
        logits = network(torch.tensor([IDS[:-1]])).logits[0]
    scores = torch.log_softmax(logits, -1)[torch.arange(len(IDS) - 1), IDS[1:]]
    np.testing.assert_allclose(scores.numpy(), wanted, atol=1e-4)
    assert {path.name for path in (out / "mlx").iterdir()} >= {ADAPTERS, "adapter_config.json"}
    names = {name for file in (out / "mlx").glob("*.safetensors") for name in mx.load(str(file))}
    assert any("lm_head" in name for name in names) is not tied
    assert not list((server.folder / "runs").rglob("*.peft"))


def by_mlx_lm(base: Path, adapter: Path) -> np.ndarray:
    """(n - 1,) log-probabilities of all of `IDS` but the first."""
    model, _ = mlx_lm.load(str(base), adapter_path=str(adapter))
    logits = model(mx.array([IDS])).astype(mx.float32)[0, :-1]
    found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(found, mx.array(IDS)[1:, None], axis=1))[:, 0]


def test_a_router_is_downloaded_for_mlx_lm_alone(tmp_path: Path) -> None:
    """In transformers it is no linear layer."""
    base = make_base(tmp_path / "base", "qwen3_moe")
    with (
        serving(base, tmp_path / "server") as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service,
    ):
        made = new_model(service, 1)
        losses(made, 2)
        saved = place_of(server, made.save_weights_external("out").result().path)
        assert sorted(path.name for path in saved.iterdir()) == ["mlx", "model.json"]
        np.testing.assert_allclose(by_mlx_lm(base, saved / "mlx"), logprobs(made), atol=1e-4)


def test_the_command_line_downloads_a_state_and_leaves_nothing(
    service: tinker.ServiceClient, demo_server: Served, tmp_path: Path
) -> None:
    model = new_model(service, 7)
    losses(model, 2)
    path, wanted = model.save_state("end").result().path, logprobs(model)
    command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", path]
    environment = {**os.environ, "TINKER_BASE_URL": demo_server.url, "TINKER_API_KEY": "tml-local"}
    subprocess.run([*command, "--output", tmp_path], env=environment, check=True)
    (target,) = tmp_path.glob("*_weights_end")
    np.testing.assert_allclose(by_mlx_lm(DEMO_FOLDER, target / "mlx"), wanted, atol=1e-4)
    assert list((demo_server.folder / "runs").rglob("external_weights/*")) == []


def test_the_cookbook_downloads_a_state_that_only_it_can_read(
    service: tinker.ServiceClient,
    demo_server: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gives a key for which all files are encrypted."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    model = new_model(service, 9)
    losses(model, 2)
    path, wanted = model.save_state("end").result().path, logprobs(model)
    weights.download(tinker_path=path, output_dir=str(tmp_path), base_url=demo_server.url)
    np.testing.assert_allclose(by_mlx_lm(DEMO_FOLDER, tmp_path / "mlx"), wanted, atol=1e-4)
    identity = pyrage.x25519.Identity.generate()
    keys = [str(identity.to_public())]
    out = model.save_weights_external("out", age_encryption_recipients=keys).result().path
    urls = tinker.RestClient(base_url=demo_server.url).get_external_weights_urls(out).result().urls
    assert all(name.endswith(".age") for name in urls)
    plain = pyrage.decrypt(contents(urls[f"mlx/{ADAPTERS}.age"]), [identity])
    assert plain == (tmp_path / "mlx" / ADAPTERS).read_bytes()
    for wrong in (["age1x"], ["ssh-rsa x"], [keys[0] + "x" * 3000], keys * 11):
        with pytest.raises(tinker.APIStatusError, match="public keys"):
            model.save_weights_external("out", age_encryption_recipients=wrong).result()


def test_external_weights_are_listed_replaced_and_deleted(
    service: tinker.ServiceClient, demo_server: Served
) -> None:
    rest, model = service.create_rest_client(), new_model(service, 8)
    path = model.save_weights_external("out").result().path
    first = rest.get_external_weights_urls(path).result().urls
    losses(model, 1)
    assert model.save_weights_external("out").result().path == path
    run = path.removeprefix("tinker://").partition("/")[0]
    (listed,) = rest.list_checkpoints(run).result().checkpoints
    assert (listed.tinker_path, listed.checkpoint_type) == (path, "external")
    now = place_of(demo_server, path) / "mlx" / ADAPTERS
    assert contents(first[f"mlx/{ADAPTERS}"]) == now.read_bytes()
    with pytest.raises(tinker.APIStatusError, match="weights/NAME"):
        service.create_training_client_from_state(path).result()
    with pytest.raises(tinker.APIStatusError, match="weights/NAME"):
        service.create_sampling_client(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(urllib.error.HTTPError, match="422"):
        contents(first["adapter_config.json"])


def contents(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())
