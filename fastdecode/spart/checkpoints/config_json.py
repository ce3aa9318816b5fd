"""ConfigJson: typed access to a checkpoint's config.json. Every problem is a CheckpointError that names the key.

Both spellings are read: those of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of transformers 5
(`rope_parameters`, `dtype`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdecode.gguf.file import pointer_fault
from fastdecode.spart.checkpoints.config import ACTIVATIONS, CheckpointError, Rope, WrongValue

#: The activation dtypes by the names of config.json.
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_MOST = 2**31 - 1  # of a size: a number without end would overflow elsewhere


class ConfigJson:
    """The keys of a config.json. All methods raise WrongValue for a value of another type or range, and CheckpointError
    for one that the native decoder does not support."""

    def __init__(self, raw: dict[str, Any]):
        self.raw = raw

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least`, which is 0 or 1, to _MOST. An absent key or null means `default`; without a
        default the key must be there."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json lacks {name!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "positive whole number" if least else "whole number"
            raise WrongValue(f"config.json: {name!r} is {value!r}, not a {kind}")
        if value > _MOST:
            raise WrongValue(f"config.json: {name!r} is {value}, more than {_MOST}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive, finite number."""
        return _positive(self.raw, name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise WrongValue(f"config.json: {name!r} is {value!r}, not true or false")
        return value

    def require(self, **values: Any) -> None:
        """Raise CheckpointError for a key that has another value. An absent key has the value that the family implies,
        and a published file may have keys that its class in transformers does not read."""
        for name, value in values.items():
            if self.raw.get(name, value) != value:
                raise CheckpointError(f"config.json: {name!r} is {self.raw[name]!r}; only {value!r} is supported")

    def activation(self, name: str, default: str) -> str:
        """One of ACTIVATIONS."""
        value = self.raw.get(name, default)
        if not isinstance(value, str):
            raise WrongValue(f"config.json: {name!r} is {value!r}, not a name")
        if value not in ACTIVATIONS:
            raise CheckpointError(f"config.json: {name!r} is {value!r}; known are {', '.join(ACTIVATIONS)}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """A JSON object; empty if the key is absent or null."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise WrongValue(f"config.json: {name!r} is {value!r}, not an object")
        return value

    def architectures(self) -> list[str]:
        """Class names of transformers."""
        names = self.raw.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise WrongValue(f"config.json: 'architectures' is {names!r}, not a list of names")
        return names

    def dtype(self) -> str:
        """The checkpoint's dtype: "fp32", "fp16" or "bf16"."""
        name = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in DTYPES:
            raise WrongValue(f"config.json: dtype {name!r} is not one of {', '.join(DTYPES)}")
        return DTYPES[name]

    def rope_table(self, default: dict[str, Any] | None = None) -> dict[str, Any]:
        """`rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
        return self.table("rope_scaling") or self.table("rope_parameters") or default or {}

    def rope(
        self, max_positions: int, theta: float = 10000.0, scaling: dict[str, Any] | None = None, partial: bool = False
    ) -> Rope:
        """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4). `theta` and
        `scaling` are the defaults. `partial`: the family may turn only the first elements of each head."""
        raw = self.rope_table(scaling)
        for name, value in raw.items():
            if isinstance(value, dict):
                raise CheckpointError(f"config.json: RoPE for layers of type {name!r} alone is not supported here")
        kind = raw.get("rope_type") or raw.get("type") or "default"
        if not isinstance(kind, str):
            raise WrongValue(f"config.json: 'rope_type' is {kind!r}, not a name")
        read = _ROPES.get(kind)
        if read is None:
            raise CheckpointError(f"RoPE scaling {kind!r} is not supported; known are {', '.join(_ROPES)}")
        # transformers prefers a value that stands beside rope_scaling to the one within it.
        name = "original_max_position_embeddings"
        trained_on = _positive(self.raw if self.raw.get(name) else raw, name, max_positions)
        if trained_on < 1:
            raise WrongValue(f"config.json: {name!r} is {trained_on:g}, less than 1")
        fraction = _positive(raw, "partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        if fraction > 1 or (fraction < 1 and not partial):
            raise CheckpointError(f"config.json: a partial_rotary_factor of {fraction:g} is not supported here")
        rope = read(raw, max_positions, int(trained_on))
        base = _positive(raw, "rope_theta", self.number("rope_theta", theta))
        if base <= 1 and rope.kind == "yarn":  # whose range is in logarithms of the base
            raise WrongValue(f"config.json: a 'rope_theta' of {base:g} is too small")
        return replace(rope, theta=base, fraction=fraction)


def _default(raw: dict[str, Any], max_positions: int, trained_on: int) -> Rope:
    """No scaling. "dynamic" scales nothing up to max_position_embeddings, and no longer sequence is served; the three
    positions of "mrope" are equal for text."""
    return Rope()


def _linear(raw: dict[str, Any], max_positions: int, trained_on: int) -> Rope:
    return Rope(kind="linear", factor=_positive(raw, "factor"))


def _proportional(raw: dict[str, Any], max_positions: int, trained_on: int) -> Rope:
    return Rope(kind="proportional", factor=_positive(raw, "factor", 1.0))


def _llama3(raw: dict[str, Any], max_positions: int, trained_on: int) -> Rope:
    low, high = _positive(raw, "low_freq_factor"), _positive(raw, "high_freq_factor")
    if low >= high:
        raise WrongValue(f"config.json: 'low_freq_factor' is {low:g}, 'high_freq_factor' {high:g}, which is not more")
    return Rope(
        kind="llama3",
        factor=_positive(raw, "factor"),
        original_max_positions=trained_on,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(raw: dict[str, Any], max_positions: int, trained_on: int) -> Rope:
    factor = _positive(raw, "factor", max_positions / trained_on)
    fast, slow = _positive(raw, "beta_fast", 32.0), _positive(raw, "beta_slow", 1.0)
    if fast < slow:  # they are equal in Kimi K2
        raise WrongValue(f"config.json: 'beta_slow' is {slow:g}, 'beta_fast' {fast:g}, which is less")
    scale, scale_all = (_number(raw, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    attention = attention_factor(factor, scale) / attention_factor(factor, scale_all) if scale and scale_all else None
    return Rope(
        kind="yarn",
        factor=factor,
        original_max_positions=trained_on,
        beta_fast=fast,
        beta_slow=slow,
        truncate=bool(raw.get("truncate", True)),
        attention_factor=_number(raw, "attention_factor", attention or attention_factor(factor)),
    )


def attention_factor(factor: float, scale: float = 1.0) -> float:
    """sqrt(1/t) of arXiv 2309.00071, equation 22; `scale` multiplies the logarithm, as in DeepSeek's models."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(raw: dict[str, Any], max_positions: int, trained_on: int) -> Rope:
    factor = _positive(raw, "factor", max_positions / trained_on)
    if trained_on < 2:
        raise WrongValue(f"config.json: 'original_max_position_embeddings' is {trained_on}")
    attention = math.sqrt(1 + math.log(factor) / math.log(trained_on)) if factor > 1 else 1.0
    return Rope(
        kind="factors",
        original_max_positions=trained_on,
        attention_factor=_number(raw, "attention_factor", attention),
        factors=_numbers(raw, "short_factor"),
        long_factors=_numbers(raw, "long_factor"),
    )


#: The readers by the name of the scaling in config.json. Each function gets RoPE's table, the number of positions, and
#: the number that the model was trained on before scaling.
_ROPES: dict[str, Callable[[dict[str, Any], int, int], Rope]] = {
    "default": _default,
    "dynamic": _default,
    "mrope": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def token_ids(name: str, *files: dict[str, Any]) -> tuple[int, ...]:
    """The token ids under a key of config.json and generation_config.json, each once. Raises CheckpointError.

    Both files are read because chat models often list their end tokens in generation_config.json alone.
    """
    ids: dict[int, None] = {}
    for value in (raw.get(name) for raw in files):
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise WrongValue(f"{name!r} is {value!r}, not a token id or a list of them")
            ids[token] = None
    return tuple(ids)


def read_json(path: Path, owner: str = "a model") -> dict[str, Any]:
    """The JSON object in a file of the directory of `owner`. Raises CheckpointError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not the directory of {owner}: it has no {path.name}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path.parent} is not a directory") from None
    except RecursionError:
        raise WrongValue(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise WrongValue(pointer_fault(path) or f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WrongValue(f"{path} is not a JSON object")
    return value


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongValue(f"config.json: {name!r} is {value!r}, not a number")
    if not abs(value) <= sys.float_info.max:
        raise WrongValue(f"config.json: {name!r} is {value!r}, not a finite number")
    return float(value)


def _positive(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _number(raw, name, default)
    if value <= 0:
        raise WrongValue(f"config.json: {name!r} is {value!r}, not a positive number")
    return value


def _numbers(raw: dict[str, Any], name: str) -> tuple[float, ...]:
    values = raw.get(name)
    if not isinstance(values, list) or not values:
        raise WrongValue(f"config.json: {name!r} is {values!r}, not a list of numbers")
    return tuple(_positive({name: value}, name) for value in values)
