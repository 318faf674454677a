"""Estimate a training process's peak memory by component. No mlx here.

Memory that stays allocated for the whole step (weights, adapters, optimizer states) is counted
exactly. What the work of a block and of the head needs comes from `costs.py`: measured on this
machine, or guessed. A step's peak is what is held, and the largest of its phases. The first steps
of a run correct that.

Shapes: B rows, T tokens per row, N = B x T, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from your_ai.memory import costs
from your_ai.memory.costs import (
    BlockCosts,
    CostCurve,
    Costs,
    HeadCosts,
    Shape,
    bytes_of,
    on_tiles,
)
from your_ai.memory.estimate_adapters import (
    adapter_bytes,
    float32_bytes,
    gradient_bytes,
    head_gradient_bytes,
    held_bytes,
    norms_bytes,
    optimizer_bytes,
    reduction_bytes,
    update_bytes,
    working_bytes,
)
from your_ai.memory.estimate_generation import cached_bytes, generation_bytes, rollout_phases
from your_ai.memory.estimate_graphs import evaluation_graphs_bytes, graphs_bytes
from your_ai.memory.estimate_kept import kept_bytes
from your_ai.memory.facts import ModelFacts
from your_ai.memory.guess import costs_of, is_tiled, logits_bytes
from your_ai.memory.sizes import HEAD_ROWS, HEAD_SLICE_BYTES, PREFILL_TOKENS, tiles_of
from your_ai.memory.workload import Plan, TeacherSizes, Training, Workload

FEWEST_TEACHER_BYTES = 8 << 20  # of the hidden states that a teacher computes together
TARGET_SLICES = 6  # arrays of the size of a slice of the head that comparing with a teacher adds
NOISE_ARRAYS = 4.5  # (B, T, D) in float32 that exist while noise is added to embeddings
# The same where it is added tile by tile, under mx.compile: of a tile, and of the row.
TILED_NOISE_ARRAYS = (7, 0.6)
SOFT_COLUMNS = 16  # tokens whose block inputs are computed together
SOFT_POSITIONS = 64  # positions whose logits are slices of the head together
SOFT_GRAPHS = 2  # of the policy's columns, and of the frozen networks
# Of soft's work: the block, slices of the head, arrays of a token, and logits of a softcap.
SOFT_BLOCK, SOFT_STREAMED_BLOCK, SOFT_SLICES, SOFT_TERMS, SOFT_LOGITS = 1.5, 0.8, 1.6, 5.0, 12.0
STEP_PHASES = ("update", "generate", "reward", "teacher")  # an update includes the scores
WORK = ("activations", "block work", "head chunk")  # components that costs give
BESIDE = ("graphs", "cache", "python")  # components that are not live MLX buffers


@dataclass(frozen=True)
class Estimate:
    """Bytes by component at the peak, in the order in which they are shown."""

    components: dict[str, int]
    phases: dict[str, int] = field(default_factory=dict)
    """Bytes of the process at the peak of each phase of a step, of those that have several."""

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
    gradients_only: bool = False,
) -> Estimate:
    """Estimate the peak of a step of micro-batches of (B, T), with every target trained.

    micro_batches: per step. If there is more than one, their gradients are summed.
    gradients_only: leave out the update, the samples and the prefix cache.
    """
    held = held_components(workload, plan, gradients_only)
    phases = phases_of(workload, plan, rows, tokens, micro_batches, gradients_only)
    of_phase = {name: largest(found) for name, found in phases.items()}
    each = [of_phase[name] for name in STEP_PHASES if phases[name]]
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
             *["teacher"] * (workload.teacher is not None),
             *["reduction"] * workload.reduces]  # fmt: skip
    components = {name: int(held.get(name, 0) + phase.get(name, 0)) for name in order}
    beside = {"graphs": graphs, "cache": 0, "python": workload.process.python_bytes}
    if not (phases["generate"] or phases["teacher"]):
        return Estimate(components | beside)
    rest = sum(held.values()) + sum(beside.values())
    peaks = {name: rest + sum(map(int, one.values())) for name, one in of_phase.items() if one}
    return Estimate(components | beside, peaks)


def held_components(workload: Workload, plan: Plan, gradients_only: bool) -> dict[str, int]:
    """Bytes that stay allocated during all of a step."""
    facts, training, forward = workload.facts, workload.training, workload.forward
    reading = plan.resident, plan.blocks_ahead
    held = {
        "weights": weights_bytes(workload.loaded, plan.engine, *reading),
        "adapters": held_bytes(facts, training, plan),
        "optimizer": 0 if forward or plan.states_on_disk else optimizer_bytes(facts, training),
        "prefix cache": 0 if gradients_only else workload.prefix_bytes,
    }
    if workload.reward_models:
        held["reward models"] = reward_model_bytes(workload, plan.engine)
    if workload.teacher is not None:
        held["teacher"] = teacher_bytes(workload, workload.teacher, plan)
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
    """The moments of a step, of five kinds. An update comes with the scoring of its own rows."""
    facts, training, forward = workload.facts, workload.training, workload.forward
    generating: Phases = []
    rewarding: Phases = []
    teaching: Phases = []
    scoring: Phases = []
    if workload.scores and not forward:
        scoring = forward_phases(workload, plan, rows, tokens)
    updating = [*gradient_phases(workload, plan, rows, tokens, micro_batches), *scoring]
    if not (forward or gradients_only):
        on_disk = plan.gradients_on_disk and workload.soft is None
        grads = 0 if on_disk else float32_bytes(facts, training.active)  # of ranks, too
        work = update_bytes(facts, training, plan)
        read = 0
        if training.adapter.is_whole and plan.weights_on_disk:  # of which the update needs none
            read = read_now_bytes(facts, plan)
        updating.append({"weights": -read, "gradients": grads, "optimizer work": work})
        if workload.reduces:
            work = reduction_bytes(facts, training, plan)
            updating.append({"gradients": grads, "reduction": work})
    norms = costs_of(workload).largest("norms", rows, tokens, training.reach(facts))
    updating.append({"norms": norms})  # before a graph, or a pass without gradients
    if not gradients_only:
        rewarding = reward_phases(workload, plan, rows, tokens)
        if workload.teacher is not None:
            teaching = teacher_phases(workload, workload.teacher, plan, tokens)
        if workload.answer_tokens:
            answer = generation_bytes(facts, workload.answer_tokens, workload.measured)
            updating.append({"block work": answer})
        if workload.rollouts is not None:
            generating = rollout_phases(facts, workload.rollouts, plan.wave, workload.measured)
    found = {"generate": generating, "score": scoring, "update": updating, "reward": rewarding}
    return found | {"teacher": teaching}


def gradient_phases(
    workload: Workload, plan: Plan, rows: int, tokens: int, micro_batches: int
) -> Phases:
    """The moments of the gradients, or of an evaluation."""
    facts, training = workload.facts, workload.training
    if workload.forward:
        phases = forward_phases(workload, plan, rows, tokens)
        phases[-1]["head chunk"] += target_bytes(workload, rows, tokens)
        return phases
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


def largest(phases: Phases) -> dict[str, float]:
    """The moment that needs most."""
    return max(phases, key=lambda found: sum(found.values()), default={})


def noise_bytes(facts: ModelFacts, rows: int, tokens: int) -> float:
    """Bytes while noise is added to the embeddings, with their sum; tile by tile, if a row is long,
    so that the parts exist beside the whole (nets/neftune.py)."""
    hidden, tiles = rows * tokens * facts.hidden, tiles_of(rows, tokens)
    if len(tiles) == 1:
        return NOISE_ARRAYS * 4 * hidden + hidden * facts.float_bytes
    of_tile, of_row = TILED_NOISE_ARRAYS
    in_tile = rows * (tiles[0].stop - tiles[0].start) * facts.hidden
    return 4 * (of_tile * in_tile + of_row * hidden) + 2 * hidden * facts.float_bytes


def reward_model_bytes(workload: Workload, engine: str) -> int:
    """Bytes of the adapters of the reward models, and of weights that are not shared."""
    total = 0
    for model in workload.reward_models:
        facts = model.facts or workload.facts
        total += adapter_bytes(facts, model.training) + norms_bytes(facts, model.training)
        if model.facts is not None:
            total += weights_bytes(facts, engine)
    return total


def reward_phases(workload: Workload, plan: Plan, rows: int, tokens: int) -> Phases:
    """Bytes while the reward models score completions."""
    found = []
    for model in workload.reward_models:
        scoring = replace(
            workload,
            facts=model.facts or workload.facts,
            training=model.training,
            costs=None,
            score_head=True,
        )
        found += forward_phases(scoring, plan, rows, tokens)
    return found


def teacher_bytes(workload: Workload, teacher: TeacherSizes, plan: Plan) -> int:
    """Bytes that a teacher holds during all of a step: its adapter, the states of the step, and
    weights of its own that stay in memory."""
    facts = teacher.facts or workload.facts
    found = adapter_bytes(facts, teacher.training) + norms_bytes(facts, teacher.training)
    found += teacher.step_tokens * facts.hidden * facts.float_bytes
    if plan.engine == "fused":  # whose graph cannot read a head from a file
        found += facts.vocabulary_bytes if teacher.facts is not None else 0
    if teacher.facts is not None:
        found += facts.rest_bytes + facts.bytes_of_last(plan.teacher_blocks)
    return found


def teacher_group_bytes(facts: ModelFacts, plan: Plan) -> int:
    """Bytes of the hidden states of the texts that go through a teacher together, at least; many,
    so that its weights are read for many, unless memory is short."""
    few = FEWEST_TEACHER_BYTES
    return max(few, facts.bytes_of_last(1)) if plan.teacher_ahead else few


def teacher_phases(workload: Workload, teacher: TeacherSizes, plan: Plan, tokens: int) -> Phases:
    """Bytes while the teacher reads texts, block by block, with the hidden states of all that go
    through a block together; streamed weights of the student are not in memory then."""
    facts = teacher.facts or workload.facts
    reading = replace(
        workload, facts=facts, training=teacher.training, costs=None, teacher=None, forward=True
    )
    group = teacher_group_bytes(facts, plan)
    is_read = teacher.facts is not None or plan.engine == "streamed"
    count = 1 + plan.teacher_ahead
    weights = 0 if plan.teacher_blocks or not is_read else facts.neighbours_bytes(count)
    own = read_now_bytes(workload.facts, plan) if plan.engine == "streamed" else 0
    if workload.forward:  # no weights are read before all is computed with those of the teacher
        own = weights_bytes(workload.loaded, plan.engine, plan.resident, plan.blocks_ahead)
    tokens = max(tokens, teacher.longest)
    group += tokens * facts.hidden * facts.float_bytes  # the text that makes a group full
    staged = replace(plan, engine="staged")
    work = sum(forward_phases(reading, staged, 1, tokens)[0].values())
    if teacher.softmax:
        rows = -(-HEAD_ROWS // tokens)
        work = max(work, sum(forward_phases(reading, staged, rows, tokens)[1].values()))
    return [{"weights": weights - own, "block work": group + work}]


def teacher_read_bytes(workload: Workload, plan: Plan) -> int:
    """Bytes of a teacher's files that it reads for texts that go through its blocks together: in
    each step, or once for all texts if what it makes of them is kept."""
    teacher = workload.teacher
    if teacher is None or plan.teacher_blocks:
        return 0
    if teacher.facts is None:
        return workload.facts.blocks_bytes if plan.engine == "streamed" else 0
    return teacher.facts.blocks_bytes


def target_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes at the head of a student beside what it needs without a teacher: the states of the
    teacher, a slice of its head, a second gradient, and the arrays of a slice of the logits."""
    if workload.teacher is None:
        return 0
    facts, count = workload.teacher.facts or workload.facts, rows * tokens
    together = min(count, HEAD_ROWS)
    states = count * facts.hidden * facts.float_bytes
    wide = max(together, facts.hidden, workload.facts.hidden)
    of_slice = min(HEAD_SLICE_BYTES, 4 * workload.facts.vocabulary * wide)
    return states + 4 * together * workload.facts.hidden + TARGET_SLICES * of_slice


def weights_bytes(facts: ModelFacts, engine: str, resident: int = 0, blocks_ahead: int = 1) -> int:
    """Bytes of weights that are in memory together; resident, blocks_ahead: as in `Plan`."""
    if engine == "fused":
        return facts.weights_bytes
    if engine == "staged":
        return facts.blocks_bytes + facts.rest_bytes
    stay = facts.bytes_of_last(resident)
    return stay + facts.neighbours_bytes(1 + blocks_ahead, resident) + facts.rest_bytes


def read_alone_bytes(facts: ModelFacts, training: Training, plan: Plan) -> int:
    """Bytes of the blocks that are read, of the weights in memory together, if only the forward
    pass reads any, because all trained blocks stay; else 0."""
    if plan.engine != "streamed" or plan.resident < training.reach(facts):
        return 0
    return read_now_bytes(facts, plan)


def absent_at_head_bytes(facts: ModelFacts, plan: Plan) -> int:
    """Bytes of the blocks that are not there at the head, of the weights in memory together: it has
    only the last block, with which the backward pass begins."""
    if plan.engine != "streamed":
        return 0
    return read_now_bytes(facts, plan) - (0 if plan.resident else facts.bytes_of_last(1))


def read_now_bytes(facts: ModelFacts, plan: Plan) -> int:
    """Bytes of the blocks that are read, of the weights in memory together, of a streamed plan."""
    together = weights_bytes(facts, plan.engine, plan.resident, plan.blocks_ahead)
    return together - facts.bytes_of_last(plan.resident) - facts.rest_bytes


def hidden_bytes(facts: ModelFacts, rows: int, tokens: int) -> int:
    """Bytes of what a block passes on to the next."""
    return rows * tokens * (facts.hidden + facts.passed) * facts.float_bytes


def fused_phases(
    workload: Workload, rows: int, tokens: int, earlier: int, gradients: int
) -> Phases:
    """Bytes at three moments of one graph: in its frozen blocks; at the head or the last trained
    block, with all that is saved; and at the first, where gradients took the place of that."""
    found = costs_of(workload)
    trained = workload.training.reach(workload.facts)
    hidden = hidden_bytes(workload.facts, rows, tokens)
    block = found.largest("working", rows, tokens, trained)
    head = found.heads[costs.FUSED_TRAINED].at(rows * tokens)
    head += target_bytes(workload, rows, tokens)
    phases: Phases = [
        {
            "gradients": earlier,
            "activations": found.sum("saved", rows, tokens, trained, is_long=False),
            "block work": hidden + max(block, head),
        },
        {"gradients": gradients, "block work": hidden + block},
    ]
    if trained < workload.facts.blocks:
        work = hidden + found.largest("evaluated", rows, tokens, workload.facts.blocks)
        phases.append({"gradients": earlier, "block work": work})
    return phases


def staged_phases(
    workload: Workload, plan: Plan, rows: int, tokens: int, earlier: int, gradients: int
) -> Phases:
    """Bytes at the moments of a step, of the blocks that need most: the forward pass of a block,
    the head, the backward pass of a trained block, and storing its gradients. Blocks that keep
    something have moments of their own: while they run forward and backward, others still keep
    theirs.
    """
    facts, training, found = workload.facts, workload.training, costs_of(workload)
    hidden = hidden_bytes(facts, rows, tokens)
    inputs = 0 if plan.inputs_on_disk else hidden
    reads = read_alone_bytes(facts, training, plan)
    tiled = is_tiled(workload, rows, tokens)
    forward = hidden + work_of(found, "forward", rows, tokens, facts.blocks)
    backward = work_of(found, "backward", rows, tokens, training.reach(facts))
    backward += hidden if tiled else 2 * hidden
    kept, blocks = plan.kept, training.reach(facts)
    linear = kept.linear  # the last blocks, which also need other work; `lean` are those before
    is_cut = tiled and not linear and not workload.score_head  # in tiles at the head
    head = hidden + at_head(found.heads[costs.TRAINED], rows * tokens, hidden, is_cut)
    of_teacher = target_bytes(workload, rows, tokens)
    phases: Phases = [
        {
            "gradients": earlier,
            "block inputs": max(0, blocks - 1 - linear + tiled) * inputs,
            "kept outputs": kept_bytes(facts, kept, rows, tokens, linear),
            "block work": forward,
        },
        {
            "weights": -absent_at_head_bytes(facts, plan),
            "gradients": earlier,
            "block inputs": blocks * inputs,
            "kept outputs": kept_bytes(facts, kept, rows, tokens),
            "head chunk": head + of_teacher + head_gradient_bytes(training),
        },
        {
            "weights": -reads,
            "gradients": gradients,
            "block work": hidden + found.largest("storing", rows, tokens, blocks),
        },
    ]

    if training.adapter.has_norms:  # of the last block, before there are gradients
        phases.append(phases[0] | {
            "gradients": 0,
            "kept outputs": kept_bytes(facts, kept, rows, tokens, 1),
            "block work": hidden,
            "norms": found.largest("norms", rows, tokens, blocks),
        })  # fmt: skip

    def backward_at(place: int, work: float, inputs_before: int) -> dict[str, float]:
        """Bytes in the backward pass of the block at `place`, counted from the last, at 0, with its
        gradients.

        inputs_before: of blocks, besides those below it.
        """
        return {
            "weights": -reads,
            "gradients": earlier,
            "block inputs": (blocks - 1 - place + inputs_before) * inputs,
            "kept outputs": kept_bytes(facts, kept, rows, tokens, place),
            "block work": work,
        }

    if tiled:
        phases.append({"block work": 2 * hidden})  # the embeddings, and their tiles
    if linear < blocks:
        phases += [backward_at(place, backward, tiled) for place in (linear, blocks - 1)]
    if linear:
        first = hidden + found.largest("kept_forward", rows, tokens, linear)
        of_others = kept_bytes(facts, kept, rows, tokens, 1)
        phases.append(backward_at(0, first, 0) | {"weights": 0, "kept outputs": of_others})
        work = 2 * hidden + found.largest("kept_backward", rows, tokens, linear)
        phases += [backward_at(place, work, 0) for place in {0, linear - 1}]
    return phases


def work_of(found: Costs, phase: str, rows: int, tokens: int, count: int) -> float:
    """Bytes of the pass "forward" or "backward" of the last `count` blocks. Those that run on tiles
    of long rows need what stays of each token, and the work on a tile, which is larger where there
    are many rows."""
    tiles = tiles_of(rows, tokens)
    tile = Shape(rows, tiles[0].stop)

    def of_kind(kind: BlockCosts) -> float:
        own = on_tiles(kind, phase, len(tiles) > 1)
        curve: CostCurve | None = getattr(kind, own)
        if own == phase or curve is None:
            return bytes_of(kind, own, rows, tokens)
        work = replace(curve, of_token=0.0).at(*tile)
        found: float = curve.of_token * rows * tokens
        return found + work * max(1.0, tile.size / kind.tile_tokens)

    return max(map(of_kind, found.last(count)), default=0.0)


def at_head(found: HeadCosts, targets: int, hidden: int, is_cut: bool) -> float:
    """Bytes at the head beside its hidden states, whose bytes are `hidden`.

    is_cut: whether those of a long row go through it tile by tile; else they all get their
        cotangents at once, and the work beyond that is the one of HEAD_ROWS.
    """
    if targets <= HEAD_ROWS or is_cut:
        return found.at(targets)
    return found.at(HEAD_ROWS) + 2 * hidden * (1 - HEAD_ROWS / targets)


def soft_phase(
    workload: Workload, plan: Plan, rows: int, tokens: int, gradients: int
) -> dict[str, float]:
    """Bytes while gradients go back through sampled tokens.

    By columns: the keys and values of all positions, their cotangents, and the block inputs of a
    few columns. By sweeps: the inputs of all blocks. The work is that of a block on some tokens,
    and some slices of the vocabulary.
    """
    facts, sizes, streamed = workload.facts, workload.soft, plan.engine == "streamed"
    assert sizes is not None
    number, hidden = facts.float_bytes, facts.hidden
    by_token = SOFT_TERMS * 4 * rows * sizes.new_tokens * hidden
    if streamed:
        held: float = facts.blocks * rows * tokens * hidden * number
    else:
        caches = rows * cached_bytes(facts, tokens)
        held = caches * (1 + 4 / number) + SOFT_COLUMNS * facts.blocks * rows * hidden * number
    together = min(PREFILL_TOKENS, rows * sizes.prompt_tokens)
    together = max(together, rows * tokens if streamed else 0)
    block = costs_of(workload).largest("backward", 1, together, workload.training.reach(facts))
    block += 2 * hidden_bytes(facts, 1, together)
    head_slice = min(HEAD_SLICE_BYTES, facts.vocabulary * hidden * number)
    slices = head_slice * (facts.head_quantized or streamed)
    positions = min(SOFT_POSITIONS, rows * sizes.new_tokens)
    logits = SOFT_LOGITS * logits_bytes(facts, positions) * facts.softcaps
    of_block = SOFT_STREAMED_BLOCK if streamed else SOFT_BLOCK
    return {
        "gradients": gradients,
        "KV cache": held,
        "activations": by_token,
        "block work": of_block * block + SOFT_SLICES * slices + logits,
    }


def forward_phases(workload: Workload, plan: Plan, rows: int, tokens: int) -> Phases:
    """Bytes of a pass without gradients: in a block, and at the head with losses."""
    found, hidden = costs_of(workload), hidden_bytes(workload.facts, rows, tokens)
    blocks, head = workload.facts.blocks, costs.STAGED_SCORES
    if plan.engine == "fused":
        block, head = found.largest("evaluated", rows, tokens, blocks), costs.FUSED_SCORES
    else:
        block = work_of(found, "forward", rows, tokens, blocks)
    of_head = found.heads[head].at(min(rows * tokens, HEAD_ROWS))
    return [{"block work": hidden + block}, {"head chunk": hidden + of_head}]


def spilled_bytes(facts: ModelFacts, training: Training, plan: Plan, tokens: int) -> int:
    """Bytes of gradients, optimizer states and block inputs in files without a name, in the run's
    folder.

    tokens: of a micro-batch, with padding; the inputs of one micro-batch are there at a time.
    """
    found = 0
    if plan.gradients_on_disk:
        found += float32_bytes(facts, training.active)
    if plan.states_on_disk:
        found += optimizer_bytes(facts, training)
    if training.adapter.is_whole and plan.weights_on_disk:
        found += working_bytes(facts, training)
    if plan.inputs_on_disk:
        found += training.reach(facts) * hidden_bytes(facts, 1, tokens)
    return found


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
        found += max(0, facts.bytes_of_last(training.reach(facts)) - stay)
    return found
