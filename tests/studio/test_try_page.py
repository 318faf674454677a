from __future__ import annotations

import json
import re
from html import unescape
from urllib.parse import urlencode

import pytest

from tests.conftest import train_once, wait_until
from tests.studio.client import Client
from your_ai.data.preferences import kind_of, parser_of
from your_ai.evaluation import record
from your_ai.gates.programs import end
from your_ai.run.folder import RunFolder, locked
from your_ai.studio import talks, thumbs

LONG = {"temperature": "5", "max_tokens": "8000"}


@pytest.fixture
def run(configure) -> RunFolder:
    return train_once(configure())


def ask(client: Client, question: str, talk: str = "", **sampling: str) -> str:
    """Ask; return the name of the conversation."""
    got = client.post("try/r/ask", question=question, talk=talk, **{"max_tokens": "12"} | sampling)
    assert got.status == 303, got.fault
    return re.search(r"talk=(\w+)", got.place)[1]


def answered(client: Client, talk: str) -> talks.Exchange:
    found = client.studio.talks.named(talk)
    wait_until(lambda: not found.is_busy)
    return found.exchanges[-1]


def texts_of(exchange: talks.Exchange) -> list[str]:
    assert not exchange.fault
    return [exchange.replies[system].text for system in talks.SYSTEMS]


def thumb(client: Client, row: dict, label: str):
    return client.post("try/r/thumb", row=json.dumps(row), label=label)


def test_both_answer_and_a_conversation_goes_on(client, run):
    """Each window has its own conversation, and its answers are those that it would get alone."""
    windows = [ask(client, question) for question in ("Ask 1", "Ask 2 please", "Ask 1")]
    first, second, third = (texts_of(answered(client, talk)) for talk in windows)
    assert first == third != second
    ask(client, "Ask 3", windows[0])
    asked = answered(client, windows[0]).asked["prompt"]
    assert [turn["content"] for turn in asked] == ["Ask 1", first[0], "Ask 3"]
    page = client.get(f"try?run=r&talk={windows[0]}").text
    assert page.count('class="question">Ask') == 2
    part = client.part(f"try/talks/{windows[0]}").text
    assert re.findall('class="question">(.*?)<', part) == ["Ask 3"]
    assert "data-every" not in part


def test_an_answer_grows_until_it_is_stopped(client, run):
    def ended_when_stopped(question: str) -> set[str]:
        talk = ask(client, question, **LONG)
        reply = client.studio.talks.named(talk).exchanges[0].replies["adapter"]
        wait_until(lambda: len(reply.text) > 20 or reply.ended)
        page = client.part(f"try/talks/{talk}").text
        again = client.post("try/r/ask", question="x", talk=talk)
        assert client.post(f"try/talks/{talk}/stop").status == 303
        if not reply.ended:
            assert "data-every" in page
            assert "still being answered" in again.fault
        return {each.ended for each in answered(client, talk).replies.values()}

    # A model with random weights may end its answer by itself before it is stopped.
    assert any(ended_when_stopped(f"Ask {n}") == {talks.STOPPED} for n in range(9))


def test_a_process_that_is_killed_costs_one_answer(client, run):
    talk = ask(client, "Ask 1", **LONG)
    reply = client.studio.talks.named(talk).exchanges[0].replies["adapter"]
    wait_until(lambda: reply.text)
    end(client.studio.answerer.running())
    assert "ended" in answered(client, talk).fault
    assert texts_of(answered(client, ask(client, "Ask 1", talk)))


def test_thumbs_become_rows_of_preferences(client, run):
    talk = ask(client, "Ask 1")
    exchange = answered(client, talk)
    good, bad = (thumbs.row_of(exchange.asked, text) for text in texts_of(exchange))
    page = client.get(f"try?run=r&talk={talk}").text
    shown = [json.loads(unescape(row)) for row in re.findall(r'name="row" value="(.*?)"', page)]
    assert shown == [bad, good]
    assert "KTO needs 2 thumbs" in page
    assert thumb(client, good, "up").status == thumb(client, bad, "down").status == 303
    for path, kind in ((thumbs.labels_file("r"), "labels"), (thumbs.pairs_file("r"), "pairs")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {kind_of(row) for row in rows} == {kind}
        for row in rows:
            parser_of(kind)(row, "row")
    page = client.get(f"try?run=r&talk={talk}").text
    assert page.count('aria-pressed="true"') == 2
    assert unescape(page).count("&from_adapter=r") == 2
    thumb(client, bad, "none")
    assert thumbs.judged_rows("r") == [{**good, "label": True}]
    assert not thumbs.pairs_file("r").exists()


@pytest.mark.parametrize(
    "row", ["", "[]", "{", "[" * 100_000, '{"prompt": 1, "completion": 2}', '{"prompt": "a"}']
)
def test_a_thumb_that_is_no_row_is_refused(client, run, row):
    assert "cannot be read" in client.post("try/r/thumb", row=row, label="up").fault


def test_measures_and_worst_rows_are_shown(client, run):
    interval = {"value": 1.5, "low": 1.0, "high": 2.0}
    row = {
        "where": "<b>.jsonl:3", "by": ["loss"], "base_loss": 1.0, "adapter_loss": 2.0,
        "prompt": "Q ...", "expected": "E<script>", "base_answer": "B", "answer": "A",
        "asked": {"prompt": "Question"}, "answers": {"base": "Base answer", "adapter": ""},
    }  # fmt: skip
    found = {
        "version": 1, "rows": 3, "data": "d", "step": 4, "worst": [row], "metric_name": None,
        "measures": {"loss": dict.fromkeys(("base", "adapter", "difference"), interval)},
    }  # fmt: skip
    record.write_evaluation(run, found)
    page = client.get("try").text
    assert "1.500 [1.000, 2.000]" in page
    assert "loss: 2.000 with the adapter, 1.000 base" in page
    assert "E&lt;script&gt;" in page
    assert "&lt;b&gt;.jsonl:3" in page
    rows = re.findall(r'name="row" value="(.*?)"', page)
    assert [json.loads(unescape(row)) for row in rows] == [
        {"prompt": "Question", "completion": "Base answer"}
    ]
    record.write_evaluation(run, {"version": 1, "measures": [], "worst": 3})
    assert "cannot be read; measure again" in client.get("try").text


def test_a_measurement_is_a_job(client, run):
    assert client.post("try/r/measure").status == 303
    wait_until(lambda: "data-every" not in client.part("try/r/measured").text)
    text = client.get("try?run=r").text
    assert "exact match" in text
    assert 'id="w1"' in text


def test_a_run_that_cannot_answer_is_one_line(client, run):
    assert "no run named gone" in client.get("try?run=gone").fault
    (run.path / "adapter").rename(run.path / "before")
    with locked(run):  # it trains: its last checkpoint answers
        assert answered(client, ask(client, "Ask 1")).step == 4
    text = run.config.read_text()
    run.config.write_text(text.replace("objective: sft", "objective: reward"))
    assert "is a reward model" in client.get("try?run=r").fault
    assert "is a reward model" in client.post("try/r/ask", question="x").fault
    run.config.write_text(re.sub("model: .*", "model: /gone", text, count=1))
    assert "/gone" in client.get("try").fault


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ({}, "question is empty"),
        ({"question": "x", "temperature": "nan"}, "0 to 10"),
        ({"question": "x", "max_tokens": "1e9"}, "give numbers"),
    ],
)
def test_what_cannot_be_asked_is_refused(client, run, form, fault):
    assert fault in client.post("try/r/ask", **form).fault


def test_a_conversation_of_another_server_is_one_line(client, run):
    assert "ask again" in client.part("try/talks/nothing").fault
    assert "ended with the studio" in client.get("try?" + urlencode({"talk": "x"})).text
