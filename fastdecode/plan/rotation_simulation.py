"""Mini-batches over S-nodes that share R-nodes, event by event in virtual time: what fastdecode.plan.rotation has in
closed form, with queues, and with times that vary."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field

from fastdecode.plan import virtual_time
from fastdecode.plan.rotation import Pipeline

_WARM_UP = 2  # steps of each mini-batch before anything counts


@dataclass(frozen=True, slots=True)
class Course:
    """The course of a simulation, as shares of its time and seconds of virtual time."""

    period: float  # in which every mini-batch does a layer, on average
    s_idle: float  # share of time, the mean of the S-nodes
    r_idle: float
    step: float  # mean time of a step, so between two tokens of a stream
    longest_step: float
    hand_over_wait: float  # mean time in a layer that a mini-batch waits for its hidden states, its O rows being there


def simulate(pipeline: Pipeline, layers: int, steps: int, spread: float = 0.0, seed: int = 0) -> Course:
    """Run `steps` steps of every mini-batch of a model of `layers` layers.

    S-nodes, wires and R-nodes each serve in the order of arrival. Mini-batches start one after another, evenly spaced
    over a layer: that all start at once can leave them in an order in which servers without slack idle. `spread`: the
    standard deviation of each S-Part and R-Part, as a part of its mean (log-normal).
    """
    return virtual_time.run(_Simulation(pipeline, layers, steps, spread, seed).run())


class _Server:
    """A part of the system that serves one mini-batch at a time."""

    def __init__(self) -> None:
        self.busy = 0.0
        self._turn = asyncio.Lock()  # first come, first served

    async def serve(self, seconds: float) -> None:
        async with self._turn:
            await asyncio.sleep(seconds)
            self.busy += seconds


@dataclass(slots=True)
class _SNode:
    processor: _Server = field(default_factory=_Server)
    out: _Server = field(default_factory=_Server)
    back: _Server = field(default_factory=_Server)


@dataclass(slots=True)
class _Totals:
    """The work that is done at a point of virtual time."""

    at: float
    layers: int
    s_busy: float
    r_busy: float


class _Simulation:
    def __init__(self, pipeline: Pipeline, layers: int, steps: int, spread: float, seed: int):
        self._p, self._layers, self._steps = pipeline, layers, steps
        self._random = random.Random(seed)
        self._sigma = math.sqrt(math.log1p(spread**2))
        self._s_nodes = [_SNode() for _ in range(pipeline.s_nodes)]
        self._r_nodes = _Server()
        self._layers_done = 0
        self._step_times: list[float] = []
        self._hand_over_waits = 0.0

    async def run(self) -> Course:
        p = self._p
        self._totals: list[_Totals] = []  # one when each mini-batch has warmed up, and one when it has ended
        await asyncio.gather(*(self._mini_batch(j) for j in range(p.mini_batches)))
        begin, end = self._totals[p.mini_batches - 1 : p.mini_batches + 1]
        seconds, layers = end.at - begin.at, end.layers - begin.layers
        return Course(
            period=seconds * p.mini_batches / layers,
            # Work counts when it has ended, so at both ends of the time a server may seem busier than it was.
            s_idle=max(0.0, 1 - (end.s_busy - begin.s_busy) / (seconds * p.s_nodes)),
            r_idle=max(0.0, 1 - (end.r_busy - begin.r_busy) / seconds),
            step=sum(self._step_times) / len(self._step_times),
            longest_step=max(self._step_times),
            hand_over_wait=self._hand_over_waits / self._layers_done,
        )

    async def _mini_batch(self, j: int) -> None:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(j * self._p.period / self._p.mini_batches)
        for step in range(_WARM_UP + self._steps):
            if step == _WARM_UP:
                self._note(now())
            begun = now()
            for i in range(self._layers):
                k = step * self._layers + i
                await self._layer(self._s_node(j, k), self._s_node(j, k + 1))
            if step >= _WARM_UP:
                self._step_times.append(now() - begun)
        self._note(now())

    def _s_node(self, j: int, k: int) -> _SNode:
        """Where the k-th layer of mini-batch j runs, layers counted on over all steps."""
        return self._s_nodes[(j + k if self._p.rotates else j) % self._p.s_nodes]

    async def _layer(self, s_node: _SNode, successor: _SNode) -> None:
        p = self._p
        await s_node.processor.serve(self._varied(p.s_part))
        await s_node.out.serve(p.out)
        handed_over = asyncio.ensure_future(self._hand_over(s_node)) if p.rotates else None
        await asyncio.sleep(p.latency / 2)
        await self._r_nodes.serve(self._varied(p.r_part))
        await successor.back.serve(p.back)
        await asyncio.sleep(p.latency / 2)
        if handed_over is not None:
            waits = asyncio.get_running_loop().time()
            await handed_over
            self._hand_over_waits += asyncio.get_running_loop().time() - waits
        self._layers_done += 1

    async def _hand_over(self, s_node: _SNode) -> None:
        """Hidden states follow the rows on the S-node's wire. As many come in, beside O rows that are fewer bytes than
        Q, K and V, so that the way in never binds."""
        await s_node.out.serve(self._p.hand_over_wire)
        await asyncio.sleep(self._p.hand_over_latency)

    def _varied(self, seconds: float) -> float:
        if not self._sigma:
            return seconds
        return seconds * self._random.lognormvariate(-(self._sigma**2) / 2, self._sigma)

    def _note(self, at: float) -> None:
        s_busy = sum(s_node.processor.busy for s_node in self._s_nodes)
        self._totals.append(_Totals(at, self._layers_done, s_busy, self._r_nodes.busy))
