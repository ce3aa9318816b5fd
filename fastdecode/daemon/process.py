"""What every process of a node sets up: its log, its garbage collector, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
from datetime import UTC, datetime
from typing import Any

import orjson

#: New objects after which the collector looks at the young ones; Python's own number is 700.
_YOUNG = 20_000
_PR_SET_PDEATHSIG = 1


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON: time, level, logger and message, and the record's `fields`, which the access
    log has."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def set_up_logging(level: str, form: str) -> None:
    """Log to stderr from `level` on; `form` is "text" or "json"."""
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":  # torch logs the statistics of its caches at exit
        logging.getLogger("torch").setLevel(logging.WARNING)
    logging.captureWarnings(True)


def announce(log: logging.Logger, form: str, text: str, hint: str = "") -> None:
    """Say on stdout that a program is ready; in the log if that is "json", because its collector reads stdout too. The
    `hint` is for people."""
    if form == "json":
        log.info("%s", text)
    else:
        print(text + hint, flush=True)


def freeze() -> None:
    """Take all objects that live now out of the garbage collector's sight, once a process has started.

    A full collection holds the GIL, and so every stream, while it looks at all objects: 0.2 s for the million of torch,
    the tokenizer and the HTTP library, which live as long as the process.
    """
    gc.collect()
    gc.freeze()
    # A step of many streams makes thousands of objects that die with it. The collector looks at the young ones of a few
    # steps at once, and seldom at all of them.
    gc.set_threshold(_YOUNG, 20, 50)


async def wait_for_shutdown() -> None:
    """Return on the first SIGTERM or SIGINT; a second one ends the process at once."""
    requested = asyncio.Event()

    def on_signal() -> None:
        if requested.is_set():
            os._exit(130)
        requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await requested.wait()


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent's thread that started this process ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
