"""Random bad inputs of several kinds, given to the real command line.

`python tests/hostile_inputs.py --seed N --runs 300` runs each input in a new process and reports
those that end badly. A command must end with status 2, or 1 if the input was valid, or 0 if it
was harmless; with one line on stderr that begins with `error: `; without a traceback or control
characters; with nothing left in runs/; within 10 seconds of CPU time; and below the memory limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from your_ai.config import FIELDS, TYPES, TrainConfig, flag, to_yaml
from your_ai.files import packaged

DEMO = packaged("models", "demo")
LIMIT_GB = 0.3
SECONDS = 10.0  # of CPU time
PATIENCE_S = 60.0  # of waiting
SEARCHES_EVERY_S = 0.2  # walking through the processes of the machine takes milliseconds
LINE = 2000  # maximum characters of a message
GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
NUMBERS = [
    *(-1, 0, 10**12, 10**40, -(10**12), 1 << 63, 1 << 64, 0.5, 1e-320, 1e308),
    *("nan", "inf", "-inf", "1e400", "1_0", "0x10", "١٢", "", " ", "1e", "--", "9" * 5000),
]
TEXTS = ["", "\0", "\x1b[31mred", "a" * 5000, "a/" * 3000, "~nobody-here/x", "../" * 50, "\ud800"]


@dataclass(frozen=True)
class Case:
    """A command that is run in its own folder."""

    kind: str
    command: list[str]
    harmless: bool = False
    """Whether status 0 is also correct."""
    keeps: bool = False
    """Whether the run folder exists before the command."""


@dataclass(frozen=True)
class Verdict:
    """How a command ended."""

    case: Case
    faults: list[str]
    """What was wrong."""
    status: int | None
    stderr: str
    seconds: float
    """CPU time of all its processes."""
    peak_bytes: int
    """Highest memory of any one of its processes."""


def train(data: object, *more: str, model: object = "demo") -> list[str]:
    return [
        *("train", "--model", str(model), "--data", str(data), "--max-steps", "1"),
        *("--batch-size", "1", "--max-memory", str(LIMIT_GB), "--eval-every", "0", *more),
    ]


def nested(depth: int, rng: random.Random) -> str:
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    return opening * depth + "1" + closing * depth


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Draw any JSON value."""
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: rng.choice([0, -1, 1.5, 10**30, 1e308, float("nan"), float("inf")]),
        lambda: rng.choice(["", "x", "\x1b[2J", "\ud800", "\0", "k" * 100_000, "😀"]),
    ]
    if depth < 4:
        kinds += [
            lambda: [junk(rng, depth + 1) for _ in range(rng.randrange(3))],
            lambda: {rng.choice(["role", "content", "a", ""]): junk(rng, depth + 1)},
        ]
    return rng.choice(kinds)()


def damaged(value: Any, rng: random.Random) -> Any:
    """Put junk somewhere into a value."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value))
        return {**value, key: damaged(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], damaged(value[at], rng), *value[at + 1 :]]
    return junk(rng)


def bad_line(rng: random.Random) -> bytes:
    """Draw a line of a data file, which is usually invalid."""
    deep = rng.choice([65, 500, 3000, 20_000, 100_000])
    call = {"type": "function", "function": {"name": "f", "arguments": nested(deep, rng)}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = json.dumps(GOOD)
    lines: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(200),
        lambda: text[: rng.randrange(1, len(text))].encode(),
        lambda: text.encode("utf-16"),
        lambda: nested(deep, rng).encode(),
        lambda: b'{"text": ' + nested(deep, rng).encode() + b"}",
        lambda: json.dumps({**GOOD, "tools": nested(deep, rng)}).encode(),
        lambda: json.dumps({"messages": [GOOD["messages"][0], answer]}).encode(),
        lambda: b'{"text": "a", "text": "b"}',
        lambda: b'{"text": "a", "weight": ' + b"9" * 5000 + b"}",
        lambda: b'{"text": "a", "weight": %s}' % rng.choice([b"NaN", b"1e999", b"-1", b'"x"']),
        lambda: json.dumps({"k" * 3_000_000: 1}).encode(),
        lambda: json.dumps({"text": "x" * 17_000_000}).encode(),
        lambda: b'{"text": "\\ud800"}',
        lambda: b'{"text": ""}',
        lambda: b"[" + b"{}," * 2_000_000 + b"{}]",
        lambda: json.dumps(damaged({**GOOD, "weight": 1}, rng)).encode(),
        lambda: json.dumps(damaged({"prompt": "a", "completion": "b"}, rng)).encode(),
        lambda: json.dumps(
            damaged({"conversations": [{"from": "gpt", "value": "b"}]}, rng)
        ).encode(),
        lambda: json.dumps(damaged({**GOOD, "tools": [{"a": 1}]}, rng)).encode(),
    ]
    return rng.choice(lines)()


def data_case(folder: Path, rng: random.Random) -> Case:
    """A data file of random lines; harmless if all of them are valid rows."""
    good = json.dumps(GOOD).encode()
    lines = [bad_line(rng) if rng.random() < 0.7 else good for _ in range(rng.randrange(1, 4))]
    before = rng.choice([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\0"])
    path = folder / "rows.jsonl"
    path.write_bytes(before + rng.choice([b"\n", b"\r\n"]).join(lines) + rng.choice([b"", b"\n"]))
    if rng.random() < 0.2:
        command = ["plan", "--model", "demo", "--data", str(path), "--max-memory", str(LIMIT_GB)]
        return Case("data, planned", command, harmless=True)
    return Case("data", train(path, "--too-long", "split"), harmless=True)


def place_case(folder: Path, rng: random.Random) -> Case:
    """--data with a path that is not a data file."""

    def fifo() -> object:
        os.mkfifo(folder / "fifo")
        return folder / "fifo"

    def loop() -> object:
        (folder / "loop").symlink_to(folder / "loop")
        return folder / "loop"

    def directory() -> object:
        (folder / "d" / "train.jsonl").mkdir(parents=True)
        return folder / "d"

    def fifo_inside() -> object:
        (folder / "d").mkdir()
        os.mkfifo(folder / "d" / "train.jsonl")
        return folder / "d"

    def sparse() -> object:
        with (folder / "sparse.jsonl").open("wb") as file:
            file.truncate(rng.choice([20 << 20, 10 << 30]))
        return folder / "sparse.jsonl"

    def empty() -> object:
        (folder / "empty.jsonl").write_bytes(rng.choice([b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"]))
        return folder / "empty.jsonl"

    def crowded() -> object:
        (folder / "many").mkdir()
        for number in range(5000):
            (folder / "many" / f"{number}.txt").touch()
        return folder / "many"

    places = [
        *(fifo, loop, directory, fifo_inside, sparse, empty, crowded),
        *(lambda: "/dev/zero", lambda: "/dev/null", lambda: "/proc/self/mem", lambda: "/"),
        *(lambda: "missing", lambda: rng.choice([t for t in TEXTS if t not in ("\0", "\ud800")])),
    ]
    return Case("place of the data", train(rng.choice(places)()))


def flag_case(folder: Path, rng: random.Random) -> Case:
    """One setting with a value that may be invalid."""
    name = rng.choice(sorted(set(FIELDS) - {"supervise", "force", "report_to", "push_to", "run"}))
    value = rng.choice([str(n) for n in NUMBERS] + [t for t in TEXTS if t not in ("\0", "\ud800")])
    command = ["plan", "--model", "demo", "--data", "demo", "--max-memory", str(LIMIT_GB)]
    if TYPES[name] is bool:
        command = [*command, f"{flag(name)}={value}"]
    elif name in ("max_memory", "model", "data"):
        command = ["plan", "--model", "demo", "--data", "demo", flag(name), value]
    else:
        command = [*command, flag(name), value]
    return Case("flag", command, harmless=True)


def yaml_text(rng: random.Random) -> bytes:
    bomb = "a: &a [x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
    )
    name = rng.choice(sorted(FIELDS))
    value = rng.choice(
        [*NUMBERS, "[1, 2]", "{a: 1}", "2024-13-45", "!!binary x", "0x" + "f" * 5000]
    )
    texts = [
        bomb,
        "lora_targets: &t [q_proj]\nreport_to: *t\n",
        "batch_size: 1\nbatch_size: 2\n",
        "model: " + "[" * 3000 + "]" * 3000,
        "\n".join(" " * i + "a:" for i in range(400)),
        "# " + "x" * 2_000_000,
        "a: !!python/object/apply:os.system ['true']",
        "? [1]\n: 2\n",
        "'" + "k" * 100_000 + "': 1\n",
        '"\\e[31mkey": 1\n',
        'data: "a\\0b"\nmodel: demo\n',
        "max_steps: 9" + "9" * 5000,
        "{" * 1000,
        "- a\n- b\n",
        "- - - - - - - - - - - -",
        "\ta: 1",
    ]
    if rng.random() < 0.5:
        return f"model: demo\n{name}: {value}\n".encode()
    return rng.choice([t.encode() for t in texts] + [rng.randbytes(300), b"\xff\xfea\0"])


def yaml_case(folder: Path, rng: random.Random) -> Case:
    """--config with a file that may be invalid."""
    (folder / "c.yaml").write_bytes(yaml_text(rng))
    more = ["--max-memory", str(LIMIT_GB)] if rng.random() < 0.9 else []
    return Case("yaml", ["plan", "--config", str(folder / "c.yaml"), *more], harmless=True)


def run_case(folder: Path, rng: random.Random) -> Case:
    """A run whose config.yaml was edited."""
    path = folder / "runs" / "r"
    path.mkdir(parents=True)
    text = to_yaml(TrainConfig(model="demo", data="demo"))
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines) - 1)
    changes: list[Callable[[], bytes]] = [
        lambda: text[: rng.randrange(len(text))].encode(),
        lambda: "".join([*lines[:at], lines[at], *lines[at:]]).encode(),
        lambda: "".join([*lines[:at], f"{lines[at].split(':')[0]}: {rng.choice(NUMBERS)}\n",
                         *lines[at + 1 :]]).encode(),
        lambda: yaml_text(rng) + b"\n...\n",
    ]  # fmt: skip
    (path / "config.yaml").write_bytes(rng.choice(changes)())
    command = rng.choice([
        ["train", "--resume", "r", "--max-memory", str(LIMIT_GB), "--max-steps", "1"],
        ["eval", "r"], ["generate", "r", "--prompt", "Hi"], ["fuse", "r", "--to", "f"],
    ])  # fmt: skip
    return Case("config of a run", command, harmless=command[0] == "train", keeps=True)


TEMPLATES = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 9**(9**9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ messages|tojson(indent=999999999) }}",
    "{{ raise_exception('\\x1b[31mno') }}",
    "{{ ''.__class__.__mro__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if %}",
    "{{ messages[99].content.x.y }}",
    "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
]


def model_case(folder: Path, rng: random.Random) -> Case:
    """A model folder with a malicious tokenizer or template."""
    model = folder / "model"
    shutil.copytree(DEMO, model, ignore=shutil.ignore_patterns("data"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    config = json.loads((model / "config.json").read_text())

    def template() -> None:
        (model / "chat_template.jinja").write_text(rng.choice(TEMPLATES))

    def added_token() -> None:
        word = {**tokenizer["added_tokens"][-1], "content": "Hi"}
        word["id"] = rng.choice([768, 800, 40_000_000, 2**31])
        tokenizer["added_tokens"].append(word)
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))

    def vocabulary() -> None:
        word = rng.choice(sorted(tokenizer["model"]["vocab"]))
        tokenizer["model"]["vocab"][word] = rng.choice([768, 40_000_000, -1, "x"])
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))

    def end_token() -> None:
        config["eos_token_id"] = rng.choice([-1, 40_000_000, "x", [1, None], 1.5, 2**40])
        (model / "config.json").write_text(json.dumps(config))

    rng.choice([template, template, added_token, vocabulary, end_token])()
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(GOOD) + "\n" + json.dumps({"text": "Hi there"}) + "\n")
    return Case("model", train(rows, model=model), harmless=True)


def prompts_case(folder: Path, rng: random.Random) -> Case:
    """A file of bad prompts, for a run that never gets to answer."""
    path = folder / "p.jsonl"
    path.write_bytes(b"\n".join(bad_line(rng) for _ in range(2)))
    where = rng.choice([str(path), str(path), "/dev/zero", str(folder), "missing", "a" * 5000])
    (folder / "runs" / "r").mkdir(parents=True)
    (folder / "runs" / "r" / "config.yaml").write_text(to_yaml(TrainConfig(model="demo")))
    return Case("prompts", ["generate", "r", "--no-adapter", "--prompts", where,
                            "--max-tokens", "2"], harmless=True, keeps=True)  # fmt: skip


KINDS: list[Callable[[Path, random.Random], Case]] = [
    *(data_case, data_case, data_case, place_case, flag_case, flag_case),
    *(yaml_case, yaml_case, run_case, model_case, model_case, prompts_case),
]


def carry_out(number: int, seed: int) -> Verdict:
    """Make input `number` of a seed, run it on the command line, and judge how it ended."""
    rng = random.Random(f"{seed} {number}")
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        case = KINDS[number % len(KINDS)](folder, rng)
        return judge(case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(case: Case, folder: Path) -> Verdict:
    environment = {**os.environ, "YOUR_AI_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    worked = work_of_children()
    process = subprocess.Popen(
        [sys.executable, "-m", "your_ai", *case.command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    peak: list[int] = [0]
    watching = threading.Thread(target=watch, args=(process.pid, peak), daemon=True)
    watching.start()
    hangs = False
    try:
        _, error = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        hangs = True
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        _, error = process.communicate()
    watching.join()
    seconds = work_of_children() - worked
    text = error.decode(errors="replace")
    faults = faults_of(case, folder, process.returncode, text)
    if seconds > SECONDS or hangs:
        faults.append("hangs" if hangs else f"took {seconds:.0f} s")
    if peak[0] > LIMIT_GB * 1e9 and str(LIMIT_GB) in case.command:
        faults.append(f"used {peak[0] / 1e6:.0f} MB")
    return Verdict(case, faults, process.returncode, text, seconds, peak[0])


def work_of_children() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def faults_of(case: Case, folder: Path, status: int, text: str) -> list[str]:
    faults = []
    if status not in ((0, 1, 2) if case.harmless else (1, 2)):
        faults.append(f"ended with status {status}")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if status and (len(errors) != 1 or not text.endswith(errors[0] + "\n")):
        faults.append(f"printed {len(errors)} errors")
    if "Traceback" in text or "this is a bug in your_ai" in text:
        faults.append("a traceback, or an internal error")
    if any(len(line) > LINE for line in errors):
        faults.append("a message that is too long")
    if any(not (c.isprintable() or c == "\n") for c in "".join(errors)):
        faults.append("control characters")
    runs = folder / "runs"
    if status == 2 and not case.keeps and runs.exists() and any(runs.iterdir()):
        faults.append("a run folder is left")
    return faults


def watch(pid: int, peak: list[int]) -> None:
    """Record the highest memory of any process in a tree until it has ended."""
    searched_at, tree = 0.0, []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() - searched_at > SEARCHES_EVERY_S:
                tree, searched_at = process.children(recursive=True), time.monotonic()
            for one in (process, *tree):
                with contextlib.suppress(psutil.NoSuchProcess):
                    peak[0] = max(peak[0], one.memory_info().rss)
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--only", type=int, help="the number of one input")
    given = parser.parse_args()
    numbers = range(given.runs) if given.only is None else [given.only]
    verdicts = []
    for number in numbers:
        verdict = carry_out(number, given.seed)
        verdicts.append(verdict)
        if verdict.faults or given.only is not None:
            command = " ".join(verdict.case.command)[:300]
            print(f"{number} {verdict.case.kind}: {'; '.join(verdict.faults)}\n  {command!r}")
            print(f"  status {verdict.status}: {verdict.stderr[-600:]!r}", flush=True)
    statuses = {
        s: sum(v.status == s for v in verdicts) for s in sorted({v.status for v in verdicts})
    }
    slowest = max(verdicts, key=lambda v: v.seconds)
    largest = max(verdicts, key=lambda v: v.peak_bytes)
    print(
        f"{len(verdicts)} inputs, {sum(bool(v.faults) for v in verdicts)} ended badly; statuses "
        f"{statuses}; slowest {slowest.seconds:.1f} s ({slowest.case.kind}); most memory "
        f"{largest.peak_bytes / 1e6:.0f} MB ({largest.case.kind})"
    )
    sys.exit(any(v.faults for v in verdicts))


if __name__ == "__main__":
    main()
