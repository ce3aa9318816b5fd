"""The thread that runs the steps of the S-Part."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pytest

from fastdecode.engine.runner import Runner, RunnerStopped

pytestmark = pytest.mark.quick


@contextlib.asynccontextmanager
async def running_runner():
    runner = Runner()
    try:
        yield runner
    finally:
        await asyncio.to_thread(runner.stop)


def toy_step(name, n, trace, first=None):
    if first is not None:
        assert first.wait(60)
    for i in range(n):
        trace.append((name, i))
        yield
    return name


async def test_steps_take_turns_at_every_post():
    trace: list[tuple[str, int]] = []
    both = threading.Event()
    async with running_runner() as runner:
        a = runner.submit(toy_step("a", 3, trace, first=both))
        b = runner.submit(toy_step("b", 3, trace))
        both.set()
        assert await asyncio.gather(a, b) == ["a", "b"]
    assert trace == [(name, i) for i in range(3) for name in "ab"]


async def test_new_step_starts_while_another_is_under_way():
    trace: list[tuple[str, int]] = []
    reached, go_on = threading.Event(), threading.Event()

    def long_step():
        yield
        reached.set()
        assert go_on.wait(60)
        yield
        trace.append(("long", 1))

    async with running_runner() as runner:
        long = runner.submit(long_step())
        await asyncio.to_thread(reached.wait, 20)
        short = runner.submit(toy_step("short", 1, trace))
        go_on.set()
        await asyncio.gather(long, short)
    assert trace == [("short", 0), ("long", 1)]


async def test_the_step_whose_answer_has_come_goes_first():
    trace: list[tuple[str, int]] = []
    events = {name: os.eventfd(0) for name in "ab"}

    def step(name):
        for i in range(3):
            trace.append((name, i))
            if trace == [("a", 0), ("b", 0)]:
                os.eventfd_write(events["b"], 1)
            yield events[name]

    async with running_runner() as runner:
        a, b = runner.submit(step("a")), runner.submit(step("b"))
        await b
        assert trace == [("a", 0), ("b", 0), ("b", 1), ("b", 2)]
        assert await runner.submit(toy_step("c", 1, trace)) == "c", "a new step starts while another waits"
        assert not a.done()
        os.eventfd_write(events["a"], 1)
        await a
    for fd in events.values():
        os.close(fd)


async def test_exception_of_a_step_is_its_own():
    def bad():
        yield
        raise ZeroDivisionError("bad step")

    async with running_runner() as runner:
        bad_step, good = runner.submit(bad()), runner.submit(toy_step("good", 5, []))
        with pytest.raises(ZeroDivisionError, match="bad step"):
            await bad_step
        assert await good == "good"


async def test_stop_closes_running_steps():
    closed = []

    def endless():
        try:
            while True:
                yield
        finally:
            closed.append(threading.current_thread().name)

    async with running_runner() as runner:
        step = runner.submit(endless())
        await asyncio.sleep(0.01)
    with pytest.raises(RunnerStopped):
        await step
    assert closed == ["fastdecode-s-part"], "a generator is closed by the thread that ran it"
    assert "fastdecode-s-part" not in [thread.name for thread in threading.enumerate()]


async def test_an_abandoned_step_does_no_harm():
    async with running_runner() as runner:
        runner.submit(toy_step("gone", 3, [])).cancel()
        assert await runner.submit(toy_step("here", 3, [])) == "here"
