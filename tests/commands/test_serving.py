from __future__ import annotations

import socket

import pytest

from tests.conftest import refused


def test_port_in_use_is_refused(run, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port {port}: is in use" in refused(capsys, "serve", run.path, "--port", port)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "nowhere.invalid"), "--host nowhere.invalid: is not a known address"),
        (("--host", "192.0.2.1"), "--host 192.0.2.1 --port 8080: "),
        (("--port", 70000), "--port"),
        (("--log-level", "loud"), "--log-level"),
        (("--temperature", "nan"), "--temperature nan"),
        (("--top-p", 2), "--top-p 2"),
        (("--max-tokens", 0), "--max-tokens 0"),
        (("--checkpoint", 7), "--checkpoint 7"),
    ],
)
def test_invalid_input_is_refused(run, capsys, arguments, message):
    assert message in refused(capsys, "serve", run.path, *arguments)


def test_missing_run_is_refused(capsys):
    assert "no run named nope" in refused(capsys, "serve", "nope")
