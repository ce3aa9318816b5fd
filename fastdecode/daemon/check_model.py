"""`fastdecode-node --check --model DIR`: the backend for a model, and how many tokens fit. It loads no weights."""

from __future__ import annotations

import os

import torch

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.device_plan import free_memory, state_slots
from fastdecode.daemon.kv_pages import KVPages
from fastdecode.daemon.machine import available_memory
from fastdecode.daemon.model_checks import check_for_model
from fastdecode.daemon.option_values import ConfigError, format_bytes
from fastdecode.kernels import _native
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart import ModelConfig, choose_device, choose_dtype
from fastdecode.spart.backend import Backend
from fastdecode.spart.linears.dense16 import keeps16
from fastdecode.spart.loader import open_checkpoint, parameter_count
from fastdecode.spart.lora.adapters import AdapterSet, check_adapted
from fastdecode.spart.lora.files import read_adapter
from fastdecode.spart.served import ACT_NAMES, TORCH_DTYPES
from fastdecode.spart.shape import AttentionShape, Heads

_FILE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
#: Bytes of a quantised weight with its share of scale and minimum, in groups of 32.
QUANTISED_BYTES = {"int8": 34 / 32, "int4": 20 / 32}
#: Bits of a number's significand, the implicit one included.
_SIGNIFICAND = {"fp32": 24, "fp16": 11, "bf16": 8}


def rows(config: NodeConfig, backend: Backend) -> list[tuple[str, str]]:
    """Lines of the report, (name, value), about a model. Raises CheckpointError, ConfigError."""
    model = backend.config
    check_for_model(config, backend)
    backend.check_tensors()
    device = choose_device(config.device)
    _check_mtp(config, model, device)
    dtype = choose_dtype(config.dtype, model.dtype, device)
    weights, stored = weights_of(config, backend, device, dtype)
    memory = config.kv_memory or max(0, available_memory() - (weights if device.type == "cpu" else 0)) // 2
    copies = backend.kv_copies(config.tensor_parallel)
    free, state, slots = free_memory(device), model.state_bytes(dtype.itemsize), 0
    if free > weights:
        slots = state_slots(config, model, dtype.itemsize, free - weights, config.mini_batches or 2)
    shape = f"{_layers(model)}, {_heads(model)}"
    lines = [
        ("model", f"{model.architecture} ({shape}), by the {backend.name} backend"),
        ("weights", f"{format_bytes(weights)} on {device.type}, {stored}; activations in {torch_name(dtype)}"),
    ]
    length = min(config.max_model_len or model.max_positions, model.max_positions)
    if note := precision_note(config, backend, device, dtype):
        lines.append(("precision", note))
    for kv_dtype in model.kv_dtypes:
        pages = KVPages(model.hello_geometry(1, 1, "fp32"), kv_dtype, model.windows, model.options)
        token = copies * pages.block_bytes / PAGE_TOKENS
        tokens = int(memory // token)
        sequences = int(memory // (copies * pages.page_bytes)) // pages.groups(config.step_rows).pages_for(length)
        whole = f"{sequences} sequences of {length}" if sequences else f"not one sequence of {length}"
        chosen = " (--kv-dtype)" if kv_dtype == config.kv_dtype else ""
        text = f"{format_bytes(token)} per token; {format_bytes(memory)} hold {tokens} tokens, {whole}{chosen}"
        lines.append((f"KV {kv_dtype}", text))
    if state:
        held = f"{format_bytes(slots * state)} hold {slots}"
        lines.append(("states", f"{format_bytes(state)} per sequence; {held} (--state-memory)"))
    adapters = [read_adapter(name, directory) for name, directory in config.lora]
    check_adapted(backend.source, adapters)
    AdapterSet(adapters).check(backend.linears() if adapters else {})
    lines += [(f"LoRA {a.name}", f"{len(a.modules)} linears, {a.parameters} parameters") for a in adapters]
    if weights > free:
        lines.append(("too big", f"the weights do not fit into the {format_bytes(free)} available"))
    return lines


def torch_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


def check_fits(config: NodeConfig, backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the weights, or the states that layers may keep, do not fit into the device's free
    memory, CheckpointError if the files lack a tensor. `dtype` is that of the activations."""
    _check_mtp(config, backend.config, device)
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


def _check_mtp(config: NodeConfig, model: AttentionShape, device: torch.device) -> None:
    """Raise ConfigError for an MTP head on a device that does not run it yet."""
    if model.mtp and device.type != "cpu":
        raise ConfigError(f"--speculate {config.speculate} runs on a CPU only: use suffix:K, or --device cpu")


def _layers(model: AttentionShape) -> str:
    """The layers of each kind, for people."""
    n, head = model.n_layers - model.mtp, "an MTP head" if model.mtp else ""
    kinds = [f"{n} layers with K and V", "layers with states", head] if model.state_bytes(1) else [f"{n} layers", head]
    *first, last = filter(None, kinds)
    return f"{', '.join(first)} and {last}" if first else last


def _heads(model: AttentionShape) -> str:
    """The heads of each kind of layer, for people."""
    kinds = dict.fromkeys(model.heads_of(layer) for layer in range(model.n_layers))
    heads = " or ".join(f"{h.n_q} query and {h.n_kv} KV heads of {_head_sizes(h)}" for h in kinds)
    if not model.index_topk:
        return heads
    return f"{heads}, {model.index_heads} index heads of {model.index_size} that select {model.index_topk} tokens"


def _head_sizes(heads: Heads) -> str:
    if heads.v_in_k:
        return f"{heads.k_size} (V: the first {heads.v_size})"
    return f"{heads.k_size}" if heads.k_size == heads.v_size else f"{heads.k_size} (V: {heads.v_size})"


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
