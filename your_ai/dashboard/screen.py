"""Draws a ViewState as the full screen of a run. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from your_ai.dashboard import view
from your_ai.dashboard.gauge import clamped, drawn_size, level_color, memory_rows
from your_ai.dashboard.metric_table import (
    REWARD,
    SPREAD,
    is_rewarded,
    metric_rows,
    named_rewards,
    other_values,
    phase_peaks,
    phase_seconds,
    plain,
    texts_of,
)
from your_ai.dashboard.page import (
    ASCII,
    DIM,
    HIGH_SCREEN,
    NARROW,
    UNICODE,
    WARN,
    Field,
    LineChart,
    Page,
    ScreenRow,
    TextPart,
    at_ends,
    beside,
    cells_of,
    chart_rows,
    clean,
    curve_rows,
    curve_width,
    cut,
    in_fields,
    joined,
    line,
    printable,
    resampled,
)
from your_ai.dashboard.state import Series, ViewState
from your_ai.gates.text import counted, loss_text, model_name, size_text
from your_ai.run import events

# The processes of a run on several, a line each: memory, throughput, and the time they wait


MOST_RANKS = 16  # lines
CELLS = 12  # of a gauge


def rank_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    """A line for each process; none for a run on one."""
    event = state.ranks
    if event is None:
        return []
    ranks = min(len(event.hosts), MOST_RANKS)
    return [ScreenRow("rank", rank_line(page, event, rank)) for rank in range(ranks)]


def rank_line(page: Page, event: events.Ranks, rank: int) -> list[TextPart]:
    held, limit = clamped(at(event.process_bytes, rank)), clamped(at(event.limit_bytes, rank))
    computed, waited = at(event.seconds, rank) or 0.0, at(event.waited, rank) or 0.0
    tokens, passed = at(event.tokens, rank), computed + waited
    fields = [Field(5, clean(page, event.hosts[rank]), style="")]
    if held and limit:
        share = held / limit
        filled = min(CELLS, round(CELLS * share))
        gauge = page.glyphs.active * filled + page.glyphs.free * (CELLS - filled)
        color = level_color(share)
        fields.append(Field(6, "", mark=(gauge, color)))
        fields.append(Field(0, size_text(held), after=f" of {size_text(limit)}", style=color))
    elif held:
        fields.append(Field(0, size_text(held), style=""))
    if tokens is not None and passed > 0:
        fields.append(Field(1, f"{tokens / passed:,.0f}", after=" tokens/s", style=""))
        after = f" ({waited / passed:.0%})"
        fields.append(Field(2, f"{waited:.2g} s", "waited ", after, style=""))
    return line(page, f"rank {rank}", in_fields(page, fields, page.room), inline=False)


def at(values: Sequence[float], rank: int) -> float | None:
    """The value of a rank; None if a damaged event has none."""
    value = values[rank] if rank < len(values) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < 1e18 else None


NAME_SHARE = 5  # a run has at least a fifth of the first line for its name
LATE, LATE_S = 4.0, 10.0  # a step is late after this many times the usual time, and this long
WIDE = 30.0  # highest loss / lowest loss above which the curve is logarithmic
# The kinds of rows, most important first: a low screen shows as many as it has lines.
KEPT = (
    *("header", "process", "gauge", "step", "reward", "loss", "time", "warning", "keys", "legend"),
    *("metrics", "reward curve", "rollouts", "conversation", "policy", "phases", "rewards"),
    *("judge", "peaks"),
    *("valid", "memory curve", "loss curve", "warnings", "plan", "result", "results", "action"),
    *("saved", "why", "rank", "actions", "gap", "note", "limit", "needs", "machine"),
    *("more actions", "notes", "sample"),
)
CURVES = ("loss curve", "reward curve")
LEAST_CHART, MOST_CHART = 6, 20  # lines of a chart
MOST_SAMPLES = 9  # lines of samples
WIDE_PAGE = 90  # cells; a narrower page has shorter names
RANKS = {kind: rank for rank, kind in enumerate(KEPT)}


def screen(
    state: ViewState,
    name: str,
    width: int,
    height: int,
    now: float,
    *,
    unicode: bool = True,
    keys: str = "",
) -> Text:
    """Draw the run `name` on at most `height` lines of `width` cells.

    now: in seconds since 1970.
    unicode: False if only ASCII can be shown.
    keys: the help for the keys, in the last line.
    """
    narrow = width < NARROW
    glyphs = UNICODE if unicode else ASCII
    page = Page(max(1, width if narrow else width - 2), max(1, height), narrow, glyphs)
    bottom = [warning_rows(page, state, now)]
    if keys := printable(page, keys).strip():
        bottom.append([ScreenRow("keys", cut(page, [(keys, DIM)], page.width))])
    groups = [
        [ScreenRow("header", header(page, state, name, now))],
        [*memory_rows(page, state), *rank_rows(page, state)],
        training_rows(page, state, now),
        plan_rows(page, state),
        action_rows(page, state),
        note_rows(page, state),
    ]
    groups = with_more(page, groups, bottom, state)
    return joined(arranged(groups, bottom, page.height), "" if narrow else " ")


def arranged(
    groups: list[list[ScreenRow]], bottom: list[list[ScreenRow]], height: int
) -> list[list[TextPart]]:
    """Keep the most important lines, with gaps between groups; `bottom` ends the screen."""
    top, low = spaced(groups), spaced(bottom)
    if low:
        low.insert(0, ScreenRow("gap", []))
    rows = top + low
    ranked = sorted(range(len(rows)), key=lambda i: (RANKS[rows[i].kind], not rows[i].parts))
    kept = sorted(ranked[:height])
    split = sum(i < len(top) for i in kept)
    padding: list[list[TextPart]] = [[] for _ in range(height - len(kept))] if low else []
    lines = [rows[i].parts for i in kept]
    return [*lines[:split], *padding, *lines[split:]]


def with_more(
    page: Page, groups: list[list[ScreenRow]], bottom: list[list[ScreenRow]], state: ViewState
) -> list[list[ScreenRow]]:
    """Use the lines that are left for an answer of the model, and for a chart of the loss."""
    left = page.height - len(spaced(groups)) - len(spaced(bottom)) - 1
    shown = sample_rows(page, state, left - 1)
    if shown:
        groups, left = [*groups[:3], shown, *groups[3:]], left - len(shown) - 1
    curve = next((row.kind for row in groups[2] if row.kind in CURVES), "")
    flat = sum(row.kind == curve for row in groups[2])
    rows = min(MOST_CHART, left + flat)
    chart = loss_curve(state, curve == "reward curve") if curve else None
    if chart is None or rows < LEAST_CHART or page.height < HIGH_SCREEN:
        return groups
    at = next(i for i, row in enumerate(groups[2]) if row.kind == curve)
    others = [row for row in groups[2] if row.kind != curve]
    drawn = chart_rows(page, curve, "", chart, rows)
    return [*groups[:2], [*others[:at], *drawn, *others[at:]], *groups[3:]]


def loss_curve(state: ViewState, of_reward: bool) -> LineChart | None:
    """The loss or the reward of each step, and of the validations; None for less than two."""
    series = state.rewards if of_reward else state.losses
    measured = state.validation is not None and (state.validation.reward is not None) == of_reward
    curve, checked = (
        [(x, y) for x, y in points if math.isfinite(y)]
        for points in (series.points, state.validations.points if measured else [])
    )
    if len(curve) < 2 or curve[0][0] >= curve[-1][0]:
        return None
    scale = scale_of([y for _, y in (*curve, *checked)], of_reward)
    curve, checked = ([(x, scale.placed(y)) for x, y in points] for points in (curve, checked))
    return LineChart(curve, checked, scale.bounds, scale.texts)


class CurveScale(NamedTuple):
    """The lowest and the highest value of a curve, which is logarithmic if they are far apart."""

    is_log: bool
    bounds: tuple[float, float]
    """Where they are drawn."""
    texts: tuple[str, str]

    def placed(self, value: float) -> float:
        """The place of a value on this scale."""
        return math.log(value) if self.is_log and value > 0 else value


def scale_of(values: Sequence[float], of_reward: bool) -> CurveScale:
    """The scale for finite values; that of rewards is never logarithmic."""
    low, high = min(values), max(values)
    texts = brief(low), brief(high)
    if not of_reward and low > 0 and high / low > WIDE:
        return CurveScale(True, (math.log(low), math.log(high)), (texts[0], f"{texts[1]} log"))
    return CurveScale(False, (low, high), texts)


def series_rows(page: Page, kind: str, series: Series, of_reward: bool) -> list[ScreenRow]:
    """The curve of a loss or a reward; none without a finite value."""
    values = resampled(series.values, curve_width(page), highest=False)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return []
    scale = scale_of(finite, of_reward)
    return curve_rows(page, kind, list(map(scale.placed, values)), scale.bounds, scale.texts)


def sample_rows(page: Page, state: ViewState, room: int) -> list[ScreenRow]:
    """The newest completion, or answers to held-out prompts, on at most `room` lines."""
    shown: list[tuple[str, str, str, str]] = []  # what, prompt, answer, expected
    if state.rollout is not None:
        best = state.rollout
        reward = "" if best.reward is None else f", reward {plain(best.reward)}"
        what = f"best of step {best.step}{reward}"
        shown = [(what, best.prompt, best.completion, best.expected)]
    elif samples := state.samples_after or state.samples_before:
        what = f"{'after' if state.samples_after else 'before'} training"
        texts = zip(samples.prompts, samples.answers, samples.expected, strict=False)
        shown = [(what, *text) for text in texts]
    found: list[ScreenRow] = []
    for what, prompt, answer, expected in shown:
        parts = [("sample", f"{what}: ", prompt), ("answer", "", answer)]
        parts += [("expected", "", expected)] if expected else []
        if len(found) + len(parts) > min(room, MOST_SAMPLES):
            break
        for label, before, text in parts:
            said = [(before, DIM), (clean(page, text), "")]
            found.append(ScreenRow("sample", line(page, label, said)))
    return found


def spaced(groups: list[list[ScreenRow]]) -> list[ScreenRow]:
    rows: list[ScreenRow] = []
    for group in filter(None, groups):
        best = min((row.kind for row in group), key=RANKS.__getitem__)
        gap = ScreenRow(max("gap", best, key=RANKS.__getitem__), [])  # dropped with its group
        rows += [gap, *group] if rows else group
    return rows


def header(page: Page, state: ViewState, name: str, now: float) -> list[TextPart]:
    left = [(clean(page, name), "bold")]
    least = min(cells_of(left), page.width // NAME_SHARE) + 2  # the phase matters more than names
    if state.started is not None:
        left.append((f"  {clean(page, model_name(state.started.model))}", DIM))
    return at_ends(page, left, condition(page, state, now, page.width - least), page.width)


def condition(page: Page, state: ViewState, now: float, room: int) -> list[TextPart]:
    """Say in a few words what the run is doing, in at most `room` cells."""
    glyphs = page.glyphs
    if state.finished is not None:
        done = state.finished.reason == "done"
        style = "bold green" if done else "bold red"
        return [(f"{glyphs.ended} {'finished' if done else 'stopped'}", style)]
    if state.gave_up:
        return [(f"{glyphs.ended} died", "bold red")]
    if state.paused:
        return [(f"{glyphs.waiting} paused", "bold yellow")]
    doing = clean(page, state.doing_text)
    mark, style = (glyphs.busy, "bold green") if state.loaded else (glyphs.waiting, "bold cyan")
    if state.is_training:
        return [(f"{mark} {doing}", style)]
    passed = f" {span(now - state.doing_at)}" if state.doing_at is not None else ""
    passed = passed if page.narrow else f" ...{passed}"
    doing = cut(page, [(doing, "")], room - cell_len(f"{mark} {passed}"))[0][0]
    return [(f"{mark} {doing}{passed}", style)]


def training_rows(page: Page, state: ViewState, now: float) -> list[ScreenRow]:
    if not state.steps and state.step is None:
        return []
    rows = [ScreenRow("step", progress(page, state))]
    if shown := times(page, state, now):
        rows.append(ScreenRow("time", line(page, "time", shown, inline=False)))
    step = state.step
    if step is None:
        return rows
    if is_rewarded(step.metrics):
        return rows + reward_rows(page, state, step)
    fields = loss_fields(page, state, step)
    if state.validation is not None:
        fields[3:3] = [validation_field(state, state.validation)]
    rows.append(field_row(page, "loss", "loss", fields))
    rows += validation_rows(page, state)
    if step.metrics:
        rows += texts_rows(page, "metrics", "metrics", texts_of(step.metrics))
    return rows + series_rows(page, "loss curve", state.losses, of_reward=False)


def loss_fields(page: Page, state: ViewState, step: events.Step) -> list[Field]:
    rate = "learning rate " if page.width >= WIDE_PAGE else "lr "
    return [
        Field(0, loss_text(step.loss)),
        Field(2, loss_text(state.loss_mean.value), "smoothed ", style=""),
        *(
            []
            if state.best_loss is None or not state.loss_mean.is_settled
            else [Field(3, loss_text(state.best_loss), "lowest ", style="")]
        ),
        Field(4, f"{step.grad_norm:.3g}", "gradient norm ", style=""),
        Field(1, f"{step.learning_rate:.3g}", rate, style=""),
    ]


def validation_field(state: ViewState, validation: events.Validation) -> Field:
    value, best = view.validation_text(validation, validation.loss), state.best_validation
    after = f", best {view.validation_text(validation, None if best is None else best.loss)}"
    return Field(1, value, "validation ", after, "")


def validation_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    """Return what the last validation measured besides its loss or its reward."""
    others = {} if state.validation is None else other_values(state.validation)
    if not others:
        return []
    return [texts_row(page, "valid", "valid", texts_of(others))]


def reward_rows(page: Page, state: ViewState, step: events.Step) -> list[ScreenRow]:
    """Show a step that trained on rewards: the rewards, the policy, the rollouts, the phases."""
    rows = [field_row(page, "reward", "reward", reward_fields(state, step))]
    rows += validation_rows(page, state)
    rows += series_rows(page, "reward curve", state.rewards, of_reward=True)
    named = [
        (name, plain(mean) if std is None else f"{plain(mean)} {page.glyphs.spread}{plain(std)}")
        for name, (mean, std) in named_rewards(step.metrics).items()
    ]
    if named:
        rows.append(texts_row(page, "rewards", "rewards", named))
    losses = loss_fields(page, state, step)
    if state.validation is not None and state.validation.reward is None:
        losses.append(validation_field(state, state.validation))
    rows.append(field_row(page, "loss", "loss", losses))
    for label, texts in metric_rows(step.metrics).items():
        rows += texts_rows(page, label, label, texts)
    # Of several updates of the same completions, only the first has phases.
    return rows + phase_rows(page, state, state.generated or step)


def reward_fields(state: ViewState, step: events.Step) -> list[Field]:
    metrics, best = step.metrics, state.reward_mean.best
    fields = [Field(0, plain(metrics[REWARD]) if REWARD in metrics else "missing")]
    if SPREAD in metrics:
        fields.append(Field(1, plain(metrics[SPREAD]), "spread "))
    if state.reward_mean.value is not None:
        fields.append(Field(3, plain(state.reward_mean.value), "smoothed ", style=""))
    if best is not None and state.reward_mean.is_settled:
        fields.append(Field(4, plain(best), "highest ", style=""))
    if state.validation is not None and state.validation.reward is not None:
        fields.append(validation_field(state, state.validation))
    if missing := metrics.get("rewards/missing"):
        fields.append(Field(2, plain(missing), "missing ", style=WARN))
    return fields


def phase_rows(page: Page, state: ViewState, generated: events.Step) -> list[ScreenRow]:
    """The seconds and the peak memory of each phase of a step."""
    rows = []
    if seconds := phase_seconds(generated):
        texts = [(phase, short_span(value)) for phase, value in seconds.items()]
        rows.append(texts_row(page, "phases", "seconds", texts))
    if peaks := phase_peaks(generated):
        texts = [(phase, drawn_size(size)) for phase, size in peaks.items()]
        if state.limit is not None:
            texts.append(("of", drawn_size(state.limit.limit_bytes)))
        rows.append(texts_row(page, "peaks", "MLX peak", texts))
    return rows


def texts_row(page: Page, kind: str, label: str, texts: list[tuple[str, str]]) -> ScreenRow:
    """A row of values with their names; the last ones are dropped if there is too little room."""
    fields = [
        Field(rank, text, f"{clean(page, name)} ", style="")
        for rank, (name, text) in enumerate(texts)
    ]
    return field_row(page, kind, label, fields)


def texts_rows(page: Page, kind: str, label: str, texts: list[tuple[str, str]]) -> list[ScreenRow]:
    """Rows of values with their names; a low screen has only one."""
    if page.height < HIGH_SCREEN:
        return [texts_row(page, kind, label, texts)]
    parts: list[list[tuple[str, str]]] = [[]]
    for text in texts:
        fields = [Field(0, value, f"{clean(page, name)} ") for name, value in (*parts[-1], text)]
        if parts[-1] and sum(field.cells + 2 for field in fields) - 2 > beside(page, label):
            parts.append([])
        parts[-1].append(text)
    return [
        texts_row(page, kind, "" if number else label, part) for number, part in enumerate(parts)
    ]


def field_row(page: Page, kind: str, label: str, fields: list[Field]) -> ScreenRow:
    return ScreenRow(kind, line(page, label, in_fields(page, fields, beside(page, label))))


def progress(page: Page, state: ViewState) -> list[TextPart]:
    step, steps = state.at, state.steps
    share = min(max(step / max(1, steps), 0.0), 1.0)
    left = [(f"{step}", "bold"), (f"/{steps}", "")]
    right = [(f"{math.floor(100 * share)}%".rjust(4), "")]
    if state.step is not None and not page.narrow:
        right.append((f"   epoch {state.step.epoch}", DIM))
    gap = " " if page.narrow else "  "
    width = max(0, beside(page, "step") - cells_of([*left, *right]) - 2 * len(gap))
    done = int(width * share)
    cells = [(page.glyphs.done * done, "green"), (page.glyphs.todo * (width - done), DIM)]
    return line(page, "step", [*left, (gap, ""), *cells, (gap, ""), *right])


def times(page: Page, state: ViewState, now: float) -> list[TextPart]:
    """Show speed, elapsed time and remaining time."""
    end = state.last_at if state.finished is not None else now
    fields = []
    left = state.seconds_left_at(now)
    if left is not None:
        fields.append(Field(0, span(left), after=" left"))
    if state.began_at is not None and end is not None:
        worked = end - state.began_at - state.away_s
        fields.append(Field(3, span(worked), after=" elapsed", style=""))
    if state.step_s is not None:
        fields.append(Field(2, short_span(state.step_s), after="/step", style=""))
    if state.tokens_per_s is not None:
        fields.append(Field(1, f"{state.tokens_per_s:,.0f}", after=" tokens/s", style=""))
    if state.step is not None and (waited := view.wait_text(state.step)):
        fields.append(Field(4, waited, "waited ", " for weights", ""))
    return in_fields(page, fields, page.room)


def plan_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    rows = []
    if state.planned is not None:
        text = clean(page, state.planned.text)
        if cell_len(text) > beside(page, "plan"):  # the gauge has what it needs
            text = text.rpartition(": ")[0] or text
        rows.append(ScreenRow("plan", line(page, "plan", [(text, "")])))
        why = reason_of_plan(state)
        if why:
            rows.append(ScreenRow("why", line(page, "why", [(clean(page, why), DIM)])))
        if margin := view.margin_text(state.planned):
            text = f"at least {drawn_size(state.planned.needed_bytes)}: {margin}"
            rows.append(ScreenRow("needs", line(page, "needs", [(text, DIM)])))
    if state.limit is not None:
        text = f"{drawn_size(state.limit.limit_bytes)}: {state.limit.reason}"
        rows.append(ScreenRow("limit", line(page, "limit", [(clean(page, text), DIM)])))
    machine = machine_fields(state)
    if machine:
        parts = in_fields(page, machine, beside(page, "machine"))
        rows.append(ScreenRow("machine", line(page, "machine", parts)))
    if state.checkpoint is not None and state.checkpoint.step > 0:
        rows.append(
            ScreenRow("saved", line(page, "saved", [(f"step {state.checkpoint.step}", "")]))
        )
    if state.finished is not None:
        rows.append(ScreenRow("result", line(page, "end", [(result(page, state), "bold")])))
        if state.finished.reason == "done":
            rows += [
                ScreenRow("results", line(page, "", [(clean(page, text), "")], inline=False))
                for text in (*view.result_lines(state), *view.reward_lines(state))
            ]
    return rows


def reason_of_plan(state: ViewState) -> str:
    if state.replanned:
        return state.replanned
    if state.planned is None or state.limit is None:
        return ""
    chosen = not state.planned.asked or "--plan auto" in state.planned.asked
    return "the fastest that fits" if chosen else f"as asked: {state.planned.asked}"


def machine_fields(state: ViewState) -> list[Field]:
    gauges = state.gauges or events.Gauges()
    available, swap = clamped(gauges.available_bytes), clamped(gauges.swap_bytes)
    fields = []
    if available is not None:
        fields.append(Field(0, size_text(available), after=" free", style=""))
    if swap is not None:
        fields.append(Field(1, size_text(swap), "swap ", style=""))
    return fields


def result(page: Page, state: ViewState) -> str:
    if state.finished is None or state.finished.reason != "done":
        return clean(page, state.finished.reason if state.finished else "")
    if state.match_after is not None:
        return view.match_text(state.match_before, state.match_after, "row")  # to fit 80 columns
    return f"{counted(state.finished.step, 'step')} in {span(state.took_s)}"


def action_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    """Show the governor's actions in columns, newest first."""
    found = [
        (
            clean(page, folded.where),
            clean(page, folded.kind)[:16],
            folded.change_text,
            short_span(folded.mean_seconds),
            clean(page, ", ".join(filter(None, (folded.last.cause, folded.times_text)))),
        )
        for folded in reversed(state.actions)
    ]
    if not found:
        idle = line(page, "governor", [("no actions so far", DIM)])
        return [ScreenRow("more actions", idle)] if state.limit and state.step else []
    step, kind, size, time = (max(cell_len(row[i]) for row in found) for i in range(4))
    rows = []
    for number, row in enumerate(found):
        parts = [
            (row[0].ljust(step + 2), DIM),
            (set_cell_size(row[1], kind), ""),
            (row[2].rjust(size + 2), "bold"),
            (row[3].rjust(time + 2), DIM),
            (f"  {row[4]}", DIM),
        ]
        label = "governor" if number == 0 else ""
        rank = "action" if number == 0 else "actions" if number < 3 else "more actions"
        rows.append(ScreenRow(rank, line(page, label, parts, inline=False)))
    return rows


def note_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    rows = []
    for number, text in enumerate(reversed(state.notices)):
        label, kind = ("", "notes") if number else ("note", "note")
        rows.append(
            ScreenRow(kind, line(page, label, [(clean(page, text), "")], inline=number == 0))
        )
    return rows


def warning_rows(page: Page, state: ViewState, now: float) -> list[ScreenRow]:
    rows: list[ScreenRow] = []
    for text in (*late(state, now), *state.warnings):
        label = "!" if page.narrow else "warning"
        parts = line(page, label, [(clean(page, text), WARN)], style=WARN)
        rows.append(ScreenRow("warnings" if rows else "warning", parts))
    return rows


def late(state: ViewState, now: float) -> list[str]:
    """Return a warning if a step takes much longer than usual."""
    step, usual_s, since = state.step, state.step_s, state.stepped_at
    if step is None or usual_s is None or since is None:
        return []
    if not state.is_training:
        return []
    waited_s = now - since
    if not waited_s > max(LATE_S, LATE * usual_s):
        return []
    return [f"no step for {span(waited_s)}; a step usually takes {short_span(usual_s)}"]


def brief(value: float) -> str:
    """Format as 7.34, 0.51, 0.00042 or 4e-7."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.{3 if abs(value) >= 1 else 2}g}"
    if 1e-6 <= abs(value) < 0.01:
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"
    digits, power = f"{value:.0e}".split("e")
    return f"{digits}e{int(power)}"


def span(seconds: float) -> str:
    return view.duration(max(0.0, seconds)) if abs(seconds) < 1e9 else "?"


def short_span(seconds: float) -> str:
    """Format as 40 ms, 0.81 s or 12.3 s, and longer ones like any duration."""
    if not 0 <= seconds < 60:
        return span(seconds)
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
