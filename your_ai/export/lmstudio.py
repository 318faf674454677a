"""Export a run for LM Studio: a model in the folder where LM Studio looks for models.

LM Studio's home is named by ~/.lmstudio-home-pointer; without that file it is ~/.cache/lm-studio
(of old versions) if it exists, else ~/.lmstudio. Its settings may name another folder of models;
the default is `models` in its home. There, a model is the folder PUBLISHER/NAME with a GGUF file,
or on Apple silicon with a model of MLX.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

from your_ai.errors import UserError
from your_ai.files import read_text
from your_ai.gates.untrusted import JSON_BYTES, parse_json

MLX = "mlx"  # the --dtype of a model of MLX
PUBLISHER = "your_ai"
POINTER, POINTER_BYTES = ".lmstudio-home-pointer", 4096
HOMES = (Path(".cache") / "lm-studio", Path(".lmstudio"))
SETTINGS, MODELS = "settings.json", "downloadsFolder"


def default_form(kind: str) -> str:
    """MLX on Apple silicon, else a GGUF file of the type `kind`."""
    return MLX if sys.platform == "darwin" and platform.machine() == "arm64" else kind


def default_folder(name: str) -> Path:
    """The place of a run's model in LM Studio. Its publisher's folder is created.

    Raises UserError if LM Studio's folder does not exist or cannot be written.
    """
    from your_ai.export.gguf_folder import plain_name  # loads mlx

    folder = models_folder() / PUBLISHER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); give another place with --out"
        ) from error
    return folder / plain_name(name)


def next_step(target: Path) -> str:
    """Say where LM Studio shows a model, or what to do if it does not look there."""
    try:
        is_seen = target.resolve().parent.parent == models_folder().resolve()
    except UserError:
        is_seen = False
    if is_seen:
        return "LM Studio lists it under My Models"
    return f"LM Studio does not look there: move it to {PUBLISHER}/ in its folder of models"


def models_folder() -> Path:
    """The folder in which LM Studio looks for models. Raises UserError if there is none."""
    home = home_folder()
    try:
        named = parse_json(read_text(home / SETTINGS, JSON_BYTES).encode()).get(MODELS)
    except (OSError, ValueError, AttributeError, RecursionError, UserError):
        named = None
    if isinstance(named, str) and named and "\0" not in named:
        folder = Path(named).expanduser()
        if folder.is_absolute() and folder.is_dir():
            return folder
        raise UserError(
            f"{home / SETTINGS}: {MODELS} is {json.dumps(named)}, which is not a folder; open LM "
            "Studio and choose one, or give --out"
        )
    return home / "models"


def home_folder() -> Path:
    """LM Studio's own folder. Raises UserError if it does not exist."""
    user = Path.home()
    pointer = user / POINTER
    try:
        named = read_text(pointer, POINTER_BYTES).strip()
    except (OSError, UnicodeDecodeError):
        named = ""
    if named:
        home = Path(named) if "\0" not in named else Path()
        if home.is_absolute() and home.is_dir():
            return home
        raise UserError(f"{pointer}: names no folder; open LM Studio once, or give --out")
    for home in HOMES:
        if (user / home).is_dir():
            return user / home
    raise UserError(
        f"{user / HOMES[-1]}: does not exist; install LM Studio and open it once, or give --out"
    )
