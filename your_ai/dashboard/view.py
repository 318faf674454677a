"""Turns events and a ViewState into text and rich renderables. Pure: uses no terminal."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import TypeVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from your_ai.dashboard.measures import match_share
from your_ai.dashboard.metric_table import JUDGE, line_texts, other_values, plain
from your_ai.dashboard.state import ViewState
from your_ai.errors import REPORT
from your_ai.gates.text import counted, loss_text, size_text
from your_ai.run import events
from your_ai.run.events import Event

# Whether a finished run learned what its rows show, and what to try if it did not. Pure


FALLING, NOTICED = 0.05, 0.01  # of the loss, and nats: a smaller change counts as none
LATE = 0.75  # of the steps; what the validation loss falls after them, it still falls
ALIKE = 0.5  # least similarity of an answer to the expected one, from 0 to 1
COMPARED = 2000  # characters of an answer
PREFERRED = 0.6  # least share of pairs; about half are preferred by chance
ACCURACIES, MARGINS = "rewards/accuracies", "rewards/margins"
MORE = "a higher --learning-rate"


def ways_to_learn_more(state: ViewState) -> str:
    return (state.started.more if state.started else "") or MORE


def preference_line(state: ViewState) -> str:
    """Say whether a run on pairs learned to prefer the chosen answers; empty for other runs."""
    metrics, where = {}, "validation"
    if state.validation is not None:
        metrics = state.validation.metrics
    elif state.step is not None:
        metrics, where = state.step.metrics, "last step's"
    share, margin = metrics.get(ACCURACIES), metrics.get(MARGINS)
    if share is None or margin is None or not math.isfinite(share):
        return ""
    is_reward = state.started is not None and state.started.is_reward_model
    verb = "scores the chosen answer higher" if is_reward else "prefers the chosen answer"
    text = f"{verb} in {share:.0%} of the {where} pairs, margin {margin:.3g}"
    if share >= PREFERRED and margin > 0:
        return f"learned: {text}"
    return f"did not learn: {text} (50% is chance); try {ways_to_learn_more(state)}"


def advice_line(state: ViewState, run: str) -> str:
    """Advise what to do after a run that learned too little from answers; empty if nothing.

    It did if its validation loss still fell at the end, unless all answers to held-out prompts are
    exactly those that were expected; or if most are unlike them. run: its name.
    """
    last, best, after = state.validation, state.best_validation, state.samples_after
    if last is not None and (last.reward is not None or ACCURACIES in last.metrics):
        return ""
    texts = () if after is None else zip(after.answers, after.expected, strict=False)
    pairs = [(answer.strip(), wanted.strip()) for answer, wanted in texts if wanted.strip()]
    if pairs and all(answer == wanted for answer, wanted in pairs):
        return ""
    overfits = last is not None and best is not None and falls(last.loss, best.loss)
    still = "" if overfits else fall_text(state)
    reasons = [still] if still else []
    wrong = sum(map(is_wrong, pairs))
    if 2 * wrong > len(pairs):
        what = counted(len(pairs), "answer")
        reasons.append(f"{wrong} of {what} to held-out prompts are unlike the expected ones")
    if not reasons:
        return ""
    if (still or last is None) and (longer := length_option(state)):
        return f"not learned enough: {', and '.join(reasons)}; go on with: " + (
            f"your_ai train --resume {run} {longer}"
        )
    other = "more rows, or a lower --learning-rate" if overfits else ways_to_learn_more(state)
    return f"not learned enough: {reasons[0]}; try {other}"


def fall_text(state: ViewState) -> str:
    """Return how far the validation loss still fell at the end; empty if it did not."""
    last, best = state.validation, state.best_validation
    before = [each for each in state.bests if last and each.step <= LATE * last.step]
    if best is None or not before or not falls(before[-1].loss, best.loss):
        return ""
    since = f"from {loss_text(before[-1].loss)} at step {before[-1].step}"
    return f"the validation loss still fell, {since} to {loss_text(best.loss)}"


def falls(before: float, after: float) -> bool:
    """Return whether a loss is clearly lower than before; False for what is not finite."""
    return math.isfinite(before) and before - after > max(FALLING * abs(before), NOTICED)


def is_wrong(pair: tuple[str, str]) -> bool:
    """Return whether an answer is unlike the expected one."""
    answer, wanted = (text[:COMPARED].lower() for text in pair)
    return difflib.SequenceMatcher(None, answer, wanted, autojunk=False).ratio() < ALIKE


def length_option(state: ViewState) -> str:
    """`--epochs N` or `--max-steps N` for twice as many steps; empty if they are unknown."""
    if state.started is None or not state.started.steps:
        return ""
    steps, of_epoch = state.started.steps, state.started.steps_per_epoch
    if of_epoch and steps % of_epoch == 0:
        return f"--epochs {2 * steps // of_epoch}"
    return f"--max-steps {2 * steps}"


SAMPLE_CHARACTERS = 200
SAMPLE_LINES = 6
SCHEDULED = ("clear_cache", "drop_compiled", "reload_lora")  # too many to show line by line
UNKNOWN = "-"
T = TypeVar("T")


def or_unknown(value: T | None, text: Callable[[T], str]) -> str:
    """Format a value that may be unknown."""
    return UNKNOWN if value is None else text(value)


def peak_of_limit(peak_bytes: int | None, limit_bytes: int | None) -> str:
    """Format as `5.2 GB of 7.0 GB`."""
    peak = or_unknown(peak_bytes, size_text)
    return peak if limit_bytes is None else f"{peak} of {size_text(limit_bytes)}"


def duration(seconds: float) -> str:
    """Format seconds as 5 s, 2:05 or 1:02:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def step_text(step: events.Step, tokens_per_s: float, seconds_left: float | None) -> str:
    gauges = {
        "memory": step.process_bytes,
        "MLX active": step.active_bytes,
        "MLX peak": step.peak_bytes,
    }
    known = [f"{name} {size_text(size)}" for name, size in gauges.items() if size is not None]
    return "  ".join(
        [
            f"step {step.step}/{step.steps}",
            f"loss {loss_text(step.loss)}",
            *line_texts(step.metrics),
            f"{tokens_per_s:.0f} tokens/s",
            *([f"waited {waited} for weights"] if (waited := wait_text(step)) else []),
            *([f"{duration(max(1.0, seconds_left))} left"] if seconds_left is not None else []),
            *([", ".join(known)] if known else []),
        ]
    )


def wait_text(step: events.Step) -> str:
    """Return how long a step waited for weights from files; empty if it read none."""
    seconds = step.read_wait_s
    if seconds is None or not 0 <= seconds < math.inf:
        return ""
    return f"{seconds:.1f} s" if seconds >= 0.95 else f"{1000 * seconds:.0f} ms"


def margin_text(planned: events.Planned) -> str:
    """The parts of what a plan needs, as the table of `plan` names them; empty if not known."""
    if not planned.needed_bytes:
        return ""
    margin = planned.needed_bytes - planned.estimate_bytes
    peak = size_text(planned.estimate_bytes)
    return f"estimated peak {peak} + safety margin {size_text(max(0, margin))}"


def event_line(event: Event, state: ViewState) -> str | None:
    """Return the line for an event, or None for an event that has no line.

    state: the state with the event folded in.
    """
    match event:
        case events.Stage() | events.Waiting() if event.text:
            return event.text
        case events.Notice() | events.Stopping():
            return f"note: {event.text}"
        case events.Limit():
            return f"limit {size_text(event.limit_bytes)}: {event.reason}"
        case events.Planned():
            margin = margin_text(event)
            return f"plan: {event.text}" + (f" ({margin})" if margin else "")
        case events.Action(kind=kind) if kind not in SCHEDULED:
            change = f"{size_text(event.before_bytes)} -> {size_text(event.after_bytes)}"
            return f"step {event.step}: {kind.replace('_', ' ')}: {event.cause} ({change})"
        case events.Died(level=int()):  # otherwise the run ends, and the summary says so
            return event.reason
        case events.Started():
            where = f"resuming at step {event.step}" if event.step else "training"
            return (
                f"{where}: {event.model}, {counted(event.rows, 'row')}, "
                f"{counted(event.steps, 'step')}, "
                f"{counted(event.trainable_parameters, 'trainable parameter')}, {event.dtype}"
            )
        case events.Step():
            return step_text(event, state.tokens_per_s or 0.0, state.seconds_left)
        case events.Skipped():
            return f"step {event.step} was skipped: {event.reason} ({event.total} so far)"
        case events.Validation():
            best = ", the best so far" if event.best else ""
            others = other_values(event)
            metrics = "".join(f", {name} {value:.4g}" for name, value in others.items())
            measured = f"{validation_name(event)} {validation_text(event, event.loss)}"
            return f"step {event.step}: {measured}{metrics}{best}"
        case events.Paused():
            return f"step {event.step}: paused"
        case events.Continued():
            return f"step {event.step}: continued after {duration(event.seconds)}"
        case events.Checkpoint(step=step) if step > 0:
            return f"step {step}: saved {event.folder}"
    return None


def summary(state: ViewState, run: str, events_shown: bool = True) -> list[RenderableType]:
    """Return the summary of a run that has ended; the exact match comes last.

    events_shown: whether its events were shown line by line; if not, notices are repeated here.
    """
    parts: list[RenderableType] = []
    if not events_shown:
        parts += [f"note: {text}" for text in (*state.notices, *state.warnings)]
    finished = state.finished
    if finished is None or finished.reason != "done":
        return [*parts, *unfinished_lines(state), resuming(run)]
    if state.samples_after is not None:
        parts.append(samples_table(state.samples_before, state.samples_after))
    parts.append(f"done: {counted(finished.step, 'step')} in {duration(state.took_s)}")
    parts += [*peak_lines(state), *result_lines(state)]
    if preference := preference_line(state):
        parts.append(preference)
    elif not state.barely_learned and (advice := advice_line(state, run)):
        parts.append(advice)
    step = finished.adapter_step
    which = "" if step in (None, finished.step) else f" (of step {step}, the best)"
    kind = "model" if trains_weights(state) else "adapter"
    parts.append(f"{kind}: {finished.adapter}{which}")
    parts += [next_line(state, run), *reward_lines(state), *judge_lines(state)]
    if state.match_after is not None:
        parts.append(match_text(state.match_before, state.match_after))
    return parts


def unfinished_lines(state: ViewState) -> list[str]:
    """Say how a run ended that has not done all its steps, before the command that goes on."""
    if state.finished is not None:
        at = f"{state.finished.reason} after step {state.finished.step}"
        return [f"{at}; everything is saved. Continue with:"]
    where = f" after step {state.step.step}" if state.step else ""
    if state.gave_up:
        return [f"died{where}: {state.deaths[-1].reason}", "Continue with:"]
    return [f"ended{where} before it was finished. Continue with:"]


def peak_lines(state: ViewState) -> list[str]:
    """The peak memory of a run and its limit, and that it was passed if it was."""
    peak, limit = state.highest_bytes, state.limit.limit_bytes if state.limit else None
    if peak is None:
        return []
    lines = [f"peak memory: {peak_of_limit(peak, limit)}"]
    if limit is not None and peak > limit:
        text = f"the run passed its memory limit by {size_text(peak - limit)}"
        lines.append(f"{text}, which is a bug in your_ai; {REPORT}")
    return lines


def next_line(state: ViewState, run: str) -> str:
    """The commands that try and evaluate the adapter of a finished run."""
    has_rows = state.validation is not None or state.match_after is not None
    data = "" if has_rows else " --data FILE"  # held-out rows, or others
    has_answers = state.started is None or state.started.has_answers
    compares = has_answers and not trains_weights(state)
    evaluate = f"; evaluate it: your_ai eval {run}{data}" if compares else ""
    is_reward = state.started is not None and state.started.is_reward_model
    return f"try it: your_ai {f'score {run} FILE' if is_reward else f'chat {run}'}{evaluate}"


def trains_weights(state: ViewState) -> bool:
    """Return whether the result of the run is a model, and no adapter."""
    return state.started is not None and state.started.trains_weights


def result_lines(state: ViewState) -> list[str]:
    """The validation losses of a finished run, and what to try if it barely learned.

    In a run that trains on rewards, the rewards.
    """
    last, best = state.validation, state.best_validation
    if last is None:
        return []
    text = f"{validation_name(last)}: {validation_text(last, last.loss)} at the end"
    if best is not None and best.step != last.step:
        text += f", best {validation_text(best, best.loss)} at step {best.step}"
    elif best is not None and state.first_validation != last:
        text += ", the best"
    lines = [text, *metric_lines(last, best)]
    if state.barely_learned and not preference_line(state):
        lines.append(f"barely learned: try {ways_to_learn_more(state)}")
    return lines


def metric_lines(last: events.Validation, best: events.Validation | None) -> list[str]:
    """The other values of the last validation and of the best one.

    Those of preferences are in a line of their own.
    """
    found, of_best = [], {} if best is None else other_values(best)
    values = {} if ACCURACIES in last.metrics else other_values(last)
    for name, value in values.items():
        text = f"{name} of the validation rows: {value:.4g} at the end"
        if best is not None and best.step != last.step and name in of_best:
            text += f", best {of_best[name]:.4g} at step {best.step}"
        found.append(text)
    return found


def validation_name(validation: events.Validation) -> str:
    """Return what a validation measured, in words."""
    return f"validation {'loss' if validation.reward is None else 'reward'}"


def validation_text(validation: events.Validation, loss: float | None) -> str:
    """Format this or another loss of a run; as a reward if this is what its validations measure."""
    if validation.reward is None or loss is None:
        return loss_text(loss)
    return plain(0.0 - loss)


def reward_lines(state: ViewState) -> list[str]:
    """The mean reward of the held-out rows, of a run that trains on rewards."""
    before, after = state.match_before, state.match_after
    if after is None or after.reward is None:
        return []
    start = "" if before is None or before.reward is None else f"{plain(before.reward)} before, "
    return [f"reward: {start}{plain(after.reward)} after"]


def judge_lines(state: ViewState) -> list[str]:
    """Return what the judge did in all of the run, if it has one."""
    sums = {name.removeprefix(JUDGE): value for name, value in state.judged.items()}
    if not sums:
        return []
    asked, kept = (int(sums.get(name, 0)) for name in ("calls", "cache_hits"))
    parts = [counted(asked, "call"), f"{counted(kept, 'answer')} from the cache"]
    if missing := int(sums.get("missing", 0)):
        parts.append(f"{counted(missing, 'reward')} missing")
    if "cost" in sums:
        parts.append(f"${sums['cost']:.2f}")
    return [f"judge: {', '.join(parts)}"]


def resuming(run: str) -> str:
    return f"  your_ai train --resume {run}"


def match_text(
    before: events.ExactMatch | None, after: events.ExactMatch, noun: str = "held-out row"
) -> str:
    """Return the line with the shares, and their 95% Wilson intervals in brackets.

    noun: what is counted.
    """
    start = f"{match_share(before)} before, " if before else ""
    return f"exact match: {start}{match_share(after)} after ({counted(after.rows, noun)})"


def samples_table(before: events.Samples | None, after: events.Samples) -> Table:
    """Make a table of held-out prompts with the answers before and after training."""
    table = Table(title="Held-out prompts", show_lines=True, title_justify="left")
    table.add_column("prompt", ratio=1, overflow="fold")
    table.add_column("before", ratio=1, overflow="fold")
    table.add_column("after", ratio=1, overflow="fold")
    table.add_column("expected", ratio=1, overflow="fold")
    answers = before.answers if before else ["?"] * len(after.answers)
    for texts in zip(after.prompts, answers, after.answers, after.expected, strict=False):
        table.add_row(*(Text(shorten(text)) for text in texts))
    return table


def shorten(text: str) -> str:
    """Cut a text to SAMPLE_LINES lines and SAMPLE_CHARACTERS characters."""
    lines = text.strip().splitlines()
    kept = "\n".join(lines[:SAMPLE_LINES])[:SAMPLE_CHARACTERS]
    return kept if kept == text.strip() else kept + " ..."
