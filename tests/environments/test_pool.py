from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from tests.conftest import is_alive, wait_until
from tests.environments.conftest import Conversations
from your_ai.environments.pool import EnvironmentPool
from your_ai.environments.protocol import EnvironmentFailed, HostOptions
from your_ai.errors import RunError, UserError

GAME = '''
import asyncio, ctypes, math, os, random, signal, sys, time
from pathlib import Path
from your_ai.environments.protocol import Observation

class Game:
    is_pure = True

    def reset(self, row, seed):
        self.turn, self.row, self.seed = 0, row, seed
        return Observation([{"role": "user", "content": row["prompt"]}], info={"seed": seed})

    async def step(self, message):
        self.turn += 1
        await asyncio.sleep(0)
        act = getattr(self, message["content"], None)
        found = {"messages": [{"role": "user", "content": str(self.turn)}]}
        return found if act is None else act() or found

    def close(self):
        Path(f"closed-{self.seed}").write_text(str(self.turn))

    def win(self): return {"messages": [], "reward": 2.5, "done": True}
    def draw(self): return {"messages": [{"role": "user", "content": str(random.random())}]}
    def waits(self): time.sleep(0.3)
    def endless(self):
        while True: pass
    def fail(self): raise ValueError("no\\nsecond line")
    def stop(self): sys.exit(1)
    def leave(self): os._exit(0)
    def crash(self): ctypes.string_at(0)
    def killed(self): os.kill(os.getpid(), signal.SIGKILL)
    def nothing(self): return 3
    def not_json(self): return {"messages": [], "info": {"a": {1}}}
    def nan(self): return {"messages": [], "reward": math.nan}
    def deep(self):
        found = []
        for _ in range(10**5): found = [found]
        return {"messages": [], "info": {"a": found}}
    def long(self): return {"messages": [{"role": "user", "content": "x" * 10**8}]}
    def takes_memory(self): bytearray(10**9)
    def writes(self):
        """Write to every open file, also to the pool's."""
        for number in range(3, 99):
            try: os.write(number, b'[3]\\n')
            except OSError: pass
    def floods(self):
        """Write an answer without an end to every socket."""
        for number in range(3, 99):
            try:
                while True: os.write(number, b"x" * (1 << 16))
            except OSError: pass
    def forks(self):
        for _ in range(3):
            if os.fork() == 0: time.sleep(99)
'''
SHOP = {"environment": "own:Game", "tools": ()}


@pytest.fixture
def game(pool_of) -> Conversations:
    """A pool of games, whose first conversation has begun."""
    own = pool_of(GAME, **SHOP)
    own.start(seed=7)
    return own


def test_a_conversation_of_the_users_class(pool_of):
    own = pool_of(GAME, **SHOP)
    seen = own.start(seed=7)
    assert own.pool.is_pure
    assert (seen.messages, seen.info) == ([{"role": "user", "content": "p"}], {"seed": 7})
    assert [own.say("go").messages[0]["content"] for _ in range(2)] == ["1", "2"]
    seen = own.say("win")
    assert (seen.messages, seen.reward, seen.done) == ([], 2.5, True)
    own.pool.close(0).result()
    assert Path("closed-7").read_text() == "3"


@pytest.mark.parametrize(
    ("act", "text"),
    [
        ("fail", "step: ValueError: no"),
        ("stop", "step: SystemExit: 1"),
        ("leave", "its process ended"),
        ("crash", "its process ended"),
        ("killed", "its process ended"),
        ("endless", "took more than 0.5 s"),
        ("nothing", "step: returned 3, not an Observation or a dict"),
        ("not_json", "step: returned what is not JSON (Object of type set is not JSON "),
        ("nan", "step: reward: nan is not a number of at most 1e+12, or None"),
        ("deep", "step: RecursionError"),
        ("long", "step: returned more than 5,572,864 bytes"),
        ("takes_memory", "step: MemoryError"),
        ("writes", "its answer has another form"),
        ("floods", "its answer is too long"),
    ],
)
def test_a_hostile_environment_ends_its_conversation_alone(pool_of, act, text):
    own = pool_of(GAME, **SHOP, timeout_s=0.5 if act == "endless" else 20.0, memory_mb=512)
    own.start("good")
    own.start("bad")
    with pytest.raises(EnvironmentFailed, match=f"^{re.escape(text)}"):
        own.say(act, "bad")
    with pytest.raises(EnvironmentFailed, match=r"^the conversation has ended$"):
        own.say("go", "bad")
    assert own.say("go", "good").messages[0]["content"] == "1"
    own.start("bad")


def test_the_same_seed_draws_the_same(pool_of):
    own = pool_of(GAME, **SHOP)
    for key, seed in enumerate((1, 1, 2)):
        own.start(key, seed)
    one, same, other = (own.say("draw", key).messages for key in range(3))
    assert one == same != other


def seconds_of_waits(own: Conversations, count: int) -> float:
    """The time that so many conversations take together, which wait for 0.3 s each."""
    for key in range(count):
        own.start(key)
    start = time.monotonic()
    futures = [own.pool.step(key, {"content": "waits"}) for key in range(count)]
    assert [future.result().messages[0]["content"] for future in futures] == ["1"] * count
    return time.monotonic() - start


def test_a_slow_conversation_does_not_hold_the_others(pool_of):
    assert seconds_of_waits(pool_of(GAME, **SHOP), 8) < 8 * 0.3


def test_requests_beyond_the_limit_wait_and_their_time_does_not_count(pool_of):
    assert seconds_of_waits(pool_of(GAME, at_once=1, **SHOP, timeout_s=0.8), 4) > 4 * 0.3


def test_a_canceled_request_ends_its_conversation(game):
    future = game.pool.step(0, {"content": "endless"})
    time.sleep(0.1)
    future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    wait_until(lambda: not children(game.pool))


def test_a_key_in_use_is_refused(game):
    with pytest.raises(ValueError, match=r"^conversation 0 has begun already$"):
        game.start()


def test_what_code_prints_is_in_the_log_but_not_all_of_it(pool_of):
    text = (
        "import os\ndef f():\n 'D.'\n print('hello')\n for _ in range(99): os.write(2, b'x' * 9999)"
    )
    own = pool_of(f"print('importing')\n{text}")
    own.start()
    own.call("f")
    own.pool.close(0).result()
    own.start()
    own.call("f")
    own.pool.shutdown()
    logged = own.log.read_text()
    assert logged.startswith("importing\nenvironment: hello\n")
    assert logged.count("environment: [the rest of its output is not logged]") >= 1
    assert len(logged) < 3 * (1 << 16)


def test_memory_is_watched_where_it_is_not_limited(pool_of):
    """As on a Mac: a process that is too large is killed."""
    text = "def f():\n 'D.'\n a = bytearray(300 * 10**6)\n import time; time.sleep(20)"
    own = pool_of(f"{text}\ndef g():\n 'D.'\n return 1", memory_mb=200, watches=True)
    own.start()
    assert own.call("f").startswith("error: ")
    assert own.call("g") == "1"


# Processes


def children(pool: EnvironmentPool) -> list[psutil.Process]:
    return psutil.Process(pool.process.pid).children(recursive=True)


def test_a_conversation_ends_with_all_its_processes_and_files(pool_of):
    text = "import tempfile\ndef f():\n 'D.'\n return tempfile.mkdtemp()"
    own = pool_of(
        f"{GAME}\n{text}\ndef forks():\n 'D.'\n Game().forks()", tools=("own:f", "own:forks")
    )
    own.start()
    folder = Path(own.call("f"))
    own.call("forks")
    assert folder.is_dir()
    assert len(children(own.pool)) == 4
    own.pool.close(0).result()
    wait_until(lambda: not children(own.pool))
    wait_until(lambda: not folder.exists())


def test_shutdown_ends_the_host_and_what_waits(game):
    future = game.pool.step(0, {"content": "endless"})
    processes = [game.pool.process.pid, *(each.pid for each in children(game.pool))]
    game.pool.shutdown()
    with pytest.raises((CancelledError, EnvironmentFailed)):
        future.result()
    wait_until(lambda: not any(map(is_alive, processes)))


def test_a_host_that_is_gone_is_an_error_of_the_run(game):
    game.pool.process.send_signal(signal.SIGKILL)
    game.pool.process.wait()
    with pytest.raises(RunError, match=r"^the process of the environments ended; see its"):
        game.start(1)


PARENT = """
import time
from your_ai.environments.pool import EnvironmentPool
from your_ai.environments.protocol import HostOptions
pool = EnvironmentPool(HostOptions(environment="own:Game"))
for key in range(3):
    pool.start(key, {"prompt": "p"}, key).result()
pool.step(0, {"content": "endless"})
pool.step(1, {"content": "forks"}).result()
print(pool.process.pid, flush=True)
time.sleep(99)
"""


def test_all_processes_end_when_the_parent_is_killed():
    Path("own.py").write_text(GAME)
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        host = psutil.Process(int(process.stdout.readline()))
        begun = [host.pid, *(each.pid for each in host.children(recursive=True))]
    finally:
        process.kill()
        process.communicate()
    assert len(begun) == 1 + 3 + 3
    wait_until(lambda: not any(map(is_alive, begun)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own", "--environment own: give module:function, e.g. prices:Shop for `class Shop`"),
        ("own:Gam", "--environment own:Gam: own has no function Gam; did you mean Game?"),
        ("own:Observation", "--environment own:Observation: has no method reset"),
    ],
)
def test_what_is_no_environment_is_one_line_at_the_start(name, text):
    Path("own.py").write_text(GAME)
    with pytest.raises(UserError, match=f"^{re.escape(text)}"):
        EnvironmentPool(HostOptions(environment=name))


def test_an_import_that_ends_the_process_is_one_line_at_the_start():
    Path("own.py").write_text("import os; os._exit(0)")
    with pytest.raises(UserError, match=r"^--tools own: the process that imports it ended; see"):
        EnvironmentPool(HostOptions(tools=("own",)))


def test_the_host_takes_little_memory(pool_of):
    own = pool_of("def f():\n 'D.'\n return 1")
    host = psutil.Process(own.pool.process.pid)
    assert host.memory_info().rss < 40e6
    for key in range(10):
        own.start(key)
        assert own.call("f", key) == "1"
    if sys.platform == "linux":
        assert max(each.memory_full_info().uss for each in host.children()) < 8e6
