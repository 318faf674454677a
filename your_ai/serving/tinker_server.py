"""Serves Tinker's training API on this machine: other people's loops, under our memory plan.

See docs/tinker.md for what is supported. `tinker_jobs` orders the work, `tinker_wire` reads and
writes bytes, `training.outside` computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from your_ai.data.target_columns import Columns
from your_ai.errors import RunError, UserError, first_line
from your_ai.files import open_regular
from your_ai.gates.text import counted, shortened, shown
from your_ai.gates.token_ids import check_ids
from your_ai.generation.likely import drawn, top
from your_ai.generation.rollouts import RolloutPrompt, sampler_of
from your_ai.rng import derive_seed
from your_ai.serving import admission, tinker_wire, web
from your_ai.serving.tinker_encryption import encrypt_files, recipients_of
from your_ai.serving.tinker_jobs import (
    MOST_KEPT_BYTES,
    MOST_TOGETHER,
    MOST_WAITING_BYTES,
    Full,
    Jobs,
    QueuedJob,
    Result,
)
from your_ai.serving.tinker_saved import EXTERNAL, MLX, SAMPLERS, WEIGHTS, Saved, SavedModels
from your_ai.serving.tinker_wire import (
    MOST_CELLS,
    GradientsAsked,
    RequestFields,
    SampledTokens,
    ScoredPrompt,
    TargetTable,
)
from your_ai.serving.web import Gate, Origins, RequestHead, RequestRefused, WebServer
from your_ai.training.outside import Outside
from your_ai.training.outside_models import (
    BASE,
    SHAPE,
    Adam,
    Asked,
    LoraShape,
    OutsideModel,
    SavedAdapters,
    shape_in,
)
from your_ai.training.outside_texts import OutsideText

POLL_S, CROWDED_POLL_S = 20.0, 0.5  # that a request for a result waits
MOST_RANK = 512
MOST_SAMPLES = 1024  # of a request
MOST_SESSIONS = 10_000
MOST_SAMPLERS = 1_000_000
# Of requests and answers, which the plan counts. One that is read is there several times: as bytes,
# as messages and as arrays, and what was freed of these.
HELD_BYTES = 6 * tinker_wire.MOST_BYTES + MOST_WAITING_BYTES + MOST_KEPT_BYTES
MOST_TOP = 128  # tokens at a place
SCORED_TOGETHER = 64  # completions whose texts are made together
FILES = "/api/v1/files/"
LINK = re.compile(rf"({FILES}[!-~]*)\?until=([0-9]{{1,12}})&signature=([0-9a-f]{{64}})")
LINK_S = 3600.0  # for which an address is good
PIECE_BYTES = 1 << 16  # of a file, in memory at once
CLIENT = {
    "proto_compress_fwdbwd": True,
    "parallel_fwdbwd_chunks": False,
    "use_pyqwest_transport": False,
    "sample_max_concurrent_requests": 32,
    "sample_enable_stuck_detection": False,
}


@dataclass(frozen=True)
class SampleAsked:
    """A request for completions."""

    prompt: np.ndarray
    seeds: tuple[int, ...]
    most: int
    stops: tuple[Any, ...] | None
    """Tokens or texts; None for the tokens that end an answer."""
    scored: int
    """The last tokens of the prompt whose log-probabilities are given, too."""
    with_prompt: bool
    """Whether there is an answer on the prompt."""
    temperature: float
    seed: int
    top_of_prompt: int
    """The most likely tokens that are given at each of the `scored` places; 0 for none."""
    top_of_samples: int
    """The same of completions."""
    alternatives: int
    """Tokens that are drawn at each place of the prompt after the first."""
    targets: TargetTable | None
    """Ids to score at these places."""

    @property
    def size_bytes(self) -> int:
        asked = 0 if self.targets is None else len(self.targets.ids)
        return self.prompt.nbytes + 40 * len(self.seeds) + 32 * asked

    @property
    def tokens(self) -> int:
        """Maximum number that it may make."""
        return self.most * len(self.seeds)

    @property
    def cells(self) -> int:
        """Number in the tables of its answer."""
        of_place = self.top_of_prompt + self.alternatives
        return of_place * len(self.prompt) + self.top_of_samples * self.tokens


@dataclass
class Session:
    """A client."""

    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


class Service:
    """The work of the routes."""

    def __init__(self, outside: Outside, jobs: Jobs, folder: Path, name: str = "") -> None:
        """folder: of the runs. name: what loops call the base; by default as its user does."""
        self.outside, self.jobs, self.saved = outside, jobs, SavedModels(folder)
        self.name = name or outside.config.model
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, OutsideModel] = {}
        self.samplers: dict[str, Saved | None] = {}
        """By the id of a sampling session; None for the base."""
        self.links = Links()
        self.polls = 0
        """Requests that wait for a result."""

    # -- sessions and models

    def create_session(self, body: RequestFields) -> object:
        if len(self.sessions) >= MOST_SESSIONS:
            raise Full
        name = new_name()
        self.sessions[name] = Session()
        return {"type": "create_session", "session_id": name}

    def heartbeat(self, body: RequestFields) -> object:
        if body.text("session_id") not in self.sessions:
            raise Gone("this server was restarted")
        return {"type": "session_heartbeat"}

    def session(self, name: str) -> Session:
        found = self.sessions.get(name)
        if found is None:
            raise NotHere(f"session {shortened(name)}: is not here; was this server restarted?")
        return found

    def model(self, name: str) -> OutsideModel:
        found = self.models.get(name)
        if found is None:
            raise UserError(f"model {shortened(name)}: is not here, or was unloaded")
        return found

    def model_name(self, body: RequestFields) -> str:
        session = body.text("session_id")
        self.session(session)
        return f"{session}:train:{body.whole('model_seq_id', 0, 1 << 30)}"

    def create_model(self, body: RequestFields) -> QueuedJob:
        name = self.model_name(body)
        self.check_base(body.text("base_model"))
        if "optimizer_config" in body.body and (
            body.fields("optimizer_config").text("type", "adamw") != "adamw"
        ):
            raise ValueError("optimizer_config: only adamw is here")
        lora = body.fields("lora_config")
        rank = lora.whole("rank", 1, MOST_RANK)
        seed = lora.whole("seed", 0, 2**63 - 1, derive_seed(0, name) >> 1)
        mlp, attention = lora.truth("train_mlp", True), lora.truth("train_attn", True)
        shape = LoraShape(rank, seed, mlp, attention, lora.truth("train_unembed", True))
        self.check_rank(rank)

        def work(_: Any) -> Result:
            self.start(name, shape)
            return Result.of({"type": "create_model", "model_id": name})

        return self.add(f"{name}:0", None, alone(work))

    def start(self, name: str, shape: LoraShape) -> OutsideModel:
        """Create a model, in the thread that works."""
        self.models[name] = made = self.outside.create(shape, self.saved.folder_of(name))
        self.sessions[name.partition(":")[0]].models.append(name)
        return made

    def check_base(self, name: str) -> None:
        if name not in (self.name, self.outside.config.model):
            raise ValueError(f"base_model {shortened(name)}: this server has {self.name}")

    def check_rank(self, rank: int) -> None:
        most = int(self.outside.config.lora_rank)
        if rank > most:
            raise ValueError(
                f"rank {rank}: this server was planned for rank {most}; start it with --rank {rank}"
            )

    def finish(self, name: str) -> object:
        """End a session: the adapters of its models become the results of their runs."""
        found = self.session(name)

        def work(_: Any) -> Result:
            self.end(found.models)
            return Result.of({})

        self.add(f"{name}:finish:{secrets.token_hex(8)}", None, alone(work))
        return {}

    def end(self, models: Iterable[str]) -> None:
        """Raises RunError if one could not be written, which stays; the others were."""
        failed: RunError | None = None
        for name in models:
            if (model := self.models.get(name)) is not None:
                try:
                    self.outside.end(model)
                except Exception as error:  # of MLX too, for a file that is lost
                    failed = RunError(first_line(error))
                else:
                    del self.models[name]
                    self.outside.base.forget(model)
                    self.jobs.forget(name)
        if failed is not None:
            raise failed

    def end_all(self) -> None:
        self.end(list(self.models))

    def session_facts(self, name: str) -> object:
        found = self.session(name)
        return {"training_run_ids": found.models, "sampler_ids": found.samplers}

    def runs(self, first: int, most: int) -> object:
        every = list(self.saved.models())
        part = [self.saved.run_facts(name, self.name) for name in every[first : first + most]]
        cursor = {"offset": first, "limit": most, "total_count": len(every)}
        return {"training_runs": part, "cursor": cursor}

    def copy(self, body: RequestFields) -> object:
        is_of_session = body.body.get("session_id") is not None
        name = self.model_name(body) if is_of_session else f"{new_name()}:train:0"
        return {"tinker_path": self.saved.copy(body.text("source_path"), name).path}

    def unload(self, body: RequestFields) -> QueuedJob:
        name, attempt, last = body.text("model_id"), 0, None
        while (job := self.jobs.find(f"{name}:unload:{attempt}")) is not None:
            attempt, last = attempt + 1, job
        if last is not None and not (last.done.is_set() and name in self.models):
            return last  # else it failed
        self.model(name)

        def work(_: Any) -> Result:
            self.end([name])
            return Result.of({"type": "unload_model", "model_id": name})

        return self.add(f"{name}:unload:{attempt}", None, alone(work))

    def info(self, body: RequestFields) -> object:
        name = body.text("model_id")
        shape = self.model(name).shape
        about = {
            "arch": self.outside.architecture,
            "model_name": self.name,
            "tokenizer_id": str(self.outside.base.folder),
        }
        return {
            "type": "get_info",
            "model_id": name,
            "model_data": about,
            "is_lora": True,
            "lora_rank": shape.rank,
            "model_name": self.name,
        }

    # -- training

    def pass_over(self, name: object, number: object) -> None:
        """Let the jobs of a model not wait for one that was refused."""
        if isinstance(name, str) and name in self.models and type(number) is int and number >= 1:
            with contextlib.suppress(ValueError, Full):
                failed = Result.failed("was refused", "user")
                job = QueuedJob(f"{name}:{number}", None, alone(lambda _: failed))
                self.jobs.add(job, name, number)

    def gradients(self, asked: GradientsAsked) -> QueuedJob:
        name, number = asked.model_id, asked.seq_id
        self.model(name)
        try:
            self.outside.check(asked.texts)
        except UserError as error:
            raise tinker_wire.RefusedInTurn(error, name, number) from error

        def work(asked: GradientsAsked) -> Result:
            loss, found = self.outside.add_gradients(
                self.model(name), asked.texts, asked.loss, gradients=not asked.forward_only
            )
            metrics = {"loss:sum": loss}
            body = tinker_wire.gradients_answer(metrics, found, asked.shapes)
            return Result(body, is_proto=True)

        job = QueuedJob(f"{name}:{number}", asked, alone(work), size_bytes=asked.size_bytes)
        return self.jobs.add(job, name, number)

    def update(self, body: RequestFields) -> QueuedJob:
        given = body.fields("adam_params")
        adam = Adam(
            learning_rate=given.number("learning_rate", 0, 1e3, 1e-4),
            beta1=given.number("beta1", 0, 0.999999, 0.9),
            beta2=given.number("beta2", 0, 0.999999, 0.95),
            eps=given.number("eps", 1e-30, 1, 1e-12),
            weight_decay=given.number("weight_decay", 0, 1e3, 0.0),
            grad_clip_norm=given.number("grad_clip_norm", 0, 1e30, 0.0),
        )

        def work(model: OutsideModel) -> Result:
            return Result.of({"metrics": self.outside.update(model, adam)})

        return self.in_turn(body, work)

    def in_turn(self, body: RequestFields, work: Callable[[OutsideModel], Result]) -> QueuedJob:
        """A job of a model, in the order of its numbers."""
        name, number = body.text("model_id"), body.whole("seq_id", 1, 1 << 40)
        self.model(name)
        job = QueuedJob(f"{name}:{number}", None, alone(lambda _: work(self.model(name))))
        return self.jobs.add(job, name, number)

    def add(self, id: str, asked: Any, work: Callable[[Any], Sequence[Result]]) -> QueuedJob:
        """A job that waits for no other."""
        return self.jobs.add(QueuedJob(id, asked, work))

    # -- saved models

    def save(self, body: RequestFields) -> QueuedJob:
        target = self.saved.target(body.text("model_id"), WEIGHTS, body.text("path", "state"))

        def work(model: OutsideModel) -> Result:
            self.outside.base.save(model, target.folder)
            return Result.of({"type": "save_weights", "path": target.path})

        return self.in_turn(body, work)

    def save_sampler(self, body: RequestFields) -> QueuedJob:
        model_id = body.text("model_id")
        number = body.whole("sampling_session_seq_id", 0, 1 << 40, -1)
        name = body.text("path", "") or f"snapshot-{body.whole('seq_id', 1, 1 << 40)}"
        target = self.saved.target(model_id, SAMPLERS, name)

        def work(model: OutsideModel) -> Result:
            self.outside.base.save(model, target.folder, with_optimizer=False)
            answer = {"type": "save_weights_for_sampler", "path": target.path}
            if number >= 0:
                del answer["path"]
                session = model_id.partition(":")[0]
                answer["sampling_session_id"] = self.new_sampler(session, number, target)
            return Result.of(answer)

        return self.in_turn(body, work)

    def save_external(self, body: RequestFields) -> QueuedJob:
        keys = recipients_of(body.body.get("age_encryption_recipients"))
        target = self.saved.target(body.text("model_id"), EXTERNAL, body.text("path"))

        def work(model: OutsideModel) -> Result:
            self.outside.export(model, target.folder, MLX, partial(encrypt_files, keys, SHAPE))
            size = target.facts["size_bytes"]
            answer = {"type": "save_weights_external", "path": target.path, "size_bytes": size}
            return Result.of(answer)

        return self.in_turn(body, work)

    def urls(self, model: str, checkpoint: str, server: str) -> object:
        """Addresses of the files of external weights, which need no token for a while. server: as
        the client calls it. Raises UserError."""
        until, place = int(time.time() + LINK_S), f"{FILES}{model}/{checkpoint}/"
        files = self.saved.files(model, checkpoint)
        return {
            "urls": {name: f"{server}{self.links.signed(place + name, until)}" for name in files},
            "expires": datetime.fromtimestamp(until, UTC).isoformat(),
        }

    def file(self, path: str) -> Response:
        """A file by the end of its address. Raises UserError or OSError.

        It is open before the answer begins, so it may be replaced or deleted meanwhile.
        """
        model, kind, name, *rest = path.split("/") + [""] * 3
        files = self.saved.files(model, f"{kind}/{name}")
        found = files.get("/".join(part for part in rest if part))
        if found is None:
            raise NotHere(f"file {shortened(path)}: is not here")
        file = open_regular(found)
        size = {"content-length": str(os.fstat(file.fileno()).st_size)}
        return StreamingResponse(pieces_of(file), 200, size, "application/octet-stream")

    def load(self, body: RequestFields) -> QueuedJob:
        path, with_optimizer = body.text("path"), body.truth("optimizer")
        folder = self.saved.find(path).folder

        def load(model: OutsideModel) -> None:
            self.outside.base.load(model, folder, with_optimizer=with_optimizer)

        if "session_id" not in body.body:

            def again(model: OutsideModel) -> Result:
                load(model)
                return Result.of({"type": "load_weights", "path": path, "model_id": id})

            id = body.text("model_id")
            return self.in_turn(body, again)
        name = self.model_name(body)

        def work(_: Any) -> Result:
            shape = shape_in(folder)
            self.check_rank(shape.rank)
            made = self.start(name, shape)
            try:
                load(made)
            except Exception:
                self.end([name])
                raise
            return Result.of({"type": "load_weights", "path": path, "model_id": name})

        return self.add(f"{name}:0", None, alone(work))

    def weights_info(self, body: RequestFields) -> object:
        shape = self.saved.shape(body.text("tinker_path"))
        return {
            "base_model": self.name,
            "is_lora": True,
            "lora_rank": shape.rank,
            "train_unembed": shape.train_unembed,
            "train_mlp": shape.train_mlp,
            "train_attn": shape.train_attn,
        }

    # -- samples

    def new_sampler(self, session: str, number: int, saved: Saved | None) -> str:
        name = f"{session}:sample:{number}"
        if len(self.samplers) >= MOST_SAMPLERS:
            raise Full
        if name not in self.samplers:
            self.sessions[session].samplers.append(name)
        self.samplers[name] = saved
        return name

    def create_sampler(self, body: RequestFields) -> object:
        session, path = body.text("session_id"), body.text("model_path", "")
        self.session(session)
        number = body.whole("sampling_session_seq_id", 0, 1 << 40)
        if not path:
            self.check_base(body.text("base_model"))
        name = self.new_sampler(session, number, self.saved.find(path) if path else None)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler(self, name: str) -> object:
        if name not in self.samplers:
            raise NotHere(f"sampler {shortened(name)}: is not here")
        saved, found = self.samplers[name], {"sampler_id": name, "base_model": self.name}
        return found if saved is None else {**found, "model_path": saved.path}

    def sample(self, body: RequestFields) -> tuple[QueuedJob, list[str]]:
        name, source = self.source(body)
        asked, key = self.sample_asked(body)
        # Without a session, other clients may have the same numbers.
        unknown = secrets.randbits(62)
        number = body.whole("seq_id", 0, 2**63 - 1, unknown)
        number = number if "sampling_session_id" in body.body else unknown
        sampler = sampler_of(*key)

        def work(every: Sequence[SampleAsked]) -> Sequence[Result]:
            return self.completed(source, every, sampler)

        id = f"{name}:{number}"
        job = self.jobs.add(
            QueuedJob(
                id, asked, work, ("sample", source, key),
                size_bytes=asked.size_bytes,
                tokens=asked.tokens + asked.cells,  # tables of many together must be few, too
            )
        )  # fmt: skip
        return job, [f"{id}:{each}" for each in range(len(asked.seeds))]

    def source(self, body: RequestFields) -> tuple[str, SavedAdapters]:
        """The name of a sampler, and its adapters. Raises UserError."""
        if "sampling_session_id" in body.body:
            name = body.text("sampling_session_id")
            if name not in self.samplers:
                raise UserError(f"sampler {shortened(name)}: is not here; create it again")
            saved = self.samplers[name]
            return name, BASE if saved is None else SavedAdapters.at(saved.folder)
        if path := body.text("model_path", ""):
            return path, SavedAdapters.at(self.saved.find(path).folder)
        self.check_base(body.text("base_model"))
        return "base", BASE

    def sample_asked(self, body: RequestFields) -> tuple[SampleAsked, tuple[float, float, int]]:
        prompt = body.tokens("prompt")
        given, outside = body.fields("sampling_params"), self.outside
        check_ids(prompt, outside.vocabulary, outside.tokenizer, "prompt")
        room = outside.longest + 1 - len(prompt)
        most = given.whole("max_tokens", 1, 1 << 30, max(1, room))
        if most > room:
            raise ValueError(
                f"the prompt has {counted(len(prompt), 'token')} and max_tokens is {most}; this "
                f"server was planned for {outside.longest + 1} together (--max-seq-length)"
            )
        count = body.whole("num_samples", 1, MOST_SAMPLES, 1)
        if count * most > MOST_TOGETHER:
            raise ValueError(
                f"num_samples times max_tokens is {count * most:,}; ask for at most "
                f"{MOST_TOGETHER:,} at once"
            )
        seed = given.whole("seed", 0, 2**64 - 1, secrets.randbits(63))
        seeds = tuple(derive_seed(seed, "sample", number) for number in range(count))
        key = (
            given.number("temperature", 0, 100, 1.0),
            given.number("top_p", 1e-6, 1, 1.0),
            max(0, given.whole("top_k", -1, 1 << 30, -1)),
        )
        top_of_prompt, top_of_samples, alternatives = (
            body.whole(name, 0, MOST_TOP, 0)
            for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
        )
        before = len(prompt) - 1  # the first has no log-probability
        targets = body.table("target_prompt_logprobs", before)
        if targets is not None:
            ids = targets.ids[targets.ids >= 0]
            check_ids(ids, outside.vocabulary, outside.tokenizer, "target_prompt_logprobs")
        scored = body.whole("prompt_logprobs_last_n", 1, max(1, before), max(1, before))
        with_prompt = body.truth("prompt_logprobs")
        scored = min(before, scored) if with_prompt or top_of_prompt else 0
        asked = SampleAsked(
            prompt, seeds, most, stops_of(given), scored, with_prompt, key[0], seed,
            top_of_prompt, top_of_samples, alternatives, targets,
        )  # fmt: skip
        if asked.cells > MOST_CELLS:
            raise ValueError(
                f"topk_prompt_logprobs, topk_sample_logprobs, prompt_alt_tokens_k: give "
                f"{asked.cells:,} log-probabilities; ask for at most {MOST_CELLS:,} at once"
            )
        return asked, key

    def completed(
        self, source: Asked, every: Sequence[SampleAsked], sampler: Any
    ) -> Sequence[Result]:
        """Completions for several requests at once, with their log-probabilities."""
        outside = self.outside
        prompts = [
            RolloutPrompt(each.prompt, each.seeds, each.most, self.ends(each.stops))
            for each in every
        ]
        most = max(each.most for each in every)
        stops = outside.tokenizer.eos_token_ids
        found = outside.sampled(source, prompts, sampler, stops, most)
        scores: list[np.ndarray] = []
        for start in range(0, len(found), SCORED_TOGETHER):
            part = found[start : start + SCORED_TOGETHER]
            texts = [text_to_score(every[c.prompt], c.tokens) for c in part]
            scores += outside.log_probabilities(source, texts)
        answers: list[dict[int, SampledTokens]] = [{} for _ in every]
        of_prompts: list[np.ndarray | None] = [None] * len(every)
        for completion, values in zip(found, scores, strict=True):
            asked, count = every[completion.prompt], len(completion.tokens)
            best = None
            if asked.top_of_samples:
                whole = np.append(asked.prompt, np.array(completion.tokens, np.int32))
                choose = top(asked.top_of_samples)
                best = outside.likely(source, whole, len(asked.prompt), choose)
            answers[completion.prompt][completion.sample] = SampledTokens(
                completion.tokens, values[len(values) - count :], completion.stopped, best
            )
            if asked.with_prompt:
                scored = np.full(len(asked.prompt), np.nan, np.float32)
                scored[len(scored) - asked.scored :] = values[: len(values) - count]
                of_prompts[completion.prompt] = scored
        return [
            Result(
                tinker_wire.sample_answer(
                    [group[s] for s in sorted(group)],
                    self.scored_prompt(source, asked, logprobs),
                    len(asked.prompt),
                ),
                True,
            )
            for asked, group, logprobs in zip(every, answers, of_prompts, strict=True)
        ]

    def scored_prompt(
        self, source: Asked, asked: SampleAsked, logprobs: np.ndarray | None
    ) -> ScoredPrompt:
        """The answer on a prompt; logprobs: as of `ScoredPrompt`."""
        outside, prompt = self.outside, asked.prompt
        best = others = targets = None
        if asked.top_of_prompt and asked.scored:
            choose = top(asked.top_of_prompt)
            best = outside.likely(source, prompt, len(prompt) - asked.scored, choose)
        if asked.alternatives and len(prompt) > 1:
            choose = drawn(asked.alternatives, asked.seed, asked.temperature)
            others = outside.likely(source, prompt, 1, choose)
        if (table := asked.targets) is not None:
            wanted, values = table.ids >= 0, np.zeros(len(table.ids), np.float32)
            rows, ids = table.rows[wanted].astype(np.int32), table.ids[wanted].astype(np.int32)
            text = text_of_targets(prompt[:-1], rows, ids)
            values[wanted] = outside.log_probabilities(source, [text])[0]
            targets = table, values
        return ScoredPrompt(logprobs, best, targets, others)

    def ends(self, stops: tuple[Any, ...] | None) -> Callable[[Sequence[int]], bool] | None:
        """Return what says whether a completion ends; None: the tokens that end an answer."""
        if stops is None:
            return None
        tokens = frozenset(each for each in stops if isinstance(each, int))
        texts = tuple(each for each in stops if isinstance(each, str))
        longest = max((len(text.encode()) for text in texts), default=0)

        def ends(found: Sequence[int]) -> bool:
            if found[-1] in tokens:
                return True
            # A token has at least one byte, but for those that only complete a character.
            last = list(found[-longest - 3 :]) if texts else []
            return bool(texts) and any(t in self.outside.tokenizer.decode(last) for t in texts)

        return ends

    # -- results

    async def result(self, body: RequestFields) -> Response:
        id = body.text("request_id", most=4000)
        job = self.jobs.find(id)
        if job is None:
            return JSONResponse({"detail": f"request {shortened(id)}: is not here"}, 410)
        self.polls += 1
        try:
            # They must leave connections to others.
            patience_s = POLL_S if self.polls <= web.CONNECTIONS // 2 else CROWDED_POLL_S
            if not await self.is_done(job, patience_s):
                again = {"type": "try_again", "request_id": id, "queue_state": "active"}
                return JSONResponse(again)
        finally:
            self.polls -= 1
        assert job.result is not None
        kind = "application/x-protobuf" if job.result.is_proto else "application/json"
        return Response(job.result.body, media_type=kind)

    async def is_done(self, job: QueuedJob, patience_s: float) -> bool:
        """Return whether a job is done within some seconds."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(arrived.set)

        with self.jobs.telling(job, tell), contextlib.suppress(TimeoutError):
            await asyncio.wait_for(arrived.wait(), patience_s)
        return job.done.is_set()


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """The contents of a file, which is closed."""
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def new_name() -> str:
    """A name for a session."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"tinker-{stamp}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Links:
    """Addresses that are signed, so that whoever has one needs no token."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def signed(self, path: str, until: int) -> str:
        """A path with its query, good until a time, in seconds since 1970."""
        return f"{path}?until={until}&signature={self.signature(path, until)}"

    def signature(self, path: str, until: int) -> str:
        return hmac.new(self.secret, f"{path}?{until}".encode(), hashlib.sha256).hexdigest()

    def allows(self, target: str) -> bool:
        """Return whether a path with its query was signed here, and not too long ago."""
        found = LINK.fullmatch(target)
        if found is None or int(found[2]) < time.time():
            return False
        return secrets.compare_digest(found[3], self.signature(found[1], int(found[2])))


class NotHere(Exception):
    """A request names something that is not here."""


class Gone(Exception):
    """A client need not ask for this again."""


def stops_of(given: RequestFields) -> tuple[Any, ...] | None:
    """The tokens or texts that end a completion. Raises ValueError."""
    stop = given.body.get("stop")
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > admission.STOP_WORDS:
        raise ValueError(f"stop: give at most {admission.STOP_WORDS} texts or token ids")
    for each in stops:
        is_text = isinstance(each, str) and 0 < len(each) <= admission.STOP_CHARACTERS
        if not is_text and type(each) is not int:
            raise ValueError(
                f"stop: give texts of 1 to {admission.STOP_CHARACTERS} characters, or token ids"
            )
    admission.check_values({"stop": stops})  # what fails later fails the samples of others, too
    return tuple(stops)


def alone(work: Callable[[Any], Result]) -> Callable[[Sequence[Any]], Sequence[Result]]:
    """The work of a job that is done by itself."""
    return lambda every: [work(each) for each in every]


def text_to_score(asked: SampleAsked, tokens: Sequence[int]) -> OutsideText:
    """The text of a completion. Its targets are its tokens, and the `scored` ones before them."""
    whole = np.append(asked.prompt, np.array(tokens, np.int32)).astype(np.int32)
    start = len(asked.prompt) - 1 - asked.scored
    positions = np.arange(start, len(whole) - 1, dtype=np.int32)
    return text_of_targets(whole[:-1], positions, whole[positions + 1])


def text_of_targets(tokens: np.ndarray, positions: np.ndarray, targets: np.ndarray) -> OutsideText:
    """A text of which only log-probabilities are wanted."""
    zeros = np.zeros(len(positions), np.float32)
    columns: Columns = dict.fromkeys(("advantages", "old", "clip_low", "clip_high"), zeros)
    return OutsideText(tokens, positions, targets, columns, zeros == 0)


# Routes


def future(job: QueuedJob, model: str | None = None, sequences: list[str] | None = None) -> object:
    found: dict[str, Any] = {"request_id": job.id}
    if model is not None:
        found["model_id"] = model
    if sequences is not None:
        found["sample_sequence_ids"] = sequences
    return found


def refused(status: int, message: str) -> Response:
    return JSONResponse({"detail": shown(message, 500)}, status)


def refusal_of(error: Exception) -> Response:
    """The answer to a request that raised this."""
    match error:
        case ValueError() | UserError():
            return refused(422, first_line(error))
        case NotHere():
            return refused(404, str(error))
        case Gone():
            return refused(410, str(error))
        case Full():
            return refused(429, "too many requests wait; ask again later")
        case OSError():  # a disk that is full, or a folder that is being replaced
            reason = error.strerror or shortened(first_line(error), 200)
            return refused(500, f"a file cannot be read or written ({reason})")
    raise error


def routes_of(service: Service) -> list[Route]:
    """The routes of the API."""

    values = admission.VALUES + service.outside.longest
    reading = asyncio.Lock()  # one at a time, so that their memory is counted

    async def answered(request: Request, answer: Callable[[RequestFields], Any]) -> Response:
        fields = RequestFields({})
        try:
            fields = RequestFields(admission.parse(await request.body(), values))
            found = answer(fields)
            if isinstance(found, QueuedJob):
                found = future(found)
            elif isinstance(found, tuple):
                found = future(found[0], sequences=found[1])
            return await found if asyncio.iscoroutine(found) else JSONResponse(found)
        except Exception as error:
            if isinstance(error, ValueError | UserError):
                service.pass_over(fields.body.get("model_id"), fields.body.get("seq_id"))
            return refusal_of(error)

    def post(path: str, answer: Callable[[RequestFields], Any]) -> Route:
        async def respond(request: Request) -> Response:
            return await answered(request, answer)

        return Route(f"/api/v1/{path}", respond, methods=["POST"])

    def get(path: str, answer: Callable[[dict[str, Any]], object], method: str = "GET") -> Route:
        async def respond(request: Request) -> Response:
            try:
                found = answer({**request.query_params, **request.path_params})
                return found if isinstance(found, Response) else JSONResponse(found)
            except Exception as error:
                return refusal_of(error)

        return Route(f"/api/v1/{path}", respond, methods=[method])

    def read(request: Request, body: bytes) -> GradientsAsked:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding not in ("identity", "zstd"):
            raise ValueError(f"content-encoding {shown(encoding)}: give zstd, or none")
        return tinker_wire.gradients_asked(
            tinker_wire.decompressed(body) if encoding == "zstd" else body
        )

    async def gradients(request: Request) -> Response:
        try:
            body = await request.body()
            async with reading:
                asked = await to_thread.run_sync(read, request, body)
            return JSONResponse(future(service.gradients(asked), asked.model_id))
        except Exception as error:
            if isinstance(error, tinker_wire.RefusedInTurn):
                service.pass_over(error.model_id, error.seq_id)
            return refusal_of(error)

    async def addresses(request: Request) -> Response:
        try:
            asked, server = request.path_params, str(request.base_url).rstrip("/")
            return JSONResponse(service.urls(asked["id"], asked["name"], server))
        except Exception as error:
            return refusal_of(error)

    def cancel(body: RequestFields) -> object:
        service.jobs.cancel(body.text("request_id", most=4000))
        return {}

    own, saved = service.outside, service.saved
    capabilities = {
        "supported_models": [
            {
                "model_name": service.name,
                "max_context_length": own.longest,
                "trainable": True,
                "sampleable": True,
            }
        ]
    }
    return [
        get("healthz", lambda _: {"status": "ok"}),
        get("get_server_capabilities", lambda _: capabilities),
        get("sessions/{name}", lambda asked: service.session_facts(asked["name"])),
        get("sessions/{name}/finish", lambda asked: service.finish(asked["name"]), "POST"),
        get("training_runs", lambda asked: service.runs(*page_of(asked))),
        get("files/{path:path}", lambda asked: service.file(asked["path"])),
        Route(
            "/api/v1/training_runs/{id}/checkpoints/{name:path}/external_weights_urls", addresses
        ),
        get(
            "training_runs/{id}/checkpoints/{name:path}/ttl",
            lambda asked: saved.keep(asked["id"], asked["name"]),
            "PUT",
        ),
        get("training_runs/{id}", lambda asked: saved.run_facts(asked["id"], service.name)),
        get("training_runs/{id}/checkpoints", lambda asked: checkpoints(saved, [asked["id"]])),
        get("checkpoints", lambda asked: checkpoints(saved, saved.models(), *page_of(asked))),
        get(
            "training_runs/{id}/checkpoints/{name:path}",
            lambda asked: saved.delete(asked["id"], asked["name"]),
            "DELETE",
        ),
        post("copy_weights", service.copy),
        get("samplers/{name:path}", lambda found: service.sampler(found["name"])),
        post("client/config", lambda _: CLIENT),
        post("client/dynamic_config", lambda _: {"sample_cancel_enabled": True}),
        post("telemetry", lambda _: {"status": "accepted"}),
        post("create_session", service.create_session),
        post("session_heartbeat", service.heartbeat),
        post("create_model", service.create_model),
        post("unload_model", service.unload),
        post("get_info", service.info),
        Route("/api/v1/forward_backward", gradients, methods=["POST"]),
        post("optim_step", service.update),
        post("save_weights", service.save),
        post("save_weights_for_sampler", service.save_sampler),
        post("save_weights_external", service.save_external),
        post("load_weights", service.load),
        post("weights_info", service.weights_info),
        post("create_sampling_session", service.create_sampler),
        post("asample", service.sample),
        post("retrieve_future", service.result),
        post("cancel_future", cancel),
    ]


def checkpoints(
    saved: SavedModels, models: Iterable[str], first: int = 0, most: int = 1 << 20
) -> object:
    """The saved models of some models, on a page."""
    every = [each for model in models for each in saved.of_model(model)]
    part = [each.facts for each in every[first : first + most]]
    cursor = {"offset": first, "limit": most, "total_count": len(every)}
    return {"checkpoints": part, "cursor": cursor}


def page_of(asked: dict[str, Any]) -> tuple[int, int]:
    """(offset, limit) of a request. Raises UserError."""
    try:
        first, most = int(asked.get("offset", 0)), int(asked.get("limit", 20))
    except ValueError as error:
        raise UserError("offset, limit: give whole numbers") from error
    return max(0, first), max(0, min(most, 1000))


def gate_of(is_local: bool, token: str, links: Links) -> Gate:
    """The rule by which clients may use the server: on this machine all, else those with `token`,
    which they send as their API key, or with an address of `links`."""

    def check(head: RequestHead) -> None:
        headers = head.headers
        web.check_origin(headers, Origins())
        host = headers.get("host")
        if host is not None and is_local:
            web.check_host(host, web.is_own)
        given = headers.get("x-api-key", "")
        has_token = secrets.compare_digest(given.encode(), token.encode())
        if token and not (has_token or links.allows(head.target)):
            raise RequestRefused(401, "give the token of this server as TINKER_API_KEY")

    def refusal(found: RequestRefused, _: Headers) -> Response:
        return refused(found.status, found.message)

    return Gate(("GET", "POST", "PUT", "DELETE"), check, refusal)


def serve(listener: socket.socket, service: Service, token: str, received: Sequence[int]) -> None:
    """Answer requests until there is a signal in `received`.

    listener: from `server.listen`. Raises RunError if the work fails.
    """

    def check_stop() -> None:
        if received:
            raise RunError("the server stops")

    service.outside.check_stop = check_stop
    gate = gate_of(web.is_local(listener), token, service.links)
    server = WebServer(listener, routes_of(service), gate)
    try:
        service.jobs.run(lambda: bool(received))  # in this thread, to which arrays of MLX belong
    finally:
        server.stop()
    service.end_all()
