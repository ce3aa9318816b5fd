"""The thread that computes the masks of grammars, and rules of grammars."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest

from fastdecode.engine.state.constraints import constraints
from fastdecode.engine.state.request import SamplingParams
from fastdecode.text.grammar import GrammarSpec, LLGrammar, _BatchUpdate, _MaskThread
from fastdecode.text.output import lark

pytestmark = pytest.mark.quick


class State:
    """Stands for a LLGrammarState whose mask takes until `may_end` is set."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()


def update(states):
    for state in states:
        state.begun.set()
        assert state.may_end.wait(30)


def test_a_state_that_a_job_takes_while_it_is_submitted_stops_no_later_state():
    """The scheduler of the OS may let the job run to its end between two statements of `submit`."""
    thread = _MaskThread(update)
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
    assert third.begun.wait(30)


@pytest.mark.parametrize("pattern", [r"\d/\d", r"\d\/\d", r"\\/", r"[/\\]", "a\n/"])
def test_a_regular_expression_beside_calls_means_what_it_means_alone(pattern):
    llguidance = pytest.importorskip("llguidance")
    matcher, tokenizer = llguidance.LLMatcher, llguidance.LLTokenizer("byte")
    answer = lark.answer_rule(GrammarSpec("regex", pattern))
    grammars = matcher.grammar_from_regex(pattern), matcher.grammar_from_lark(f"start: answer\n{answer}")

    def follows(text, grammar):
        state = matcher(tokenizer, grammar, log_level=0)
        assert not state.is_error(), state.get_error()
        return state.try_consume_tokens(list(text.encode())) == len(text) and state.is_accepting()

    texts = "1/2", r"1\/2", "/", "\\", r"\/", "a\n/"
    alone, beside = ([follows(text, grammar) for text in texts] for grammar in grammars)
    assert alone == beside and any(alone)


def test_a_matcher_that_fails_takes_no_other_with_it(caplog):
    llguidance = pytest.importorskip("llguidance")

    class Executor:
        """llguidance's own, which breaks over batches with the matcher `bad`."""

        def __init__(self):
            self.whole, self.bad = llguidance.LLExecutor(num_threads=1), None
            self.consume_token_par = self.whole.consume_token_par

        def unsafe_compute_mask_ptr(self, matchers, *args):
            if any(matcher is self.bad for matcher, _ in matchers):
                raise RuntimeError("broken")
            self.whole.unsafe_compute_mask_ptr(matchers, *args)

    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex("[ab]+"))
    executor = Executor()
    thread = _MaskThread(_BatchUpdate(executor))
    grammar = LLGrammar(matcher, tokenizer.vocab_size, None, None, thread)
    states = [grammar.start() for _ in range(3)]

    def allowed(state):
        row = np.full(-(-tokenizer.vocab_size // 32), -1, np.int32)
        state.fill(row)
        return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")))

    assert [allowed(state) for state in states] == [{ord("a"), ord("b")}] * 3
    hold = threading.Event()
    thread._pool.submit(hold.wait)  # so that all three are one batch
    executor.bad = states[1].matcher
    for state in states:
        state.advance(ord("a"))
    hold.set()
    first, broken, third = map(allowed, states)
    assert {ord("a"), ord("b")} < first == third
    assert not broken and "could not be computed" in caplog.text
    assert [state.broken for state in states] == [False, True, False]  # no fault of a request


@pytest.mark.parametrize(
    ("after", "unless", "past"),
    [
        (None, None, "ab"),
        (None, None, "ax"),
        (ord("|"), None, "xy|ab"),
        (ord("|"), None, "xy"),
        (ord("|"), ord("["), "[x|ab"),
        (ord("|"), ord("["), "[x"),
        (ord("|"), ord("["), "ab"),
    ],
)
def test_a_text_that_has_begun_continues_as_if_each_token_had_been_drawn(after, unless, past):
    llguidance = pytest.importorskip("llguidance")
    tokenizer, tokens = llguidance.LLTokenizer("byte"), list(past.encode())
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex("[ab]+c"), log_level=0)
    thread = _MaskThread(_BatchUpdate(llguidance.LLExecutor(num_threads=1)))
    grammar = LLGrammar(matcher, tokenizer.vocab_size, after, unless, thread)
    stepped, begun = grammar.start(), grammar.continuing([tokens]).start(tokens)
    for token in tokens:
        stepped.advance(token)
    rows = np.full((2, -(-tokenizer.vocab_size // 32)), -1, np.int32)
    for state, row in zip((stepped, begun), rows, strict=True):
        state.fill(row)
    assert (rows[0] == rows[1]).all() and (stepped.fault is None) == (begun.fault is None) == ("ax" not in past)


def test_a_mask_that_could_not_be_computed_is_no_fault_of_the_request():
    class State:
        fault, broken = None, True

        def fill(self, row):
            row[:] = 0

    class Grammar:
        def start(self, past):
            return State()

    found = constraints(SamplingParams(grammar=Grammar()), [], 64)
    found.fill(np.full(2, -1, np.int32))
    assert not found.allow_nothing
