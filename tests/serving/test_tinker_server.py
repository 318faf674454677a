"""Tinker's API as its clients and anyone else ask it: a server of its own process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zstandard

from tests.conftest import events_of, wait_until
from tests.serving import hostile
from tests.serving.test_server import started
from tests.serving.test_tinker_wire import one, request
from your_ai.run import checkpoint, events
from your_ai.run.folder import RunFolder
from your_ai.serving.tinker_server import HELD_BYTES
from your_ai.serving.tinker_wire import MOST_BYTES, message_class

BASE = "tiny"
ADAM = {"learning_rate": 0.01}


@dataclass
class Served:
    process: subprocess.Popen
    port: int
    folder: Path
    log: Path

    def ask(self, method: str, path: str, data: bytes = b"", **headers: str) -> tuple[int, Any]:
        """Returns the status, and JSON or bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): text for name, text in headers.items()}
            connection.request(method, f"/api/v1/{path}", data or None, named)
            response = connection.getresponse()
            content = response.read()
            kind = response.headers.get("content-type", "")
            return response.status, json.loads(content) if "json" in kind else content

    def get(self, path: str) -> Any:
        return self.ask("GET", path)

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return self.ask("POST", path, data, **headers)

    def good(self, path: str, body: Any = None, **headers: str) -> Any:
        status, found = self.post(path, body, **headers)
        assert status == 200, found
        return found

    def result(self, path: str, body: Any = None, **headers: str) -> Any:
        """Ask for a job, and wait for its result."""
        return self.wait(self.good(path, body, **headers), **headers)

    def wait(self, future: Any, **headers: str) -> Any:
        while True:
            found = self.good("retrieve_future", {"request_id": future["request_id"]}, **headers)
            if not isinstance(found, dict) or found.get("type") != "try_again":
                return found

    def session(self) -> str:
        return self.good("create_session", {"tags": [], "sdk_version": "1"})["session_id"]

    def model(self, session: str | None = None, number: int = 0, **lora: Any) -> str:
        body = model_body(session or self.session(), number, **lora)
        return self.result("create_model", body)["model_id"]

    def is_well(self) -> bool:
        began = time.monotonic()
        return self.get("healthz") == (200, {"status": "ok"}) and time.monotonic() - began < 5


def model_body(session: str, number: int = 0, **lora: Any) -> dict[str, Any]:
    return {
        "session_id": session, "model_seq_id": number, "base_model": BASE,
        "lora_config": {"rank": 4, "seed": 1, **lora},
    }  # fmt: skip


def gradients_body(model: str, number: int, *texts: Any, **more: Any) -> bytes:
    made = request(*(texts or (one(9), one(20))), **more)
    made.model_id, made.seq_id = model, number
    return bytes(made.SerializeToString())


def sample_body(**more: Any) -> dict[str, Any]:
    return {
        "base_model": BASE, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1}, "num_samples": 2, **more,
    }  # fmt: skip


def gradients_of(body: bytes) -> Any:
    found = message_class("ForwardBackwardOutput")()
    found.ParseFromString(body)
    return found


def samples_of(body: bytes) -> list[tuple[list[int], list[float]]]:
    found = message_class("SampleResponse")()
    found.ParseFromString(body)
    return [
        (np.frombuffer(s.tokens, "<i4").tolist(), np.frombuffer(s.logprobs, "<f4").tolist())
        for s in found.sequences
    ]


@contextlib.contextmanager
def served(folder: Path, model: Path, *options: str) -> Iterator[Served]:
    log = folder / "serve.log"
    command = ("tinker", "--model", str(model), "--name", BASE)
    command += ("--max-seq-length", "128", "--rank", "8", *options)
    home = str(folder / "home")
    with started(log, *command, cwd=folder, YOUR_AI_HOME=home) as (process, port, _):
        yield Served(process, port, folder, log)


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), tiny_model) as found:
        yield found
        assert found.process.poll() is None
        assert found.log.read_text() == ""


def test_a_loop_trains_saves_loads_and_samples(server):
    model = server.model()
    asked = [server.good("forward_backward", gradients_body(model, 1))]
    asked.append(server.good("optim_step", {"model_id": model, "seq_id": 2, "adam_params": ADAM}))
    first = gradients_of(server.wait(asked[0]))
    assert server.wait(asked[1])["metrics"]["grad_norm"] > 0
    after = gradients_of(server.result("forward_backward", gradients_body(model, 3)))
    assert after.metrics[0].value < first.metrics[0].value
    saved = server.result("save_weights", {"model_id": model, "seq_id": 4, "path": "one"})
    assert saved["path"] == f"tinker://{model}/weights/one"
    session = model.partition(":")[0]
    body = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    again = server.result("load_weights", body)["model_id"]
    same = gradients_of(server.result("forward_backward", gradients_body(again, 1)))
    assert same.metrics[0].value == pytest.approx(after.metrics[0].value, rel=1e-5)
    body = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 3}
    sampler = server.result("save_weights_for_sampler", body)["sampling_session_id"]
    body = sample_body(sampling_session_id=sampler, seq_id=1, prompt_logprobs=True)
    samples = samples_of(server.result("asample", body))
    assert [len(tokens) for tokens, _ in samples] == [4, 4]
    assert server.get(f"sessions/{session}")[1] == {
        "training_run_ids": [model, again], "sampler_ids": [sampler],
    }  # fmt: skip
    assert server.get(f"samplers/{sampler}")[1]["model_path"].startswith("tinker://")


def test_only_the_last_tokens_of_a_prompt_are_scored_if_no_more_are_asked_for(server):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5, 6, 7]}]}
    found = []
    for more in ({}, {"prompt_logprobs_last_n": 2}):
        answer = message_class("SampleResponse")()
        body = sample_body(prompt=prompt, prompt_logprobs=True, **more)
        answer.ParseFromString(server.result("asample", body))
        found.append(np.frombuffer(answer.prompt_logprobs, "<f4"))
    whole, last = found
    assert np.isnan(whole).tolist() == [True, False, False, False, False]
    assert np.isnan(last).tolist() == [True, True, True, False, False]
    assert last[3:] == pytest.approx(whole[3:], abs=1e-5)


def test_a_client_of_an_earlier_server_hears_that_it_is_gone(server):
    status, _ = server.post("session_heartbeat", {"session_id": "tinker-before"})
    assert status == 410


def test_compressed_gradients_are_those_of_plain_ones(server):
    model = server.model()
    body = gradients_body(model, 1)
    plain = server.wait(server.good("forward_backward", body))
    packed = zstandard.ZstdCompressor().compress(gradients_body(model, 2))
    future = server.good("forward_backward", packed, Content_Encoding="zstd")
    assert gradients_of(server.wait(future)) == gradients_of(plain)


def test_a_model_that_is_created_again_is_the_same(server):
    session = server.session()
    futures = [server.good("create_model", model_body(session)) for _ in range(3)]
    assert {server.wait(future)["model_id"] for future in futures} == {f"{session}:train:0"}
    assert server.get(f"sessions/{session}")[1]["training_run_ids"] == [f"{session}:train:0"]


def test_a_model_whose_folder_exists_is_not_created(server):
    session = server.session()
    (server.folder / "runs" / f"{session}-train-0").mkdir(parents=True)
    found = server.result("create_model", model_body(session))
    assert found["category"] == "user"
    assert "exists" in found["error"]
    assert server.model(session, 1)
    assert server.get(f"sessions/{session}")[1]["training_run_ids"] == [f"{session}:train:1"]


def test_a_model_that_cannot_be_loaded_is_not_there(server):
    model = server.model()
    path = server.result("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})["path"]
    file = server.folder / "runs" / model.replace(":", "-") / "weights" / "a"
    (file / checkpoint.ADAPTERS).write_bytes(b"damaged")
    session = server.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    assert "checksum" in server.result("load_weights", body)["error"]
    status, found = server.post("get_info", {"model_id": f"{session}:train:0"})
    assert (status, "is not here" in found["detail"]) == (422, True)


def test_unloaded_models_end_their_jobs_and_leave_their_adapters(server):
    model = server.model()
    waits = server.good("forward_backward", gradients_body(model, 7))
    assert server.result("unload_model", {"model_id": model})["type"] == "unload_model"
    assert server.wait(waits) == {"error": "its model was unloaded", "category": "user"}
    status, found = server.post("forward_backward", gradients_body(model, 1))
    assert (status, "is not here" in found["detail"]) == (422, True)
    run = RunFolder(server.folder / "runs" / model.replace(":", "-"))
    assert (run.adapter / checkpoint.ADAPTERS).is_file()
    assert isinstance(events_of(run)[-1], events.Finished)


def test_a_model_whose_adapter_cannot_be_written_is_not_lost(server):
    """It can be unloaded once there is room."""
    session = server.session()
    model = server.model(session)
    run = RunFolder(server.folder / "runs" / model.replace(":", "-"))
    aside = run.path.rename(run.path.with_name("aside"))
    run.path.touch()
    for _ in range(2):
        assert server.ask("POST", f"sessions/{session}/finish") == (200, {})
        assert "adapter" in server.result("unload_model", {"model_id": model})["error"]
    run.path.unlink()
    aside.rename(run.path)
    assert gradients_of(server.result("forward_backward", gradients_body(model, 1))).metrics
    for _ in range(2):
        assert server.result("unload_model", {"model_id": model}).get("model_id") == model
    assert (run.adapter / checkpoint.ADAPTERS).is_file()
    assert isinstance(events_of(run)[-1], events.Finished)


def test_a_session_that_ends_ends_its_models(server):
    session = server.session()
    created = server.good("create_model", model_body(session))
    assert server.ask("POST", f"sessions/{session}/finish") == (200, {})
    model = server.wait(created)["model_id"]
    wait_until(lambda: server.post("get_info", {"model_id": model})[0] == 422)


def test_samples_without_a_session_are_separate_requests(server):
    bodies = [sample_body(seq_id=1, sampling_params={"max_tokens": n}) for n in (2, 5)]
    futures = [server.good("asample", body) for body in bodies]
    found = [samples_of(server.wait(future)) for future in futures]
    assert [len(samples[0][0]) for samples in found] == [2, 5]


def test_a_sample_that_is_asked_for_again_is_the_same(server):
    session = server.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = server.good("create_sampling_session", body)["sampling_session_id"]
    body = sample_body(sampling_session_id=sampler, seq_id=1)
    first, second = (server.good("asample", body) for _ in range(2))
    assert first == second
    assert server.wait(first) == server.wait(second)


@pytest.mark.parametrize("stop", [[], "zzz", ["zzz", "yyy"], [1, 2]])
def test_stops_are_taken(server, stop):
    body = sample_body(sampling_params={"max_tokens": 3, "stop": stop})
    assert samples_of(server.result("asample", body))


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0}, {"top_k": 1 << 30}, {"top_k": 1, "top_p": 1e-6}, {"temperature": 100}],
)
def test_samples_at_the_bounds_of_their_settings(server, given):
    body = sample_body(sampling_params={"max_tokens": 3, **given})
    assert len(samples_of(server.result("asample", body))) == 2


# Requests that are refused

HUGE, DEEP = 10**400, "[" * 20_000 + "]" * 20_000
NO_IDS = ["..", "../..", "/etc/passwd", "a\0b", "ä:train:0", "a:train:0/..", "\u202e", "a" * 999]
NO_NAMES = ["..", "a/b", "../a", "/etc", "a\0", "ä", ".hidden", "a" * 101, "-a", 3, ["a"]]
PATHS = [
    "tinker://{m}/weights/..", "tinker://../weights/a", "tinker://{m}/weights/a/b",
    "tinker://{m}/parked/a", "file:///etc/passwd", "/etc/passwd", "tinker://{m}/weights/a\0",
    "tinker://{m}/weights/none", "tinker://..:train:0/weights/a", "", 3, None, [], "\ud800",
]  # fmt: skip


def refusals(model: str, sampler: str) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Paths, bodies, and the statuses of which one is right."""
    session = model.partition(":")[0]
    own = {"model_id": model, "seq_id": 1}
    for name, values in {
        "session_id": [3, None, [], {}, "", "unknown", "..", "\ud800", "a\nb"],
        "model_seq_id": [-1, 1 << 40, HUGE, 1.5, "1", True, None],
        "base_model": [3, None, "", "other/model", "a" * 2000, "../.."],
        "lora_config": [3, None, [], {}, {"rank": 0}, {"rank": -1}, {"rank": 9}, {"rank": HUGE},
                        {"rank": 4, "seed": -1}, {"rank": 4, "seed": HUGE},
                        {"rank": 4, "train_mlp": 3}],
        "optimizer_config": [3, [], "sgd", {"type": "sgd"}, {"type": 3}],
    }.items():  # fmt: skip
        for value in values:
            yield "create_model", {**model_body(session, 99), name: value}, (404, 422)
    for name, values in {
        "seq_id": [0, -1, 1 << 60, HUGE, 1.5, "1", True, None],
        "model_id": [*NO_IDS, 3, None, "unknown:train:0"],
        "adam_params": [3, None, [], {"learning_rate": -1}, {"learning_rate": "1"},
                        {"beta1": 1}, {"beta2": 2}, {"beta2": 0.99999999}, {"eps": 0},
                        {"eps": HUGE}, {"weight_decay": -HUGE}, {"grad_clip_norm": True}],
    }.items():  # fmt: skip
        for value in values:
            yield "optim_step", {**own, "adam_params": ADAM, name: value}, (422,)
    for value in NO_NAMES:
        for path in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
            yield path, {**own, "path": value}, (422,)
    for value in (-1, HUGE, "1", True):
        yield "save_weights_for_sampler", {**own, "sampling_session_seq_id": value}, (422,)
    for value in PATHS:
        path = value.format(m=model) if isinstance(value, str) else value
        yield "load_weights", {**own, "path": path}, (422,)
        yield "weights_info", {"tinker_path": path}, (422,)
        body = {"source_path": path, "session_id": session, "model_seq_id": 9}
        yield "copy_weights", body, (422,)
        if path:
            body = {"session_id": session, "sampling_session_seq_id": 1, "model_path": path}
            yield "create_sampling_session", body, (422,)
    for params in (
        3, None, {"max_tokens": 0}, {"max_tokens": 127}, {"max_tokens": HUGE}, {"stop": 3},
        {"stop": {"a": 1}}, {"stop": [""]}, {"stop": [1.5]}, {"stop": [True]}, {"stop": ""},
        {"stop": "\ud800"}, {"stop": ["a", "\udfff"]},
        {"stop": ["a"] * 65}, {"stop": "a" * 1001}, {"temperature": -1}, {"temperature": HUGE},
        {"top_p": 0}, {"top_p": 2}, {"top_k": -2}, {"top_k": 1.5}, {"seed": -1}, {"seed": HUGE},
    ):  # fmt: skip
        yield "asample", sample_body(sampling_params=params), (422,)
    for more in (
        {"num_samples": 0}, {"num_samples": 1025}, {"num_samples": HUGE}, {"prompt": 3},
        {"prompt": {"chunks": []}}, {"prompt": {"chunks": [{"tokens": [-1]}]}},
        {"prompt": {"chunks": [{"tokens": [10**6]}]}}, {"prompt": {"chunks": [{"tokens": [HUGE]}]}},
        {"prompt": {"chunks": [{"tokens": [1] * 129}]}}, {"prompt": {"chunks": [{}] * 20_000}},
        {"prompt": {"chunks": [{"type": "image", "data": ""}]}}, {"base_model": "x"},
        {"sampling_session_id": "unknown"}, {"model_path": "tinker://a"}, {"seq_id": -1},
        {"prompt_logprobs": 3},
        *({name: value} for value in (-1, HUGE, 129, 1.5, "3", True, None, [])
          for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
          if value is not None),
        *({"target_prompt_logprobs": value} for value in (
            3, [], {}, {"shape": [2, 1]}, {"data": [3, 4], "shape": [2, 1]},
            *({"dtype": "int64", **each} for each in (
                {"data": [3, 4], "shape": [1, 2]}, {"data": [3], "shape": [2, 1]},
                {"data": [], "shape": [2, 0]}, {"data": [10**6, 3], "shape": [2, 1]},
                {"data": [HUGE, 3], "shape": [2, 1]}, {"data": [-2, 3], "shape": [2, 1]},
                {"data": [1.5, 3], "shape": [2, 1]}, {"data": [3, 4], "shape": [2, True]},
                {"data": [3], "shape": [2, 9], "sparse_crow_indices": [0, 1]},
                {"data": [3], "shape": [2, 9], "sparse_crow_indices": [0, 1, 1],
                 "sparse_col_indices": [9]},
                {"data": [3], "shape": [2, 9], "sparse_crow_indices": [0, 2, 1],
                 "sparse_col_indices": [1]},
                {"data": [3], "shape": [2, HUGE], "sparse_crow_indices": [0, 1, 1],
                 "sparse_col_indices": [1]},
            )),
        )),
    ):  # fmt: skip
        yield "asample", sample_body(**more), (422,)
    for value in (None, "", 3, [], "a" * 5000):
        yield "retrieve_future", {"request_id": value}, (422,)
        yield "cancel_future", {"request_id": value}, (422,)
    yield "retrieve_future", {"request_id": "unknown"}, (410,)
    for body in (
        b"", b"{", b"[]", b"3", b"\xff", b'{"a": NaN}', b'{"a": 1e999}', DEEP.encode(),
        b'{"a": ' + DEEP.encode() + b"}", b'{"a": 1, "a": 2}', b'{"a": [' + b"1," * 10**6 + b"1]}",
        b'{"model_id": "\\ud800"}', b'{"model_id": ' + b"9" * 5000 + b"}",
    ):  # fmt: skip
        for path in ("get_info", "unload_model", "optim_step"):
            yield path, body, (422,)
    yield "get_info", {"model_id": sampler}, (422,)


def test_wrong_fields_are_refused_at_once_with_one_line(server):
    session = server.session()
    model = server.model(session)
    asked = list(refusals(model, f"{session}:sample:0"))
    assert len(asked) >= 100
    for path, body, allowed in asked:
        began = time.monotonic()
        status, found = server.post(path, body)
        where = f"{path} {str(body)[:300]}: {status} {found}"
        assert status in allowed, where
        if status != 200:
            assert list(found) == ["detail"], where
            assert 0 < len(found["detail"]) <= 500, where
            assert "\n" not in found["detail"], where
        assert time.monotonic() - began < 5, where
    assert server.is_well()
    assert server.get(f"sessions/{session}")[1]["training_run_ids"] == [model]
    names = {path.name for path in (server.folder / "runs" / model.replace(":", "-")).iterdir()}
    assert not names & {"weights", "sampler_weights"}
    step = server.result("forward_backward", gradients_body(model, 2))
    assert gradients_of(step).metrics


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 26))


@pytest.mark.parametrize(
    ("change", "headers", "named"),
    [
        (lambda m: b"junk", {}, "body"),
        (lambda m: m, {"Content_Encoding": "gzip"}, "gzip"),
        (lambda m: m, {"Content_Encoding": "zstd"}, "zstd"),
        (lambda m: BOMB, {"Content_Encoding": "zstd"}, "more than"),
        (lambda m: b"\x1a\x00" * (1 << 22), {}, "fields"),
    ],
    ids=["junk", "gzip", "no zstd", "a bomb", "empty texts"],
)  # fmt: skip
def test_wrong_bodies_of_gradients_are_refused(server, change, headers, named):
    body = change(gradients_body("a:train:0", 1))
    status, found = server.post("forward_backward", body, **headers)
    assert (status, named in found["detail"]) == (422, True)
    assert server.is_well()


@pytest.mark.parametrize(
    "text",
    [
        one(129), one(3, target_tokens=np.array([1, 2, 10**6])),
        {**one(3), "tokens": [1, 2, 2**31 - 1]}, {**one(3), "tokens": [-1, 2, 3]},
    ],
    ids=["too long", "a huge target", "a huge token", "a negative token"],
)  # fmt: skip
def test_texts_that_the_model_cannot_read_are_refused(server, text):
    model = server.model()
    status, found = server.post("forward_backward", gradients_body(model, 1, text))
    assert (status, "text 1" in found["detail"]) == (422, True)


def test_calls_do_not_wait_for_one_that_was_refused(server):
    """Its client does not send its number again."""
    model = server.model()
    assert server.post("forward_backward", gradients_body(model, 1, one(129)))[0] == 422
    assert server.post("forward_backward", gradients_body(model, 2, loss="x"))[0] == 422
    assert server.post("save_weights", {"model_id": model, "seq_id": 3, "path": ".."})[0] == 422
    assert gradients_of(server.result("forward_backward", gradients_body(model, 4))).metrics


def test_steps_beyond_float32_change_nothing(server):
    model = server.model()
    text = one(3, weights=np.full(3, 3e38, np.float32))
    server.result("forward_backward", gradients_body(model, 1, text))
    body = {"model_id": model, "seq_id": 2, "adam_params": ADAM}
    assert "changed nothing" in server.result("optim_step", body)["error"]


@pytest.mark.parametrize("number", [2, 100, 2**31 - 1])
def test_a_number_after_a_gap_waits_for_those_before(server, number):
    model = server.model()
    server.good("forward_backward", gradients_body(model, number))
    first = server.result("forward_backward", gradients_body(model, 1))
    assert gradients_of(first).metrics
    server.result("unload_model", {"model_id": model})


def test_old_numbers_are_the_same_job_and_never_another(server):
    model = server.model()
    body = {"model_id": model, "seq_id": 1, "adam_params": ADAM}
    first = server.result("forward_backward", gradients_body(model, 1))
    assert server.result("optim_step", body) == first


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "healthz", 404), ("PATCH", "create_model", 405), ("GET", "create_model", 404),
        ("POST", "healthz", 404), ("GET", "", 404), ("GET", "../../etc/passwd", 404),
        ("GET", "sessions/..", 404), ("GET", "sessions/%2e%2e%2f", 404),
        ("GET", "training_runs/..", 422), ("GET", "training_runs/%2e%2e", 422),
        ("GET", "training_runs/a:train:1", 422), ("GET", "training_runs/..:train:1", 422),
        ("GET", "training_runs/..:train:1/checkpoints", 422), ("GET", "samplers/%00", 404),
        ("GET", "training_runs?limit=x", 422), ("GET", "training_runs?offset=" + "9" * 5000, 422),
        ("GET", "training_runs?offset=" + "9" * 50, 200), ("GET", "checkpoints?limit=-5", 200),
        ("DELETE", "training_runs/a:train:1/checkpoints/../../../x", 422),
        ("DELETE", "training_runs/..:train:1/checkpoints/weights/a", 422),
        ("DELETE", "training_runs/a:train:1/checkpoints/parked/a", 422),
        ("DELETE", "training_runs/a:train:1/checkpoints/weights/..", 422),
        ("DELETE", "healthz", 404), ("POST", "sessions/unknown/finish", 404),
        ("PUT", "training_runs/a:train:1/checkpoints/external_weights/../ttl", 422),
        ("GET", "training_runs/..:train:1/checkpoints/weights/a/external_weights_urls", 422),
    ],
)  # fmt: skip
def test_wrong_addresses_are_refused(server, method, path, status):
    found, content = server.ask(method, path)
    assert (found, b"Traceback" in str(content).encode()) == (status, False)


def test_saved_models_are_listed_copied_and_deleted(server):
    session = server.session()
    model = server.model(session)
    path = server.result("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})["path"]
    body = {"session_id": session, "model_seq_id": 5, "source_path": path}
    copied = server.good("copy_weights", body)["tinker_path"]
    assert server.good("weights_info", {"tinker_path": copied})["lora_rank"] == 4
    listed = server.get(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [path]
    assert server.ask("DELETE", f"training_runs/{model}/checkpoints/weights/a") == (200, {})
    assert server.get(f"training_runs/{model}/checkpoints")[1]["checkpoints"] == []
    assert server.get("training_runs?limit=1000")[0] == 200


def test_a_damaged_saved_model_can_be_deleted(server):
    model = server.model()
    server.result("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    run = server.folder / "runs" / model.replace(":", "-")
    (run / "weights" / "a" / "model.json").write_text("{")
    (run / "weights" / "link").symlink_to(run)
    place = f"training_runs/{model}/checkpoints/weights"
    assert server.ask("DELETE", f"{place}/a") == (200, {})
    assert [path.name for path in (run / "weights").iterdir()] == ["link"]
    for name in ("a", "link"):
        assert server.ask("DELETE", f"{place}/{name}")[0] == 422
    assert (run / "config.yaml").is_file()


def test_a_damaged_or_foreign_run_does_not_hide_the_others(server):
    model = server.model()
    server.result("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    runs = server.folder / "runs"
    (runs / model.replace(":", "-") / "weights" / "a" / "model.json").write_text("{")
    (runs / f"{'a' * 100}-train-1").mkdir(exist_ok=True)
    (runs / "b..c-train-1").mkdir(exist_ok=True)
    status, found = server.get("training_runs?limit=1000")
    assert status == 200
    assert model in [each["training_run_id"] for each in found["training_runs"]]
    assert server.get("checkpoints?limit=1000")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["", "x", "{m}/external_weights/a", "{m}/external_weights/a/no", "{m}/external_weights/b/c",
     "{m}/external_weights/a/../a/adapter_config.json", "{m}/external_weights/a//etc/passwd",
     "{m}/external_weights/a/%2e%2e/%2e%2e/config.yaml", "{m}/weights/w/model.json",
     "../../external_weights/a/b"],
)  # fmt: skip
def test_only_files_of_external_weights_are_given(server, path):
    model = server.model()
    server.result("save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    server.result("save_weights_external", {"model_id": model, "seq_id": 2, "path": "a"})
    assert server.get(f"files/{model}/external_weights/a/adapter_config.json")[0] == 200
    assert server.get(f"files/{path.format(m=model)}")[0] in (404, 422)
    place = f"training_runs/{model}/checkpoints/weights/w"
    assert server.get(f"{place}/external_weights_urls")[0] == 422


@pytest.mark.parametrize(
    ("name", "text"),
    [("Host", "evil.example"), ("Host", "localhost.evil.example"), ("Origin", "http://evil.example"),
     ("Origin", "null")],
)  # fmt: skip
def test_web_pages_of_others_may_not_ask(server, name, text):
    status, found = server.ask("POST", "create_session", b"{}", **{name: text})
    assert (status, list(found)) == (403, ["detail"])


def send(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[bytes, float]:
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                data += part
    return data[9:12], time.monotonic() - began


def head(length: int) -> bytes:
    line = "POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\n"
    return f"{line}Content-Length: {length}\r\n\r\n".encode()


def test_large_and_slow_requests_do_not_hold_up_others(server):
    with ThreadPoolExecutor(12) as pool:
        slow = [pool.submit(send, server.port, head(100), *[b"a"] * 60, pause_s=0.2)]
        slow += [pool.submit(send, server.port, head(10)) for _ in range(5)]
        large = [pool.submit(send, server.port, head(1 << 25), bytes(1 << 20)) for _ in range(3)]
        for _ in range(10):
            assert server.is_well()
            time.sleep(0.1)
        assert {status for status, _ in (each.result() for each in large)} == {b"413"}
        for each in slow:
            status, seconds = each.result()
            assert (status, seconds < 15) == (b"408", True)
    assert server.is_well()


OTHERWISE = {"DELETE": {404}, "PUT": {411}, "a request in a body": {404}}


def test_hostile_clients_are_refused_as_by_the_other_server(server):
    """What is wrong with a request of HTTP, whatever it asks for."""
    rng = random.Random(0)
    kinds = (hostile.lengths, hostile.heads, hostile.senders, hostile.manners)
    asked = [each for kind in kinds for each in kind(rng)]
    assert len(asked) >= 60
    for each in asked:
        answer = hostile.send(server.port, each)
        # Here a path of the other server is nothing, and DELETE and PUT are methods.
        allowed = OTHERWISE.get(each.name) or {404 if s == 200 else s for s in each.allowed}
        assert answer.status in allowed, (each.name, answer)
        assert answer.seconds < hostile.MOST_S, each.name
        if answer.status >= 400 and answer.body:
            assert list(json.loads(answer.body)) == ["detail"], each.name
        assert server.is_well(), each.name


def test_requests_that_are_read_take_no_more_than_the_plan_counts(server):
    """Large ones that are well formed and are refused for their lengths, and bombs."""
    process = psutil.Process(server.process.pid)
    before, over, peak = process.memory_info().rss, threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.01):
            peak[0] = max(peak[0], process.memory_info().rss)

    count = 600_000
    ids = np.arange(count) % 60
    body = gradients_body("a:train:0", 1, {"tokens": ids, "target_tokens": ids})
    packed = zstandard.ZstdCompressor().compress(body)
    with ThreadPoolExecutor(9) as pool:
        watching = pool.submit(watch)
        asked = [
            pool.submit(server.post, "forward_backward", data, Content_Encoding="zstd")
            for data in [packed] * 6 + [BOMB] * 2
        ]
        statuses = {each.result()[0] for each in asked}
        over.set()
        watching.result()
    assert statuses == {422}
    assert len(body) > 0.8 * MOST_BYTES
    assert peak[0] - before < HELD_BYTES


def test_many_that_wait_for_results_leave_connections_to_others(server):
    model = server.model()
    waits = server.good("forward_backward", gradients_body(model, 2))
    with ThreadPoolExecutor(60) as pool:
        body = {"request_id": waits["request_id"]}
        polls = [pool.submit(server.post, "retrieve_future", body) for _ in range(60)]
        time.sleep(1.5)
        assert server.is_well()
        server.good("forward_backward", gradients_body(model, 1))
        answers = [poll.result() for poll in polls]
    assert all(status in (200, 503) for status, _ in answers)
    assert sum(isinstance(found, bytes) for _, found in answers) >= 20
    server.result("unload_model", {"model_id": model})


def test_threads_that_ask_at_once_each_get_their_own(server):
    """Sessions, models, samplers and samples of eight clients."""

    def client(seed: int) -> None:
        session = server.session()
        model = server.model(session, seed=seed)
        for number in range(3):
            body = gradients_body(model, 3 * number + 1)
            server.good("forward_backward", body)
            step = {"model_id": model, "seq_id": 3 * number + 2, "adam_params": ADAM}
            server.good("optim_step", step)
            asked = {"model_id": model, "seq_id": 3 * number + 3, "sampling_session_seq_id": number}
            sampler = server.result("save_weights_for_sampler", asked)["sampling_session_id"]
            assert sampler == f"{session}:sample:{number}"
            samples = server.result("asample", sample_body(sampling_session_id=sampler, seq_id=1))
            assert len(samples_of(samples)) == 2
        status, found = server.get(f"sessions/{session}")
        assert (status, len(found["sampler_ids"])) == (200, 3)
        assert server.result("unload_model", {"model_id": model})["model_id"] == model

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(client, seed) for seed in range(4)]:
            each.result()


# Starting and stopping


def tinker(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "your_ai", "tinker", *options], cwd=folder, text=True,
        capture_output=True, timeout=60,
        env={**os.environ, "YOUR_AI_HOME": str(folder / "home"), **environment},
    )  # fmt: skip


def test_wrong_starts_end_with_one_line(tmp_path, tiny_model, server):
    model = ("--model", str(tiny_model))
    for options, named in (
        ((*model, "--port", str(server.port)), "--port"),
        ((*model, "--port", "0", "--host", "0.0.0.0"), "--token"),
        ((*model, "--port", "0", "--host", "no.such.host.invalid"), "--host"),
        ((*model, "--port", "0", "--max-memory", "0.001"), "memory"),
        (("--model", "no/such"), "no/such"),
    ):
        ended = tinker(tmp_path, *options)
        assert (ended.returncode, named in ended.stderr) == (2, True), ended.stderr
        assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_missing_packages_are_named_in_one_line(tmp_path):
    block = "import sys, importlib.abc\n" + (
        "class Missing(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'zstandard':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from your_ai.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", block, "tinker"], cwd=tmp_path, text=True, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "pip install '.[tinker]'" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_others_need_the_token(tmp_path, tiny_model):
    with served(tmp_path, tiny_model, "--host", "0.0.0.0", "--token", "secret") as server:
        for headers in ({}, {"X_API_Key": "wrong"}, {"X_API_Key": "secre"}, {"X_API_Key": "é"}):
            status, found = server.post("create_session", {}, **headers)
            assert (status, "token" in found["detail"]) == (401, True)
            assert "secret" not in found["detail"]
        key = {"X_API_Key": "secret"}
        session = server.good("create_session", {}, **key)["session_id"]
        model = server.result("create_model", model_body(session), **key)["model_id"]
        body = {"model_id": model, "seq_id": 1, "path": "a"}
        saved = server.result("save_weights_external", body, **key)
        assert saved["size_bytes"] > 1000
        place = f"training_runs/{model}/checkpoints/external_weights/a/external_weights_urls"
        assert server.get(place)[0] == 401
        status, found = server.ask("GET", place, b"", **key)
        assert status == 200
        assert {"adapter_model.safetensors", "mlx/adapters.safetensors"} <= {*found["urls"]}
        called = server.ask("GET", place, b"", **key, Host="mac.example:80")[1]["urls"]
        assert all(url.startswith("http://mac.example:80/api/v1/files/") for url in called.values())
        for url in found["urls"].values():
            target = url.partition("/api/v1/")[2]
            end = "0" if target[-1] != "0" else "1"
            assert server.get(target)[0] == 200
            for wrong in (target[:-1] + end, target.partition("?")[0],
                          target.replace("until=", "until=9")):  # fmt: skip
                assert server.get(wrong)[0] == 401


def test_a_model_whose_files_are_lost_does_not_take_others_with_it(tmp_path, tiny_model):
    with served(tmp_path, tiny_model) as server:
        session = server.session()
        models = [server.model(session, number) for number in range(3)]
        runs = [RunFolder(tmp_path / "runs" / model.replace(":", "-")) for model in models]
        shutil.rmtree(runs[0].path / "parked")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 1
        assert "Traceback" not in server.log.read_text()
    written = [(run.adapter / checkpoint.ADAPTERS).is_file() for run in runs]
    assert written == [False, True, True]


@pytest.mark.parametrize("kind", ["samples", "gradients"])
def test_ctrl_c_ends_a_job_soon_and_leaves_the_adapters(tmp_path, tiny_model, kind):
    options = ("--max-seq-length", "1024", "--batch-size", "1")
    with served(tmp_path, tiny_model, *options) as server:
        session = server.session()
        models = [server.model(session, number) for number in range(2)]
        if kind == "samples":
            params = {"max_tokens": 1000, "stop": []}
            server.good("asample", sample_body(sampling_params=params, num_samples=1000))
        else:
            texts = [{"tokens": [1] * 1000, "target_tokens": np.ones(1000, int)}] * 1000
            server.good("forward_backward", gradients_body(models[0], 1, *texts))
        time.sleep(2)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        assert time.monotonic() - began < 10
        assert "Traceback" not in server.log.read_text()
    for model in models:
        run = RunFolder(tmp_path / "runs" / model.replace(":", "-"))
        assert checkpoint.fault(run.adapter, (checkpoint.ADAPTERS,)) is None
        assert isinstance(events_of(run)[-1], events.Finished)
        assert not [path.name for path in run.path.iterdir() if path.name.startswith(".")]
