from __future__ import annotations

from pathlib import Path

from tests.commands.test_comparing import make
from tests.conftest import call


def test_report_writes_the_page_where_it_is_told_and_names_it(own_folder, capsys):
    run = make("a")
    Path("pages").mkdir()
    assert call("report", "a", "-o", "pages/a.html") == 0
    assert capsys.readouterr().out == "pages/a.html\n"
    assert Path("pages/a.html").read_text().startswith("<!doctype html>")
    assert not (run.path / "report.html").exists()
