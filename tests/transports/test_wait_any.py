"""wait_any: one thread waits for the steps of several mini-batches and for descriptors at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from wire.link_driver import HANG_S, hello, in_thread

from fastdecode.region.contract import ROW_DTYPE
from fastdecode.transports._native import StepGroup, wait_any
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect

SHORT_S = 0.05


@pytest.fixture
def event() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


@pytest.fixture
def nobody() -> Iterator[int]:
    """An eventfd that nobody writes."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def group(link: Link, slot: int, tag: int = 1, pos: int = 0) -> StepGroup:
    table = np.array([(slot, tag, pos, 1, 0, 0)], ROW_DTYPE).view(np.uint8)
    return StepGroup(slot, [(link.port, table, 0, 0, 0, 1)])


async def test_the_group_whose_links_have_answered_is_found(node, nobody):
    """Its answer is left to its own `wait`, which does not block then: a verdict, a refusal, the end of a link."""
    link = await connect(node.url, hello(), None)
    first, second = group(link, 0), group(link, 1, pos=5)
    assert second.arm() is None
    assert await in_thread(wait_any, [first, second], nobody, HANG_S) == 0, "it has nothing in flight"
    assert await in_thread(wait_any, [second], nobody, HANG_S) == 0
    [(_, status, _)] = second.wait(0.0)
    assert status > 0, "the answer was a refusal"
    assert first.arm() is None
    assert await in_thread(wait_any, [first], nobody, HANG_S) == 0
    assert first.wait(0.0) is None
    node.stop()
    first.ring(0)
    begun = time.monotonic()
    assert await in_thread(wait_any, [first], nobody, SHORT_S) is None
    assert time.monotonic() - begun >= SHORT_S
    node.end(signal.SIGKILL)
    assert await in_thread(wait_any, [first], nobody, HANG_S) == 0
    [(_, status, _)] = first.wait(0.0)
    assert status == -1
    await link.close()


async def test_a_descriptor_ends_the_wait_for_a_silent_r_node(node, event, nobody):
    link = await connect(node.url, hello(), None)
    step = group(link, 0)
    step.arm()
    step.wait(HANG_S)
    node.stop()
    step.ring(0)
    writer = threading.Timer(SHORT_S, os.eventfd_write, (event, 1))
    writer.start()
    assert await in_thread(wait_any, [step, event], nobody, HANG_S) == 1
    assert await in_thread(wait_any, [step], event, HANG_S) is None, "the descriptor that wakes the thread"
    assert wait_any([step, None, event], nobody, HANG_S) == 1, "None is over at once"
    writer.join()
    link.port.kill("over")
    assert wait_any([event, step], nobody, HANG_S) == 1, "both are over, and groups come first"
    node.end(signal.SIGKILL)
    await link.close()


def test_bad_waits_are_refused(nobody):
    assert wait_any([], nobody, 0.0) is None
    with pytest.raises(TypeError):
        wait_any(["step"], nobody, 0.0)
    with pytest.raises(ValueError, match="33 waits are more than 32"):
        wait_any([nobody] * 33, nobody, 0.0)
