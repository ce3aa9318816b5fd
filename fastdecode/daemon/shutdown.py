"""Wait for the signal that asks the process to end."""

from __future__ import annotations

import asyncio
import os
import signal


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
