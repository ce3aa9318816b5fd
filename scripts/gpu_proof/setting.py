"""Setting: the machine that the parts of a proof run on, and the amount of work that they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu import cuda_driver
from gpu.cuda_driver import Cuda, open_driver
from sources.folders import ROOT


class Skipped(Exception):
    """A part cannot be run here; the message gives the reason."""


@dataclass(frozen=True)
class Setting:
    simulated: bool
    out: Path
    steps: int
    memory_gib: float
    quick: bool

    @classmethod
    def here(cls, out: Path, steps: int, memory_gib: float, quick: bool) -> Setting:
        return cls(not cuda_driver.has_driver(), out, steps, memory_gib, quick)

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

    def run(self, name: str, command: list[str], timeout: float, **environment: str) -> str:
        """Run a Python command from the project's folder. Returns its standard output. Raises RuntimeError."""
        log = self.out / f"{name}.log"
        with log.open("w") as errors:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=timeout,
            )
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}, see {log}: {done.stdout[-500:]}")
        return done.stdout

    def bench(self, name: str, *arguments: str, timeout: float) -> dict[str, Any]:
        """The results that `fastdecode-bench ... --json` prints, with the GPU's memory bounded."""
        code = "import sys, torch; from fastdecode.bench.cli import main; share = float(sys.argv.pop(1)); "
        code += "share and torch.cuda.set_per_process_memory_fraction(share); main()"
        share = 0.0
        if not self.simulated:
            share = min(1.0, self.memory_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
        result: dict[str, Any] = json.loads(self.run(name, ["-c", code, str(share), *arguments, "--json"], timeout))
        return result
