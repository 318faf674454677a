"""What a run has learned: its adapter, found in its folder, read, and held against its base.

An adapter is in mlx-lm's layout (`run.checkpoint` writes it): `adapters.safetensors` with
`PATH.lora_a` (in, r) and `PATH.lora_b` (r, out), DoRA's `PATH.m` (out,) beside them, and
`adapter_config.json`. Ours says there of which step it is and which files its base has.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.gates.foreign import JSON_BYTES, parse_json, read_bytes, read_header
from your_ai.gates.text import shown
from your_ai.hub.find import find_model
from your_ai.hub.fingerprint import fingerprint
from your_ai.hub.names import HubName, hub_name
from your_ai.nets import model
from your_ai.run import checkpoint
from your_ai.run.folder import RunFolder, find, is_running

# Files of a base that may change: how it is asked and how it answers, not what it computes.
FREE = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
PARTS = ("lora_a", "lora_b", "m")
MOST_LAYERS, MOST_SCALE = 100_000, 1e9  # of an adapter's settings
LISTED = 6  # checkpoints in a message


@dataclass(frozen=True)
class Adapter:
    """An adapter folder that was read and found whole.

    arrays: by their names in the model, lazy; config: of adapter_config.json.
    """

    folder: Path
    arrays: dict[str, mx.array]
    config: dict[str, Any]

    @property
    def step(self) -> int | None:
        """How many steps it was trained for; None where that is not known."""
        if checkpoint.STEP_NAME.fullmatch(self.folder.name):
            return checkpoint.step_of(self.folder)
        return self.config.get("step")

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied with: alpha / r."""
        return float(self.config["lora_parameters"]["scale"])

    @property
    def rank(self) -> int:
        return int(self.config["lora_parameters"]["rank"])

    @property
    def is_dora(self) -> bool:
        return self.config.get("fine_tune_type") == "dora"

    @property
    def layers(self) -> dict[str, dict[str, mx.array]]:
        """The arrays of each adapted layer, by its path in the model: lora_a, lora_b, and m."""
        found: dict[str, dict[str, mx.array]] = defaultdict(dict)
        for name, array in self.arrays.items():
            path, _, part = name.rpartition(".")
            found[path][part] = array
        return dict(found)


@dataclass(frozen=True)
class Trained:
    """A run that has learned something, ready to be used.

    base: the folder of the model that it was trained on, the one before `--quantize`; note:
    what the user should know of the adapter that was taken, or "".
    """

    folder: RunFolder
    config: TrainConfig
    adapter: Adapter
    base: Path
    note: str = ""

    @property
    def hub_name(self) -> HubName | None:
        """What the base is called on the hub."""
        return hub_name(self.base, self.config.model)


def open_trained(run: str, chosen: str | None = None, base: str | None = None) -> Trained:
    """The run named `run` with its finished adapter.

    chosen: a checkpoint to take instead, as `choose_adapter` has it; base: where the model is
    now, instead of where the run had it. Raises UserError where there is no such run, adapter
    or model, and where the model is another than the adapter was trained on.
    """
    folder = find(run)
    config = folder.read_config()
    path, note = choose_adapter(folder, chosen)
    adapter = read_adapter(path)
    found = find_model(base or config.model)
    check_base(adapter, found)
    return Trained(folder, config, adapter, found, note)


def choose_adapter(folder: RunFolder, chosen: str | None = None) -> tuple[Path, str]:
    """The folder of the run's finished adapter, and a note where a newer checkpoint is there.

    chosen: `step-000120`, `120`, or `latest` for the newest whole checkpoint. Raises UserError
    that names the checkpoints where there is no whole adapter.
    """
    there = checkpoint.list_checkpoints(folder.checkpoints)
    if chosen is not None:
        return choose_checkpoint(folder, there, chosen), ""
    finished = checkpoint.adapter_step(folder.adapter)
    if finished is None:
        raise UserError(f"{folder.path}: {reason_for_none(folder)}; {offer(folder, there)}")
    if there and checkpoint.step_of(there[0]) > finished:
        newest = there[0].name
        text = f"using the finished adapter of step {finished}; {newest} is newer (--checkpoint)"
        return folder.adapter, text
    return folder.adapter, ""


def choose_checkpoint(folder: RunFolder, there: list[Path], chosen: str) -> Path:
    if chosen == "latest":
        found, _ = checkpoint.newest(folder.checkpoints)
        if found is None:
            raise UserError(f"{folder.path}: has no checkpoint yet")
        return found
    number = chosen.removeprefix("step-")
    step = int(number) if number.isdecimal() else -1
    wanted = [path for path in there if checkpoint.step_of(path) == step]
    if not wanted:
        raise UserError(f"--checkpoint {chosen}: {folder.path} has no such one; {listed(there)}")
    if (fault := checkpoint.fault(wanted[0])) is not None:
        raise UserError(f"{fault}; {listed(there)}")
    return wanted[0]


def reason_for_none(folder: RunFolder) -> str:
    if is_running(folder):
        return "is still training: it has no finished adapter"
    if not folder.adapter.is_dir():
        return "has no finished adapter"
    fault = checkpoint.fault(folder.adapter, (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG))
    return f"its adapter is damaged ({fault or 'its step is missing'})"


def offer(folder: RunFolder, there: list[Path]) -> str:
    """What to do about a run without an adapter."""
    finish = f"finish it: your_ai train --resume {folder.reference}"
    if not there:
        return f"no checkpoint either; {finish}"
    return f"{listed(there)}; give one with --checkpoint {there[0].name}, or {finish}"


def listed(there: list[Path]) -> str:
    names = [path.name for path in there]
    more = f" and {len(names) - LISTED} older" if len(names) > LISTED else ""
    return f"checkpoints: {', '.join(names[:LISTED]) or 'none'}{more}"


def read_adapter(folder: Path) -> Adapter:
    """An adapter folder in mlx-lm's layout, ours or another's.

    Raises UserError where a file is missing, damaged or of another kind than LoRA or DoRA.
    """
    path, file = folder / checkpoint.ADAPTER_CONFIG, folder / checkpoint.ADAPTERS
    try:
        config = parse_json(read_bytes(path, JSON_BYTES))
        entries = read_header(file) if file.exists() else []
        arrays = mx.load(str(file))
    except OSError as error:
        raise UserError(f"{folder}: is no adapter ({error.filename}: {error.strerror})") from error
    except (RuntimeError, ValueError) as error:
        reason = shown(model.first_line(error))
        raise UserError(f"{folder}: its adapter cannot be read ({reason})") from error
    check_settings(path, config, largest=max((max(e.shape, default=0) for e in entries), default=0))
    foreign = [name for name in arrays if name.rpartition(".")[2] not in PARTS]
    if foreign or not arrays:
        what = shown(foreign[0]) if foreign else "nothing"
        raise UserError(f"{file}: holds {what}, not LoRA layers")
    return Adapter(folder, arrays, config)


def check_settings(path: Path, config: Any, largest: int) -> None:
    """Raise UserError for an adapter_config.json whose figures no adapter of mlx-lm has.

    largest: of the dimensions of its arrays, one of which is the rank.
    """

    def refuse(key: str, value: Any, wanted: str) -> None:
        raise UserError(f"{path}: {key} {shown(value)}: must be {wanted}")

    if not isinstance(config, dict):
        raise UserError(f"{path}: its adapter cannot be read (expected a JSON object)")
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        text = shown(kind)
        raise UserError(f"{path}: fine_tune_type {text}: only lora and dora adapters can be used")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        refuse("lora_parameters", parameters, "an object")
    count, rank = config.get("num_layers"), parameters.get("rank")
    if type(count) is not int or abs(count) > MOST_LAYERS:
        refuse("num_layers", count, "a whole number of blocks")
    if type(rank) is not int or rank < 1 or rank > max(largest, 1):
        refuse("rank", rank, f"a whole number that its arrays have; they have at most {largest}")
    scale, dropout = parameters.get("scale"), parameters.get("dropout", 0.0)
    for key, value, most in (("scale", scale, MOST_SCALE), ("dropout", dropout, 1.0)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= most:
            refuse(key, value, f"a number of at most {most:g}")
    keys, step = parameters.get("keys"), config.get("step")
    if keys is not None and not (
        isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    ):
        refuse("keys", keys, "a list of names of layers")
    if step is not None and (type(step) is not int or step < 0):
        refuse("step", step, "a number of steps")


def base_files(files: dict[str, str]) -> dict[str, str]:
    """What an adapter records of its base: of a fingerprint, the files that it depends on."""
    return {n: s for n, s in files.items() if n not in FREE and not n.startswith("chat_template")}


def check_base(adapter: Adapter, base: Path) -> None:
    """Raise UserError where `base` has other files than the adapter was trained on.

    Adapters of others record nothing: then the shapes alone tell, in `put_adapter`.
    """
    recorded = adapter.config.get("base_files")
    if not isinstance(recorded, dict):
        return
    now = base_files(fingerprint(base))
    other = sorted(n for n in recorded.keys() | now.keys() if recorded.get(n) != now.get(n))
    if other:
        names = shown(", ".join(other))
        raise UserError(
            f"{adapter.folder}: was trained on another model than {base} ({names} "
            "differ); give the one it was trained on with --model"
        )


def put_layers(network: nn.Module, adapter: Adapter) -> None:
    """Put the adapter's layers on a model, as new: it computes what it did before.

    Raises UserError where the model has no such layers.
    """
    parameters = {"dropout": 0.0, **adapter.config["lora_parameters"]}
    try:
        count = int(adapter.config["num_layers"])
        model.put_adapter_layers(network, count, parameters, adapter.is_dora)
    except Exception as error:  # an architecture's code raises what it likes
        reason = model.first_line(error)
        raise UserError(f"{adapter.folder}: does not fit the model ({reason})") from error
    network.eval()


def put_adapter(network: nn.Module, adapter: Adapter) -> None:
    """Put the adapter on a model. Raises UserError where a name or shape differs."""
    put_layers(network, adapter)
    set_arrays(network, adapter)


def set_arrays(network: nn.Module, adapter: Adapter) -> None:
    """Give the layers of `put_layers` what was learned."""
    try:
        model.set_adapters(network, adapter.arrays)
    except UserError as error:
        raise UserError(f"{adapter.folder}: {error}; give another --model") from error
