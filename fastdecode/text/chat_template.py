"""Chat templates: Jinja programs that write a conversation as a prompt. They run as in transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Names that `render` takes or passes to a template itself. A caller's variables must have other names.
RESERVED_VARIABLES = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
#: The names that the reasoning of an assistant's message has. A template reads one of them.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
#: Stands behind the last message's text while a prompt is rendered that ends there. The space is transformers' way to
#: see whether the template strips the text.
_END = f"END-{uuid4().hex} "
_MOST_SECONDS = 10  # of a core for a prompt
_DEADLINE = "the deadline"  # a variable that no template can name


class ChatTemplateError(ValueError):
    """There is no template, or it is not valid Jinja, or it refuses the conversation.

    A template may raise the refusal itself, with its own message.
    """


class EndlessTemplate(ChatTemplateError):
    """The template does not come to an end in time. `where` names its file, for the operator; the message is for
    clients, too."""

    def __init__(self, where: str = ""):
        super().__init__(f"the chat template is not done with the messages after {_MOST_SECONDS} s")
        self.where = where


class ChatTemplate:
    """A compiled chat template. It comes with a downloaded model, so it runs in Jinja's immutable sandbox, and loops or
    macros that do not end in time are an error. The time and the memory of a single expression have no bound."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], file: Path | None = None):
        """`special_tokens` maps the names that a template may use ("bos_token", ...) to texts. `file` is where the
        template stands.

        Raises ChatTemplateError for invalid Jinja; the message names the file.
        """
        where = "" if file is None else f"{file}: "
        self.source = source
        self._where = where
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(_with_checks(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"{where}the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from None
        except (RecursionError, SyntaxError):  # SyntaxError: Python refuses the code that Jinja has made
            raise ChatTemplateError(f"{where}the chat template is nested too deeply") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation as text. The template does not see keys of messages whose value is None.

        With `continue_final_message`, the prompt ends with the last message's content, or with its reasoning if it has
        no content. `tools` are the definitions of functions as OpenAI's API has them. Raises ChatTemplateError.
        """
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        ended = ""  # the text that the prompt ends with
        if continue_final_message:
            last = {"content": "", **shown[-1]}
            field = next(name for name in ("content", *REASONING_FIELDS) if name in shown[-1])
            ended = last[field]
            shown[-1] = last | {field: ended + _END}
        shown = [_with_reasoning(message) for message in shown]
        arguments = (add_generation_prompt, tools, variables)
        try:
            text = self._render(shown, *arguments)
        except ChatTemplateError:
            # gpt-oss's template refuses both content and reasoning before a call.
            simpler = [_without_reasoning(message) for message in shown]
            if simpler == shown:
                raise
            text = self._render(simpler, *arguments)
        return _up_to_end(text, ended) if continue_final_message else text

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        known = {
            "messages": messages,
            "tools": [_with_description(tool) for tool in tools or ()] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _DEADLINE: time.thread_time() + _MOST_SECONDS,
        }
        try:
            return self._template.render({**self._special_tokens, **variables, **known})
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error.message}") from None
        except EndlessTemplate:
            raise EndlessTemplate(self._where) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template failed on the messages: {error}") from None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if it has some, under every name."""
    found = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if found is None:
        return message
    return {"thinking": found, "reasoning": found, **message, "reasoning_content": found}


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message without `thinking`, if it has content and calls besides."""
    if not (message.get("content") and message.get("tool_calls")):
        return message
    return {name: value for name, value in message.items() if name != "thinking"}


class _Function(dict[str, Any]):
    """The definition of a function. A template that reads the description of one that has none gets ""; JSON of the
    definition shows none."""

    def __missing__(self, key: str) -> str:
        if key == "description":
            return ""
        raise KeyError(key)


def _with_description(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return {**tool, "function": _Function(function)} if isinstance(function, Mapping) else tool


def _up_to_end(rendered: str, text: str) -> str:
    """A prompt up to `_END`, which stands behind `text`. Cuts as transformers does: at the last `_END`, and white space
    before it too if the template has stripped the text.

    Raises ChatTemplateError if the template does not show the text.
    """
    end = rendered.rfind(_END.rstrip())
    if end < 0 or text.strip() not in rendered:
        raise ChatTemplateError("the chat template does not show the last message, so it cannot be continued")
    return rendered[:end] if rendered.startswith(_END, end) else rendered[:end].rstrip()


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's words for training.

    Rendering keeps the words only.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["check_time"] = _check_time
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _with_checks(template: nodes.Template) -> nodes.Template:
    """The template, which checks the time in each turn of a loop and each call of a macro."""
    found: list[Any] = list(template.find_all((nodes.For, nodes.Macro)))
    for node in found:
        check = nodes.Filter(nodes.Const(None), "check_time", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
    return template


@pass_context
def _check_time(context: Context, _: None) -> None:
    if time.thread_time() > context.parent[_DEADLINE]:
        raise EndlessTemplate


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The template filter `tojson`: plain JSON. Jinja's own filter of this name escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
