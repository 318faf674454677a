"""Estimate a training process's peak memory by component, from shapes alone. No mlx here.

Memory that stays allocated for the whole step (weights, adapters, optimizer states) is counted
exactly. Transient activations are shape x coefficient: MLX evaluates about ten operations ahead,
so a few arrays of each kind exist at the same time. `coefficients.py` has these multiples, fitted
to measured peaks. The first steps of a run correct them for its machine.

Shapes: B rows, T tokens per row, N = B x T, D hidden size, M outputs of the widest layer of a
block, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from your_ai.memory.coefficients import PACKAGED, Coefficients
from your_ai.memory.estimate_adapters import (
    adapter_bytes,
    copied_bytes,
    float32_bytes,
    gradient_bytes,
    norms_bytes,
    optimizer_bytes,
    reduction_bytes,
    update_bytes,
)
from your_ai.memory.estimate_blocks import (
    adapts_widest,
    fused_evaluation_bytes,
    gemma_bytes,
    kept_backward_bytes,
    kept_forward_bytes,
    kind_bytes,
    logits_bytes,
    staged_backward_bytes,
    staged_forward_bytes,
    vectors_bytes,
)
from your_ai.memory.estimate_generation import (
    generation_bytes,
    kv_bytes_per_token,
    rollout_phases,
)
from your_ai.memory.estimate_graphs import evaluation_graphs_bytes, graphs_bytes
from your_ai.memory.estimate_kept import kept_bytes
from your_ai.memory.estimate_tiles import (
    is_tiled,
    noise_bytes,
)
from your_ai.memory.facts import ModelFacts, head_step, layers_named, quantized_matrix_bytes
from your_ai.memory.sizes import (
    DEQUANTIZED_SLICE_BYTES,
    HEAD_ROWS,
    HEAD_SLICE_BYTES,
    PREFILL_TOKENS,
)
from your_ai.memory.workload import Plan, Training, Workload

# Slices of the vocabulary that exist together: of a quantized head, and of one that is not.
HEAD_SLICES, DENSE_HEAD_SLICES = 2, 3
CUT_SLICES = 2  # of a head that is not quantized: while one tile ends, the next one begins
NORMS_BYTES = 15_000_000  # norms are computed in slices, so this does not depend on the layer
SOFT_COLUMNS = 16  # tokens whose block inputs are computed together
SOFT_POSITIONS = 64  # positions whose logits are slices of the head together
SOFT_GRAPHS = 2  # of the policy's columns, and of the frozen networks
WORK = ("activations", "block work", "head chunk")  # components that depend on coefficients
BESIDE = ("graphs", "cache", "python")  # components that are not live MLX buffers


@dataclass(frozen=True)
class Estimate:
    """Bytes by component at the peak, in the order in which they are shown."""

    components: dict[str, int]
    phases: dict[str, int] = field(default_factory=dict)
    """Bytes of the process at the peak of each phase of a step, of those that generate rollouts:
    generate, score and update."""

    def with_more(self, name: str, more: int) -> Estimate:
        """With more bytes of a component that is in memory in every phase, such as weights."""
        components = self.components | {name: self.components[name] + more}
        return Estimate(components, {name: size + more for name, size in self.phases.items()})

    @property
    def process_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def mlx_bytes(self) -> int:
        """Live MLX buffers, as mx.get_peak_memory() counts them."""
        return sum(v for n, v in self.components.items() if n not in BESIDE)

    @property
    def beside_bytes(self) -> int:
        """Python and compiled graphs, which are not MLX buffers."""
        return self.components["python"] + self.components["graphs"]

    @property
    def work_bytes(self) -> int:
        """Transient activations, the part of an estimate that can be wrong."""
        return sum(v for n, v in self.components.items() if n in WORK)


def estimate(
    workload: Workload,
    plan: Plan,
    rows: int,
    tokens: int,
    *,
    micro_batches: int = 1,
    work_ratio: float = 1.0,
    gradients_only: bool = False,
) -> Estimate:
    """Estimate the peak of a step of micro-batches of (B, T), with every target trained.

    micro_batches: per step. If there is more than one, their gradients are summed.
    work_ratio: measured transient activations on this machine, relative to the coefficients.
    gradients_only: leave out the update, the samples and the prefix cache.
    """
    held = held_components(workload, plan, gradients_only)
    phases = phases_of(workload, plan, rows, tokens, micro_batches, gradients_only)
    of_phase = {name: largest(found, work_ratio) for name, found in phases.items()}
    each = [of_phase[name] for name in ("update", "generate", "reward") if phases[name]]
    phase = max(each, key=lambda found: sum(found.values()), default={})
    if workload.forward:
        graphs = evaluation_graphs_bytes(workload, plan, rows, tokens, int(sum(phase.values())))
    elif workload.soft is not None:
        graphs = SOFT_GRAPHS * graphs_bytes(workload, "staged", rows, tokens)
    else:
        graphs = graphs_bytes(workload, plan.engine, rows, tokens, kept=plan.kept)
    order = ["weights", "adapters", "gradients", "optimizer", "optimizer work", "block inputs",
             "kept outputs", "activations", "block work", "head chunk",
             *["KV cache", "sampling"] * bool(phases["generate"]), "norms", "prefix cache",
             *["reward models"] * bool(workload.reward_models),
             *["reduction"] * workload.reduces]  # fmt: skip
    components = {name: int(held.get(name, 0) + phase.get(name, 0)) for name in order}
    beside = {"graphs": graphs, "cache": 0, "python": workload.process.python_bytes}
    if not phases["generate"]:
        return Estimate(components | beside)
    rest = sum(held.values()) + sum(beside.values())
    peaks = {name: rest + sum(map(int, one.values())) for name, one in of_phase.items() if one}
    return Estimate(components | beside, peaks)


def held_components(workload: Workload, plan: Plan, gradients_only: bool) -> dict[str, int]:
    """Bytes that stay allocated during all of a step."""
    facts, training, forward = workload.facts, workload.training, workload.forward
    coefficients, reading = workload.process.coefficients, (plan.resident, plan.blocks_ahead)
    held = {
        "weights": weights_bytes(workload.loaded, plan.engine, forward, coefficients, *reading),
        "adapters": adapter_bytes(facts, training) + norms_bytes(facts, training),
        "optimizer": 0 if forward or plan.states_on_disk else optimizer_bytes(facts, training),
        "prefix cache": 0 if gradients_only else workload.prefix_bytes,
    }
    if workload.reward_models:
        held["reward models"] = reward_model_bytes(workload, plan.engine)
    return held


Phases = list[dict[str, float]]  # bytes by component, of moments of a step


def phases_of(
    workload: Workload,
    plan: Plan,
    rows: int,
    tokens: int,
    micro_batches: int,
    gradients_only: bool,
) -> dict[str, Phases]:
    """The moments of a step, of four kinds. An update comes with the scoring of its own rows."""
    facts, training, forward = workload.facts, workload.training, workload.forward
    coefficients = workload.process.coefficients
    generating: Phases = []
    rewarding: Phases = []
    scoring: Phases = []
    if workload.scores and not forward:
        scoring = forward_phases(workload, plan, rows, tokens, predicts=False)
    updating = [*gradient_phases(workload, plan, rows, tokens, micro_batches), *scoring]
    if not (forward or gradients_only):
        on_disk = plan.gradients_on_disk and workload.soft is None
        grads = 0 if on_disk else float32_bytes(facts, training)  # of ranks, too
        work = update_bytes(facts, training, plan)
        updating.append({"gradients": grads, "optimizer work": work})
        if workload.reduces:
            work = reduction_bytes(facts, training, plan)
            updating.append({"gradients": grads, "reduction": work})
    if training.adapter.has_norms:
        updating.append({"norms": NORMS_BYTES})
    if not gradients_only:
        rewarding = reward_phases(workload, plan, rows, tokens)
        if workload.answer_tokens:
            answer = generation_bytes(facts, workload.answer_tokens, coefficients)
            updating.append({"block work": answer})
        if workload.rollouts is not None:
            generating = rollout_phases(facts, workload.rollouts, plan.wave, coefficients)
    return {"generate": generating, "score": scoring, "update": updating, "reward": rewarding}


def gradient_phases(
    workload: Workload, plan: Plan, rows: int, tokens: int, micro_batches: int
) -> Phases:
    """The moments of the gradients, or of an evaluation."""
    facts, training = workload.facts, workload.training
    if workload.forward:
        return forward_phases(workload, plan, rows, tokens)
    of_passes, of_all = gradient_bytes(facts, training, plan, micro_batches)
    if workload.soft is not None:
        sums = float32_bytes(facts, training) * (1 + (micro_batches > 1))
        phases = [soft_phase(workload, plan, rows, tokens, sums)]
    elif plan.engine == "fused":
        phases = fused_phases(workload, rows, tokens, of_passes, of_all)
    else:
        phases = staged_phases(workload, plan, rows, tokens, of_passes, of_all)
    if workload.noise:
        phases.append({"gradients": of_passes, "block work": noise_bytes(facts, rows, tokens)})
    return phases


def largest(phases: Phases, work_ratio: float) -> dict[str, float]:
    """The moment that needs most, with what depends on the coefficients times `work_ratio`."""
    scaled = [
        {name: size * (work_ratio if name in WORK else 1) for name, size in found.items()}
        for found in phases
    ]
    return max(scaled, key=lambda found: sum(found.values()), default={})


def reward_model_bytes(workload: Workload, engine: str) -> int:
    """Bytes of the adapters of the reward models, and of weights that are not shared."""
    total, coefficients = 0, workload.process.coefficients
    for model in workload.reward_models:
        facts = model.facts or workload.facts
        total += adapter_bytes(facts, model.training) + norms_bytes(facts, model.training)
        if model.facts is not None:
            total += weights_bytes(facts, engine, forward=True, coefficients=coefficients)
    return total


def reward_phases(workload: Workload, plan: Plan, rows: int, tokens: int) -> Phases:
    """Bytes while the reward models score completions."""
    found = []
    for model in workload.reward_models:
        scoring = replace(
            workload,
            facts=model.facts or workload.facts,
            training=model.training,
            score_head=True,
        )
        found += forward_phases(scoring, plan, rows, tokens, predicts=False)
    return found


def weights_bytes(
    facts: ModelFacts,
    engine: str,
    forward: bool = False,
    coefficients: Coefficients = PACKAGED,
    resident: int = 0,
    blocks_ahead: int = 1,
) -> int:
    """Bytes of weights that are in memory together.

    forward: evaluation only. resident, blocks_ahead: as in `Plan`.
    """
    if engine == "fused":
        return facts.weights_bytes
    if engine == "staged":
        return facts.blocks_bytes + facts.rest_bytes
    kind = "evaluation" if forward else "training" if blocks_ahead else "alone"
    count = coefficients.streamed[kind]
    stay = facts.bytes_of_last(resident)
    read = min(facts.neighbours_bytes(count, resident), facts.blocks_bytes - stay)
    return stay + read + facts.rest_bytes


def read_alone_bytes(
    facts: ModelFacts, training: Training, plan: Plan, coefficients: Coefficients
) -> int:
    """Bytes of the blocks that are read, of the weights in memory together, if only the forward
    pass reads any, because all trained blocks stay; else 0."""
    if plan.engine != "streamed" or plan.resident < training.blocks:
        return 0
    reading = plan.resident, plan.blocks_ahead
    together = weights_bytes(facts, plan.engine, False, coefficients, *reading)
    return together - facts.bytes_of_last(plan.resident) - facts.rest_bytes


def fused_phases(
    workload: Workload, rows: int, tokens: int, earlier: int, gradients: int
) -> Phases:
    """Bytes at two moments: at the head, while MLX finishes the last block, and at the last
    block of the backward pass. Activations of all trained blocks are alive at both.
    """
    facts, training, table = workload.facts, workload.training, workload.process.coefficients.fused
    number, n = facts.float_bytes, rows * tokens
    parts = [each.facts for each, _, count in workload.parts if count]
    outs = max((sum(o for _, o in part.linears.values()) for part in parts), default=0)
    matrix = quantized_matrix_bytes(facts)
    adapters = adapter_bytes(facts, training)
    saved, mixing = float(copied_bytes(facts, training)), 0.0
    for alone, _, count in workload.parts:
        part = alone.facts
        lora = sum(i for i, _ in layers_named(part, training.targets, training.experts))
        kept = sum(o for _, o in part.linears.values())
        saved += count * n * number * (table["outs"] * kept + table["lora"] * lora)
        saved += count * vectors_bytes(alone, n, "fused")
        saved += count * gemma_bytes(alone, rows, tokens, "fused")
        saved += count * kind_bytes(part, rows, tokens, kept=True)
        mixing = max(mixing, kind_bytes(part, rows, tokens))
    backward = table["ahead"] * n * outs * number + table["adapters"] * adapters
    backward += table["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
    return [
        {
            "gradients": earlier,
            "activations": saved,
            "block work": workload.process.coefficients.fused_head["ahead"] * n * outs * number,
            "head chunk": fused_head_bytes(workload, n),
        },
        {"gradients": gradients, "activations": saved, "block work": backward + mixing},
    ]


def fused_head_bytes(workload: Workload, targets: int) -> float:
    """Bytes of the slices of the vocabulary that exist together, and of the hidden states."""
    facts, coefficients = workload.facts, workload.process.coefficients
    table = coefficients.fused_head
    count = min(targets, HEAD_ROWS)
    step = head_step(facts, count)
    most = HEAD_SLICES if facts.head_quantized else DENSE_HEAD_SLICES
    slices = min(most, -(-workload.vocabulary // step))
    columns = min(workload.vocabulary, slices * step)
    rows = columns * facts.hidden * facts.float_bytes * facts.head_quantized
    logits = 4 * count * columns * (coefficients.gemma["logits"] if facts.softcaps else 1)
    hidden = targets * facts.hidden * facts.float_bytes
    return table["rows"] * rows + table["logits"] * logits + table["hidden"] * hidden


def staged_phases(
    workload: Workload, plan: Plan, rows: int, tokens: int, earlier: int, gradients: int
) -> Phases:
    """Bytes at three moments: the forward pass of a block, the head, and the backward pass of a
    trained block; of the blocks that need most. Blocks that keep something have moments of their
    own: while they run forward and backward, others still keep theirs.
    """
    facts, training, coefficients = workload.facts, workload.training, workload.process.coefficients
    number, n = facts.float_bytes, rows * tokens
    hidden = n * (facts.hidden + facts.passed) * number
    inputs = 0 if plan.inputs_on_disk else hidden
    reads = read_alone_bytes(facts, training, plan, coefficients)
    parts = workload.parts
    forward = max(staged_forward_bytes(each, rows, tokens) for each, *_ in parts)
    backward = max(staged_backward_bytes(each, rows, tokens) for each, _, count in parts if count)
    is_wide = any(adapts_widest(each) for each, _, count in parts if count)
    table = coefficients.backward_lora if is_wide else coefficients.backward
    tiled = is_tiled(workload, rows, tokens)
    if tiled and plan.engine == "streamed":
        more = held_by_tiles_bytes(facts, plan, coefficients)
        forward, backward = forward + more, backward + more
    is_cut = tiled and not plan.kept.linear and not workload.score_head  # in tiles at the head
    head = staged_head_bytes(workload, n, hidden, is_cut)
    kept, blocks = plan.kept, training.blocks
    linear = kept.linear  # the last blocks, which also need other work; `lean` are those before
    lean = {"inputs": blocks - 1 - linear, "kept": kept_bytes(facts, kept, rows, tokens, linear)}
    of_all = kept_bytes(facts, kept, rows, tokens)
    found = [
        {
            "gradients": earlier,
            "block inputs": max(0, lean["inputs"] + tiled) * inputs,
            "kept outputs": lean["kept"],
            "block work": forward,
        },
        {
            "weights": -reads,
            "gradients": earlier,
            "block inputs": blocks * inputs,
            "kept outputs": of_all,
            "head chunk": head,
        },
    ]

    def backward_at(place: int, work: float, inputs_before: int) -> dict[str, float]:
        """Bytes in the backward pass of the block at `place`, counted from the last, at 0.

        inputs_before: of blocks, besides those below it.
        """
        held: float = gradients
        if earlier == 0:
            held *= table["gradients"]
            if not plan.gradients_on_disk:  # they become more, block by block
                held *= (place + 1) / blocks
        return {
            "weights": -reads,
            "gradients": held,
            "block inputs": (blocks - 1 - place + inputs_before) * inputs,
            "kept outputs": kept_bytes(facts, kept, rows, tokens, place),
            "block work": work,
        }

    if tiled:
        found.append({"block work": 2 * hidden})  # the embeddings, and their tiles
    if linear < blocks:
        found += [backward_at(place, backward, tiled) for place in (linear, blocks - 1)]
    if linear:
        later = [workload.alone[kind] for kind in facts.counts_of_last(linear)]
        first = max(kept_forward_bytes(each, rows, tokens) for each in later)
        found.append(backward_at(0, first, 0) | {"gradients": earlier, "weights": 0})
        work = max(kept_backward_bytes(each, rows, tokens) for each in later)
        found += [backward_at(place, work, 0) for place in {0, linear - 1}]
    return found


def staged_head_bytes(workload: Workload, targets: int, hidden: int, is_cut: bool) -> float:
    """Bytes at the head, with the hidden states; hidden: bytes of those. is_cut: as in
    `head_bytes`."""
    together = hidden * min(1.0, HEAD_ROWS / targets)  # hidden states that meet the head at once
    rest = hidden if is_cut else 2 * (hidden - together)  # and their cotangents
    table = workload.process.coefficients.head
    return head_bytes(workload, targets, is_cut) + table["hidden"] * together + rest


def held_by_tiles_bytes(facts: ModelFacts, plan: Plan, coefficients: Coefficients) -> int:
    """Bytes of weights beside those that `weights_bytes` counts, of a streamed plan: the weights of
    a block stay for all of its tiles."""
    reading = plan.resident, plan.blocks_ahead
    counted = weights_bytes(facts, plan.engine, False, coefficients, *reading)
    stay = facts.bytes_of_last(plan.resident)
    read = facts.neighbours_bytes(1 + plan.blocks_ahead, plan.resident)
    return min(read, facts.blocks_bytes - stay) + stay + facts.rest_bytes - counted


def head_bytes(workload: Workload, targets: int, is_cut: bool = False) -> float:
    """Bytes of slices of the logits, and of the head's weights that they need.

    is_cut: whether it runs tile by tile.
    """
    facts, table = workload.facts, workload.process.coefficients.head
    columns = min(workload.vocabulary, head_step(facts, min(targets, HEAD_ROWS)))
    slices = table["slice"] if facts.head_quantized else table["dense_slice"] + CUT_SLICES * is_cut
    weights = slices * columns * facts.hidden * facts.float_bytes
    return table["logits"] * logits_bytes(workload, targets) + weights


def soft_phase(
    workload: Workload, plan: Plan, rows: int, tokens: int, gradients: int
) -> dict[str, float]:
    """Bytes while gradients go back through sampled tokens.

    By columns: the keys and values of all positions, their cotangents, and the block inputs of a
    few columns. By sweeps: the inputs of all blocks. The work is that of a block on some tokens,
    and some slices of the vocabulary.
    """
    facts, table, sizes = workload.facts, workload.process.coefficients.soft, workload.soft
    assert sizes is not None
    number, hidden = facts.float_bytes, facts.hidden
    by_token = table["terms"] * 4 * rows * sizes.new_tokens * hidden
    if plan.engine == "streamed":
        held: float = facts.blocks * rows * tokens * hidden * number
    else:
        caches = rows * tokens * kv_bytes_per_token(facts)
        held = caches * (1 + 4 / number) + SOFT_COLUMNS * facts.blocks * rows * hidden * number
    together = min(PREFILL_TOKENS, rows * sizes.prompt_tokens)
    together = max(together, rows * tokens if plan.engine == "streamed" else 0)
    scoring = replace(workload, score_head=True)
    trained = [part for part, _, count in scoring.parts if count]
    block = max(staged_backward_bytes(part, 1, together) for part in trained)
    head_slice = min(HEAD_SLICE_BYTES, facts.vocabulary * hidden * number)
    slices = head_slice * (facts.head_quantized or plan.engine == "streamed")
    positions = min(SOFT_POSITIONS, rows * sizes.new_tokens)
    logits = logits_bytes(workload, positions) * facts.softcaps
    of_block = table["streamed_block" if plan.engine == "streamed" else "block"]
    work = of_block * block + table["slice"] * slices
    return {
        "gradients": gradients,
        "KV cache": held,
        "activations": by_token,
        "block work": work + table["softcap_logits"] * logits,
    }


def forward_phases(
    workload: Workload, plan: Plan, rows: int, tokens: int, predicts: bool = True
) -> Phases:
    """Bytes of an evaluation: in a block, and at the head with losses and maybe predictions, which
    cost a staged engine more, and a fused one nothing more."""
    facts, coefficients = workload.facts, workload.process.coefficients
    number, n = facts.float_bytes, rows * tokens
    hidden = n * facts.hidden * number
    logits = logits_bytes(workload, n)
    engine = "fused" if plan.engine == "fused" else "staged"
    parts = workload.parts
    of_block = fused_evaluation_bytes if engine == "fused" else staged_forward_bytes
    blocks = max(of_block(each, rows, tokens) for each, *_ in parts)
    head_slice = min(HEAD_SLICE_BYTES, workload.vocabulary * facts.hidden * number)
    losses, table = head_bytes(workload, n), coefficients.scores
    predictions = table["logits"] * logits + table[engine] * head_slice
    if not predicts and engine == "staged":
        predictions = 0.0
    if engine == "staged" and is_tiled(workload, rows, tokens) and not workload.score_head:
        at_head = hidden + table["hidden"] * hidden * min(1.0, HEAD_ROWS / n)
    else:
        at_head = table["hidden"] * hidden
    head = max(losses, predictions) + at_head
    return [{"block work": blocks}, {"head chunk": head}]


def read_bytes(facts: ModelFacts, training: Training, plan: Plan) -> int:
    """Bytes that a micro-batch reads from the model's files.

    A streamed plan reads trained blocks twice, but the last one, which begins the backward pass.
    """
    if plan.engine == "fused":
        return 0
    found = facts.vocabulary_bytes
    if plan.engine == "streamed":
        stay = facts.bytes_of_last(max(1, plan.resident))
        found += facts.blocks_bytes - facts.bytes_of_last(plan.resident)
        found += max(0, facts.bytes_of_last(training.blocks) - stay)
    return found
