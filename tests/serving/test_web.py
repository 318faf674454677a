from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import BrowserTab, browser_tab, needs_browser
from tests.conftest import call
from tests.dashboard.frames import step
from tests.dashboard.test_report import DONE, LIMIT, NASTY, STORY, Parsed, samples, started
from your_ai.config import TrainConfig
from your_ai.dashboard import report
from your_ai.run import events
from your_ai.run import folder as folders
from your_ai.run.events import Event, EventLog
from your_ai.run.folder import RunFolder
from your_ai.serving import web
from your_ai.serving.live_pages import LivePage, listen
from your_ai.serving.web import LiveRun, refresh

GAVE_UP = events.Died(step=1, reason="killed by SIGKILL", level=None)


@pytest.fixture
def folder(own_folder) -> RunFolder:
    found = RunFolder(Path("runs/r"))
    found.path.mkdir(parents=True)
    found.write_config(TrainConfig(model="m", data="d.jsonl", lora_rank=4))
    return found


def write(folder: RunFolder, *happened: Event) -> None:
    log = EventLog(folder.events)
    for event in happened:
        log.write(event)
    log.close()


class Shown:
    """What the page of a run shows, time after time."""

    def __init__(self, folder: RunFolder) -> None:
        self.page, self.run, self.seen = LivePage(), LiveRun(folder), None

    def text(self) -> str:
        self.seen = refresh(self.run, self.page, self.seen)
        return Parsed(self.page.text).text

    def changed(self) -> set[str]:
        before = self.page.version
        self.text()
        return {name for name, (version, _) in self.page.parts.items() if version > before}


def test_a_run_that_has_not_begun(folder):
    shown = Shown(folder)
    assert "r this run has not begun" in shown.text()
    assert "lora-rank 4 auto" in shown.text()


def test_a_run_in_progress_shows_steps_time_left_and_memory(folder):
    write(folder, LIMIT, started(), step(1), step(2))
    with folders.locked(folder):
        shown = Shown(folder)
        text = shown.text()
        assert "some/model training Step 2 of 10, 16 s left Memory 5.00 GB of 6.00 GB" in text
        assert shown.page.title == "20% r"
        write(folder, events.Phase(text="validating"))
        assert "some/model validating" in shown.text()
        write(folder, events.Paused(step=2))
        assert "some/model paused" in shown.text()


def test_only_parts_that_change_are_sent(folder):
    write(folder, LIMIT, started(), samples("before", "five"), step(1))
    with folders.locked(folder):
        shown = Shown(folder)
        assert shown.changed() == set(report.parts_of(shown.page.text)) > {"head", "now", "samples"}
        assert shown.changed() == set()
        write(folder, step(2))
        assert shown.changed() == {"now", "facts", "charts"}


@pytest.mark.parametrize(
    ("happened", "word", "title"),
    [
        ([*STORY], "finished", "r: finished"),
        ([step(1), dataclasses.replace(DONE, reason="Ctrl-C")], "Ctrl-C", "r: stopped"),
        ([step(1), GAVE_UP], "died: killed by SIGKILL", "r: died"),
        ([started(), step(1)], "continue with: your_ai train --resume r", "r"),
    ],
)
def test_the_end_of_a_run(folder, happened, word, title):
    write(folder, *happened)
    shown = Shown(folder)
    assert word in shown.text()
    assert shown.page.title == title


def test_a_resumed_run_is_running_again(folder):
    write(folder, started(), step(1), dataclasses.replace(DONE, reason="Ctrl-C"))
    shown = Shown(folder)
    assert "Ctrl-C" in shown.text()
    with folders.locked(folder):
        write(folder, events.Stage(text="loading m"))
        assert "some/model loading m" in shown.text()
        write(folder, started(1), step(2))
        assert "training Step 2 of 10" in shown.text()


def test_a_restart_of_the_process_is_not_an_end(folder):
    write(folder, started(), step(1))
    shown = Shown(folder)
    with folders.locked(folder):
        shown.text()
    assert "no process" not in shown.text()
    shown.run.running_at -= web.GRACE_S
    assert "no process" in shown.text()


def test_a_run_without_events_for_long_says_so(folder):
    write(folder, started(), step(1))
    with folders.locked(folder):
        shown = Shown(folder)
        shown.run.read_events()
        now = shown.run.reader.state.last_at
        silent = [shown.run.presence(now + seconds).silent_s for seconds in (19, 21, 59)]
    assert silent == [0, 20, 40]


def test_a_deleted_run_keeps_what_was_shown(folder):
    write(folder, *STORY)
    shown = Shown(folder)
    shown.text()
    shutil.rmtree(folder.path)
    text = shown.text()
    assert "the folder of this run was deleted; this is what it was before" in text
    assert "Steps 10 of 10" in text
    assert "lora-rank 4 auto" in text
    assert shown.page.title == "r: deleted"


def test_a_new_run_with_the_same_name_replaces_the_old_one(folder):
    write(folder, *STORY)
    shown = Shown(folder)
    shown.text()
    shutil.rmtree(folder.path)
    folder.path.mkdir()
    write(folder, started(model="other"), *(step(n) for n in range(1, 100)))
    text = shown.text()
    assert "other" in text
    assert "some/model" not in text


def test_text_of_a_run_is_escaped_in_every_part(folder):
    write(
        folder, dataclasses.replace(LIMIT, reason=NASTY), started(model=NASTY), step(1),
        samples("before", NASTY, NASTY, NASTY),
        events.Notice(text=NASTY + "<!--end--><!--part x-->"), events.Phase(text=NASTY),
        events.Stage(text=NASTY),
    )  # fmt: skip
    folder.config.write_text(NASTY)
    with folders.locked(folder):
        shown = Shown(folder)
        shown.text()
    parts = report.parts_of(shown.page.text)
    assert sorted(parts) == [
        "charts",
        "events",
        "facts",
        "head",
        "now",
        "plan",
        "samples",
        "settings",
    ]
    for part in parts.values():
        parsed = Parsed(part)
        assert not {"script", "img"} & {tag for tag, _ in parsed.elements}
        assert not [
            n for _, attributes in parsed.elements for n in attributes if n.startswith("on")
        ]
    assert [tag for tag, _ in Parsed(shown.page.text).elements].count("script") == 1


def test_events_that_cannot_be_shown_leave_a_line(folder):
    write(folder, LIMIT, started(), step(1))
    line = folder.events.read_text().splitlines()[-1]
    huge = re.sub(r'"process_bytes": \d+', '"process_bytes": 1' + "0" * 400, line)
    folder.events.write_text(huge + "\n" + '{"event": "step"}\n' + "nonsense\n")
    assert "its events cannot be shown" in Shown(folder).text()


def test_an_unreadable_events_file_is_named(folder):
    folder.events.mkdir()
    assert "events.jsonl: cannot be read" in Shown(folder).text()


def test_the_policy_allows_the_script_of_the_page_and_nothing_else(folder):
    write(folder, *STORY)
    shown = Shown(folder)
    shown.text()
    [script] = re.findall(r"<script>(.*?)</script>", shown.page.text, re.DOTALL)
    assert script == report.script()
    policy = report.live_policy()
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]
    assert "http" not in policy


def test_watching_loads_no_mlx_and_no_numpy():
    heavy = ["mlx", "numpy", "transformers"]
    code = (
        "import sys, your_ai.serving.web\n"
        f"sys.exit(','.join(m for m in {heavy} if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def watching(folder) -> Iterator[subprocess.Popen[str]]:
    write(folder, LIMIT, started(), *(step(n) for n in range(1, 4)))
    command = [sys.executable, "-m", "your_ai", "watch", "r", "--web"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_ctrl_c_ends_the_page_and_leaves_no_file(folder, watching):
    before = sorted(folder.path.rglob("*"))
    first = watching.stdout.readline()
    assert re.fullmatch(r"r: http://127\.0\.0\.1:\d+\n", first)
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=10)
    assert (watching.returncode, errors) == (0, "")
    assert sorted(folder.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "--web"), "error: no run named nowhere in {here}/runs"),
        (("r", "--port", "8765"), "error: --port: is the port of a page; add --web"),
        (("r", "--web", "--json"), "error: --web: shows a page; leave out --json"),
        (("r", "--web", "--replay"), "error: --web: shows a page; leave out --replay"),
    ],
)
def test_options_that_do_not_fit_are_one_line(folder, capsys, arguments, message):
    assert call("watch", *arguments) == 2
    assert capsys.readouterr().err == message.format(here=os.getcwd()) + "\n"


def test_a_port_in_use_is_one_line(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert call("watch", "r", "--web", "--port", port) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"error: --port {port}: cannot be used (")


# In a browser


class Served:
    """A page that a browser shows, and the run behind it."""

    def __init__(self, folder: RunFolder, tab: BrowserTab) -> None:
        self.folder, self.tab, self.shown = folder, tab, Shown(folder)
        self.server = listen(None, self.shown.page, report.live_policy())
        self.server.start()

    def update(self, *happened: Event) -> None:
        if happened:
            write(self.folder, *happened)
        self.shown.text()

    def restart(self) -> None:
        """End the server, and start another one at its port."""
        port = self.server.server_port
        self.server.stop()
        self.tab.wait_for("!document.getElementById('link').hidden")
        self.shown = Shown(self.folder)
        self.server = listen(port, self.shown.page, report.live_policy())
        self.server.start()


@needs_browser
def test_the_page_lives_in_a_browser(folder, own_folder):
    text = "document.querySelector('main').innerText"
    with browser_tab(own_folder / "profile") as tab, folders.locked(folder):
        served = Served(folder, tab)
        try:
            write(folder, LIMIT, started(model=NASTY), samples("before", NASTY, "long " * 3000))
            served.update(*(step(n) for n in range(1, 4)))
            tab.look(375)
            tab.open(served.server.url + "/")
            assert "Step 3 of 10" in tab.run(text)
            # What the user did stays: scroll positions, an open element, the elements themselves.
            tab.run("document.querySelector('details').open = true")
            tab.run("scrollTo(0, 900); window.svg = document.querySelector('#loss svg')")
            tab.run("document.querySelector('.samples .text').scrollTop = 50")
            path = tab.run("svg.querySelector('.line').getAttribute('d')")
            folder.write_config(TrainConfig(model="m", data="d.jsonl", lora_rank=8))
            served.update(
                step(4), events.Notice(text=NASTY), samples("after", NASTY, "long " * 3000)
            )
            tab.wait_for(f"{text}.includes('Step 4 of 10')")
            tab.wait_for("document.title === '40% r'")
            kept = "[scrollY, document.querySelector('details').open, svg.isConnected]"
            assert tab.run(kept) == [900, True, True]
            assert tab.run("document.querySelector('.samples .text').scrollTop") == 50
            assert tab.run("svg.querySelector('.line').getAttribute('d')") != path
            assert tab.run("document.scripts.length + document.images.length") == 1
            assert "lora-rank\t8\tauto" in tab.run(text)
            assert tab.run("document.documentElement.scrollWidth") <= 375
            assert tab.messages == []
            served.restart()
            served.update(step(5))
            tab.wait_for(f"{text}.includes('Step 5 of 10')")
            assert tab.run("document.getElementById('link').hidden")
            shutil.rmtree(folder.path)
            served.update()
            tab.wait_for("document.querySelector('#state .died') !== null")
            assert "was deleted" in tab.run(text)
        finally:
            served.server.stop()
