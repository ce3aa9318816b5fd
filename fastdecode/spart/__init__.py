"""The S-Part: everything of the model that has weights, under torch. Knows a link, never which transport.

    config      ModelConfig: what a Hugging Face directory says of its model
    loader      load_model: safetensors to parameters on the device, once
    weights     Model: configuration and parameters
    batch       the chunks of a step, what the scheduler hands over and gets back
    decoder     SPart: one step of one mini-batch, as a generator that yields while R-nodes attend
    exchange    a step's Q, K, V and O rows in the slots of its links
    prompt      attention of prompts, which is computed here
    rope        rotary embedding
    layers      norms and activations
    sampling    the next token
    penalties   bias and penalties that a request puts on tokens

The names below are imported on first use, so that a node without torch at hand pays nothing for this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "CheckpointError": "config",
    "ModelConfig": "config",
    "Model": "weights",
    "SPart": "decoder",
    "Sampler": "sampling",
    "choose_device": "loader",
    "choose_dtype": "loader",
    "load_model": "loader",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
