"""Wait for the signal that ends the process."""

from __future__ import annotations

import asyncio
import os
import signal


async def wait_for_shutdown() -> None:
    """Return on the first SIGTERM or SIGINT; a second one ends the process at once."""
    told = asyncio.Event()

    def end() -> None:
        if told.is_set():
            os._exit(130)
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    await told.wait()
