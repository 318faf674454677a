"""Try: a run and its base side by side, its held-out rows, and thumbs that begin the next run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from your_ai.config import REWARD
from your_ai.errors import UserError
from your_ai.evaluation import show as shown
from your_ai.evaluation.record import read_evaluation
from your_ai.gates.text import counted, message_line
from your_ai.gates.untrusted import is_number
from your_ai.hub.find import find_model
from your_ai.run import folder as folders
from your_ai.run.folder import RUNS, RunFolder
from your_ai.session import run_list
from your_ai.session.room import trial_gb
from your_ai.studio import jobs, thumbs
from your_ai.studio.pages import PageRequest, do, run_rows, show
from your_ai.studio.talks import SYSTEMS, Talk
from your_ai.studio.thumbs import ThumbRow

NAMES = {"base": "Base", "adapter": "With the adapter"}
SAMPLING = {"temperature": "0", "max_tokens": "256"}
MOST_TOKENS = 8192
MOST_CHARACTERS = 200_000  # of a question, which the server keeps
WORST_ROWS = 10
LABELS = {"up": True, "down": False, "none": None}
FINISHED = ("finished", "imported", "merged")


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer that can be given a thumb."""

    system: str
    text: str
    row: str
    """The row of preferences without its label, as JSON; empty if the answer cannot be judged."""
    label: bool | None
    """The thumb that it has."""


class RunThumbs:
    """The thumbs of a run, to find that of an answer."""

    def __init__(self, run: str) -> None:
        self.rows = thumbs.judged_rows(run)
        self.labels = {as_key(thumbs.without_label(row)): row[thumbs.LABEL] for row in self.rows}

    def answer(self, system: str, text: str, asked: dict[str, Any]) -> JudgedAnswer:
        if not asked or not text.strip():
            return JudgedAnswer(system, text, "", None)
        key = as_key(thumbs.row_of(asked, text))
        return JudgedAnswer(system, text, key, self.labels.get(key))


def as_key(row: ThumbRow) -> str:
    return json.dumps(row, sort_keys=True)


def try_page(asked: PageRequest) -> Response:
    name = asked.query.get("run", "")
    chosen = folders.find(name) if name else newest_to_try()
    if chosen is None:
        return asked.render("try", tab="try", chosen="")
    rows = [row.name for row in run_list.folders(RUNS) if run_list.is_trained(row)]
    talk = asked.studio.talks.named(asked.query.get("talk", ""))
    talk = talk if talk is not None and talk.run == chosen.name else None
    judged = RunThumbs(chosen.name)
    return asked.render(
        "try",
        tab="try",
        chosen=chosen.name,
        names=rows if chosen.name in rows else [*rows, chosen.name],
        fault=why_not(chosen),
        is_gone="talk" in asked.query and talk is None,
        sampling=SAMPLING if talk is None else talk.sampling,
        most_tokens=MOST_TOKENS,
        next_runs=next_runs(chosen, judged),
        **talk_values(talk, judged),
        **measured_values(chosen, judged),
    )


def newest_to_try() -> RunFolder | None:
    """The newest finished run that answers, or any that can be tried; None if there is none."""
    ended = [RunFolder(RUNS / row.name) for row in run_rows() if row.state in FINISHED]
    trained = [each for each in run_list.folders(RUNS) if run_list.is_trained(each)]
    found = [*ended, *trained]
    return next((run for run in found if not why_not(run)), found[0] if found else None)


def why_not(run: RunFolder) -> str:
    """Say why a run cannot answer; empty if it can."""
    try:
        config = run.read_config()
        if config.objective == REWARD:
            return f"{run.name}: is a reward model, which scores answers and gives none"
        if not run_list.is_trained(run):
            return f"{run.name}: has no checkpoint yet; try it when it has saved one"
        find_model(config.model)
    except UserError as error:
        return message_line(error)
    return ""


# Questions and answers


def talk_values(talk: Talk | None, judged: RunThumbs) -> dict[str, Any]:
    exchanges = [] if talk is None else talk.exchanges
    answers = [
        [judged.answer(s, each.replies[s].text, each.asked) for s in reversed(SYSTEMS)]
        for each in exchanges
    ]
    told = list(zip(exchanges, answers, strict=True))
    return {"talk": talk, "told": told, "systems": NAMES}


def talk_part(asked: PageRequest) -> Response:
    """The last question with its answers, which grow."""
    talk = found_talk(asked)
    values = talk_values(talk, RunThumbs(talk.run))
    if not asked.is_part:
        return asked.go(place_of_talk(talk))
    return asked.render("try_now", chosen=talk.run, **values)


def found_talk(asked: PageRequest) -> Talk:
    talk = asked.studio.talks.named(asked.names["talk"])
    if talk is None:
        raise UserError("this conversation ended with the studio that had it; ask again")
    return talk


def place_of_talk(talk: Talk, at: str = "now") -> str:
    return f"try?{urlencode({'run': talk.run, 'talk': talk.name})}#{at}"


def ask(asked: PageRequest) -> Response:
    """Ask both systems a question."""
    run = folders.find(asked.names["name"])
    if fault := why_not(run):
        raise UserError(fault)
    question = asked.form.get("question", "").replace("\r\n", "\n").strip()
    if not question:
        raise UserError("the question is empty; enter some text")
    if len(question) > MOST_CHARACTERS:
        raise UserError(f"the question has more than {MOST_CHARACTERS:,} characters; shorten it")
    given = SAMPLING | {name: asked.form[name] for name in SAMPLING if name in asked.form}
    try:
        temperature, tokens = float(given["temperature"]), int(given["max_tokens"])
    except ValueError as error:
        raise UserError("temperature and tokens: give numbers") from error
    if not (math.isfinite(temperature) and 0 <= temperature <= 10 and 1 <= tokens <= MOST_TOKENS):
        raise UserError(f"temperature: 0 to 10; tokens: 1 to {MOST_TOKENS:,}")
    talks = asked.studio.talks
    talk = talks.named(asked.form.get("talk", ""))
    talk = talk if talk is not None and talk.run == run.name else None
    sampling = {"temperature": temperature, "max_tokens": tokens}
    talk = talks.ask(asked.studio.answerer.ask, talk, run.name, question, **sampling)
    return asked.go(place_of_talk(talk))


def stop(asked: PageRequest) -> Response:
    talk = found_talk(asked)
    talk.stops = True
    return asked.go(place_of_talk(talk))


# Held-out rows


def measure(asked: PageRequest) -> Response:
    """Begin to measure a run on its held-out rows, within the memory that other runs leave."""
    run = folders.find(asked.names["name"])
    if (job := measuring(run)) is None or job.state != "running":
        words = ["--max-memory", f"{trial_gb(RUNS):.3f}", "--worst", str(WORST_ROWS)]
        words += ["--max-tokens", SAMPLING["max_tokens"]]
        jobs.begin(f"Measure {run.name}", "eval", run.name, *words)
    return asked.go(f"try?{urlencode({'run': run.name})}#measured")


def measuring(run: RunFolder) -> jobs.StudioJob | None:
    """The last measurement of a run."""
    return next((job for job in jobs.found() if job.words[:2] == ("eval", run.name)), None)


def measured_part(asked: PageRequest) -> Response:
    run = folders.find(asked.names["name"])
    values = measured_values(run, RunThumbs(run.name))
    return asked.render("try_measured", chosen=run.name, systems=NAMES, **values)


def measured_values(run: RunFolder, judged: RunThumbs) -> dict[str, Any]:
    values: dict[str, Any] = {"job": measuring(run), "measures": {}, "worst": [], "about": ""}
    if (found := read_evaluation(run)) is None:
        return values
    try:
        step = "" if found["step"] is None else f" after step {found['step']:,}"
        rows = shown.row_counts(found["rows"], found.get("preferences"))
        values["about"] = f"{rows} of {found['data']}{step}"
        values["measures"] = shown.measures_cells(found)
        values["worst"] = [worst_row(row, judged) for row in found["worst"]]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        values["about"] = "The last results cannot be read; measure again."
    return values


def worst_row(row: dict[str, Any], judged: RunThumbs) -> dict[str, Any]:
    """The texts that are shown of a row: whole where they are recorded, else what is quoted."""
    asked, answers = row.get("asked", {}), row.get("answers", {})
    quotes = {"base": row.get("base_answer"), "adapter": row.get("answer")}
    given = {system: answers.get(system, quote) for system, quote in quotes.items()}
    prompt = asked.get("prompt", row.get("prompt"))
    return {
        "where": str(row["where"]),
        "why": "; ".join(shown.TITLES[kind].rstrip(":") for kind in row["by"]),
        "losses": [(NAMES[s], loss) for s in SYSTEMS if is_number(loss := row.get(f"{s}_loss"))],
        "question": prompt if isinstance(prompt, str | None) else str(prompt[-1]["content"]),
        "expected": row.get("expected"),
        "turns": row.get("turns", []),
        "answers": [
            judged.answer(system, text, asked if system in answers else {})
            for system, text in given.items()
            if text is not None
        ],
    }


# Thumbs


def thumb(asked: PageRequest) -> Response:
    """Give an answer a thumb, or take it back."""
    run, at = folders.find(asked.names["name"]), asked.form.get("at", "")
    label = asked.form.get("label", "")
    try:
        row = json.loads(asked.form.get("row", ""))
        if label not in LABELS or not thumbs.is_row(row):
            raise ValueError(label)
    except (ValueError, RecursionError) as error:
        raise UserError("the thumb cannot be read; load the page again") from error
    thumbs.judge(run.name, row, LABELS[label])
    query = {"run": run.name, "talk": asked.form.get("talk", "")}
    place = urlencode({name: value for name, value in query.items() if value})
    return asked.go(f"try?{place}#{at if at.isalnum() else 'thumbs'}")


def next_runs(run: RunFolder, judged: RunThumbs) -> list[dict[str, str]]:
    """The runs that the thumbs can begin: what each has, what it lacks, and where to plan it."""
    good = sum(row[thumbs.LABEL] for row in judged.rows)
    pairs, thumbed = len(list(thumbs.pairs_of(judged.rows))), len(judged.rows)
    rows_text = f"{counted(good, 'good answer')}, {thumbed - good} bad"
    pairs_text = f"{counted(pairs, 'pair')} of a good and a bad answer to one question"
    settings = run.settings()
    shared = {"model": settings.model if settings else "", "from_adapter": run.name}

    def plan(objective: str, path: Path, text: str, needs: str) -> dict[str, str]:
        query = urlencode({"objective": objective, "data": path, **shared})
        return {"objective": objective, "text": text, "needs": needs, "plan": f"plan?{query}"}

    return [
        plan("kto", thumbs.labels_file(run.name), rows_text, "" if thumbed > 1 else "2 thumbs"),
        plan("dpo", thumbs.pairs_file(run.name), pairs_text, "" if pairs else "1 pair"),
    ]


PAGES = [
    show("/try", try_page),
    show("/try/talks/{talk}", talk_part),
    do("/try/talks/{talk}/stop", stop),
    show("/try/{name}/measured", measured_part),
    do("/try/{name}/ask", ask),
    do("/try/{name}/measure", measure),
    do("/try/{name}/thumb", thumb),
]
