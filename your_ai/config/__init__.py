"""The settings of a run.

`names.py` has values with a meaning; `settings.py` declares the settings, with all that is known of
each (`setting.py`); `checks.py` checks what they say together;
`values.py` converts values to their types; `reading.py` reads them from YAML, presets and flags;
`mlxlm.py` translates files of mlx-lm; `defaults.py` chooses those that are automatic.
"""

from your_ai.config import defaults
from your_ai.config.checks import check, has_default
from your_ai.config.names import (
    ALL_LINEAR,
    AUTO,
    BETAS,
    DEMO,
    DEMO_DATA,
    EXACT_MATCH,
    FOLDER,
    GENERATING,
    GRPO,
    LOSS,
    NONE,
    REWARD,
    REWARD_METRICS,
    SFT,
    SOFT,
    flag,
    negated,
)
from your_ai.config.reading import (
    as_text,
    build,
    default_text,
    find_preset,
    resolve,
    resumed,
    to_yaml,
)
from your_ai.config.settings import (
    ABOUT,
    ADAPTER_SETTINGS,
    ADDED,
    FIELDS,
    OBJECTIVES_WITH,
    PANELS,
    RESUMABLE,
    TYPES,
    Resolved,
    TrainConfig,
    is_due,
    is_used,
    last_step,
)
from your_ai.config.values import coerce, describe, gigabytes, parts_of, words_of
from your_ai.gates.text import nearest

__all__ = [
    "ABOUT",
    "ADAPTER_SETTINGS",
    "ADDED",
    "ALL_LINEAR",
    "AUTO",
    "BETAS",
    "DEMO",
    "DEMO_DATA",
    "EXACT_MATCH",
    "FIELDS",
    "FOLDER",
    "GENERATING",
    "GRPO",
    "LOSS",
    "NONE",
    "OBJECTIVES_WITH",
    "PANELS",
    "RESUMABLE",
    "REWARD",
    "REWARD_METRICS",
    "SFT",
    "SOFT",
    "TYPES",
    "Resolved",
    "TrainConfig",
    "as_text",
    "build",
    "check",
    "coerce",
    "default_text",
    "defaults",
    "describe",
    "find_preset",
    "flag",
    "gigabytes",
    "has_default",
    "is_due",
    "is_used",
    "last_step",
    "nearest",
    "negated",
    "parts_of",
    "resolve",
    "resumed",
    "to_yaml",
    "words_of",
]
