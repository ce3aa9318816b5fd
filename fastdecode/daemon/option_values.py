"""The functions that parse the values of options from text. They raise ValueError, whose message is for the user."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastdecode.daemon.machine import parse_cpu_list

_MAX_CPUS = 1024  # CPU_SETSIZE
_MAX_GUESSES = 64
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
#: More than any machine has, and small enough for the R-engine and the control messages.
_MAX_BYTES = 2**52
_N = TypeVar("_N", int, float)


class ConfigError(ValueError):
    """A bad option; the message is a sentence that names the option."""


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` as the type of an argument. Of a plain ValueError argparse would not show the message."""

    def parse_argument(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def number(text: str, kind: type[_N]) -> _N:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None


def _in_range(low: _N, high: float, fault: str) -> Callable[[str], _N]:
    """A function that parses a number from `low` to `high`; `fault` says what another number is or is not."""

    def parse(text: str) -> _N:
        if not low <= (value := number(text, type(low))) <= high:
            raise ValueError(f"{text} {fault}")
        return value

    return parse


_ENDLESS = sys.float_info.max
positive = _in_range(1, _ENDLESS, "is not a positive number")
count = argument(positive)  # how many there are of something that must not be missing
non_negative = _in_range(0, _ENDLESS, "is negative")
port = _in_range(0, 65535, "is not a TCP port (0 to 65535; 0: any free one)")
seconds = _in_range(0.0, _ENDLESS, "is not a time in seconds")
milliseconds = _in_range(0.0, _ENDLESS, "is not a time in milliseconds")
part = _in_range(sys.float_info.min, 1, "is not a part between 0 and 1, such as 0.9")


def speculation(text: str) -> str:
    """A text that `guesses` can read. It stays a text, because the node's own processes get it as an option again."""
    guesses(text)
    return text


def guesses(text: str) -> int:
    """The most tokens that "off", "suffix:K" or "mtp:K" guesses in a step; 0: none."""
    if text == "off":
        return 0
    kind, _, most = text.partition(":")
    value = number(most, int) if most.isdecimal() else 0
    if kind not in ("suffix", "mtp") or not 1 <= value <= _MAX_GUESSES:
        raise ValueError(f"{text!r} is neither off nor suffix:K nor mtp:K with K within 1 to {_MAX_GUESSES}")
    return value


def mtp_drafts(text: str) -> int:
    """The most tokens that a model's MTP head drafts in a step, by a text that `guesses` can read."""
    return guesses(text) if text.startswith("mtp:") else 0


def cpu_list(text: str) -> tuple[int, ...]:
    cpus = parse_cpu_list(text, _MAX_CPUS)
    if not cpus or len(set(cpus)) != len(cpus):
        raise ValueError(f"{text!r} is not a list of cpus such as 0-3,8")
    return cpus


#: Spellings of dtypes that people type, beside the names of our own.
_DTYPE_NAMES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def dtype(text: str) -> str:
    return _DTYPE_NAMES.get(text, text)


def named_directory(text: str) -> tuple[str, Path]:
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise ValueError(f"{text!r} is not a name and a directory such as french=adapters/french")
    return name, Path(directory)


def _host_and_port(text: str, schemes: Sequence[str], any_port: bool = False) -> str:
    """A URL of a host and a port; `any_port`: port 0 takes any free one."""
    try:
        parts = urlsplit(text)
        has_port = parts.port is not None if any_port else parts.port
        good = parts.scheme in schemes and parts.hostname and has_port and not (parts.path or parts.query)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{text!r} is not of the form {' or '.join(f'{scheme}://host:port' for scheme in schemes)}")
    return text


named_host = partial(_host_and_port, schemes=("tcp", "rdma"))
named_http_host = partial(_host_and_port, schemes=("http", "https"))
tcp_url = partial(_host_and_port, schemes=("tcp",))
tcp_address = partial(_host_and_port, schemes=("tcp",), any_port=True)


def url(text: str) -> str:
    """A URL of an R-node. Transports check the rest of their URLs."""
    try:
        parts = urlsplit(text)
        complete = (parts.hostname and parts.port is not None) or parts.scheme not in ("", "tcp", "rdma")
    except ValueError:  # the port is no number, or too large
        complete = False
    if "://" not in text or not complete:
        raise ValueError(f"{text!r} is not a URL such as tcp://host:port or shm:///path/to/socket")
    return text


def origin(text: str) -> str:
    """The origin of web pages, or "*" for all."""
    parts = urlsplit(text)
    if text != "*" and (not (parts.scheme and parts.netloc) or parts.path or parts.query):
        raise ValueError(f"{text!r} is not an origin such as https://chat.example.org")
    return text


def http_url(text: str, wanted: str = "a URL such as http://localhost:4318/v1/traces") -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, or too large
        good = False
    if not good:
        raise ValueError(f"{text!r} is not {wanted}")
    return text


s_node_url = partial(http_url, wanted="of the form http://host:port")


def name(text: str) -> str:
    if not text.strip():
        raise ValueError("a name must not be empty")
    return text


def parse_bytes(text: str) -> int:
    """ "4GiB", "512 MiB", "1e9", "4G" (a decimal G) -> bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*(?:([kmgt]i?)?b?)\s*", text.lower())
    if not match or not 1 <= (size := float(match[1]) * _UNITS[match[2] or ""]) <= _MAX_BYTES:
        raise ValueError(f"{text!r} is not a size such as 4GiB or 512MiB")
    return int(size)


size_option = argument(parse_bytes)


def memory(text: str) -> int:
    """A size of memory. One below 1 MiB is refused, because its unit was forgotten."""
    if (size := parse_bytes(text)) < 1 << 20:
        meant = f"; is {text.strip()}GiB meant?" if re.fullmatch(r"\s*[0-9.]+\s*", text) else ""
        raise ValueError(f"{text} is less than a MiB{meant}")
    return size


def gpu_memory(text: str) -> int | None:
    """A size of memory, or 0 for none; None for "auto"."""
    return None if text == "auto" else 0 if text.strip() == "0" else memory(text)


def format_bytes(n: float) -> str:
    """A number of bytes as text: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
