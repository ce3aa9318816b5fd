"""Dialogue: how one chat request's messages are written and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastdecode.text.grammar import GrammarSpec
from fastdecode.text.output import lark, reasoning
from fastdecode.text.output.deltas import AllowedCalls, OutputParser, PlainParser, Tool, ToolForm
from fastdecode.text.output.forms import TOOL_FORMS
from fastdecode.text.output.harmony import START, HarmonyForm, HarmonyParser, final_channel
from fastdecode.text.output.reasoning import ThinkParser
from fastdecode.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The forms of a request's answer.

    Attributes:
        form: how the model writes tool calls; None: the request has no tools.
        tools: what the model may call.
        must_call: the answer is at least one call.
        parallel: the answer may have several calls.
        reasoning: a name of forms.REASONING_FORMS, or None: reasoning is not told from content.
        continued: the prompt ends within the message.
    """

    tokenizer: Tokenizer
    form: ToolForm | None
    tools: Sequence[Tool] = ()
    must_call: bool = False
    parallel: bool = True
    reasoning: str | None = None
    continued: bool = False

    @property
    def shown(self) -> frozenset[int]:
        """The special tokens that the parser has to see as text."""
        markers = self.form.markers if self.form is not None else ()
        if self.reasoning == "think":
            markers += (reasoning.OPEN, reasoning.CLOSE)
        elif self.reasoning is not None:
            markers += TOOL_FORMS[self.reasoning].markers
        found = (self.tokenizer.token_id(marker) for marker in markers)
        return frozenset(token for token in found if token is not None)

    def parser(self, prompt: str) -> OutputParser:
        """A parser for one choice of the answer to `prompt`."""
        if self._harmony:
            parser = HarmonyParser(self.parallel)
            _, begun, message = prompt.rpartition(f"{START}assistant")
            if begun:
                parser.push(message)
            return parser
        inner = PlainParser() if self.form is None else self.form.parser(self.tools, parallel=self.parallel)
        if self.reasoning != "think":
            return inner
        return ThinkParser(inner, begun=self._thinks(prompt))

    @property
    def _harmony(self) -> bool:
        return isinstance(self.form, HarmonyForm) or self.reasoning == HarmonyForm.name

    def grammar(self, prompt: str, answer: GrammarSpec | None) -> GrammarSpec | None:
        """The grammar of the answer to `prompt`; `answer` is what its content must follow, None: anything.

        Raises GrammarError.
        """
        spec = answer
        if self.form is not None:
            spec = self._with_tools(self.form, answer)
        elif answer is not None and self._harmony:
            spec = GrammarSpec("lark", f"start: {final_channel(self._literal)} answer\n{lark.answer_rule(answer)}")
        if spec is None or spec.after is not None or self.reasoning != "think" or self._harmony:
            return spec
        if self.tokenizer.token_id(reasoning.CLOSE) is None or prompt.rstrip().endswith(reasoning.CLOSE):
            return spec
        may_begin = None if self._thinks(prompt) else reasoning.OPEN
        if may_begin is not None and self.tokenizer.token_id(may_begin) is None:
            return spec
        return replace(spec, after=reasoning.CLOSE, unless=may_begin)

    def _with_tools(self, form: ToolForm, answer: GrammarSpec | None) -> GrammarSpec | None:
        if not self.must_call and answer is None and not any(tool.strict for tool in self.tools):
            return None
        allowed = AllowedCalls(self.tools, self.parallel, self._literal)
        calls = form.grammar(allowed)
        if self.must_call:
            return GrammarSpec("lark", f"start: calls\n{calls}")
        if answer is not None:
            before = final_channel(self._literal) if self._harmony else ""
            return GrammarSpec("lark", f"start: calls | {before} answer\n{lark.answer_rule(answer)}\n{calls}")
        if (plain := form.plain(self._literal)) is not None:
            return GrammarSpec("lark", f"start: calls | plain\n{plain}\n{calls}")
        assert form.opening is not None, "a form has the rule `plain` or an opening"
        calls = form.grammar(allowed, opened=True)
        if self.tokenizer.token_id(form.opening) is None:
            return GrammarSpec("lark", lark.behind(form.opening, calls))
        return GrammarSpec("lark", f"start: calls\n{calls}", after=form.opening)

    def _literal(self, text: str) -> str:
        """An added token or a text as it stands in a grammar."""
        token = self.tokenizer.token_id(text)
        if token is not None and self.tokenizer.is_added(token):
            return f"<[{token}]>"
        return lark.text(text)

    def _thinks(self, prompt: str) -> bool:
        """Whether the prompt ends within the model's reasoning."""
        if self.continued:
            return prompt.rfind(reasoning.OPEN) > prompt.rfind(reasoning.CLOSE)
        return prompt.rstrip().endswith(reasoning.OPEN)
