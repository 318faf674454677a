"""Small generated models and data, and a working folder for each test."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import gc
import hashlib
import importlib
import io
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_tokenizer, quantize_model, save_config
from rich.console import Console, RenderableType

from tests import indices
from tests.kernels import fuse, precompile_header
from tests.scheduling import take_turns
from your_ai import cli
from your_ai.config import DEMO_DATA, TrainConfig, build, to_yaml
from your_ai.data import sources
from your_ai.files import packaged
from your_ai.generation.generate import prompt_tokens
from your_ai.hub import find
from your_ai.memory.budget import python_bytes
from your_ai.modelfiles import shards
from your_ai.nets.model import load_network
from your_ai.nets.tokenizer import open_tokenizer
from your_ai.run import events
from your_ai.run.checkpoint import ADAPTERS
from your_ai.run.events import Event
from your_ai.run.folder import RUNS, RunFolder
from your_ai.run.rollout_files import RolloutRecord, read_rollouts, rollout_file
from your_ai.run.stopping import Stop
from your_ai.session import attach, new_run
from your_ai.training.process import train_until_done
from your_ai.training.trainer import Trainer

NUMBERS = itertools.count()  # of the tests
DEMO_FOLDER = packaged("models", "demo")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY = 768  # of the demo tokenizer
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 2048, "eos_token_id": 1,
}  # fmt: skip
# A quarter of the work, for tests that train or compare gradients.
TINY = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
EXTRA = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 16},
    "mistral": {"tie_word_embeddings": False},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 16, "sliding_window_pattern": 2},
    "llama-untied": {"tie_word_embeddings": False},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "tie_word_embeddings": True, "num_experts": 4, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}  # fmt: skip

# MLX's default limits. The limits that a test sets would affect all tests after it.
MEMORY_LIMIT, CACHE_LIMIT = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 40)

# No deadlines: the machine may be busy. YOUR_AI_SLOW=1 tries more examples.
settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    max_examples=200 if os.environ.get("YOUR_AI_SLOW") else 20,
)
settings.load_profile("suite")

QUICK_START = Path(__file__).parent / "quick_start" / "sitecustomize.py"
# Processes that tests start compile the package's modules once, not each again, and share what
# is slow when they start; see quick_start/sitecustomize.py.
if "YOUR_AI_TESTS_CACHE" not in os.environ:  # not in xdist's workers
    os.environ["YOUR_AI_TESTS_CACHE"] = cache = tempfile.mkdtemp(prefix="your_ai-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(QUICK_START.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    precompile_header()
# Tests that compute most indices run under the checker of tests/indices.py, except for those that
# measure memory, fuse kernels, or have the mark `compiled`: it adds to graphs.
CHECKED_FOLDERS = ("engine", "generation", "objectives", "rewards", "soft")
CHECKED_FILES = ("training/test_rollouts.py", "training/test_soft.py")
CHECKS_ALL = bool(os.environ.get(indices.VARIABLE))  # of all tests
if CHECKS_ALL:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    notes = Path(os.environ["YOUR_AI_TESTS_CACHE"], "indices", worker)
    notes.mkdir(parents=True, exist_ok=True)
    os.environ[indices.NOTES] = str(notes)
    indices.check(True)

LONG_FOLDERS = (
    *("doctor", "engine", "evaluation", "export", "fault", "objectives", "session", "soft"),
    "training",
)
TYPES = {"llama-untied": "llama", "qwen2-tied": "qwen2"}
MODULES = {"mistral": "llama"}  # mlx-lm runs it with that code


def pytest_configure() -> None:
    """Handle stop signals, also if the suite runs under nohup or as a script's background job."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files that take long first, so that none of them is the last to end.

    These are files with slow tests, then folders whose tests train, or wait for processes.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    here = Path(__file__).parent
    items.sort(
        key=lambda item: (
            item.path not in slow,
            item.path.relative_to(here).parts[0] not in LONG_FOLDERS,
        )
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the threads take turns in tests that do not measure memory, and check indices in some.

    Kernels take long to compile, so only tests of modules with KERNELS = True fuse them; with
    KERNELS = "measured", only those of these tests that have the mark `compiled` or `memory`.
    """
    take_turns(item.get_closest_marker("memory") is None)
    unsuited = [mark for mark in ("compiled", "memory") if item.get_closest_marker(mark)]
    kernels = getattr(item.module, "KERNELS", False)
    kernels = bool(unsuited) if kernels == "measured" else kernels
    fuse(kernels)
    if CHECKS_ALL:
        if "compiled" in unsuited:
            pytest.skip("nothing is compiled where all indices are checked")
        return
    place = item.path.relative_to(Path(__file__).parent)
    checked = place.parts[0] in CHECKED_FOLDERS or str(place) in CHECKED_FILES
    checked = checked and not unsuited and not kernels
    if checked != indices.is_checking():
        indices.check(checked)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail the test if an index was out of range, also where the package caught the error."""
    faults = indices.take_faults()
    assert not faults, "\n".join(faults)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many expressions were checked, where the whole suite was."""
    file = os.environ.get(indices.VARIABLE)
    if not file:
        return
    notes = Path(os.environ["YOUR_AI_TESTS_CACHE"], "indices")
    for line in indices.summary(notes):
        terminalreporter.write_line(line)
    if file != "1":
        Path(file).write_text(json.dumps(indices.expressions(notes), indent=1))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect tests without searching for garbage, of which they make little: that takes longer."""
    gc.disable()
    try:
        import_share(session.config)
        return (yield)
    finally:
        keep_objects()
        gc.enable()


def import_share(config: pytest.Config) -> None:
    """Import the modules of tests whose turn it is in this worker; it imports the others later.

    pytest rewrites the assertions of each module, which takes ten seconds for all, and keeps what
    it compiled. Workers that import the modules in the same order all rewrite the same ones.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker.isdigit():
        return
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    here = Path(__file__).parent
    folders = [Path(config.rootpath, argument) for argument in config.args]
    files = sorted({file for folder in folders for file in folder.rglob("test_*.py")})
    for file in files[int(worker) :: workers]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it will say so
            importlib.import_module(".".join(file.relative_to(here.parent).with_suffix("").parts))


@pytest.fixture(scope="module", autouse=True)
def keep_objects_of_modules_before() -> None:
    keep_objects()


def keep_objects() -> None:
    """Spare each gc.collect(), which every training run calls, all objects that exist by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder. pytest's own lists the folders of all earlier tests to find a free name."""
    path = tmp_path_factory.getbasetemp() / f"test-{next(NUMBERS)}"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in its own folder, with its own store.

    What it writes in this process is not waited for: it need not outlast the machine.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", os.fstat)
    monkeypatch.setenv("YOUR_AI_HOME", str(tmp_path / "home"))
    python_bytes.cache_clear()  # it is measured once per process, but each test needs its own value
    mx.set_memory_limit(MEMORY_LIMIT)
    mx.set_cache_limit(CACHE_LIMIT)
    return tmp_path


@pytest.fixture(scope="session")
def demo_tokenizer() -> Any:
    return load_tokenizer(DEMO_FOLDER)


def load_base(folder: Path, dtype: mx.Dtype) -> tuple[nn.Module, Any]:
    """The model and the tokenizer of a folder."""
    return load_network(folder, dtype)[0], open_tokenizer(folder)


def make_model(
    path: Path,
    architecture: str = "llama",
    bits: int | None = 4,
    seed: int = 0,
    factor: float = 3,
    **changes: Any,
) -> Path:
    """Write a model folder with random float32 weights and the demo's tokenizer.

    factor: makes the weights larger than by default, so that logits differ and gradients are not
        tiny. It makes rounding errors larger, too.
    """
    kind = TYPES.get(architecture, architecture)
    config = {"model_type": kind, **SMALL, **EXTRA[architecture], **changes}
    module = importlib.import_module(f"mlx_lm.models.{MODULES.get(kind, kind)}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(
        tree_map(lambda p: factor * p if p.ndim > 1 else p + 0.1 * mx.random.normal(p.shape),
                 model.parameters())
    )  # fmt: skip
    if bits is not None:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    path.mkdir(parents=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    save_config(config, path / "config.json")
    return with_tokenizer_of_demo(path)


def with_tokenizer_of_demo(model: Path) -> Path:
    """The folder of a model, to which the tokenizer of the demo is copied."""
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_FOLDER / name, model / name)
    return model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-bit llama of three blocks with random weights."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", **TINY)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write shards so small that a small model has several."""
    monkeypatch.setattr(shards, "SHARD_LEAST_BYTES", 30_000)
    monkeypatch.setattr(shards, "SHARDS", 4)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Work in a folder of several tests, with its own store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("YOUR_AI_HOME", str(folder / "home"))
        yield


def peak_of(run: Callable[[], Any]) -> int:
    """MLX's peak memory while `run` is called and its arrays are computed, above that before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(run())
    return mx.get_peak_memory() - before


def flip(path: Path, at: int | None = None) -> None:
    """Flip a bit of the byte `at` of a file, by default in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def forbid_deleting(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let the deletion of files of this name fail."""
    unlink = os.unlink

    def fail(path: Any, **options: Any) -> None:
        if Path(path).name == name:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path, **options)

    patch.setattr(os, "unlink", fail)


def write_site(place: Path, source: str) -> Path:
    """A folder for PYTHONPATH that makes each process run `source` first, or end if that fails:
    Python would go on without it."""
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        f"import os, runpy, traceback\nrunpy.run_path({str(QUICK_START)!r})\n"
        f"try:\n    exec({source!r}, globals())\n"
        "except BaseException:\n    traceback.print_exc()\n    os._exit(70)\n"
    )
    return place


def wait_until(done: Callable[[], object], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)


def json_values(keys: st.SearchStrategy[str] | None = None, leaves: int = 9) -> st.SearchStrategy:
    """Values of JSON of any form. keys: of the objects."""
    names = st.text(max_size=9) if keys is None else keys
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=leaves,
    )


class Killed(BaseException):
    """Ends a run or a command at once, like kill -9."""


def shown(renderable: RenderableType, width: int = 80) -> str:
    """What a terminal of that width shows."""
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


class Call(NamedTuple):
    """What a function was given by position, and what it returned."""

    given: tuple[Any, ...]
    result: Any


def calls_of(patch: pytest.MonkeyPatch, place: Any, name: str) -> list[Call]:
    """The calls, from now on, of a function that does as before."""
    found, genuine = list[Call](), getattr(place, name)

    def noted(*given: Any, **more: Any) -> Any:
        found.append(Call(given, genuine(*given, **more)))
        return found[-1].result

    patch.setattr(place, name, noted)
    return found


@contextlib.contextmanager
def killed_in(owner: Any, name: str, at: int = 2) -> Iterator[None]:
    """Let the block be killed by a call of a function, by default by the second one."""
    genuine, numbers = getattr(owner, name), itertools.count(1)

    def called(*args: Any, **named: Any) -> Any:
        if next(numbers) == at:
            raise Killed
        return genuine(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, called)
        with pytest.raises(Killed):
            yield


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


def chat_prompt(tokenizer: Any, text: str) -> list[int]:
    """The tokens of `text` as the first turn of a chat, up to the answer."""
    return prompt_tokens(tokenizer, [{"role": "user", "content": text}])


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write a JSONL file; rows that are strings are written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def data_folder(own_folder: Path) -> Path:
    """Ten rows of different lengths to train on, and three to validate."""
    rows = [chat(f"Ask {i}" + " please" * (2 * i), f"Answer {i}" * (i // 3 + 1)) for i in range(10)]
    write_rows(own_folder / "data" / "train.jsonl", rows)
    write_rows(own_folder / "data" / "valid.jsonl", rows[:3])
    write_rows(own_folder / "data" / "test.jsonl", rows[3:5])
    return own_folder / "data"


def copy_demo(folder: Path, **rows: int) -> Path:
    """The embedded demo below `folder` as in a checkout, with few rows of its files."""
    place = shutil.copytree(DEMO_FOLDER, folder / "models" / "demo")
    for name, count in ({"train": 40, "valid": 4, "test": 2} | rows).items():
        for data in DEMO_DATA.values():
            path = place / data / f"{name}.jsonl"
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))
    return place


@pytest.fixture
def small_demo(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In this process, which trains here, a demo of few rows."""
    place = copy_demo(own_folder)

    def found(*parts: str) -> Path:
        return own_folder.joinpath(*parts) if parts[0] == "models" else packaged(*parts)

    def train_here(folder, settings, console, *, detach=False, as_json=False) -> int:
        return attach.train_here(folder, settings, console, as_json)

    for module in (sources, find):
        monkeypatch.setattr(module, "packaged", found)
    monkeypatch.setattr(attach, "train", train_here)
    return place


@pytest.fixture
def configure(tiny_model: Path, data_folder: Path) -> Callable[..., TrainConfig]:
    """A function that makes the config of a short run on the tiny model, with changed settings."""

    def make(**settings: Any) -> TrainConfig:
        first = {
            "model": str(tiny_model), "data": str(data_folder), "run": "r", "max_steps": 4,
            "batch_size": 2, "learning_rate": 1e-2, "lora_layers": 2, "lora_targets": ["q_proj"],
            "lora_rank": 4, "supervise": False, "samples": 0,
        }  # fmt: skip
        return build({**first, **settings}, "test")

    return make


def change_json(folder: Path, name: str, **settings: Any) -> None:
    """Change settings in a JSON file of a model."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def call(*arguments: object) -> int:
    """Run the command line in this process; return the exit status."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    return stopped.value.code or 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The line on stderr of a command that must fail with status 2, and print nothing else.

    `train` may say before what it reads.
    """
    capsys.readouterr()
    assert call(*arguments) == 2
    output, error = capsys.readouterr()
    assert output == "" or arguments[0] == "train"
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def train(config: TrainConfig) -> RunFolder:
    """Train a new run in this process."""
    run = new_run.create(config)
    train_until_done(run, config, Stop())
    return run


# Runs of `train_once`, and the folders of their tests.
KEPT: dict[object, tuple[RunFolder, str]] = {}


def train_once(config: TrainConfig) -> RunFolder:
    """Train a new run, or copy the same one if an earlier test of this process trained it.

    For runs that a test needs, but is not about. They are the same if they have the same settings
    and the files that they read have the same content, whatever the test's folder is called.
    """
    here = str(Path.cwd())
    key = (to_yaml(config).replace(here, ""), *inputs_of(config))
    if key not in KEPT:
        run = train(config)
        place = Path(tempfile.mkdtemp(dir=os.environ["YOUR_AI_TESTS_CACHE"]), run.name)
        KEPT[key] = RunFolder(shutil.copytree(run.path, place)), here
        return run
    kept, there = KEPT[key]
    run = RunFolder(RUNS / config.run)
    shutil.copytree(kept.path, run.path)
    for path in run.path.rglob("*"):
        if path.suffix in (".yaml", ".jsonl"):
            path.write_text(path.read_text().replace(there, here))
    return run


def with_functions(trainer: Trainer, **functions: Any) -> Trainer:
    """A trainer whose engine has other functions."""
    engine = dataclasses.replace(trainer.engine, **functions)
    return dataclasses.replace(trainer, built=dataclasses.replace(trainer.built, engine=engine))


def inputs_of(config: TrainConfig) -> list[tuple[str, str]]:
    """The names and digests of the files of this test that a run reads."""
    paths = [Path(text) for text in (config.model, config.data, config.valid) if text]
    paths += [run / "adapter" for run in RUNS.glob("*") if f"run:{run.name}" in to_yaml(config)]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    here = Path.cwd()
    return sorted(
        (str(file.relative_to(here)), hashlib.sha256(file.read_bytes()).hexdigest())
        for file in map(Path.absolute, files)
        if file.is_file() and file.is_relative_to(here)
    )


def resume(run: RunFolder, **changes: Any) -> int:
    """Resume a run in this process; return the exit status."""
    return train_until_done(run, dataclasses.replace(run.read_config(), **changes), Stop())


def whole_and_resumed(
    configure: Callable[..., TrainConfig], cut_at: int, max_steps: int, **settings: Any
) -> tuple[RunFolder, RunFolder]:
    """A run of so many steps, and one with the same settings that was resumed after some."""
    whole = train(configure(**settings | {"run": "whole", "max_steps": max_steps}))
    cut = train(configure(**settings | {"run": "cut", "max_steps": cut_at}))
    assert resume(cut, max_steps=max_steps) == 0
    return whole, cut


def rollouts_of(run: RunFolder, step: int) -> list[RolloutRecord]:
    """What was sampled for a step."""
    found = read_rollouts(rollout_file(run.path, step))
    assert found is not None
    return found


def events_of(run: RunFolder, *kinds: type) -> list[Event]:
    records, _ = events.tail(run.events)
    return [r.event for r in records if not kinds or isinstance(r.event, kinds)]


def losses_of(run: RunFolder) -> dict[int, float]:
    """The loss of each step; for a repeated step, the last one."""
    return {event.step: event.loss for event in events_of(run, events.Step)}


def notices_of(run: RunFolder) -> list[str]:
    return [event.text for event in events_of(run, events.Notice)]


def adapter_of(run: RunFolder) -> bytes:
    return (run.adapter / ADAPTERS).read_bytes()
