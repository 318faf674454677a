"""The settings of a run, and the requests of commands about one.

`names.py` has values with a meaning; `settings.py` declares the settings, with all that is known of
each (`setting.py`); `requests.py` declares what other commands are asked for in the same way;
`checks.py` checks what settings say together; `by_layer.py` has numbers that differ by layer;
`values.py` converts values to their types; `reading.py` reads them from YAML, presets and flags;
`mlxlm.py` translates files of mlx-lm; `defaults.py` chooses those that are automatic.
"""

# ruff: noqa: F401 (these are for other packages)
from your_ai.config import defaults
from your_ai.config.by_layer import ByLayer, values_by_layer
from your_ai.config.checks import has_default
from your_ai.config.names import (
    ALL_LINEAR,
    AUTO,
    BETAS,
    DEMO,
    DEMO_DATA,
    DEMO_STARTS,
    DISTILL,
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
    TYPES,
    Resolved,
    TrainConfig,
    is_due,
    is_used,
    last_step,
)
from your_ai.config.values import coerce, describe, gigabytes, joined_parts, parts_of, words_of
from your_ai.gates.text import nearest
