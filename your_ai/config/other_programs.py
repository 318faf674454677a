"""What options of mlx-lm, TRL, Unsloth, LLaMA-Factory and our older versions are called here.

What begins with `--` is an option of the same command; others are a few words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from your_ai.config.names import flag
from your_ai.config.settings import ABOUT

CLOSE = 0.8  # similarity of the whole names; two dashes alone make short names alike
GIVE_RUN = "give the run: `your_ai {command} RUN`, or import the adapter with `your_ai import`"
# What `train`, `plan` and `tune` have instead -> its names in mlx_lm.lora, mlx-lm-lora, TRL,
# LLaMA-Factory, Unsloth and the Trainer of transformers.
INSTEAD = {
    "--config": "-c",
    "--use-dora": "--train-type",
    "--objective": "--train-mode --loss-type",
    "--valid none, for none; else all validation rows are measured": "--val-batches",
    "--run": "--adapter-path --adapter-file --output-dir --run-name",
    "--run: trackers get the name of the run": "--project-name",
    "--clear-cache-every": "--clear-cache-threshold",
    "--reference": "--reference-model-path",
    "--reward": "--reward-functions --reward-funcs --reward-weights",
    "--rollouts": "--group-size --num-generations",
    "--simpo-gamma": "--delta",
    "--model": "--model-name-or-path --model-name",
    "--data": "--dataset-name --dataset",
    "--columns": "--dataset-text-field",
    "--epochs": "--num-train-epochs --num-epochs",
    "--batch-size": "--per-device-train-batch-size --per-device-eval-batch-size --micro-batch-size",
    "--grad-accumulation": "--gradient-accumulation-steps",
    "--max-seq-length": "--max-length --max-prompt-length --cutoff-len --sequence-len",
    "--max-new-tokens": "--max-completion-length",
    "--updates-per-batch": "--num-iterations",
    "--reward-model": "--reward-model-path",
    "--kto-desirable-weight": "--desirable-weight",
    "--kto-undesirable-weight": "--undesirable-weight",
    "--clip-low": "--epsilon",
    "--clip-high": "--epsilon-high",
    "--lora-rank": "--lora-r --r",
    "--lora-targets": "--lora-target-modules --lora-target --target-modules",
    "--quantize 4": "--load-in-4bit",
    "--quantize 8": "--load-in-8bit",
    "--dtype bfloat16": "--bf16",
    "--dtype float16": "--fp16",
    "--dtype": "--torch-dtype",
    "--optimizer": "--optim",
    "--lr-schedule": "--lr-scheduler-type",
    "--warmup-steps": "--warmup-ratio",
    "--loraplus-ratio": "--loraplus-lr-ratio",
    "--neftune-alpha": "--neftune-noise-alpha",
    "--eval-every": "--eval-steps --eval-strategy",
    "--save-every": "--save-steps --save-strategy",
    "--keep": "--save-total-limit",
    "--keep-best": "--load-best-model-at-end",
    "--best-metric": "--metric-for-best-model",
    "--patience": "--early-stopping-patience",
    "--resume": "--resume-from-checkpoint",
    "--mask-prompt": "--assistant-only-loss --completion-only-loss",
    "--no-mask-prompt": "--train-on-prompt --train-on-inputs",
    "--seed": "--random-state",
    "--push-to": "--hub-model-id --push-to-hub --push-model",
    "--processes": "--num-processes",
    "measure the test rows afterwards with `your_ai eval`": "--test",
    "`your_ai eval` measures all test rows": "--test-batches",
    "not needed: every step is reported": "--steps-per-report --logging-steps",
    "not needed: the memory plan decides what is computed again": (
        "--grad-checkpoint --gradient-checkpointing --use-gradient-checkpointing"
    ),
    "not needed: `your_ai train` trains LoRA adapters": "--use-peft",
    "export the run afterwards with `your_ai export`": "--save-model --save-path --save-method",
    "export the run afterwards with `your_ai export --to gguf`": "--quantization",
}
TRAINING = {
    **{f"--{a.mlxlm}".replace("_", "-"): flag(n) for n, a in ABOUT.items() if a.mlxlm},
    **{theirs: ours for ours, names in INSTEAD.items() for theirs in names.split()},
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
    """A hint for an option that `command` does not have: "; ...", or nothing.

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
