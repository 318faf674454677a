"""What options of mlx-lm, TRL, Unsloth, LLaMA-Factory and our older versions are called here.

A value that begins with `--` is an option of the same command; others are a few words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from your_ai.config.names import flag
from your_ai.config.settings import ABOUT

CLOSE = 0.8  # similarity of the whole names; two dashes alone make short names alike
PLANNED = "not needed: the memory plan decides what is computed again"
EVERY_STEP = "not needed: every step is reported"
GIVE_RUN = "give the run: `your_ai {command} RUN`, or import the adapter with `your_ai import`"
# Of `train`, `plan` and `tune`.
TRAINING: dict[str, str] = {
    # mlx_lm.lora and mlx-lm-lora
    **{f"--{a.mlxlm}".replace("_", "-"): flag(n) for n, a in ABOUT.items() if a.mlxlm},
    "-c": "--config",
    "--train": "not needed: `your_ai train` trains",
    "--test": "measure the test rows afterwards with `your_ai eval`",
    "--test-batches": "`your_ai eval` measures all test rows",
    "--train-type": "--use-dora",
    "--train-mode": "--objective",
    "--val-batches": "--valid none, for none; else all validation rows are measured",
    "--steps-per-report": EVERY_STEP,
    "--adapter-path": "--run",
    "--adapter-file": "--run",
    "--grad-checkpoint": PLANNED,
    "--project-name": "--run: trackers get the name of the run",
    "--clear-cache-threshold": "--clear-cache-every",
    "--reference-model-path": "--reference",
    "--reward-functions": "--reward",
    "--group-size": "--rollouts",
    "--delta": "--simpo-gamma",
    # TRL, LLaMA-Factory and the Trainer of transformers
    "--model-name-or-path": "--model",
    "--model-name": "--model",
    "--dataset-name": "--data",
    "--dataset": "--data",
    "--dataset-text-field": "--columns",
    "--output-dir": "--run",
    "--num-train-epochs": "--epochs",
    "--num-epochs": "--epochs",
    "--per-device-train-batch-size": "--batch-size",
    "--per-device-eval-batch-size": "--batch-size",
    "--micro-batch-size": "--batch-size",
    "--gradient-accumulation-steps": "--grad-accumulation",
    "--gradient-checkpointing": PLANNED,
    "--use-gradient-checkpointing": PLANNED,
    "--max-length": "--max-seq-length",
    "--max-prompt-length": "--max-seq-length",
    "--cutoff-len": "--max-seq-length",
    "--sequence-len": "--max-seq-length",
    "--max-completion-length": "--max-new-tokens",
    "--num-generations": "--rollouts",
    "--num-iterations": "--updates-per-batch",
    "--reward-funcs": "--reward",
    "--reward-weights": "--reward",
    "--reward-model-path": "--reward-model",
    "--loss-type": "--objective",
    "--desirable-weight": "--kto-desirable-weight",
    "--undesirable-weight": "--kto-undesirable-weight",
    "--epsilon": "--clip-low",
    "--epsilon-high": "--clip-high",
    "--lora-r": "--lora-rank",
    "--r": "--lora-rank",
    "--lora-target-modules": "--lora-targets",
    "--lora-target": "--lora-targets",
    "--target-modules": "--lora-targets",
    "--use-peft": "not needed: `your_ai train` trains LoRA adapters",
    "--load-in-4bit": "--quantize 4",
    "--load-in-8bit": "--quantize 8",
    "--bf16": "--dtype bfloat16",
    "--fp16": "--dtype float16",
    "--torch-dtype": "--dtype",
    "--optim": "--optimizer",
    "--lr-scheduler-type": "--lr-schedule",
    "--warmup-ratio": "--warmup-steps",
    "--loraplus-lr-ratio": "--loraplus-ratio",
    "--neftune-noise-alpha": "--neftune-alpha",
    "--logging-steps": EVERY_STEP,
    "--eval-steps": "--eval-every",
    "--eval-strategy": "--eval-every",
    "--save-steps": "--save-every",
    "--save-strategy": "--save-every",
    "--save-total-limit": "--keep",
    "--load-best-model-at-end": "--keep-best",
    "--metric-for-best-model": "--best-metric",
    "--early-stopping-patience": "--patience",
    "--resume-from-checkpoint": "--resume",
    "--assistant-only-loss": "--mask-prompt",
    "--completion-only-loss": "--mask-prompt",
    "--train-on-prompt": "--no-mask-prompt",
    "--train-on-inputs": "--no-mask-prompt",
    "--random-state": "--seed",
    "--hub-model-id": "--push-to",
    "--push-to-hub": "--push-to",
    "--push-model": "--push-to",
    "--run-name": "--run",
    "--num-processes": "--processes",
    # Unsloth
    "--save-model": "export the run afterwards with `your_ai export`",
    "--save-path": "export the run afterwards with `your_ai export`",
    "--save-method": "export the run afterwards with `your_ai export`",
    "--quantization": "export the run afterwards with `your_ai export --to gguf`",
}
ANSWERING = {
    "--adapter-path": GIVE_RUN,
    "--temp": "--temperature",
    "-p": "--prompt",
    "-m": "--max-tokens",
    "--system-prompt": "--system",
    "--max-new-tokens": "--max-tokens",
}
WRITING = {
    "--adapter-path": GIVE_RUN,
    "--lora-model": GIVE_RUN,
    "--dequantize": "--to dequantized",
    "--de-quantize": "--to dequantized",
    "--export-gguf": "use `your_ai export --to gguf --fused`",
    "--gguf-path": "use `your_ai export --to gguf --fused`",
    "--upload-repo": "use `your_ai push`",
    "--save-path": "give the folder to write: `your_ai {command} RUN FOLDER`",
}
CONVERTING = {
    "--hf-path": "give the model: `your_ai quantize MODEL FOLDER`",
    "--model": "give the model: `your_ai quantize MODEL FOLDER`",
    "--mlx-path": "give the folder to write: `your_ai quantize MODEL FOLDER`",
    "--quantize": "not needed: `your_ai quantize` quantizes",
    "-q": "not needed: `your_ai quantize` quantizes",
    "--q-bits": "--bits",
    "--q-group-size": "--group-size",
    "--upload-repo": "use `your_ai push`",
}
EVERYWHERE = {"--trust-remote-code": "not needed: no code of a model is ever run"}
HINTS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("train", "plan", "tune"), TRAINING),
    **dict.fromkeys(("generate", "chat", "serve"), ANSWERING),
    "eval": {"--adapter-path": GIVE_RUN, "--test-batches": "all rows are measured"},
    "fuse": WRITING,
    "export": {**WRITING, "--save-path": "--out"},
    "quantize": CONVERTING,
    "report": {"--png": "charts are in the page: `your_ai report -o page.html`"},
}


def option_hint(command: str, name: str, known: Iterable[str]) -> str:
    """What to use for an option that `command` does not have: "; ...", or nothing.

    known: the command's own options.
    """
    known = list(known)
    plain = name.replace("_", "-")
    if plain in known:
        return f"; did you mean {plain}?"
    hint = HINTS.get(command, {}).get(plain) or EVERYWHERE.get(plain, "")
    is_option = hint.startswith("--")
    if not hint or (is_option and re.split(r"[ ,:]", hint)[0] not in known):
        close = difflib.get_close_matches(plain, known, n=1, cutoff=CLOSE)
        return f"; did you mean {close[0]}?" if close else ""
    return f"; here it is {hint}" if is_option else f"; {hint.format(command=command)}"
