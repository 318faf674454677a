"""The page of data, through HTTP against a server of its own."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from your_ai.serving.live_page import listen
from your_ai.serving.web import WebServer
from your_ai.studio import jobs
from your_ai.studio.pages import Studio
from your_ai.studio.server import gate_of, routes_of

GIFT = "0123456789abcdef"
DATA = Path("studio") / "data"
BOX = re.compile(r'name="rows" value="([^"]*)" checked')
FIELD = re.compile(r'<input type="hidden" name="(\w+)" value="([^"]*)">')


class Client:
    """A browser of one studio."""

    def __init__(self, port: int, root: str) -> None:
        self.port, self.root = port, root

    def ask(
        self, method: str, path: str, body: bytes | dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        """The status, where it goes on, and the text of an answer, as the page's script asks."""
        headers = {"X-Part": "1"}
        if method == "POST":
            headers["Origin"] = f"http://127.0.0.1:{self.port}"
        if isinstance(body, dict):
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            body = urlencode(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, self.root + path, body, headers)
        answer = connection.getresponse()
        location = (answer.getheader("location") or "").removeprefix(self.root)
        found = answer.status, location, answer.read().decode()
        connection.close()
        return found

    def send(self, name: str, data: bytes, at: int = 0, size: int | None = None) -> tuple[int, str]:
        size = len(data) if size is None else size
        query = urlencode({"gift": GIFT, "name": name, "at": at, "size": size})
        status, _, text = self.ask("POST", f"upload?{query}", data)
        return status, text

    def give(self, **files: str) -> str:
        """Give files, whose names have _ for a dot; what the page then shows."""
        for name, text in files.items():
            assert self.send(name.replace("_", "."), text.encode())[0] == 200
        status, _, text = self.ask("POST", f"upload/done?gift={GIFT}")
        assert status == 200
        return str(json.loads(text)["data"])

    def look(self, name: str, **settings: str) -> str:
        status, _, text = self.ask("GET", f"data?{urlencode({'data': name, **settings})}")
        assert status == 200, text
        return text


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)
    studio = Studio("token")
    server = WebServer(listen(None, 0), routes_of(studio), gate_of(studio))
    try:
        yield Client(int(server.url.rstrip("/").rpartition(":")[2]), studio.root)
    finally:
        studio.close()
        server.stop()


def table(rows: int, names: str = "customer asks,staff says") -> str:
    return names + "\n" + "".join(f"Where is {i}?,At {i}.\n" for i in range(rows))


def plan_of(page: str) -> dict[str, str]:
    found = re.search(r'href="[^"]*plan\?([^"]*)"', page)
    return dict(parse_qsl(found[1].replace("&amp;", "&"))) if found else {}


def test_a_table_with_any_names_is_planned_with_columns(client: Client) -> None:
    plan = plan_of(client.look(client.give(shop_csv=table(60))))
    assert plan["data"] == str(DATA / "shop.csv")
    assert plan["columns"] == "prompt=customer asks,completion=staff says"
    assert plan["objective"] == "sft"


def test_columns_that_are_chosen_are_those_of_the_plan(client: Client) -> None:
    name = client.give(shop_csv=table(60))
    page = client.look(name, prompt="staff says", completion="customer asks")
    assert plan_of(page)["columns"] == "prompt=staff says,completion=customer asks"
    assert '<mark class="trained">Where is 0?' in page


def test_rows_that_training_refuses_are_left_out_in_a_new_file(client: Client) -> None:
    text = table(30) + "only one cell\nIs it red?,\na,b,c\n"
    page = client.look(client.give(shop_csv=text))
    assert "shop.csv:32" in page
    assert "no answer or no text" in page
    assert not plan_of(page)
    form = dict(FIELD.findall(page)) | {"rows": ",".join(BOX.findall(page))}
    status, location, _ = client.ask("POST", "data/leave-out", form)
    assert status == 303
    query = dict(parse_qsl(urlsplit(location).query))
    assert query["data"] == "shop-without-3.jsonl"
    assert plan_of(client.look(**{"name" if k == "data" else k: v for k, v in query.items()}))
    kept = (DATA / query["data"]).read_text().splitlines()
    assert json.loads(kept[0]) == {"customer asks": "Where is 0?", "staff says": "At 0."}
    assert len(kept) == 30
    assert (DATA / "shop.csv").read_text() == text


def test_no_rows_of_files_that_changed_are_left_out(client: Client) -> None:
    page = client.look(client.give(shop_csv=table(30)))
    (DATA / "shop.csv").write_text(table(31))
    form = dict(FIELD.findall(page)) | {"rows": "train:0"}
    status, _, text = client.ask("POST", "data/leave-out", form)
    assert status == 422
    assert "has changed since it was shown" in text
    assert [path.name for path in DATA.iterdir()] == ["shop.csv"]


def test_problems_beyond_those_listed_are_left_out_too(client: Client) -> None:
    bad = '{"prompt": "x", "completion": ""}\n' * 120
    page = client.look(client.give(a_jsonl='{"prompt": "x", "completion": "y"}\n' * 9 + bad))
    assert "20 other rows" in page
    form = dict(FIELD.findall(page)) | {"rows": ",".join(BOX.findall(page)), "others": "yes"}
    client.ask("POST", "data/leave-out", form)
    assert len((DATA / "a-without-120.jsonl").read_text().splitlines()) == 9


def test_another_file_of_the_same_name_gets_a_number(client: Client) -> None:
    assert client.give(a_csv="1") == "a.csv"
    assert client.give(a_csv="1") == "a.csv"
    assert client.give(a_csv="2") == "a-2.csv"
    assert (DATA / "a.csv").read_text() == "1"


def test_files_of_splits_that_are_given_together_are_one_folder(client: Client) -> None:
    rows = '{"prompt": "x", "completion": "y"}\n'
    name = client.give(train_jsonl=rows * 3, valid_jsonl=rows)
    assert name == "data"
    assert "validation rows" in client.look(name)


def test_an_upload_that_broke_is_not_shown_and_can_be_given_again(client: Client) -> None:
    assert client.send("a.csv", b"123", 0, 9)[0] == 200
    assert "a piece is missing" in client.send("a.csv", b"789", 6, 9)[1]
    assert "a.csv" not in client.ask("GET", "data")[2]
    assert client.give(a_csv="123456789") == "a.csv"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", ".x", "a\0b", "a\\b", "a//b", " "])
def test_names_that_leave_the_folder_are_refused(client: Client, name: str) -> None:
    assert "is no name for a file" in client.send(name, b"x")[1]
    assert client.ask("POST", "data/remove", {"name": name})[0] == 422


def test_links_are_neither_shown_nor_followed(client: Client, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.csv").write_text("a")
    DATA.mkdir(parents=True)
    for name in ("link", "broken"):
        (DATA / name).symlink_to(outside if name == "link" else "nowhere")
    assert "link" not in re.sub("<[^>]*>", "", client.ask("GET", "data")[2])
    assert client.ask("POST", "data/remove", {"name": "link/a.csv"})[0] == 422
    assert os.listdir(outside) == ["a.csv"]


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
    for at in range(0, max(len(data), 1), 1 << 23):
        assert client.send(name, data[at : at + (1 << 23)], at, len(data))[0] == 200
    client.ask("POST", f"upload/done?gift={GIFT}")
    status, _, text = client.ask("GET", f"data?data={name}")
    shown = re.sub("<[^>]*>", "", text).strip()
    assert (status, shown.count("\n")) == (422, 0)
    assert said in shown


def test_text_of_rows_is_escaped(client: Client) -> None:
    rows = '{"prompt": "<script>1</script>", "completion": "<b>"}\n'
    page = client.look(client.give(a_jsonl=rows))
    assert "&lt;b&gt;" in page
    assert "<script>1" not in page


def test_a_wrong_answer_is_marked_as_made_less_likely(client: Client) -> None:
    page = client.look(client.give(a_jsonl='{"prompt":"q","chosen":"yes","rejected":"no"}\n' * 3))
    assert '<mark class="trained">yes' in page
    assert '<mark class="rejected">no' in page
    assert plan_of(page)["objective"] == "dpo"


def test_unknown_columns_are_asked_for(client: Client) -> None:
    page = client.look(client.give(a_csv="a1,b2\n1,2\n3,4\n"))
    assert "Which column is which?" in page
    assert not plan_of(page)


def test_questions_about_a_document_are_made_by_a_job(client: Client) -> None:
    name = client.give(guide_md="# Bikes\n\nThe red bike costs 300 euro.\n")
    page = client.look(name)
    assert "Or make questions and answers" in page
    form = {"data": str(DATA / name), "model": "demo", "questions": "1"}
    status, location, _ = client.ask("POST", "data/make", form)
    assert status == 303
    job = jobs.named(location.rpartition("/")[2])
    assert job.then == "data?data=guide-questions.jsonl"
    until = time.monotonic() + 60
    while jobs.read(job.folder).pid and time.monotonic() < until:
        time.sleep(0.2)
    assert jobs.read(job.folder).status is not None
