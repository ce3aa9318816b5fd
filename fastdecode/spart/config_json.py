"""ConfigJson: typed access to a checkpoint's config.json. Every problem is a CheckpointError that names the key.

Both spellings are read: those of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of transformers 5
(`rope_parameters`, `dtype`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fastdecode.spart.config import ACTIVATIONS, CheckpointError, Rope

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class ConfigJson:
    """The keys of a config.json. All methods raise CheckpointError for a value of another type or range."""

    def __init__(self, raw: dict[str, Any]):
        self.raw = raw

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer. An absent key or null means `default`; without a default the key must be there."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json lacks {name!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {name!r} is {value!r}, not a positive whole number")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive, finite number."""
        return _positive(self.raw, name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name!r} is {value!r}, not true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        """One of ACTIVATIONS."""
        value = self.raw.get(name, default)
        if value not in ACTIVATIONS:
            raise CheckpointError(f"config.json: {name!r} is {value!r}; known are {', '.join(ACTIVATIONS)}")
        return str(value)

    def table(self, name: str) -> dict[str, Any]:
        """A JSON object; empty if the key is absent or null."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {name!r} is {value!r}, not an object")
        return value

    def architectures(self) -> list[str]:
        """Class names of transformers."""
        names = self.raw.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"config.json: 'architectures' is {names!r}, not a list of names")
        return names

    def dtype(self) -> str:
        """The checkpoint's dtype: "fp32", "fp16" or "bf16"."""
        name = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in _DTYPES:
            raise CheckpointError(f"config.json: dtype {name!r} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def rope(self, max_positions: int, theta: float = 10000.0, scaling: dict[str, Any] | None = None) -> Rope:
        """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4). `theta` and
        `scaling` are the defaults."""
        raw = self.table("rope_scaling") or self.table("rope_parameters") or scaling or {}
        theta = _positive(raw, "rope_theta", self.number("rope_theta", theta))
        if raw.get("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
            raise CheckpointError("config.json: a partial_rotary_factor other than 1 is not supported")
        kind = raw.get("rope_type") or raw.get("type") or "default"
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, kind, factor=_positive(raw, "factor"))
        if kind not in ("llama3", "yarn"):
            raise CheckpointError(f"RoPE scaling {kind!r} is not supported; known are default, linear, llama3, yarn")
        # transformers prefers a value that stands beside rope_scaling to the one within it.
        name = "original_max_position_embeddings"
        trained_on = _positive(self.raw if self.raw.get(name) else raw, name, max_positions)
        if kind == "llama3":
            return Rope(
                theta,
                kind,
                factor=_positive(raw, "factor"),
                original_max_positions=int(trained_on),
                low_freq_factor=_number(raw, "low_freq_factor"),
                high_freq_factor=_number(raw, "high_freq_factor"),
            )
        for name in ("mscale", "mscale_all_dim"):
            if raw.get(name):
                raise CheckpointError(f"YaRN with {name!r} is not supported")
        factor = _positive(raw, "factor", max_positions / trained_on)
        return Rope(
            theta,
            kind,
            factor=factor,
            original_max_positions=int(trained_on),
            beta_fast=_number(raw, "beta_fast", 32.0),
            beta_slow=_number(raw, "beta_slow", 1.0),
            truncate=bool(raw.get("truncate", True)),
            attention_factor=_number(raw, "attention_factor", _yarn_attention_factor(factor)),
        )


def end_token_ids(*files: dict[str, Any]) -> tuple[int, ...]:
    """The `eos_token_id`s of config.json and generation_config.json, each once. Raises CheckpointError.

    Both files are read because chat models often list their end tokens in generation_config.json alone.
    """
    ids: dict[int, None] = {}
    for value in (raw.get("eos_token_id") for raw in files):
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise CheckpointError(f"'eos_token_id' is {value!r}, not a token id or a list of them")
            ids[token] = None
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory. Raises CheckpointError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a model directory: it has no {path.name}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path.parent} is not a directory") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config.json: {name!r} is {value!r}, not a number")
    return float(value)


def _positive(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _number(raw, name, default)
    if not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name!r} is {value!r}, not a positive number")
    return value


def _yarn_attention_factor(factor: float) -> float:
    """sqrt(1/t) of arXiv 2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
