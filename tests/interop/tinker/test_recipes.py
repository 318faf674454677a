"""Recipes of the cookbook, unchanged, for a few steps: only their data sets are small ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import tinker
from tinker_cookbook import checkpoint_utils
from tinker_cookbook.distillation import datasets as distillation
from tinker_cookbook.recipes import rl_loop, sl_loop
from tinker_cookbook.recipes.distillation import on_policy_distillation
from tinker_cookbook.recipes.math_rl import train as math_rl
from tinker_cookbook.recipes.preference.dpo import train as dpo
from tinker_cookbook.renderers import get_renderer

from tests.interop.tinker.served import NAME, RANK, Served
from tests.interop.tinker.teaching import assistant, teach, user

pytestmark = pytest.mark.interop
ANSWERS = ("\\boxed{1}", "\\boxed{2}")
# How `rl_loop` begins its prompts.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
BOXED = [
    user("How many r's are in strawberry?" + SUFFIX),
    assistant(
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e "
        "8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
    ),
]
WINDOW = 16  # tokens of the longest completion
BATCHES = 4  # of rewarded completions: about one in five has only equal rewards


def chats() -> list[dict[str, Any]]:
    """For supervised training."""
    return [
        {"messages": [
            {"role": "user", "content": f"Say {i}."},
            {"role": "assistant", "content": f"It is {i}."},
        ]}
        for i in range(32)
    ]  # fmt: skip


def problems() -> list[dict[str, Any]]:
    """As those of GSM8K."""
    return [{"question": "How many?", "answer": f"#### {1 + i % 2}"} for i in range(16)]


def preferences() -> list[dict[str, Any]]:
    """As those of HH-RLHF."""
    first = "\n\nHuman: Say {}.\n\nAssistant:"
    return [
        {"chosen": first.format(i) + f" It is {i}.", "rejected": first.format(i) + " No."}
        for i in range(16)
    ]


ROWS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "HuggingFaceH4/no_robots": chats,
    "openai/gsm8k": problems,
    "Anthropic/hh-rlhf": preferences,
    "zwhe99/DeepMath-103K": problems,
}


def local_data(name: str, *_: Any, split: str | None = None) -> Any:
    """In the place of `datasets.load_dataset`."""
    rows = datasets.Dataset.from_list(ROWS[name]())
    return datasets.DatasetDict(train=rows, test=rows) if split is None else rows


@pytest.fixture(autouse=True)
def local(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes find the server, and their data."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    for module in (datasets, distillation):
        monkeypatch.setattr(module, "load_dataset", local_data)


@pytest.fixture(scope="module")
def taught(server: Served) -> Iterator[tinker.TrainingClient]:
    """A model that answers the prompts of these recipes, now and then right: rewards differ."""
    sums = [user("What is 4 + 5?"), assistant("9"), user("What is 7 + 8?"), assistant("15")]
    boxed = [[*BOXED, user("How many?" + SUFFIX), assistant(answer)] for answer in ANSWERS]
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service:
        model = service.create_lora_training_client(base_model=NAME, rank=RANK, seed=1).result()
        renderer = get_renderer("role_colon", model.get_tokenizer())
        teach(model, renderer, [*boxed, [user("How many?"), assistant(ANSWERS[0])], sums])
        yield model


def assert_learned(server: Served, steps: int) -> None:
    """The newest run made so many updates, and each changed something."""
    norms = [step.grad_norm for step in server.steps()]
    assert len(norms) == steps
    assert all(math.isfinite(norm) and norm > 0 for norm in norms), norms


def assert_rewarded(server: Served, batches: int) -> None:
    """Some of so many batches changed the newest run: recipes sample without a seed, and skip a
    batch, or change nothing, where by chance the rewards of each group are equal."""
    norms = [step.grad_norm for step in server.steps()]
    assert len(norms) <= batches
    assert all(math.isfinite(norm) for norm in norms)
    assert any(norm > 0 for norm in norms), norms


def test_sl_loop_trains_and_goes_on_from_where_it_was(server: Served, own_folder: Path) -> None:
    def config(steps: int) -> sl_loop.Config:
        return sl_loop.Config(
            log_path=str(own_folder / "log"), model_name=NAME, batch_size=4, max_length=128,
            lora_rank=RANK, save_every=2, max_steps=steps,
        )  # fmt: skip

    sl_loop.main(config(4))
    assert_learned(server, 4)
    saved = checkpoint_utils.get_last_checkpoint(str(own_folder / "log"))
    assert saved is not None
    assert saved.name == "final"


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop(
    server: Served, taught: tinker.TrainingClient, own_folder: Path, loss: str
) -> None:
    log = str(own_folder)  # from which it goes on
    checkpoint_utils.save_checkpoint(taught, f"taught-{loss}", log, {"batch": 0})
    rl_loop.main(
        rl_loop.Config(
            log_path=log, model_name=NAME, batch_size=2, group_size=8, lora_rank=RANK,
            max_tokens=WINDOW, max_steps=BATCHES, loss_fn=loss,
        )
    )  # fmt: skip
    assert_rewarded(server, BATCHES)


def test_math_rl_arithmetic(
    server: Served, taught: tinker.TrainingClient, own_folder: Path
) -> None:
    asyncio.run(
        math_rl.cli_main(
            math_rl.CLIConfig(
                model_name=NAME, lora_rank=RANK, env="arithmetic", group_size=8,
                groups_per_batch=2, max_tokens=WINDOW, log_path=str(own_folder / "log"),
                eval_every=0, save_every=2, max_steps=BATCHES, loss_fn="importance_sampling",
                load_checkpoint_path=taught.save_state("arithmetic").result().path,
            )
        )
    )  # fmt: skip
    assert_rewarded(server, BATCHES)


def test_dpo(server: Served, own_folder: Path) -> None:
    dpo.cli_main(
        dpo.CLIConfig(
            model_name=NAME, max_length=128, batch_size=4, log_path=str(own_folder / "log"),
            max_steps=2,
        )
    )  # fmt: skip
    assert_learned(server, 2)


def test_on_policy_distillation(
    server: Served, taught: tinker.TrainingClient, own_folder: Path
) -> None:
    """The teacher is another model of the same server."""
    teacher = taught.save_weights_for_sampler("teacher").result().path
    asyncio.run(
        on_policy_distillation.cli_main(
            on_policy_distillation.CLIConfig(
                model_name=NAME, teacher_model=NAME, teacher_checkpoint=teacher, lora_rank=RANK,
                dataset="deepmath", group_size=2, groups_per_batch=2, max_tokens=WINDOW,
                log_path=str(own_folder / "log"), eval_every=0, save_every=0, max_steps=2,
            )
        )
    )  # fmt: skip
    assert_learned(server, 2)
