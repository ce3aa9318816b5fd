"""The thread that computes the masks of grammars."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from fastdecode.text.grammar import _MaskThread

pytestmark = pytest.mark.quick


class State:
    """Stands for a GrammarState: its update begins, and ends once `may_end` is set."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def update(self):
        self.begun.set()
        assert self.may_end.wait(30)


def test_a_state_that_a_job_takes_while_it_is_submitted_stops_no_later_state():
    """The scheduler of the OS may let the job run to its end between two statements of `submit`."""
    thread = _MaskThread()
    first, second, third = State(), State(), State()

    class Overtaken(deque):
        def append(self, state):
            super().append(state)
            first.may_end.set()
            second.may_end.set()
            jobs_have_ended()

    def jobs_have_ended():
        thread._pool.submit(int).result()  # the pool has one thread

    thread.submit(first)
    assert first.begun.wait(30)
    thread._due = Overtaken()
    thread.submit(second)
    jobs_have_ended()
    thread._due = deque()
    third.may_end.set()
    thread.submit(third)
    assert third.begun.wait(10)
