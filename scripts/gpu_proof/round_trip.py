"""A layer's way from the GPU to an R-node and back: by a captured stream (bypass), by copies and events (staged)."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu.captured_steps import MAX_SEQS, CapturedStep, Payload
from gpu.cuda_driver import Cuda
from nodes.rnode_process import RNodeProcess
from wire.link_driver import HANG_S, hello

from fastdecode.region.geometry import Geometry
from fastdecode.spart.exchange.stream_rows import MappedRegion
from fastdecode.transports._native import Proxy
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect
from gpu_proof.setting import Setting

_LAYERS = 8
_REPEATS = 20
_KV_BYTES = 1 << 30


class StagedStep:
    """The same step by pinned copies, an event a layer, and a thread of the host that rings and waits."""

    def __init__(self, cuda: Cuda, link: Link, slot: int, payload: Payload):
        self._cuda, self._link, self._slot, self._payload = cuda, link, slot, payload
        self._stream, self._event = cuda.call("cuStreamCreate", 1), cuda.call("cuEventCreate", 2)
        self._rows = [(cuda.alloc(np.ascontiguousarray(rows)), rows) for rows in (payload.q, payload.kv)]
        self._pinned = [cuda.pinned(rows[0].nbytes) for rows in (payload.q, payload.kv, payload.q)]
        self._o = cuda.alloc(np.zeros_like(payload.q))

    def run(self) -> None:
        call, y = self._cuda.call, self._link.layout
        base, memory = y.slot(self._slot), np.frombuffer(self._link.region, np.uint8)
        for layer in range(len(self._payload.q)):
            for pinned, (rows, host) in zip(self._pinned, self._rows, strict=False):
                size = host[0].nbytes
                call("cuMemcpyDtoHAsync", pinned.ctypes.data, rows + layer * size, size, self._stream)
            call("cuEventRecord", self._event, self._stream)
            call("cuEventSynchronize", self._event)
            for pinned, at in zip(self._pinned, (y.q, y.kv), strict=False):
                memory[base + at : base + at + pinned.nbytes] = pinned
            self._link.ring(self._slot, layer)
            self._link.wait(self._slot, HANG_S)
            o = self._pinned[2]
            o[:] = memory[base + y.o : base + y.o + o.nbytes]
            call("cuMemcpyHtoDAsync", self._o + layer * o.nbytes, o.ctypes.data, o.nbytes, self._stream)
            call("cuEventRecord", self._event, self._stream)
            call("cuEventSynchronize", self._event)

    def o(self) -> np.ndarray:
        return self._cuda.download(self._o, self._payload.q)


def measure(setting: Setting) -> None:
    """Microseconds a layer over shared memory and TCP, and whether both ways give the same bits."""
    cuda = setting.driver()
    heads, sizes = ((4, 2, 16), [1, 8]) if setting.simulated else ((32, 8, 128), [1, 8, 32, 64, 128, 256])
    cells: list[dict[str, Any]] = []
    shape = ", ".join(map(str, heads))
    setting.results |= {"layers": _LAYERS, "repeats": _REPEATS, "q_heads, kv_heads, head_size": shape, "cells": cells}
    for transport in ("shm", "tcp"):
        with tempfile.TemporaryDirectory() as folder:
            url = {"shm": f"shm://{folder}/r.sock", "tcp": "tcp://127.0.0.1:0"}[transport]
            node = RNodeProcess(url, _KV_BYTES)
            try:
                for rows in sizes:
                    setting.left()
                    geometry = Geometry(2, rows, _LAYERS, *heads, act_dtype="fp16")
                    cells.append(asyncio.run(_cell(setting, cuda, node.url, transport, geometry)))
            finally:
                node.end()
    if not all(cell["equal"] for cell in cells):
        raise RuntimeError(f"bypass and staged differ: {cells}")


async def _cell(setting: Setting, cuda: Cuda, url: str, transport: str, geometry: Geometry) -> dict[str, Any]:
    link = await connect(url, hello(geometry, "fp16", kv_bytes=1 << 26, max_seqs=MAX_SEQS), None)
    region = MappedRegion(cuda.product, link)
    rows, proxy = geometry.max_rows, Proxy()
    payload = Payload.of(geometry, 1, [rows, 0], seed=rows)
    captured, staged = CapturedStep(cuda, [link], [region], 0, rows), StagedStep(cuda, link, 1, payload)

    def by_bypass(tag: int, clock: Callable[[], float]) -> float:
        captured.arm(payload, tag)
        captured.begin(proxy)
        start = clock()
        captured.launch(payload)
        cuda.call("cuEventSynchronize", captured.event)
        seconds = clock() - start
        captured.end(proxy)
        return seconds

    def by_staged(tag: int, clock: Callable[[], float]) -> float:
        link.arm(1, payload.table(0, 1, tag))
        link.wait(1, HANG_S)
        start = clock()
        staged.run()
        seconds = clock() - start
        link.disarm(1)
        return seconds

    seconds: dict[str, list[float]] = {"bypass": [], "staged": []}
    try:
        for tag in range(1, 1 + _REPEATS):
            for slot, (name, way) in enumerate((("bypass", by_bypass), ("staged", by_staged))):
                seconds[name].append(way(tag, time.perf_counter))
                await link.free(payload.handles(0, slot, tag))
        equal = captured.o(payload).tobytes() == staged.o().tobytes()
    finally:
        await link.close()
    times = {f"{name}_us": setting.timed(statistics.median(x[1:]) / _LAYERS * 1e6) for name, x in seconds.items()}
    return {"transport": transport, "rows": rows, **times, "equal": equal}
