"""Whose fault an error is."""

from __future__ import annotations

import pytest

from your_ai.errors import RunError, UserError, explain, suppress_model_errors

UNREADABLE = RuntimeError("[read] Unable to read from file.")


@pytest.mark.parametrize(
    "error", [ValueError("shapes"), RuntimeError("[matmul] shapes"), KeyError()]
)
def test_errors_of_a_models_code_are_suppressed(error):
    with suppress_model_errors():
        raise error


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[malloc] Unable to allocate 9 bytes."), UNREADABLE,
     RunError("gone"), UserError("wrong")],
)  # fmt: skip
def test_errors_of_the_machine_and_of_users_are_not_suppressed(error):
    with pytest.raises(type(error)), suppress_model_errors():
        raise error


def test_a_file_that_cannot_be_read_is_explained():
    assert "files can no longer be read" in explain(str(UNREADABLE))
