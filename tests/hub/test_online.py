"""`your_ai models --online`: the quantized models of mlx-community."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import refused
from tests.fault.processes import call
from tests.hub.conftest import hub, no_hub  # noqa: F401
from your_ai.hub.find import models_root
from your_ai.hub.online import SEEN, online_models
from your_ai.hub.registry import known


def entry(name, model_type="qwen3", tags=("mlx", "4-bit"), **more):
    return {"id": f"mlx-community/{name}", "config": {"model_type": model_type},
            "tags": list(tags), "downloads": 1234, **more}  # fmt: skip


LISTED = [
    {**entry("x"), "id": known()["llama-8b"].repo, "config": {"model_type": "llama"}},
    entry("Qwen9-4B-5bit", tags=()),
    entry("Seer-1B-4bit", "no_such_architecture"),
    entry("Whole-1B", tags=("mlx",)),
]


def lists(hub, content):  # noqa: F811
    def answer(answerer):
        if not answerer.path.startswith("/api/models?"):  # the client asks for more
            answerer.fail(404)
        elif content is None:
            answerer.fail(503)
        else:
            hub.asked_for = answerer.path
            answerer.answer(content)

    hub.odd["api"] = answer


def test_models_that_can_be_trained_are_listed_once_as_new(hub, capsys):  # noqa: F811
    lists(hub, LISTED)
    status, out, error = call(capsys, "models", "--online", "--json")
    rows = json.loads(out)
    assert (status, error) == (0, "")
    assert [(row["repo"], row["alias"], row["bits"], row["is_new"]) for row in rows] == [
        (known()["llama-8b"].repo, "llama-8b", 4, True),
        ("mlx-community/Qwen9-4B-5bit", None, 5, True),
    ]
    assert "author=mlx-community" in hub.asked_for
    assert "expand=config&expand=downloads" in hub.asked_for
    lists(hub, [*LISTED, entry("Newest-8bit", tags=("8-bit",))])
    status, out, error = call(capsys, "models", "--online")
    assert "3 quantized models of mlx-community that mlx-lm can load; 1 new since" in error
    assert "mlx-community/Newest-8bit" in out
    assert "Qwen9" not in out
    status, out, error = call(capsys, "models", "--online")
    assert "0 new since the last look" in error
    assert out.count("mlx-community/") == 3
    assert out.split()[-3:] == ["qwen3", "8", "1,234"]


@pytest.mark.parametrize("text", ["", "[", '{"a": 1}', "[" * 10_000])
def test_a_damaged_record_of_the_last_look_is_like_none(hub, text):  # noqa: F811
    lists(hub, LISTED)
    models_root().mkdir(parents=True)
    (models_root() / SEEN).write_text(text)
    assert all(model.is_new for model in online_models())
    assert not any(model.is_new for model in online_models())


HOSTILE = [
    None, 3, {}, {"id": 3}, {"id": "mlx-community/a-4bit", "config": []},
    {"id": "mlx-community/../a-4bit", "config": {"model_type": "llama"}},
    {"id": "someone/a-4bit", "config": {"model_type": "llama"}},
    {"id": "mlx-community/b-4bit", "config": {"model_type": "../llama"}, "tags": 3},
    {"id": "mlx-community/c-4bit", "config": {"model_type": "llama"}, "tags": [1], "downloads": {}},
]  # fmt: skip


def test_entries_of_any_form_are_left_out(hub):  # noqa: F811
    lists(hub, HOSTILE)
    assert [model.repo for model in online_models()] == ["mlx-community/c-4bit"]


def test_without_a_hub_there_is_one_line_and_nothing_is_written(no_hub, capsys):  # noqa: F811
    error = refused(capsys, "models", "--online")
    assert "mlx-community: the hub cannot be reached at http://127.0.0.1:9" in error
    assert not models_root().exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [({}, "gave no list of models"), (None, "the hub answered 503"), ("secret", "no list")],
)
def test_a_hub_that_fails_is_reported_in_one_line(hub, capsys, content, text):  # noqa: F811
    lists(hub, content)
    assert text in refused(capsys, "models", "--online")
    assert not models_root().exists()


def test_a_folder_that_cannot_be_written_is_named(hub, capsys, monkeypatch):  # noqa: F811
    lists(hub, LISTED)
    Path("file").write_text("")
    monkeypatch.setenv("YOUR_AI_HOME", "file")
    assert "cannot be written" in refused(capsys, "models", "--online")
