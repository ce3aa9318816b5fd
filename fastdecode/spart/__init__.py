"""The S-Part: everything in the model that has weights, under torch. It knows a link, but not which transport.

    checkpoints/  what a model's files hold: its configuration and its tensors
    parameters/   the parameters of a model, made of these tensors
    linears/      products with weights in 32, 16, 8 or 4 bits
    int4/         how weights and K lose less when they become integers
    lora/         adapters that change the linears for some rows
    step/         what a step is given and what it returns
    sampler/      the next tokens of a step
    exchange/     the ways of a step's Q, K, V and O rows to the slots of its links and back
    exchange_kernels/  CUDA kernels with which a stream moves these rows
    ranks/        the share of a model that each process of a tensor-parallel S-Part has
    resident/     KV pages on the S-Part's own device, whose rows cross no link
    prefill/      attention of prompts, which the S-node computes
    states/       layers that keep a state of each sequence in place of K and V
    decoder/      the native decoder
    hf/           the transformers backend: any model of transformers
    backend       choose_backend: the native decoder, or the transformers backend
    loader        load_model: a checkpoint's tensors to parameters on the device
    shape         a model's attention as its links see it
    served        a loaded model as its links see it
    memory        the device's memory that a step takes
    threads       the threads of an S-Part on a CPU
    own_thread    a thread of its own for the S-Part

The names below are imported on first use, because torch takes seconds to import and an R-node does without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Public name -> the module that defines it.
_MODULES = {
    "CheckpointError": "checkpoints.config",
    "ModelConfig": "checkpoints.config",
    "Model": "decoder.weights",
    "SPart": "decoder.decoder",
    "Sampler": "sampler.sampling",
    "choose_device": "loader",
    "choose_dtype": "loader",
    "load_model": "loader",
    "read_config": "checkpoints.config_file",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
