"""Parse and check the bodies of /v1/completions and /v1/chat/completions.

The API reads a field, or it accepts a value that asks for nothing (an empty list of tools, `echo` false), or it refuses
the request with a 400 that names the field. Only what a field's specification lets a server leave out is accepted and
left out: docs/api.md lists these fields, and the log names each of them once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from fastdecode.api.choices import TextOptions
from fastdecode.api.defaults import NO_DEFAULTS, SamplingDefaults
from fastdecode.api.fields import Fields, invalid, is_boolean, is_integer, is_object, is_one_of, is_string, read_objects
from fastdecode.api.messages import read_messages
from fastdecode.api.origins import Origins
from fastdecode.api.structured import GrammarField, read_grammar
from fastdecode.engine.state.request import SamplingParams
from fastdecode.text.chat_template import REASONING_FIELDS, RESERVED_VARIABLES
from fastdecode.text.output.deltas import Tool

MAX_N = 128  # choices of a prompt
MAX_CHOICES = 1024  # choices of a request, all prompts together
MAX_STOPS = 16
MAX_STRING_LENGTH = 1024  # characters of a stop string or a bad word
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024
#: Fields that become variables of the chat template, with their values.
HINTS = {
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "verbosity": ("low", "medium", "high"),
}
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens on /v1/completions
_MAX_INT = 2**31 - 1

# Labels of a request, which never change its answer.
_LABELS = ("user", "safety_identifier", "prompt_cache_key", "request_id", "chat_id", "session_id")

# Fields that the API does not implement, each with the values that ask for nothing.
_NEUTRAL = {  # of both endpoints; most are vLLM's
    "early_stopping": is_one_of(False),
    "length_penalty": is_one_of(1),
    "metadata": is_object,  # a label
    "return_token_ids": is_one_of(False),
    "return_tokens_as_token_ids": is_one_of(False),
    "service_tier": is_one_of("auto", "default"),
    "spaces_between_special_tokens": is_one_of(True),
    "store": is_one_of(False),
    "use_beam_search": is_one_of(False),
}
_NEUTRAL_COMPLETION = _NEUTRAL | {"suffix": is_one_of("")}
_NEUTRAL_CHAT = _NEUTRAL | {
    "audio": is_one_of(),
    "echo": is_one_of(False),
    "function_call": is_one_of("none", "auto"),  # "auto" without functions is "none"
    "functions": is_one_of([]),
    "modalities": is_one_of(["text"]),
    "web_search_options": is_one_of(),
}

#: Fields whose specification lets a server leave out what they ask for, each with the test of a valid value.
LEFT_OUT = {
    "client_metadata": is_object,
    "prompt_cache_options": is_object,
    "prompt_cache_retention": is_string,
    "service_tier": is_string,
    "store": is_boolean,  # nothing is stored
}
_LEFT_OUT_CHAT = LEFT_OUT | {"prediction": is_object}
LEFT_OUT_OF_STREAMS = {"include_obfuscation": is_boolean}  # of stream_options


@dataclass(frozen=True, slots=True)
class Generation:
    """The parameters of a generation that both endpoints have in common."""

    model: str | None  # None: the model that is served
    sampling: SamplingParams
    n: int
    text: TextOptions
    stream: bool
    include_usage: bool  # a stream ends with an event that has the usage
    continuous_usage: bool  # every event of a stream has the usage so far
    logprobs: bool  # the answer reports log-probabilities
    grammar: GrammarField | None = None  # the grammar that every choice must follow
    bad_words: tuple[str, ...] = ()  # words that must not occur in the answer
    skip_special_tokens: bool = True  # special tokens are not text
    truncate: int | None = None  # how many of the prompt's last tokens to keep; -1: as many as the context holds
    prompt_logprobs: int | None = None  # alternatives to report for each token of the prompt; None: no report
    best_of: int = 0  # choices of a prompt, of which the `n` likeliest are answered; 0: `n`
    add_special_tokens: bool = True  # the tokenizer adds its special tokens to the prompt

    @property
    def candidates(self) -> int:
        """Choices of a prompt that are generated."""
        return self.best_of or self.n

    @property
    def mask_param(self) -> str | None:
        """The request's field that forbids most tokens; None: there is none."""
        if self.grammar is not None:
            return self.grammar.param
        return "allowed_token_ids" if self.sampling.allowed_token_ids else "bad_words" if self.bad_words else None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A body of /v1/completions. There is at least one prompt, and all prompts are texts or all are token ids."""

    generation: Generation
    prompts: list[str] | list[list[int]]
    echo: bool  # every choice's text begins with the prompt


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A body of /v1/chat/completions. The `messages` suit a chat template: every content is a string."""

    generation: Generation
    messages: list[dict[str, Any]]
    template_variables: dict[str, Any]
    tool_use: ToolUse
    add_generation_prompt: bool = True  # the prompt ends with the beginning of an answer
    continue_final_message: bool = False  # the answer continues the last message
    hints: Mapping[str, str] = field(default_factory=dict)  # of the template's variables, those of HINTS
    origins: Origins = field(default_factory=Origins)  # of a chat that stands for a body of another API


def parse_completion(body: Any, defaults: SamplingDefaults = NO_DEFAULTS) -> CompletionRequest:
    """Check a decoded JSON body. Raises ApiError (400)."""
    fields = Fields(body)
    prompts = _prompts(fields.required("prompt"))
    n = fields.integer("n", 1, MAX_N, 1)
    best_of = fields.integer("best_of", 1, MAX_N, n)
    if best_of < n:
        raise invalid("best_of", f"must be at least n, which is {n}")
    if len(prompts) * best_of > MAX_CHOICES:
        name = "n" if best_of == n else "best_of"
        raise invalid(name, f"{len(prompts)} prompts times {name}={best_of} is more than {MAX_CHOICES} choices")
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS, None)
    echo = fields.boolean("echo")
    max_tokens = _max_tokens(fields, _DEFAULT_COMPLETION_TOKENS, 0 if echo else 1)
    generation = _generation(fields, defaults, n=n, max_tokens=max_tokens, logprobs=logprobs, special=True)
    if best_of > n:
        if generation.stream:
            raise invalid("best_of", "must equal n in a stream, because the best are known at the end")
        sampling = replace(generation.sampling, logprobs=logprobs or 0)
        generation = replace(generation, sampling=sampling, best_of=best_of)
    if echo and logprobs is not None:
        most = max(logprobs, generation.prompt_logprobs or 0)
        generation = replace(generation, sampling=replace(generation.sampling, prompt_logprobs=most))
    fields.refuse_others(_NEUTRAL_COMPLETION, LEFT_OUT)
    return CompletionRequest(generation, prompts, echo)


def parse_translated(chat: dict[str, Any], defaults: SamplingDefaults, origins: Origins) -> ChatRequest:
    """Check a chat into which a body of another API was translated. Raises ApiError (400), which names that body's
    field."""
    with origins.named():
        return replace(parse_chat(chat, defaults), origins=origins)


def parse_chat(body: Any, defaults: SamplingDefaults = NO_DEFAULTS) -> ChatRequest:
    """Check a decoded JSON body. Raises ApiError (400)."""
    fields = Fields(body)
    given = fields.required("messages")
    messages = read_messages(given)
    tool_use = read_tools(fields)
    n = fields.integer("n", 1, MAX_N, 1)
    max_tokens = _max_tokens(fields, defaults.max_tokens)
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, None)
    if top_logprobs is not None and not wants_logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    logprobs = (top_logprobs or 0) if wants_logprobs else None
    generation = _generation(fields, defaults, n=n, max_tokens=max_tokens, logprobs=logprobs, special=False)
    hints = {name: value for name in HINTS if (value := read_hint(fields, name, HINTS[name])) is not None}
    variables = _template_variables(fields, hints)
    continues = fields.boolean("continue_final_message")
    begins = fields.boolean("add_generation_prompt", not continues)
    if continues and begins:
        raise invalid("continue_final_message", "cannot be combined with add_generation_prompt")
    if continues and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "the last message must be the assistant's")
    if continues and given[-1].get("content") is None and any(name in messages[-1] for name in REASONING_FIELDS):
        messages[-1]["content"] = None  # the answer continues the reasoning
    fields.refuse_others(_NEUTRAL_CHAT, _LEFT_OUT_CHAT)
    return ChatRequest(generation, messages, variables, tool_use, begins, continues, hints)


def read_hint(fields: Fields, name: str, known: Sequence[str]) -> str | None:
    """Read a field that has one of the values `known`. Raises ApiError (400)."""
    hint = fields.string(name)
    if hint is not None and hint not in known:
        raise invalid(fields.param(name), f"must be one of {', '.join(known)}", code="unsupported_value")
    return hint


def _max_tokens(fields: Fields, default: int | None, least: int = 1) -> int | None:
    """Read max_completion_tokens and max_tokens, its old name."""
    max_tokens = fields.integer("max_tokens", least, _MAX_INT, None)
    max_completion_tokens = fields.integer("max_completion_tokens", least, _MAX_INT, None)
    if max_tokens is not None and max_completion_tokens not in (None, max_tokens):
        raise invalid("max_tokens", "is the old name of max_completion_tokens; give one of them")
    return next((given for given in (max_completion_tokens, max_tokens) if given is not None), default)


def _generation(
    fields: Fields, defaults: SamplingDefaults, *, n: int, max_tokens: int | None, logprobs: int | None, special: bool
) -> Generation:
    """Read the fields that both endpoints have in common. `special`: the default of add_special_tokens."""
    model = fields.string("model")
    top_k = fields.integer("top_k", -1, _MAX_INT, defaults.top_k)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS, None)
    sampling = SamplingParams(
        # A request that wants no token gets one all the same, which is not shown: its prompt must be computed.
        max_tokens=1 if max_tokens == 0 else max_tokens,
        temperature=fields.number("temperature", 0.0, 2.0, defaults.temperature),
        top_p=fields.number("top_p", 0.0, 1.0, defaults.top_p),
        top_k=max(top_k, 0),  # -1 means "all", as 0 does
        min_p=fields.number("min_p", 0.0, 1.0, defaults.min_p),
        seed=_seed(fields),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=fields.integer("priority", 0, _MAX_INT, 0),
        cache_salt=_cache_salt(fields),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100.0, defaults.repetition_penalty),
        logit_bias=_logit_bias(fields),
        stop_token_ids=_token_id_set(fields, "stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos"),
        min_tokens=_min_tokens(fields, max_tokens),
        allowed_token_ids=_token_id_set(fields, "allowed_token_ids"),
    )
    stream = fields.boolean("stream")
    if stream and prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "cannot be combined with stream")
    include_usage, continuous_usage = _usage_options(fields, stream)
    generation = Generation(
        model,
        sampling,
        n,
        text=TextOptions(
            _strings(fields, "stop", MAX_STOPS, single=True),
            sampling.min_tokens,
            fields.boolean("include_stop_str_in_output"),
            prompt_only=max_tokens == 0,
        ),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=logprobs is not None,
        grammar=read_grammar(fields),
        bad_words=_strings(fields, "bad_words", MAX_BAD_WORDS),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        truncate=_truncate(fields),
        prompt_logprobs=prompt_logprobs,
        add_special_tokens=fields.boolean("add_special_tokens", special),
    )
    for name in _LABELS:
        fields.string(name)
    return generation


def _cache_salt(fields: Fields) -> str:
    """A digest of the salt, because the engine keeps it with every cached prefix; "" without one."""
    salt = fields.string("cache_salt")
    return blake2b(salt.encode(), digest_size=32).hexdigest() if salt else ""


def _seed(fields: Fields) -> int | None:
    seed = fields.integer("seed", -(2**63), 2**63 - 1, None)
    return None if seed is None else seed % 2**63


def _min_tokens(fields: Fields, max_tokens: int | None) -> int:
    least = fields.integer("min_tokens", 0, _MAX_INT, 0)
    if max_tokens is not None and least > max_tokens:
        raise invalid("min_tokens", f"must be at most max_tokens, which is {max_tokens}")
    return least


def _truncate(fields: Fields) -> int | None:
    kept = fields.integer("truncate_prompt_tokens", -1, _MAX_INT, None)
    if kept == 0:
        raise invalid("truncate_prompt_tokens", "must be -1 or at least 1")
    return kept


def _strings(fields: Fields, name: str, most: int, *, single: bool = False) -> tuple[str, ...]:
    """Read a list of at most `most` strings; with `single`, a string stands for a list of one."""
    value = fields.take(name)
    strings = [] if value is None else [value] if single and isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        kinds = "a string or a list of strings" if single else "a list of strings"
        raise invalid(name, f"must be {kinds}, and no string may be empty")
    if len(strings) > most:
        raise invalid(name, f"at most {most} strings")
    if any(len(s) > MAX_STRING_LENGTH for s in strings):
        raise invalid(name, f"at most {MAX_STRING_LENGTH} characters a string")
    return tuple(strings)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Read OpenAI's object of biases, whose keys are token ids as strings. Biases of 0 are dropped."""
    bias = fields.take("logit_bias")
    if bias is None:
        return ()
    if not isinstance(bias, dict):
        raise invalid("logit_bias", "must be a JSON object of token ids and numbers")
    if len(bias) > MAX_BIASES:
        raise invalid("logit_bias", f"at most {MAX_BIASES} tokens")
    values: dict[int, float] = {}
    entries = Fields(bias, "logit_bias")
    for name in bias:
        if not (name.isascii() and name.isdigit()) or len(name) > 10 or int(name) > _MAX_INT or int(name) in values:
            raise invalid(entries.param(name), "is not a token id, or is given twice")
        values[int(name)] = entries.number(name, -100.0, 100.0, 0.0)
    return tuple((token, value) for token, value in values.items() if value)


def _token_id_set(fields: Fields, name: str) -> frozenset[int]:
    ids = fields.take(name)
    if ids is None:
        return frozenset()
    if ids != [] and not is_token_ids(ids):
        raise invalid(name, "must be a list of token ids")
    return frozenset(ids)


def _usage_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Read stream_options: include_usage and vLLM's continuous_usage_stats."""
    options = fields.take("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise invalid("stream_options", "needs stream to be true")
    options = Fields(options, "stream_options")
    include_usage, continuous = options.boolean("include_usage"), options.boolean("continuous_usage_stats")
    options.refuse_others({"include_obfuscation": is_one_of(False)}, LEFT_OUT_OF_STREAMS)
    return include_usage, continuous


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if is_integer(prompt[0]):
        prompt = [prompt]
    if len(prompt) > MAX_CHOICES:
        raise invalid("prompt", f"at most {MAX_CHOICES} prompts a request")
    if not all(isinstance(p, str) for p in prompt) and not all(is_token_ids(p) for p in prompt):
        message = f"must be all strings or all lists of token ids from 0 to {_MAX_INT}, and no list may be empty"
        raise invalid("prompt", message)
    prompts: list[str] | list[list[int]] = prompt
    return prompts


def is_token_ids(value: Any) -> bool:
    """Whether `value` is a list of at least one token id. Lists can be long, so no Python loop runs over them."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _MAX_INT


def _template_variables(fields: Fields, hints: Mapping[str, str]) -> dict[str, Any]:
    """The variables for the model's template: `hints`, and those of vLLM's extension `chat_template_kwargs`, e.g.
    {"enable_thinking": false}."""
    asked: dict[str, Any] = dict(hints)
    if hints.get("reasoning_effort") == "none":
        asked["enable_thinking"] = False
    variables = fields.take("chat_template_kwargs")
    if variables is None:
        return asked
    if not isinstance(variables, dict):
        raise invalid("chat_template_kwargs", "must be a JSON object")
    for name in variables:
        if name in RESERVED_VARIABLES or not name.isidentifier():
            raise invalid(f"chat_template_kwargs.{name}", "is not a variable that a request may set")
    return asked | variables


MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how the answer may use them.

    `tools` is empty for a request without tools or with tool_choice "none".
    """

    tools: tuple[Tool, ...] = ()
    definitions: list[dict[str, Any]] = field(default_factory=list)  # of `tools`, for the chat template
    must_call: bool = False  # tool_choice is "required" or names a function
    callable_tools: tuple[Tool, ...] = ()  # the tools that tool_choice allows
    parallel: bool = True


def read_tools(fields: Fields) -> ToolUse:
    """Read the fields about tools. Raises ApiError (400)."""
    parallel = fields.boolean("parallel_tool_calls", True)
    value, choice = fields.take("tools"), fields.take("tool_choice")
    entries = [] if value is None else read_objects(value, "tools", "tools")
    if len(entries) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} tools")
    pairs = [_tool(entry) for entry in entries]
    tools = tuple(tool for tool, _ in pairs)
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid("tools", f"two tools are called {twice}")
    if choice in (None, "auto", "none"):
        if choice == "none" or not tools:
            return ToolUse()
        return ToolUse(tools, [definition for _, definition in pairs], False, tools, parallel)
    if not tools:
        raise invalid("tool_choice", "there are no tools to choose from")
    chosen = tools
    if choice != "required":
        named = _named(choice)
        if named not in names:
            raise invalid("tool_choice", f"there is no tool {named!r}")
        chosen, parallel = (tools[names.index(named)],), False
    return ToolUse(tools, [definition for _, definition in pairs], True, chosen, parallel)


def _tool(fields: Fields) -> tuple[Tool, dict[str, Any]]:
    fields.require_type("function", kind="functions")
    function = fields.required_object("function")
    name = function.string("name")
    if name is None or not _NAME.fullmatch(name):
        raise invalid(function.param("name"), "must be a name of at most 128 letters, digits, _, . and -")
    definition: dict[str, Any] = {"name": name}
    if (description := function.string("description")) is not None:
        definition["description"] = description
    parameters = function.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(function.param("parameters"), "must be a JSON schema: an object")
    definition["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    strict = function.boolean("strict")
    function.refuse_others()
    fields.refuse_others()
    return Tool(name, parameters, strict, function.param("parameters")), {"type": "function", "function": definition}


def _named(choice: Any) -> str:
    """The function that a tool_choice names."""
    if not isinstance(choice, dict):
        raise invalid("tool_choice", 'must be "none", "auto", "required" or name a function')
    fields = Fields(choice, "tool_choice")
    fields.require_type("function", kind="functions")
    function = fields.required_object("function")
    name = function.required_string("name")
    function.refuse_others()
    fields.refuse_others()
    return name
