from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.browser import BrowserTab, browser_tab, needs_browser
from tests.conftest import call, wait_until
from tests.dashboard.frames import step
from tests.dashboard.test_report import DONE, LIMIT, NASTY, STORY, Parsed, samples, started
from your_ai.config import TrainConfig
from your_ai.dashboard import report
from your_ai.run import events
from your_ai.run import folder as folders
from your_ai.run.events import Event, EventLog
from your_ai.run.folder import RunFolder
from your_ai.serving import live_page, live_run
from your_ai.serving.live_page import LivePage, listen, serve_on
from your_ai.serving.live_run import LiveRun
from your_ai.serving.web import WebServer

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
        self.page, self.run = LivePage(), LiveRun(folder)

    def text(self) -> str:
        if (drawn := self.run.draw()) is not None:
            self.page.publish(drawn.text, drawn.title, report.parts_of(drawn.text))
        return Parsed(self.page.now.text).text

    def changed(self) -> set[str]:
        before = self.page.now.number
        self.text()
        return {name for name, (version, _) in self.page.now.parts.items() if version > before}


def test_a_run_that_has_not_begun(folder):
    shown = Shown(folder)
    assert "r this run has not begun" in shown.text()
    assert "lora-rank 4 auto" in shown.text()


def test_a_run_in_progress_shows_steps_time_left_and_memory(folder):
    write(folder, LIMIT, started(), step(1), step(2))
    with folders.locked(folder):
        shown = Shown(folder)
        text = shown.text()
        assert "m training Step 2 of 10, 16 s left Memory 5.00 GB of 6.00 GB" in text
        assert shown.page.now.title == "20% r"
        write(folder, events.Phase(text="validating"))
        assert "m validating" in shown.text()
        write(folder, events.Paused(step=2))
        assert "m paused" in shown.text()


def test_only_parts_that_change_are_sent(folder):
    write(folder, LIMIT, started(), samples("before", "five"), step(1))
    with folders.locked(folder):
        shown = Shown(folder)
        everything = shown.changed()
        assert everything == {*report.parts_of(shown.page.now.text)} > {"head", "now", "samples"}
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
    assert shown.page.now.title == title


def test_a_long_run_is_shown_from_a_part_of_its_events_and_then_whole(folder, monkeypatch):
    monkeypatch.setattr(live_run, "LONG_BYTES", 1000)
    write(folder, LIMIT, started(), *(step(n) for n in range(1, 1001)))
    shown = Shown(folder)
    first = shown.text()
    assert "all are being read: 0%" in first
    assert "1,000 of 10" in first  # the last step
    assert "best running mean" not in first  # nor other values of all steps
    assert "tokens/s" not in first.split("Loss of each step")[0]
    whole = shown.text()
    assert "being read" not in whole
    assert "best running mean" in whole
    assert "Steps: 1,000." in whole
    monkeypatch.setattr(live_run, "LONG_BYTES", 1 << 30)  # so that it is read at once
    assert whole == Shown(folder).text()


def test_a_line_that_was_cut_is_not_waited_for(folder):
    write(folder, started(), step(1))
    with folder.events.open("a") as file:
        file.write('{"event": "step", ' + " " * 4000)
    assert "reading" not in Shown(folder).text()


def test_a_resumed_run_is_running_again(folder):
    write(folder, started(), step(1), dataclasses.replace(DONE, reason="Ctrl-C"))
    shown = Shown(folder)
    assert "Ctrl-C" in shown.text()
    with folders.locked(folder):
        write(folder, events.Stage(text="loading m"))
        assert "m loading m" in shown.text()
        write(folder, started(1), step(2))
        assert "training Step 2 of 10" in shown.text()


def test_a_restart_of_the_process_is_not_an_end(folder):
    write(folder, started(), step(1))
    shown = Shown(folder)
    with folders.locked(folder):
        shown.text()
    assert "no process" not in shown.text()
    shown.run.running_at -= live_run.RESTART_S
    assert "no process" in shown.text()


def test_a_run_without_events_for_long_says_so(folder):
    write(folder, started(), step(1))
    with folders.locked(folder):
        shown = Shown(folder)
        shown.run.read_events()
        past = shown.run.reader.past
        times = (past.state.last_at + seconds for seconds in (19, 21, 59))
        silent = [shown.run.presence(now, past).silent_s for now in times]
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
    assert shown.page.now.title == "r: deleted"


@pytest.mark.parametrize("same_inode", [False, True])
def test_a_new_run_with_the_same_name_replaces_the_old_one(folder, same_inode):
    write(folder, started(model="first/model"), step(1))
    shown = Shown(folder)
    assert "first/model" in shown.text()
    if same_inode:  # as file systems give it to the next file
        os.truncate(folder.events, 0)
    else:
        shutil.rmtree(folder.path)
        folder.path.mkdir()
    write(folder, started(model="other"), *(step(n) for n in range(1, 100)))
    text = shown.text()
    assert "other" in text
    assert "first/model" not in text


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
    parts = report.parts_of(shown.page.now.text)
    assert sorted(parts) == "charts events facts head now plan samples settings".split()
    for part in parts.values():
        parsed = Parsed(part)
        assert not {"script", "img"} & {tag for tag, _ in parsed.elements}
        assert not [
            n for _, attributes in parsed.elements for n in attributes if n.startswith("on")
        ]
    assert [tag for tag, _ in Parsed(shown.page.now.text).elements].count("script") == 1


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
    [script] = re.findall(r"<script>(.*?)</script>", shown.page.now.text, re.DOTALL)
    assert script == report.script()
    policy = report.live_policy()
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]
    assert "http" not in policy


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


# The server of the page

TEXT = '<html><body data-version="">shown</body></html>'
PATIENCE_S = 10.0


@pytest.fixture
def page(monkeypatch) -> LivePage:
    monkeypatch.setattr(live_page, "FRESH_S", 0.05)
    page = LivePage()
    page.publish(TEXT, "title", {"head": "one", "tail": "two"})
    return page


@pytest.fixture
def server(page) -> Iterator[WebServer]:
    server = serve_on(listen(None), page, "default-src 'none'")
    yield server
    page.close()
    server.stop()


def port_of(server: WebServer) -> int:
    return int(server.url.rpartition(":")[2])


def ask(
    server: WebServer, path: str = "/", method: str = "GET", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=PATIENCE_S)
    connection.request(method, path, headers={n.replace("_", "-"): v for n, v in headers.items()})
    return connection.getresponse()


def frames(response: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, object]]]:
    """The version and the data of each event."""
    version = ""
    while line := response.readline().decode():
        if line.startswith("id: "):
            version = line[4:].strip()
        elif line.startswith("data: "):
            yield version, json.loads(line[6:])


def test_page_has_its_version_and_strict_headers(server, page):
    response = ask(server)
    body = response.read().decode()
    assert response.status == 200
    assert body == TEXT.replace('""', f'"{page.token}-1"')
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.headers["Content-Security-Policy"] == "default-src 'none'"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert not [name for name in response.headers if name.lower().startswith("access-control")]


def test_head_has_no_body(server):
    for path in ("/", "/events"):
        response = ask(server, path, "HEAD")
        assert (response.status, response.read()) == (200, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(server, method):
    response = ask(server, "/", method)
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/x", "/events/", "/../events.jsonl", "/%2e%2e/config.yaml"])
def test_nothing_is_at_other_paths(server, path):
    response = ask(server, path)
    assert response.status == 404
    assert response.headers["Content-Type"].startswith("text/plain")
    assert response.headers["Content-Security-Policy"] == "default-src 'none'"


@pytest.mark.parametrize("path", ["/", "/events"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}, {"Host": "192.168.0.7:8765"},
        {"Host": ""}, {"Origin": "http://evil.example"}, {"Origin": "http://localhost:9999"},
        {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
    ],
)  # fmt: skip
def test_other_hosts_and_pages_are_refused(server, path, headers):
    assert ask(server, path, **headers).status == 403


def test_a_link_on_another_page_may_open_this_one(server):
    assert ask(server, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:8765", "LOCALHOST"])
def test_names_of_this_machine_are_accepted(server, host):
    assert ask(server, Host=host, Origin=f"http://{host}").status == 200


def test_a_new_reader_gets_all_parts_and_then_those_that_change(server, page):
    events = frames(ask(server, "/events"))
    first, all_parts = next(events)
    assert all_parts == {"title": "title", "parts": {"head": "one", "tail": "two"}}
    page.publish(TEXT, "title", {"head": "one", "tail": "<p>\n</p>\u2028"})
    second, changed = next(events)
    assert changed["parts"] == {"tail": "<p>\n</p>\u2028"}
    assert [v.split("-")[1] for v in (first, second)] == ["1", "2"]


@pytest.mark.parametrize("by_header", [False, True])
def test_a_reader_that_comes_back_gets_what_it_missed(server, page, by_header):
    page.publish(TEXT, "title", {"head": "three", "tail": "two"})
    seen = f"{page.token}-1"
    path, headers = (
        ("/events", {"Last_Event_ID": seen}) if by_header else (f"/events?since={seen}", {})
    )
    assert next(frames(ask(server, path, **headers)))[1]["parts"] == {"head": "three"}


@pytest.mark.parametrize("seen", ["other-1", "-", "{token}-99", "{token}-x", "{token}-" + "9" * 40])
def test_versions_of_another_server_mean_nothing(page, seen):
    assert len(json.loads(page.changes(seen.format(token=page.token))[1])["parts"]) == 2


def test_nothing_is_sent_for_the_version_a_reader_has(page):
    now, _ = page.changes("")
    assert page.changes(now) == (now, "")
    page.publish(TEXT, "title", {"head": "one", "tail": "two"})
    assert page.changes(now) == (now, "")


def test_events_are_lines_of_ascii_whatever_the_text(server, page):
    page.publish(TEXT, "\n\ndata: x", {"head": "a\r\n\r\nid: 7\ndata: </script>\u2028\x00"})
    response = ask(server, "/events")
    lines = [response.readline() for _ in range(4)]
    begin = [b"retry", b"\n", b"id: " + page.token[:1].encode(), b"data:"]
    assert [line[:5] for line in lines] == begin
    assert lines[3].isascii()
    assert json.loads(lines[3][6:])["parts"]["head"].endswith("</script>\u2028\x00")


def test_several_readers_get_the_same_and_a_slow_one_delays_nobody(server, page):
    page.publish(TEXT, "title", {"head": "x" * 20_000_000, "tail": "two"})
    slow = ask(server, "/events")  # does not read its answer
    wait_until(lambda: page.readers == 1)
    now = page.changes("")[0]
    readers = [frames(ask(server, f"/events?since={now}")) for _ in range(3)]
    wait_until(lambda: page.readers == 4)
    began = time.monotonic()
    page.publish(TEXT, "title", {"head": "x" * 20_000_000, "tail": "three"})
    assert [next(reader)[1]["parts"] for reader in readers] == [{"tail": "three"}] * 3
    assert time.monotonic() - began < 5
    slow.close()


def test_readers_that_leave_are_noticed(server, page):
    response = ask(server, "/events")
    wait_until(lambda: page.readers == 1)
    assert page.has_audience
    response.close()
    wait_until(lambda: page.readers == 0)


def test_a_silent_page_sends_comments(server, page, monkeypatch):
    monkeypatch.setattr(live_page, "SILENCE_S", 0.0)
    response = ask(server, f"/events?since={page.token}-1")
    assert [response.readline() for _ in range(3)] == [b"retry: 1000\n", b"\n", b":\n"]


def test_a_reader_of_the_page_gets_its_latest_state(server, page, monkeypatch):
    monkeypatch.setattr(live_page, "FRESH_S", PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: ask(server).read())
        asked = page.wait(PATIENCE_S)
        page.publish("new", "title", {"head": "new"})
        page.confirm(asked)
        assert reader.result() == b"new"


# In a browser


class Served:
    """A page that a browser shows, and the run behind it."""

    def __init__(self, folder: RunFolder, tab: BrowserTab) -> None:
        self.folder, self.tab, self.shown = folder, tab, Shown(folder)
        self.server = serve_on(listen(None), self.shown.page, report.live_policy())

    def update(self, *happened: Event) -> None:
        if happened:
            write(self.folder, *happened)
        self.shown.text()

    def restart(self) -> None:
        """End the server, and start another one at its port."""
        port = port_of(self.server)
        self.shown.page.close()
        self.server.stop()
        self.tab.wait_for("!document.getElementById('link').hidden")
        self.shown = Shown(self.folder)
        self.server = serve_on(listen(port), self.shown.page, report.live_policy())


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
            served.shown.page.close()
            served.server.stop()
