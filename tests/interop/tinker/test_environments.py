"""Environments of several turns: with a tool, against an opponent, and of `verifiers`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
import datasets
import pytest
import tinker
from tinker_cookbook.recipes.multiplayer_rl.guess_number import train as guess_number
from tinker_cookbook.renderers import Message, ToolCall, TrainOnWhat, get_renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import ToolResult, build_agent_tool_env, simple_tool_result, tool

from tests.interop.tinker.served import NAME, RANK, Served, put_tokenizer
from tests.interop.tinker.teaching import assistant, teach, user
from tests.interop.tinker.test_recipes import BATCHES, assert_learned, assert_rewarded

pytestmark = pytest.mark.interop
CHATML = "Qwen/Qwen3-4B-Instruct-2507"  # its prompts have turns as ChatML, and tools
RENDERER = "qwen3_instruct"
PLACE = "Rome"
CALLS: list[str] = []
"""What the tool said."""


@tool
async def look_up() -> ToolResult:
    """Say where it is."""
    CALLS.append(PLACE)
    return simple_tool_result(PLACE)


async def reward(messages: list[Message]) -> tuple[float, dict[str, float]]:
    right = PLACE in str(messages[-1]["content"])
    return float(right), {"right": float(right)}


def first_messages(renderer: Any) -> list[Message]:
    return [*renderer.create_conversation_prefix_with_tools([look_up.to_spec()]), user("Where?")]


@chz.chz
class ToolGroups(EnvGroupBuilder):
    """A group of conversations in which a tool is needed."""

    size: int

    async def make_envs(self) -> Sequence[Env]:
        renderer = get_renderer(RENDERER, get_tokenizer(CHATML))
        return [
            build_agent_tool_env(renderer, [look_up], first_messages(renderer), reward, max_turns=3)
            for _ in range(self.size)
        ]


@chz.chz
class ToolData(RLDataset):
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [ToolGroups(size=8)]

    def __len__(self) -> int:
        return 4


@chz.chz
class ToolDataBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return ToolData(), None


def find(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recipes find a server."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


def call() -> Message:
    """An answer that uses the tool."""
    function = ToolCall.FunctionBody(name="look_up", arguments="{}")
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall(function=function)]}


def test_a_tool_is_called_and_what_it_says_read(
    qwen_server: Served, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was taught to use it, and at times to guess, learns from rewards."""
    find(qwen_server, monkeypatch)
    put_tokenizer(own_folder, CHATML, user="im_start", end="im_end")
    CALLS.clear()
    renderer = get_renderer(RENDERER, get_tokenizer(CHATML))
    first = first_messages(renderer)
    result: Message = {"role": "tool", "content": PLACE, "name": "look_up"}
    looked_up = [*first, call(), result, assistant(PLACE)]
    with tinker.ServiceClient(base_url=qwen_server.url, api_key="tml-local") as service:
        model = service.create_lora_training_client(base_model=NAME, rank=RANK, seed=1).result()
        chats = [looked_up, [*first, assistant("No.")]]
        # Either first answer costs ln 2.
        teach(model, renderer, chats, TrainOnWhat.ALL_ASSISTANT_MESSAGES, "none", loss=1.0)
        saved = model.save_state("taught").result().path
    config = train.Config(
        learning_rate=1e-4, dataset_builder=ToolDataBuilder(), model_name=NAME,
        recipe_name="tool", renderer_name=RENDERER, max_tokens=64, lora_rank=RANK,
        log_path=str(own_folder / "log"), eval_every=0, save_every=0, max_steps=BATCHES,
        load_checkpoint_path=saved,
    )  # fmt: skip
    asyncio.run(train.main(config))
    assert_rewarded(qwen_server, BATCHES)
    assert CALLS


def test_guesses_are_answered_by_an_opponent(
    demo_server: Served, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(demo_server, monkeypatch)
    config = guess_number.CLIConfig(
        model_name=NAME, renderer_name="role_colon", group_size=2, batch_size=1, max_tokens=8,
        eval_every=0, save_every=0, log_path=str(own_folder / "log"), max_steps=1,
    )  # fmt: skip
    asyncio.run(train.main(guess_number.build_config(config)))
    assert len(demo_server.steps()) == 1


def test_an_environment_of_verifiers(demo_server: Served) -> None:
    """The cookbook's parts in a short loop: its recipe fails whatever the server, as its function
    for a group does not take the `termination` that its training gives to it."""
    vf = pytest.importorskip("verifiers", reason="needs verifiers: see .ci/run")
    from tinker_cookbook.recipes.verifiers_rl import verifiers_env
    from tinker_cookbook.recipes.verifiers_rl.tinker_openai import TinkerAsyncOpenAIClient

    def length(completion: list[dict[str, str]], **_: Any) -> float:
        return len(completion[-1]["content"]) / 100

    rows = datasets.Dataset.from_list([{"question": f"Say {i}.", "answer": ""} for i in range(8)])
    environment = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[length]))

    async def loop(model: tinker.TrainingClient) -> None:
        renderer = get_renderer("role_colon", model.get_tokenizer())
        builder = verifiers_env.VerifiersRLDatasetBuilder(vf_env_id="", groups_per_batch=2)
        data, _ = await builder()
        for batch in range(2):
            sampler = await model.save_weights_and_get_sampling_client()
            client = TinkerAsyncOpenAIClient(sampler, renderer, model.get_tokenizer())
            states = [
                await group.vf_env.run_group(
                    group.get_rollout_inputs(4), client, "tinker",
                    {"max_tokens": 12, "temperature": 1.0},
                    contextlib.nullcontext(), contextlib.nullcontext(),
                )
                for group in data.get_batch(batch)
            ]  # fmt: skip
            groups = [verifiers_env.convert_states_to_trajectory_group(each) for each in states]
            texts, _ = assemble_training_data(groups, compute_advantages(groups), False)
            await train.train_step(texts, model, 1e-4, 1, "importance_sampling")

    verifiers_env.set_vf_env(environment)
    try:
        with tinker.ServiceClient(base_url=demo_server.url, api_key="tml-local") as service:
            made = service.create_lora_training_client(base_model=NAME, rank=RANK)
            asyncio.run(loop(made.result()))
    finally:
        verifiers_env.set_vf_env(None)
    assert_learned(demo_server, 2)
