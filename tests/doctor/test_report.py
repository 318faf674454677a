"""The report about a machine: its parts, what happens if one fails, and that it has no secrets."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.doctor.test_selftest import OUTCOME, SOON_S, answering
from tests.fault.processes import call
from tests.terminal import on_terminal
from your_ai.doctor import checks, report, selftest
from your_ai.doctor.selftest import Failed, OutOfTime, Part, ReportLine
from your_ai.errors import UserError

MACHINE = {"system": "Linux", "device": "cpu", "gpu": None, "ram_bytes": 1}
FILE_KEYS = ["your_ai", "date", "machine", "seconds", "limit_minutes", "failed", "dropped", "parts"]


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Outcomes or exceptions of checks, by name. No process is started for them."""
    outcomes: dict[str, Any] = {"machine": {**OUTCOME, "figures": MACHINE}}
    for module in (selftest, report):
        monkeypatch.setattr(module, "asked", answering(outcomes))
    return outcomes


def running(code: str, most_s: float = SOON_S) -> Part:
    """A part that runs Python code in its own process."""

    def work(folder: Path, _: dict[str, Any], deadline: float) -> dict[str, Any]:
        return json.loads(selftest.done(["-c", code], folder, "fake", deadline))

    return Part(code.split(";")[0], work, most_s)


def canned_part(name: str = "fake", **changes: Any) -> Part:
    return Part(name, lambda *_: {**OUTCOME, **changes})


# The parts in turn


def test_a_fault_of_our_own_in_a_part_is_a_failure_too(canned):
    lines = list(report.run_report([Part("broken", lambda *_: {}["x"]), canned_part()], 1.0))
    assert [(line.ok, line.measured) for line in lines[2:]] == [
        (False, "KeyError: 'x'"), (True, "all is well"),
    ]  # fmt: skip


def test_a_part_that_dies_or_hangs_fails_with_its_line_and_others_continue(canned, monkeypatch):
    monkeypatch.setattr(selftest, "HANGS_FROM_S", 0.5)
    parts = [
        running("import os; os.kill(os.getpid(), 11)"),
        running("import sys; sys.exit('nvrtc: cuda_fp16.h: no such header')"),
        running("import time; time.sleep(60)", most_s=1.5),
        running("""print('{"ok": true, "measured": "fine", "figures": {"a": 1}}')"""),
    ]
    lines = list(report.run_report(parts, 1.0))
    assert [line.ok for line in lines] == [True, True, False, False, False, True]
    assert lines[2].measured == "its process was killed by SIGSEGV"
    assert lines[3].measured == (
        "its process ended with status 1: nvrtc: cuda_fp16.h: no such header"
    )
    assert lines[4].measured.startswith("hangs: not finished within 2 s")
    assert lines[5].figures == {"a": 1}


def test_the_last_parts_are_dropped_when_time_runs_out(canned, monkeypatch):
    monkeypatch.setattr(selftest, "LEAST_S", 0.5)
    slow = running("import time; time.sleep(60)")
    lines = list(report.run_report([canned_part("first"), slow, canned_part("last")], 1.5 / 60))
    content = report.document(lines, 1.5, 1.5 / 60)
    assert content["dropped"] == [slow.name, "last"]
    assert content["failed"] == []
    assert lines[-1].measured == "not done: out of time"


def test_without_a_model_all_others_are_named(canned):
    canned["model"] = Failed("its process was killed by SIGABRT: no kernel image")
    lines = list(report.run_report([canned_part("first"), canned_part("last")], 1.0))
    assert [(line.check, line.ok) for line in lines] == [
        ("machine", True), ("model", False), ("first", None), ("last", None),
    ]  # fmt: skip
    assert report.document(lines, 1.0, 1.0)["dropped"] == ["first", "last"]


def test_a_machine_on_which_mlx_ends_the_process_is_still_named(canned):
    canned["machine"] = Failed("its process was killed by SIGILL")
    lines = list(report.run_report([], 1.0))
    content = report.document(lines, 1.0, 1.0)
    assert content["failed"] == ["machine"]
    assert content["machine"].keys() == {"system", "python"}


def test_the_parts_are_known_checks_and_quick_ones_are_among_them():
    every, few = report.parts_of(False), report.parts_of(True)
    names = [part.name for part in every]
    assert len({*names}) == len(names)
    assert {part.name for part in few} < {*names}
    for part in every:
        assert part.work or part.name in {*checks.CHECKS, *selftest.RUNS}
    assert {*checks.AGREE} < {*names}


def test_a_wheel_has_no_budget_harness(monkeypatch, tmp_path):
    assert report.has_harness() == sys.platform.startswith("linux")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert not report.has_harness()
    assert "budget runs" not in [part.name for part in report.parts_of(False)]


# Parts of several processes


def test_a_peak_that_cannot_be_measured_does_not_stop_the_others(monkeypatch):
    def answer(check: str, _: Path, __: float, plan: str, *more: str) -> dict[str, Any]:
        if plan == "staged":
            raise Failed("its process was killed by SIGSEGV")
        return {"ok": True, "measured": "0.90", "figures": {"peak_bytes": 9}}

    monkeypatch.setattr(report, "asked", answer)
    outcome = report.compare_peaks(Path(), {}, time.monotonic() + SOON_S)
    assert not outcome["ok"]
    assert len(outcome["figures"]) == 12
    assert "staged 4 bits 256 tokens its process was killed by SIGSEGV" in outcome["measured"]
    monkeypatch.setattr(report, "asked", lambda *_: {"ok": True, "measured": "1", "figures": {}})
    assert report.compare_peaks(Path(), {}, time.monotonic() + SOON_S)["ok"] is True
    assert report.compare_peaks(Path(), {}, time.monotonic())["ok"] is None


def test_a_bench_whose_losses_differ_fails(monkeypatch):
    def rows(loss: float) -> str:
        common = {"seconds_median": 0.5, "peak_mb": 9.0}
        return json.dumps({"rows": [
            {"contender": "fused", "losses": [2.0], **common},
            {"contender": "mlx-lm", "losses": [loss], **common},
        ]})  # fmt: skip

    for loss, ok in ((2.05, True), (2.5, False)):
        monkeypatch.setattr(report, "done", lambda *_, loss=loss: rows(loss))
        outcome = report.bench_shape("small", Path(), {"device": "cpu"}, 0.0)
        assert outcome["ok"] is ok
        assert "tiny in place of small on the CPU" in outcome["measured"]
    outcome = report.bench_shape("qwen2.5-0.5b", Path(), {"device": "cuda"}, 0.0)
    assert outcome["figures"]["shape"] == "qwen2.5-0.5b"


def test_each_plan_has_its_own_process_where_kernels_are_compiled(monkeypatch, own_folder):
    def answer(check: str, folder: Path, _: float, dtype: str, *ways: str) -> dict[str, Any]:
        figures = dict.fromkeys(ways or ("fused", "staged"), 1e-6)
        return {"ok": "kept" not in ways, "measured": " ".join(ways), "figures": figures}

    monkeypatch.setattr(report, "asked", answer)
    arguments = ("float32", own_folder, {"device": "cuda"}, 0.0)
    outcome = report.compare_with_plain(*arguments)
    assert set(outcome["figures"]) == set(report.WAYS) == set(checks.WAYS)
    assert not outcome["ok"]
    assert outcome["measured"] == "; ".join(report.WAYS)
    alone = report.compare_with_plain("float32", own_folder, {"device": "metal"}, 0.0)
    assert set(alone["figures"]) == {"fused", "staged"}


def test_the_cases_of_the_budget_harness_are_read(own_folder, monkeypatch):
    def ends(*_: object) -> str:
        names = ("limit_mb", "held_mb", "most_mb", "estimate_mb", "peak_mb", "beside_mb",
                 "seconds", "deaths")  # fmt: skip
        case = {**dict.fromkeys(names, 1.0), "plans": [], "most_mb": 0.9, "fault": ""}
        cases = [{**case, "case": {"seed": seed}} for seed in range(10)]
        cases[2]["fault"] = "exit 3"
        (own_folder / "budget.json").write_text(json.dumps(cases))
        raise Failed("its process ended with status 1")

    monkeypatch.setattr(report, "done", ends)
    outcome = report.watch_budgets(own_folder, {}, 0.0)
    assert not outcome["ok"]
    assert outcome["measured"] == (
        "10 runs, at most 100% of the limit in the process; failed: 2: exit 3"
    )
    few = json.loads((own_folder / "budget.json").read_text())[:2]
    (own_folder / "budget.json").write_text(json.dumps(few))
    for error, ok, last in (
        (OutOfTime.__new__(OutOfTime), None, "not finished: 8"),
        (Failed("it was killed by SIGABRT"), False, "failed: it was killed by SIGABRT"),
    ):
        monkeypatch.setattr(report, "done", lambda *_, e=error: (_ for _ in ()).throw(e))
        outcome = report.watch_budgets(own_folder, {}, 0.0)
        assert outcome["ok"] is ok
        assert outcome["measured"].endswith(last)
    (own_folder / "budget.json").unlink()
    monkeypatch.setattr(report, "done", lambda *_: (_ for _ in ()).throw(Failed("no pytest")))
    with pytest.raises(Failed, match="no pytest"):
        report.watch_budgets(own_folder, {}, 0.0)


@pytest.mark.slow
def test_a_demo_trains_and_its_losses_are_read(own_folder, monkeypatch):
    monkeypatch.setattr(report, "DEMO_STEPS", 2)
    outcome = report.train_demo("demo-dpo", "", own_folder, {}, time.monotonic() + 300)
    assert outcome["ok"], outcome["measured"]
    assert outcome["figures"]["losses"][0] == pytest.approx(0.6931, abs=1e-3)
    assert outcome["measured"].startswith("2 steps, loss 0.6931 to 0.69")
    assert outcome["figures"]["deaths"] == []


# The file


def test_the_file_is_json_with_few_digits_and_a_line_for_each_part():
    lines = [
        ReportLine("machine", True, "a", 1.0, MACHINE),
        ReportLine("tiles", False, "b", 1 / 3, {"nan": float("nan"), "list": [1 / 3, "x"]}),
    ]
    content = report.document(lines, 2 / 3, 14.0)
    written = report.text_of(content)
    read = json.loads(written)
    assert [*read] == FILE_KEYS
    assert read["machine"]["ram_bytes"] == 1
    assert read["parts"][1] == {
        "check": "tiles", "ok": False, "measured": "b", "seconds": 0.3333,
        "figures": {"nan": None, "list": [0.3333, "x"]},
    }  # fmt: skip
    assert (read["failed"], read["seconds"]) == (["tiles"], 0.6667)
    assert sum('"check"' in line for line in written.splitlines()) == 2


def test_nothing_private_is_in_the_file(canned, own_folder, monkeypatch):
    home = "/Users/Ada Lovelace"
    monkeypatch.setattr(report.Path, "home", lambda: Path(home))
    monkeypatch.setattr(getpass, "getuser", lambda: "ada_l")
    monkeypatch.setattr(socket, "gethostname", lambda: "Analytical-Engine.local")
    told = [
        f"error: {home}/My Secret/model.safetensors: is damaged",
        f"error: --data {own_folder}/customers.jsonl: no rows",
        "dlopen(/opt/homebrew/lib/libfoo.dylib, 0x6): not found",
        "cannot connect to analytical-engine as ada_l: refused",
        "file:///home/ada_l/x.py, line 3",
        "~/secret-project/runs/payroll: exists",
        f"'{sys.prefix}/lib/python3.12/site-packages/mlx': broken",
    ]
    parts = [running(f"import sys; sys.exit({line!r})") for line in told]
    parts.append(canned_part(measured=told[0], figures={"cases": [{"fault": told[1]}]}))
    written = report.text_of(report.document(list(report.run_report(parts, 1.0)), 1.0, 1.0))
    for secret in ("Ada", "Lovelace", "Secret", "ada_l", "nalytical", "customers", "homebrew",
                   "payroll", "secret", "site-packages", str(own_folder), sys.prefix):  # fmt: skip
        assert secret not in written, secret
    for kept in ("is damaged", "no rows", "dlopen", "not found", "refused", "line 3", "broken"):
        assert kept in written, kept


def test_what_is_measured_stays_as_it_is():
    for text in ("fused 0.123 s/step, 1/2 of 4-bit, 3.0e-06; real/estimated: 0.9",
                 "its process was killed by SIGSEGV", "--plan staged, 512 tokens/s"):  # fmt: skip
        assert report.cleaned(text) == text


# The command


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--report", "."], "--report .: is a folder; name a file"),
        (["--report", "there.json"], "there.json: exists already; name another file"),
        (["--report", "link"], "link: exists already"),
        (["--report", "no/such/x.json"], "there is no folder no/such; create it"),
        (["--report", "x" * 300], "cannot be written (File name too long)"),
        (["--quick"], "--quick: only works with --report"),
        (["--minutes", "3"], "--minutes: only works with --report"),
        (["--yes"], "--yes: only works with --report"),
        (["--report", "x", "--selftest"], "--selftest: cannot be combined with --report"),
    ],
)
def test_wrong_input_is_one_line_before_anything_runs(
    own_folder, monkeypatch, capsys, flags, error
):
    (own_folder / "there.json").touch()
    (own_folder / "link").symlink_to("nowhere")
    monkeypatch.setattr(report, "run_report", lambda *_: pytest.fail("it ran"))
    status, out, told = call(capsys, "doctor", *flags)
    assert (status, out, told.count("\n")) == (2, "", 1)
    assert error in told


def test_an_unwritable_folder_is_found_before_anything_runs(own_folder, monkeypatch):
    def fail(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(report.tempfile, "TemporaryFile", fail)
    with pytest.raises(
        UserError, match=r"x.json: cannot be written \(Permission denied\); correct"
    ):
        report.check_place(Path("x.json"))


@pytest.mark.parametrize("flags", [[], ["--json"], ["--quick", "--yes"]])
@pytest.mark.parametrize("ok", [True, False])
def test_the_file_is_what_was_shown(canned, own_folder, monkeypatch, capsys, flags, ok):
    monkeypatch.setattr(report, "parts_of", lambda quick: [canned_part(ok=ok)])
    before = signal.getsignal(signal.SIGTERM)
    status, out, _ = call(capsys, "doctor", "--report", "new.json", *flags)
    written = Path("new.json").read_text()
    assert (status, json.loads(written)["failed"]) == ((0, []) if ok else (1, ["fake"]))
    assert written in out
    assert (written == out) == ("--json" in flags)
    assert [path.name for path in own_folder.iterdir()] == ["new.json"]
    assert signal.getsignal(signal.SIGTERM) == before


CANNED = (
    "from your_ai.doctor import report, selftest; from your_ai import cli; "
    "selftest.asked = lambda *_: {'ok': True, 'measured': 'well', 'figures': {}}; "
    "report.parts_of = lambda quick: []; cli.main()"
)


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1)])
def test_a_user_on_a_terminal_is_asked(own_folder, answer, status):
    program = (sys.executable, "-c", CANNED)
    with on_terminal("doctor", "--report", "new.json", program=program) as terminal:
        terminal.wait_for("write this, and nothing else, to new.json?")
        assert not Path("new.json").exists()
        terminal.press(f"{answer}\n")
        assert terminal.end() == status
    assert Path("new.json").exists() == (answer == "y")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_report_leaves_nothing(own_folder, number):
    (own_folder / "tmp").mkdir()
    code = CANNED.replace("report.parts_of = lambda quick: []", (
        "report.parts_of = lambda quick: [selftest.Part('x', lambda folder, _, until: "
        "selftest.done(['-c', 'import time; time.sleep(60)'], folder, 'x', until))]"
    ))  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", code, "doctor", "--report", "new.json"],
        env={**os.environ, "TMPDIR": str(own_folder / "tmp")},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline, children = time.monotonic() + SOON_S, []
    while not children and time.monotonic() < deadline:
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=SOON_S)
    assert process.returncode == 130
    assert told.startswith("the report was interrupted; new.json was not written\n")
    assert children
    assert not any(child.is_running() for child in children)
    assert [path.name for path in own_folder.iterdir()] == ["tmp"]
    assert [*(own_folder / "tmp").iterdir()] == []


def test_a_part_that_is_not_finished_is_out_of_time(canned, monkeypatch):
    error = OutOfTime.__new__(OutOfTime)
    error.cpu_s = 1.0
    canned["peak"] = error
    monkeypatch.setattr(report, "PEAKS", report.PEAKS[:1])
    outcome = report.compare_peaks(Path(), {}, time.monotonic() + SOON_S)
    assert outcome["ok"] is None
    assert outcome["measured"].endswith("fused 4 bits 256 tokens not finished")
