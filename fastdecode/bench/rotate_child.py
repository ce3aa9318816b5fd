"""The S-nodes of `fastdecode-bench rotate`: what each of them computes, and the second one's process.

`python -m fastdecode.bench.rotate_child REGION_FD WAKE_FD HIDDEN_FD` reads a line of JSON that describes the load and
the link, and then a line for each job. It prints a line when it is ready, and one for each job when it has ended. It
ends with its standard input.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from fastdecode.bench.rnode_child import end_child
from fastdecode.daemon.data_path import DataPath
from fastdecode.engine.runner import Runner
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.region.region import Region
from fastdecode.spart import Model, SPart, choose_device, load_model
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.rotation import Rotation
from fastdecode.spart.step.batch import Chunk, Sampled, SampleSpec, StepBatch
from fastdecode.spart.threads import set_threads
from fastdecode.transports._native import Port
from fastdecode.transports.base import Lease, Link
from fastdecode.transports.link import RegionLink

S_NODES = 2
_SPIN_US = 50


@dataclass(frozen=True, slots=True)
class Load:
    """What all ways decode: `steps` tokens of `batch` sequences with `context` cached tokens each."""

    path: str
    dtype: str
    threads: int  # of each S-Part
    batch: int
    context: int
    steps: int

    def model(self) -> Model:
        """Load the model, and set the number of threads. Raises ValueError for one without a native decoder."""
        set_threads(self.threads)
        dtype = getattr(torch, self.dtype)
        model = in_own_thread(load_model, Path(self.path), device=choose_device("cpu"), dtype=dtype)
        if not isinstance(model, Model):
            raise ValueError("only models of the native decoder rotate")
        set_threads(self.threads, model)
        return model


@dataclass(frozen=True, slots=True)
class Job:
    """A round of one S-node: its slots, of `mini_batches` over all S-nodes."""

    mini_batches: int
    slots: Sequence[int]
    rotates: bool = False


@dataclass(slots=True)
class Work:
    """What S-nodes did in a round."""

    #: The tokens drawn, by step * batch + sequence.
    tokens: dict[int, int] = field(default_factory=dict)
    hand_overs: int = 0
    hand_over_seconds: float = 0.0

    @classmethod
    def merged(cls, parts: Sequence[Work]) -> Work:
        """The work of several S-nodes."""
        tokens = {place: token for part in parts for place, token in part.tokens.items()}
        return cls(tokens, sum(p.hand_overs for p in parts), sum(p.hand_over_seconds for p in parts))


class SNodeWork:
    """An S-node's part of each job."""

    def __init__(self, load: Load, spart: SPart, runner: Runner, index: int, hidden: torch.Tensor):
        self._load, self._spart, self._runner = load, spart, runner
        self._rotation = Rotation(spart, index, S_NODES, hidden)

    async def run(self, job: Job) -> Work:
        """Do a job."""
        work = Work()
        await asyncio.gather(*(self._mini_batch(job, slot, work) for slot in job.slots))
        return work

    async def _mini_batch(self, job: Job, slot: int, work: Work) -> None:
        load = self._load
        sequences = range(slot, load.batch, job.mini_batches)

        def batch_of(step: int, drawn: list[Sampled | None] | None) -> StepBatch:
            tokens = [sampled.token for sampled in drawn if sampled] if drawn else [self._first(i) for i in sequences]
            at, spec = load.context + step, SampleSpec(0.0, index=step)
            return StepBatch(
                slot, [Chunk(0, i, 1, at, [token], False, spec) for i, token in zip(sequences, tokens, strict=True)]
            )

        sampled: dict[int, list[Sampled | None]] = {}
        if job.rotates:
            done = await self._runner.submit(self._rotation.mini_batch(slot, load.steps, batch_of))
            sampled = done.sampled
            work.hand_overs += done.hand_overs
            work.hand_over_seconds += done.hand_over_seconds
        else:
            for step in range(load.steps):
                output = await self._runner.submit(self._spart.step(batch_of(step, sampled.get(step - 1))))
                sampled[step] = output.sampled
        for step, tokens in sampled.items():
            work.tokens |= {step * load.batch + i: s.token for i, s in zip(sequences, tokens, strict=True) if s}

    def _first(self, sequence: int) -> int:
        """A sequence's token in the first step."""
        vocab_size: int = self._spart.config.vocab_size
        return 7919 * (sequence + 1) % vocab_size


def hidden_memory(model: Model, geometry: Geometry, fd: int | None = None) -> tuple[int, torch.Tensor]:
    """A memfd, new if `fd` is None, and the hidden states in it: [slots, rows, hidden_size]."""
    shape = geometry.n_slots, geometry.max_rows, model.config.hidden_size
    n_bytes = int(np.prod(shape)) * model.dtype.itemsize
    if fd is None:
        fd = os.memfd_create("fastdecode-hidden", os.MFD_CLOEXEC)
        os.ftruncate(fd, n_bytes)
    memory = np.frombuffer(mmap.mmap(fd, n_bytes), np.uint8)
    return fd, torch.from_numpy(memory).view(model.dtype).view(shape)


class SecondSNode:
    """The process of S-node 1, on the link of S-node 0. Raises RuntimeError if it does not start or ends too early."""

    def __init__(self, load: Load, link: Link, hidden_fd: int):
        assert isinstance(link, RegionLink) and link.descriptors is not None
        fds = (*link.descriptors, hidden_fd)
        argv = [sys.executable, "-m", __name__, *map(str, fds)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds)
        described = {"load": asdict(load), "geometry": asdict(link.geometry), "lease": asdict(link.lease)}
        self._tell(described | {"url": link.url})
        self._hear()

    def begin(self, job: Job) -> None:
        """Let it begin a job."""
        self._tell(asdict(job))

    def end(self) -> Work:
        """Wait until it has done the job."""
        done = self._hear()
        return Work(**done | {"tokens": {int(place): token for place, token in done["tokens"].items()}})

    def close(self) -> None:
        """End the process."""
        end_child(self._process)

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(message) + b"\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the second S-node has ended")
        answer: dict[str, Any] = orjson.loads(line)
        return answer


async def _serve(region_fd: int, wake_fd: int, hidden_fd: int) -> None:
    told = orjson.loads(sys.stdin.buffer.readline())
    load, geometry = Load(**told["load"]), Geometry(**told["geometry"])
    model = load.model()
    region = Region.from_peer(region_fd, geometry)
    port = Port(region.view, geometry_tuple(geometry), _SPIN_US, wake_fd=wake_fd)
    link = DataPath(told["url"], Lease(**told["lease"]), region, port)
    _, hidden = hidden_memory(model, geometry, hidden_fd)
    runner = Runner()
    work = SNodeWork(load, SPart(model, [link]), runner, 1, hidden)
    _say({})
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        done = asdict(await work.run(Job(**orjson.loads(line))))
        _say(done | {"tokens": {str(place): token for place, token in done["tokens"].items()}})
    runner.stop()
    await link.close()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(_serve(*map(int, sys.argv[1:])))
