"""Whether a finished run learned what its rows show, and what to try if it did not. Pure."""

from __future__ import annotations

import difflib
import math

from your_ai.dashboard.state import ViewState
from your_ai.gates.text import counted, loss_text
from your_ai.run import events

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
    """Whether a run on pairs of answers learned to prefer the chosen ones; empty for other runs."""
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
    """What to do after a finished run that learned too little from answers; empty if nothing.

    It did if its validation loss still fell at the end, unless all answers to held-out prompts are
    exactly those that were expected; or if most are unlike them. run: its name.
    """
    last, best, after = state.validation, state.best_validation, state.samples_after
    if last is not None and (last.reward is not None or ACCURACIES in last.metrics):
        return ""
    pairs = [] if after is None else expected_pairs(after)
    if pairs and all(answer == wanted for answer, wanted in pairs):
        return ""
    reasons = []
    overfits = last is not None and best is not None and falls(last.loss, best.loss)
    before = [each for each in state.bests if last and each.step <= LATE * last.step]
    if best is not None and before and falls(before[-1].loss, best.loss) and not overfits:
        since = f"from {loss_text(before[-1].loss)} at step {before[-1].step}"
        reasons.append(f"the validation loss still fell, {since} to {loss_text(best.loss)}")
    goes_on = bool(reasons) or last is None
    wrong = sum(map(is_wrong, pairs))
    if 2 * wrong > len(pairs):
        what = counted(len(pairs), "answer")
        reasons.append(f"{wrong} of {what} to held-out prompts are unlike the expected ones")
    if not reasons:
        return ""
    if goes_on and (longer := length_option(state)):
        return f"not learned enough: {', and '.join(reasons)}; go on with: " + (
            f"your_ai train --resume {run} {longer}"
        )
    if overfits:
        return f"not learned enough: {reasons[0]}; try more rows, or a lower --learning-rate"
    return f"not learned enough: {reasons[0]}; try {ways_to_learn_more(state)}"


def falls(before: float, after: float) -> bool:
    """Whether a loss is clearly lower than before; False for what is not finite."""
    return math.isfinite(before) and before - after > max(FALLING * abs(before), NOTICED)


def expected_pairs(after: events.Samples) -> list[tuple[str, str]]:
    """The answers and the expected ones, where there is one."""
    pairs = zip(after.answers, after.expected, strict=False)
    return [(answer.strip(), wanted.strip()) for answer, wanted in pairs if wanted.strip()]


def is_wrong(pair: tuple[str, str]) -> bool:
    """Whether an answer is unlike the expected one."""
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
