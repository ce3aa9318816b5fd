"""Setting: the machine that the parts of a proof run on, and the amount of work that they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu import cuda_driver
from gpu.cuda_driver import Cuda, open_driver
from sources.folders import ROOT


class Skipped(Exception):
    """A part cannot be run here; the message gives the reason."""


class OutOfTime(Exception):
    """A part has reached its bound; what it has measured stays."""


#: A process that is told to end may write down what it has.
_GRACE_S = 10.0


@dataclass
class Setting:
    simulated: bool
    out: Path
    scratch: Path  # a folder that the proof removes
    steps: int
    memory_gib: float
    ends: float  # the proof, by time.monotonic()
    part_ends: float = 0.0  # the part that runs
    results: dict[str, Any] = field(default_factory=dict)  # of that part, as far as it has come

    @classmethod
    def here(cls, out: Path, scratch: Path, steps: int, memory_gib: float, minutes: float) -> Setting:
        return cls(not cuda_driver.has_driver(), out, scratch, steps, memory_gib, time.monotonic() + 60 * minutes)

    def begin(self, seconds: float) -> None:
        """A part begins, which may take so long. Raises Skipped if no time is left."""
        self.results = {}
        left = self.ends - time.monotonic()
        if left <= 0:
            raise Skipped("no time is left: raise --minutes, or run it alone (--only)")
        self.part_ends = time.monotonic() + min(seconds, left)

    def left(self) -> float:
        """The seconds that the part may still take. Raises OutOfTime."""
        left = self.part_ends - time.monotonic()
        if left <= 0:
            raise OutOfTime("the part has reached its bound")
        return left

    @contextmanager
    def share(self, of_time: float, name: str) -> Iterator[None]:
        """Work that may take a share of the part's time. If it reaches that bound, the results say so under `name`, and
        the part goes on."""
        ends = self.part_ends
        self.part_ends -= (1 - of_time) * self.left()
        try:
            yield
        except OutOfTime as bound:
            self.results[name] = str(bound)
        finally:
            self.part_ends = ends

    @property
    def device(self) -> str:
        return "cpu" if self.simulated else "cuda"

    def need_torch_cuda(self) -> None:
        """Raises Skipped where torch cannot compute on a GPU."""
        if self.simulated:
            raise Skipped("torch cannot use the simulated driver")
        if not torch.cuda.is_available():
            raise Skipped(f"torch {torch.__version__} finds no CUDA device")

    def driver(self) -> Cuda:
        """The CUDA driver, current on this thread. Raises Skipped."""
        if reason := cuda_driver.missing():
            raise Skipped(reason)
        cuda = open_driver(self.out)
        cuda.use_here()
        return cuda

    def timed(self, value: float, digits: int = 1) -> float | str:
        """A time or a rate for the results; the simulation has none."""
        return "simulated" if self.simulated else round(value, digits)

    def timed_cell(self, cell: dict[str, Any]) -> dict[str, Any]:
        """A cell for the results, whose floats are times and rates."""
        return {name: self.timed(value) if isinstance(value, float) else value for name, value in cell.items()}

    def lines(self, name: str, command: list[str], **environment: str) -> Iterator[str]:
        """Run a Python command from the project's folder, and end it at the part's bound. Yields the lines that it
        prints. Raises OutOfTime, and RuntimeError if the command fails."""
        log = self.out / f"{name}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            ended: list[bool] = []

            def end() -> None:
                ended.append(True)
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()

            bound = threading.Timer(self.left(), end)
            bound.start()
            try:
                assert process.stdout is not None
                yield from process.stdout
                process.wait()
            finally:
                bound.cancel()
                if process.poll() is None:
                    process.kill()
        if ended:
            raise OutOfTime(f"{name} has reached the part's bound")
        if process.returncode:
            raise RuntimeError(f"exit status {process.returncode}, see {log}")

    def run(self, name: str, command: list[str], **environment: str) -> str:
        """All that a command prints; see `lines`."""
        return "".join(self.lines(name, command, **environment))

    def bench(self, name: str, *arguments: str) -> str:
        """What `fastdecode-bench` prints, with the GPU's memory bounded."""
        code = "import sys, torch; from fastdecode.bench.cli import main; share = float(sys.argv.pop(1)); "
        code += "share and torch.cuda.set_per_process_memory_fraction(share); main()"
        share = 0.0
        if not self.simulated:
            share = min(1.0, self.memory_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
        return self.run(name, ["-c", code, str(share), *arguments])
