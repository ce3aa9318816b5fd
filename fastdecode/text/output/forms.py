"""The forms of tool calls and of reasoning that are known, and how a chat template tells which one its model uses."""

from __future__ import annotations

from fastdecode.text.output.deltas import ToolForm
from fastdecode.text.output.harmony import CHANNEL, HarmonyForm
from fastdecode.text.output.hermes import GenericForm, HermesForm
from fastdecode.text.output.llama3 import TAG, Llama3Form
from fastdecode.text.output.mistral import MistralForm
from fastdecode.text.output.reasoning import CLOSE

TOOL_FORMS: dict[str, ToolForm] = {
    form.name: form for form in (HermesForm(), Llama3Form(), MistralForm(), HarmonyForm(), GenericForm())
}
REASONING_FORMS = ("think", "gpt-oss")

#: A text in a template that renders tools, and the form that this text means; the first match counts.
_SIGNS = (
    (CHANNEL, "gpt-oss"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    (TAG, "llama3"),
    ("<|start_header_id|>", "llama3"),
)


def tool_form(name: str, template: str) -> ToolForm | None:
    """The form called `name`, a key of TOOL_FORMS; "auto": that of the chat template.

    A template without tools has the generic form. None: there is no template, or it does not tell.
    """
    if name != "auto":
        return TOOL_FORMS[name]
    if "tools" not in template and "tool_calls" not in template:
        return TOOL_FORMS[GenericForm.name] if template else None
    return next((TOOL_FORMS[form] for sign, form in _SIGNS if sign in template), None)


def reasoning_form(name: str, template: str) -> str | None:
    """The form called `name`: one of REASONING_FORMS, or None for "none"; "auto": that of the chat template."""
    if name != "auto":
        return None if name == "none" else name
    if CHANNEL in template:
        return "gpt-oss"
    return "think" if CLOSE in template else None
