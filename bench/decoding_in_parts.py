"""DecodingInParts: the S-Part and the R-Part of a decoding system, each timed alone."""

from __future__ import annotations

import asyncio
import time
from functools import cached_property

import numpy as np

from fastdecode.daemon.decoding import Decoding
from fastdecode.engine.runner import StepGenerator
from fastdecode.region.contract import ROW_ATTEND, ROW_DTYPE
from fastdecode.spart import SPart
from fastdecode.transports.loopback import Loopback

_TIMEOUT = 60.0  # seconds for a call


class DecodingInParts(Decoding):
    """Sequences that decode over real R-nodes, or by one of the two parts alone."""

    @cached_property
    def _loopbacks(self) -> list[Loopback]:
        return [Loopback(link.geometry, link.url) for link in self.links]

    @cached_property
    def _s_alone(self) -> SPart:
        return self.spart_over(self._loopbacks)

    async def close(self) -> None:
        await super().close()
        if "_s_alone" in self.__dict__:
            self._s_alone.exchange.close()
            for path in self._loopbacks:
                path.close()

    async def s_round(self) -> float:
        """Seconds of a round of the S-Part alone, one mini-batch after the other and in the thread of the split
        system."""
        self.begin_round(self._s_alone)
        start = time.perf_counter()
        await self.runner.submit(self._s_steps())
        return time.perf_counter() - start

    def _s_steps(self) -> StepGenerator:
        for step in range(self.shape.steps):
            for slot in range(self.shape.mini_batches):
                yield from self._s_alone.step(self.batch(slot, step))

    async def r_round(self) -> float:
        """Seconds of a round of the R-Part alone, with a call in progress in every slot."""
        elapsed = await asyncio.to_thread(self._r_steps)
        await self.trim()
        return elapsed

    def _r_steps(self) -> float:
        layers = self.links[0].geometry.n_layers
        start = time.perf_counter()
        for step in range(self.shape.steps):
            busy = []
            for slot, batch in enumerate(self.mini_batches):
                for index, link in enumerate(self.links):
                    rows = [
                        (seq_index, 1, self.shape.context + step, 1, ROW_ATTEND, 0)
                        for i, seq_index in batch
                        if i == index
                    ]
                    if rows:
                        link.arm(slot, np.array(rows, ROW_DTYPE))
                        busy.append((slot, link))
            for layer in range(layers):
                for slot, link in busy:
                    link.wait(slot, _TIMEOUT)  # for the verdict or for the layer before
                    link.ring(slot, layer)
            for slot, link in busy:
                link.wait(slot, _TIMEOUT)
        return time.perf_counter() - start
