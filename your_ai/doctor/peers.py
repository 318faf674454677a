"""The trainers of mlx-lm and mlx-lm-lora, unchanged, on the task of a benchmark."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.callbacks import TrainingCallback

from your_ai.config import GRPO
from your_ai.doctor.contest import Contest, contest_prompts, contest_reward, contest_tokens
from your_ai.errors import UserError
from your_ai.gates.token_ids import vocabulary_of
from your_ai.memory import probe
from your_ai.nets import model
from your_ai.objectives.chosen import objective_of
from your_ai.objectives.dpo import DPO, IPO
from your_ai.objectives.orpo import ORPO

CHECKPOINT = "-checkpoint"  # ends the name of a peer that computes activations again
MLX_LM, MLX_LM_LORA = "mlx-lm", "mlx-lm-lora"
PEERS = (MLX_LM, MLX_LM + CHECKPOINT, MLX_LM_LORA, MLX_LM_LORA + CHECKPOINT)
KNOWN_VERSION = "5.10.2"  # of mlx-lm-lora
# Objective -> the trainer of mlx-lm-lora that has it.
TRAINERS = {"sft": "sft", "dpo": "dpo", "ipo": "dpo", "orpo": "orpo", GRPO: GRPO}
WORKING_SET = "max_recommended_working_set_size"

# (loss, or mean reward with grpo; seconds; tokens) of each step
Steps = list[tuple[float, float, int]]


def check_peers(names: list[str], objective: str) -> None:
    """Raise UserError for a peer that does not have the objective or is not installed."""
    for name in names:
        peer = name.removesuffix(CHECKPOINT)
        if peer == MLX_LM and objective != "sft":
            other = f"compare with {MLX_LM_LORA}" if objective in TRAINERS else "use none"
            raise UserError(f"--against {name}: it does not train {objective}; {other}")
        if peer == MLX_LM_LORA and objective not in TRAINERS:
            raise UserError(f"--against {name}: it does not train {objective}; use none")
        if peer == MLX_LM_LORA and importlib.util.find_spec("mlx_lm_lora") is None:
            raise UserError(
                f"--against {name}: mlx-lm-lora is not installed; install it with: pip install "
                f"mlx-lm-lora=={KNOWN_VERSION}"
            )


def run_peer(contest: Contest, name: str) -> Steps:
    """Do the task with the trainer of a peer."""
    run = run_mlx_lm_lora if name.startswith(MLX_LM_LORA) else run_mlx_lm
    return run(contest, checkpointing=name.endswith(CHECKPOINT))


class Collect(TrainingCallback):
    """Collects what a trainer reports of each step."""

    def __init__(self, contest: Contest) -> None:
        self.steps: Steps = []
        self._tokens, self._value = contest.rows * contest.seq_len, "train_loss"
        if contest.objective == GRPO:
            self._tokens, self._value = contest.rows * contest.targets, "train_total_rewards_mean"

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        seconds = 1 / train_info["iterations_per_second"]
        self.steps.append((train_info[self._value], seconds, self._tokens))


def run_mlx_lm(contest: Contest, checkpointing: bool) -> Steps:
    """Do the task with mlx-lm's trainer."""
    from mlx_lm.tuner.trainer import TrainingArgs, train

    network, tokens = adapted(contest)
    report = Collect(contest)
    with options_of(contest, checkpointing) as options:
        train(
            network, started(contest, network), train_dataset=[], args=TrainingArgs(**options),
            iterate_batches=repeated(contest, tokens), training_callback=report,
        )  # fmt: skip
    return report.steps


def run_mlx_lm_lora(contest: Contest, checkpointing: bool) -> Steps:
    """Do the task with the trainers of mlx-lm-lora.

    As its launcher does, DPO, IPO and GRPO load the model a second time, as the reference.
    """
    name = TRAINERS[contest.objective]
    module = importlib.import_module(f"mlx_lm_lora.trainer.{name}_trainer")
    train, settings = (
        getattr(module, f"train_{name}"),
        getattr(module, f"{name.upper()}TrainingArgs"),
    )
    network, tokens = adapted(contest)
    more: dict[str, Any] = {}
    own: dict[str, Any] = {"max_seq_length": contest.seq_len + 1}
    objective = objective_of(contest.train_config())
    if name in ("dpo", GRPO):
        reference, _ = model.load_network(Path(contest.folder), getattr(mx, contest.dtype))
        mx.eval(reference.parameters())
        more = {"ref_model": reference}
    if name == "sft":
        more = {"train_dataset": [], "iterate_batches": repeated(contest, tokens)}
    elif name == GRPO:
        more |= prompts_of(contest, tokens)
        own |= sampling_of(contest)
    else:
        more["train_dataset"] = pairs_of(contest, tokens)
    if isinstance(objective, DPO | IPO):
        more |= {"loss_type": {"dpo": "sigmoid", "ipo": "ipo"}[contest.objective]}
        own |= {"beta": objective.beta}
    elif isinstance(objective, ORPO):
        own |= {"beta": objective.odds_weight}
    report = Collect(contest)
    with options_of(contest, checkpointing) as options, working_set_named():
        train(
            model=network, optimizer=started(contest, network), args=settings(**options, **own),
            training_callback=report, **more,
        )  # fmt: skip
    return report.steps


def adapted(contest: Contest) -> tuple[nn.Module, np.ndarray]:
    """The model with its adapters, in memory, and the tokens of the task."""
    if contest.max_memory is not None:
        mx.set_memory_limit(max(1, int(1e9 * contest.max_memory) - (probe.process_bytes() or 0)))
    network, settings = model.load_network(Path(contest.folder), getattr(mx, contest.dtype))
    model.add_adapters(network, contest.train_config())
    mx.eval(network.parameters())
    return network, contest_tokens(contest, vocabulary_of(network) or settings["vocab_size"])


def started(contest: Contest, network: nn.Module) -> optim.Optimizer:
    """AdamW with its states. From here on, MLX's peak memory is counted."""
    adamw = optim.AdamW(contest.learning_rate, weight_decay=0.0, bias_correction=True)
    adamw.init(network.trainable_parameters())
    mx.reset_peak_memory()
    return adamw


@contextlib.contextmanager
def options_of(contest: Contest, checkpointing: bool) -> Iterator[dict[str, Any]]:
    """The options that all trainers have. What they print while they run is not shown."""
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        yield {
            "batch_size": contest.batch_size,
            "iters": contest.steps,
            "steps_per_report": 1,
            "steps_per_save": contest.steps + 1,
            "adapter_file": str(Path(folder) / "adapters.safetensors"),
            "grad_checkpoint": checkpointing,
        }


def repeated(contest: Contest, tokens: np.ndarray) -> Any:
    """`iterate_batches` of the trainers for single rows: the same batch in every step."""
    first = contest.seq_len - contest.targets + 1
    batch = mx.array(tokens.astype(np.int32))
    lengths = mx.array([[first, contest.seq_len]] * len(tokens))

    def batches(**_: Any) -> Iterator[tuple[mx.array, mx.array]]:
        while True:
            yield batch, lengths

    return batches


def pairs_of(contest: Contest, tokens: np.ndarray) -> list[dict[str, Any]]:
    """The dataset of the trainers for pairs."""
    prompt = contest.seq_len + 1 - contest.targets
    return [
        {
            "chosen": chosen.tolist(),
            "rejected": rejected.tolist(),
            "chosen_prompt_length": prompt,
            "rejected_prompt_length": prompt,
        }
        for chosen, rejected in zip(tokens[::2], tokens[1::2], strict=False)
    ]


class TokensAsText:
    """The tokenizer of a model that has none: a text is a list of tokens, and none ends it."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(token) for token in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def prompts_of(contest: Contest, tokens: np.ndarray) -> dict[str, Any]:
    """The dataset of the trainer for GRPO, and what rewards its completions."""
    tokenizer = TokensAsText()
    prompts = contest_prompts(contest, tokens).tolist()

    def even(completions: list[str], **_: Any) -> list[float]:
        return [contest_reward(tokenizer.encode(text)) for text in completions]

    return {
        "train_dataset": [(prompt, [], tokenizer.decode(prompt), "") for prompt in prompts],
        "tokenizer": tokenizer,
        "reward_funcs": [even],
        "end_answer_token": "",
    }


def sampling_of(contest: Contest) -> dict[str, Any]:
    """The settings of the trainer for GRPO that are those of the task."""
    config = contest.train_config()
    return {
        "group_size": config.rollouts,
        "max_completion_length": config.max_new_tokens,
        "beta": config.kl_beta,
        "epsilon": config.clip_low,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "grpo_loss_type": "bnpo",  # its name of dapo
    }


@contextlib.contextmanager
def working_set_named() -> Iterator[None]:
    """Meanwhile mx.device_info has the size that mlx-lm-lora reads, which only Metal names."""
    device_info = mx.device_info
    mx.device_info = lambda *device: {WORKING_SET: 0} | device_info(*device)
    try:
        yield
    finally:
        mx.device_info = device_info
