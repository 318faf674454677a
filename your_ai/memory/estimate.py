"""Estimate a training process's peak memory by component, from shapes alone. No mlx here.

Memory that stays allocated for the whole step (weights, adapters, optimizer states) is counted
exactly. Transient activations are shape x coefficient: MLX evaluates about ten operations ahead,
so a few arrays of each kind exist at the same time. `coefficients.py` has these multiples, fitted
to measured peaks. The first steps of a run correct them for its machine.

Shapes: B rows, T tokens per row, N = B x T, D hidden size, M outputs of the widest layer of a
block, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from your_ai.memory.coefficients import PACKAGED, Coefficients, Table
from your_ai.memory.estimate_generation import (
    RolloutSizes,
    generation_bytes,
    kv_bytes_per_token,
    rollout_phases,
)
from your_ai.memory.facts import ModelFacts, adapters_named, layers_named
from your_ai.memory.layer_sizes import head_step, largest_matrix_bytes, widest_outputs
from your_ai.memory.sizes import (
    CPU_TOKENS,
    DEQUANTIZED_SLICE_BYTES,
    FEWEST_FEATURES,
    FEWEST_QUERIES,
    HEAD_ROWS,
    HEAD_SLICE_BYTES,
    LEAN_QUERY_BLOCK,
    PREFILL_TOKENS,
    QUERY_BLOCK,
    SCORE_BYTES,
    UPDATE_BYTES,
)

# Arrays per parameter that the optimizer keeps between updates.
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 1, "adafactor": 0, "muon": 1, "lion": 1}
# Arrays of an update per parameter that is updated together: new values and temporaries.
OPTIMIZER_WORK = {"adamw": 3, "adam": 3, "sgd": 1, "adafactor": 4.1, "muon": 12.1, "lion": 2}
ADAPTER_BYTES = 4  # adapters, gradients and optimizer states are float32
# Slices of the vocabulary that exist together: of a quantized head, and of one that is not.
HEAD_SLICES, DENSE_HEAD_SLICES = 2, 3
DORA_NORMS_BYTES = 15_000_000  # norms are computed in slices, so this does not depend on the layer
GRAPH_BYTES = 85_000  # operations of one slice that waits to be evaluated
FORWARD_GRAPH = 0.4  # size of a graph without a backward pass, relative to one with it
GRAPHS_MARGIN = 1.25
SOFT_COLUMNS = 16  # tokens whose block inputs are computed together
SOFT_POSITIONS = 64  # positions whose logits are slices of the head together
SOFT_GRAPHS = 2  # of the policy's columns, and of the frozen networks
NOISE_ARRAYS = 4.5  # (B, T, D) in float32 that exist while noise is added to the embeddings
WORK = ("activations", "block work", "head chunk")  # components that depend on coefficients
BESIDE = ("graphs", "cache", "python")  # components that are not live MLX buffers


@dataclass(frozen=True, kw_only=True)
class Training:
    """The adapters: `rank`, on the layers named in `targets`, in the last `blocks` blocks."""

    blocks: int
    rank: int
    targets: tuple[str, ...]
    optimizer: str = "adamw"
    dora: bool = False


@dataclass(frozen=True)
class Plan:
    """How a step is computed."""

    engine: str
    """fused, staged or streamed."""
    micro_tokens: int
    """Maximum tokens, with padding, of a micro-batch of more than one row."""
    spill: bool = False
    """Keep the inputs of blocks on disk."""
    wave: int = 0
    """Completions that are generated together; 0 if the run generates none."""

    def rows(self, tokens: int, batch_size: int) -> int:
        """Rows of `tokens` tokens per micro-batch."""
        return max(1, min(batch_size, self.micro_tokens // tokens))


@dataclass(frozen=True, kw_only=True)
class RewardModelSizes:
    """A trained reward model, which scores the completions of each step."""

    training: Training
    """Its adapter."""
    facts: ModelFacts | None = None
    """Of its base; None if that is the model that is trained, whose weights it shares."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a process does, independent of the plan and of the micro-batch."""

    facts: ModelFacts
    training: Training
    python_bytes: int = 0
    """Memory of the process without a model."""
    cache_bytes: int = 0
    """MLX's cache of freed buffers."""
    prefix_bytes: int = 0
    """A frozen-prefix cache in memory."""
    answer_tokens: int = 0
    """Longest sample prompt plus its answer, in tokens; 0 without samples."""
    rollouts: RolloutSizes | None = None
    """The completions that each step generates before it trains them, if it does."""
    forward: bool = False
    """Evaluation only: no gradients and no optimizer."""
    scores: bool = False
    """The step also scores its rows without gradients."""
    noise: bool = False
    """Noise is added to the embeddings."""
    score_head: bool = False
    """The head gives one number per text, and not logits."""
    reward_models: tuple[RewardModelSizes, ...] = ()
    """Those that score the completions of each step."""
    soft: RolloutSizes | None = None
    """The completions that the step trains through, by columns if the weights are resident."""
    sliced: bool = False
    """Quantized weights are dequantized in slices, as on the CPU, so that graphs are larger."""
    coefficients: Coefficients = PACKAGED

    @property
    def vocabulary(self) -> int:
        """V, or 0 if no logits are computed."""
        return 0 if self.score_head else self.facts.vocabulary


@dataclass(frozen=True)
class Estimate:
    """Bytes by component at the peak, in the order in which they are shown."""

    components: dict[str, int]
    phases: dict[str, int] = field(default_factory=dict)
    """Bytes of the process at the peak of each phase of a step, of those that generate rollouts:
    generate, score and update."""

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
    gradients_only: leave out the update and the samples.
    """
    facts, training, forward = workload.facts, workload.training, workload.forward
    adapters = adapter_bytes(facts, training)
    held = {
        "weights": weights_bytes(facts, plan.engine, forward, workload.coefficients),
        "adapters": adapters + norms_bytes(facts, training),
        "optimizer": 0 if forward else optimizer_bytes(facts, training),
        "prefix cache": workload.prefix_bytes,
    }
    if workload.reward_models:
        held["reward models"] = reward_model_bytes(workload, plan.engine)
    gradients = adapters * (1 if micro_batches == 1 else 2)
    if forward:
        phases = forward_phases(workload, plan, rows, tokens)
    elif workload.soft is not None:
        phases = [soft_phase(workload, plan, rows, tokens, gradients)]
    elif plan.engine == "fused":
        phases = fused_phases(workload, rows, tokens, gradients)
    else:
        phases = staged_phases(workload, plan, rows, tokens, gradients)
    if workload.noise and not forward:
        hidden = rows * tokens * facts.hidden
        noise = NOISE_ARRAYS * 4 * hidden + hidden * facts.float_bytes
        phases.append({"gradients": gradients - adapters, "block work": noise})
    scores = workload.scores and not forward
    scoring = forward_phases(workload, plan, rows, tokens, predicts=False) if scores else []
    phases += scoring
    rewarding = []
    if not gradients_only:
        rewarding = reward_phases(workload, plan, rows, tokens)
    if not (forward or gradients_only):
        phases.append({"gradients": adapters, "optimizer work": update_bytes(facts, training)})
    if training.dora:
        phases.append({"norms": DORA_NORMS_BYTES})
    if workload.answer_tokens and not gradients_only:
        answer = generation_bytes(facts, workload.answer_tokens, workload.coefficients)
        phases.append({"block work": answer})
    generating = []
    if workload.rollouts is not None and not gradients_only:
        generating = rollout_phases(facts, workload.rollouts, plan.wave, workload.coefficients)

    def largest(phases: Sequence[dict[str, float]]) -> dict[str, float]:
        scaled = [
            {name: size * (work_ratio if name in WORK else 1) for name, size in found.items()}
            for found in phases
        ]
        return max(scaled, key=lambda found: sum(found.values()), default={})

    of_phase = {"generate": largest(generating), "score": largest(scoring),
                "update": largest(phases)}  # fmt: skip
    if rewarding:
        of_phase["reward"] = largest(rewarding)
    phase = largest(phases + generating + rewarding)
    if forward:
        graphs = evaluation_graphs_bytes(workload, plan, rows, tokens, int(sum(phase.values())))
    elif workload.soft is not None:
        graphs = SOFT_GRAPHS * graphs_bytes(workload, "staged", rows, tokens)
    else:
        graphs = graphs_bytes(workload, plan.engine, rows, tokens)
    order = ("weights", "adapters", "gradients", "optimizer", "optimizer work", "block inputs",
             "activations", "block work", "head chunk", "KV cache", "sampling", "norms",
             "prefix cache")  # fmt: skip
    order += ("reward models",) if workload.reward_models else ()
    order = [name for name in order if generating or name not in ("KV cache", "sampling")]
    components = {name: int((held | phase).get(name, 0)) for name in order}
    beside = {"graphs": graphs, "cache": workload.cache_bytes, "python": workload.python_bytes}
    found = Estimate(components | beside)
    if not generating:
        return found
    rest = sum(held.values()) + sum(beside.values())
    peaks = {name: rest + sum(map(int, each.values())) for name, each in of_phase.items() if each}
    return Estimate(found.components, peaks)


def adapter_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of the trained parameters."""
    layers = adapters_named(facts, training.targets)
    numbers = sum(training.rank * (i + o) + (o if training.dora else 0) for i, o in layers)
    return ADAPTER_BYTES * training.blocks * numbers


def reward_model_bytes(workload: Workload, engine: str) -> int:
    """Bytes of the adapters of the reward models, and of weights that are not shared."""
    total = 0
    for model in workload.reward_models:
        facts = model.facts or workload.facts
        total += adapter_bytes(facts, model.training) + norms_bytes(facts, model.training)
        if model.facts is not None:
            total += weights_bytes(facts, engine, forward=True, coefficients=workload.coefficients)
    return total


def reward_phases(workload: Workload, plan: Plan, rows: int, tokens: int) -> list[dict[str, float]]:
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


def norms_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of DoRA's weight norms, which are kept between updates."""
    outputs = sum(o for _, o in adapters_named(facts, training.targets))
    return ADAPTER_BYTES * training.blocks * outputs if training.dora else 0


def optimizer_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of the optimizer states. Adafactor keeps one row and one column per matrix."""
    adapters = adapter_bytes(facts, training)
    if training.optimizer != "adafactor":
        return OPTIMIZER_STATES[training.optimizer] * adapters
    layers = adapters_named(facts, training.targets)
    numbers = sum(i + o + 2 * training.rank + o * training.dora for i, o in layers)
    return ADAPTER_BYTES * training.blocks * numbers


def update_bytes(facts: ModelFacts, training: Training) -> int:
    """Bytes of new values and temporaries of an update, for the parameters updated together."""
    layers = adapters_named(facts, training.targets)
    largest = max((training.rank * max(i, o) for i, o in layers), default=0)
    together = min(UPDATE_BYTES, adapter_bytes(facts, training) // training.blocks)
    together = max(together, ADAPTER_BYTES * largest)
    return int(OPTIMIZER_WORK[training.optimizer] * together)


def weights_bytes(
    facts: ModelFacts, engine: str, forward: bool = False, coefficients: Coefficients = PACKAGED
) -> int:
    """Bytes of weights that are in memory together. forward: evaluation only."""
    if engine == "fused":
        return facts.weights_bytes
    if engine == "staged":
        return facts.blocks_bytes + facts.rest_bytes
    count = coefficients.streamed["evaluation" if forward else "training"]
    return min(int(count * facts.block_bytes), facts.blocks_bytes) + facts.rest_bytes


def graphs_bytes(
    workload: Workload, engine: str, rows: int, tokens: int, *, trained: bool = True
) -> int:
    """Bytes of the compiled graphs for micro-batches of one shape. trained: with gradients.

    A fused graph contains every block. The other engines share one graph per kind of block.
    """
    facts, training, coefficients = workload.facts, workload.training, workload.coefficients
    adapted = len(layers_named(facts, training.targets))
    counts = {
        "block": 1,
        "slice": dequantized_slices(workload) * facts.quantized,
        "queries": query_blocks(facts, engine, rows, tokens),
        "adapted": adapted,
        "dora": adapted * training.dora,
    }

    def size_of(table: Table) -> float:
        return sum(table.get(name, 0) * count for name, count in counts.items())

    if engine == "fused":
        frozen = facts.blocks - training.blocks
        blocks = (training.blocks + FORWARD_GRAPH * frozen) * size_of(coefficients.fused_graph)
        slices = -(-workload.vocabulary // head_step(facts, min(HEAD_ROWS, rows * tokens)))
        found = blocks + coefficients.fused_graph["head"] * slices
    else:
        found = facts.kinds * size_of(coefficients.staged_graph)
        found += size_of(coefficients.first_graph)
    return int(GRAPHS_MARGIN * found * (1 if trained else FORWARD_GRAPH))


def dequantized_slices(workload: Workload) -> int:
    """Slices in which the weights of a block are dequantized; 0 if they are not."""
    if not workload.sliced:
        return 0
    facts = workload.facts
    matrices = [i * o * facts.float_bytes for i, o in facts.linears.values()]
    return sum(-(-matrix // DEQUANTIZED_SLICE_BYTES) for matrix in matrices)


def query_blocks(facts: ModelFacts, engine: str, rows: int, tokens: int) -> int:
    """Blocks of queries in which attention over a row is computed; 0 if it is computed whole."""
    if tokens < CPU_TOKENS:
        return 0
    most = QUERY_BLOCK if engine == "fused" else LEAN_QUERY_BLOCK
    most = min(most, SCORE_BYTES // (4 * rows * max(1, facts.heads) * tokens))
    return -(-tokens // max(most, FEWEST_QUERIES))


def evaluation_graphs_bytes(
    workload: Workload, plan: Plan, rows: int, tokens: int, work_bytes: int
) -> int:
    """Bytes of the graphs of an evaluation, in addition to `work_bytes` of activations.

    A fused graph contains every block and all slices. A staged model has such a graph once, when
    its parts are compared with the whole; its memory is free before the first block runs.
    """
    facts = workload.facts
    slices = dequantized_slices(workload) * facts.quantized
    blocks = GRAPH_BYTES * facts.blocks * slices
    compiled = graphs_bytes(workload, plan.engine, rows, tokens, trained=False)
    if plan.engine == "fused":
        head = -(-workload.vocabulary * facts.hidden * facts.float_bytes // HEAD_SLICE_BYTES)
        return max(compiled, blocks) + 2 * GRAPH_BYTES * head
    return compiled + max(0, blocks - work_bytes if plan.engine == "staged" else 0)


def fused_phases(
    workload: Workload, rows: int, tokens: int, gradients: int
) -> list[dict[str, float]]:
    """Bytes at two moments: at the head, while MLX finishes the last block, and at the last
    block of the backward pass. Activations of all trained blocks are alive at both.
    """
    facts, training, table = workload.facts, workload.training, workload.coefficients.fused
    number = facts.float_bytes
    n, outs = rows * tokens, sum(o for _, o in facts.linears.values())
    lora = sum(i for i, _ in layers_named(facts, training.targets))
    matrix = largest_matrix_bytes(facts) * facts.quantized
    adapters = adapter_bytes(facts, training)
    saved = training.blocks * n * number * (table["outs"] * outs + table["lora"] * lora)
    saved += training.blocks * dora_bytes(workload, n, "fused")
    saved += training.blocks * gemma_bytes(workload, rows, tokens, "fused")
    backward = table["ahead"] * n * outs * number + table["adapters"] * adapters
    backward += table["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
    return [
        {
            "gradients": gradients - adapters,
            "activations": saved,
            "block work": workload.coefficients.fused_head["ahead"] * n * outs * number,
            "head chunk": fused_head_bytes(workload, n),
        },
        {"gradients": gradients, "activations": saved, "block work": backward},
    ]


def fused_head_bytes(workload: Workload, targets: int) -> float:
    """Bytes of the slices of the vocabulary that exist together, and of the hidden states."""
    facts, table = workload.facts, workload.coefficients.fused_head
    count = min(targets, HEAD_ROWS)
    step = head_step(facts, count)
    most = HEAD_SLICES if facts.quantized else DENSE_HEAD_SLICES
    slices = min(most, -(-workload.vocabulary // step))
    columns = min(workload.vocabulary, slices * step)
    rows = columns * facts.hidden * facts.float_bytes * facts.quantized
    logits = 4 * count * columns * (workload.coefficients.gemma["logits"] if facts.softcaps else 1)
    hidden = targets * facts.hidden * facts.float_bytes
    return table["rows"] * rows + table["logits"] * logits + table["hidden"] * hidden


def staged_phases(
    workload: Workload, plan: Plan, rows: int, tokens: int, gradients: int
) -> list[dict[str, float]]:
    """Bytes at three moments: the forward pass of the last block, the head, and the backward
    pass of the first trained block.
    """
    facts, training, coefficients = workload.facts, workload.training, workload.coefficients
    number, n = facts.float_bytes, rows * tokens
    hidden = n * facts.hidden * number
    wide = widest_outputs(facts)
    lora = sum(i for i, _ in layers_named(facts, training.targets))
    matrix = largest_matrix_bytes(facts)
    part = min(wide, max(FEWEST_FEATURES, facts.hidden // 2))
    inputs = 0 if plan.spill else hidden
    earlier = 0 if gradients == adapter_bytes(facts, training) else gradients // 2
    adapted = any(wide in size for size in layers_named(facts, training.targets))
    table = coefficients.forward_lora if adapted else coefficients.forward
    is_sliced = matrix > DEQUANTIZED_SLICE_BYTES
    unsliced = 0 if is_sliced else table["unsliced"] + table["dense"] * (not facts.quantized)
    forward = (
        (table["wide"] + unsliced) * n * wide * number
        + table["hidden"] * hidden * is_sliced
        + table["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
        + gemma_bytes(workload, rows, tokens, "staged")
    )
    table = coefficients.backward
    backward = (
        table["part"] * n * part * number
        + table["dense"] * n * wide * number * (not is_sliced and not facts.quantized)
        + table["lora"] * n * lora * number
        + table["hidden"] * hidden
        + table["slice"] * min(3 * part * facts.hidden * number, 3 * matrix)
        + dora_bytes(workload, n, "staged")
        + gemma_bytes(workload, rows, tokens, "staged")
    )
    table = coefficients.head
    head = (
        table["logits"] * logits_bytes(workload, n)
        + table["hidden"] * hidden
        + table["slice"] * min(HEAD_SLICE_BYTES, workload.vocabulary * facts.hidden * number)
    )
    return [
        {
            "gradients": earlier,
            "block inputs": (training.blocks - 1) * inputs,
            "block work": forward,
        },
        {"gradients": earlier, "block inputs": training.blocks * inputs, "head chunk": head},
        {"gradients": coefficients.backward["gradients"] * gradients, "block work": backward},
    ]


def soft_phase(
    workload: Workload, plan: Plan, rows: int, tokens: int, gradients: int
) -> dict[str, float]:
    """Bytes while gradients go back through sampled tokens.

    By columns: the keys and values of all positions, their cotangents, and the block inputs of a
    few columns. By sweeps: the inputs of all blocks. The work is that of a block on some tokens,
    and some slices of the vocabulary.
    """
    facts, table, sizes = workload.facts, workload.coefficients.soft, workload.soft
    assert sizes is not None
    number, hidden = facts.float_bytes, facts.hidden
    by_token = table["terms"] * 4 * rows * sizes.new_tokens * hidden
    if plan.engine == "streamed":
        held = facts.blocks * rows * tokens * hidden * number
    else:
        caches = facts.blocks * rows * tokens * kv_bytes_per_token(facts)
        held = caches * (1 + 4 / number) + SOFT_COLUMNS * facts.blocks * rows * hidden * number
    together = min(PREFILL_TOKENS, rows * sizes.prompt_tokens)
    together = max(together, rows * tokens if plan.engine == "streamed" else 0)
    scoring = replace(workload, score_head=True)
    block = staged_phases(scoring, replace(plan, engine="staged"), 1, together, 0)[-1]
    head_slice = min(HEAD_SLICE_BYTES, facts.vocabulary * hidden * number)
    slices = head_slice * (facts.quantized or plan.engine == "streamed")
    positions = min(SOFT_POSITIONS, rows * sizes.new_tokens)
    logits = logits_bytes(workload, positions) * facts.softcaps
    of_block = table["streamed_block" if plan.engine == "streamed" else "block"]
    work = of_block * sum(block.values()) + table["slice"] * slices
    return {
        "gradients": gradients,
        "KV cache": held,
        "activations": by_token,
        "block work": work + table["softcap_logits"] * logits,
    }


def dora_bytes(workload: Workload, tokens: int, engine: str) -> float:
    """Bytes of a block's outputs that the gradients of DoRA's magnitudes need."""
    facts, training = workload.facts, workload.training
    if not training.dora:
        return 0.0
    outputs = sum(min(o, facts.hidden) for _, o in layers_named(facts, training.targets))
    return workload.coefficients.dora[engine] * tokens * outputs * facts.float_bytes


def gemma_bytes(workload: Workload, rows: int, tokens: int, engine: str) -> float:
    """Bytes of a block's norms beyond two, and of attention scores with a softcap (tanh)."""
    facts, table = workload.facts, workload.coefficients.gemma
    hidden = rows * tokens * facts.hidden * facts.float_bytes
    scores = rows * tokens**2 * facts.heads * facts.float_bytes * facts.softcaps
    norms = table[f"{engine}_norms"] * (facts.norms - 2) * hidden
    return norms + table[f"{engine}_scores"] * scores


def forward_phases(
    workload: Workload, plan: Plan, rows: int, tokens: int, predicts: bool = True
) -> list[dict[str, float]]:
    """Bytes of an evaluation: in a block, and at the head with losses and maybe predictions, which
    cost a staged engine more, and a fused one nothing more."""
    facts, coefficients = workload.facts, workload.coefficients
    number, n = facts.float_bytes, rows * tokens
    hidden = n * facts.hidden * number
    wide, logits = widest_outputs(facts), logits_bytes(workload, n)
    engine = "fused" if plan.engine == "fused" else "staged"
    adapted = any(wide in size for size in layers_named(facts, workload.training.targets))
    if largest_matrix_bytes(facts) > DEQUANTIZED_SLICE_BYTES:
        table = coefficients.evaluation
        blocks = (
            (table["wide"] + table["lora"] * adapted) * n * wide * number
            + (table["hidden"] + table["fused"] * (engine == "fused")) * hidden
            + table["slice"] * DEQUANTIZED_SLICE_BYTES
        )
    else:
        table = coefficients.evaluation_unsliced
        arrays = table[f"{engine}_wide"]
        if engine == "staged":
            arrays += table["lora"] * adapted + table["dense"] * (not facts.quantized)
        blocks = arrays * n * wide * number + table[f"{engine}_logits"] * logits
    head_slice = min(HEAD_SLICE_BYTES, workload.vocabulary * facts.hidden * number)
    losses = coefficients.head["logits"] * logits + coefficients.head["slice"] * head_slice
    table = coefficients.scores
    predictions = table["logits"] * logits + table[engine] * head_slice
    if not predicts and engine == "staged":
        predictions = 0.0
    head = max(losses, predictions) + table["hidden"] * hidden
    return [{"block work": blocks}, {"head chunk": head}]


def logits_bytes(workload: Workload, targets: int) -> int:
    """Bytes of one slice of the logits, for the hidden states that meet the head together."""
    facts = workload.facts
    count = min(targets, HEAD_ROWS)
    of_slice = 4 * count * min(workload.vocabulary, head_step(facts, count))
    return int(workload.coefficients.gemma["logits"] * of_slice) if facts.softcaps else of_slice


def step_cost(facts: ModelFacts, training: Training, plan: Plan) -> float:
    """Arithmetic of a step relative to a fused one. The others compute trained blocks twice.

    A backward pass through frozen weights costs as much as a forward pass. Reading weights is
    not counted.
    """
    fused = facts.blocks + training.blocks
    return 1.0 if plan.engine == "fused" else (fused + training.blocks) / fused


def read_bytes(facts: ModelFacts, training: Training, plan: Plan) -> int:
    """Bytes that a micro-batch reads from the model's files."""
    if plan.engine == "fused":
        return 0
    once = facts.vocabulary_bytes
    if plan.engine == "streamed":
        once += facts.block_bytes * (facts.blocks + training.blocks)
    return once
