"""Find and read the saved adapter of a run, and check that it fits its base model.

An adapter has mlx-lm's layout (`run.checkpoint` writes it): `adapters.safetensors` with
`PATH.lora_a` (in, r), `PATH.lora_b` (r, out) and the vectors of its kind (out,), and
`adapter_config.json`. Our adapter_config.json also records the step and the base model's files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from your_ai.config import ByLayer, TrainConfig, values_by_layer
from your_ai.config.adapter_facts import (
    FACTS,
    FULL,
    LORA,
    MATRICES,
    VECTORS,
    AdapterFacts,
    chosen_by,
)
from your_ai.config.adapter_starts import ADJUSTED, INIT, starting_of
from your_ai.config.by_layer import OUTSIDE
from your_ai.config.rounding import OPTION, rounding_of
from your_ai.errors import UserError, first_line
from your_ai.gates.text import shown
from your_ai.gates.untrusted import (
    BLOCK,
    JSON_BYTES,
    is_number,
    parse_json,
    read_bytes,
    read_header,
)
from your_ai.hub.find import HubName, find_model, fingerprint, hub_name
from your_ai.memory.workload import Training
from your_ai.nets import head, model
from your_ai.nets.adapter_kinds import put_adapters
from your_ai.nets.layer_sizes import BY_LAYER, EVEN, LayerSize, as_trained, sizes_by_layer
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.new_tokens import files_of_tokenizer
from your_ai.nets.tokenizer import open_tokenizer
from your_ai.nets.vocabulary import (
    LEAVES,
    put_trained_layers,
    vocabulary_of_adapter,
    vocabulary_trained,
)
from your_ai.nets.vocabulary_lora import LOW_RANK, LOW_RANK_LAYERS, put_low_rank
from your_ai.run import checkpoint
from your_ai.run.folder import RunFolder, find, is_running

# Files of a base model that may change: they affect prompts and sampling, not the computation.
FREE = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template*", "additional_chat_templates/*", "processor_config.json"),
    *("vocab.txt", "*.model"),  # not recorded before 0.1.1
)
TOKENIZER = "tokenizer_files"  # in adapter_config.json: the checksums of that with new tokens
PARTS = (*MATRICES, *VECTORS)
KNOWN = {**FACTS, FULL.name: FULL}  # by `fine_tune_type`
MOST_LAYERS, MOST_SCALE, MOST_RANK = 100_000, 1e9, 1 << 16  # limits for an adapter's settings
LISTED = 6  # maximum number of checkpoints in a message


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read from a complete folder; without arrays, of a run that trained whole
    weights and so left a model."""

    folder: Path
    arrays: dict[str, mx.array]
    """Lazy arrays, by path in the model."""
    config: dict[str, Any]
    """Contents of adapter_config.json."""
    vocabulary: dict[str, mx.array] = field(default_factory=dict)
    """Lazy arrays of what is trained of embedding and head, by path in the model."""

    @property
    def step(self) -> int | None:
        """Number of steps it was trained for; None if not known."""
        if checkpoint.STEP_NAME.fullmatch(self.folder.name):
            return checkpoint.step_of(self.folder)
        return self.config.get("step")

    @property
    def scale(self) -> float:
        """The factor of the product of A and B, of layers that have none of their own."""
        return float(self.config["lora_parameters"]["scale"])

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return int(self.config["lora_parameters"]["rank"])

    @property
    def sizes(self) -> dict[str, LayerSize]:
        """Rank and scale of each adapted layer, by path in the model."""
        own, usual = sizes_by_layer(self.config["lora_parameters"]), (self.rank, self.scale)
        found = {path: own.get(path, LayerSize(*usual)) for path in self.layers}
        return found | low_rank_sizes(self.config)

    @property
    def ranks(self) -> ByLayer:
        """The ranks of the layers, as of `--lora-rank`."""
        return self._by_layer(lambda size: size.rank)

    @property
    def alphas(self) -> ByLayer:
        """The alphas of the layers, as of `--lora-alpha` without rsLoRA."""
        if not self.has_sizes:
            return ByLayer(self.scale * self.rank)
        return self._by_layer(lambda size: float(f"{size.scale * size.rank:.12g}"))

    @property
    def has_sizes(self) -> bool:
        """Return whether its layers differ in rank or scale."""
        outside = low_rank_sizes(self.config).values()
        is_usual = {*outside} <= {LayerSize(self.rank, self.scale)}
        return BY_LAYER in self.config["lora_parameters"] or not is_usual

    def _by_layer(self, value: Callable[[LayerSize], float]) -> ByLayer:
        places = ((BLOCK.search(path), size) for path, size in self.sizes.items())
        found = {(int(at[1]), at[2]): value(size) for at, size in places if at is not None}
        outside = low_rank_sizes(self.config).items()
        found |= {(OUTSIDE, path): value(size) for path, size in outside}
        return values_by_layer(found) if found else ByLayer(self.rank)

    @property
    def rounding(self) -> str:
        """The format that its layers were rounded to in training, as of `--qat`; "" for none."""
        return str(self.config.get("lora_parameters", {}).get(OPTION, ""))

    @property
    def kind(self) -> AdapterFacts:
        return KNOWN[self.config.get("fine_tune_type", LORA.name)]

    @property
    def trained_rows(self) -> dict[tuple[str, str], mx.array]:
        """The trained rows of the vocabulary, by the path of the layer, and which they are."""
        parts: dict[tuple[str, str], list[tuple[int, mx.array]]] = defaultdict(list)
        for name, array in self.vocabulary.items():
            path, leaf, index = name.rsplit(".", 2)
            if leaf in LEAVES:
                parts[path, leaf].append((int(index), array))
        ordered = {key: sorted(found, key=lambda part: part[0]) for key, found in parts.items()}
        return {key: mx.concatenate([a for _, a in found]) for key, found in ordered.items()}

    @property
    def low_rank(self) -> dict[str, dict[str, mx.array]]:
        """A and B of the embedding and the head, by their names in `layers`, by path."""
        found: dict[str, dict[str, mx.array]] = defaultdict(dict)
        for name, array in self.vocabulary.items():
            path, leaf, part = name.rsplit(".", 2)
            if leaf == LOW_RANK:
                found[path][part] = array
        return dict(found)

    @property
    def layers(self) -> dict[str, dict[str, mx.array]]:
        """The arrays of each adapted layer by their names in it, by path in the model."""
        found: dict[str, dict[str, mx.array]] = defaultdict(dict)
        for name, array in self.arrays.items():
            path, _, part = name.rpartition(".")
            found[path][part] = array
        return dict(found)


@dataclass(frozen=True)
class Trained:
    """A run with a trained adapter, ready to be used."""

    folder: RunFolder
    config: TrainConfig
    adapter: Adapter
    base: Path
    """The folder of the base model, before `--quantize`."""
    note: str = ""
    """A message for the user about the choice of the adapter, or ""."""

    @property
    def tokenizer_files(self) -> Path | None:
        """The folder of the tokenizer, if the run added tokens to that of the model."""
        return self.folder.tokenizer if self.folder.tokenizer.is_dir() else None

    def tokenizer(self) -> Any:
        """Open the tokenizer of the run. Raises UserError."""
        return open_tokenizer(self.base, self.tokenizer_files)

    def files(self) -> dict[str, str]:
        """The fingerprint of the base model, with the run's tokenizer."""
        return fingerprint(self.base) | files_of_tokenizer(self.folder.tokenizer)

    @property
    def is_adjusted(self) -> bool:
        """True if the adapter belongs to base weights of the run's own."""
        return ADJUSTED in self.adapter.config

    @property
    def source(self) -> tuple[Path, int | None]:
        """The folder of the weights that the adapter is added to, and the bits that they must be
        quantized to first, if any."""
        return (self.folder.base, None) if self.is_adjusted else (self.base, self.config.quantize)

    @property
    def hub_name(self) -> HubName | None:
        """The name of the base model on the hub, if known."""
        return hub_name(self.base, self.config.model)


def open_trained(run: str, chosen: str | None = None, base: str | None = None) -> Trained:
    """Open the run named `run` with its finished adapter.

    chosen: a checkpoint to use instead, as in `choose_adapter`.
    base: the current location of the base model, if it has moved.

    Raises UserError if the run, adapter or model does not exist, or if the adapter was trained
    on a different model.
    """
    folder = find(run)
    config = folder.read_config()
    if chosen is not None and config.adapter_kind.is_whole:
        raise UserError(
            f"--checkpoint {chosen}: {folder.path} trains whole weights, whose checkpoints can "
            "only be resumed; leave it out"
        )
    path, note = choose_adapter(folder, chosen)
    adapter = read_adapter(path)
    found = folder.model if adapter.kind.is_whole else find_model(base or config.model)
    check_base(adapter, found)
    check_adjusted(adapter, folder)
    if adapter.config.get(TOKENIZER, {}) != files_of_tokenizer(folder.tokenizer):
        raise UserError(
            f"{folder.tokenizer}: is not the tokenizer that the adapter was trained on; restore it"
        )
    return Trained(folder, config, adapter, found, note)


def choose_adapter(
    folder: RunFolder, chosen: str | None = None, by_folder: bool = False
) -> tuple[Path, str]:
    """The folder of the run's finished adapter, and a note if a newer checkpoint exists.

    chosen: `step-000120`, `120`, `best` for the best validation, or `latest` for the newest
        complete checkpoint.
    by_folder: the user chooses a checkpoint by its folder, not with --checkpoint.

    Raises UserError, which lists the checkpoints, if there is no complete adapter.
    """
    there = checkpoint.list_checkpoints(folder.checkpoints)
    if chosen is not None:
        return choose_checkpoint(folder, there, chosen), ""
    finished = checkpoint.adapter_step(folder.adapter)
    if finished is None:
        raise UserError(
            f"{folder.path}: {reason_for_none(folder)}; {offer(folder, there, by_folder)}"
        )
    is_best = (
        checkpoint.best_step(folder.checkpoints) == finished and folder.read_config().keep_best
    )
    if there and checkpoint.step_of(there[0]) > finished and not is_best:
        newest = there[0].name
        text = f"using the finished adapter of step {finished}; {newest} is newer (--checkpoint)"
        return folder.adapter, text
    return folder.adapter, ""


def choose_checkpoint(folder: RunFolder, there: list[Path], chosen: str) -> Path:
    """The folder of a checkpoint, as in `choose_adapter`."""
    if chosen == "latest":
        found, _ = checkpoint.newest(folder.checkpoints)
        if found is None:
            raise UserError(f"{folder.path}: has no checkpoint yet")
        return found
    number = chosen.removeprefix("step-")
    step = int(number) if number.isdecimal() else -1
    if chosen == "best":
        best = checkpoint.best_step(folder.checkpoints)
        if best is None:
            raise UserError(f"--checkpoint best: {folder.path} recorded no validation loss yet")
        step, chosen = best, f"best (step {best})"
    wanted = [path for path in there if checkpoint.step_of(path) == step]
    if not wanted:
        raise UserError(
            f"--checkpoint {chosen}: {folder.path} has no such checkpoint; {listed(there)}"
        )
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


def offer(folder: RunFolder, there: list[Path], by_folder: bool) -> str:
    """The remedies for a run without an adapter; see `choose_adapter`."""
    finish = f"finish it: your_ai train --resume {folder.reference}"
    if is_running(folder):
        finish = f"wait until it ends: your_ai watch {folder.reference}"
    if not there:
        return f"it has no checkpoint either; {finish}"
    how = (
        f"give one as {there[0]}" if by_folder else f"choose one with --checkpoint {there[0].name}"
    )
    return f"{listed(there)}; {how}, or {finish}"


def listed(there: list[Path]) -> str:
    names = [path.name for path in there]
    more = f" and {len(names) - LISTED} older" if len(names) > LISTED else ""
    return f"checkpoints: {', '.join(names[:LISTED]) or 'none'}{more}"


def read_adapter(folder: Path, file: Path | None = None) -> Adapter:
    """Read an adapter folder in mlx-lm's layout, from your_ai or another tool.

    file: the file with its arrays; default: adapters.safetensors.

    Raises UserError if a file is missing or damaged, or is of an unknown kind.
    """
    path, file = folder / checkpoint.ADAPTER_CONFIG, file or folder / checkpoint.ADAPTERS
    try:
        config = parse_json(read_bytes(path, JSON_BYTES))
        entries = read_header(file) if file.exists() else []
        arrays = load_arrays(file)
    except OSError as error:
        raise UserError(
            f"{folder}: is not an adapter ({error.filename}: {error.strerror})"
        ) from error
    except (RuntimeError, ValueError) as error:
        reason = shown(first_line(error))
        raise UserError(f"{folder}: its adapter cannot be read ({reason})") from error
    config = with_new_keys(config)
    check_settings(path, config, largest=max((max(e.shape, default=0) for e in entries), default=0))
    if config.get("fine_tune_type") == FULL.name and not arrays:
        return Adapter(folder, arrays, config)
    foreign = [name for name in arrays if name.rpartition(".")[2] not in PARTS]
    if foreign or not arrays:
        what = shown(foreign[0]) if foreign else "nothing"
        raise UserError(f"{file}: contains {what}, not LoRA layers")
    layers = {name.rpartition(".")[0] for name in arrays}
    if (sizes := sizes_by_layer(config["lora_parameters"])) and layers != sizes.keys():
        other = shown(min(layers ^ sizes.keys()))
        raise UserError(f"{path}: {BY_LAYER}: {other} is not there as in the file of the arrays")
    return Adapter(folder, *as_trained(arrays, config), read_vocabulary(folder, config))


def read_vocabulary(folder: Path, config: dict[str, Any]) -> dict[str, mx.array]:
    """The trained arrays of the vocabulary. Raises UserError if a file is damaged or missing."""
    try:
        trained, low_rank = vocabulary_of_adapter(config), low_rank_sizes(config)
    except ValueError as error:
        raise UserError(f"{folder / checkpoint.ADAPTER_CONFIG}: {error}") from error
    found: dict[str, mx.array] = {}
    for leaf in (*(LEAVES if trained else ()), *([LOW_RANK] if low_rank else [])):
        file = folder / checkpoint.BESIDE[leaf]
        if not file.is_file():
            continue
        try:
            names = [entry.name for entry in read_header(file)]
            found |= load_arrays(file)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{file}: cannot be read ({shown(first_line(error))})") from error
        foreign = [name for name in names if leaf not in name.split(".")]
        if foreign:
            raise UserError(f"{file}: contains {shown(foreign[0])}, not rows of a vocabulary")
    matrices = {f"{path}.{LOW_RANK}.{part}" for path in low_rank for part in MATRICES}
    if other := matrices ^ {name for name in found if LOW_RANK in name.split(".")}:
        file = folder / checkpoint.BESIDE[LOW_RANK]
        raise UserError(
            f"{file}: {shown(min(other))} is not there as in {checkpoint.ADAPTER_CONFIG}"
        )
    if trained and not found:
        raise UserError(f"{folder}: what it trained of its vocabulary is missing")
    return found


def low_rank_sizes(config: dict[str, Any]) -> dict[str, LayerSize]:
    """The sizes of LoRA on embedding and head in adapter_config.json. Raises ValueError."""
    given = config.get(LOW_RANK_LAYERS, {})
    if not isinstance(given, dict) or not all(is_size(size, MOST_RANK) for size in given.values()):
        raise ValueError(f"{LOW_RANK_LAYERS} {shown(given)}: give [rank, scale] by path")
    return {path: LayerSize(rank, float(scale)) for path, (rank, scale) in given.items()}


def with_new_keys(config: Any) -> Any:
    """An adapter_config.json of an mlx-lm up to 0.19 with the keys of today's."""
    if not isinstance(config, dict):
        return config
    new = {}
    if config.get("num_layers") is None and "lora_layers" in config:
        new["num_layers"] = config["lora_layers"]
    if "fine_tune_type" not in config:
        new["fine_tune_type"] = chosen_by(config).name
    return {**config, **new}


def check_settings(path: Path, config: Any, largest: int) -> None:
    """Raise UserError if adapter_config.json has values that no mlx-lm adapter can have.

    largest: the largest dimension of its arrays; the rank cannot be larger.
    """

    refuse = partial(refuse_setting, path)
    if not isinstance(config, dict):
        raise UserError(f"{path}: its adapter cannot be read (expected a JSON object)")
    kind = config.get("fine_tune_type", LORA.name)
    if kind == FULL.name:  # it has no layers
        return
    if kind not in list(FACTS):  # it may be of a type that a dict cannot look up
        text, known = shown(kind), " and ".join(FACTS)
        raise UserError(f"{path}: fine_tune_type {text}: only {known} adapters can be used")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        refuse("lora_parameters", parameters, "an object")
    count, rank = config.get("num_layers"), parameters.get("rank")
    if type(count) is not int or abs(count) > MOST_LAYERS:
        refuse("num_layers", count, "a whole number of blocks")
    if type(rank) is not int or rank < 1 or rank > max(largest, 1):
        refuse("rank", rank, f"a whole number of at most {largest}, the largest array dimension")
    check_parameters(path, parameters, rank)
    step = config.get("step")
    if step is not None and (type(step) is not int or step < 0):
        refuse("step", step, "a number of steps")


def refuse_setting(path: Path, key: str, value: Any, wanted: str) -> NoReturn:
    raise UserError(f"{path}: {key} {shown(value)}: must be {wanted}")


def check_parameters(path: Path, parameters: dict[str, Any], rank: int) -> None:
    """Raise UserError if one of the lora_parameters beside the rank has a wrong value."""
    refuse = partial(refuse_setting, path)
    scale, dropout = parameters.get("scale"), parameters.get("dropout", 0.0)
    for key, value, most in (("scale", scale, MOST_SCALE), ("dropout", dropout, 1.0)):
        if not is_number(value) or not abs(value) <= most:
            refuse(key, value, f"a number of at most {most:g}")
    sizes = parameters.get(BY_LAYER, {})
    fits = isinstance(sizes, dict) and all(is_size(size, rank) for size in sizes.values())
    if not fits or type(parameters.get(EVEN, False)) is not bool or (sizes and not scale):
        refuse(BY_LAYER, sizes, f"[rank, scale] of each layer, with ranks of at most {rank}")
    if (rounding := parameters.get(OPTION)) is not None:
        try:
            rounding_of(rounding if isinstance(rounding, str) else "")
        except ValueError as error:
            refuse(OPTION, rounding, str(error).removeprefix("give "))
    keys = parameters.get("keys")
    if keys is not None and not (
        isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    ):
        refuse("keys", keys, "a list of layer names")


def is_size(size: Any, most: int) -> bool:
    """Return whether this is a rank of at most `most`, and a scale that is not 0."""
    if not isinstance(size, list) or len(size) != 2:
        return False
    rank, scale = size
    is_scale = is_number(scale) and 0 < abs(scale) <= MOST_SCALE
    return type(rank) is int and 1 <= rank <= most and is_scale


def base_files(files: dict[str, str]) -> dict[str, str]:
    """The part of a base model's fingerprint that an adapter records: the files it depends on."""
    return {n: s for n, s in files.items() if not any(fnmatch(n, pattern) for pattern in FREE)}


def check_base(adapter: Adapter, base: Path) -> None:
    """Raise UserError if the files of `base` differ from those the adapter was trained on.

    Adapters from other tools do not record the files; for them `put_adapter` compares shapes.
    """
    if "base_files" in adapter.config:  # reading those of a base takes time
        check_files(adapter, base_files(fingerprint(base)), base)


def check_files(adapter: Adapter, now: dict[str, str], base: Path) -> None:
    """The same, with the files of `base` known."""
    recorded = adapter.config.get("base_files")
    if not isinstance(recorded, dict):
        return
    other = sorted(n for n in recorded.keys() | now.keys() if recorded.get(n) != now.get(n))
    if other:
        names = shown(", ".join(other))
        raise UserError(
            f"{adapter.folder}: was trained on a different model than {base} ({names} "
            "differ); pass the original model with --model"
        )


def check_adjusted(adapter: Adapter, folder: RunFolder) -> None:
    """Raise UserError if the run has not the base weights that --init adjusted any more."""
    if ADJUSTED not in adapter.config:
        return
    if adapter.config[ADJUSTED] != base_files(fingerprint(folder.base)):
        raise UserError(
            f"{folder.base}: is missing or was changed, and the adapter belongs to these weights "
            f"(--init {shown(str(adapter.config.get(INIT)))}); restore it"
        )


def read_first(folder: RunFolder) -> Adapter:
    """Read the adapter that a run started from. Raises UserError if it is damaged or missing."""
    names = (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG)
    if (fault := checkpoint.fault(folder.start, names)) is not None:
        raise UserError(f"{fault}; the run started from this adapter: restore it")
    return read_adapter(folder.start)


def put_layers(network: nn.Module, adapter: Adapter) -> None:
    """Add the layers of the adapter, untrained: the model computes the same as before.

    Raises UserError if the model has no such layers.
    """
    if adapter.kind.is_whole:  # the model has been trained itself
        return
    parameters = {"dropout": 0.0, **adapter.config["lora_parameters"]}
    if not vocabulary_trained(network):
        put_trained_rows(network, adapter)
    try:
        count = int(adapter.config["num_layers"])
        put_adapters(network, adapter.kind, count, parameters)
    except Exception as error:  # the code of an architecture may raise any type
        reason = first_line(error)
        raise UserError(f"{adapter.folder}: does not fit the model ({reason})") from error
    network.eval()


def put_trained_rows(network: nn.Module, adapter: Adapter) -> None:
    """Add layers for what is trained of the adapter's vocabulary; trained rows, A and B are 0.

    Raises UserError if the model has no such layers.
    """
    dtypes = {array.dtype for array in adapter.vocabulary.values()}
    try:
        asked = vocabulary_of_adapter(adapter.config)
        put_trained_layers(network, asked, next(iter(dtypes), mx.float32))
        put_low_rank(network, low_rank_sizes(adapter.config))
    except ValueError as error:
        raise UserError(f"{adapter.folder}: does not fit the model ({error})") from error


def check_no_vocabulary(adapter: Adapter, what: str) -> None:
    """Raise UserError if the vocabulary was trained. what: the thing that has none."""
    if adapter.vocabulary:
        raise UserError(
            f"{adapter.folder}: has trained embeddings, which {what} cannot hold; write the fused "
            "model: your_ai fuse, or your_ai export --to hf"
        )


def has_score_head(adapter: Adapter) -> bool:
    """Return whether the adapter is of a reward model."""
    return (adapter.folder / checkpoint.SCORE_HEAD).is_file()


def check_is_adapter(adapter: Adapter) -> None:
    """Raise UserError if a run trained whole weights, where an adapter is needed."""
    if adapter.kind.is_whole:
        raise UserError(
            f"{adapter.folder}: is no adapter: the run trained whole weights, and its result is "
            f"the model in {RunFolder(adapter.folder.parent).model}"
        )


def check_generates(adapter: Adapter) -> None:
    """Raise UserError if the adapter is of a reward model."""
    if has_score_head(adapter):
        raise UserError(
            f"{adapter.folder}: is a reward model, which scores answers and gives none; use "
            "your_ai score, or your_ai export --to hf"
        )


def put_trained_score_head(network: nn.Module, adapter: Adapter, hidden_size: int) -> None:
    """Add the score head of a reward model's adapter, frozen; hidden_size: D of the model.

    Raises UserError if it is missing or damaged, or does not fit the model.
    """
    path = adapter.folder / checkpoint.SCORE_HEAD
    weight, wanted = read_score_head(adapter), (1, hidden_size)
    if weight.shape != wanted:
        found = model.text_of_shape(weight.shape)
        raise UserError(
            f"{path}: does not fit the model: {checkpoint.SCORE_WEIGHT} is {found}, expected "
            f"{model.text_of_shape(wanted)}"
        )
    head.put_score_head(network, wanted[1], seed=0)
    network[head.NAME].weight = weight
    network[head.NAME].freeze()


def read_score_head(adapter: Adapter) -> mx.array:
    """(1, D) float32. Raises UserError if the file is missing or damaged."""
    path = adapter.folder / checkpoint.SCORE_HEAD
    if (fault := checkpoint.fault(adapter.folder, (checkpoint.ADAPTERS,))) is not None:
        raise UserError(fault)
    try:
        names = [entry.name for entry in read_header(path)]
        if names != [checkpoint.SCORE_WEIGHT]:
            raise ValueError(f"contains {shown(', '.join(names))}")
        weight = load_arrays(path)[checkpoint.SCORE_WEIGHT].astype(mx.float32)
        mx.eval(weight)
    except (OSError, RuntimeError, ValueError, LookupError) as error:
        reason = getattr(error, "strerror", None) or shown(first_line(error))
        raise UserError(f"{path}: cannot be read ({reason})") from error
    return weight


def put_adapter(network: nn.Module, adapter: Adapter) -> None:
    """Add the adapter to a model. Raises UserError if a name or shape differs."""
    put_layers(network, adapter)
    set_arrays(network, adapter)


def set_arrays(network: nn.Module, adapter: Adapter) -> None:
    """Set the layers of `put_layers` to the trained arrays."""
    try:
        model.set_adapters(network, adapter.arrays | adapter.vocabulary)
    except UserError as error:
        raise UserError(f"{adapter.folder}: {error}; use another --model") from error


def shares_weights(trained: Trained, config: TrainConfig, files: dict[str, str]) -> bool:
    """Return whether the base of a finished run has the weights of the model that is trained.

    files: the checksums of the files of that model.
    """
    same = base_files(fingerprint(trained.base)) == base_files(files)
    same = same and trained.config.quantize == config.quantize
    return (
        same and keeps_weights(config) and not (trained.is_adjusted or trained.adapter.vocabulary)
    )


def keeps_weights(config: TrainConfig) -> bool:
    """Return whether the weights of the model that is trained stay those of its files."""
    start = starting_of(config.init)
    new = config.add_tokens or config.add_special_tokens or config.train
    return not (new or (start is not None and start.adjusts_base))


def training_of(adapter: Adapter, config: TrainConfig, blocks: int) -> Training:
    """Return what the memory estimate needs to know about an adapter."""
    if adapter.kind.is_whole:
        return Training(blocks=blocks, rank=1, targets=config.lora_targets)
    keys = adapter.config["lora_parameters"].get("keys") or config.lora_targets
    count = int(adapter.config["num_layers"])
    return Training(
        blocks=min(count, blocks) if count > 0 else blocks,
        rank=int(adapter.ranks.number),
        targets=tuple(sorted({str(key) for key in keys})),
        patterns=adapter.ranks.patterns,
        alphas=adapter.alphas.patterns,
        adapter=adapter.kind,
        experts=config.lora_experts,
        rounding=adapter.rounding,
    )
