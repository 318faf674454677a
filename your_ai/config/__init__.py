"""The settings of a run.

`settings.py` declares them with defaults and checks; `values.py` converts values to their types;
`reading.py` reads them from YAML, presets and flags; `mlxlm.py` translates files of mlx-lm;
`defaults.py` chooses those that are automatic.
"""

from your_ai.config import defaults
from your_ai.config.reading import (
    build,
    default_text,
    find_preset,
    resolve,
    resumed,
    to_yaml,
)
from your_ai.config.settings import (
    ADAPTER_SETTINGS,
    ADDED,
    ALL_LINEAR,
    AUTO,
    BETAS,
    BOUNDS,
    DEMO,
    DEMO_DATA,
    EXACT_MATCH,
    FIELDS,
    FOLDER,
    GRPO,
    LOSS,
    NONE,
    OBJECTIVES_WITH,
    RESUMABLE,
    REWARD_METRICS,
    SFT,
    TYPES,
    TrainConfig,
    check,
    flag,
    is_due,
    is_used,
    last_step,
)
from your_ai.config.values import coerce, describe
from your_ai.gates.text import nearest

__all__ = [
    "ADAPTER_SETTINGS",
    "ADDED",
    "ALL_LINEAR",
    "AUTO",
    "BETAS",
    "BOUNDS",
    "DEMO",
    "DEMO_DATA",
    "EXACT_MATCH",
    "FIELDS",
    "FOLDER",
    "GRPO",
    "LOSS",
    "NONE",
    "OBJECTIVES_WITH",
    "RESUMABLE",
    "REWARD_METRICS",
    "SFT",
    "TYPES",
    "TrainConfig",
    "build",
    "check",
    "coerce",
    "default_text",
    "defaults",
    "describe",
    "find_preset",
    "flag",
    "is_due",
    "is_used",
    "last_step",
    "nearest",
    "resolve",
    "resumed",
    "to_yaml",
]
