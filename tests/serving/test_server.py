"""The server as a user starts it, tested with OpenAI's client."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import chat_prompt
from tests.generation.test_generate import train_in
from tests.generation.test_tool_calls import PRICE, UNREAD, train_caller
from your_ai.errors import RunError
from your_ai.generation import generate
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RunFolder
from your_ai.serving import server as serving
from your_ai.serving.web import Origins

LONG = {"max_tokens": 100_000, "temperature": 2.0, "logit_bias": {"1": -100}}  # never the end token
ASKED = [{"role": "user", "content": "Question 1"}]


@dataclass
class Served:
    process: subprocess.Popen
    port: int
    printed: str
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        """Send a request as a web page or a script does; return status and content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            content = json.loads(response.read() or b"{}")
            return response.status, {**content, "headers": response.headers}


@contextlib.contextmanager
def started(
    log: Path, *command: str, cwd: Path | None = None, **variables: str
) -> Iterator[tuple[subprocess.Popen, int, str]]:
    """The process of a server, its port, and what it printed."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "your_ai", *command, "--port", "0"],
            stdout=subprocess.PIPE, stderr=file, text=True, cwd=cwd,
            env={**os.environ, "http_proxy": "", **variables},
        )  # fmt: skip
    try:
        printed = process.stdout.readline() + process.stdout.readline()
        port = re.search(r"http://[0-9.]+:(\d+)", printed)
        assert port, log.read_text()
        yield process, int(port[1]), printed
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def served(run: RunFolder, *options: str) -> Iterator[Served]:
    log = run.path / "serve.log"
    with started(log, "serve", str(run.path), *options) as found:
        yield Served(*found, log)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model) -> RunFolder:
    return train_in(tmp_path_factory.mktemp("runs"), tiny_model)


@pytest.fixture(scope="module")
def server(run) -> Iterator[Served]:
    with served(run) as found:
        yield found


@pytest.fixture(scope="module")
def expected(run) -> str:
    """The greedy answer of `generate`."""
    network, tokenizer = generate.load_run(open_trained(str(run.path)))
    prompt = chat_prompt(tokenizer, "Question 1")
    answers = generate.respond(network, tokenizer, prompt, generate.Sampling(max_tokens=12))
    return "".join(response.text for response in answers)


def test_prints_its_address_and_an_example_command(server, run):
    assert "serving r at http://127.0.0.1:" in server.printed
    command = server.printed.partition("try it: ")[2]
    said = subprocess.run(command, shell=True, capture_output=True, check=True).stdout
    assert json.loads(said)["choices"][0]["message"]["role"] == "assistant"


def test_chat_answer_equals_that_of_generate(server, expected):
    answer = server.client.chat.completions.create(model="r", messages=ASKED, max_tokens=12)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12


def test_streamed_answer_equals_the_whole_answer(server, expected):
    pieces = server.client.chat.completions.create(
        model="r", messages=ASKED, max_tokens=12, stream=True
    )
    texts = [piece.choices[0].delta.content or "" for piece in pieces]
    assert "".join(texts) == expected
    assert len(texts) > 5


def test_concurrent_requests_each_get_their_answer(server, run):
    questions = [f"Question {n}" for n in range(4)]

    def ask(question: str) -> str:
        said = [{"role": "user", "content": question}]
        answer = server.client.chat.completions.create(model="r", messages=said, max_tokens=8)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(ask, questions))
    assert together == [ask(question) for question in questions]
    assert len(set(together)) > 1


def test_completion_continues_a_text(server):
    answer = server.client.completions.create(model="r", prompt="Question", max_tokens=3)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 3


def test_same_seed_gives_the_same_answer(server):
    def draw(seed: int) -> str:
        answer = server.client.chat.completions.create(
            model="r", messages=ASKED, max_tokens=12, temperature=1.5, seed=seed
        )
        return answer.choices[0].message.content

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_only_the_run_is_listed_as_a_model(server):
    assert [model.id for model in server.client.models.list()] == ["r"]
    assert server.client.models.retrieve("r").id == "r"
    with pytest.raises(openai.NotFoundError, match=r"this server (only )?has r"):
        server.client.models.retrieve("other")


@pytest.mark.parametrize(
    "more",
    [
        {"model": "gpt-4o"},
        {"model": "mlx-community/Llama-3.2-1B-Instruct-4bit"},
        {"model": "r", "extra_body": {"adapters": "elsewhere"}},
        {"model": "r", "extra_body": {"draft_model": "elsewhere"}},
    ],
)
def test_other_models_and_adapters_are_not_loaded(server, more):
    with pytest.raises(openai.NotFoundError, match=r"this server (only )?has r"):
        server.client.chat.completions.create(messages=ASKED, **more)


def test_prompt_longer_than_the_context_is_refused(server):
    body = {"prompt": "a " * 5000, "max_tokens": 2}
    status, answer = server.ask("POST", "/v1/completions", body)
    assert status == 400
    assert re.search(r"has \d+ tokens; the model's maximum is 2048", answer["error"]["message"])


def test_answer_length_is_limited_by_the_context(server):
    body = {"prompt": "a " * 2000, **LONG}
    answer = server.ask("POST", "/v1/completions", body)[1]
    assert answer["usage"]["total_tokens"] == 2048
    assert answer["choices"][0]["finish_reason"] == "length"


def test_stream_with_empty_options_is_complete(server):
    pieces = server.client.chat.completions.create(
        model="r", messages=ASKED, max_tokens=2, stream=True, stream_options={}
    )
    assert list(pieces)[-1].choices[0].finish_reason == "length"


def test_pages_of_this_machine_may_use_the_server(server):
    status, answer = server.ask("GET", "/v1/models", Origin="http://localhost:3000")
    assert status == 200
    assert answer["headers"]["Access-Control-Allow-Origin"] == "http://localhost:3000"
    status, answer = server.ask("OPTIONS", "/v1/chat/completions", Origin="http://127.0.0.1:5")
    assert status == 204
    assert answer["headers"]["Access-Control-Allow-Origin"] == "http://127.0.0.1:5"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example:8080"},  # a domain that resolves to 127.0.0.1
    ],
)
def test_other_pages_may_not_use_the_server(server, headers):
    body = {"messages": ASKED, "max_tokens": 1}
    status, answer = server.ask("POST", "/v1/chat/completions", body, **headers)
    assert status == 403
    assert "choices" not in answer
    assert "Access-Control-Allow-Origin" not in answer["headers"]


def test_signal_ends_the_server_during_answers(run):
    with served(run, "--max-tokens", "3") as server:
        answer = server.client.chat.completions.create(model="r", messages=ASKED)
        assert answer.usage.completion_tokens == 3  # the default of the server

        def ask(**more: int) -> None:
            with contextlib.suppress(openai.APIError):
                server.client.completions.create(model="r", prompt="a", **LONG, **more)

        threads = [threading.Thread(target=ask, kwargs=more) for more in ({"seed": 1}, {})]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        for thread in threads:
            thread.join()
        assert server.log.read_text() == ""


def test_ctrl_c_ends_the_server(run):
    with served(run) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        assert server.log.read_text() == ""


def test_failed_model_ends_the_server(monkeypatch):
    class Dead:
        is_healthy = False
        cli_args = argparse.Namespace(allowed_origins=Origins())
        model_provider = argparse.Namespace(name="r")

        def stop_and_join(self) -> None:
            pass

    monkeypatch.setattr(serving, "GRACE_S", 0.1)
    with serving.listen("127.0.0.1", 0) as listener, pytest.raises(RunError, match="model failed"):
        serving.serve(listener, Dead(), [])


# Tools

HAT = [{"role": "user", "content": "A hat?"}]
CAP = [{"role": "user", "content": "A cap?"}]


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Iterator[Served]:
    """A server of a model that calls a tool, and then answers."""
    with served(train_caller(tmp_path_factory.mktemp("caller"))) as found:
        yield found


def asked(caller: Served, messages: list, **settings: Any):
    settings = {"tools": [PRICE], "max_tokens": 60, **settings}
    return caller.client.chat.completions.create(model="r", messages=messages, **settings)


def test_calls_are_answered_in_openais_form(caller):
    choice = asked(caller, HAT).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "price")
    assert json.loads(call.function.arguments) == {"item": "hat"}
    assert re.fullmatch(r"\w{9}", call.id)
    assert choice.message.content == "I look."
    assert choice.finish_reason == "tool_calls"


def test_model_goes_on_with_the_results_of_its_calls(caller):
    message = asked(caller, HAT).choices[0].message
    found = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
    after = [*HAT, message.model_dump(exclude_none=True), found]
    answer = asked(caller, after)
    assert answer.choices[0].message.content == "It is 7."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens > 40  # what it wrote itself
    assert "".join(said(asked(caller, after, stream=True))) == "It is 7."


def said(pieces) -> list[str]:
    return [piece.choices[0].delta.content or "" for piece in pieces]


def test_streamed_calls_equal_the_whole_ones(caller):
    pieces = list(asked(caller, HAT, stream=True))
    assert "".join(said(pieces)) == "I look."
    (call,) = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "price")
    assert json.loads(call.function.arguments) == {"item": "hat"}
    assert pieces[-1].choices[0].finish_reason == "tool_calls"


def test_call_that_cannot_be_read_is_text(caller):
    choice = asked(caller, CAP).choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    call = "<tool_call>" + UNREAD.partition("<tool_call>")[2].removesuffix(".")
    assert choice.message.content == f"So .{call}"
    pieces = list(asked(caller, CAP, stream=True))
    assert "".join(said(pieces)) == UNREAD
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_no_call_is_answered_where_there_are_no_tools_to_call(caller):
    without = asked(caller, HAT, tools=[]).choices[0]
    refused = asked(caller, HAT, tool_choice="none").choices[0]
    assert without == refused
    assert (refused.message.tool_calls, refused.finish_reason) in ((None, "stop"), (None, "length"))


def test_call_that_is_cut_is_text(caller):
    choice = asked(caller, HAT, max_tokens=15).choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
    assert choice.message.content.startswith('I look.<tool_call>{"')
    assert "</tool_call>" not in choice.message.content
