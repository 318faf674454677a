"""The page of data, through HTTP against a server of its own."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import pytest

from tests.conftest import train_once, wait_until
from tests.studio.client import Client
from tests.studio.test_uploads import finish, give, send
from your_ai.run.folder import locked
from your_ai.studio import data_calls, jobs
from your_ai.studio.uploads import GIVEN as DATA

BOX = re.compile(r'name="rows" value="([^"]*)" checked')
FIELD = re.compile(r'<input type="hidden" name="(\w+)" value="([^"]*)">')


def look(client: Client, name: str, **settings: str) -> str:
    got = client.part(f"data?{urlencode({'data': name, **settings})}")
    assert got.status == 200, got.fault
    return got.text


def table(rows: int, names: str = "customer asks,staff says") -> str:
    return names + "\n" + "".join(f"Where is {i}?,At {i}.\n" for i in range(rows))


def plan_of(page: str) -> dict[str, str]:
    found = re.search(r'href="[^"]*plan\?([^"]*)"', page)
    return dict(parse_qsl(unescape(found[1]))) if found else {}


def test_a_table_with_any_names_is_planned_with_columns(client: Client) -> None:
    plan = plan_of(look(client, give(client, shop_csv=table(60))))
    assert plan["data"] == str(DATA / "shop.csv")
    assert plan["columns"] == "prompt=customer asks,completion=staff says"
    assert plan["objective"] == "sft"


@pytest.mark.parametrize(
    "names", ['"customer, asks",staff says', '"customer\n(asks)",staff="says"', "a;b,staff says"]
)
def test_columns_with_any_names_are_planned(client: Client, names: str) -> None:
    plan = plan_of(look(client, give(client, shop_csv=table(60, names))))
    got = client.post("plan/preview", **plan | {"model": "demo", "max_memory": "1"})
    assert "s a step" in got.text or "not predicted" in got.text, got.fault


def test_columns_that_are_chosen_are_those_of_the_plan(client: Client) -> None:
    name = give(client, shop_csv=table(60))
    page = look(client, name, prompt="staff says", completion="customer asks")
    assert plan_of(page)["columns"] == "prompt=staff says,completion=customer asks"
    assert '<mark class="trained">Where is 0?' in page


def test_rows_that_training_refuses_are_left_out_in_a_new_file(client: Client) -> None:
    text = table(30) + "only one cell\nIs it red?,\na,b,c\n"
    page = look(client, give(client, shop_csv=text))
    assert "shop.csv:32" in page
    assert "no answer or no text" in page
    assert not plan_of(page)
    form = dict(FIELD.findall(page)) | {"rows": ",".join(BOX.findall(page))}
    place = client.post("data/leave-out", **form).place
    assert place.startswith("data?data=shop-without-3.jsonl&")
    assert plan_of(client.part(place).text)
    kept = (DATA / "shop-without-3.jsonl").read_text().splitlines()
    assert json.loads(kept[0]) == {"customer asks": "Where is 0?", "staff says": "At 0."}
    assert len(kept) == 30
    assert (DATA / "shop.csv").read_text() == text


def test_no_rows_of_files_that_changed_are_left_out(client: Client) -> None:
    page = look(client, give(client, shop_csv=table(30)))
    (DATA / "shop.csv").write_text(table(31))
    form = dict(FIELD.findall(page)) | {"rows": "train:0"}
    assert "has changed since it was shown" in client.post("data/leave-out", **form).fault
    assert [path.name for path in DATA.iterdir()] == ["shop.csv"]


def test_problems_beyond_those_listed_are_left_out_too(client: Client) -> None:
    bad = '{"prompt": "x", "completion": ""}\n' * 120
    page = look(client, give(client, a_jsonl='{"prompt": "x", "completion": "y"}\n' * 9 + bad))
    assert "20 other rows" in page
    form = dict(FIELD.findall(page)) | {"rows": ",".join(BOX.findall(page)), "others": "yes"}
    client.post("data/leave-out", **form)
    assert len((DATA / "a-without-120.jsonl").read_text().splitlines()) == 9


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("zero.csv", b"", "is empty"),
        ("deep.json", b"[" * 100_000, "nested too deeply"),
        ("binary.dat", bytes(range(256)) * 99, "unknown form"),
        ("fake.docx", b"PK\x03\x04x", "is damaged"),
        ("long.jsonl", b'{"text": "' + b"x" * 17_000_000, "has more than 16,000,000 bytes"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(
    client: Client, name: str, data: bytes, said: str
) -> None:
    send(client, name, data, 1 << 23)
    got = client.part(f"data?data={finish(client)}")
    assert got.status == 422
    assert said in got.fault
    assert "\n" not in got.fault


def test_text_of_rows_is_escaped(client: Client) -> None:
    rows = '{"prompt": "<script>1</script>", "completion": "<b>"}\n'
    page = look(client, give(client, a_jsonl=rows))
    assert "&lt;b&gt;" in page
    assert "<script>1" not in page


def test_a_wrong_answer_is_marked_as_made_less_likely(client: Client) -> None:
    page = look(client, give(client, a_jsonl='{"prompt":"q","chosen":"yes","rejected":"no"}\n' * 3))
    assert '<mark class="trained">yes' in page
    assert '<mark class="rejected">no' in page
    assert plan_of(page)["objective"] == "dpo"


def test_unknown_columns_are_asked_for(client: Client) -> None:
    page = look(client, give(client, a_csv="a1,b2\n1,2\n3,4\n"))
    assert "Which column is which?" in page
    assert not plan_of(page)


def test_questions_about_a_document_are_made_by_a_job(client: Client) -> None:
    name = give(client, guide_md="# Bikes\n\nThe red bike costs 300 euro.\n")
    page = look(client, name)
    assert "Or make questions and answers" in page
    form = {"data": str(DATA / name), "model": "demo", "questions": "1"}
    job = jobs.named(client.post("data/make", **form).place.removeprefix("jobs/"))
    assert job.then == "data?data=guide-questions.jsonl"
    wait_until(lambda: not jobs.read(job.folder).pid, 120)
    page = client.get(f"jobs/{job.name}").text
    assert job.then in page or jobs.read(job.folder).state == "failed", page
    assert f'href="{client.studio.root}jobs/{job.name}"' in client.get("data").text


def test_data_that_a_run_reads_is_kept(client: Client, configure) -> None:
    name = give(client, sums_csv="question,answer\n" + "1?,1\n" * 20)
    run = train_once(configure(data=str((DATA / name).absolute()), valid="none"))
    with locked(run):
        assert "trains on it" in client.post("data/remove", name=name).fault
    assert client.post("data/remove", name=name).status == 303


def test_a_look_at_large_data_ends_and_says_where(own_folder, monkeypatch):
    Path("a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    whole = data_calls.look("a.jsonl", "", "", "demo")
    assert (whole["splits"]["train"]["rows"], whole["unseen"]) == (3, "")
    monkeypatch.setattr(data_calls, "LOOK_S", -1.0)
    data_calls.looked.cache_clear()
    assert data_calls.look("a.jsonl", "", "", "demo")["unseen"] == "a.jsonl:1"
