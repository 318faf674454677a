"""The live pages of runs, each kept up to date while somebody watches it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from your_ai.dashboard.report import live_policy
from your_ai.errors import RunError, UserError
from your_ai.run import folder as folders
from your_ai.run.folder import RunFolder
from your_ai.serving.live_page import LivePage, changes_answer, follow, page_answer
from your_ai.serving.live_run import DrawnRun
from your_ai.studio.worker import Worker

UNWATCHED_S = 60.0  # then the process that draws a run ends


@dataclass
class Board:
    page: LivePage = field(default_factory=LivePage)
    ended: list[int] = field(default_factory=list)
    """Not empty when nobody follows the run any more."""


class Boards:
    """The live pages by the names of their runs."""

    def __init__(self) -> None:
        self.by_name: dict[str, Board] = {}
        self.lock = threading.Lock()

    def of(self, name: str) -> LivePage:
        """The live page of a run. Raises HTTPException if there is none of this name."""
        with self.lock:
            board = self.by_name.get(name)
            if board is None or board.ended:
                try:
                    folder = folders.find(name)
                except UserError as error:
                    raise HTTPException(404) from error
                board = self.by_name[name] = Board()
                threading.Thread(target=self.keep, args=(board, folder)).start()
            return board.page

    def keep(self, board: Board, folder: RunFolder) -> None:
        """Follow a run until nobody has watched it for a while."""
        seen_at, worker = time.monotonic(), Worker()

        def is_over() -> bool:
            nonlocal seen_at
            if board.page.has_audience:
                seen_at = time.monotonic()
            return bool(board.ended) or time.monotonic() - seen_at > UNWATCHED_S

        def draw() -> DrawnRun | None:
            drawn = worker.ask("draw", run=str(folder.path))
            return None if drawn is None else DrawnRun(**drawn)

        try:
            follow(draw, board.page, is_over)
        except RunError:  # the process ended; who asks again begins another
            return
        finally:
            worker.end()
            board.ended.append(1)
            board.page.close()

    async def page(self, request: Request) -> Response:
        found = await run_in_threadpool(self.of, request.path_params["name"])
        return await page_answer(found, live_policy("'self'"))

    async def changes(self, request: Request) -> Response:
        found = await run_in_threadpool(self.of, request.path_params["name"])
        return changes_answer(found, request, live_policy("'self'"))

    def close(self) -> None:
        for board in list(self.by_name.values()):
            board.ended.append(1)
            board.page.close()
