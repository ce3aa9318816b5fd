"""A process that works for a given part of the time and shares no code and no data with the process that is measured.

Any work on one core slows the other cores down, because they have caches, memory and a clock in common. A benchmark
compares a part of fastdecode with such a neighbour, to see what the part costs beyond that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import TracebackType

import orjson

_PERIOD = 0.01  # seconds; about a step


class Neighbour:
    """The process. It rests until `work` says otherwise."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, text=True)

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def work(self, part: float) -> None:
        """Let the process work for `part` of the time from now on; 0: rest."""
        assert self._process.stdin is not None
        print(min(part, 1.0), file=self._process.stdin, flush=True)


def _main() -> None:
    """Write events to bytes, as an API process does, for the part of the time that standard input says."""
    part, event = 0.0, {"id": "cmpl-0", "choices": [{"index": 0, "text": " word", "finish_reason": None}]}

    def listen() -> None:
        nonlocal part
        for line in sys.stdin:
            part = float(line)
        os._exit(0)  # the benchmark has ended

    threading.Thread(target=listen, daemon=True).start()
    while True:
        begun = time.perf_counter()
        while time.perf_counter() - begun < part * _PERIOD:
            orjson.dumps(event)
        time.sleep(max(0.0, begun + _PERIOD - time.perf_counter()))


if __name__ == "__main__":
    _main()
