"""A child process that is started again whenever it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fastdecode.daemon.child import child_environment, module_command

log = logging.getLogger(__name__)

#: Pauses before the first, second, ... start after an end. The last one repeats; a run of `_STABLE_SECONDS` starts the
#: series anew.
_PAUSES_SECONDS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
_STABLE_SECONDS = 30.0


class Supervised:
    """A Python module that runs as a child process. The kernel kills the child when this process dies."""

    def __init__(self, name: str, command: Callable[[], Sequence[str]], log_file: Path | None = None):
        """`command` gives the module and its arguments, anew for every start. The child's output is appended to
        `log_file`; None: the child has the streams of this process."""
        self.name = name
        self.starts = 0
        self._command = command
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"supervise {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _run(self) -> None:
        short = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                status = self._start_child().wait()
            except OSError as error:  # its machine lacks memory or a disk for the log, or has lost the address
                log.error("%s cannot be started: %s", self.name, error)
            else:
                if self._stopping.is_set():
                    return
                log.warning("%s has ended with status %d; starting it again", self.name, status)
            short = 0 if time.monotonic() - began > _STABLE_SECONDS else short + 1
            self._stopping.wait(_PAUSES_SECONDS[min(max(short - 1, 0), len(_PAUSES_SECONDS) - 1)])

    def _start_child(self) -> subprocess.Popen[bytes]:
        with self._log_file.open("ab") if self._log_file else contextlib.nullcontext() as output:
            process = self._process = subprocess.Popen(
                module_command("fastdecode.cluster.leash", str(os.getpid()), *module_command(*self._command())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(),
                start_new_session=True,
            )
        self.starts += 1
        if self._stopping.is_set():  # `stop` may have come before this child
            process.terminate()
        return process

    def stop(self, seconds: float) -> int | None:
        """End the child with SIGTERM, and with SIGKILL after `seconds`. Returns its exit status; None: it did not
        run."""
        self._stopping.set()
        if self._process is None:
            return None
        self._process.terminate()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("%s does not end within %.0f s; killing it", self.name, seconds)
            self._process.kill()
            self._thread.join()
        return self._process.poll()
