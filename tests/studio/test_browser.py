"""The whole way in a browser: a table dropped on the page becomes a GGUF file."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.browser import BrowserTab, browser_tab, needs_browser
from tests.studio.client import Client

CLICKS = 8  # at most, without typing anything


def table(path: Path, rows: int = 24) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        writer.writerows([f"What is {n} and {n}?", f"It is {n + n}."] for n in range(rows))
    return path


def click(tab: BrowserTab, text: str) -> None:
    """Click the button or link with this text, on the next page too, when it is there."""
    found = f"[...document.querySelectorAll('button, a')].find(e => e.innerText === {text!r})"
    tab.wait_for(f"!!{found} && document.readyState === 'complete'", 180)
    tab.run(f"{found}.click()")


def choose_file(tab: BrowserTab, path: Path) -> None:
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", nodeId=root, selector=".drop input[type=file]")["nodeId"]
    tab.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])


@needs_browser
def test_from_a_table_to_a_gguf_file(client: Client, own_folder):
    with browser_tab(own_folder / "profile") as tab:
        tab.look(1024)
        tab.open(f"{client.server.url}{client.studio.root}")
        choose_file(tab, table(own_folder / "sums.csv"))
        way = ["Plan a run", "Start", "Ship it", "Export"]
        for text in way:
            click(tab, text)
        tab.wait_for("!!document.querySelector('.state.finished')", 120)
        assert len(way) <= CLICKS
        assert [*Path().glob("*.gguf")]
        assert not tab.messages


@needs_browser
def test_a_page_reads_again_when_the_studio_is_back(client: Client, own_folder):
    with browser_tab(own_folder / "profile") as tab:
        tab.look(390)
        tab.open(f"{client.server.url}{client.studio.root}runs")
        said = "document.getElementById('said').innerText"
        client.server.stop()
        tab.wait_for(f"{said}.includes('does not answer')", 30)
        assert tab.run("document.body.scrollWidth <= 390")
