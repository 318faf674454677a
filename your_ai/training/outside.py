"""Models that a training loop of other people trains, step by step, under one memory plan.

The loop says what is computed, and when: the gradients of a loss it names, an update, completions.
All models share the weights of one base. Only one of them is in memory: the others are in files, so
that the plan of one holds for any number.

Shapes: n tokens of a text, m of its targets.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from your_ai.config import TrainConfig
from your_ai.config.requests import TinkerRequest
from your_ai.data.batches import Batch
from your_ai.engine.measure_costs import measure_costs
from your_ai.engine.reload import reload_adapted
from your_ai.engine.weights import Opened, open_model
from your_ai.errors import RunError, UserError
from your_ai.export import peft
from your_ai.files import atomic_folder
from your_ai.gates.console import echo_error
from your_ai.gates.text import counted, size_text
from your_ai.gates.token_ids import check_ids, vocabulary_of
from your_ai.generation.likely import Chosen, TokensAtPlaces, likely
from your_ai.generation.rollouts import Completion, RolloutPrompt, Sampler, complete
from your_ai.hub.find import find_model
from your_ai.memory import allocator, probe
from your_ai.memory.budget import Measuring, budget_of, process_here, run_limit
from your_ai.memory.facts import facts_of
from your_ai.memory.governor import LARGE, MemoryObservation, Watch, acted, decide, policy_of
from your_ai.memory.guard import guarded
from your_ai.memory.limit import rounded_up
from your_ai.memory.plan import Budget, DoesNotFit, rows_of
from your_ai.memory.sample import MemorySample, in_gb
from your_ai.memory.workload import DataSizes, workload_of
from your_ai.nets import model
from your_ai.nets.numerics import compute_dtype
from your_ai.nets.saved_adapter import Trained, read_adapter
from your_ai.objectives.outside import GSPO, LOGPROBS, TOKEN_LOSSES, gspo_weights
from your_ai.run import checkpoint, child, events
from your_ai.run.folder import RunFolder, creating
from your_ai.training import optimizer
from your_ai.training.memory_actions import carry_out
from your_ai.training.outside_models import (
    ALPHA,
    SHAPE,
    Adam,
    Asked,
    Bench,
    Done,
    LoraShape,
    OutsideLog,
    OutsideModel,
    SharedBase,
)
from your_ai.training.outside_texts import OutsideText, TextPart, batches_of, loss_of, scatter
from your_ai.training.planned import write_plan
from your_ai.training.run_data import rollouts_planned


def outside_config(request: TinkerRequest) -> TrainConfig:
    """The settings for which the memory of a server is planned."""
    return TrainConfig(
        model=request.model,
        objective="grpo",  # its steps generate, score and train, as those of loops
        max_memory=request.max_memory,
        max_seq_length=request.max_seq_length,
        max_new_tokens=request.max_seq_length // 2,
        lora_rank=request.rank,
        batch_size=request.batch_size,
        rollouts=2,
        prompts_per_step=-(-request.samples // 2),
        dtype=request.dtype,
        plan=request.plan,
    )


class Outside:
    """Trains and asks the models of outside loops. All calls come from one thread."""

    def __init__(
        self,
        config: TrainConfig,
        server_bytes: int = 0,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        """config: the model, its limit, and the largest text and rank that are announced.
        server_bytes: of requests and answers that the process holds. tell: receives what is
        measured, if something is. Raises UserError if nothing fits."""
        self.config = config
        self.limit = run_limit(config)
        self.check_stop: Callable[[], None] = lambda: None
        """Called before each micro-batch and token; may raise."""
        folder = find_model(config.model)
        opened = open_model(folder, compute_dtype(config.dtype))
        self.tokenizer = opened.tokenizer()
        self.vocabulary = vocabulary_of(opened.network)
        self.architecture = str(opened.config.get("model_type", ""))
        self.budget = self.planned(opened, server_bytes, tell)
        chosen = self.budget.choice.option
        allocator.set_limits(
            self.limit.limit_bytes, chosen.needed_bytes, chosen.estimate.beside_bytes
        )
        self.base = SharedBase(folder, config, self.budget)
        self.policy, self.watch = policy_of(config, self.limit.limit_bytes), Watch()

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return self.config.max_seq_length

    # -- memory

    def planned(self, opened: Opened, server_bytes: int, tell: Callable[[str], object]) -> Budget:
        """The plan of the largest models that are announced, which holds for smaller ones. Raises
        UserError if none fits."""
        config = LoraShape(int(self.config.lora_rank), 0).config(self.config, opened.network)
        data = rollouts_planned(config, config.max_seq_length)
        process = process_here()
        workload = workload_of(
            config,
            facts_of(opened.folder, opened.dtype.size),
            DataSizes(lengths=tuple(data.lengths), prompt_tokens=data.prompt_tokens),
            replace(process, python_bytes=process.python_bytes + server_bytes),
            can_stream=opened.can_stream,
            vocabulary=model.vocabulary_sizes(opened.network, config),
        )
        assert workload.rollouts is not None
        # Each completion may have a prompt of its own.
        workload = replace(workload, rollouts=replace(workload.rollouts, group=1))
        measure = partial(measure_costs, opened.network, config, tell=tell, tensors=opened.tensors)
        try:
            return budget_of(
                config, workload, opened.dtype, self.limit, measuring=Measuring(measure)
            )
        except DoesNotFit as refusal:
            least, limit = in_gb(rounded_up(refusal.least_bytes)), in_gb(self.limit.limit_bytes)
            raise UserError(
                f"--max-memory: texts of {self.longest:,} tokens and rank {config.lora_rank} do "
                f"not fit into {limit}; at least {least} is needed; raise the limit, or lower "
                "--max-seq-length, --rank or --samples"
            ) from refusal

    def rows_at(self, tokens: int) -> int:
        return rows_of(self.budget.workload, self.budget.choice.option.plan, tokens)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Meanwhile, end this process before it exceeds its limit."""
        limit_bytes = self.limit.limit_bytes

        def end(held_bytes: int) -> None:
            with contextlib.suppress(BaseException):  # the process must end in any case
                echo_error(
                    f"error: --max-memory: the process used {size_text(held_bytes)} of "
                    f"{size_text(limit_bytes)} and ends before the limit; loops can go on from "
                    "what they saved; lower --max-seq-length, --batch-size or --samples"
                )
            os._exit(child.FAILED)

        with guarded(limit_bytes, end):
            yield

    def govern(self, of: OutsideModel, bench: Bench, sample: MemorySample) -> None:
        """Do what the policy says about memory after a step."""
        observation = MemoryObservation(
            step=of.step, sample=sample, highest_process_bytes=None, can_shrink=False,
            can_grow=False, baseline_bytes=self.budget.workload.process.python_bytes,
        )  # fmt: skip
        self.watch, actions, notices = decide(self.policy, self.watch, observation)
        for text in notices:
            of.log.write(events.Notice(text=text))

        def reload() -> int:
            return reload_adapted(bench.opened.network, bench.opened.tensors)

        for action in actions:
            if action.kind not in LARGE:
                done = carry_out(action, of.step, bench.built.engine, reload, of.log)
                self.watch = acted(self.policy, self.watch, action, *done)

    # -- models

    def create(self, shape: LoraShape, folder: Path) -> OutsideModel:
        """A new model whose run is in `folder`. Raises UserError."""
        bench = self.base.begin(shape)
        with creating(folder.name, self.settings_of(bench.config, folder.name, shape)):
            pass
        made = OutsideModel(shape, folder, OutsideLog(RunFolder(folder).events))
        self.base.adapters_of = self.base.states_of = made
        write_plan(self.budget, self.config, made.log)
        arrays = model.adapter_arrays(bench.opened.network)
        made.log.write(
            events.Started(
                step=0, steps=0, steps_per_epoch=0, model=self.config.model, rows=0,
                trainable_parameters=sum(array.size for array in arrays.values()),
                dtype=str(bench.opened.dtype).removeprefix("mlx.core."), plan=bench.built.plan,
                has_answers=False,
            )
        )  # fmt: skip
        return made

    def settings_of(self, config: TrainConfig, run: str, shape: LoraShape) -> TrainConfig:
        """The settings of the run of a model, for the commands that use it; config: its bench's."""
        return TrainConfig(
            model=config.model, run=run, max_memory=config.max_memory, dtype=config.dtype,
            max_seq_length=config.max_seq_length, batch_size=config.batch_size, seed=shape.seed,
            lora_rank=shape.rank, lora_alpha=ALPHA, lora_layers="all",
            lora_targets=config.lora_targets,
        )  # fmt: skip

    def end(self, of: OutsideModel) -> None:
        """Write the adapter of a model as the result of its run."""
        bench = self.base.ask(of)
        folder = RunFolder(of.folder)
        arrays = model.adapter_arrays(bench.opened.network)
        checkpoint.save_adapter(folder.adapter, arrays, bench.adapters.config, of.step)
        of.log.write(
            events.Finished(
                step=of.step, reason="done", adapter=str(folder.adapter), seconds=0.0,
                adapter_step=of.step,
            )
        )  # fmt: skip

    def export(
        self, of: OutsideModel, target: Path, beside: str, finish: Callable[[Path], object]
    ) -> None:
        """Write a model as it is now as a PEFT adapter to `target`, which is replaced, with the
        adapter of mlx-lm in its folder `beside`, and with this alone where PEFT lacks a layer.

        finish: called with the folder before it is there. Raises UserError.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        run = RunFolder(of.folder)
        with atomic_folder(target) as folder:
            self.base.save(of, folder / beside, with_optimizer=False)
            adapter = read_adapter(folder / beside)
            made = folder / f"{beside}.peft"
            try:
                peft.write(Trained(run, run.read_config(), adapter, self.base.folder), made)
            except UserError as error:
                if isinstance(error.__cause__, OSError):
                    raise
            else:
                for path in made.iterdir():
                    path.rename(folder / path.name)
                made.rmdir()
            (folder / beside / SHAPE).rename(folder / SHAPE)
            finish(folder)

    # -- what loops ask for

    def log_probabilities(self, of: Asked, texts: Sequence[OutsideText]) -> list[np.ndarray]:
        """(m,) float32 of the targets of each text. of: as in `sampled`."""
        bench = self.base.ask(of)
        found = [np.zeros(len(text.targets), np.float32) for text in texts]
        for batch, parts in batches_of(texts, self.rows_at, 0):
            self.check_stop()
            values = np.array(bench.built.engine.log_probabilities(batch))
            scatter(found, parts, values[: batch.trained_tokens])
        return found

    def add_gradients(
        self, of: OutsideModel, texts: Sequence[OutsideText], loss: str, *, gradients: bool = True
    ) -> tuple[float, list[np.ndarray]]:
        """Add the gradients of the sum of a loss to those of the model.

        Returns the loss, and (m,) float32 log-probabilities of the targets of each text.
        Raises UserError.
        """
        self.check(texts)
        bench = self.base.train(of)
        if loss == GSPO:
            return self.weighed_by_text(of, texts, gradients)
        if not gradients:
            found = self.log_probabilities(of, texts)
            return loss_of(texts, found, loss), found
        total, began = 0.0, time.perf_counter()
        found = [np.zeros(len(text.targets), np.float32) for text in texts]
        of.has_gradients = True
        try:
            for batch, parts in batches_of(texts, self.rows_at, TOKEN_LOSSES.index(loss)):
                total += self.add_batch(of, bench, batch, found, parts)
        except BaseException:
            # Some of these texts are in the sum, and it cannot be known of which targets.
            bench.gradients.clear()
            of.has_gradients, of.done = False, Done()
            raise
        of.done.loss += total
        of.done.seconds += time.perf_counter() - began
        return total, found

    def add_batch(
        self,
        of: OutsideModel,
        bench: Bench,
        batch: Batch,
        found: Sequence[np.ndarray],
        parts: list[TextPart],
    ) -> float:
        """Add the gradients of a micro-batch; returns its loss, and writes to `found`."""
        self.check_stop()
        sums = bench.built.engine.add_gradients(batch, 1.0, 0, bench.gradients)
        values, slots = sums.metrics[LOGPROBS]
        mx.eval(sums.loss, values, slots)
        at = np.array(slots)
        ordered = np.zeros(batch.trained_tokens, np.float32)
        ordered[at[at >= 0]] = np.array(values)[at >= 0]
        scatter(found, parts, ordered)
        of.done.tokens += batch.real_tokens
        of.done.padded_tokens += batch.tokens.size
        of.done.targets += batch.trained_tokens
        of.done.weight += float(np.abs(batch.columns["advantages"]).sum(dtype=np.float64))
        return float(sums.loss)

    def weighed_by_text(
        self, of: OutsideModel, texts: Sequence[OutsideText], gradients: bool
    ) -> tuple[float, list[np.ndarray]]:
        found = self.log_probabilities(of, texts)
        total, weighed = 0.0, []
        for text, values in zip(texts, found, strict=True):
            loss, weights = gspo_weights(values, text.columns, text.counts)
            total += loss
            columns = {**text.columns, "advantages": weights}
            weighed.append(text._replace(columns=columns))
        if gradients:
            self.add_gradients(of, weighed, TOKEN_LOSSES[0])
        return total, found

    def update(self, of: OutsideModel, adam: Adam) -> dict[str, float]:
        """One step of the optimizer with the gradients since the last; returns metrics.

        Raises UserError if there are no gradients, or if they are not finite; then nothing changes.
        """
        began, bench = time.perf_counter(), self.base.train(of)
        if not of.has_gradients:
            raise UserError("optim_step: there are no gradients; call forward_backward first")
        norm = float(optimizer.global_norm(bench.gradients))
        of.has_gradients = False
        try:
            if not np.isfinite(norm):
                raise UserError(
                    f"optim_step: the gradient norm is {norm}; the step changed nothing"
                )
            factor = optimizer.clip_factor(norm, adam.grad_clip_norm)
            update = self.update_of(bench, adam)
            update(bench.gradients, factor, adam.learning_rate)
        finally:
            bench.gradients.clear()
        mx.synchronize()
        of.step += 1
        try:
            self.write_step(of, adam, norm, time.perf_counter() - began, bench)
        except RunError as error:  # a full disk; the step is done, and its loop must know
            echo_error(f"warning: {error}")
        return {"grad_norm": norm}

    def write_step(
        self, of: OutsideModel, adam: Adam, norm: float, seconds: float, bench: Bench
    ) -> None:
        done, of.done = of.done, Done()
        sample = probe.read()
        mx.reset_peak_memory()
        of.log.write(
            events.Step(
                step=of.step, steps=of.step, epoch=1, loss=done.loss / (done.weight or 1),
                grad_norm=norm, learning_rate=adam.learning_rate, tokens=done.tokens,
                padded_tokens=done.padded_tokens, trained_tokens=done.targets,
                seconds=done.seconds + seconds, **asdict(sample),
            )
        )  # fmt: skip
        self.govern(of, bench, sample)

    def update_of(self, bench: Bench, adam: Adam) -> Callable[..., None]:
        """The compiled update of these settings, whatever the learning rate."""
        key = replace(adam, learning_rate=0.0, grad_clip_norm=0.0)
        if key not in bench.updates:
            bench.updates.clear()
            network, config = bench.opened.network, adam.config(self.config)
            fresh = optimizer.build_optimizer(config, {})
            fresh.rule.state["step"] = bench.optimizer.rule.state["step"]
            bench.optimizer = replace(bench.optimizer, rule=fresh.rule)
            bench.updates[key] = optimizer.make_update(network, bench.optimizer)
        return bench.updates[key]

    def sampled(
        self,
        of: Asked,
        prompts: Sequence[RolloutPrompt],
        sampler: Sampler,
        stop_tokens: Sequence[int],
        most: int,
    ) -> list[Completion]:
        """Completions of prompts, in waves. of: a model as it is now, or adapters that were saved.
        Raises UserError if there are none."""
        base, wave = self.base, self.budget.choice.option.plan.wave or 1
        if base.states_of is not None and base.states_of.has_gradients:
            base.put_states_away()  # the plan has no gradients beside completions
        bench = base.ask(of)
        network = bench.opened.network
        network.eval()

        def step(_: int) -> None:
            self.check_stop()

        found = list(complete(network, prompts, sampler, stop_tokens, most, wave, step))
        allocator.free(collect=False)
        return found

    def likely(self, of: Asked, tokens: np.ndarray, start: int, choose: Chosen) -> TokensAtPlaces:
        """Tokens at the places of a text from `start` on; of: as in `sampled`. There are no more
        logits at a time than the plan counts for completions."""
        network = self.base.ask(of).opened.network
        network.eval()
        self.check_stop()
        wave = self.budget.choice.option.plan.wave or 1
        return likely(network, tokens, start, wave, choose)

    def check(self, texts: Sequence[OutsideText]) -> None:
        """Raise UserError for a text that is too long, or tokens that the model has not."""
        for number, text in enumerate(texts, 1):
            if len(text.tokens) > self.longest:
                raise UserError(
                    f"text {number} has {counted(len(text.tokens), 'token')}; this server was "
                    f"planned for {self.longest:,}: start it with a larger --max-seq-length (the "
                    f"plan of this one needs {in_gb(self.budget.choice.option.needed_bytes)})"
                )
            for ids in (text.tokens, text.targets):
                check_ids(ids, self.vocabulary, self.tokenizer, f"text {number}")
