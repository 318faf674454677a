"""Serves Tinker's training API on this machine: other people's loops, under our memory plan.

See docs/tinker.md for what is supported. `tinker_jobs` orders the work, `tinker_wire` reads and
writes bytes, `training.outside` computes.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from your_ai.data.target_columns import Columns
from your_ai.errors import UserError, first_line
from your_ai.gates.text import counted, shortened
from your_ai.gates.token_ids import check_ids
from your_ai.generation.rollouts import RolloutPrompt, sampler_of
from your_ai.rng import derive_seed
from your_ai.serving import admission, tinker_wire, web
from your_ai.serving.tinker_jobs import Full, Job, Jobs, Result
from your_ai.serving.tinker_saved import SAMPLERS, WEIGHTS, Saved, SavedModels
from your_ai.serving.tinker_wire import Fields, GradientsAsked, Sampled
from your_ai.serving.web import Gate, Origins, RequestRefused, WebServer
from your_ai.training.outside import Adam, Model, Outside, Shape, Text, shape_in

Work = Callable[[Model], Result]  # of a job of a model
POLL_S = 20.0  # that a request for a result waits
MOST_RANK = 512
MOST_SAMPLES = 1024  # of a request
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
    with_prompt: bool
    """Whether the log-probabilities of the prompt are asked for."""


@dataclass
class Session:
    """A client."""

    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


class Service:
    """What the routes do."""

    def __init__(self, outside: Outside, jobs: Jobs, folder: Path, name: str = "") -> None:
        """folder: of the runs. name: what loops call the base; by default as its user does."""
        self.outside, self.jobs, self.saved = outside, jobs, SavedModels(folder)
        self.name = name or outside.config.model
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Saved | None] = {}
        """By the id of a sampling session; None for the base."""

    # -- sessions and models

    def create_session(self, body: Fields) -> object:
        name = new_name()
        self.sessions[name] = Session()
        return {"type": "create_session", "session_id": name}

    def session(self, body: Fields) -> tuple[str, Session]:
        name = body.text("session_id")
        found = self.sessions.get(name)
        if found is None:
            raise Missing(f"session {shortened(name)}: is not here; this server was restarted")
        return name, found

    def model(self, name: str) -> Model:
        found = self.models.get(name)
        if found is None:
            raise UserError(f"model {shortened(name)}: is not here, or was unloaded")
        return found

    def model_name(self, body: Fields) -> str:
        session, found = self.session(body)
        name = f"{session}:train:{body.whole('model_seq_id', 0, 1 << 30)}"
        if name not in found.models:
            found.models.append(name)
        return name

    def create_model(self, body: Fields) -> Job:
        name = self.model_name(body)
        self.check_base(body.text("base_model"))
        if body.body.get("optimizer_config", {}).get("type", "adamw") != "adamw":
            raise ValueError("optimizer_config: only adamw is here")
        lora = body.fields("lora_config")
        rank = lora.whole("rank", 1, MOST_RANK)
        seed = lora.whole("seed", 0, 2**63 - 1, derive_seed(0, name) >> 1)
        mlp, attention = lora.truth("train_mlp", True), lora.truth("train_attn", True)
        shape = Shape(rank, seed, mlp, attention)
        self.check_rank(rank)

        def work(_: Any) -> Result:
            self.models[name] = self.outside.create(shape, self.saved.folder_of(name))
            return Result.of({"type": "create_model", "model_id": name})

        return self.add(f"{name}:0", None, alone(work))

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
        found = self.sessions.get(name, Session())
        own = [each for each in found.models if each in self.models]

        def work(_: Any) -> Result:
            self.end(own)
            return Result.of({})

        if own:
            self.add(f"{name}:finish", None, alone(work))
        return {}

    def end(self, models: Iterable[str]) -> None:
        for name in models:
            if (model := self.models.pop(name, None)) is not None:
                self.outside.end(model)
                self.outside.forget(model)

    def end_all(self) -> None:
        self.end(list(self.models))

    def session_facts(self, name: str) -> object:
        found = self.sessions.get(name)
        if found is None:
            raise Missing(f"session {shortened(name)}: is not here")
        return {"training_run_ids": found.models, "sampler_ids": found.samplers}

    def runs(self, first: int, most: int) -> object:
        every = list(self.saved.models())
        part = [self.saved.run_facts(name, self.name) for name in every[first : first + most]]
        cursor = {"offset": first, "limit": most, "total_count": len(every)}
        return {"training_runs": part, "cursor": cursor}

    def copy(self, body: Fields) -> object:
        is_of_session = body.body.get("session_id") is not None
        name = self.model_name(body) if is_of_session else f"{new_name()}:train:0"
        return {"tinker_path": self.saved.copy(body.text("source_path"), name).path}

    def unload(self, body: Fields) -> Job:
        name = body.text("model_id")

        def work(_: Any) -> Result:
            self.outside.forget(self.model(name))
            del self.models[name]
            return Result.of({"type": "unload_model", "model_id": name})

        return self.add(f"{name}:unload", None, alone(work))

    def info(self, body: Fields) -> object:
        name = body.text("model_id")
        shape = self.model(name).shape
        about = {
            "arch": self.outside.architecture,
            "model_name": self.name,
            "tokenizer_id": str(self.outside.base),
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

    def gradients(self, message: Any) -> Job:
        def prepared() -> Work:
            asked = tinker_wire.gradients_asked(message)
            self.outside.check(asked.texts)
            return lambda model: self.gradients_of(model, asked)

        return self.in_turn(message.model_id, message.seq_id, prepared)

    def gradients_of(self, model: Model, asked: GradientsAsked) -> Result:
        loss, found = self.outside.add_gradients(
            model, asked.texts, asked.loss, gradients=not asked.forward_only
        )
        body = tinker_wire.gradients_answer({"loss:sum": loss}, found, asked.shapes)
        return Result(body, is_proto=True)

    def update(self, body: Fields) -> Job:
        def prepared() -> Work:
            given = body.fields("adam_params")
            adam = Adam(
                learning_rate=given.number("learning_rate", 0, 1e3, 1e-4),
                beta1=given.number("beta1", 0, 0.999999, 0.9),
                beta2=given.number("beta2", 0, 0.99999999, 0.95),
                eps=given.number("eps", 0, 1, 1e-12),
                weight_decay=given.number("weight_decay", 0, 1e3, 0.0),
                grad_clip_norm=given.number("grad_clip_norm", 0, 1e30, 0.0),
            )
            return lambda model: Result.of({"metrics": self.outside.update(model, adam)})

        return self.in_turn(*turn_of(body), prepared)

    def in_turn(self, name: str, number: int, prepare: Callable[[], Work]) -> Job:
        """A job of a model, in the order of its numbers. Raises what `prepare` raises; what was
        refused takes its turn, too, as those after it wait for that."""
        id = f"{name}:{number}"
        try:
            work = prepare()
        except (UserError, ValueError) as error:
            refusal = Result.failed(shortened(first_line(error), 500), "user")
            self.add(id, None, alone(lambda _: refusal), name, number)
            raise
        return self.add(id, None, alone(lambda _: work(self.model(name))), name, number)

    def add(
        self,
        id: str,
        asked: Any,
        work: Callable[[Sequence[Any]], Sequence[Result]],
        model: str | None = None,
        number: int | None = None,
        together: Any = None,
    ) -> Job:
        return self.jobs.add(Job(id, asked, work, together), model, number or 0)

    # -- saved models

    def save(self, body: Fields) -> Job:
        def prepared() -> Work:
            target = self.saved.target(body.text("model_id"), WEIGHTS, body.text("path", "state"))

            def work(model: Model) -> Result:
                self.outside.save(model, target.folder)
                return Result.of({"type": "save_weights", "path": target.path})

            return work

        return self.in_turn(*turn_of(body), prepared)

    def save_sampler(self, body: Fields) -> Job:
        model_id, turn = turn_of(body)
        number = body.body.get("sampling_session_seq_id")

        def prepared() -> Work:
            name = body.text("path", "") or f"snapshot-{turn}"
            target = self.saved.target(model_id, SAMPLERS, name)

            def work(model: Model) -> Result:
                self.outside.save(model, target.folder, with_optimizer=False)
                answer = {"type": "save_weights_for_sampler", "path": target.path}
                if isinstance(number, int):
                    del answer["path"]
                    session = model_id.partition(":")[0]
                    answer["sampling_session_id"] = self.new_sampler(session, number, target)
                return Result.of(answer)

            return work

        return self.in_turn(model_id, turn, prepared)

    def load(self, body: Fields) -> Job:
        if "session_id" not in body.body:
            return self.load_again(body)
        path, with_optimizer = body.text("path"), body.truth("optimizer")
        folder = self.saved.find(path).folder
        name = self.model_name(body)

        def work(_: Any) -> Result:
            shape = shape_in(folder)
            self.check_rank(shape.rank)
            self.models[name] = made = self.outside.create(shape, self.saved.folder_of(name))
            self.outside.load(made, folder, with_optimizer=with_optimizer)
            return Result.of({"type": "load_weights", "path": path, "model_id": name})

        return self.add(f"{name}:0", None, alone(work))

    def load_again(self, body: Fields) -> Job:
        """Load into a model that is there."""
        id, number = turn_of(body)

        def prepared() -> Work:
            path, with_optimizer = body.text("path"), body.truth("optimizer")
            folder = self.saved.find(path).folder

            def work(model: Model) -> Result:
                self.outside.load(model, folder, with_optimizer=with_optimizer)
                return Result.of({"type": "load_weights", "path": path, "model_id": id})

            return work

        return self.in_turn(id, number, prepared)

    def weights_info(self, body: Fields) -> object:
        shape = self.saved.shape(body.text("tinker_path"))
        return {
            "base_model": self.name,
            "is_lora": True,
            "lora_rank": shape.rank,
            "train_unembed": False,
            "train_mlp": shape.train_mlp,
            "train_attn": shape.train_attn,
        }

    # -- samples

    def new_sampler(self, session: str, number: int, saved: Saved | None) -> str:
        name = f"{session}:sample:{number}"
        self.samplers[name] = saved
        self.sessions.setdefault(session, Session()).samplers.append(name)
        return name

    def create_sampler(self, body: Fields) -> object:
        session, _ = self.session(body)
        number, path = (
            body.whole("sampling_session_seq_id", 0, 1 << 40),
            body.text("model_path", ""),
        )
        if not path:
            self.check_base(body.text("base_model"))
        name = self.new_sampler(session, number, self.saved.find(path) if path else None)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler(self, name: str) -> object:
        if name not in self.samplers:
            raise Missing(f"sampler {shortened(name)}: is not here")
        saved, found = self.samplers[name], {"sampler_id": name, "base_model": self.name}
        return found if saved is None else {**found, "model_path": saved.path}

    def sample(self, body: Fields) -> tuple[Job, list[str]]:
        name, source = self.source(body)
        asked, key = self.sample_asked(body)
        number = body.whole("seq_id", 0, 2**63 - 1, time.monotonic_ns())
        sampler = sampler_of(*key)

        def work(every: Sequence[SampleAsked]) -> Sequence[Result]:
            return self.completed(source, every, sampler)

        id = f"{name}:{number}"
        job = self.add(id, asked, work, together=("sample", source, key))
        return job, [f"{id}:{each}" for each in range(len(asked.seeds))]

    def source(self, body: Fields) -> tuple[str, Path | None]:
        """The name of a sampler, and the folder of its adapters; None for the base."""
        if "sampling_session_id" in body.body:
            name = body.text("sampling_session_id")
            if name not in self.samplers:
                raise UserError(f"sampler {shortened(name)}: is not here; create it again")
            saved = self.samplers[name]
            return name, None if saved is None else saved.folder
        if path := body.text("model_path", ""):
            return path, self.saved.find(path).folder
        self.check_base(body.text("base_model"))
        return "base", None

    def sample_asked(self, body: Fields) -> tuple[SampleAsked, tuple[float, float, int]]:
        prompt = body.tokens("prompt")
        given, outside = body.fields("sampling_params"), self.outside
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if body.whole(name, 0, 1 << 20, 0):
                raise ValueError(f"{name}: is not supported here")
        if "target_prompt_logprobs" in body.body:
            raise ValueError("target_prompt_logprobs: is not supported here")
        check_ids(prompt, outside.vocabulary, outside.tokenizer, "prompt")
        room = outside.longest + 1 - len(prompt)
        most = given.whole("max_tokens", 1, 1 << 30, max(1, room))
        if most > room:
            raise ValueError(
                f"the prompt has {counted(len(prompt), 'token')} and max_tokens is {most}; this "
                f"server was planned for {outside.longest + 1} together (--max-seq-length)"
            )
        stop = given.body.get("stop")
        stops = None if stop is None else tuple([stop] if isinstance(stop, str) else stop)
        for each in stops or ():
            if not isinstance(each, str | int) or isinstance(each, bool) or each == "":
                raise ValueError("stop: give texts or token ids")
        count = body.whole("num_samples", 1, MOST_SAMPLES, 1)
        seed = given.whole("seed", 0, 2**64 - 1, secrets.randbits(63))
        seeds = tuple(derive_seed(seed, "sample", number) for number in range(count))
        key = (
            given.number("temperature", 0, 100, 1.0),
            given.number("top_p", 1e-6, 1, 1.0),
            max(0, given.whole("top_k", -1, 1 << 30, -1)),
        )
        with_prompt = body.truth("prompt_logprobs")
        return SampleAsked(prompt, seeds, most, stops, with_prompt), key

    def completed(
        self, source: Path | None, every: Sequence[SampleAsked], sampler: Any
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
        texts = [text_to_score(every[c.prompt], c.tokens) for c in found]
        scores = outside.log_probabilities(source, texts)
        answers: list[dict[int, Sampled]] = [{} for _ in every]
        of_prompts: list[np.ndarray | None] = [None] * len(every)
        for completion, values in zip(found, scores, strict=True):
            asked, count = every[completion.prompt], len(completion.tokens)
            answers[completion.prompt][completion.sample] = Sampled(
                completion.tokens, values[len(values) - count :], completion.stopped
            )
            if asked.with_prompt:
                before = values[: len(values) - count]
                of_prompts[completion.prompt] = np.append([np.nan], before)
        return [
            Result(tinker_wire.sample_answer([group[s] for s in sorted(group)], prompt), True)
            for group, prompt in zip(answers, of_prompts, strict=True)
        ]

    def ends(self, stops: tuple[Any, ...] | None) -> Callable[[Sequence[int]], bool] | None:
        """Whether a completion ends; None for the tokens that end an answer."""
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

    async def result(self, body: Fields) -> Response:
        id = body.text("request_id", most=4000)
        job = self.jobs.find(id)
        if job is None:
            return JSONResponse({"detail": f"request {shortened(id)}: is not here"}, 410)
        until = time.monotonic() + POLL_S
        while not job.done.is_set():
            if time.monotonic() > until:
                again = {"type": "try_again", "request_id": id, "queue_state": "active"}
                return JSONResponse(again)
            await asyncio.sleep(0.005 if time.monotonic() < until - POLL_S + 1 else 0.05)
        assert job.result is not None
        kind = "application/x-protobuf" if job.result.is_proto else "application/json"
        return Response(job.result.body, media_type=kind)


def new_name() -> str:
    """A name for a session."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"tinker-{stamp}-{secrets.token_hex(3)}"


def turn_of(body: Fields) -> tuple[str, int]:
    """The model of a request, and its number among those of the model. Raises ValueError."""
    return body.text("model_id"), body.whole("seq_id", 1, 1 << 40)


class Missing(Exception):
    """What a request names is not here."""


def alone(work: Callable[[Any], Result]) -> Callable[[Sequence[Any]], Sequence[Result]]:
    """The work of a job that is done by itself."""
    return lambda every: [work(each) for each in every]


def text_to_score(asked: SampleAsked, tokens: Sequence[int]) -> Text:
    """The text of a completion. Its targets are its tokens, or with `with_prompt` all tokens but
    the first."""
    whole = np.append(asked.prompt, np.array(tokens, np.int32)).astype(np.int32)
    start = 0 if asked.with_prompt else len(asked.prompt) - 1
    positions = np.arange(start, len(whole) - 1, dtype=np.int32)
    zeros = np.zeros(len(positions), np.float32)
    columns: Columns = dict.fromkeys(("advantages", "old", "clip_low", "clip_high"), zeros)
    return Text(whole[:-1], positions, whole[positions + 1], columns, zeros == 0)


# Routes


def future(job: Job, model: str | None = None, sequences: list[str] | None = None) -> object:
    found: dict[str, Any] = {"request_id": job.id}
    if model is not None:
        found["model_id"] = model
    if sequences is not None:
        found["sample_sequence_ids"] = sequences
    return found


def refused(status: int, message: str) -> Response:
    return JSONResponse({"detail": message}, status)


def routes_of(service: Service) -> list[Route]:
    """The routes of the API."""

    async def answered(request: Request, answer: Callable[[Fields], Any]) -> Response:
        try:
            found = answer(Fields(admission.parse(await request.body())))
            if isinstance(found, Job):
                found = future(found)
            elif isinstance(found, tuple):
                found = future(found[0], sequences=found[1])
            return await found if asyncio.iscoroutine(found) else JSONResponse(found)
        except (ValueError, UserError) as error:
            return refused(422, shortened(first_line(error), 500))
        except Missing as error:
            return refused(404, str(error))
        except Full:
            return refused(429, "too many requests wait; ask again later")

    def post(path: str, answer: Callable[[Fields], Any]) -> Route:
        async def respond(request: Request) -> Response:
            return await answered(request, answer)

        return Route(f"/api/v1/{path}", respond, methods=["POST"])

    def get(path: str, answer: Callable[[dict[str, Any]], object], method: str = "GET") -> Route:
        async def respond(request: Request) -> Response:
            try:
                return JSONResponse(answer({**request.query_params, **request.path_params}))
            except UserError as error:
                return refused(422, shortened(first_line(error), 500))
            except Missing as error:
                return refused(404, str(error))

        return Route(f"/api/v1/{path}", respond, methods=[method])

    async def gradients(request: Request) -> Response:
        try:
            body = await request.body()
            if request.headers.get("content-encoding") == "zstd":
                body = tinker_wire.decompressed(body)
            message = tinker_wire.gradients_message(body)
            return JSONResponse(future(service.gradients(message), message.model_id))
        except (ValueError, UserError) as error:
            return refused(422, shortened(first_line(error), 500))
        except Full:
            return refused(429, "too many requests wait; ask again later")

    def cancel(body: Fields) -> object:
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
        post("session_heartbeat", lambda body: service.session(body) and HEARTBEAT),
        post("create_model", service.create_model),
        post("unload_model", service.unload),
        post("get_info", service.info),
        Route("/api/v1/forward_backward", gradients, methods=["POST"]),
        post("optim_step", service.update),
        post("save_weights", service.save),
        post("save_weights_for_sampler", service.save_sampler),
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


HEARTBEAT = {"type": "session_heartbeat"}


def gate_of(is_local: bool, token: str) -> Gate:
    """The rule by which clients may use the server: on this machine all, else those with `token`,
    which they send as their API key."""

    def check(headers: Headers) -> None:
        web.check_origin(headers, Origins())
        host = headers.get("host")
        if host is not None and is_local:
            web.check_host(host, web.is_own)
        given = headers.get("x-api-key", "")
        if token and not secrets.compare_digest(given.encode(), token.encode()):
            raise RequestRefused(401, "give the token of this server as TINKER_API_KEY")

    def refusal(found: RequestRefused, _: Headers) -> Response:
        return refused(found.status, found.message)

    return Gate(("GET", "POST", "DELETE"), check, refusal)


def serve(listener: socket.socket, service: Service, token: str, received: Sequence[int]) -> None:
    """Answer requests until there is a signal in `received`.

    listener: from `server.listen`. Raises RunError if the work fails.
    """
    gate = gate_of(web.is_local(listener), token)
    server = WebServer(listener, routes_of(service), gate)
    try:
        service.jobs.run(lambda: bool(received))  # in this thread, to which arrays of MLX belong
    finally:
        server.stop()
    service.end_all()
