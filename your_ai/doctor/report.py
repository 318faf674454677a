"""`your_ai doctor --report FILE`: what a machine does that nobody has tried, as one JSON file.

The parts come in the order of what they tell, and the last ones are dropped when time runs out.
Each runs in its own processes, which a driver may kill, and which may hang. The file has nothing
that tells who owns the machine: no paths, and no names of users, hosts or runs.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import math
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from your_ai import __version__
from your_ai.doctor import selftest
from your_ai.doctor.selftest import (
    Failed,
    OutOfTime,
    Part,
    ReportLine,
    asked,
    at_once,
    command,
    done,
)
from your_ai.errors import UserError
from your_ai.files import remedy_of
from your_ai.gates.text import counted
from your_ai.run import events
from your_ai.run.folder import RunFolder

MINUTES, QUICK_MINUTES = 14.0, 2.9
DIGITS = 4  # of a figure
# Cases that compare a real with an estimated peak: plan, bits of the weights, tokens of a row, and
# the dtype on a GPU.
PEAKS = [
    (plan, *case)
    for case in (("4", "256", "bfloat16"), ("0", "256", "float16"), ("4", "1024", "bfloat16"))
    for plan in ("fused", "staged", "kept", "streamed")
]
PEAK_S = 60.0  # of one case
WAYS = ("fused", "staged", "streamed", "kept", "resident")  # the plans that `plain` compares
DEMO_STEPS = 6
BUDGET_RUNS = 10
BENCH = {"dtype": "bfloat16", "plan": "fused,staged,streamed", "against": "mlx-lm"}
# What is measured for a shape: on a GPU, and on a CPU, which takes too long for it.
BENCHES = {
    "small": ({"shape": "small", "seq_len": 512}, {"shape": "tiny", "seq_len": 64}),
    "qwen2.5-0.5b": ({"shape": "qwen2.5-0.5b", "seq_len": 512}, {"shape": "narrow", "seq_len": 16}),
}
LOSSES_AGREE = 0.05  # of our fused plan and mlx-lm, relative
ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"(?<![\w.])~?(?:/+[^\s/'\",:;()]+)+/?")
FEWEST_LETTERS = 3  # of a name that is replaced: one of one letter would be found in every word


# The parts that are more than one check


def compare_with_plain(
    dtype: str, folder: Path, model: dict[str, Any], deadline: float
) -> dict[str, Any]:
    if model.get("device") != "cuda":
        return asked("plain", folder, deadline, dtype)
    # Each plan in its own process, because each compiles kernels.
    found = [*at_once(lambda way: asked("plain", folder / way, deadline, dtype, way), WAYS)]
    figures = {name: size for each in found for name, size in each["figures"].items()}
    text = "; ".join(each["measured"] for each in found)
    return {"ok": all(each["ok"] for each in found), "measured": text, "figures": figures}


def train_demo(
    name: str, first: str, folder: Path, model: dict[str, Any], deadline: float
) -> dict[str, Any]:
    """Train the demo model with a preset, shortened; `first`: a preset that it needs, or none."""
    for preset in filter(None, (first, name)):
        run = RunFolder(folder / "runs" / {"demo-reward": "rm"}.get(preset, preset))
        settings = {"config": preset, "run": run.path.name, "max_steps": DEMO_STEPS,
                    "eval_every": 0, "samples": 0}  # fmt: skip
        done(command("train", settings), folder, preset, deadline)
    logged = [record.event for record in events.tail(run.events)[0]]
    steps = events.of(events.Step, logged)
    deaths = [event.reason for event in events.of(events.Died, logged)]
    losses = [step.loss for step in steps]
    figures = {
        "losses": losses,
        "seconds": [step.seconds for step in steps],
        "mlx_peak_bytes": max((step.peak_bytes or 0 for step in steps), default=0),
        "process_bytes": max((step.process_bytes or 0 for step in steps), default=0),
        "metrics": steps[-1].metrics if steps else {},
        "deaths": deaths,
    }
    if not steps:
        raise Failed("the run ended without a step")
    ok = len(steps) == DEMO_STEPS and all(map(math.isfinite, losses)) and not deaths
    text = f"{counted(len(steps), 'step')}, loss {losses[0]:.4f} to {losses[-1]:.4f}, "
    text += f"{min(step.seconds for step in steps):.2f} s for the fastest"
    text += f"; the training process died: {'; '.join(deaths)}" if deaths else ""
    return {"ok": ok, "measured": text, "figures": figures}


def compare_peaks(folder: Path, model: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Compare real with estimated peaks, each in its own process; a case that fails is named."""

    def case_of(plan: str, bits: str, tokens: str, dtype: str) -> dict[str, Any]:
        if time.monotonic() > deadline - selftest.LEAST_S:
            return {"ok": None, "measured": "not done", "figures": {}}
        until = deadline if on_cuda else min(deadline, time.monotonic() + PEAK_S)
        try:
            place = folder / f"{plan}-{bits}-{tokens}"
            return asked("peak", place, until, plan, bits, tokens, dtype)
        except Failed as failure:
            return {"ok": False, "measured": str(failure), "figures": {}}
        except OutOfTime:
            return {"ok": None, "measured": "not finished", "figures": {}}

    on_cuda = model.get("device") == "cuda"
    outcomes = [*(at_once if on_cuda else map)(lambda case: case_of(*case), PEAKS)]
    names = [f"{plan} {bits} bits {tokens} tokens" for plan, bits, tokens, _ in PEAKS]
    found = {name: each["figures"] for name, each in zip(names, outcomes, strict=True)}
    texts = [f"{name} {each['measured']}" for name, each in zip(names, outcomes, strict=True)]
    results = {each["ok"] for each in outcomes}
    text = f"real by estimated peaks of {len(found)} cases: {', '.join(texts)}"
    ok = False if False in results else None if None in results else True
    return {"ok": ok, "measured": text, "figures": found}


def bench_shape(name: str, folder: Path, model: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Compare with mlx-lm on a shape, or on a smaller one on the CPU."""
    on_gpu, on_cpu = BENCHES[name]
    settings = on_cpu if model["device"] == "cpu" else on_gpu
    given = [*command("bench", {**settings, **BENCH, "steps": 3}), "--json"]
    rows = json.loads(done(given, folder, f"bench-{name}", deadline))["rows"]
    by_name = {row["contender"]: row for row in rows}
    ours, theirs = by_name["fused"]["losses"][-1], by_name["mlx-lm"]["losses"][-1]
    ok = math.isclose(ours, theirs, rel_tol=LOSSES_AGREE)
    shown = (
        f"{row['contender']} {row['seconds_median']:.3f} s/step {row['peak_mb']:.0f} MB"
        for row in rows
    )
    smaller = f" in place of {name} on the CPU" if settings is on_cpu else ""
    text = f"{settings['shape']}{smaller}, {BENCH['dtype']}, {settings['seq_len']} tokens: "
    text += ", ".join(shown)
    text += "" if ok else f"; the last losses differ: {ours:.4f} and {theirs:.4f}"
    measured = [{name: each for name, each in row.items() if each is not None} for row in rows]
    return {"ok": ok, "measured": text, "figures": {**settings, "rows": measured}}


def watch_budgets(folder: Path, model: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Watch random runs under random limits from outside, with tests/budget.py of a checkout."""
    arguments = [str(ROOT / "tests" / "budget.py"), "--runs", str(BUDGET_RUNS), "--seed", "1"]
    arguments += ["--json", str(folder / "budget.json"), "--folder", str(folder)]
    arguments += ["--jobs", str(BUDGET_RUNS)] if model.get("device") == "cuda" else []
    stopped: Failed | OutOfTime | None = None
    try:
        done(arguments, folder, "harness", deadline)
    except (Failed, OutOfTime) as error:  # its status is the number of cases that failed
        if not (folder / "budget.json").exists():
            raise
        stopped = error
    cases = json.loads((folder / "budget.json").read_text(encoding="utf-8"))
    faults = [f"{case['case']['seed']}: {case['fault']}" for case in cases if case["fault"]]
    left = BUDGET_RUNS - len(cases)
    faults += [str(stopped)] if left and isinstance(stopped, Failed) else []
    names = ("limit_mb", "held_mb", "most_mb", "estimate_mb", "peak_mb", "beside_mb", "plans",
             "seconds", "deaths", "fault")  # fmt: skip
    figures = {str(case["case"]["seed"]): {name: case[name] for name in names} for case in cases}
    closest = max(max(c["held_mb"], c["most_mb"]) / (c["limit_mb"] or 1) for c in cases)
    text = f"{counted(len(cases), 'run')}, at most {closest:.0%} of the limit in the process"
    text += f"; not finished: {left}" if left else ""
    text += f"; failed: {'; '.join(faults)}" if faults else ""
    return {"ok": False if faults else None if left else True, "measured": text, "figures": figures}


def has_harness() -> bool:
    """Return whether tests/budget.py can run: it reads /proc, and is in a checkout only."""
    there = (ROOT / "tests" / "budget.py").is_file() and (ROOT / "pyproject.toml").is_file()
    needed = ("pytest", "hypothesis")
    return sys.platform == "linux" and there and all(map(importlib.util.find_spec, needed))


def parts_of(quick: bool) -> list[Part]:
    """The parts, the most informative first."""

    def plain(dtype: str) -> Part:
        return Part(dtype, partial(compare_with_plain, dtype), 120.0)

    first = [Part("counters"), plain("float32"), plain("bfloat16")]
    dpo, grpo = (Part(name, partial(train_demo, f"demo-{name}", "")) for name in ("dpo", "grpo"))
    if quick:
        return [*first, Part("budget"), dpo, Part("checkpoint")]
    return [
        *(*first, Part("tiles"), dpo, grpo),
        Part("soft", partial(train_demo, "demo-soft", "demo-reward"), 120.0),
        *(Part("checkpoint"), Part("budget"), plain("float16")),
        Part("peaks", compare_peaks, 150.0),
        *(Part(f"bench {name}", partial(bench_shape, name), 120.0, True) for name in BENCHES),
        *(Part("gradients"), Part("reload"), Part("speed", times=True)),
        *([Part("budget runs", watch_budgets, 240.0)] if has_harness() else []),
    ]


def run_report(parts: Sequence[Part], minutes: float) -> Iterator[ReportLine]:
    """Describe the machine, then run the parts, and yield each result, cleaned.

    Everything is in a temporary folder, which is removed even if the caller stops early.
    """
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="your_ai-report-") as place:
        folder = Path(place).resolve()
        names = ["machine", "model", *(part.name for part in parts)]
        yield cleaned_line(selftest.line_of(Part("machine"), folder, until, {}))
        names.remove("machine")
        for line in selftest.with_model(parts, folder, until):
            names.remove(line.check)
            yield cleaned_line(line)
        for name in names:
            yield ReportLine(name, None, "not done: the model could not be made")


# The file


def document(lines: Sequence[ReportLine], seconds: float, limit_minutes: float) -> dict[str, Any]:
    """The content of the file."""
    known = {line.check: line.figures for line in lines}.get("machine", {})
    machine = {"system": platform.system(), "python": platform.python_version(), **known}
    rows = [
        {**asdict(line), "figures": {} if line.check == "machine" else line.figures}
        for line in lines
    ]
    return {
        "your_ai": __version__,
        "date": date.today().isoformat(),
        "machine": machine,
        "seconds": seconds,
        "limit_minutes": limit_minutes,
        "failed": [line.check for line in lines if line.ok is False],
        "dropped": [line.check for line in lines if line.ok is None],
        "parts": rows,
    }


def text_of(content: dict[str, Any]) -> str:
    """The file as text, with one line for each part."""
    fields = {name: json.dumps(value) for name, value in rounded(content).items()}
    parts = ",\n  ".join(json.dumps(part) for part in rounded(content["parts"]))
    fields["parts"] = f"[\n  {parts}\n ]"
    body = ",\n".join(f' "{name}": {value}' for name, value in fields.items())
    return f"{{\n{body}\n}}\n"


def rounded(value: Any) -> Any:
    """Numbers with few digits; None for those that JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [*map(rounded, value)] if isinstance(value, list | tuple) else value


def check_place(path: Path) -> None:
    """Check that a new file can be written, before the minutes are spent. Raises UserError."""
    try:
        if path.is_dir():
            raise UserError(f"--report {path}: is a folder; name a file")
        if path.exists() or path.is_symlink():
            raise UserError(f"--report {path}: exists already; name another file, or remove it")
        if not path.parent.is_dir():
            raise UserError(f"--report {path}: there is no folder {path.parent}; create it")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"--report {path}: cannot be written ({error.strerror}); {remedy_of(error)}, or name "
        "another folder"
    )


# Nothing private


def cleaned_line(line: ReportLine) -> ReportLine:
    return replace(line, measured=cleaned(line.measured), figures=cleaned(line.figures))


def cleaned(value: Any) -> Any:
    """A text, or the texts in a value, without paths and names of the user or the machine."""
    if isinstance(value, str):
        for place in private_places():
            value = re.sub(re.escape(place) + r"[^'\",:;\n]*", "PATH", value)
        value = PATH.sub("PATH", value)
        for name in private_names():
            value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "NAME", value, flags=re.IGNORECASE)
        return value
    if isinstance(value, dict):
        return {name: cleaned(each) for name, each in value.items() if name != "folder"}
    return [*map(cleaned, value)] if isinstance(value, list | tuple) else value


def private_places() -> Iterable[str]:
    """Folders whose paths may have spaces, the longest first."""
    found = {Path.home(), Path.cwd(), ROOT, Path(sys.prefix), Path(tempfile.gettempdir())}
    texts = {str(place) for path in found for place in (path, path.resolve())}
    return sorted((text for text in texts if text != "/"), key=len, reverse=True)


def private_names() -> Iterable[str]:
    """Names of the user, of the home folder and of this machine; short ones are left out."""
    host = socket.gethostname()
    names = {host, host.split(".")[0], Path.home().name}
    with contextlib.suppress(OSError, KeyError, ImportError):  # this user has no name
        names.add(getpass.getuser())
    return sorted((name for name in names if len(name) >= FEWEST_LETTERS), key=len, reverse=True)
