"""A simulated device drives steps by their words alone: fixed lists of copies, writes and waits, replayed unchanged.

Its O rows must be those of the host, bit for bit. FASTDECODE_STEPS=100000 makes as many steps on each transport.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from sources.compiled import compiled
from wire.link_driver import FEWER, HANG_S, LAYER_REPLY, LAYER_REQUEST, SMALL, hello, in_thread

from fastdecode.region.contract import POISON, ROW_ATTEND, ROW_DTYPE, Status
from fastdecode.transports._native import Proxy
from fastdecode.transports.base import CallRefused, Link, LinkDown
from fastdecode.transports.registry import connect

STEPS = int(os.environ.get("FASTDECODE_STEPS", 300 // FEWER))
AT_ONCE = 32  # steps whose sequences are freed together, as a control message for each takes long over slow links
ROWS = 3
COPY, WRITE, WAIT = range(3)

Replay = Callable[[np.ndarray, float], int]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    library = compiled("device.so", tmp_path_factory.mktemp("device"))
    function = ctypes.CDLL(str(library)).device_replay
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    return lambda commands, seconds: function(commands.ctypes.data, len(commands), int(seconds * 1e9))


class Driven:
    """Slot 1 of a link, driven by the device, beside slot 0, which the host drives."""

    def __init__(self, link: Link):
        self.link, self.proxy, y = link, Proxy(), link.layout
        self.memory = np.frombuffer(link.region, np.uint8)
        rng = np.random.default_rng(3)
        self.q = rng.standard_normal((SMALL.n_layers, ROWS * y.q_row_bytes // 4)).astype(np.float32)
        self.kv = rng.standard_normal((SMALL.n_layers, ROWS * y.kv_row_bytes // 4)).astype(np.float32)
        self.o = np.zeros_like(self.q)
        slot, at = y.slot(1), self.memory.ctypes.data
        commands = []
        for layer in range(SMALL.n_layers):
            q, kv, o = self.q[layer], self.kv[layer], self.o[layer]
            commands += [
                (COPY, 0, at + slot + y.q, q.ctypes.data, q.nbytes),
                (COPY, 0, at + slot + y.kv, kv.ctypes.data, kv.nbytes),
                (WRITE, layer + 1, at + slot + LAYER_REQUEST, 0, 0),
                (WAIT, layer + 1, at + slot + LAYER_REPLY, 0, 0),
                (COPY, 0, o.ctypes.data, at + slot + y.o, o.nbytes),
            ]
        self.commands = np.array(commands, np.uint64)

    def table(self, seq_index: int, tag: int) -> np.ndarray:
        return np.array([(seq_index, tag, 0, ROWS, ROW_ATTEND, 0)], ROW_DTYPE)

    def by_host(self, tag: int) -> np.ndarray:
        """The O rows of the same step with the words written by the host."""
        y, result = self.link.layout, np.empty_like(self.o)
        base = y.slot(0)
        self.link.arm(0, self.table(0, tag))
        self.link.wait(0, HANG_S)
        for layer in range(SMALL.n_layers):
            for at, rows in ((y.q, self.q[layer]), (y.kv, self.kv[layer])):
                self.memory[base + at : base + at + rows.nbytes] = rows.view(np.uint8)
            self.link.ring(0, layer)
            self.link.wait(0, HANG_S)
            result[layer] = self.memory[base + y.o : base + y.o + result[layer].nbytes].view(np.float32)
        assert self.link.disarm(0) is not None
        return result

    def arm(self, tag: int, timeout: float = HANG_S, seq_index: int = 1) -> None:
        self.link.arm(1, self.table(seq_index, tag))
        self.link.wait(1, HANG_S)
        self.proxy.begin(self.link.port, 1, timeout)

    def reply_word(self) -> int:
        at = self.link.layout.slot(1) + LAYER_REPLY
        return int(self.memory[at : at + 4].view(np.uint32)[0])


@pytest.mark.timeout(FEWER * (240 + STEPS / 50))
async def test_a_device_drives_steps_bit_for_bit_like_the_host(shared_node, replay):
    link = await connect(shared_node.url, hello(kv_bytes=4 << 20, max_seqs=AT_ONCE + 1), None)
    driven = Driven(link)
    rows = [(driven.q + 0.25 * i, driven.kv - 0.125 * i) for i in range(7)]
    wanted = []
    for tag, (driven.q[:], driven.kv[:]) in enumerate(rows):
        wanted.append((await in_thread(driven.by_host, tag)).tobytes())
        await link.free([(0, tag)])

    def steps(tags: range) -> None:
        for tag in tags:
            driven.q[:], driven.kv[:] = rows[tag % len(rows)]
            driven.o[:] = np.nan
            driven.arm(tag, seq_index=1 + tag % AT_ONCE)
            assert replay(driven.commands, HANG_S) == len(driven.commands)
            assert driven.proxy.end(link.port, 1) is True
            times = link.disarm(1)
            assert times is not None and times.kv_bytes > 0
            assert driven.o.tobytes() == wanted[tag % len(rows)]

    for first in range(0, STEPS, AT_ONCE):
        tags = range(first, min(first + AT_ONCE, STEPS))
        await in_thread(steps, tags)
        await link.free([(1 + tag % AT_ONCE, tag) for tag in tags])
    assert (await link.stats())["calls"] == (STEPS + len(rows)) * SMALL.n_layers
    await link.close()


async def test_a_device_whose_step_was_refused_is_not_started(shared_node):
    link = await connect(shared_node.url, hello(), None)
    driven = Driven(link)
    link.arm(1, np.array([(1, 5, 9, ROWS, ROW_ATTEND, 0)], ROW_DTYPE))
    with pytest.raises(CallRefused) as refused:
        await in_thread(link.wait, 1, HANG_S)
    assert refused.value.status == Status.BAD_SEQUENCE
    with pytest.raises(ValueError, match="no step is armed"):
        driven.proxy.begin(link.port, 1, HANG_S)
    with pytest.raises(ValueError, match="no device drives"):
        driven.proxy.end(link.port, 1)
    await in_thread(driven.arm, 6)  # the slot is as good as new
    assert driven.proxy.end(link.port, 1) is False  # no layer was asked for
    del driven
    await link.close()


@pytest.mark.parametrize("layer", range(SMALL.n_layers))
async def test_a_device_passes_every_gate_when_its_r_node_is_killed_at_a_layer(node, replay, layer):
    link = await connect(node.url, hello(), None)
    driven = Driven(link)
    await in_thread(driven.arm, 1)
    before = 5 * layer
    assert await in_thread(replay, driven.commands[:before], HANG_S) == before
    node.stop()  # it will not answer the next layer
    rest = driven.commands[before:]
    device = asyncio.create_task(in_thread(replay, rest, HANG_S))
    await asyncio.sleep(0.1)
    assert not device.done()
    node.end(signal.SIGKILL)
    assert await device == len(rest)
    with pytest.raises(ConnectionError):
        driven.proxy.end(link.port, 1)
    assert isinstance(await link.closed(), LinkDown)
    del driven
    await link.close()


async def test_a_late_reply_over_the_poison_holds_no_device_up(node, replay):
    """The proxy poisons again until the step has ended, whatever overwrites the word meanwhile."""
    link = await connect(node.url, hello(), None)
    driven = Driven(link)
    await in_thread(driven.arm, 1)
    node.stop()
    at = link.layout.slot(1) + LAYER_REPLY
    link.port.kill("it died")
    for _ in range(50):
        driven.memory[at : at + 4] = 0  # the late reply of an earlier layer
        time.sleep(0.001)
    gates = driven.commands[driven.commands[:, 0] == WAIT]
    assert await in_thread(replay, gates, HANG_S) == len(gates)
    assert driven.reply_word() == POISON
    with pytest.raises(ConnectionError, match="it died"):
        driven.proxy.end(link.port, 1)
    node.end(signal.SIGKILL)
    del driven
    await link.close()


async def test_an_r_node_that_is_late_loses_its_link_and_holds_no_device_up(node, replay):
    """The proxy is the watchdog of a device, which waits without a time limit."""
    link = await connect(node.url, hello(), None)
    driven = Driven(link)
    await in_thread(driven.arm, 1, 0.2)
    node.stop()
    assert await in_thread(replay, driven.commands, HANG_S) == len(driven.commands)
    with pytest.raises(ConnectionError, match=r"the reply to layer 0 of step 1 in slot 1 has not come within 0\.2 s"):
        driven.proxy.end(link.port, 1)
    node.end(signal.SIGKILL)
    del driven
    await link.close()


def test_a_completion_word_becomes_an_event():
    proxy = Proxy()
    words = np.frombuffer(proxy, np.uint32)[::16]
    for _ in range(3):
        proxy.expect(2)
        assert not proxy.done(2) and not select.select([proxy.done_fd(2)], [], [], 0)[0]
        words[2] = 1
        assert select.select([proxy.done_fd(2)], [], [], HANG_S)[0] and proxy.done(2)
    assert not proxy.done(3)
    with pytest.raises(ValueError, match="there is no mini-batch 16"):
        proxy.expect(16)
