"""The S-Part: everything in the model that has weights, under torch. It knows a link, but not which transport.

    config       ModelConfig: one description of a model, for all families
    config_json  typed access to config.json
    families     each native family's config.json as a ModelConfig
    config_file  read_config: the ModelConfig of a directory or GGUF file
    quantisation parse_quantisation: quantization_config of a config.json
    quantised_files  compressed-tensors, GPTQ, AWQ and FP8 checkpoints
    mxfp4        matrices in MXFP4, and gpt-oss's checkpoints of them
    gguf         the configuration and tensors of GGUF files
    backend      choose_backend: the native decoder, or the transformers backend in hf/
    checkpoint   the tensors of a model's files
    loader       load_model: a checkpoint's tensors to parameters on the device
    linears/     products with weights in 32, 16, 8 or 4 bits
    lora/        adapters that change the linears for some rows
    shape        a model's attention as its links see it
    served       a loaded model as its links see it
    weights      Model: configuration and parameters
    batch        a step's work, as the scheduler hands it to the S-Part, and its results
    decoder      SPart: one step of one mini-batch, a generator that yields while the R-nodes attend
    balance      matrices by which Q and K are multiplied, so that K loses less when it becomes integers
    timeline     the times at which the S-Part computed and waited, for the page of the cluster
    exchange/    the ways of a step's Q, K, V and O rows to the slots of its links and back
    exchange_kernels/  CUDA kernels with which a stream moves these rows
    prompt       attention of prompts, which the S-node computes
    prompt_attention  that by kernels/decoder, on a CPU
    scoring      soft-capping, attention sinks and ALiBi
    prompt_logprobs  the probabilities of a prompt's own tokens
    heads        views of the heads in a row
    attention    attention by torch's fused kernels, in parts that can be merged
    memory       the device's memory that a step takes
    rope         rotary position embedding
    layers       norms and activations in torch
    row_ops      RowOps: the decoder's operations between products, in torch or in C
    experts      a layer's experts in place of its MLP
    step_table   a step's numbers for its device in one upload, and its results in one download
    sampling     Sampler: filters and draws the next tokens of a step on a device
    host_sampling  HostSampler: the same on a CPU, in C
    draws        random draws by seed and index
    masks        the tokens that a row may draw at all
    penalties    the bias and the penalties that a request puts on tokens

The names below are imported on first use, because torch takes seconds to import and an R-node does without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Public name -> the module that defines it.
_MODULES = {
    "CheckpointError": "config",
    "ModelConfig": "config",
    "Model": "weights",
    "SPart": "decoder",
    "Sampler": "sampling",
    "choose_device": "loader",
    "choose_dtype": "loader",
    "load_model": "loader",
    "read_config": "config_file",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
