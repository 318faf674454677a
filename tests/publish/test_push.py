"""Pushes through the real client to a hub of the tests' own."""

from __future__ import annotations

import dataclasses
import time

import pytest
from huggingface_hub import constants

from tests.hub.repos import Account, Fault, Repo
from tests.publish.test_card import SUBJECT
from your_ai.errors import RunError, UserError
from your_ai.publish import push as pushing
from your_ai.publish.card import CARD, card
from your_ai.publish.push import check_account, check_repo, push

REPO = "someone/mine"
AGAIN = "your_ai push r someone/mine"
WEIGHTS = "adapters.safetensors"
PAGE = card(SUBJECT)
OWN = "Describe your data here"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """The client waits up to 8 s between its tries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def page(contents):
    """The contents with a card like a run's."""
    return dataclasses.replace(contents, files={**contents.files, CARD: PAGE.encode()})


def steps(hub, step):
    return [r for r in hub.requests if r.method in ("POST", "PUT") and step in r.path]


def test_a_new_repo_is_private_and_has_what_was_sent_in_one_commit(hub, account, contents):
    done = push(contents, REPO, AGAIN)
    repo = hub.repos[REPO]
    assert repo.private
    assert repo.messages == ["adapter of step 3, by your_ai"]
    assert repo.files == {
        ".gitattributes": b"",
        CARD: contents.files[CARD],
        WEIGHTS: contents.files[WEIGHTS].read_bytes(),
    }
    assert (done.url, done.private, done.changed, done.notes) == (
        f"{hub.url}/{REPO}", True, True, (),
    )  # fmt: skip


def test_large_files_go_beside_the_commit(hub, account, contents):
    push(contents, REPO, AGAIN)
    assert [len(r.body) for r in steps(hub, "/put/")] == [256 * 400]
    (commit,) = steps(hub, "/commit/")
    assert len(commit.body) < 2000


def test_a_public_repo_is_made_when_asked(hub, account, contents):
    assert not push(contents, REPO, AGAIN, public=True).private
    assert not hub.repos[REPO].private


@pytest.mark.parametrize("private", [True, False])
def test_a_repo_that_is_there_stays_as_visible_as_it_was(hub, account, contents, private):
    hub.repos[REPO] = Repo({"x": b""}, private=private)
    done = push(contents, REPO, AGAIN, public=True)
    assert hub.repos[REPO].private == done.private == private
    assert bool(done.notes) == private
    assert hub.repos[REPO].files["x"] == b""


def test_an_organisation_s_repo(hub, account, contents):
    push(contents, "a-team/mine", AGAIN)
    assert WEIGHTS in hub.repos["a-team/mine"].files


def test_nothing_new_is_no_commit(hub, account, page):
    push(page, REPO, AGAIN)
    assert not push(page, REPO, AGAIN).changed
    assert len(hub.repos[REPO].messages) == 1


def test_a_branch_is_made_and_main_left_alone(hub, account, contents):
    hub.repos[REPO] = Repo({"x": b""})
    done = push(contents, REPO, AGAIN, revision="v2", message="second try")
    assert WEIGHTS in hub.repos[REPO].branches["v2"].files
    assert hub.repos[REPO].branches["v2"].messages == ["second try"]
    assert hub.repos[REPO].files == {"x": b""}
    assert done.url.endswith("/tree/v2")


# The card that is there


def test_what_the_user_wrote_there_is_kept(hub, account, page):
    push(page, REPO, AGAIN)
    edited = PAGE.replace(OWN, "Letters to my bank").replace(
        "library_name", "license: mit\nlibrary_name"
    )
    hub.repos[REPO].files[CARD] = edited.encode()
    newer = PAGE.replace("| `seed` | 0 |", "| `seed` | 1 |")
    done = push(dataclasses.replace(page, files={**page.files, CARD: newer.encode()}), REPO, AGAIN)
    now = hub.repos[REPO].files[CARD].decode()
    assert all(text in now for text in ("Letters to my bank", "license: mit", "| `seed` | 1 |"))
    assert done.notes == ()


def test_a_change_elsewhere_is_told(hub, account, page):
    push(page, REPO, AGAIN)
    hub.repos[REPO].files[CARD] = PAGE.replace("## Settings", "## Mine").encode()
    assert "was replaced" in push(page, REPO, AGAIN).notes[0]


def test_a_card_of_another_is_left_alone(hub, account, page):
    hub.repos[REPO] = Repo({CARD: b"# Mine alone\r\n"})
    done = push(page, REPO, AGAIN)
    assert hub.repos[REPO].files[CARD] == b"# Mine alone\r\n"
    assert WEIGHTS in hub.repos[REPO].files
    assert "and stays" in done.notes[0]


def test_what_the_hub_says_of_a_card_is_passed_on(hub, account, contents):
    contents.files[CARD] = b"# No metadata"
    assert "empty or missing yaml metadata" in push(contents, REPO, AGAIN).notes[0]


# What goes wrong


def assert_nothing_new(hub):
    assert all(not repo.messages for repo in hub.repos.values())


def fails(kind, contents, word, repo=REPO):
    with pytest.raises(kind) as caught:
        push(contents, repo, AGAIN)
    assert "\n" not in str(caught.value)
    assert word in str(caught.value)
    return str(caught.value)


def test_nobody_is_logged_in(hub, account, contents, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    fails(UserError, contents, "log in with `hf auth login`, or set HF_TOKEN")
    assert hub.requests == []


def test_a_wrong_token(hub, account, contents, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    fails(UserError, contents, "does not take your token; log in with `hf auth login`")


@pytest.mark.parametrize("repo", ["readers/mine", "nobody/mine"])
def test_no_right_to_write(hub, account, contents, repo):
    fails(UserError, contents, f"does not let you write to {repo.split('/')[0]} (You don't", repo)
    assert repo not in hub.repos


def test_no_right_to_write_to_what_is_there(hub, account, contents):
    hub.repos["readers/mine"] = Repo({})
    fails(UserError, contents, "does not let you write to readers (you may only", "readers/mine")
    assert_nothing_new(hub)


def test_offline(hub, account, contents, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails(UserError, contents, "HF_HUB_OFFLINE is set; unset it")


def test_no_hub(account, contents, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    fails(UserError, contents, "cannot be reached at http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("step", "status", "kind", "word"),
    [
        ("create", 404, UserError, "is not on the hub, or not for this account"),
        ("create", 500, RunError, "the hub answered 500"),
        ("validate", 502, RunError, "was cut"),
        ("preupload", 404, UserError, "is not on the hub"),
        ("commit", 401, UserError, "does not take your token"),
        ("commit", 403, UserError, "does not let you write to someone"),
        ("commit", 409, RunError, "was changed by another"),
        ("commit", 412, RunError, "was changed by another"),
        ("commit", 413, UserError, "refused it with 413"),
        ("commit", 503, RunError, "the hub answered 503"),
    ],
)
def test_each_refusal_is_a_line_and_leaves_nothing(
    hub, account, contents, step, status, kind, word
):
    hub.faults[step] = Fault(statuses=[status] * 9)
    text = fails(kind, contents, word)
    assert (AGAIN in text) == (kind is RunError)
    assert_nothing_new(hub)


def test_one_refusal_in_passing_is_not_told(hub, account, contents):
    hub.faults["put"] = Fault(statuses=[503], cuts=[1000])
    assert push(contents, REPO, AGAIN).changed
    assert len(steps(hub, "/put/")) == 3


def test_a_push_that_is_cut_is_done_again_by_the_same_command(hub, account, contents):
    hub.faults["put"] = Fault(cuts=[1000] * 6)
    fails(RunError, contents, f"do it again: {AGAIN}")
    assert hub.repos[REPO].files == {".gitattributes": b""}
    assert push(contents, REPO, AGAIN).changed
    assert hub.repos[REPO].files[WEIGHTS] == contents.files[WEIGHTS].read_bytes()


def test_no_large_file_is_sent_twice(hub, account, contents):
    hub.faults["commit"] = Fault(cuts=[10])
    fails(RunError, contents, AGAIN)
    assert_nothing_new(hub)
    push(contents, REPO, AGAIN)
    assert len(steps(hub, "/put/")) == 1


def test_a_commit_whose_answer_was_lost_is_found_the_next_time(hub, account, page):
    hub.faults["commit"] = Fault(loses_answer=True)
    fails(RunError, page, AGAIN)
    assert not push(page, REPO, AGAIN).changed
    assert len(hub.repos[REPO].messages) == 1


def test_what_another_pushed_meanwhile_is_not_overwritten(hub, account, page, monkeypatch):
    push(page, REPO, AGAIN)

    def read_then_changed(*given):
        text = hub.repos[REPO].files[CARD].decode()
        hub.repos[REPO].sha = "b" * 40
        return text

    monkeypatch.setattr(pushing, "read_card", read_then_changed)
    changed = dataclasses.replace(page, files={**page.files, "config.yaml": b"seed: 1\n"})
    with pytest.raises(RunError, match="was changed by another"):
        push(changed, REPO, AGAIN)
    assert len(hub.repos[REPO].messages) == 1


def test_a_file_that_goes_away_is_told(hub, account, contents):
    contents.files[WEIGHTS].unlink()
    fails(RunError, contents, "is not a file")


# Names, and accounts before training


@pytest.mark.parametrize(
    "name",
    ["", "mine", "a/b/c", "a/", "/b", "a b/c", "https://hub/a/b", "-a/b", "a--b/c", "a/b.git"],
)
def test_what_is_no_name_is_refused(name):
    with pytest.raises(UserError, match=r"^--push-to "):
        check_repo(name, f"--push-to {name}")


@pytest.mark.parametrize("repo", ["someone/mine", "Someone/mine", "a-team/mine"])
def test_who_may_push_is_let_in(hub, account, repo):
    assert check_account(repo) == ""
    assert [r.path for r in hub.requests] == ["/api/whoami-v2"]


@pytest.mark.parametrize(
    ("told", "repo", "word"),
    [
        (
            Account("someone"),
            "nobody/mine",
            "someone may not write to nobody; push to one of: some",
        ),
        (Account("someone", orgs={"x": "read"}), "x/mine", "may not write to x"),
        (Account("someone", role="read"), REPO, "may only read"),
    ],
)
def test_who_may_not_is_told_before_training(hub, account, told, repo, word):
    hub.accounts["right"] = told
    with pytest.raises(UserError, match=word):
        check_account(repo)


def test_a_token_that_hides_its_rights_is_let_in(hub, account):
    hub.accounts["right"] = Account("someone", role="fineGrained")
    assert check_account("a-team/mine") == ""


@pytest.mark.parametrize("token", ["wrong", ""])
def test_a_login_that_is_none_is_told_before_training(hub, account, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match="hf auth login"):
        check_account(REPO)


@pytest.mark.parametrize("fault", [Fault(statuses=[503]), Fault(hangs_at=0)])
def test_a_hub_that_does_not_answer_stops_no_training(hub, account, monkeypatch, fault):
    monkeypatch.setattr(pushing, "ASK_S", 0.2)
    hub.faults["whoami"] = fault
    assert "not checked" in check_account(REPO)


def test_no_hub_stops_no_training(account, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "not checked, since the hub cannot be asked now" in check_account(REPO)
