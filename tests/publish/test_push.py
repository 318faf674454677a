"""Pushes through the real client to a test hub."""

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
CLOSED = "http://127.0.0.1:9"
OWN = "Describe your data here"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Skip the client's waits of up to 8 s between tries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def page(contents):
    """The contents with the card of a run."""
    return dataclasses.replace(contents, files={**contents.files, CARD: PAGE.encode()})


def steps(hub, step):
    return [r for r in hub.requests if r.method in ("POST", "PUT") and step in r.path]


def test_a_new_repo_is_private_and_gets_all_files_in_one_commit(hub, account, contents):
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


def test_large_files_are_not_part_of_the_commit_request(hub, account, contents):
    push(contents, REPO, AGAIN)
    assert [len(r.body) for r in steps(hub, "/put/")] == [256 * 400]
    (commit,) = steps(hub, "/commit/")
    assert len(commit.body) < 2000


def test_public_creates_a_public_repo(hub, account, contents):
    assert not push(contents, REPO, AGAIN, public=True).private
    assert not hub.repos[REPO].private


@pytest.mark.parametrize("private", [True, False])
def test_an_existing_repo_keeps_its_visibility(hub, account, contents, private):
    hub.repos[REPO] = Repo({"x": b""}, private=private)
    done = push(contents, REPO, AGAIN, public=True)
    assert hub.repos[REPO].private == done.private == private
    assert bool(done.notes) == private
    assert hub.repos[REPO].files["x"] == b""


def test_a_push_to_an_organisation(hub, account, contents):
    push(contents, "a-team/mine", AGAIN)
    assert WEIGHTS in hub.repos["a-team/mine"].files


def test_a_push_without_changes_makes_no_commit(hub, account, page):
    push(page, REPO, AGAIN)
    assert not push(page, REPO, AGAIN).changed
    assert len(hub.repos[REPO].messages) == 1


def test_a_branch_is_created_and_main_stays_unchanged(hub, account, contents):
    hub.repos[REPO] = Repo({"x": b""})
    done = push(contents, REPO, AGAIN, revision="v2", message="second try")
    assert WEIGHTS in hub.repos[REPO].branches["v2"].files
    assert hub.repos[REPO].branches["v2"].messages == ["second try"]
    assert hub.repos[REPO].files == {"x": b""}
    assert done.url.endswith("/tree/v2")


# An existing card


def test_the_section_of_the_user_is_kept(hub, account, page):
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


def test_an_edit_outside_of_the_section_gives_a_note(hub, account, page):
    push(page, REPO, AGAIN)
    hub.repos[REPO].files[CARD] = PAGE.replace("## Settings", "## Mine").encode()
    assert "were replaced" in push(page, REPO, AGAIN).notes[0]


def test_a_warning_of_the_hub_about_the_card_becomes_a_note(hub, account, contents):
    contents.files[CARD] = b"# No metadata"
    assert "empty or missing yaml metadata" in push(contents, REPO, AGAIN).notes[0]


# Failures


def assert_nothing_new(hub):
    assert all(not repo.messages for repo in hub.repos.values())


def fails(kind, contents, word, repo=REPO):
    with pytest.raises(kind) as caught:
        push(contents, repo, AGAIN)
    assert "\n" not in str(caught.value)
    assert word in str(caught.value)
    return str(caught.value)


def test_a_push_without_a_login_is_refused(hub, account, contents, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    fails(UserError, contents, "log in with `hf auth login`, or set HF_TOKEN")
    assert hub.requests == []


@pytest.mark.parametrize("repo", ["readers/mine", "nobody/mine"])
def test_a_push_to_a_foreign_name_is_refused(hub, account, contents, repo):
    fails(UserError, contents, f"does not let you write to {repo.split('/')[0]} (You don't", repo)
    assert repo not in hub.repos


def test_a_push_to_an_existing_repo_without_write_access_is_refused(hub, account, contents):
    hub.repos["readers/mine"] = Repo({})
    fails(UserError, contents, "does not let you write to readers (you may only", "readers/mine")
    assert_nothing_new(hub)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("setenv", "HF_TOKEN", "wrong"), "does not take your token; log in with `hf auth login`"),
        (("setattr", constants, "HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE is set; unset it"),
        (("setattr", constants, "ENDPOINT", CLOSED), f"cannot be reached at {CLOSED}"),
    ],
    ids=["wrong token", "offline", "unreachable"],
)
def test_a_push_that_cannot_begin_says_why(hub, account, contents, monkeypatch, change, word):
    how, *what = change
    getattr(monkeypatch, how)(*what)
    fails(UserError, contents, word)


@pytest.mark.parametrize(
    ("step", "status", "kind", "word"),
    [
        ("create", 404, UserError, "is not on the hub, or not visible to this account"),
        ("create", 500, RunError, "the hub answered 500"),
        ("validate", 502, RunError, "was interrupted"),
        ("preupload", 404, UserError, "is not on the hub"),
        ("commit", 401, UserError, "does not take your token"),
        ("commit", 403, UserError, "does not let you write to someone"),
        ("commit", 409, RunError, "somebody else changed it"),
        ("commit", 412, RunError, "somebody else changed it"),
        ("commit", 413, UserError, "refused the push with 413"),
        ("commit", 503, RunError, "the hub answered 503"),
    ],
)
def test_each_refusal_is_one_line_and_makes_no_commit(
    hub, account, contents, step, status, kind, word
):
    hub.faults[step] = Fault(statuses=[status] * 9)
    text = fails(kind, contents, word)
    assert (AGAIN in text) == (kind is RunError)
    assert_nothing_new(hub)


def test_a_single_failure_is_retried(hub, account, contents):
    hub.faults["put"] = Fault(statuses=[503], cuts=[1000])
    assert push(contents, REPO, AGAIN).changed
    assert len(steps(hub, "/put/")) == 3


def test_the_same_command_repeats_an_interrupted_push(hub, account, contents):
    hub.faults["put"] = Fault(cuts=[1000] * 6)
    fails(RunError, contents, f"try again: {AGAIN}")
    assert hub.repos[REPO].files == {".gitattributes": b""}
    assert push(contents, REPO, AGAIN).changed
    assert hub.repos[REPO].files[WEIGHTS] == contents.files[WEIGHTS].read_bytes()


def test_no_large_file_is_sent_twice(hub, account, contents):
    hub.faults["commit"] = Fault(cuts=[10])
    fails(RunError, contents, AGAIN)
    assert_nothing_new(hub)
    push(contents, REPO, AGAIN)
    assert len(steps(hub, "/put/")) == 1


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub, account, page):
    hub.faults["commit"] = Fault(loses_answer=True)
    fails(RunError, page, AGAIN)
    assert not push(page, REPO, AGAIN).changed
    assert len(hub.repos[REPO].messages) == 1


def test_a_concurrent_push_is_not_overwritten(hub, account, page, monkeypatch):
    push(page, REPO, AGAIN)

    def read_then_changed(*given):
        text = hub.repos[REPO].files[CARD].decode()
        hub.repos[REPO].sha = "b" * 40
        return text

    monkeypatch.setattr(pushing, "read_card", read_then_changed)
    changed = dataclasses.replace(page, files={**page.files, "config.yaml": b"seed: 1\n"})
    with pytest.raises(RunError, match="somebody else changed it"):
        push(changed, REPO, AGAIN)
    assert len(hub.repos[REPO].messages) == 1


def test_a_file_that_disappears_is_an_error(hub, account, contents):
    contents.files[WEIGHTS].unlink()
    fails(RunError, contents, "is not a file")


# Names, and accounts before training


@pytest.mark.parametrize(
    "name",
    ["", "mine", "a/b/c", "a/", "/b", "a b/c", "https://hub/a/b", "-a/b", "a--b/c", "a/b.git"],
)
def test_invalid_repository_names_are_refused(name):
    with pytest.raises(UserError, match=r"^--push-to "):
        check_repo(name, f"--push-to {name}")


@pytest.mark.parametrize("repo", ["someone/mine", "Someone/mine", "a-team/mine"])
def test_an_account_with_write_access_is_accepted(hub, account, repo):
    assert check_account(repo) == ""
    assert [r.path for r in hub.requests] == ["/api/whoami-v2"]


@pytest.mark.parametrize(
    ("found", "repo", "word"),
    [
        (
            Account("someone"),
            "nobody/mine",
            "someone may not write to nobody; push to one of: some",
        ),
        (Account("someone", orgs={"x": "read"}), "x/mine", "may not write to x"),
        (Account("someone", role="read"), REPO, "can only read"),
    ],
)
def test_an_account_without_write_access_is_refused_before_training(
    hub, account, found, repo, word
):
    hub.accounts["right"] = found
    with pytest.raises(UserError, match=word):
        check_account(repo)


def test_a_fine_grained_token_is_accepted(hub, account):
    hub.accounts["right"] = Account("someone", role="fineGrained")
    assert check_account("a-team/mine") == ""


@pytest.mark.parametrize("fault", [Fault(statuses=[503]), Fault(hangs_at=0)])
def test_a_hub_that_does_not_answer_does_not_stop_training(hub, account, monkeypatch, fault):
    monkeypatch.setattr(pushing, "ASK_S", 0.2)
    hub.faults["whoami"] = fault
    assert "not checked" in check_account(REPO)


def test_an_unreachable_hub_does_not_stop_training(account, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    assert "not checked, because the hub does not answer now" in check_account(REPO)
