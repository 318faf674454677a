"""Environments of `verifiers` (0.1.9), unchanged: `--environment verifiers:NAME`.

The environment's own rollout runs, up to its rewards. Where it would ask a server for the model's
next message, it waits for `step`. Rows of the data are {"example": N}, the number of one of the
environment's examples, or have a prompt and what the environment reads beside it (answer, info).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from your_ai.environments.protocol import EnvironmentFailed, Observation
from your_ai.environments.tools import messages_of
from your_ai.errors import UserError
from your_ai.gates.functions import UsersCodeFailed, load_module, running_users_code
from your_ai.gates.text import shown


@dataclass
class VerifiersEnvironment:
    """One conversation with an environment of `verifiers`."""

    environment: Any
    prompts: asyncio.Queue[tuple[Any, Any]] = field(default_factory=asyncio.Queue)
    """State and messages for which the environment waits for the model."""
    replies: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    seen: list[Any] = field(default_factory=list)
    """The messages that the model has had or written."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        self.environment.get_model_response = self.sample  # of this process's environment alone
        rollout = self.environment.run_rollout(
            self.example_of(row), None, "", {}, contextlib.AsyncExitStack(),
            contextlib.AsyncExitStack(), score=True,
        )  # fmt: skip
        self.rollout = asyncio.ensure_future(rollout)
        return await self.observe()

    async def step(self, message: Mapping[str, Any]) -> Observation:
        self.replies.put_nowait(completion_of(message))
        return await self.observe()

    def close(self) -> None:
        self.rollout.cancel()

    async def sample(self, state: Any, prompt: Any, *_: Any, **__: Any) -> Any:
        """The model's message, in place of the environment's method that asks a server for it."""
        self.prompts.put_nowait((state, prompt))
        return await self.replies.get()

    async def observe(self) -> Observation:
        """Wait until the environment asks for a message, or ends."""
        asked = asyncio.ensure_future(self.prompts.get())
        await asyncio.wait({asked, self.rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            state, prompt = asked.result()
            tools = [] if self.seen else state.get("oai_tools") or []
            return Observation(self.new_messages(prompt, answered=True), tools)
        asked.cancel()
        state = self.rollout.result()
        messages = self.new_messages([*state["prompt"], *state["completion"]], answered=False)
        info = {"metrics": state["metrics"] or {}, "stopped_by": state.get("stop_condition")}
        if state["error"] is not None:
            info["error"] = shown(str(state["error"]))
        return Observation(messages, reward=state["reward"], done=True, info=info)

    def new_messages(self, messages: Any, answered: bool) -> list[dict[str, Any]]:
        """The messages after those seen. answered: the model's message comes after them."""
        if not isinstance(messages, list) or messages[: len(self.seen)] != self.seen:
            raise EnvironmentFailed("it changes earlier messages, or is no chat")
        start = len(self.seen) + bool(self.seen)  # without the model's own
        self.seen = list(messages)
        return [{**each, "content": each.get("content") or ""} for each in messages[start:]]

    def example_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The input of the environment's rollout."""
        given = dict(row)
        if "example" in row:
            examples = self.environment.get_dataset()
            number = row["example"]
            if not isinstance(number, int) or not 0 <= number < len(examples):
                raise EnvironmentFailed(f"it has no example {shown(number)} of {len(examples):,}")
            given = dict(examples[number])
        prompt = messages_of(given)
        system = getattr(self.environment, "system_prompt", None)
        if system and prompt[0].get("role") != "system":
            prompt.insert(0, {"role": "system", "content": system})
        task = self.environment.env_id or "default"
        known: dict[str, Any] = {"example_id": 0, "task": task, "answer": "", "info": {}}
        return {**known, **given, "prompt": prompt}


def completion_of(message: Mapping[str, Any]) -> Any:
    """A message of the assistant as OpenAI's servers answer."""
    from openai.types.chat import ChatCompletion

    calls = [
        {
            "id": call.get("id") or f"call-{number}",
            "type": "function",
            "function": {**call["function"], "arguments": text_of_arguments(call["function"])},
        }
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
    said = {"role": "assistant", "content": message.get("content") or ""}
    choice = {"index": 0, "finish_reason": "stop", "message": {**said, "tool_calls": calls or None}}
    answer = {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
    return ChatCompletion.model_validate(answer)


def text_of_arguments(function: Mapping[str, Any]) -> str:
    given = function.get("arguments")
    return given if isinstance(given, str) else json.dumps(given)


def load_verifiers(given: str) -> Any:
    """Load the environment of `verifiers:NAME`. Raises UserError."""
    where, name = f"--environment {given}", given.partition(":")[2]
    try:
        import verifiers
    except ImportError as error:
        raise UserError(
            f"{where}: needs verifiers; install it with: pip install 'your_ai[verifiers]'"
        ) from error
    load_module(name.replace("-", "_").split("/")[-1], where)
    try:
        with running_users_code():
            return verifiers.load_environment(name)
    except UsersCodeFailed as error:
        raise UserError(f"{where}: {error}") from error.__cause__
