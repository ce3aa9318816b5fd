"""`fastdecode-node --check --model DIR`: the backend for a model, and how many tokens fit. It loads no weights."""

from __future__ import annotations

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.device_plan import free_memory, state_slots
from fastdecode.daemon.kv_pages import KVPages
from fastdecode.daemon.machine import available_memory
from fastdecode.daemon.model_checks import check_for_model
from fastdecode.daemon.option_values import format_bytes
from fastdecode.daemon.weights import check_mtp, precision_note, torch_name, weights_of
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart import choose_device, choose_dtype
from fastdecode.spart.backend import Backend
from fastdecode.spart.lora.adapters import AdapterSet, check_adapted
from fastdecode.spart.lora.files import read_adapter
from fastdecode.spart.shape import AttentionShape, Heads


def rows(config: NodeConfig, backend: Backend) -> list[tuple[str, str]]:
    """Lines of the report, (name, value), about a model. Raises CheckpointError, ConfigError."""
    model = backend.config
    check_for_model(config, backend)
    backend.check_tensors()
    device = choose_device(config.device)
    check_mtp(config, model, device)
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
