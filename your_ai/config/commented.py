"""Write the chosen settings of a new run as a commented YAML file, for `train --config`.

This module does not import mlx.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from your_ai.config.names import LEARNING_RATES, PREFERENCE_LEARNING_RATE, SFT
from your_ai.config.reading import quoting_dumper
from your_ai.config.settings import ABOUT, FIELDS, is_used

HEADER = """\
# Settings of a run, for `your_ai train --config` and `your_ai plan --config`.
# Every option of `your_ai train --help` can be set here, with _ for each -.
"""
OTHERS = """\

# Settings that are often changed, with their defaults. To change one, remove the # before its name.
"""
# In the order of the file. Those that the objective does not use are left out.
COMMON = (
    *("valid", "max_memory", "run", "max_seq_length", "epochs", "max_steps", "batch_size"),
    *("learning_rate", "lora_rank", "lora_layers", "quantize", "eval_every", "save_every"),
    *("patience", "samples", "report_to", "seed"),
    *("beta", "sft_weight", "reward", "rollouts", "prompts_per_step", "max_new_tokens"),
    *("kl_beta", "center_rewards"),
)


def commented_yaml(chosen: Mapping[str, Any]) -> str:
    """YAML with the chosen settings, and the common others commented out with their defaults.

    Each has its help text above it. `#name: value` is a setting, `# text` an explanation.
    """
    objective = chosen.get("objective", SFT)
    others = (n for n in COMMON if n not in chosen and is_used(n, objective))
    parts = [HEADER]
    parts += [f"\n{explained(name)}{line_of(name, value)}" for name, value in chosen.items()]
    parts.append(OTHERS)
    parts += [f"\n{explained(n)}#{line_of(n, default_of(n, objective))}" for n in others]
    return "".join(parts)


def explained(name: str) -> str:
    return f"# {ABOUT[name].help}\n"


def default_of(name: str, objective: str) -> Any:
    """The default of a setting for an objective."""
    if name == "learning_rate" and objective != SFT:
        return LEARNING_RATES.get(objective, PREFERENCE_LEARNING_RATE)
    return FIELDS[name].default


def line_of(name: str, value: Any) -> str:
    """`name: value` in one line of YAML, however long the value is."""
    import yaml

    flow = None if isinstance(value, tuple) else False
    value = list(value) if isinstance(value, tuple) else value
    return yaml.dump(
        {name: value},
        Dumper=quoting_dumper(),
        allow_unicode=True,
        width=math.inf,
        default_flow_style=flow,
    )
