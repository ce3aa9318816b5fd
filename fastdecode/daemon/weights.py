"""The weights of a model: how much memory they take, whether a device has it, and what rounding them loses."""

from __future__ import annotations

import os

import torch

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.device_plan import free_memory, state_slots
from fastdecode.daemon.option_values import ConfigError, format_bytes
from fastdecode.kernels import _native
from fastdecode.spart import ModelConfig, choose_dtype
from fastdecode.spart.backend import Backend
from fastdecode.spart.linears.dense16 import keeps16
from fastdecode.spart.loader import open_checkpoint, parameter_count
from fastdecode.spart.served import ACT_NAMES, TORCH_DTYPES
from fastdecode.spart.shape import AttentionShape

_FILE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
#: Bytes of a quantised weight with its share of scale and minimum, in groups of 32.
QUANTISED_BYTES = {"int8": 34 / 32, "int4": 20 / 32}
#: Bits of a number's significand, the implicit one included.
_SIGNIFICAND = {"fp32": 24, "fp16": 11, "bf16": 8}


def torch_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


def check_fits(config: NodeConfig, backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the weights, or the states that layers may keep, do not fit into the device's free
    memory, CheckpointError if the files lack a tensor. `dtype` is that of the activations."""
    check_mtp(config, backend.config, device)
    weights, _ = weights_of(config, backend, device, dtype)
    free = free_memory(device)
    if weights > free:
        smaller = {"int4": "", "int8": "; --weights int4 takes less"}
        raise ConfigError(
            f"--model {backend.source.path}: its weights take about {format_bytes(weights)} ({config.weights} weights, "
            f"{torch_name(dtype)}), and {format_bytes(free)} of memory are available on {device.type}"
            + smaller.get(config.weights, "; --weights int8 and int4 take less")
        )
    state_slots(config, backend.config, dtype.itemsize, free - weights, config.mini_batches or 1)
    backend.check_tensors()


def check_mtp(config: NodeConfig, model: AttentionShape, device: torch.device) -> None:
    """Raise ConfigError for an MTP head on a device that does not run it yet."""
    if model.mtp and device.type != "cpu":
        raise ConfigError(f"--speculate {config.speculate} runs on a CPU only: use suffix:K, or --device cpu")


def weights_of(config: NodeConfig, backend: Backend, device: torch.device, dtype: torch.dtype) -> tuple[int, str]:
    """About how many bytes the weights take in memory, and how they are stored, for people. `dtype`: see check_fits."""
    model, how = backend.config, _quantisation(backend)
    if dtype is torch.float32 and model.dtype != "fp32" and not how and keeps16(device):
        dtype = TORCH_DTYPES[model.dtype]
    if how and config.weights == "auto":
        return backend.source.weight_bytes, f"stored and kept as {how}"
    kept = config.weights if config.weights in QUANTISED_BYTES else torch_name(dtype)
    n = parameters(backend)
    if device.type == "cpu" and config.weights not in QUANTISED_BYTES:  # a dense product keeps a copy
        n += backend.parameters_of_tied_head()
    if config.tensor_parallel > 1:
        n += (config.tensor_parallel - 1) * backend.parameters_of_each_rank()
    size = QUANTISED_BYTES.get(config.weights, dtype.itemsize)
    return int(n * size), f"stored as {how or model.dtype}, kept as {kept}"


def precision_note(config: NodeConfig, backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Tell people how much rounding a file's floating-point weights to `dtype` loses, and which faster dtype they could
    choose. None: there is nothing to tell."""
    stored, kept = backend.config.dtype, ACT_NAMES[dtype]
    quantised = _quantisation(backend)
    if config.weights in QUANTISED_BYTES or (quantised and config.weights == "auto"):
        return None
    bits, bits_kept = _SIGNIFICAND[stored], _SIGNIFICAND[kept]
    notes = []
    if bits_kept < bits and not quantised:
        notes.append(
            f"weights are rounded from {stored} to {kept}, whose significand has {bits_kept} bits instead of {bits}"
        )
    if dtype is torch.bfloat16 and choose_dtype("auto", kept, device) is not dtype:
        notes.append("this CPU has no instructions for bf16: steps of many sequences are faster in fp32")
    faster = config.dtype == "auto" and (stored, kept) == ("fp16", "fp32") and not quantised
    if faster and device.type == "cpu" and chosen_isa() == "amx":
        notes.append(
            "with --dtype bf16 AMX computes steps of many sequences faster, and the fp16 weights are rounded to a "
            f"significand of {_SIGNIFICAND['bf16']} bits instead of {bits}; fp32 keeps the weights exactly"
        )
    return "; ".join(notes) or None


def chosen_isa() -> str:
    """The ISA of the kernels on this CPU."""
    return os.environ.get("FASTDECODE_ISA") or _native.isa_best()


def _quantisation(backend: Backend) -> str | None:
    """How a file's weights are quantised, for people."""
    model = backend.config
    return open_checkpoint(backend.source, model).quantisation if isinstance(model, ModelConfig) else None


def parameters(backend: Backend) -> int:
    """How many numbers a model has; a tied LM head counts once. For a model of transformers, by the size of its
    files."""
    model = backend.config
    if isinstance(model, ModelConfig):
        return parameter_count(model)
    return backend.source.weight_bytes // _FILE_BYTES[model.dtype]
