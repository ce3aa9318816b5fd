"""Defaults of sampling that a model comes with, from its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for requests that give none; the defaults are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # of a chat's answer; None: up to the longest sequence

    @classmethod
    def from_dir(cls, directory: Path) -> SamplingDefaults:
        """Read generation_config.json of a model directory; without that file, OpenAI's defaults.

        Raises ValueError, whose message names the file.
        """
        path = directory / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path} is not a JSON object")
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """The values of a generation config; a value outside the API's range, or of another type, is left out."""
        found = {}
        for name, (low, high) in _RANGES.items():
            value = config.get(_NAMES.get(name, name))
            if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
                found[name] = float(value) if isinstance(low, float) else int(value)
        return cls(**found)  # type: ignore[arg-type]


_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "max_tokens": (1, 2**31 - 1),
}
#: Values that have another name in generation_config.json.
_NAMES = {"max_tokens": "max_new_tokens"}
NO_DEFAULTS = SamplingDefaults()
