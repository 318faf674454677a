"""The Python interface, and the examples in docs/api.md."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import your_ai
from your_ai.api import _settings

DOCS = Path(__file__).parent.parent / "docs"


def test_examples_in_the_docs_run(capsys, small_demo):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(), re.S)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    run = names["run"]
    assert isinstance(run, your_ai.Run)
    assert run.steps == [1, 2, 3, 4, 5, 6]
    assert len(run.losses) == 6
    assert set(run.validation_losses) >= {2, 4}
    assert run.is_finished
    assert not run.is_running
    assert run.metrics == {}
    assert run.memory.peak_bytes > 10**7
    assert (run.adapter / "adapters.safetensors").is_file()
    assert (Path("runs") / "first" / "report.html").is_file()
    assert capsys.readouterr().err.count("error") == 0


def test_importing_the_package_does_not_load_mlx():
    code = "import sys, your_ai; your_ai.train; print('mlx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_public_names_exist_and_others_raise():
    assert set(your_ai.__all__) <= set(dir(your_ai))
    for name in your_ai.__all__:
        assert getattr(your_ai, name) is not None
    with pytest.raises(AttributeError):
        getattr(your_ai, "nothing")  # noqa: B009


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "demo", "data": "demo", "lora_rnk": 8}, "lora_rank"),
        ({"model": "demo", "data": "nowhere"}, "nowhere"),
        ({"model": "nothing-here", "data": "demo"}, "nothing-here"),
        ({"model": "any"}, "--data is missing"),
    ],
)
def test_invalid_input_raises_user_error_and_leaves_no_run(settings, message):
    with pytest.raises(your_ai.UserError, match=message):
        your_ai.train(**settings, max_steps=1, show=False)
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_too_small_limit_is_refused_with_the_minimum():
    with pytest.raises(your_ai.UserError, match=r"at least .* is needed"):
        your_ai.plan(model="demo", data="demo", max_memory=0.01)


def test_settings_override_the_config_and_show_can_be_off(capsys, small_demo, data_folder):
    config = your_ai.TrainConfig(model="demo", data=str(data_folder), max_steps=9)
    run = your_ai.train(config, max_steps=1, exact_match=False, show=False)
    assert run.steps == [1]
    assert run.config.max_steps == 1
    assert capsys.readouterr().out == ""
    answer = run.generate([{"role": "user", "content": "2 lamps to Oslo"}], max_tokens=4)
    base = run.generate("2 lamps to Oslo", max_tokens=4, adapter=False)
    assert isinstance(answer, str)
    assert isinstance(base, str)


def test_a_default_of_a_config_is_no_setting_of_another_objective(data_folder):
    config = your_ai.TrainConfig(model="demo", data=str(data_folder), objective="orpo")
    found, _ = _settings(config, {"orpo_lambda": 0.2})
    assert (found.objective, found.orpo_lambda) == ("orpo", 0.2)
    with pytest.raises(your_ai.UserError, match="--label-smoothing: --objective orpo does not"):
        _settings(config, {"label_smoothing": 0.0})


def test_train_works_in_another_thread(data_folder):
    found: list[your_ai.Run] = []

    def work() -> None:
        found.append(your_ai.train(model="demo", data=str(data_folder), max_steps=1, show=False))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [run.steps for run in found] == [[1]]
