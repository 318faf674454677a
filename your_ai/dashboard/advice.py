"""Whether a finished run learned what its rows show, and what to try if it did not. Pure."""

from __future__ import annotations

import difflib
import math

from your_ai.dashboard.state import ViewState
from your_ai.gates.text import counted, loss_text
from your_ai.run import events

FALLING = 0.02  # of the loss: a smaller change between two validations counts as none
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

    It did if its validation loss still fell at the end, or if most answers to held-out prompts
    are unlike those that were expected. run: its name.
    """
    last, best = state.validation, state.best_validation
    if last is not None and (last.reward is not None or ACCURACIES in last.metrics):
        return ""
    reasons = []
    is_best = last is not None and best is not None and best.step == last.step
    if last is not None and is_best and len(state.bests) > 1:
        before = state.bests[-2]
        if falls(before.loss, last.loss):
            since = f"from {loss_text(before.loss)} at step {before.step}"
            reasons.append(f"the validation loss still fell, {since} to {loss_text(last.loss)}")
    goes_on = bool(reasons) or last is None
    after = state.samples_after
    wrong, asked = (0, 0) if after is None else wrong_answers(after)
    if 2 * wrong > asked:
        what = counted(asked, "answer")
        reasons.append(f"{wrong} of {what} to held-out prompts are unlike the expected ones")
    if not reasons:
        return ""
    if goes_on and (longer := length_option(state)):
        return f"not learned enough: {', and '.join(reasons)}; go on with: " + (
            f"your_ai train --resume {run} {longer}"
        )
    if last is not None and not is_best and falls(last.loss, best.loss if best else math.nan):
        return f"not learned enough: {reasons[0]}; try more rows, or a lower --learning-rate"
    return f"not learned enough: {reasons[0]}; try {ways_to_learn_more(state)}"


def falls(before: float, after: float) -> bool:
    """Whether a loss is clearly lower than before; False for what is not finite."""
    return math.isfinite(before) and after < before - FALLING * abs(before)


def wrong_answers(after: events.Samples) -> tuple[int, int]:
    """How many answers are unlike the expected ones, and how many have an expected one."""
    pairs = [
        (answer.strip()[:COMPARED].lower(), wanted.strip()[:COMPARED].lower())
        for answer, wanted in zip(after.answers, after.expected, strict=False)
        if wanted.strip()
    ]
    like = [difflib.SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs]
    return sum(ratio < ALIKE for ratio in like), len(pairs)


def length_option(state: ViewState) -> str:
    """`--epochs N` or `--max-steps N` for twice as many steps; empty if they are unknown."""
    if state.started is None or not state.started.steps:
        return ""
    steps, of_epoch = state.started.steps, state.started.steps_per_epoch
    if of_epoch and steps % of_epoch == 0:
        return f"--epochs {2 * steps // of_epoch}"
    return f"--max-steps {2 * steps}"
