"""`your_ai plan`: its output, and its errors of one line."""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.budget import LEAST
from tests.conftest import TINY, chat, events_of, make_model, train, write_rows
from tests.fault.processes import call
from tests.memory.test_plan import WORKLOAD
from your_ai.memory import budget, probe
from your_ai.memory.estimate import Estimate
from your_ai.memory.limit import MachineMemory
from your_ai.memory.plan import Option
from your_ai.memory.workload import Plan, RolloutSizes
from your_ai.run import events
from your_ai.training import planned as planned_runs
from your_ai.training.preview import disk_bytes

GB = 10**9
ENOUGH = 1_000_000  # GB, more than any machine has
PLAN = set(
    "plan rows_at_once spill text rank blocks components phases mlx_peak_bytes process_peak_bytes "
    "needed_bytes step_cost seconds_a_step read_bytes_a_micro_batch teacher_read_bytes".split()
)
COMPONENTS = set(
    "weights,adapters,gradients,optimizer,optimizer work,norms,block inputs,kept outputs,"
    "activations,block work,head chunk,prefix cache,graphs,cache,python".split(",")
)


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    """A machine with 16 GB, half of it free, and a fresh process. Nothing is measured."""
    memory = MachineMemory(ram_bytes=16 * GB, available_bytes=8 * GB)
    monkeypatch.setattr(probe, "machine", lambda: memory)
    monkeypatch.setattr(budget, "python_bytes", lambda: 140_000_000)
    monkeypatch.setattr(planned_runs, "measure_costs", lambda *_, **__: None)


def files() -> set[str]:
    """The files in the folder of the test, without its store."""
    return {str(path) for path in Path().rglob("*") if path.parts[0] != "home"}


def shown(capsys, *arguments: object) -> str:
    """The output of `your_ai plan` with single spaces; checks that it changes no file."""
    before = files()
    status, out, error = call(capsys, "plan", *map(str, arguments))
    assert status == 0
    assert all(line.startswith("note: ") for line in error.splitlines())
    assert files() == before
    return " ".join(out.split())


def planned(capsys, *arguments: object) -> dict[str, Any]:
    """The JSON output of `your_ai plan`."""
    return json.loads(shown(capsys, *arguments, "--json"))


def refused(capsys, *arguments: object) -> str:
    """The line on stderr if `your_ai plan` fails; checks that it changes no file."""
    before = files()
    status, out, error = call(capsys, "plan", *map(str, arguments))
    error = "".join(x for x in error.splitlines(True) if not x.startswith("note: "))
    assert (status, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", error)
    assert files() == before
    return error


# Output


def test_plan_without_options_shows_the_demo(capsys):
    text = shown(capsys)
    assert text.startswith("limit 7.6 GB: ")
    assert re.search(r"chosen fused, micro-batches of \d+ x \d+ tokens \d+ MB \d+ MB 1\.00", text)
    assert re.search(r"estimated peak \d+", text)
    assert "smaller " in text
    assert "larger " not in text
    assert "reads " not in text


def test_json_output_is_one_object(capsys):
    status, out, error = call(capsys, "plan", "--json")
    assert (status, error, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    time = {"seconds_by_term", "seconds_note", "steps", "measured"}
    limit = {"limit_bytes", "limit_reason", "notices"}
    assert found.keys() == PLAN | limit | time | {"smaller", "larger"}
    assert "nothing was measured" in found["seconds_note"]
    assert found["limit_bytes"] == 8 * GB * 95 // 100
    assert found["notices"] == []
    assert found["larger"] is None
    assert found["smaller"].keys() == PLAN


def test_components_add_up_to_the_peak(capsys):
    found = planned(capsys, "--plan", "staged")
    for option in (found, found["smaller"]):
        components = option["components"]
        assert components.keys() == COMPONENTS
        assert sum(components.values()) == option["process_peak_bytes"]
        beside = components["python"] + components["graphs"] + components["cache"]
        assert option["mlx_peak_bytes"] == option["process_peak_bytes"] - beside
        assert option["process_peak_bytes"] <= option["needed_bytes"] <= found["limit_bytes"]
        assert option["plan"] == "staged"
        assert option["read_bytes_a_micro_batch"] > 0
        assert 1 < option["step_cost"] <= 1.5
    assert found["smaller"]["needed_bytes"] < found["needed_bytes"]


def test_streamed_plan_shows_the_bytes_it_reads(capsys):
    text = shown(capsys, "--plan", "streamed")
    assert re.search(r"reads [\d.]+ [kM]B of the model's files per micro-batch", text), text
    assert "weights of 3 blocks in memory" in text  # of 4


def test_sequence_lengths_come_from_the_data(capsys, tiny_model, data_folder):
    """The rows of data_folder have at most 160 tokens."""
    options = ("--model", tiny_model, "--data", data_folder, "--lora-layers", 2)
    found = planned(capsys, *options, "--batch-size", 2)
    assert re.fullmatch(r"fused, micro-batches of 2 x (64|96|128|160) tokens", found["text"])


def test_shown_plan_is_the_one_that_training_uses(capsys, configure):
    settings = {"batch_size": 8, "plan": "staged", "max_steps": 1, "lora_layers": 2}
    run = train(configure(**settings))
    (event,) = events_of(run, events.Planned)
    config = run.read_config()
    options = ("--batch-size", 8, "--plan", "staged", "--lora-layers", 2, "--lora-rank", 4)
    found = planned(capsys, "--model", config.model, "--data", config.data, *options)
    assert event.text.startswith(found["text"])
    held = found["process_peak_bytes"] - found["components"]["python"]
    assert 0 < held < event.estimate_bytes


@pytest.mark.parametrize("tokens", [1, 128, 1000])
def test_seq_len_replaces_reading_the_data(capsys, tiny_model, tokens):
    options = ("--model", tiny_model, "--data", "nowhere", "--seq-len", tokens)
    found = planned(capsys, *options, "--batch-size", 3)
    assert found["text"] == f"fused, micro-batches of 3 x {tokens} tokens"
    assert found["rows_at_once"] == 3


def test_max_seq_length_is_used_without_data(capsys, tiny_model):
    found = planned(capsys, "--model", tiny_model, "--max-seq-length", 300)
    assert found["text"] == "fused, micro-batches of 4 x 300 tokens"


def test_shape_option_needs_no_model_folder(capsys):
    found = planned(capsys, "--shape", "tiny", "--max-seq-length", 300)
    assert found["text"] == "fused, micro-batches of 4 x 300 tokens"
    assert found["components"]["weights"] < planned(capsys, "--shape", "tiny", "--bits", 0)[
        "components"
    ]["weights"] / 3  # fmt: skip


def test_longest_row_of_a_limit_is_one_that_plan_accepts(capsys):
    (found,) = planned(capsys, "--shape", "tiny", "--longest", "--max-memory", 1.5)
    tokens, gb = found["tokens"], ("--max-memory", 1.5)
    assert planned(capsys, "--shape", "tiny", "--seq-len", tokens, *gb, "--batch-size", 1)
    more = ("--seq-len", 2 * tokens, "--batch-size", 1)
    assert "nothing fits into 1.50 GB" in refused(capsys, "--shape", "tiny", *more, *gb)
    assert found["disk_bytes"] > tokens * 4 * 128  # the inputs of blocks


def test_a_disk_that_is_too_small_for_inputs_is_named(capsys, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    found = shown(capsys, "--shape", "tiny", "--longest", "--max-memory", 1.5)
    assert "the disk of runs/ has only 10.0 MB free, and a row of this table needs more" in found
    spilled = ("--shape", "tiny", "--seq-len", 65536, "--plan", "streamed", "--spill")
    found = " ".join(shown(capsys, *spilled).split())
    assert "in the run's folder while it trains" in found
    assert "the disk of runs/ has only 10.0 MB free, and this needs more" in found


def test_columns_that_are_not_used_are_named(capsys, own_folder):
    rows = [{"prompt": f"a{n}", "completion": "b", "Ticket": n + 1} for n in range(60)]
    write_rows(own_folder / "t.jsonl", rows)
    status, _, error = call(capsys, "plan", "--model", "demo", "--data", "t.jsonl")
    assert status == 0
    assert error.count("the column Ticket is not used") == 1  # not once for each split


def test_smaller_limit_gives_a_smaller_plan(capsys):
    rows = ("--seq-len", 1024)
    most = planned(capsys, *rows)
    less = planned(capsys, *rows, "--max-memory", most["needed_bytes"] / GB - 0.02)
    assert less["limit_reason"].startswith("--max-memory ")
    assert less["needed_bytes"] <= less["limit_bytes"] < most["needed_bytes"]
    assert less["larger"]["text"] == most["text"]


def test_prefix_cache_in_memory_is_counted(capsys, tiny_model, data_folder):
    options = ("--model", tiny_model, "--data", data_folder, "--lora-layers", 1)
    kept = planned(capsys, *options, "--prefix-cache", "memory")["components"]["prefix cache"]
    assert kept > 10 * 20 * TINY["hidden_size"] * 4  # ten rows of more than 20 tokens
    assert planned(capsys, *options)["components"]["prefix cache"] == 0


@pytest.mark.memory
def test_plan_reads_no_weights(capsys, tmp_path, data_folder):
    folder = make_model(tmp_path / "large", bits=None, hidden_size=512, intermediate_size=1024)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = planned(capsys, "--model", folder, "--data", data_folder)
    assert found["components"]["weights"] > 20e6
    assert mx.get_peak_memory() - before < 1e6


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-memory", 0), "--max-memory 0.0: must be above 0"),
        (("--max-memory", -1), "--max-memory -1.0: must be above 0"),
        (("--max-memory", "nan"), "--max-memory nan: must be above 0"),
        (("--max-memory", "abc"), "--max-memory: expected a number of GB, such as 8 or"),
        (("--max-memory", ENOUGH), "this machine has 16 GB of memory; use at most 16, or --force"),
        (("--max-memory", 0.05), "nothing fits into 0.05 GB; at least 0."),
        (("--max-memory", 0.05, "--json"), "nothing fits into 0.05 GB"),
        (("--max-memory", 0.05, "--plan", "fused"), "use --plan auto"),
        (("--seq-len", 0), "--seq-len"),
        (("--seq-len", -5), "--seq-len"),
        (("--seq-len", "abc"), "--seq-len"),
        (("--longest", "--seq-len", 512), "--longest: finds the length"),
        (("--longest", "--objective", "grpo", "--reward", "length:9"), "rows are generated"),
        (("--shape", "smal"), "did you mean small?"),
        (("--shape", "tiny", "--bits", 3), "--bits 3: must be 4 or 8"),
        (("--model", "absent", "--data", "x"), "absent: no such folder or alias"),
        (("--data", "nowhere", "--model", "demo"), "nowhere: no such file or folder"),
        (("--quantize", 4), "is already quantized to 4 bits"),
        (("--plan", "fused", "--spill"), "--spill: --plan fused has nothing to offload"),
        (("--lora-layers", 100), "--lora-layers 100: the model has"),
        (("--lora-targets", "q_prj"), "did you mean q_proj?"),
    ],
)
def test_wrong_input_gives_one_line_of_error(capsys, options, message):
    assert message in refused(capsys, *options)


def test_shape_with_quantize_can_be_streamed(capsys):
    shape = ("--shape", "tiny", "--bits", 0, "--quantize", 4, "--seq-len", 16)
    assert planned(capsys, *shape, "--plan", "streamed")["plan"] == "streamed"


def test_force_accepts_more_memory_than_the_machine_has(capsys):
    found = planned(capsys, "--max-memory", ENOUGH, "--force")
    assert found["limit_bytes"] == ENOUGH * GB
    assert "this machine has only 16 GB" in found["notices"][0]
    assert "this machine has only 16 GB" in shown(capsys, "--max-memory", ENOUGH, "--force")


@pytest.mark.parametrize(
    "options",
    [
        "plan --json --shape narrow --seq-len 1024 --lora-layers 1 --lora-rank 64 --plan fused",
        "train --no-supervise --max-steps 1 --samples 0 --valid none --lora-layers 2",
    ],
)
def test_limit_named_in_a_refusal_is_enough_the_next_time_and_hardly_more_than_that(options):
    """In separate processes, of which Python takes up to 3 MB more or less."""

    def tried(limit_gb: float) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "your_ai", *options.split(), "--max-memory", str(limit_gb)]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    if "--shape" in options:
        tried(0.01)  # makes the model, which takes memory
    named = LEAST.search(tried(0.01).stderr)
    assert named is not None
    least = float(named[1])
    assert tried(0.98 * least - 0.004).returncode == 2
    done = tried(least)
    assert done.returncode == 0, done.stderr
    if "--json" in options:
        found = json.loads(done.stdout)
        assert found["process_peak_bytes"] <= found["needed_bytes"] <= found["limit_bytes"]


def test_limit_named_in_a_refusal_includes_quantizing_the_model(tmp_path, data_folder, capsys):
    """Quantizing a shard of this model needs more memory than training it."""
    folder = make_model(tmp_path / "wide", "mistral", None, hidden_size=512, vocab_size=16_000)
    write_rows(data_folder / "train.jsonl", [chat("Ask", "Yes")])
    (data_folder / "valid.jsonl").unlink()
    options = ["--model", folder, "--data", data_folder, "--quantize", 8, "--max-steps", 1]
    options += ["--lora-layers", 1, "--lora-targets", "q_proj", "--batch-size", 1]

    def tried(command: str, limit_gb: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "your_ai", command, *map(str, options)]
        line += ["--max-memory", limit_gb]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    named = [LEAST.search(tried(command, "0.02").stderr) for command in ("plan", "train")]
    assert None not in named
    least, other = (found[1] for found in named)
    assert float(least) == pytest.approx(float(other), abs=0.011)  # one process uses 1 MB more
    before = LEAST.search(refused(capsys, *options, "--max-memory", "0.02"))
    assert tried("train", least).returncode == 0
    (copy,) = (Path("home") / "quantized").iterdir()
    assert copy.name.endswith("8bit")
    again = LEAST.search(refused(capsys, *options, "--max-memory", "0.02"))
    assert float(again[1]) < float(before[1])


def test_a_soft_run_keeps_nothing_in_files():
    option = Option(Plan("streamed", 64), Estimate({}), 1.0, 0)
    assert disk_bytes(WORKLOAD, option, 64) > 0
    soft = replace(WORKLOAD, soft=RolloutSizes(8, 8, 1, 4))
    assert disk_bytes(soft, option, 64) == 0
