"""LoadProgress: tells people how much of a model is loaded."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)

_SECONDS = 10.0  # at least, between two lines


class LoadProgress(contextlib.AbstractContextManager["LoadProgress"]):
    """Shows a progress bar if stderr is a terminal, else a line of the log every ten seconds or more.

    A number of the checkpoint counts as loaded when it has been read and, with `--weights`, rounded. Blocks that are
    rounded by a text count once they are read, so these are ahead by at most one block.
    """

    def __init__(self, total: int, shown: bool = True, clock: Callable[[], float] = time.monotonic):
        """`total` is how many numbers there are to load; unless `shown`, nothing is."""
        units: dict[str, Any] = {"unit": "", "unit_scale": True}
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, desc="loading the weights", disable=not (shown and on_terminal), **units)
        self._logged, self._clock = shown and not on_terminal, clock
        self._total, self._done, self._logged_at = total, 0, clock()

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, n: int) -> None:
        """Count `n` more numbers as loaded."""
        self._bar.update(n)
        self._done += n
        if self._logged and (now := self._clock()) - self._logged_at >= _SECONDS:
            log.info("%d %% of the weights are loaded", 100 * self._done // self._total)
            self._logged_at = now
