"""Random runs under random memory limits, each measured from outside: is the limit kept?

    python tests/budget.py --seed 1 --runs 60

Every case is a pure function of its seed: a model with random weights, rows of up to 4,096 tokens
whose lengths differ by up to a factor of 50, an adapter, an optimizer, a plan, and a limit between
one and three times the minimum that `your_ai plan` names, in a third of the cases exactly that. The
memory of the training process and of its children is read every 5 ms. A case fails if the memory
exceeds the limit, if a limit that `plan` named is refused, if a signal kills the training process,
or if the run fails. The exit status is the number of failed cases, at most 100.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
BLAS = Path("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3")  # faster, if installed
EVERY_S = 0.005
SEARCHES_EVERY_S = 0.1  # walking through the processes of the machine takes milliseconds
PATIENCE_S = 900.0
MB = 10**6
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "mistral", "gemma3_text", "qwen3_moe")
MOST_TOKENS = 4096
# Words of the longest row by the hidden size of the model; 2,100 are just under 4,096 tokens.
LONGEST_WORDS = {
    64: (60, 150, 300, 450, 1000, 2100),
    128: (60, 150, 300, 450, 1000, 2100),
    256: (60, 150, 300, 450, 1000),
    512: (60, 150),
}
# What is trained besides adapters of one rank.
MORE: tuple[tuple[str, ...], ...] = (
    *((),) * 7,
    ("--train", "embeddings,head"),
    ("--add-tokens", "<one>,<two>"),
    ("--lora-rank", "4,q_proj=32"),
)
SIGNAL = re.compile(r"killed by (SIG[A-Z]+)")
LEAST = re.compile(r"at least ([0-9.]+) GB is needed")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    seed: int
    architecture: str
    bits: int | None
    model: dict[str, int]
    """Arguments of tests.conftest.make_model."""
    words: tuple[int, ...]
    """Number of words in each training row."""
    pairs: bool
    """Whether rows are pairs of prompt and completion, rather than texts."""
    flags: tuple[str, ...]
    room: float
    """The limit as a multiple of the minimum."""


@dataclass(kw_only=True)
class Outcome:
    """The memory that a case used, in MB, and how it ended."""

    case: Case
    limit_mb: float = 0.0
    held_mb: float = 0.0
    """Peak of the training process and its children, as sampled."""
    most_mb: float = 0.0
    """High-water mark of the training process alone, from the system."""
    estimate_mb: float = 0.0
    """Estimate of the last plan."""
    peak_mb: float = 0.0
    """Peak of MLX's active memory."""
    own_mb: float = 0.0
    """Peak of the process as it sees itself."""
    beside_mb: float = 0.0
    """Peak of the process's memory outside MLX's buffers."""
    samples: int = 0
    plans: list[str] = field(default_factory=list)
    seconds: float = 0.0
    deaths: int = 0
    signals: list[str] = field(default_factory=list)
    """Those that killed the training process."""
    fault: str = ""
    """Why the case failed; empty if it did not."""


def case_of(seed: int) -> Case:
    """Draw the case of a seed. The same seed gives the same case."""
    rng = random.Random(seed)
    pick = rng.choice
    architecture = pick(ARCHITECTURES)
    moe = architecture == "qwen3_moe"
    hidden = pick((64, 128, 256, 512, 1024))
    heads = max(2, hidden // 64)
    model = {
        "hidden_size": hidden,
        "num_hidden_layers": rng.randint(2, 4 if hidden == 1024 else 8),
        "intermediate_size": hidden * pick((2, 3, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": pick([n for n in (1, 2, heads) if heads % n == 0]),
        "head_dim": hidden // heads,
        "vocab_size": pick((768, 4000, 16000) if hidden > 256 else (768, 4000, 32000)),
    }
    quantize = rng.random() < 0.12
    bits = None if quantize or rng.random() < 0.15 else pick((4, 4, 8))
    longest = pick(LONGEST_WORDS[min(hidden, 512)])
    rows = rng.randint(6, 16)
    words = [max(2, int(longest / 50 ** rng.random())) for _ in range(rows)]
    words[0], words[-1] = longest, max(2, longest // 50)
    rng.shuffle(words)
    dora = not moe and rng.random() < 0.58  # half of all cases
    dropout = not moe and rng.random() < 0.15
    targets = pick(("q_proj", "q_proj,v_proj", "all-linear", "all-linear"))
    flags = [
        *("--max-steps", str(rng.randint(2, 5)), "--batch-size", str(rng.randint(1, 5))),
        *("--grad-accumulation", str(pick((1, 1, 2))), "--lora-targets", targets),
        *("--lora-layers", pick(("all", "all", "1", "2"))),
        *("--lora-rank", str(min(hidden, pick((4, 8, 16, 16, 64, 128, 512))))),
        *("--optimizer", pick(("adamw", "adamw", "adam", "sgd", "adafactor", "muon", "lion"))),
        *("--plan", pick(("auto", "auto", "auto", "auto", "fused", "staged", "streamed"))),
        *("--reload-interval", str(pick((0, 0, 1, 2)))),
        *("--eval-every", str(pick((0, 1, 2))), "--save-every", str(pick((0, 1, 2)))),
        *("--samples", str(pick((0, 0, 1, 2))), "--seed", str(seed % 1000)),
    ]
    flags += ["--use-dora"] if dora else []
    flags += ["--lora-dropout", "0.1"] if dropout else []
    flags += ["--exact-match"] if rng.random() < 0.2 else []
    longest_row = MOST_TOKENS
    if rng.random() < 0.2:
        longest_row = pick((1024, 2048, MOST_TOKENS))
        flags += ["--packing", "--too-long", "truncate"]
    flags += ["--max-seq-length", str(longest_row)]
    cache = pick(("off", "off", "off", "memory", "disk"))
    flags += ["--prefix-cache", cache]
    flags += ["--quantize", pick(("4", "8"))] if quantize else []
    if "fused" not in flags and rng.random() < 0.2:
        flags.append("--spill")
    room = pick((1.0, 1.0, 1.0, 1.05, 1.15, 1.3, 1.6, 2.2, 3.0))
    more = pick(MORE)
    if more and more[0] != "--lora-rank":  # nothing can be cached below a trained embedding
        flags[flags.index("--prefix-cache") + 1] = "off"
    flags += more
    return Case(
        seed=seed,
        architecture=architecture,
        bits=bits,
        model=model,
        words=tuple(words),
        pairs=rng.random() < 0.4,
        flags=tuple(flags),
        room=room,
    )


def write_data(case: Case, folder: Path) -> None:
    rng = random.Random(case.seed + 1)
    known = "please send three red lamps to the shop in Oslo by Friday and tell me when".split()

    def row(count: int) -> dict[str, str]:
        words = [rng.choice(known) for _ in range(count)]
        if not case.pairs:
            return {"text": " ".join(words)}
        cut = rng.randint(1, count - 1)
        return {"prompt": " ".join(words[:cut]), "completion": " ".join(words[cut:])}

    folder.mkdir(parents=True)
    rows = {
        "train": [row(count) for count in case.words],
        "valid": [row(count) for count in case.words[:3]],
        "test": [
            {"prompt": f"please send {rng.randint(2, 9)} lamps", "completion": "three red lamps"}
            for _ in range(3)
        ],
    }
    for name, found in rows.items():
        text = "".join(json.dumps(r) + "\n" for r in found)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def run_case(case: Case, folder: Path, before: str = "", limit_gb: float | None = None) -> Outcome:
    """Run a case in `folder`. before: Python code that each of its processes runs first."""
    from tests.conftest import make_model, write_site
    from your_ai.memory import probe

    found = Outcome(case=case)
    began = time.perf_counter()
    make_model(folder / "model", case.architecture, case.bits, case.seed, **case.model)
    write_data(case, folder / "data")
    environment = os.environ | {"YOUR_AI_HOME": str(folder / "home")}
    environment["OPENBLAS_NUM_THREADS"] = environment.get("OPENBLAS_NUM_THREADS", "1")
    if BLAS.exists():
        environment["LD_PRELOAD"] = str(BLAS)
    also = filter(None, [str(write_site(folder / "site", before)), os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *also])

    def call(command: str, limit_gb: float, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "your_ai", command),
            *("--model", str(folder / "model"), "--data", str(folder / "data")),
            *case.flags,
            *("--max-memory", f"{limit_gb:g}", *more),
        ]

    if limit_gb is None:
        asked = subprocess.run(
            call("plan", 0.02), cwd=folder, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        least = LEAST.search(asked.stderr)
        if least is None:
            found.fault = f"plan names no minimum: {asked.stderr.strip()[-300:]}"
            return found
        limit_gb = math.ceil(1000 * float(least[1]) * case.room) / 1000
    found.limit_mb = 1000 * limit_gb
    with (folder / "out.log").open("w") as output:
        process = subprocess.Popen(
            call("train", limit_gb, "--run", "r"),
            cwd=folder, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        watch(process, found)
    read_events(folder / "runs" / "r" / "events.jsonl", found)
    if probe.is_card():  # seen from outside, a process has nothing of the card's memory
        found.held_mb, found.most_mb = found.own_mb, found.own_mb
    found.seconds = time.perf_counter() - began
    last = ((folder / "out.log").read_text().strip().splitlines() or [""])[-1]
    if process.returncode != 0:
        found.fault = f"exit {process.returncode}: {last[-400:]}"
    elif max(found.held_mb, found.most_mb) > found.limit_mb:
        found.fault = "above the limit"
    elif found.signals:
        found.fault = f"killed by {', '.join(found.signals)}"
    elif found.samples == 0:
        found.fault = "no sample was taken"
    return found


def watch(process: subprocess.Popen, found: Outcome) -> None:
    """Measure the memory of the training processes below `process` until it ends."""
    root, trained = psutil.Process(process.pid), None
    deadline = time.monotonic() + PATIENCE_S
    searched_at = 0.0
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
        searching, children = time.monotonic() - searched_at > SEARCHES_EVERY_S, []
        if searching:
            searched_at = time.monotonic()
            if trained is None or not trained.is_running():
                trained = training_process(root)
            else:
                with contextlib.suppress(psutil.Error):
                    children = [c for c in trained.children() if is_ours(c, trained)]
        if trained is not None:
            own = resident_mb(trained.pid, found)
            if own:
                found.samples += 1
                theirs = sum(private_mb(child.pid) for child in children)
                found.held_mb = max(found.held_mb, own + theirs)
        time.sleep(EVERY_S)
    process.wait()


def is_ours(child: psutil.Process, trained: psutil.Process) -> bool:
    """Whether a child is a Python process, and not one that is about to run MLX's compiler.

    Until the compiler starts, such a child shows its parent's memory and command line.
    """
    same = child.exe() == os.path.realpath(sys.executable)
    return same and child.cmdline() != trained.cmdline()


def training_process(root: psutil.Process) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        for child in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "your_ai.training" in child.cmdline():
                    return child
    return None


def resident_mb(pid: int, found: Outcome) -> float:
    """Return the memory of the training process; its high-water mark goes to `found`."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    sizes = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", text, re.MULTILINE))
    found.most_mb = max(found.most_mb, int(sizes.get("VmHWM", 0)) * 1024 / MB)
    return int(sizes.get("VmRSS", 0)) * 1024 / MB


def private_mb(pid: int) -> float:
    """Return the memory of a child that its parent does not share."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return (
        sum(int(size) for size in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.M)) * 1024 / MB
    )


def read_events(path: Path, found: Outcome) -> None:
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            event: dict[str, Any] = json.loads(line)
            kind = event.get("kind") or event.get("event") or event.get("type")
            if kind == "planned":
                kept = f"/kept {event['kept']}" if event["kept"] else ""
                found.plans.append(f"{event['plan']}/{event['micro_tokens']}{kept}")
                found.estimate_mb = event["estimate_bytes"] / MB
            elif kind == "died":
                found.deaths += 1
                found.signals += SIGNAL.findall(event["reason"])
            elif kind == "step":
                found.peak_mb = max(found.peak_mb, (event.get("peak_bytes") or 0) / MB)
                found.own_mb = max(found.own_mb, (event.get("highest_bytes") or 0) / MB)
            if kind in ("step", "gauges") and event.get("active_bytes"):
                mlx = event["active_bytes"] + event["cache_bytes"]
                found.beside_mb = max(found.beside_mb, (event["process_bytes"] - mlx) / MB)


def line_of(found: Outcome) -> str:
    case = found.case
    size = "x".join(str(case.model[n]) for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
    most = max(found.held_mb, found.most_mb)
    share = f"{100 * most / found.limit_mb:.0f}%" if found.limit_mb else "-"
    live = found.peak_mb + found.beside_mb  # MLX's cache fills what the limit leaves
    error = f"{100 * (found.estimate_mb / live - 1):+.0f}%" if found.estimate_mb and live else "-"
    return (
        f"{case.seed:>6} {'FAULT' if found.fault else 'ok':5} limit {found.limit_mb:6.0f} most "
        f"{most:6.0f} {share:>5} est {error:>5} mlx {found.peak_mb:.0f} beside "
        f"{found.beside_mb:.0f} {found.seconds:5.0f}s deaths {found.deaths} "
        f"{','.join(found.plans):24} {case.architecture} {size} {case.bits or 0}bit "
        f"{max(case.words)}w x{case.room} {' '.join(case.flags)} {found.fault}"
    )


def main() -> int:
    from your_ai.files import replace_text

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time")
    parser.add_argument("--json", help="write every outcome to this file, as soon as it is there")
    parser.add_argument("--folder", help="where the folders of runs are made and removed")
    parser.add_argument("--before", help="Python code that each process runs first")
    given = parser.parse_args()

    outcomes: list[Outcome] = []
    writing = Lock()

    def one(seed: int) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="budget-", dir=given.folder) as place:
            case = case_of(seed)
            try:
                found = run_case(case, Path(place), given.before or "")
            except Exception as error:  # the other cases continue
                found = Outcome(case=case, fault=f"{type(error).__name__}: {error}")
        print(line_of(found), flush=True)
        with writing:
            outcomes.append(found)
            if given.json:
                text = json.dumps([asdict(each) for each in outcomes], indent=1)
                replace_text(Path(given.json), text)
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(one, range(given.seed, given.seed + given.runs)))
    faults = [found for found in outcomes if found.fault]
    above = [found for found in faults if found.fault == "above the limit"]
    print(f"{len(outcomes)} runs, {len(above)} above the limit, {len(faults)} failed in total")
    return min(100, len(faults))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
