"""Settings and folder of a new run, which may start from an adapter (--from).

Loads MLX only for an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from your_ai.config import TrainConfig
from your_ai.config import resolve as resolve_settings
from your_ai.errors import UserError
from your_ai.rewards.names import RUN, parse_rewards, reward_texts
from your_ai.run import folder
from your_ai.run.folder import RunFolder


def resolve(
    flags: Mapping[str, Any],
    preset: str | None,
    needs_data: bool = True,
    on_note: Callable[[str], object] = lambda text: None,
) -> TrainConfig:
    """Like `config.resolve`; takes over the settings of the adapter at --from."""
    return resolve_settings(flags, preset, needs_data, on_note, settings_of_adapter)


def settings_of_adapter(source: str, base: str | None) -> dict[str, Any]:
    from your_ai.export import starting

    return starting.settings_of(source, base)


def check_rewards(config: TrainConfig) -> None:
    """Raise UserError for a reward that cannot be, before a model is downloaded for it.

    The user's functions are not imported, and a run is not read: training does both.
    """
    if not config.generates:
        return
    for each in parse_rewards(reward_texts(config)):
        if each.kind == RUN:
            try:
                folder.find(each.argument)
            except UserError as error:
                label = "--reward-model" if each.name == config.reward_model else "--reward"
                raise UserError(f"{label} {each.name}: {error}") from error


def create(config: TrainConfig, on_note: Callable[[str], object] = lambda text: None) -> RunFolder:
    """Create the folder of a new run, with a copy of the adapter that it starts from.

    on_note: called with what the user should know of the adapter.

    Raises UserError if the name is taken, the folder cannot be written, or the adapter does not
    fit the model.
    """
    if not config.from_adapter:
        return folder.create(config)
    from your_ai.export import starting

    return starting.create(config, on_note)
