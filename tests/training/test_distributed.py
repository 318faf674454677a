"""Several processes train the adapter of one, and survive the loss of any of them."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import events_of, peak_of, train
from tests.data.test_batches import make_examples
from your_ai.config import TrainConfig
from your_ai.data.batches import make_schedule
from your_ai.engine.gradients import HeldGradients, gradients_in
from your_ai.engine.scoring import ScoredTexts, scored_by_all
from your_ai.errors import UserError
from your_ai.memory.budget import process_here
from your_ai.memory.estimate_adapters import reduction_bytes
from your_ai.memory.facts import BlockFacts, ModelFacts, facts_of
from your_ai.memory.governor import MemoryAction
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.workload import RING_BYTES, DataSizes, Plan, Training, workload_of
from your_ai.objectives.objective import Totals
from your_ai.run import events, host
from your_ai.run.folder import RunFolder, create
from your_ai.run.stopping import Stop
from your_ai.session.supervisor import supervise
from your_ai.training import distributed
from your_ai.training.distributed import (
    ALONE,
    FIRST_STEPS,
    FRAME_BYTES,
    MEASURED_STEPS,
    PIECE_BYTES,
    Ranks,
    digest_of,
)
from your_ai.training.joining import join
from your_ai.training.process import awake_elsewhere


class Together:
    """Ranks in threads of this process, which exchange through lists instead of sockets."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.given: list = [None] * size

    def ranks(self, **changes) -> list[Ranks]:
        hosts = tuple(f"mac{n}" for n in range(self.size))
        found = [
            Ranks(n, self.size, hosts, shares=(1.0,) * self.size, **changes)
            for n in range(self.size)
        ]
        for each in found:
            each.collect = lambda operation, array, rank=each.rank: self.all(operation, array, rank)
        return found

    def all(self, operation, array, rank):
        self.given[rank] = np.array(array)
        self.barrier.wait(10)
        given = list(self.given)
        self.barrier.wait(10)
        whole = np.concatenate(given) if operation is mx.distributed.all_gather else sum(given)
        return mx.array(whole.astype(given[0].dtype))

    def run(self, work) -> list:
        results: list = [None] * self.size

        def one(rank: Ranks) -> None:
            try:
                results[rank.rank] = work(rank)
            except Exception as error:
                results[rank.rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in self.ranks()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results


def test_values_are_gathered_in_the_order_of_ranks_whatever_their_size():
    def work(ranks: Ranks):
        return ranks.gather([ranks.rank, "x" * (ranks.rank * 2 * FRAME_BYTES)])

    for found in Together(3).run(work):
        assert [len(text) for _, text in found] == [0, 2 * FRAME_BYTES, 4 * FRAME_BYTES]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_rank_without_rows_contributes_zeros_and_all_get_the_same_sums(dtype):
    parameters = {"b": mx.zeros((2,)), "a": mx.zeros((3,), dtype)}

    def work(ranks: Ranks):
        totals, grads = Totals(), HeldGradients()
        for _ in range(ranks.rank):  # micro-batches, whose sum is in float32
            totals = Totals(1.5, {"m": (2.0, 1.0)})
            grads.add({"b": mx.ones((2,)), "a": mx.full((3,), 4 / 3, dtype)})
        totals, counts = ranks.step_sums(totals, grads, parameters, [ranks.rank, 5])
        return totals, {name: array.tolist() for name, array in grads.arrays.items()}, counts

    for totals, grads, counts in Together(3).run(work):
        assert (totals.loss, totals.metrics, counts) == (3.0, {"m": (4.0, 2.0)}, [3, 15])
        third = mx.array(4 / 3, dtype).astype(mx.float32).item()
        assert grads == {"a": pytest.approx([3 * third] * 3, rel=1e-6), "b": [3.0] * 2}


def odd_array() -> mx.array:
    """Belongs to the thread that uses it."""
    return mx.array([-0.0, float("nan"), 1e-45], mx.float32)


def test_arrays_of_rank_0_replace_others_bit_for_bit():
    def work(ranks: Ranks):
        found = ranks.same_arrays({"x": odd_array() if ranks.is_first else mx.ones((3,))})
        return digest_of(found)

    assert set(Together(2).run(work)) == {digest_of({"x": odd_array()})}


def test_arrays_of_rank_0_keep_their_names_in_whatever_order_a_rank_has_them():
    def work(ranks: Ranks):
        names = ["m", "v"] if ranks.is_first else ["v", "m"]
        values = {"m": mx.array([1.0]), "v": mx.array([2.0])}
        if not ranks.is_first:
            values = {name: mx.zeros((1,)) for name in names}
        found = ranks.same_arrays({name: values[name] for name in names})
        return found["m"].item(), found["v"].item()

    assert Together(2).run(work) == [(1.0, 2.0)] * 2


def test_equal_arrays_are_not_exchanged():
    assert Together(2).run(lambda ranks: ranks.same_arrays({"x": odd_array()})) == [None, None]


def test_a_stop_or_an_action_of_one_rank_is_that_of_all():
    def work(ranks: Ranks):
        heard, stop = Stop(), ranks.agreed
        if ranks.rank == 1:
            heard.received = signal.SIGTERM
        action = MemoryAction(kind=("larger_plan", "smaller_plan")[ranks.rank], cause="tight")
        return (*ranks.agree(heard, stop, action, ranks.is_first), stop, ranks.stopped_by(heard))

    for action, save, pause, stop, number in Together(2).run(work):
        assert (action.kind, action.cause) == ("smaller_plan", "rank 1 on mac1: tight")
        assert (save, pause, stop.received) == (True, False, signal.SIGTERM)
        assert number == signal.SIGTERM  # for the exit status, also of ranks that heard nothing


def test_without_other_ranks_a_run_was_stopped_by_the_signal_that_it_heard():
    heard = Stop()
    heard.received = signal.SIGINT
    assert ALONE.stopped_by(heard) == signal.SIGINT


def test_a_larger_plan_needs_all():
    ranks = Ranks(0, 2, ("a", "b"))
    assert ranks.most_careful([(0, ["larger_plan", "room"])]) is None
    both = [(0, ["larger_plan", "room"]), (1, ["larger_plan", "room"])]
    assert ranks.most_careful(both).kind == "larger_plan"


def test_a_difference_names_the_host():
    found = Together(3).run(
        lambda ranks: ranks.check_same({"version of mlx": "0.1" if ranks.rank != 2 else "0.2"})
    )
    for error in found:
        assert isinstance(error, UserError)
        assert str(error) == (
            "rank 2 on mac2: has another version of mlx than mac0 (0.2 instead of 0.1)"
        )


@pytest.mark.parametrize("pieces", [0, 1, 2.5])
def test_files_of_rank_0_are_given_to_the_others_in_pieces(tmp_path, pieces):
    content = np.random.default_rng(0).bytes(int(pieces * PIECE_BYTES))
    (tmp_path / "0" / "start").mkdir(parents=True)
    (tmp_path / "0" / "start" / "a.safetensors").write_bytes(content)
    (tmp_path / "0" / "start" / "b.json").write_text("{}")
    most = []

    def work(ranks: Ranks):
        exchanged = ranks.exchanged

        def noted(given: bytes, size: int) -> list[bytes]:
            most.append(size)
            return exchanged(given, size)

        ranks.exchanged = noted
        place = RunFolder(tmp_path / str(ranks.rank))
        place.path.mkdir(exist_ok=True)
        ranks.share_files(place, "start")
        ranks.share_files(place, "missing")
        return {path.name: path.read_bytes() for path in (place.path / "start").iterdir()}

    assert Together(3).run(work) == [{"a.safetensors": content, "b.json": b"{}"}] * 3
    assert max(most) <= PIECE_BYTES


def test_a_difference_of_content_has_no_values():
    first, other = ({"model": "x" * 64, "data": letter * 64} for letter in "ab")
    found = Together(2).run(lambda ranks: ranks.check_same(other if ranks.rank else first))
    assert [str(error) for error in found] == [
        "rank 1 on mac1: has other data than mac0; copy it there, or use --sync data"
    ] * 2


@pytest.mark.parametrize("packed", [None, 256])
@pytest.mark.parametrize("split", [False, True])
def test_the_rows_of_all_ranks_are_those_of_the_step(packed, split):
    examples = make_examples([40, 9, 33, 70, 12, 25, 61, 18])
    schedule = make_schedule(examples, 4, 8, 0, packed, rows_together=2)
    found = []
    for rank in range(3):
        ranks = Ranks(rank, 3, ("",) * 3, shares=(1.0, 2.0, 1.0))
        found += ranks.own_batches(schedule, 0, lambda _: 4, 64, split=split)
    whole = ALONE.own_batches(schedule, 0, lambda _: 4, 64, split=split)

    def texts(batches):
        return sorted(
            (int(text), int(target))
            for batch in batches
            for text, target in zip(batch.text_ids, batch.targets, strict=False)
        )

    assert texts(found) == texts(whole)


def test_scores_of_all_ranks_are_put_in_the_order_of_the_step():
    examples = make_examples([12, 30, 20, 9])
    schedule = make_schedule(examples, 4, 4, 0, rows_together=2)
    whole = schedule.split_batches_of(0, lambda _: 1)
    value = {}
    parts = []
    for batch in whole:
        n = batch.trained_tokens
        current = np.arange(n, dtype=np.float32) + 100 * batch.text_ids
        value[int(batch.text_ids[0])] = current
        parts.append(ScoredTexts(current, batch.text_ids, batch.weights[:n], {}))
    other = scored_by_all(parts[2:], whole, lambda values: values)
    rest = scored_by_all(parts[:2], whole, lambda values: values)
    for batch, a, b in zip(whole, other, rest, strict=True):
        assert np.array_equal(a.current + b.current, value[int(batch.text_ids[0])])


def test_a_slower_host_gets_less_from_then_on_and_after_a_restart():
    ranks = Ranks(0, 2, ("mac1", "mac2"), shares=(1.0, 1.0))
    found = []
    for step in range(1, FIRST_STEPS + MEASURED_STEPS + 3):
        ranks.begin_step(step - 1)
        ranks.all_figures = [[100, 1.0, 0, 0, 0, 0], [100, 2.0, 0, 0, 0, 0]]
        found.append(ranks.learn(step))
    (event,) = filter(None, found)
    assert (event.step, event.shares) == (FIRST_STEPS + MEASURED_STEPS, [1.0, 0.5])
    for host_name, shares in (("mac2", (1.0, 0.5)), ("mac3", (1.0, 1.0))):  # there, and elsewhere
        again = Ranks(0, 2, ("mac1", host_name))
        again.of_first = lambda make: make()
        again.recall(lambda: [event])
        again.begin_step(event.step - 1)
        assert again.shares == (1.0, 1.0)
        again.begin_step(event.step)
        assert again.shares == shares


def test_processes_of_one_machine_are_equally_fast():
    ranks = Ranks(0, 2, ("mac1", "mac1"), shares=(1.0, 1.0))
    for step in range(1, 30):
        ranks.all_figures = [[100, 1.0, 0, 0, 0, 0], [100, 2.0, 0, 0, 0, 0]]
        assert ranks.learn(step) is None


@pytest.mark.memory
@pytest.mark.parametrize("plan", ["fused", "streamed"])  # the latter has its gradients on disk
@pytest.mark.parametrize("megabytes", [1, 4, 24])
def test_the_memory_of_a_reduction_is_estimated(tmp_path, plan, megabytes):
    """Of 8 arrays, of which some are summed together, or one that is large alone."""
    size, plan = megabytes << 18, Plan(plan, 64)
    parameters = {str(n): mx.zeros((size,)) for n in range(8)}
    gradients = gradients_in(tmp_path if plan.gradients_on_disk else None)
    for name in parameters:
        gradients.add({name: mx.ones((size,))})
    ranks = Ranks(0, 2, ("a", "b"))
    ranks.gather = lambda value: [value, value]

    def collect(_, array: mx.array) -> mx.array:
        mx.eval(array)
        found = 2 * array
        mx.eval(found)
        return found

    ranks.collect = collect
    mx.clear_cache()
    peak = peak_of(lambda: ranks.step_sums(Totals(), gradients, parameters, [1]))

    hidden = size // 64
    facts = ModelFacts(
        kinds=(BlockFacts({"self_attn.q_proj": (hidden, hidden)}, 0),), order=(0,) * 4,
        hidden=hidden, vocabulary=0, heads=1, float_bytes=4, vocabulary_bytes=0, rest_bytes=0,
        quantized=False,
    )  # fmt: skip
    training = Training(blocks=4, rank=64, targets=("q_proj",))
    needed = reduction_bytes(facts, training, plan)
    assert 0.7 * needed < peak <= 1.02 * needed
    assert gradients.take(["7"])["7"].max().item() == 2


@pytest.mark.parametrize(
    ("settings", "joined", "reduces", "more_bytes"),
    [
        ({}, False, False, 0),
        ({"processes": 2, "supervise": True}, False, True, RING_BYTES),  # your_ai plan
        ({"hosts": ["a", "b"], "supervise": True}, False, True, RING_BYTES),
        ({"processes": 2, "supervise": True}, True, True, 0),  # it is part of the process
        ({}, True, True, 0),  # mlx.launch
    ],
)
def test_what_communication_needs_is_counted_once(
    configure, tiny_model, settings, joined, reduces, more_bytes
):
    facts = facts_of(tiny_model, 4)
    more = (facts, DataSizes(lengths=(64,)), process_here())
    found = workload_of(configure(**settings), *more, joined=joined)
    without = workload_of(configure(), *more)
    assert found.reduces == reduces
    assert found.process.python_bytes - without.process.python_bytes == more_bytes


@pytest.mark.parametrize(
    ("hosts", "settings", "own_gb", "limit_gb"),
    [
        (("mac1", "mac1"), {}, None, 4),  # processes of mlx.launch share their machine
        (("mac1", "mac2"), {}, None, None),
        (("mac1", "mac1"), {"processes": 2}, None, None),  # which are divided elsewhere
        (("mac1", "mac1"), {"max_memory": 3.0}, None, 3),
        (("mac1", "mac2"), {"max_memory": 3.0}, 5, 5),
    ],
)
def test_each_rank_has_a_limit_of_its_own(monkeypatch, hosts, settings, own_gb, limit_gb):
    limit = MemoryLimit(8 * 10**9, "the machine")
    monkeypatch.setattr(distributed, "limit_of", lambda _: limit)
    ranks, config = Ranks(0, 2, hosts, limit_gb=own_gb), TrainConfig(data="d", **settings)
    assert ranks.with_own_limit(config).max_memory == limit_gb
    assert ranks.as_given(ranks.with_own_limit(config)).max_memory == config.max_memory


# -- real processes, over the ring of MLX


def supervised(config, name: str, command: list[str] | None = None) -> tuple[RunFolder, int]:
    run = create(dataclasses.replace(config, run=name))
    config = run.read_config()
    settings = json.dumps(dataclasses.asdict(config))
    return run, supervise(run, [], settings, command, config=config)


def adapter(run: RunFolder) -> dict[str, mx.array]:
    return mx.load(str(run.adapter / "adapters.safetensors"))


def difference(run: RunFolder, other: RunFolder) -> float:
    """The norm of the difference, relative to the norm."""
    a, b = adapter(run), adapter(other)
    square = sum(float(((a[name] - b[name]) ** 2).sum()) for name in b)
    return (square / sum(float((b[name] ** 2).sum()) for name in b)) ** 0.5


def left_of(run: RunFolder) -> list[str]:
    """The processes of a run that are still there."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if f"{run.path.resolve()} --level" in line]


# Rank 1 is killed in its sixth step, the first time.
DYING = """
import os, signal
from pathlib import Path
from your_ai.training import process, train

train_step, mark = train.train_step, Path({mark!r})

def dying(loop, state):
    if os.environ["MLX_RANK"] == "1" and state.step == 5 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(loop, state)

train.train_step = dying
process.main()
"""


@pytest.mark.slow
def test_two_processes_train_the_adapter_of_one_even_if_one_is_killed(configure, tmp_path):
    config = configure(
        max_steps=8, save_every=3, lora_dropout=0.1, max_memory=1.0, eval_every=4, supervise=True
    )
    one = train(dataclasses.replace(config, run="one"))
    config = dataclasses.replace(config, processes=2)
    two, status = supervised(config, "two")
    assert status == 0
    assert difference(two, one) < 1e-5
    losses = [[v.loss for v in events_of(run, events.Validation)] for run in (one, two)]
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    last = events_of(two, events.Ranks)[-1]
    assert all(0 < held <= 1e9 for held in last.process_bytes)
    assert last.limit_bytes == [1e9] * 2
    assert last.sent_bytes == sum(array.nbytes for array in adapter(two).values()) + FRAME_BYTES

    script = DYING.format(mark=str(tmp_path / "mark"))
    killed, status = supervised(config, "killed", [sys.executable, "-c", script])
    assert status == 0
    (died,) = events_of(killed, events.Died)
    assert died.reason == "rank 1 killed by SIGKILL after step 5; continuing from step 4"
    assert digest_of(adapter(killed)) == digest_of(adapter(two))
    assert left_of(two) == left_of(killed) == []


def test_the_macs_of_other_ranks_are_kept_awake(monkeypatch):
    monkeypatch.setattr(host, "is_mac", lambda: True)
    begun = Mock(return_value=None)
    monkeypatch.setattr(host, "begun", begun)
    other = Ranks(1, 2, ("mac1", "mac2"))
    for ranks, config in (
        (ALONE, TrainConfig()),
        (other, TrainConfig(allow_sleep=True)),
        (other, TrainConfig()),
    ):
        begun.reset_mock()
        with awake_elsewhere(ranks, config):
            assert begun.call_count == (ranks is other and not config.allow_sleep)


def test_a_port_in_use_is_named_with_its_host(tmp_path, monkeypatch):
    place = tmp_path / "ring.json"
    place.write_text('[["127.0.0.1:4601"], ["127.0.0.2:4602"]]')
    monkeypatch.setenv("MLX_HOSTFILE", str(place))
    monkeypatch.setenv("MLX_RANK", "1")
    taken = RuntimeError("[ring] Couldn't bind socket (error: 98)")
    monkeypatch.setattr(mx.distributed, "init", Mock(side_effect=taken))
    with pytest.raises(UserError, match=r"rank 1 on .*: a port is in use there, of 127.0.0.2:4602"):
        join(5.0)
