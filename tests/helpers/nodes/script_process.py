"""A script of the tests as a process, which a test kills or stops."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from nodes.forked import LINKS, Forked


class ScriptProcess:
    """A process that runs the Python file `script` with `arguments`."""

    def __init__(self, script: str, *arguments: str):
        reading, writing = os.pipe()
        self.process = Forked([script, *arguments], LINKS, stdout=writing)
        os.close(writing)
        self._stdout = os.fdopen(reading)

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_line(self) -> str:
        """The next line that the process prints; empty at the end."""
        return self._stdout.readline().strip()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Stop the process (SIGSTOP). Returns when all its threads have stopped."""
        self.send_signal(signal.SIGSTOP)
        while any(
            f.read_text().rpartition(")")[2].split()[0] != "T" for f in Path(f"/proc/{self.pid}/task").glob("*/stat")
        ):
            time.sleep(0.001)

    def go_on(self) -> None:
        self.send_signal(signal.SIGCONT)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the process. Returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(number)
            self.send_signal(signal.SIGCONT)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self._stdout.close()
