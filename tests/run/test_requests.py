from __future__ import annotations

import os

import pytest

from your_ai.errors import UserError
from your_ai.run import requests
from your_ai.run.folder import RunFolder


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def test_a_request_exists_until_it_is_withdrawn(run):
    assert not requests.is_asked(run, requests.PAUSE)
    requests.ask(run, requests.PAUSE)
    assert requests.is_asked(run, requests.PAUSE)
    assert not requests.is_asked(run, requests.SAVE)
    assert requests.withdraw(run, requests.PAUSE)
    assert not requests.withdraw(run, requests.PAUSE)


def test_withdraw_all_removes_every_request(run):
    requests.ask(run, requests.PAUSE)
    requests.ask(run, requests.SAVE)
    requests.withdraw_all(run)
    assert os.listdir(run.path) == []


def test_a_missing_folder_is_a_user_error(run):
    with pytest.raises(UserError, match="cannot be written"):
        requests.ask(RunFolder(run.path / "none"), requests.SAVE)
