"""Environments of several turns: with a tool, against an opponent, and of `verifiers`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import chz
import pytest
import tinker
from tinker_cookbook.recipes.multiplayer_rl.guess_number import train as guess_number
from tinker_cookbook.renderers import Message, ToolCall, get_renderer
from tinker_cookbook.rl import rollouts, train
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import ToolResult, build_agent_tool_env, simple_tool_result, tool

from tests.interop.tinker.served import NAME, RANK, Served, put_tokenizer
from tests.interop.tinker.teaching import assistant, teach, user
from tests.interop.tinker.test_recipes import assert_learned

pytestmark = pytest.mark.interop
CHATML = "Qwen/Qwen3-4B-Instruct-2507"  # its prompts have turns as ChatML, and tools
RENDERER = "qwen3_instruct"
QUESTION = "Where is order 7?"
PLACES = {"7": "Rome"}
CALLS: list[str] = []
"""The orders that were looked up."""


@tool
async def look_up(order: Annotated[str, "The number."]) -> ToolResult:
    """Say where an order is."""
    CALLS.append(order)
    return simple_tool_result(PLACES.get(order, "unknown"))


async def reward(messages: list[Message]) -> tuple[float, dict[str, float]]:
    right = "Rome" in str(messages[-1]["content"])
    return float(right), {"right": float(right)}


def first_messages(renderer: Any) -> list[Message]:
    return [*renderer.create_conversation_prefix_with_tools([look_up.to_spec()]), user(QUESTION)]


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


@pytest.fixture(autouse=True)
def found(demo_server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes find the server."""
    monkeypatch.setenv("TINKER_BASE_URL", demo_server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


def call(order: str) -> Message:
    """An answer that looks an order up."""
    function = ToolCall.FunctionBody(name="look_up", arguments=f'{{"order": "{order}"}}')
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall(function=function)]}


def test_a_tool_is_called_and_what_it_says_read(demo_server: Served, own_folder: Path) -> None:
    """A model that was taught to look orders up, and at times to guess, learns from rewards."""
    put_tokenizer(own_folder, CHATML, user="im_start", end="im_end")
    CALLS.clear()
    renderer = get_renderer(RENDERER, get_tokenizer(CHATML))
    first = first_messages(renderer)
    result: Message = {"role": "tool", "content": "Rome", "name": "look_up"}
    chats = [[*first, call("7")], [*first, call("7"), result, assistant("Rome")]]
    with tinker.ServiceClient(base_url=demo_server.url, api_key="tml-local") as service:
        model = service.create_lora_training_client(base_model=NAME, rank=RANK, seed=1).result()
        teach(model, renderer, [*chats, [*first, assistant("No.")]])
        saved = model.save_state("taught").result().path
    config = train.Config(
        learning_rate=1e-4, dataset_builder=ToolDataBuilder(), model_name=NAME,
        recipe_name="tool", renderer_name=RENDERER, max_tokens=64, lora_rank=RANK,
        log_path=str(own_folder / "log"), eval_every=0, save_every=0, max_steps=2,
        load_checkpoint_path=saved,
    )  # fmt: skip
    asyncio.run(train.main(config))
    assert_learned(demo_server, 2)
    assert "7" in CALLS


def test_guesses_are_answered_by_an_opponent(demo_server: Served, own_folder: Path) -> None:
    config = guess_number.CLIConfig(
        model_name=NAME, renderer_name="role_colon", group_size=4, batch_size=2, max_tokens=8,
        eval_every=0, save_every=0, log_path=str(own_folder / "log"), max_steps=1,
    )  # fmt: skip
    asyncio.run(train.main(guess_number.build_config(config)))
    assert len(demo_server.steps()) == 1


def test_an_environment_of_verifiers(
    demo_server: Served, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vf = pytest.importorskip("verifiers", reason="needs verifiers: see .ci/run")
    from datasets import Dataset
    from tinker_cookbook.recipes.verifiers_rl import train as verifiers_rl
    from tinker_cookbook.recipes.verifiers_rl.verifiers_env import set_vf_env

    def length(completion: list[dict[str, str]], **_: Any) -> float:
        return len(completion[-1]["content"]) / 100

    rows = [{"question": f"Say {i}.", "answer": str(i)} for i in range(8)]
    environment = vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[length], weights=[1.0])
    )
    monkeypatch.setattr(rollouts, "do_group_rollout", rollouts.do_group_rollout)  # it replaces it
    set_vf_env(environment)
    config = verifiers_rl.CLIConfig(
        model_name=NAME, renderer_name="role_colon", lora_rank=RANK, group_size=4,
        groups_per_batch=2, max_tokens=12, log_path=str(own_folder / "log"), save_every=0,
        max_steps=2,
    )  # fmt: skip
    try:
        asyncio.run(verifiers_rl.cli_main(config, None))
    finally:
        set_vf_env(None)
    assert_learned(demo_server, 2)
