"""A rank of a run that `mlx.launch -n 2 your_ai train --no-supervise ...` started."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from your_ai.config import TrainConfig
from your_ai.errors import RunError
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Stop
from your_ai.training.distributed import PeerLost, Ranks
from your_ai.training.joining import join, telling_others
from your_ai.training.memory_actions import within_limit
from your_ai.training.process import OUT_OF_ROOM, awake_elsewhere, train_until_done


def train_launched(folder: RunFolder | None, config: TrainConfig, stop: Stop) -> int:
    """Train a rank that `mlx.launch` started with the command line; return the exit status.

    Without mlx.launch it is the only rank.
    folder: the run folder of rank 0; None on other ranks.
    """
    ranks = join(config.heartbeat_timeout_s)
    try:
        return train_rank(ranks, folder, config, stop)
    except PeerLost as error:
        raise RunError(f"another process of the run is gone ({error}); resume the run") from error


def train_rank(ranks: Ranks, folder: RunFolder | None, config: TrainConfig, stop: Stop) -> int:
    """As `train_launched`, once the ranks have met. Raises PeerLost."""
    with telling_others(ranks):
        place = ranks.of_first(lambda: str(folder and folder.path.resolve()))
        mine = folder or ranks.folder_of(RunFolder(Path(place)), config)
        if ranks.size == 1:
            return train_until_done(mine, config, stop)
        limited = ranks.with_own_limit(config)
        with (
            awake_elsewhere(ranks, config),
            within_limit(mine, limited, partial(ranks.fail, *OUT_OF_ROOM)) as begin_guard,
        ):
            return train_until_done(mine, config, stop, 0, begin_guard, ranks)
