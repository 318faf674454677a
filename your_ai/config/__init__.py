"""The settings of a run.

`settings.py` declares them with defaults and checks; `values.py` converts values to their types;
`reading.py` reads them from YAML, presets and flags; `mlxlm.py` translates files of mlx-lm.
"""

from your_ai.config.reading import (
    build,
    default_text,
    find_preset,
    resolve,
    resumed,
    to_yaml,
)
from your_ai.config.settings import (
    ADDED,
    BOUNDS,
    DEFAULT_LAYERS,
    DEMO,
    FIELDS,
    FOLDER,
    NONE,
    RESUMABLE,
    TYPES,
    TrainConfig,
    check,
    flag,
    is_due,
    last_step,
    nearest,
)
from your_ai.config.values import coerce, describe

__all__ = [
    "ADDED",
    "BOUNDS",
    "DEFAULT_LAYERS",
    "DEMO",
    "FIELDS",
    "FOLDER",
    "NONE",
    "RESUMABLE",
    "TYPES",
    "TrainConfig",
    "build",
    "check",
    "coerce",
    "default_text",
    "describe",
    "find_preset",
    "flag",
    "is_due",
    "last_step",
    "nearest",
    "resolve",
    "resumed",
    "to_yaml",
]
