"""The networks of a run with `--objective soft`, in the roles that they have.

Policy, reference and reward model share the weights of one base if the reward model was trained on
it: then they differ only in their adapters and the score head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from your_ai.config.adapter_facts import FACTS
from your_ai.data.batches import Batch
from your_ai.engine.build import load
from your_ai.engine.compiled import Graphs
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import Opened, stream
from your_ai.errors import UserError
from your_ai.gates.token_ids import vocabulary_of
from your_ai.memory import allocator
from your_ai.nets import model
from your_ai.nets.adapter_kinds import put_adapters
from your_ai.nets.head import NAME
from your_ai.nets.parts import skeleton
from your_ai.nets.tokenizer import first_difference, spelled
from your_ai.objectives.soft import SOFT_TOKENS
from your_ai.rewards.rollout import Rollout
from your_ai.run import checkpoint
from your_ai.run.folder import RunFolder
from your_ai.soft.cached_blocks import CachedBlocks, cached_blocks
from your_ai.soft.passes import rewards_of
from your_ai.soft.roles import Network, RewardNetwork, Roles, Sampled, SoftRows, network_of
from your_ai.training.reward_models import RewardRun

LARGEST = 1 << 32  # no token has this id


@dataclass(frozen=True)
class SoftNetworks:
    """The networks of a run, and what its engine can do."""

    roles: Roles
    columns: CachedBlocks | None
    """For exact gradients by columns; None if sweeps compute the gradients."""
    notices: tuple[str, ...] = ()


def check_tokenizers(run: RewardRun, policy: Opened, ours: Any, theirs: Any) -> None:
    """Raise UserError, naming the first difference, if policy and reward model read other tokens.

    ours, theirs: the tokenizers.
    """
    if run.shares_tokenizer:
        return
    most = vocabulary_of(policy.network) or LARGEST
    # Their templates may differ, which render no completions.
    if difference := first_difference(spelled(ours, most), spelled(theirs, most)):
        raise UserError(
            f"--reward-model {run.name}: its tokenizer differs from the policy's: {difference}; "
            "use a reward model with the same tokenizer"
        )


def open_reference(policy: Opened) -> Opened:
    """A network for the reference that shares the weights of the policy, before it has adapters."""
    return replace(policy, network=skeleton(policy.network))


def put_first_adapter(
    reference: Opened, folder: RunFolder, adapters: model.Adapters, dtype: str
) -> None:
    """Give the reference the adapter that the run starts from; dtype: of its matrices."""
    parameters, config = adapters.config["lora_parameters"], adapters.config
    kind = FACTS[config["fine_tune_type"]]
    put_adapters(reference.network, kind, config["num_layers"], parameters)
    model.cast_matrices(reference.network, dtype)  # it begins as the policy does
    arrays = checkpoint.load_adapters(folder.start)
    arrays.pop(checkpoint.SCORE_WEIGHT, None)
    model.set_adapters(reference.network, arrays)


def build_networks(
    policy: Opened,
    reward: Opened,
    reference: Opened | None,
    engine: str,
    graphs: Graphs,
    exact: bool,
) -> SoftNetworks:
    """Take the networks apart, and read their weights, or stream them.

    engine: fused or streamed. exact: whether credit goes back to the first token.
    Raises UserError if a model does not support it.
    """
    streams = engine == "streamed"
    score = reward.network.pop(NAME).weight[0]  # the rest is an ordinary model
    network = network_of_opened(policy, streams, graphs)
    others = []
    for opened in (reward, reference):
        if opened is not None:
            opened.network.freeze()
            vocabulary = network.final.rows.shape[0]
            others.append(network_of_opened(opened, streams, graphs, vocabulary))
    roles = Roles(network, RewardNetwork(others[0], score), *others[1:])
    allocator.free()
    if streams or not exact:
        return SoftNetworks(roles, None)
    try:
        return SoftNetworks(roles, cached_blocks(network))
    except UserError as error:
        return SoftNetworks(roles, None, (f"{error}; gradients are computed by sweeps",))


def network_of_opened(
    opened: Opened, streams: bool, graphs: Graphs, vocabulary: int | None = None
) -> Network:
    """Take a network apart, and read its weights, or stream them; vocabulary: of the policy."""
    dequantize_on_the_cpu(opened.network)
    if streams and opened.can_stream:
        streamed = stream(opened.network, opened.tensors)
        return network_of(opened.network, *streamed, graphs, vocabulary)
    load(opened.network)
    return network_of(opened.network, graphs=graphs, vocabulary=vocabulary)


def score_completions(network: RewardNetwork, rollouts: Sequence[Rollout]) -> list[float | None]:
    """The rewards of the completions; None for one without a finite reward."""
    prompts = [np.array(r.ids[: len(r.ids) - r.tokens], np.int32) for r in rollouts]
    lengths = np.array([r.tokens for r in rollouts], np.int32)
    tokens = np.zeros((len(rollouts), int(lengths.max())), np.int32)
    for row, rollout in enumerate(rollouts):
        tokens[row, : rollout.tokens] = rollout.ids[len(prompts[row]) :]
    rows = SoftRows(prompts, Sampled(tokens, lengths), np.zeros(len(rollouts), np.uint32))
    found = np.array(rewards_of(network, rows), np.float64)
    return [float(reward) if np.isfinite(reward) else None for reward in found]


def engine_without_rows(graphs: Graphs) -> Engine:
    """The engine of a run whose rows are only prompts: it has graphs to free, and nothing else."""

    def no_rows(*_: Any) -> Any:
        raise TypeError("the rows of this run are prompts: they have no loss")

    def gradients(batch: Batch, scale: float, seed: int) -> Any:
        return no_rows()

    return Engine(SOFT_TOKENS, gradients, no_rows, no_rows, no_rows, no_rows, graphs.drop)
