"""Grammars that a generated text must follow, compiled and run by llguidance (the extra `structured`).

A GrammarCompiler turns a JSON schema, a regular expression, a list of choices or a Lark grammar into an LLGrammar. Each
choice of a request follows its own LLGrammarState, which says after every token which tokens may come next.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastdecode.text.json_schema import plain_reason, without_annotations
from fastdecode.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Kind = Literal["json_schema", "regex", "choice", "lark"]

#: The white space that a model may put between two parts of a JSON text: a blank, or a line's end and the next line's
#: indentation. More of it would let a model write blanks forever.
JSON_WHITE_SPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,32}"
#: A longer grammar is refused, in characters.
MAX_GRAMMAR_LENGTH = 256 * 1024
_CACHED = 64  # compiled grammars kept for the next request
_TOKENS_AT_ONCE = 256  # of a text that has begun, for which llguidance holds the GIL


class GrammarError(ValueError):
    """The grammar is not valid, or cannot be compiled; the message says why.

    `param` is the request's field that is at fault, if it is another one than the field that asks for the grammar.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class GrammarsUnavailable(GrammarError):
    """llguidance is not installed, or the model has no end-of-sequence token, so no grammar can be followed."""


def check_length(text: str, param: str | None = None) -> None:
    """Raise GrammarError for a text that is too long for a grammar; `param` is the field that has it."""
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise GrammarError(f"the grammar is longer than {MAX_GRAMMAR_LENGTH} characters", param)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as a request gives it.

    `text` is a JSON schema as JSON, a regular expression (Rust's syntax) that the whole text must match, a JSON list of
    strings, or a grammar in llguidance's dialect of Lark or in GBNF. `white_space` is a regular expression for the
    white space between the parts of a JSON text; "": none.
    """

    kind: Kind
    text: str
    white_space: str = JSON_WHITE_SPACE
    #: The grammar begins behind the first token with this text; until then every token is allowed. None: at once.
    after: str | None = None
    #: With `after`: the grammar begins at once unless the text's first token is this one. None: it never does.
    unless: str | None = None


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Its methods may be called in any thread, and take long."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Iterable[int]):
        """`end_tokens` are the tokens that end a text; a grammar allows them where its text may end."""
        self._tokenizer = tokenizer
        self._end_tokens = sorted(end_tokens)
        self._lock = threading.Lock()
        self._backend: Any = None  # llguidance's tokenizer, made for the first grammar
        self._cached = lru_cache(_CACHED)(self._compile)
        self._masks: _MaskThread | None = None

    def compile(self, spec: GrammarSpec) -> LLGrammar:
        """Raises GrammarError."""
        check_length(spec.text)
        with self._lock:
            return self._cached(spec)

    def _compile(self, spec: GrammarSpec) -> LLGrammar:
        try:
            import llguidance
        except ImportError:
            raise GrammarsUnavailable(
                "structured output needs llguidance: install fastdecode[structured] at the server"
            ) from None
        if not self._end_tokens:
            raise GrammarsUnavailable("the model has no end-of-sequence token, which structured output needs")
        if self._backend is None:
            self._backend = llguidance.LLTokenizer(self._tokenizer.to_json(), eos_token=self._end_tokens)
            threads = max(1, (os.cpu_count() or 1) // 2)  # the S-Part computes on the others
            self._masks = _MaskThread(_BatchUpdate(llguidance.LLExecutor(num_threads=threads)))
        try:
            source = _source(llguidance, spec)
        except RecursionError:
            raise GrammarError("the schema is nested too deeply") from None
        except (ValueError, RuntimeError) as error:
            raise GrammarError(plain_reason(str(error))) from None
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, self._backend)
        if failed:
            raise GrammarError(plain_reason("; ".join(messages)))
        # log_level 0: errors reach the client, and not this process's stderr.
        matcher = llguidance.LLMatcher(self._backend, source, log_level=0)
        if matcher.is_error():
            raise GrammarError(plain_reason(matcher.get_error()))
        if (fault := _first_fault(matcher)) is not None:
            raise GrammarError(fault)
        after, unless = (self._token_id(text) for text in (spec.after, spec.unless))
        assert self._masks is not None, "made with the tokenizer"
        return LLGrammar(matcher, self._backend.vocab_size, after, unless, self._masks)

    def _token_id(self, text: str | None) -> int | None:
        if text is not None and (token := self._tokenizer.token_id(text)) is not None:
            return token
        if text is not None:
            raise GrammarError(f"the tokenizer has no token {text!r}, after which the grammar would begin")
        return None


class _MaskThread:
    """The thread that computes masks while the S-Part computes the logits that the masks apply to. One job computes all
    masks that are due, because a job for each mask would cost more than the mask of a small vocabulary."""

    def __init__(self, update: Callable[[list[LLGrammarState]], None]) -> None:
        """`update` brings the masks of some states up to date, and raises nothing."""
        self._update = update
        self._pool = ThreadPoolExecutor(1, "grammar-masks")
        self._due: deque[LLGrammarState] = deque()
        self._scheduled = False

    def submit(self, state: LLGrammarState) -> None:
        """Bring the mask of `state` up to date. Called by one thread only."""
        self._due.append(state)
        if not self._scheduled:
            self._scheduled = True
            self._pool.submit(self._work)

    def _work(self) -> None:
        # Before the loop: a state that comes from here on schedules another job, which may find nothing left to do.
        self._scheduled = False
        while n := len(self._due):
            self._update([self._due.popleft() for _ in range(n)])


class _BatchUpdate:
    """Brings the masks of many states up to date in two calls of llguidance, each of which releases the GIL once."""

    def __init__(self, executor: Any) -> None:
        """`executor` is llguidance's LLExecutor."""
        self._executor = executor

    def __call__(self, states: list[LLGrammarState]) -> None:
        """Let the matchers take their tokens, and compute the masks after these. Nothing is allowed after a failure."""
        try:
            self._advance(states)
        except Exception:
            log.exception("grammars could not take their tokens")
            for state in states:
                state.set_mask(None)
        else:
            self._compute_each(states)

    def _compute_each(self, states: list[LLGrammarState]) -> None:
        try:
            self._compute(states)
        except Exception:
            if len(states) > 1:
                for state in states:  # one of them is at fault, and the others shall go on
                    self._compute_each([state])
                return
            log.exception("a grammar's mask could not be computed")
            states[0].set_mask(None)

    def _advance(self, states: list[LLGrammarState]) -> None:
        moving = [state for state in states if state.token is not None]
        tokens = [(state.matcher, state.token) for state in moving]
        for state in moving:
            state.token = None
        if tokens:
            self._executor.consume_token_par(tokens)

    def _compute(self, states: list[LLGrammarState]) -> None:
        masks = np.empty((len(states), states[0].n_words), np.int32)
        sound = [(state.matcher, row) for row, state in enumerate(states) if not state.matcher.is_error()]
        if sound:
            self._executor.unsafe_compute_mask_ptr(sound, masks.ctypes.data, masks.strides[0], len(masks))
        for state, mask in zip(states, masks, strict=True):
            fault = plain_reason(state.matcher.get_error()) if state.matcher.is_error() else None
            state.set_mask(np.zeros_like(mask) if fault else mask, fault)


@dataclass(frozen=True, slots=True)
class LLGrammar:
    """A compiled grammar."""

    matcher: Any  # llguidance's, before the first token
    vocab_size: int
    after: int | None  # the tokens of the GrammarSpec
    unless: int | None
    thread: _MaskThread
    behind: Mapping[tuple[int, ...], LLGrammar] = field(default_factory=dict)  # by a text's tokens: what follows them

    def start(self, past: Sequence[int] = ()) -> LLGrammarState:
        """The state of a text behind the tokens `past`, which `continuing` must have got."""
        return LLGrammarState(self.behind[tuple(past)] if past else self)

    def continuing(self, pasts: Iterable[Sequence[int]]) -> LLGrammar:
        """This grammar, which can also start behind these tokens. May be called in any thread, and takes long."""
        return replace(self, behind={tuple(past): self._following(past) for past in pasts if past})

    def _following(self, past: Sequence[int]) -> LLGrammar:
        """The grammar of what may follow `past`."""
        begin, after = 0, self.after
        if self.unless is not None and past[0] != self.unless:
            after = None
        if after is not None:
            begin = past.index(after) + 1 if after in past else len(past)
            after = None if after in past else after
        matcher = self.matcher.deep_copy()
        for first in range(begin, len(past), _TOKENS_AT_ONCE):
            if not matcher.consume_tokens(past[first : first + _TOKENS_AT_ONCE]):
                break  # the state's mask says why
        return replace(self, matcher=matcher, after=after, unless=None)


class LLGrammarState:
    """Follows one text. Its mask is computed in another thread as soon as a token is known."""

    def __init__(self, grammar: LLGrammar):
        self.matcher = grammar.matcher.deep_copy()
        self.n_words = (grammar.vocab_size + 31) // 32  # of a mask
        self.token: int | None = None  # taken, and not known to the matcher yet
        self._after, self._unless, self._thread = grammar.after, grammar.unless, grammar.thread
        self._mask: npt.NDArray[np.int32] | None = None
        self._fault: str | None = None
        self._ready = threading.Event()
        self._thread.submit(self)

    def advance(self, token: int) -> None:
        """Take the next token of the text, which the mask allowed."""
        if self._unless is not None:
            if token != self._unless:
                self._after = None
            self._unless = None
        if self._after is None:
            self._ready.wait()  # else a mask that is being computed would pass for the one after this token
            self.token = token
            self._ready.clear()
            self._thread.submit(self)
        elif token == self._after:
            self._after = None

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Clear the bits of tokens that may not come next; bit i % 32 of row[i // 32] is token i. Clears all bits if
        the grammar cannot be followed any more. Waits for the mask."""
        if self._after is not None and self._unless is None:
            return
        self._ready.wait()
        if self._mask is None:
            row[:] = 0
        else:
            n = min(len(row), self.n_words)
            row[:n] &= self._mask[:n]
            row[n:] = 0
        if self._unless is not None:
            row.view(np.uint32)[self._unless // 32] |= np.uint32(1 << self._unless % 32)

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any more; None: it can be."""
        return self._fault

    @property
    def broken(self) -> bool:
        """Whether the last mask could not be computed, which is no fault of the grammar."""
        return self._mask is None

    def set_mask(self, mask: npt.NDArray[np.int32] | None, fault: str | None = None) -> None:
        """Take the mask after the last token, [n_words], and why it allows nothing, if that is the grammar's fault.
        None: the mask could not be computed. Called by the mask thread."""
        self._mask, self._fault = mask, fault
        self._ready.set()


def _first_fault(matcher: Any) -> str | None:
    """Why no text can begin; None: one can."""
    first = matcher.deep_copy()
    some = any(first.compute_bitmask())
    if first.is_error():
        return plain_reason(first.get_error())
    return None if some else "no text follows the grammar"


def _source(llguidance: Any, spec: GrammarSpec) -> str:
    """The grammar in llguidance's own format. Raises ValueError."""
    matcher = llguidance.LLMatcher
    match spec.kind:
        case "json_schema":
            options: dict[str, Any] = {"whitespace_flexible": False}
            if spec.white_space:
                options = {"whitespace_pattern": spec.white_space}
            schema = json.dumps(without_annotations(json.loads(spec.text)))
            source = matcher.grammar_from_json_schema(schema, defaults=options)
        case "regex":
            source = matcher.grammar_from_regex(spec.text)
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.text))
            # As one token of Lark, a list of choices is a single automaton. As a rule, each is a row of the parser's
            # table, and 2,000 are too many.
            source = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "lark":
            # A grammar in GBNF, llama.cpp's form, becomes one in Lark.
            try:
                lark = import_module("llguidance.gbnf_to_lark").any_to_lark(spec.text)
            except Exception as error:  # some of its errors are of no class of their own
                raise ValueError(str(error)) from None
            source = matcher.grammar_from_lark(lark)
    return str(source)
