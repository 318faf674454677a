"""Hostile requests to a live server, which must continue to answer good ones."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.generation.test_generate import train_in
from tests.serving import hostile
from tests.serving.hostile import ASKED, KINDS, fault, is_well, post, send, slow
from tests.serving.test_server import Served, served

GROWTH_BYTES = 400e6  # of the server: a few large requests leave memory with the allocator
REQUESTS = [each for kind in KINDS.values() for each in kind(random.Random(0))]


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model) -> Iterator[Served]:
    run = train_in(tmp_path_factory.mktemp("runs"), tiny_model)
    with served(run, "--log-level", "error") as found:
        yield found


def test_hostile_requests_are_refused_and_good_ones_answered(server):
    process = psutil.Process(server.process.pid)
    assert is_well(server.port)
    before_bytes = process.memory_info().rss
    slow_ones = list(slow(random.Random(0)))
    with ThreadPoolExecutor(len(slow_ones)) as pool:
        waiting = [(each, pool.submit(send, server.port, each)) for each in slow_ones]
        for each in REQUESTS:
            assert fault(each, send(server.port, each)) is None
            assert is_well(server.port), each.name
        for each, answer in waiting:
            assert fault(each, answer.result()) is None
    assert len(REQUESTS) >= 60
    assert process.memory_info().rss - before_bytes < GROWTH_BYTES
    assert server.log.read_text() == ""


def test_client_that_never_reads_does_not_block_others(server):
    endless = {"prompt": "a", "max_tokens": 10**9, "logit_bias": {"1": -100}, "stream": True}
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(post(endless, hostile.COMPLETION))
        time.sleep(0.2)
        began = time.monotonic()
        assert is_well(server.port)
        assert time.monotonic() - began < hostile.MOST_S


def test_generation_stops_when_the_client_leaves(server):
    """A moment later the server no longer uses the CPU."""
    endless = {"messages": ASKED, "max_tokens": 10**9, "logit_bias": {"1": -100}}
    process = psutil.Process(server.process.pid)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(post(endless))
        time.sleep(0.3)
    time.sleep(0.5)
    before_s = process.cpu_times().user
    time.sleep(1.0)
    assert process.cpu_times().user - before_s < 0.5
