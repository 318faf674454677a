"""Bytes by component of a training process, from shapes alone: no mlx, nothing is loaded.

What is held through a step is counted. Transient activations are shape x coefficient: MLX runs
some ten operations ahead, so that a few arrays of each kind exist at once. Their multiples are
coefficients, fitted to peaks that `your_ai bench` measured on MLX's CPU backend (2 cores,
float32; docs/memory.md has the matrix). On a GPU they are a first guess, which the first
steps correct.

Shapes: B rows, T tokens of a row, N = B x T, D hidden size, M the widest layer of a block,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from your_ai.memory.facts import ModelFacts, adapters_named, layers_named
from your_ai.memory.sizes import (
    CACHE_STEP,
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

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 1, "adafactor": 0, "muon": 1, "lion": 1}
# Of the parameters that are updated together: their new values and those in between.
OPTIMIZER_WORK = {"adamw": 3, "adam": 3, "sgd": 1, "adafactor": 4.1, "muon": 12.1, "lion": 2}
ADAPTER_BYTES = 4  # adapters, gradients and optimizer are float32
FUSED = {"outs": 1.74, "lora": 0.71, "ahead": 1.57, "slice": 5.46, "adapters": 0.25}
# Of the head there: of each slice of the vocabulary that is there at once, and of the rest.
FUSED_HEAD = {"rows": 1.9, "logits": 4.1, "hidden": 3.5, "ahead": 0.52}
HEAD_SLICES, DENSE_HEAD_SLICES = 2, 3  # at once, where rows are dequantized and where not
FORWARD = {"wide": 7.37, "hidden": 10.5, "slice": 5.97}
FORWARD_LORA = {"wide": 4.57, "hidden": 9.34, "slice": 5.97}  # where wide layers are adapted
BACKWARD = {"part": 7.59, "lora": 2.51, "hidden": 4.68, "slice": 1.40, "gradients": 0.91}
HEAD = {"logits": 4.68, "hidden": 1.82, "slice": 1.28}
# Of what Gemma's blocks have beside others': norms beyond two, and tanh of attention scores.
EXTRA = {"fused": {"norms": 5.7, "scores": 1.5}, "staged": {"norms": 3.0, "scores": 2.0}}
SOFTCAPPED = 1.7  # times the logits that others have
DORA_NORMS_BYTES = 15_000_000  # of slices whose norms are computed, whatever the layer
DORA = {"fused": 1.05, "staged": 2.5}  # of the adapted layers' outputs, up to D features of each
GRAPH_BYTES = 85_000  # of a slice that waits to be computed: its operations
# Bytes of compiled graphs, which hold every operation of the blocks in them. Fused, by block:
# itself, a slice of a weight, a block of queries, an adapted layer, and with DoRA more.
FUSED_GRAPH = {"block": 100_000, "slice": 115_000, "queries": 200_000, "adapted": 50_000,
               "dora": 150_000, "head": 150_000}  # fmt: skip
FORWARD_GRAPH = 0.4  # the same where there is no backward pass
# By kind of block; first: the graph of the first trained one, which has no input's gradient.
STAGED_GRAPH = {"block": 300_000, "slice": 100_000, "queries": 200_000, "adapted": 100_000,
                "dora": 100_000}  # fmt: skip
FIRST_GRAPH = {"block": 100_000, "slice": 60_000, "queries": 170_000}
GRAPHS_MARGIN = 1.25
# Of rows that are evaluated: nothing waits for a backward pass.
EVALUATION = {"wide": 4.0, "hidden": 2.2, "slice": 5.0, "lora": 2.01, "fused": 2.8}
UNSLICED = {"fused": (9.2, 2.6), "staged": (5.9, 0.0)}  # wide, logits: of matrices of one slice
SCORES = {"logits": 2.7, "hidden": 1.82, "fused": 6.3, "staged": 4.4}
# Of answers: keys and values of a block while they grow, and the rest as above.
GENERATION = {"grown": 1.7, "scores": 1.05, "slice": 5.4, "wide": 1.5, "head": 2.2}
GENERATION_BYTES = 500_000  # of small arrays
WORK = ("activations", "block work", "head chunk")  # components that coefficients decide
BESIDE = ("graphs", "cache", "python")  # those that are no live buffers of MLX's
BLOCKS_STREAMED = 1.60  # of weights: the one that runs and what is there of the next
BLOCKS_EVALUATED = 2.0  # the same, where each runs but for a moment
# What a ratio that was measured is a ratio to.
COEFFICIENTS = (FUSED, FUSED_HEAD, FORWARD, FORWARD_LORA, BACKWARD, HEAD, EXTRA, DORA, SOFTCAPPED)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained: adapters of `rank` on `targets` of the last `blocks` blocks."""

    blocks: int
    rank: int
    targets: tuple[str, ...]
    optimizer: str = "adamw"
    dora: bool = False


@dataclass(frozen=True)
class Plan:
    """How a step is computed.

    engine: fused, staged or streamed; micro_tokens: the most tokens, padding included, of a
    micro-batch of more than one row; spill: block inputs are kept on disk.
    """

    engine: str
    micro_tokens: int
    spill: bool = False

    def rows(self, tokens: int, batch_size: int) -> int:
        """How many rows of so many tokens go through together."""
        return max(1, min(batch_size, self.micro_tokens // tokens))


@dataclass(frozen=True)
class Estimate:
    """Bytes by component when the most is held, in the order in which they are shown."""

    components: dict[str, int]

    @property
    def process_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def mlx_bytes(self) -> int:
        """Live MLX buffers: what mx.get_peak_memory() counts."""
        return sum(v for n, v in self.components.items() if n not in BESIDE)

    @property
    def beside_bytes(self) -> int:
        """What the process holds that is no buffer of MLX's: Python, and compiled graphs."""
        return self.components["python"] + self.components["graphs"]

    @property
    def work_bytes(self) -> int:
        """Transient activations: shapes times coefficients, where an estimate can be wrong."""
        return sum(v for n, v in self.components.items() if n in WORK)


def estimate(
    facts: ModelFacts,
    training: Training,
    plan: Plan,
    rows: int,
    tokens: int,
    *,
    micro_batches: int = 1,
    python_bytes: int = 0,
    cache_bytes: int = 0,
    prefix_bytes: int = 0,
    answer_tokens: int = 0,
    forward: bool = False,
    scores: bool = False,
    sliced: bool = False,
    work_ratio: float = 1.0,
    gradients_only: bool = False,
) -> Estimate:
    """The most that a process holds in a step over `rows` x `tokens`, with every target trained.

    micro_batches: of a step; gradients of one are added to those before. python_bytes: what
    the process holds without a model; prefix_bytes: of a frozen-prefix cache in memory;
    answer_tokens: of the longest prompt that is answered besides, and its answer; forward: the
    step is evaluated, and there are neither gradients nor an optimizer; scores: rows are
    scored without gradients as well; sliced: quantized
    weights are dequantized in slices, as they are on the CPU, which graphs grow with.
    work_ratio: what transient activations take on this machine over what the coefficients
    say; gradients_only: there is no update, and nothing is answered.
    """
    adapters = adapter_bytes(facts, training)
    held = {
        "weights": weights_bytes(facts, plan.engine, forward),
        "adapters": adapters + norms_bytes(facts, training),
        "optimizer": 0 if forward else optimizer_bytes(facts, training),
        "prefix cache": prefix_bytes,
    }
    gradients = adapters * (1 if micro_batches == 1 else 2)
    if forward:
        phases = forward_phases(facts, training, plan, rows, tokens)
    elif plan.engine == "fused":
        phases = fused_phases(facts, training, rows, tokens, gradients)
    else:
        phases = staged_phases(facts, training, plan, rows, tokens, gradients)
    if scores and not forward:
        phases += forward_phases(facts, training, plan, rows, tokens)
    if not (forward or gradients_only):
        phases.append({"gradients": adapters, "optimizer work": update_bytes(facts, training)})
    if training.dora:
        phases.append({"norms": DORA_NORMS_BYTES})
    if answer_tokens and not gradients_only:
        phases.append({"block work": generation_bytes(facts, answer_tokens)})
    phases = [
        {name: size * (work_ratio if name in WORK else 1) for name, size in found.items()}
        for found in phases
    ]
    phase = max(phases, key=lambda found: sum(found.values()))
    if forward:
        work = int(sum(phase.values()))
        graphs = evaluation_graphs_bytes(
            facts, training, plan, rows, tokens, sliced=sliced, work_bytes=work
        )
    else:
        graphs = graphs_bytes(facts, training, plan.engine, rows, tokens, sliced=sliced)
    order = ("weights", "adapters", "gradients", "optimizer", "optimizer work", "block inputs",
             "activations", "block work", "head chunk", "norms", "prefix cache")  # fmt: skip
    components = {name: int((held | phase).get(name, 0)) for name in order}
    beside = {"graphs": int(graphs), "cache": cache_bytes, "python": python_bytes}
    return Estimate(components | beside)


def adapter_bytes(facts: ModelFacts, training: Training) -> int:
    layers = adapters_named(facts, training.targets)
    numbers = sum(training.rank * (i + o) + (o if training.dora else 0) for i, o in layers)
    return ADAPTER_BYTES * training.blocks * numbers


def norms_bytes(facts: ModelFacts, training: Training) -> int:
    """Of DoRA's norms, kept from one update to the next."""
    outputs = sum(o for _, o in adapters_named(facts, training.targets))
    return ADAPTER_BYTES * training.blocks * outputs if training.dora else 0


def optimizer_bytes(facts: ModelFacts, training: Training) -> int:
    """Of the optimizer's states. Adafactor's are the rows and columns of each matrix."""
    adapters = adapter_bytes(facts, training)
    if training.optimizer != "adafactor":
        return OPTIMIZER_STATES[training.optimizer] * adapters
    layers = adapters_named(facts, training.targets)
    numbers = sum(i + o + 2 * training.rank + o * training.dora for i, o in layers)
    return ADAPTER_BYTES * training.blocks * numbers


def update_bytes(facts: ModelFacts, training: Training) -> int:
    """Of the work of an update: new values, and what is between them and the old ones."""
    layers = adapters_named(facts, training.targets)
    largest = max((training.rank * max(i, o) for i, o in layers), default=0)
    together = min(UPDATE_BYTES, adapter_bytes(facts, training) // training.blocks)
    together = max(together, ADAPTER_BYTES * largest)
    return int(OPTIMIZER_WORK[training.optimizer] * together)


def weights_bytes(facts: ModelFacts, engine: str, forward: bool = False) -> int:
    if engine == "fused":
        return facts.weights_bytes
    if engine == "staged":
        return facts.blocks_bytes + facts.rest_bytes
    count = BLOCKS_EVALUATED if forward else BLOCKS_STREAMED
    return min(int(count * facts.block_bytes), facts.blocks_bytes) + facts.rest_bytes


def graphs_bytes(
    facts: ModelFacts,
    training: Training,
    engine: str,
    rows: int,
    tokens: int,
    *,
    trained: bool = True,
    sliced: bool = False,
) -> int:
    """Of what is compiled for micro-batches of one shape. trained: with gradients.

    A fused graph has every block; the others share one of each kind of block.
    """
    matrices = [i * o * facts.float_bytes for i, o in facts.linears.values()]
    slices = sum(-(-matrix // DEQUANTIZED_SLICE_BYTES) for matrix in matrices) if sliced else 0
    sizes = {
        "block": 1,
        "slice": slices * facts.quantized,
        "queries": query_blocks(facts, engine, rows, tokens),
        "adapted": len(layers_named(facts, training.targets)),
        "dora": len(layers_named(facts, training.targets)) * training.dora,
    }

    def of(shares: dict[str, int]) -> float:
        return sum(shares.get(name, 0) * count for name, count in sizes.items())

    if engine == "fused":
        frozen = facts.blocks - training.blocks
        blocks = (training.blocks + FORWARD_GRAPH * frozen) * of(FUSED_GRAPH)
        slices = -(-facts.vocabulary // head_step(facts, min(HEAD_ROWS, rows * tokens)))
        found = blocks + FUSED_GRAPH["head"] * slices
    else:
        found = facts.kinds * of(STAGED_GRAPH) + of(FIRST_GRAPH)
    return int(GRAPHS_MARGIN * found * (1 if trained else FORWARD_GRAPH))


def query_blocks(facts: ModelFacts, engine: str, rows: int, tokens: int) -> int:
    """In how many blocks the queries of a row go through attention."""
    if tokens < CPU_TOKENS:
        return 0
    most = QUERY_BLOCK if engine == "fused" else LEAN_QUERY_BLOCK
    most = min(most, SCORE_BYTES // (4 * rows * max(1, facts.heads) * tokens))
    return -(-tokens // max(most, FEWEST_QUERIES))


def evaluation_graphs_bytes(
    facts: ModelFacts,
    training: Training,
    plan: Plan,
    rows: int,
    tokens: int,
    *,
    sliced: bool,
    work_bytes: int,
) -> int:
    """Of graphs where nothing is trained, beside the `work_bytes` of computing.

    A fused one has every block, and all slices at once; so has the one that a staged model is
    taken apart with, which is gone before the rest.
    """
    matrices = [i * o * facts.float_bytes for i, o in facts.linears.values()]
    counted = sum(-(-matrix // DEQUANTIZED_SLICE_BYTES) for matrix in matrices) if sliced else 0
    blocks = GRAPH_BYTES * facts.blocks * counted * facts.quantized
    kind = {"trained": False, "sliced": sliced}
    compiled = graphs_bytes(facts, training, plan.engine, rows, tokens, **kind)
    if plan.engine == "fused":
        head = -(-facts.vocabulary * facts.hidden * facts.float_bytes // HEAD_SLICE_BYTES)
        return max(compiled, blocks) + 2 * GRAPH_BYTES * head
    return compiled + max(0, blocks - work_bytes if plan.engine == "staged" else 0)


def fused_phases(
    facts: ModelFacts, training: Training, rows: int, tokens: int, gradients: int
) -> list[dict[str, float]]:
    """The head, while MLX still ends the last block, and the backward pass at the last block."""
    number = facts.float_bytes
    n, outs = rows * tokens, sum(o for _, o in facts.linears.values())
    lora = sum(i for i, _ in layers_named(facts, training.targets))
    matrix = max((i * o for i, o in facts.linears.values()), default=0) * number * facts.quantized
    adapters = adapter_bytes(facts, training)
    saved = training.blocks * n * number * (FUSED["outs"] * outs + FUSED["lora"] * lora)
    saved += training.blocks * dora_bytes(facts, training, n, DORA["fused"])
    saved += training.blocks * extra_bytes(facts, rows, tokens, "fused")
    backward = FUSED["ahead"] * n * outs * number + FUSED["adapters"] * adapters
    backward += FUSED["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
    return [
        {
            "gradients": gradients - adapters,
            "activations": saved,
            "block work": FUSED_HEAD["ahead"] * n * outs * number,
            "head chunk": fused_head_bytes(facts, n),
        },
        {"gradients": gradients, "activations": saved, "block work": backward},
    ]


def fused_head_bytes(facts: ModelFacts, targets: int) -> float:
    """Of the slices of the vocabulary that are there at once, and of the hidden states."""
    count = min(targets, HEAD_ROWS)
    step = head_step(facts, count)
    most = HEAD_SLICES if facts.quantized else DENSE_HEAD_SLICES
    slices = min(most, -(-facts.vocabulary // step))
    columns = min(facts.vocabulary, slices * step)
    rows = columns * facts.hidden * facts.float_bytes * facts.quantized
    logits = 4 * count * columns * (SOFTCAPPED if facts.softcaps else 1)
    hidden = targets * facts.hidden * facts.float_bytes
    return FUSED_HEAD["rows"] * rows + FUSED_HEAD["logits"] * logits + FUSED_HEAD["hidden"] * hidden


def staged_phases(
    facts: ModelFacts, training: Training, plan: Plan, rows: int, tokens: int, gradients: int
) -> list[dict[str, float]]:
    """The forward pass at the last block, the head, the backward pass at the first trained."""
    number, n = facts.float_bytes, rows * tokens
    hidden = n * facts.hidden * number
    wide = max((o for _, o in facts.linears.values()), default=0)
    lora = sum(i for i, _ in layers_named(facts, training.targets))
    matrix = max((i * o for i, o in facts.linears.values()), default=0) * number
    part = min(wide, max(FEWEST_FEATURES, facts.hidden // 2))
    inputs = 0 if plan.spill else hidden
    earlier = 0 if gradients == adapter_bytes(facts, training) else gradients // 2
    adapted = any(wide in size for size in layers_named(facts, training.targets))
    share = FORWARD_LORA if adapted else FORWARD
    forward = (
        share["wide"] * n * wide * number
        + share["hidden"] * (hidden if matrix > DEQUANTIZED_SLICE_BYTES else 0)
        + share["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
        + extra_bytes(facts, rows, tokens, "staged")
    )
    backward = (
        BACKWARD["part"] * n * part * number
        + BACKWARD["lora"] * n * lora * number
        + BACKWARD["hidden"] * hidden
        + BACKWARD["slice"] * min(3 * part * facts.hidden * number, 3 * matrix)
        + dora_bytes(facts, training, n, DORA["staged"])
        + extra_bytes(facts, rows, tokens, "staged")
    )
    head = (
        HEAD["logits"] * logits_bytes(facts, n)
        + HEAD["hidden"] * hidden
        + HEAD["slice"] * min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * number)
    )
    return [
        {
            "gradients": earlier,
            "block inputs": (training.blocks - 1) * inputs,
            "block work": forward,
        },
        {"gradients": earlier, "block inputs": training.blocks * inputs, "head chunk": head},
        {"gradients": BACKWARD["gradients"] * gradients, "block work": backward},
    ]


def dora_bytes(facts: ModelFacts, training: Training, tokens: int, share: float) -> float:
    """Of a block's outputs that the gradients of DoRA's magnitudes need."""
    if not training.dora:
        return 0.0
    outputs = sum(min(o, facts.hidden) for _, o in layers_named(facts, training.targets))
    return share * tokens * outputs * facts.float_bytes


def extra_bytes(facts: ModelFacts, rows: int, tokens: int, engine: str) -> float:
    """Of a block's norms beyond two, and of attention scores that pass through a tanh."""
    hidden = rows * tokens * facts.hidden * facts.float_bytes
    scores = rows * tokens**2 * facts.heads * facts.float_bytes * facts.softcaps
    share = EXTRA[engine]
    return share["norms"] * (facts.norms - 2) * hidden + share["scores"] * scores


def forward_phases(
    facts: ModelFacts, training: Training, plan: Plan, rows: int, tokens: int
) -> list[dict[str, float]]:
    """The blocks, and the head that gives losses and predictions, where nothing is trained."""
    number, n = facts.float_bytes, rows * tokens
    hidden = n * facts.hidden * number
    wide = max((o for _, o in facts.linears.values()), default=0)
    matrix = max((i * o for i, o in facts.linears.values()), default=0) * number
    engine = "fused" if plan.engine == "fused" else "staged"
    if matrix > DEQUANTIZED_SLICE_BYTES:
        adapted = any(wide in size for size in layers_named(facts, training.targets))
        blocks = (
            (EVALUATION["wide"] + EVALUATION["lora"] * adapted) * n * wide * number
            + (EVALUATION["hidden"] + EVALUATION["fused"] * (engine == "fused")) * hidden
            + EVALUATION["slice"] * DEQUANTIZED_SLICE_BYTES
        )
    else:
        of_wide, of_logits = UNSLICED[engine]
        blocks = of_wide * n * wide * number + of_logits * logits_bytes(facts, n)
    head_slice = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * number)
    logits = logits_bytes(facts, n)
    losses = HEAD["logits"] * logits + HEAD["slice"] * head_slice
    predictions = SCORES["logits"] * logits + SCORES[engine] * head_slice
    head = max(losses, predictions) + SCORES["hidden"] * hidden
    return [{"block work": blocks}, {"head chunk": head}]


def generation_bytes(facts: ModelFacts, tokens: int) -> int:
    """Keys and values of `tokens`, and the work of a prompt, PREFILL_TOKENS of it at once.

    Either attention over all of them holds the most, while a block's keys and values grow, or
    the layers of a block, or a slice of the head.
    """
    number, share = facts.float_bytes, GENERATION
    kept = sum(o for name, (_, o) in facts.linears.items() if name.endswith(("k_proj", "v_proj")))
    of_block = -(-tokens // CACHE_STEP) * CACHE_STEP * (kept or 2 * facts.hidden) * number
    prompt = min(tokens, PREFILL_TOKENS)
    hidden = prompt * facts.hidden * number
    wide = prompt * max((o for _, o in facts.linears.values()), default=0) * number
    matrix = max((i * o for i, o in facts.linears.values()), default=0) * number * facts.quantized
    scores = facts.heads * prompt * tokens * number * (2 if facts.softcaps else 1)
    attention = share["grown"] * of_block + share["scores"] * scores + hidden
    layers = (
        share["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix) + share["wide"] * wide + 2 * hidden
    )
    head = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * number)
    head = share["head"] * head + 2 * facts.vocabulary * number
    return int(facts.blocks * of_block + max(attention, layers, head) + GENERATION_BYTES)


def logits_bytes(facts: ModelFacts, targets: int) -> int:
    """Of one slice of the vocabulary, for the hidden states that meet it together."""
    count = min(targets, HEAD_ROWS)
    of_slice = 4 * count * min(facts.vocabulary, head_step(facts, count))
    return int(SOFTCAPPED * of_slice) if facts.softcaps else of_slice


def head_step(facts: ModelFacts, count: int) -> int:
    """Tokens of a slice of the vocabulary that suits `count` hidden states."""
    return max(1, HEAD_SLICE_BYTES // (4 * max(count, facts.hidden)))


def step_cost(facts: ModelFacts, training: Training, plan: Plan) -> float:
    """Arithmetic of a step over that of a fused one: trained blocks are computed twice if not.

    A backward pass through frozen weights costs what a forward pass does. Reading weights is
    not counted.
    """
    fused = facts.blocks + training.blocks
    return 1.0 if plan.engine == "fused" else (fused + training.blocks) / fused


def read_bytes(facts: ModelFacts, training: Training, plan: Plan) -> int:
    """What a micro-batch reads from the model's files."""
    if plan.engine == "fused":
        return 0
    once = facts.vocabulary_bytes
    if plan.engine == "streamed":
        once += facts.block_bytes * (facts.blocks + training.blocks)
    return once
