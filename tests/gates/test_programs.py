"""Other programs, and what they start, are ended."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from your_ai.gates import programs
from your_ai.gates.programs import begun, end, python_module

PATIENCE_S = 10.0


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_what_a_program_started_ends_with_it():
    process = begun("sh", "-c", "sleep 60 & echo $!; wait", stdout=subprocess.PIPE)
    child = int(process.stdout.readline())
    assert not is_gone(child)
    end(process)
    assert process.returncode < 0
    assert process.stdout.closed
    deadline = time.monotonic() + PATIENCE_S
    while not is_gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_that_has_ended_is_no_error():
    process = begun("true")
    process.wait()
    end(process)
    assert process.returncode == 0


def test_a_program_has_its_own_session():
    process = begun("sleep", "60")
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    end(process, 1.0)


@pytest.mark.parametrize("has_safe_path", [False, programs.HAS_SAFE_PATH])
def test_files_of_the_user_do_not_replace_modules_of_our_processes(
    own_folder, monkeypatch, has_safe_path
):
    monkeypatch.setattr(programs, "HAS_SAFE_PATH", has_safe_path)
    for name in ("json", "tokenize", "typing", "your_ai"):
        Path(f"{name}.py").write_text("raise SystemExit('the file of the user')")
    command = python_module("your_ai.gates.programs")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_gets_its_arguments_without_the_option_of_newer_pythons(own_folder, monkeypatch):
    monkeypatch.setattr(programs, "HAS_SAFE_PATH", False)
    done = subprocess.check_output(python_module("calendar", "2026", "11"), text=True)
    assert "November 2026" in done


def test_a_package_in_the_current_folder_is_found(monkeypatch):
    monkeypatch.chdir(Path(programs.__file__).parents[2])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run(python_module("your_ai.gates.programs"), check=True)


def test_only_a_process_that_is_ours_keeps_what_imports_made_out_of_searches(monkeypatch):
    kept: list[bool] = []  # whether garbage was searched for when all objects were kept
    monkeypatch.setattr(gc, "freeze", lambda: kept.append(gc.isenabled()))
    monkeypatch.setattr(programs, "OURS", [])
    with programs.quick_imports():
        assert gc.isenabled()
    assert kept == []
    programs.claim_process()
    with programs.quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert kept == [False]


def test_garbage_is_searched_for_after_a_failed_import(monkeypatch):
    monkeypatch.setattr(programs, "OURS", [True])
    with pytest.raises(ImportError), programs.quick_imports():
        raise ImportError
    assert gc.isenabled()
