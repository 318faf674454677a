"""`your_ai mcp`, driven by the SDK's own client: in this process, and as a child over stdio."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from tests.conftest import call as command
from tests.conftest import chat, train_once, write_rows
from your_ai.config import FIELDS, resolve
from your_ai.errors import RunError, UserError
from your_ai.run import events
from your_ai.run.events import EventLog
from your_ai.run.folder import RUNS, SUPERVISOR_LOCK, RunFolder, is_running, locked
from your_ai.serving.mcp_gate import AgentGate, Permissions
from your_ai.serving.mcp_server import make_server
from your_ai.serving.mcp_tools import AgentTools, summary_of
from your_ai.session import new_run, run_list
from your_ai.session.new_run import BackgroundRun

KERNELS = False
TOOLS = ("train", "watch", "stop", "evaluate", "report", "runs")


def in_process(work: Any, *permissions: str) -> Any:
    """Await work(client, tools) with a server of the current folder in this process."""

    async def main() -> Any:
        allowed = Permissions(**dict.fromkeys(permissions, True))
        server, tools = make_server(AgentGate(Path.cwd().resolve(), allowed))
        async with Client(server) as client:
            return await work(client, tools)

    return anyio.run(main)


def called(tool: str, *permissions: str, **arguments: Any) -> tuple[bool, dict[str, Any]]:
    """Call one tool; return whether it failed, and its result."""

    async def work(client: Client, _: object) -> tuple[bool, dict[str, Any]]:
        return await result_of(client, tool, **arguments)

    return in_process(work, *permissions)


async def result_of(client: Client, tool: str, **arguments: Any) -> tuple[bool, dict[str, Any]]:
    found = await client.call_tool(tool, arguments)
    assert found.content[0].type == "text"
    return bool(found.is_error), found.structured_content


async def done_by(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The result of a call, which must not fail."""
    failed, found = await result_of(client, tool, **arguments)
    assert not failed, found
    return found


def done(tool: str, *permissions: str, **arguments: Any) -> dict[str, Any]:
    """The same, of a client for this call."""
    return in_process(lambda client, _: done_by(client, tool, **arguments), *permissions)


def error(tool: str, *permissions: str, **arguments: Any) -> str:
    """The error of a call, which is one line."""
    failed, found = called(tool, *permissions, **arguments)
    assert failed, found
    assert found.keys() == {"error", "kind"}
    assert len(found["error"].splitlines()) == 1
    return found["error"]


@pytest.fixture
def started(monkeypatch) -> list[tuple[RunFolder, Any, bool]]:
    """The runs that would be started, in place of processes."""
    seen: list[tuple[RunFolder, Any, bool]] = []

    def start(folder: RunFolder, settings: Any, *, new: bool) -> BackgroundRun:
        seen.append((folder, settings, new))
        return BackgroundRun(folder, None, 0, 0, new)

    monkeypatch.setattr(new_run, "start", start)
    monkeypatch.setattr(new_run, "wait_until_begun", lambda run, seconds: True)
    return seen


@pytest.fixture
def run(configure, own_folder) -> RunFolder:
    """A finished run, whose data and model are in the folder."""
    config = configure(exact_match=True)
    shutil.copytree(config.model, own_folder / "tiny")
    return train_once(configure(exact_match=True, model=str(own_folder / "tiny")))


# In this process


def test_tools_say_what_they_take_and_return():
    async def work(client: Client, _: object) -> list[Any]:
        return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in in_process(work)}
    assert (*tools,) == TOOLS
    for tool in tools.values():
        assert len(tool.description) > 40
        assert "\n  " not in tool.description
        for name, schema in tool.input_schema["properties"].items():
            assert schema.get("description"), (tool.name, name)
    assert "seconds" in tools["watch"].input_schema["properties"]["wait_s"]["description"]
    assert "GB" in tools["train"].input_schema["properties"]["max_memory"]["description"]
    assert "bytes" in tools["watch"].output_schema["description"]
    named = tools["train"].input_schema["properties"].keys() - {"config", "settings", "resume"}
    assert named - {"wait_s"} <= FIELDS.keys()


def test_training_is_started_with_the_settings(started, data_folder, tiny_model):
    shutil.copytree(tiny_model, "tiny")
    settings = {"lora_rank": 4, "max_steps": 3}
    found = done("train", model="tiny", data="data", run="r1", max_memory=1.5, settings=settings)
    assert found == {"run": "r1", "begun": True, "max_memory_gb": 1.5, "notes": []}
    ((folder, config, new),) = started
    assert (folder.path, new) == (RUNS / "r1", True)
    assert (config.lora_rank, config.max_steps, config.max_memory) == (4, 3, 1.5)


def test_training_from_a_file_of_settings(started, data_folder):
    Path("c.yaml").write_text("model: demo\ndata: data\nmax_steps: 7\nseed: 5\n")
    done("train", config="c.yaml", max_steps=2)
    assert (started[0][1].seed, started[0][1].max_steps) == (5, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"data": "/etc/hostname"},
        {"model": "link"},
        {"config": "/etc/hostname"},
        {"config": "link/c.yaml"},
        {"config": "out.yaml"},
        {"run": "../x"},
        {"settings": {"from_adapter": "../x"}},
        {"settings": {"objective": "grpo", "reward": "mine:mine"}},
        {"settings": {"objective": "grpo", "reward": "judge", "judge_model": "m"}},
        {"settings": {"supervise": False}},
        {"settings": {"force": True}},
        {"settings": {"seeed": 1}},
        {"settings": {"seed": "x"}},
        {"settings": {"max_memory": 1}, "max_memory": 2},
        {"model": "no-such-model"},
        {"model": "llama-8b"},  # it is not here
        {"data": "none.jsonl"},
        {"objective": "sftt"},
        {"max_memory": 0},
        {"max_steps": 0},
        {"max_steps": "many"},
        {"resume": "r", "run": "x"},
    ],
)
def test_training_that_is_refused_writes_nothing(started, tmp_path_factory, arguments):
    outside = tmp_path_factory.mktemp("outside")
    write_rows(outside / "train.jsonl", [chat("a", "b")])
    (outside / "c.yaml").write_text("seed: 1\n")
    Path("link").symlink_to(outside)
    Path("out.yaml").write_text(f"model: demo\ndata: {outside}\n")
    given = {"data": "demo", "model": "demo"} | arguments
    if "config" in arguments:
        given = arguments
    error("train", **given)
    assert not started
    assert not RUNS.exists()


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("train", {"modle": "tiny"}, "no argument modle; there are: config, .*did you mean model"),
        ("train", {"lora_rank": 4}, "lora_rank: is a setting; give it in settings"),
        ("watch", {"run": "r", "seed": 1}, "no argument seed; there are: run, wait_s, events"),
        ("runs", {"a\nb": 1}, "no argument a␊b; there are: none"),
    ],
)
def test_unknown_arguments_are_refused_and_not_dropped(started, tool, arguments, text):
    assert re.search(text, error(tool, **arguments))
    assert not started


def test_file_of_settings_is_checked_before_anything_it_names_is_read(started):
    Path("c.yaml").write_text("model: demo\ndata: demo\nfrom_adapter: /none\n")
    assert "from_adapter /none: leads out of" in error("train", config="c.yaml")


def test_model_that_an_adapter_names_is_checked(run, started, tmp_path_factory):
    outside = shutil.copytree("tiny", tmp_path_factory.mktemp("outside") / "tiny")
    text = run.config.read_text()
    run.config.write_text(text.replace(str(Path("tiny").absolute()), str(outside)))
    text = error("train", data="data", run="second", settings={"from_adapter": "r"})
    assert f"model {outside}: leads out of" in text
    assert not started


def test_code_is_run_only_if_it_was_allowed(started):
    settings = {"objective": "grpo", "reward": "mine:mine"}
    given = {"model": "demo", "data": "demo", "settings": settings}
    assert "--allow-code" in error("train", "network", **given)
    done("train", "code", **given)


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        *(("watch", name) for name in ("zz", "../r", "/etc", "", "r\0", "r/adapter", "linked")),
        *((tool, "linked") for tool in ("stop", "evaluate", "report", "train")),
    ],
)
def test_run_that_is_not_there_names_those_that_are(started, tmp_path_factory, tool, name):
    for there in ("r", "other"):
        (RUNS / there).mkdir(parents=True)
        (RUNS / there / "config.yaml").write_text("...\n")
    outside = tmp_path_factory.mktemp("outside")
    (outside / "config.yaml").write_text("...\n")
    (RUNS / "linked").symlink_to(outside)
    argument = "resume" if tool == "train" else "run"
    text = error(tool, **{argument: name})
    assert ("leads out of" if name == "linked" else "runs here: linked, other, r") in text
    assert not started


def test_errors_do_not_end_the_server(monkeypatch):
    def broken(*_: object) -> None:
        raise TypeError("first line\nsecond line")

    async def work(client: Client, _: object) -> None:
        for function, kind in ((broken, "bug"), (failing(UserError), "user"),
                               (failing(RunError), "run")):  # fmt: skip
            monkeypatch.setattr(run_list, "run_rows", function)
            failed, found = await result_of(client, "runs")
            assert failed
            assert found["kind"] == kind
            assert "\n" not in found["error"]
        monkeypatch.undo()
        for tool, arguments in (("nothing", {}), ("watch", {}), ("watch", {"run": 1}),
                                ("watch", {"run": "r", "wait_s": -1}),
                                ("watch", {"run": "r", "wait_s": 1e9})):  # fmt: skip
            failed, found = await result_of(client, tool, **arguments)
            assert failed
            assert "\n" not in found["error"]

    in_process(work)


def failing(kind: type[Exception]) -> Any:
    def function(*_: object) -> None:
        raise kind("it is\nwrong")

    return function


def test_finished_run_is_watched_evaluated_and_reported(run, monkeypatch, capsys):
    ran: list[str] = []

    async def here(self: AgentTools, *arguments: str) -> str:
        """The command in this process, in place of its own."""
        capsys.readouterr()
        ran.extend(arguments)
        assert command(*arguments) == 0
        return capsys.readouterr().out.strip()

    monkeypatch.setattr(AgentTools, "_command", here)

    async def work(client: Client, _: object) -> None:
        found = await done_by(client, "watch", run="r", wait_s=60)
        assert (found["state"], found["step"], found["steps"]) == ("finished", 4, 4)
        assert found["checkpoint"] == "step-000004"
        assert found["adapter"] == "runs/r/adapter"
        assert found["last_events"][-1].startswith("step 4: saved")
        found = await done_by(client, "evaluate", run="r", max_memory=1.0, worst=0)
        assert found["path"] == "runs/r/evaluation.json"
        assert found["measures"].keys() >= {"loss", "perplexity"}
        assert "confidence intervals" in found["text"]
        assert "--max-memory=1.0" in ran
        found = await done_by(client, "report", run="r", out="page.html")
        assert "done: 4 steps" in found["text"]
        assert Path(found["path"]).read_text().startswith("<!doctype html>")
        found = await done_by(client, "runs")
        assert [row["name"] for row in found["runs"]] == ["r"]
        _, found = await result_of(client, "train", resume="r")
        assert "already finished" in found["error"]

    in_process(work)


def test_summary_of_a_run_in_progress_does_not_say_that_it_ended(run):
    lines = run.events.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"event": "step"' in line)
    run.events.write_text("".join(lines[: last + 1]))
    assert "before it was finished" in summary_of(run)
    with locked(run):
        assert summary_of(run).startswith("finishing; step 4/4  loss ")


def test_evaluation_reads_nothing_outside(run, tmp_path_factory):
    outside = write_rows(tmp_path_factory.mktemp("outside") / "secret.jsonl", [chat("a", "b")])
    assert "leads out of" in error("evaluate", run="r", data=str(outside))
    assert "--allow-code" in error("evaluate", run="r", metric="mine:mine")
    text = run.config.read_text()
    run.config.write_text(text.replace(str(Path.cwd() / "data"), str(outside)))
    assert "leads out of" in error("evaluate", run="r")
    assert "leads out of" in error("train", resume="r", max_steps=9)
    run.config.write_text(text)
    (run.path / "more").symlink_to(outside.parent)
    for tool in ("evaluate", "report", "watch"):
        assert "leads out of" in error(tool, run="r")
    for out in (str(outside), "data/train.jsonl", "runs/r/config.yaml"):
        assert error("report", run="r", out=out)


def test_watch_returns_as_soon_as_the_run_gets_on(run):
    run.events.write_text("".join(run.events.read_text().splitlines(keepends=True)[:-3]))
    log = EventLog(run.events)

    async def work(client: Client, _: object) -> tuple[float, dict[str, Any]]:
        timer = threading.Timer(0.5, log.write, [events.Phase(text="validating")])
        timer.start()
        began = time.monotonic()
        found = await done_by(client, "watch", run="r", wait_s=60)
        return time.monotonic() - began, found

    with locked(run, SUPERVISOR_LOCK):
        seconds, found = in_process(work)
    assert 0.4 < seconds < 30
    assert (found["state"], found["phase"]) == ("running", "validating")


def test_watch_says_why_a_run_never_began(run):
    run.events.write_text("")
    (run.path / "process.log").write_text("note: x\nerror: does not fit\n")
    found = done("watch", run="r")
    assert (found["state"], found["error"]) == ("died", "does not fit")


def test_run_is_asked_to_stop_once_however_often_stop_is_called(run, monkeypatch):
    asked: list[str] = []

    def stop(folder: RunFolder) -> int:
        asked.append(folder.name)
        return os.getpid()

    async def work(client: Client, _: object) -> None:
        for _ in range(2):
            found = await done_by(client, "stop", run="r", wait_s=0)
            assert found["state"] == "running"

    with monkeypatch.context() as patched, locked(run, SUPERVISOR_LOCK):
        patched.setattr(run_list, "stop", stop)
        in_process(work)
    assert asked == ["r"]
    assert "is not running" in error("stop", run="r")


def test_second_run_gets_its_share_or_is_refused_with_the_reason(run, started):
    with locked(run, SUPERVISOR_LOCK):
        log = EventLog(run.events)
        log.write(events.Limit(limit_bytes=1 << 50, reason="test"))
        text = error("train", model="demo", data="demo", run="second")
        assert "not enough memory: r may use" in text
        assert not (RUNS / "second").exists()
        assert "not enough memory" in error("evaluate", run="r")
        log.write(events.Limit(limit_bytes=100_000_000, reason="test"))
        found = done("train", model="demo", data="demo", run="second")
        assert found["max_memory_gb"] == started[0][1].max_memory > 0.1
        assert "is running" in error("train", resume="r")


# The command


def test_missing_sdk_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command("mcp") == 2
    assert capsys.readouterr().err.strip().endswith("pip install '.[mcp]'")


def test_folder_that_is_not_there_is_one_line(capsys):
    Path("file").touch()
    for place in ("none", "file"):
        assert command("mcp", "--folder", place) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


# As a child process

# A server whose list of runs prints, as a library might; the SDK has its own copies of both.
PRINTING = """
import os, sys
from pathlib import Path
from your_ai.serving import mcp_server
from your_ai.serving.mcp_gate import Permissions
from your_ai.session import run_list
def rows():
    print("printed")
    os.write(1, b"written\\n")
    os.system("echo from a child")
    return []
run_list.run_rows = rows
mcp_server.serve(Path(sys.argv[1]), Permissions())
"""


def asked(number: int, method: str, **params: Any) -> bytes:
    message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    return json.dumps(message).encode() + b"\n"


def test_standard_output_has_only_the_protocol_and_a_signal_ends_the_server(own_folder):
    hello = asked(
        1, "initialize", protocolVersion="2025-06-18", capabilities={},
        clientInfo={"name": "test", "version": "1"},
    )  # fmt: skip
    ready = b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n'
    with subprocess.Popen(
        [sys.executable, "-c", PRINTING, str(own_folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as server:
        server.stdin.write(hello + ready + asked(2, "tools/call", name="runs", arguments={}))
        server.stdin.flush()
        lines = [json.loads(server.stdout.readline()) for _ in range(2)]
        server.stdin.write(b"no json\n" + asked(3, "tools/call", name="runs", arguments={}))
        server.stdin.flush()
        while lines[-1].get("id") != 3:
            lines.append(json.loads(server.stdout.readline()))
        server.send_signal(signal.SIGTERM)
        rest, messages = server.communicate(timeout=60)
    assert rest == b""
    assert server.returncode == 0
    assert lines[1]["result"]["structuredContent"] == {"runs": []}
    assert b"printed" in messages
    assert b"Traceback" not in messages


def test_runs_survive_the_server_and_two_at_once_are_not_mixed(own_folder, tiny_model, capfd):
    shutil.copytree(tiny_model, "tiny")
    for name in ("a", "b"):
        write_rows(Path(name, "train.jsonl"), [chat(f"{name} {i}", name * 20) for i in range(12)])
    common = {"lora_rank": 2, "lora_layers": 1, "eval_every": 0, "batch_size": 1}
    steps = {"a": 100_000, "b": 90_000}

    def server() -> Client:
        arguments = ["-m", "your_ai", "mcp", "--folder", str(own_folder)]
        keep = {name: value for name, value in os.environ.items() if value}
        return Client(StdioServerParameters(command=sys.executable, args=arguments, env=keep))

    async def begin(client: Client, name: str, found: dict[str, Any]) -> None:
        found[name] = await result_of(
            client, "train", model="tiny", data=name, run=name, max_memory=1.0,
            max_steps=steps[name], learning_rate=1e-9, settings=common, wait_s=60,
        )  # fmt: skip

    async def work() -> None:
        found: dict[str, Any] = {}
        async with server() as client:
            async with anyio.create_task_group() as both:
                for name in steps:
                    both.start_soon(begin, client, name, found)
            for name in steps:
                failed, result = found[name]
                assert not failed, result
                assert (result["run"], result["begun"]) == (name, True)
            failed, result = await result_of(client, "train", run="c", max_memory=1000)
            assert failed
            assert "not enough memory" in result["error"]
        for name in steps:
            assert is_running(RunFolder(RUNS / name))
        async with server() as client:
            for name, count in steps.items():
                seen = await done_by(client, "watch", run=name, wait_s=30)
                assert (seen["state"], seen["steps"]) == ("running", count)
                assert seen["limit_bytes"] == 1_000_000_000
                ended = await done_by(client, "stop", run=name, wait_s=60)
                assert ended["state"] == "stopped"
                assert ended["checkpoint"] == f"step-{ended['step']:06}"
            listed = await done_by(client, "runs")
            states = {row["name"]: row["state"] for row in listed["runs"]}
            assert states == dict.fromkeys(steps, "stopped")

    try:
        asyncio.run(work())
    finally:
        for name in steps:
            with contextlib.suppress(UserError):
                run_list.stop(RunFolder(RUNS / name))
    for name in steps:
        config = resolve({}, f"runs/{name}/config.yaml")
        assert config.data == str(own_folder / name)
        assert config.max_steps == steps[name]
