"""A thread that hangs while the other threads of its process go on: another process stops it as a debugger does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

#: It waits for the thread until this ends, because a traced process ends when its tracer has heard of it.
_TRACER = """
import ctypes, os, sys
SEIZE, INTERRUPT, ALL = 0x4206, 0x4207, 0x40000000
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for request in (SEIZE, INTERRUPT):
    if ptrace(request, int(sys.argv[1]), None, None):
        sys.exit(os.strerror(ctypes.get_errno()))
print("stopped", flush=True)
try:
    while True:
        os.waitpid(-1, ALL)
except ChildProcessError:
    pass
"""


#: A thread that has run for longer than this while the S-node decoded is the one that computes. The thread that
#: measures the memory's bandwidth after the start runs for less, and all other threads hardly run.
_COMPUTES_NS = 1_000_000_000


def _run_ns(pid: int) -> dict[int, int]:
    """How long each thread of a process but the first has run."""
    run_ns = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            run_ns[int(path.name)] = int((path / "schedstat").read_text().split()[0])
    del run_ns[pid]
    return run_ns


def thread_that_computes(pid: int) -> int:
    """The thread of a process, without the first one, that computes. To be called while the S-node decodes."""
    before = _run_ns(pid)
    for _ in range(120):
        time.sleep(0.5)
        ran = {tid: ns - before.get(tid, 0) for tid, ns in _run_ns(pid).items()}
        computes = max(ran, key=lambda tid: ran[tid])
        if ran[computes] > _COMPUTES_NS:
            return computes
    raise AssertionError(f"no thread of process {pid} computes")


@contextmanager
def stopped_thread(tid: int) -> Iterator[None]:
    """Stop a thread meanwhile. Skips the test where ptrace is not allowed."""
    command = [sys.executable, "-c", _TRACER, str(tid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as tracer:
        assert tracer.stdout is not None
        if (answer := tracer.stdout.readline()) != b"stopped\n":
            pytest.skip(f"ptrace: {answer.decode()}")
        try:
            yield
        finally:
            tracer.kill()  # which matters only if the process lives: the thread goes on
