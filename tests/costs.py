"""Random models: are costs that are composed of single blocks those of whole steps?

    python tests/costs.py --seed 1 --runs 60 [--in-order]

Every case is a pure function of its seed: a model with random weights, an adapter, a micro-batch
and an engine. Its costs are measured without its weights (engine/measure_costs.py). Then the
gradients of a micro-batch are computed, and their peak of MLX's memory and their seconds are
compared with the estimate. A line is printed for each case, and at the end what each engine was
off. Nothing else may run meanwhile, unless `--in-order`: MLX then computes next to nothing
ahead, so that peaks hardly depend on its threads, and what is off is the composition.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(__file__).resolve().parent.parent
SIZED = ("llama", "qwen2", "qwen3", "gemma2", "mistral", "gemma3_text", "qwen3_moe")
SMALL = ("olmo2", "phi3", "granite", "lfm2", "cohere2", "qwen3_next")  # as tests/architectures.py
ENGINES = ("staged", "streamed", "kept", "fused")
LIMIT_BYTES = 22 << 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its adapters, and a micro-batch."""

    seed: int
    architecture: str
    bits: int | None
    sizes: dict[str, int]
    """Arguments of tests.conftest.make_model; none for a small model."""
    rows: int
    tokens: int
    engine: str
    half: bool
    """Whether it computes in float16."""
    adapter: dict[str, Any]
    """Settings of a run."""


def case_of(seed: int) -> Case:
    """Draw the case of a seed. The same seed gives the same case."""
    rng = random.Random(seed)
    pick = rng.choice
    architecture, half = pick((*SIZED, *SIZED, *SMALL)), rng.random() < 0.15
    hidden = pick((256, 512)) if half else pick((256, 512, 1024))
    heads = max(2, hidden // 64)
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": rng.randint(2, 6),
        "intermediate_size": hidden * pick((2, 3, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": pick([n for n in (1, 2, heads) if heads % n == 0]),
        "head_dim": hidden // heads,
        "vocab_size": pick((768, 4000, 16000)),
    }
    tokens = pick((64, 128, 256) if half else (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096))
    small = architecture in SMALL
    dora = architecture not in ("qwen3_moe", *SMALL) and rng.random() < 0.4
    return Case(
        seed=seed,
        architecture=architecture,
        bits=None if small else pick((4, 4, 8, None)),
        sizes={} if small else sizes,
        rows=pick((1, 1, 2, 3)) if tokens <= 1024 else 1,
        tokens=min(tokens, 2048) if hidden == 1024 else tokens,
        engine=pick(ENGINES),
        half=half,
        adapter={
            "lora_rank": min(16 if small else hidden, pick((4, 8, 16, 64, 128, 512))),
            "lora_layers": pick(("all", "all", 2)),
            "lora_targets": ("all-linear",) if small or rng.random() < 0.7 else ("q_proj",),
            "use_dora": dora,
        },
    )


def run_case(case: Case, folder: Path, in_order: bool) -> tuple[str, float, float] | None:
    """The engine, and the estimated over the real bytes and seconds of a case, which is printed."""
    from tests.architectures import write_model
    from tests.conftest import make_model
    from tests.scheduling import compute_in_order
    from your_ai.config import TrainConfig
    from your_ai.engine.build import build_engine
    from your_ai.engine.gradients import gradients_in
    from your_ai.engine.measure_costs import batch_of, measure_costs
    from your_ai.engine.weights import open_model
    from your_ai.memory.budget import process_here
    from your_ai.memory.costs import Shape
    from your_ai.memory.estimate import estimate
    from your_ai.memory.estimate_kept import everything
    from your_ai.memory.facts import facts_of
    from your_ai.memory.step_time import micro_batch_seconds
    from your_ai.memory.workload import NOTHING, DataSizes, Plan, workload_of
    from your_ai.nets.model import add_adapters

    if in_order:
        compute_in_order()
    make = partial(make_model, bits=case.bits, seed=case.seed, **case.sizes)
    model = (make if case.sizes else write_model)(folder / "model", case.architecture)
    config, dtype = TrainConfig(**case.adapter), mx.float16 if case.half else mx.float32
    shape, opened = Shape(case.rows, case.tokens), open_model(model, dtype)
    sizes = DataSizes(lengths=(case.tokens,))
    workload = workload_of(config, facts_of(model, dtype.size), sizes, process_here())
    engine = "fused" if case.engine == "fused" else "staged"
    of_shape = {"batch_size": shape.rows, "rows_per_step": shape.rows, "engine": engine}
    workload = replace(workload, **of_shape)
    costs = measure_costs(opened.network, config, workload, LIMIT_BYTES, tensors=opened.tensors)
    if costs is None:
        print(case.seed, case.architecture, "cannot be measured", flush=True)
        return None
    workload = replace(workload, costs=costs)
    kept = everything(workload.training.blocks) if case.engine == "kept" else NOTHING
    plan = Plan("staged" if kept else case.engine, shape.size, kept=kept)
    found = estimate(workload, plan, *shape, gradients_only=True)
    expected = found.mlx_bytes - found.components["optimizer"]  # none is made
    seconds = sum(micro_batch_seconds(workload, costs, plan, *shape).values())

    opened = open_model(model, dtype)
    keys = add_adapters(opened.network, config).dropout_keys
    on_disk = plan.gradients_on_disk and not kept
    built = build_engine(
        opened.network, keys, plan.engine, tensors=opened.tensors,
        spill=folder if on_disk else None, kept=kept,
    )  # fmt: skip
    mx.eval(opened.network.trainable_parameters())
    batch, most, real = batch_of(shape, packing=False), 0, []
    before = mx.set_cache_limit(0)
    for _ in range(3):
        total = gradients_in(folder if plan.gradients_on_disk else None)
        gc.collect()
        mx.synchronize()
        mx.reset_peak_memory()
        began = time.perf_counter()
        mx.eval(built.engine.add_gradients(batch, 1.0, 0, total))
        mx.synchronize()
        real.append(time.perf_counter() - began)
        total.clear()
        most = max(most, mx.get_peak_memory())
    mx.set_cache_limit(before)
    off, off_s = expected / most - 1, seconds / min(real[1:]) - 1
    print(
        f"{case.seed:>6} {case.engine:8} {off:+7.1%} of {most / 1e6:7.1f} MB, {off_s:+5.0%} of "
        f"{min(real[1:]):6.2f} s  {case.architecture} {case.sizes.get('hidden_size', 'small')} "
        f"{case.bits or 0}bit {'float16' if case.half else ''} {case.rows} x {case.tokens} "
        f"{' '.join(f'{name}={value}' for name, value in case.adapter.items())}",
        flush=True,
    )
    return case.engine, off, off_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--in-order", action="store_true", help="compute next to nothing ahead")
    given = parser.parse_args()
    found = []
    for seed in range(given.seed, given.seed + given.runs):
        with tempfile.TemporaryDirectory(prefix="costs-") as place:
            one = run_case(case_of(seed), Path(place), given.in_order)
        found += [one] if one else []
        gc.collect()
    for engine in ENGINES:
        offs = [(off, off_s) for name, off, off_s in found if name == engine]
        if offs:
            bytes_off, seconds_off = zip(*offs, strict=True)
            print(
                f"{engine}: {len(offs)} cases, bytes {min(bytes_off):+.1%} to {max(bytes_off):+.1%}"
                f", mean {statistics.fmean(map(abs, bytes_off)):.1%}; seconds "
                f"{min(seconds_off):+.0%} to {max(seconds_off):+.0%}"
            )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
