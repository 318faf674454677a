"""Predict the seconds of a step from its sizes and the measured speed of the machine. No mlx here.

A step is a sum of terms: forward, recompute, backward, head, reading, update ... Each term is
work: amounts of a few kinds of operations (`speed.KINDS`), counted from shapes. `MachineSpeed`
has the seconds of one operation of each kind, which `your_ai bench --calibrate` measured. So what
a new kind of plan does is one more term.

Shapes: B rows, T tokens per row, N = B x T, D hidden size, V vocabulary size, S targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from your_ai.config.optimizers import OPTIMIZERS
from your_ai.memory.estimate_adapters import (
    FLOAT32_BYTES,
    float32_bytes,
    optimizer_bytes,
)
from your_ai.memory.facts import BlockFacts, ModelFacts, is_quantized, names_of
from your_ai.memory.mixer_facts import ATTENTION, OUTPUTS, SLIDING, MixerFacts
from your_ai.memory.sizes import (
    CPU_TOKENS,
    FEWEST_QUERIES,
    HEAD_ROWS,
    HEAD_SLICE_BYTES,
    LEAN_QUERY_BLOCK,
    QUERY_BLOCK,
    SCORE_BYTES,
)
from your_ai.memory.speed import MachineSpeed
from your_ai.memory.workload import Plan, StepSizes, Training

# Estimate the disk space of what a plan keeps in files without a name, in the run's folder


def spilled_bytes(facts: ModelFacts, training: Training, plan: Plan, tokens: int) -> int:
    """Bytes of gradients, optimizer states and block inputs on disk.

    tokens: of a micro-batch, with padding; the inputs of one micro-batch are there at a time.
    """
    found = 0
    if plan.gradients_on_disk:
        found += float32_bytes(facts, training)
    if plan.states_on_disk:
        found += optimizer_bytes(facts, training)
    if plan.inputs_on_disk:
        found += inputs_bytes(facts, training, tokens)
    return found


def inputs_bytes(facts: ModelFacts, training: Training, tokens: int) -> int:
    """Bytes of the inputs of the trained blocks."""
    return training.blocks * tokens * (facts.hidden + facts.passed) * facts.float_bytes


Work = dict[str, float]  # amounts of operations, by their kind in speed.KINDS
Terms = dict[str, Work]  # by the name of the term
BACKWARD_ELEMENTS = 2.0  # elementwise operations of a backward pass, relative to a forward pass
BACKWARD_ATTENTION = 2.5  # 5 products for each score, and not 2
BACKWARD_SCORES = 2.0
HIDDEN_ARRAYS = 4  # of D numbers for each token, that a block's norms and residuals make
SCORED_HEAD = 0.5  # the head without gradients, relative to the head with them
ACTIVATION_SHARE = 0.77  # of a block's elementwise work that is its MLP's activation, as measured
ACCUMULATED = 0.25  # adding a gradient to those of earlier micro-batches, relative to an update
PREDICTED_MIXERS = (ATTENTION, SLIDING)
INWARD_MIXER, OUTWARD_MIXER, INWARD_MLP, OUTWARD_MLP = range(4)  # the order of a block's layers
LAST_LAYERS = ("down_proj", "fc2", "w2", "c_proj", "dense_4h_to_h")  # of an MLP


class BlockRole(NamedTuple):
    """The role of a block in a step."""

    kind: int
    """The index of its kind."""
    trained: bool
    lowest: bool
    """Whether it is the first trained block, whose input needs no gradient."""
    kept: tuple[bool, bool, bool]
    """Whether it keeps the outputs of its linear layers, attention and activations; as `Kept`."""


class BlockPasses(NamedTuple):
    """The passes over a block of (B, T)."""

    role: BlockRole
    rows: int
    tokens: int
    lean: bool
    """Whether the block saves memory at the cost of time."""


def unpredicted(facts: ModelFacts, training: Training, speed: MachineSpeed) -> str:
    """Say why the seconds of such a model are not predicted; empty if they are."""
    mixers = {mixer.kind for kind in facts.kinds for mixer in kind.mixers}
    if other := sorted(mixers - {*PREDICTED_MIXERS}):
        return f"the time of {other[0]} is not predicted"
    if facts.experts:
        return "the time of routed experts is not predicted"
    if facts.softcaps or facts.passed or not mixers:
        return "the time of this architecture is not predicted"
    if not training.adapter.is_sum:
        return f"the time of {training.adapter.title} is not predicted"
    if not OPTIMIZERS[training.optimizer].has_time:
        return f"the time of {training.optimizer} is not predicted"
    if facts.float_bytes != speed.float_bytes:
        return f"the speed was measured for numbers of {speed.float_bytes} bytes"
    return ""


@dataclass(frozen=True)
class StepOperations:
    """The work of the steps of a run, by term."""

    facts: ModelFacts
    training: Training
    sizes: StepSizes
    _passes: dict[BlockPasses, tuple[Work, Work, Work]] = field(default_factory=dict)
    """The work of the passes over a block, which many plans share."""

    def of_step(self, plan: Plan, rows: int, tokens: int, micro_batches: int = 1) -> Terms:
        """Terms of a step of micro-batches of (B, T)."""
        of_one = self.of_micro_batch(plan, rows, tokens)
        terms = {name: times(work, micro_batches) for name, work in of_one.items()}
        return terms | {"update": self.of_update(plan, micro_batches)}

    def of_update(self, plan: Plan, micro_batches: int = 1) -> Work:
        """Work of an update of the adapters, and of adding up the micro-batches' gradients."""
        facts, training, arrays = self.facts, self.training, self.trained_arrays
        updates = 1 + ACCUMULATED * (micro_batches - 1)
        gradients = float32_bytes(facts, training)
        found: Work = {
            "parameters": gradients / FLOAT32_BYTES * updates,
            "arrays": arrays * updates,
            "steps": 1,
        }
        if plan.gradients_on_disk:  # sums are read, too
            add(found, {"spilled": gradients, "stored": arrays}, micro_batches)
        if plan.states_on_disk:
            count = OPTIMIZERS[training.optimizer].states
            moved = {"spilled": optimizer_bytes(facts, training), "stored": count * arrays}
            add(found, moved, 2)
        return found

    @property
    def trained_arrays(self) -> int:
        return 2 * sum(
            count * len(adapted_names(self.facts, kind, self.training))
            for kind, count in self.facts.counts_of_last(self.training.blocks).items()
        )

    def of_micro_batch(self, plan: Plan, rows: int, tokens: int) -> Terms:
        """Terms of the gradients of a micro-batch of (B, T)."""
        facts, training, sizes = self.facts, self.training, self.sizes
        n, fused = rows * tokens, plan.engine == "fused"
        forward, recompute, backward = dict[str, float](), dict[str, float](), dict[str, float]()
        for role, count in roles_of(facts, training, plan).items():
            lean = not fused and not any(role.kept)
            of_forward, of_recompute, of_backward = self.of_block(role, rows, tokens, lean)
            if role.trained or not sizes.cached_prefix:
                add(forward, of_forward, count)
            if role.trained:
                add(backward, of_backward, count)
            if role.trained and not fused:
                add(recompute, of_recompute, count)
        if fused:  # one graph
            forward["calls"], backward["calls"] = 1, 0
        terms = {"forward": forward, "recompute": recompute, "backward": backward}
        terms["head"] = head_work(facts, plan, n, sizes)
        if sizes.scores_first:
            terms["scoring"] = dict(forward)
            add(terms["scoring"], terms["head"], SCORED_HEAD)
        if plan.engine == "streamed":
            terms["reading"] = reading_work(facts, training, sizes, plan)
        if plan.gradients_on_disk:
            gradients = float32_bytes(facts, training)
            terms["spilling"] = {"spilled": gradients, "stored": self.trained_arrays}
        if plan.inputs_on_disk:
            inputs = {"spilled": inputs_bytes(facts, training, n), "stored": training.blocks}
            add(terms["spilling"], inputs, 2)
        return terms

    def of_block(
        self, role: BlockRole, rows: int, tokens: int, lean: bool
    ) -> tuple[Work, Work, Work]:
        """Work of the forward pass over a block, of its recomputation, and of its backward pass."""
        passes = BlockPasses(role, rows, tokens, lean)
        if passes not in self._passes:
            block = BlockWork(self.facts, self.training, self.sizes.on_cpu, passes)
            self._passes[passes] = block.forward(), block.recompute(), block.backward()
        return self._passes[passes]


def mean_step(
    work: StepOperations,
    plan: Plan,
    rows_at: Callable[[int], int],
    rows_per_step: int,
    longest: int,
) -> Terms:
    """The work of a step by term, on average over the rows of the data.

    rows_at: T -> rows of a micro-batch. longest: T of all rows, if those of the data are not known.

    The rows of a step have about the same length, see `data.batches.epoch_order`.
    """
    counts = work.sizes.rows_of_length or ((longest, 1),)
    whole = sum(count for _, count in counts)
    found: Terms = {}
    for tokens, count in counts:
        rows = rows_at(tokens)
        micro_batches = -(-rows_per_step // rows)
        for name, amounts in work.of_step(plan, rows, tokens, micro_batches).items():
            add(found.setdefault(name, {}), amounts, count / whole)
    return found


def roles_of(facts: ModelFacts, training: Training, plan: Plan) -> Mapping[BlockRole, int]:
    """The number of blocks in each role."""
    first = facts.blocks - training.blocks

    def kept_at(at: int) -> tuple[bool, bool, bool]:
        linear, attention, activations = (at >= max(first, facts.blocks - n) for n in plan.kept)
        return linear, attention, activations

    return Counter(
        BlockRole(kind, at >= first, at == first, kept_at(at))
        for at, kind in enumerate(facts.order)
    )


@dataclass(frozen=True)
class BlockWork:
    """The work of the passes over a block."""

    facts: ModelFacts
    training: Training
    on_cpu: bool
    passes: BlockPasses

    @property
    def block(self) -> BlockFacts:
        return self.facts.kinds[self.passes.role.kind]

    @property
    def tokens(self) -> int:
        """N"""
        return self.passes.rows * self.passes.tokens

    @property
    def adapted(self) -> Sequence[str]:
        """The names of the layers with adapters."""
        role = self.passes.role
        return adapted_names(self.facts, role.kind, self.training) if role.trained else ()

    def forward(self) -> Work:
        found = self.beside_linears()
        for name, size in self.block.linears.items():
            add(found, self.product(name))
            if name in self.adapted:
                add(found, self.adapter(*size))
        return found

    def recompute(self) -> Work:
        """The forward pass with which a backward pass begins."""
        linear, attention, activations = self.passes.role.kept
        found: Work = {"calls": 1}
        add(found, self.elements(), 1 - ACTIVATION_SHARE * activations)
        for mixer in () if attention else self.block.mixers:
            add(found, attention_work(mixer, self.passes, self.on_cpu))
        last = max(self.block.linears, key=stage_of, default="")  # its output is not needed
        for name, size in self.block.linears.items():
            if not linear and name != last:
                add(found, self.product(name))
            if name in self.adapted:
                add(found, self.adapter(*size), 0.5)
        return found | {"calls": 0}

    def backward(self) -> Work:
        """The gradients, from what the forward pass computed."""
        stages = [stage_of(name) for name in self.adapted]
        first = min(stages, default=OUTWARD_MLP) if self.passes.role.lowest else -1
        found: Work = {"calls": 1}
        add(found, self.elements(), BACKWARD_ELEMENTS)
        for name, size in self.block.linears.items():
            if stage_of(name) > first:  # else nothing before it needs a gradient
                add(found, self.product(name))
            if name in self.adapted:
                add(found, self.adapter(*size), 2)
        if first <= INWARD_MIXER:
            for mixer in self.block.mixers:
                add(found, attention_backward_work(mixer, self.passes, self.on_cpu))
        return found

    def beside_linears(self) -> Work:
        """Work of a forward pass without its linear layers."""
        found: Work = {"calls": 1}
        add(found, self.elements())
        for mixer in self.block.mixers:
            add(found, attention_work(mixer, self.passes, self.on_cpu))
        return found

    def elements(self) -> Work:
        outputs = sum(o for _, o in self.block.linears.values())
        return {"elements": self.tokens * (HIDDEN_ARRAYS * self.facts.hidden + outputs)}

    def product(self, name: str) -> Work:
        """Multiply N tokens with a frozen weight."""
        quantized = is_quantized(self.facts, self.block, name)
        return weight_work(quantized, *self.block.linears[name], self.tokens)

    def adapter(self, inputs: int, outputs: int) -> Work:
        """Work of the forward pass of an adapter."""
        return adapter_work(inputs, outputs, self.training.rank, self.tokens)


def weight_work(quantized: bool, inputs: int, outputs: int, n: int) -> Work:
    """Multiply N tokens with a frozen weight of (outputs, inputs)."""
    numbers = inputs * outputs
    if quantized:
        return {"quantized_matmul": n * numbers, "quantized_weights": numbers, "products": 1}
    return {"matmul": n * numbers, "weights": numbers, "products": 1}


def adapter_work(inputs: int, outputs: int, rank: int, n: int) -> Work:
    """Multiply N tokens with the two matrices of an adapter, and add to the output of its layer.

    At low ranks most of the time goes into its inputs and outputs, not into multiply-adds.
    """
    numbers = n * (inputs + outputs)
    return {"adapted": numbers, "lora": rank * numbers, "products": 2}


def attention_work(mixer: MixerFacts, passes: BlockPasses, on_cpu: bool) -> Work:
    """Work of the forward pass of attention, in blocks of queries as in `nets.attention`."""
    rows, tokens = passes.rows, passes.tokens
    heads = max(1, mixer.heads)
    if not on_cpu:
        pairs, blocks = tokens * (tokens + 1) / 2, 1.0
    elif tokens < CPU_TOKENS:
        pairs, blocks = tokens * tokens, 1.0
    else:
        most = LEAN_QUERY_BLOCK if passes.lean else QUERY_BLOCK
        reach = min(mixer.window or tokens, tokens)
        room = SCORE_BYTES // (4 * rows * heads * min(tokens, reach + most))
        queries = min(tokens, max(min(most, room), FEWEST_QUERIES))
        blocks = tokens / queries
        pairs = tokens * min((tokens + queries) / 2, reach + queries)
    scores = rows * heads * pairs
    return {
        "attention": scores * (mixer.key_dim + mixer.value_dim),
        "scores": scores,
        "query_blocks": blocks,
    }


def attention_backward_work(mixer: MixerFacts, passes: BlockPasses, on_cpu: bool) -> Work:
    """Work of the gradients of attention, beside its forward pass."""
    work = attention_work(mixer, passes, on_cpu)
    work["attention"] *= BACKWARD_ATTENTION
    work["scores"] *= BACKWARD_SCORES
    if work["query_blocks"] > 1:  # each block is added to a copy of the whole
        of_token = mixer.kv_heads * (mixer.key_dim + mixer.value_dim)
        work["copied"] = work["query_blocks"] * passes.rows * passes.tokens * of_token
    return work


def head_work(facts: ModelFacts, plan: Plan, n: int, sizes: StepSizes) -> Work:
    """Logits and the gradient of the hidden states, in slices of the vocabulary.

    Without `sizes.trained_share` of the tokens, which are no targets.
    """
    if not sizes.has_vocabulary:
        return {}
    targets = max(1, round(sizes.trained_share * n))
    found = head_parts_work(facts.head_quantized, targets, facts.hidden, facts.vocabulary)
    if plan.engine != "fused" and facts.vocabulary_bytes:
        found["read_rows"] = passes_over_vocabulary(targets) * head_bytes(facts)
        found["embedded"] = (n + targets) * arrays_of_weight(facts.head_quantized)
    return found


def reading_work(facts: ModelFacts, training: Training, sizes: StepSizes, plan: Plan) -> Work:
    """Reading the blocks for the forward pass, and the trained ones again for the backward pass,
    which begins with the last one; but for those whose weights stay in memory.
    """
    bytes_read = arrays = 0
    for at, kind in enumerate(facts.order[: facts.blocks - plan.resident]):
        trained, block = at >= facts.blocks - training.blocks, facts.kinds[kind]
        times = 1 + (trained and at < facts.blocks - 1) - (sizes.cached_prefix and not trained)
        bytes_read += times * block.weights_bytes
        arrays += times * sum(
            arrays_of_weight(is_quantized(facts, block, name)) for name in block.linears
        )
    return {"read": bytes_read, "opened": arrays}


def arrays_of_weight(quantized: bool) -> int:
    """Arrays in the files of a layer: a quantized one has scales and biases, too."""
    return 3 if quantized else 1


def passes_over_vocabulary(targets: int) -> int:
    return -(-targets // HEAD_ROWS)


def head_parts_work(quantized: bool, targets: int, hidden: int, vocabulary: int) -> Work:
    """Work of a head whose weight is in memory, for S = `targets`."""
    passes = passes_over_vocabulary(targets)
    rows = -(-targets // passes)
    slices = -(-vocabulary // max(1, HEAD_SLICE_BYTES // (4 * max(rows, hidden))))
    found = times(weight_work(quantized, hidden, vocabulary, targets), 2)
    dense = "quantized_weights" if quantized else "weights"
    found |= {dense: passes * hidden * vocabulary, "products": 2 * passes * slices}
    return found | {"logits": targets * vocabulary, "slices": passes * slices}


def head_bytes(facts: ModelFacts) -> int:
    """Bytes of the head's weight: the vocabulary has one or two matrices like it."""
    numbers = sum(i * o for kind in facts.order for i, o in facts.kinds[kind].linears.values())
    of_one = facts.hidden * facts.vocabulary * facts.blocks_bytes / max(1, numbers)
    return facts.vocabulary_bytes // max(1, round(facts.vocabulary_bytes / max(1.0, of_one)))


def stage_of(name: str) -> int:
    """The place of a layer in the order of a block's layers."""
    parent, _, leaf = name.rpartition(".")
    mlp = not ("attn" in parent or "attention" in parent)
    if mlp:
        return OUTWARD_MLP if leaf in LAST_LAYERS else INWARD_MLP
    return OUTWARD_MIXER if leaf in OUTPUTS else INWARD_MIXER


def adapted_names(facts: ModelFacts, kind: int, training: Training) -> Sequence[str]:
    return names_of(facts.alone[kind], training.targets, training.experts)


def add(work: Work, more: Mapping[str, float], count: float = 1) -> None:
    """Add `count` times `more` to `work`, in place."""
    for kind, amount in list(more.items()):
        work[kind] = work.get(kind, 0.0) + count * amount


def times(work: Mapping[str, float], count: float) -> Work:
    return {kind: count * amount for kind, amount in work.items()}
