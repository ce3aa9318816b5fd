"""Mixers: modules of a transformers model that keep a state of each sequence (Mamba, short convolutions, delta rules).

transformers gives all of them one kind of cache, whose layers hold convolution states and recurrent states. In a step
such a module is called once for all chunks of one row, as a batch of sequences whose states are gathered from the pool
and scattered back, and once for each chunk of several rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.hf.attention import running
from fastdecode.spart.states.pool import StateRows, StateTensor


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module that keeps a state. Of its `tensors`, the first `n_conv` are convolution states."""

    name: str
    tensors: tuple[StateTensor, ...]
    n_conv: int
    own: tuple[str, ...]  # its linears whose weights it multiplies by itself


def find_mixers(model: Any, cache: Any, attending: set[Any], called: set[Any]) -> tuple[Mixer, ...]:
    """The mixers of a model whose forward pass has filled `cache`, in which the modules `attending` have called the
    attention function, and the modules `called` have been called. Raises CheckpointError if a state is not that of one
    module."""
    modules = {name: m for name, m in model.named_modules() if hasattr(m, "layer_idx") and _takes_cache(m)}
    inner = {
        name: module
        for name, module in modules.items()
        if module not in attending and not any(other.startswith(f"{name}.") for other in modules)
    }
    mixers = []
    for index, layer in enumerate(cache.layers):
        conv = _kept(getattr(layer, "conv_states", {}), None)
        recurrent = _kept(getattr(layer, "recurrent_states", {}), torch.float32)
        names = [name for name, module in inner.items() if module.layer_idx == index]
        if hasattr(layer, "recurrent_states") and (len(names) != 1 or not conv + recurrent):
            kind = type(model).__name__
            raise CheckpointError(f"{kind} keeps a state in layer {index} in a way that is not supported")
        if conv or recurrent:
            linears = {n: m for n, m in inner[names[0]].named_modules() if isinstance(m, torch.nn.Linear)}
            own = tuple(f"{names[0]}.{name}" for name, module in linears.items() if module not in called)
            mixers.append(Mixer(names[0], (*conv, *recurrent), len(conv), own))
    return tuple(mixers)


def _takes_cache(module: torch.nn.Module) -> bool:
    return "cache" in inspect.signature(module.forward).parameters


def _kept(states: dict[int, torch.Tensor | None], dtype: torch.dtype | None) -> tuple[StateTensor, ...]:
    found = [states[i] for i in sorted(states)]
    return tuple(StateTensor(tuple(state.shape[1:]), dtype) for state in found if state is not None)


def install(model: Any, mixers: tuple[Mixer, ...]) -> None:
    """Let the mixers of a loaded model read and write the states of the step that runs."""
    for index, mixer in enumerate(mixers):
        module = model.get_submodule(mixer.name)
        signature = inspect.signature(module.forward)
        module.forward = functools.partial(_mix, module.forward, signature, module.layer_idx, index, mixer)


def _mix(
    forward: Callable[..., Any],
    signature: inspect.Signature,
    layer_idx: int,
    index: int,
    mixer: Mixer,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The output of a mixer, the `index`-th of the model, for a step's rows [1, rows, width], which are the first
    argument. Steps have no padding, so there are no masks."""
    step = running.forward
    if step is None or step.states is None:
        raise RuntimeError("this model's states are those of steps, so only HFSPart can call the model")
    bound = signature.bind(*args, **kwargs)
    first = next(iter(bound.arguments))
    tensors, rows = step.states.pool.blocks[index], bound.arguments[first][0]
    bound.arguments |= {name: None for name in bound.arguments if name.endswith("mask")}
    outs: list[Any] = []
    for numbers, sources, targets in _batches(step.states):
        if not numbers.numel():
            for tensor in tensors:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))
            continue
        cache = _cache_of([tensor.index_select(0, sources) for tensor in tensors], mixer.n_conv, layer_idx)
        bound.arguments |= {first: rows[numbers], "cache": cache}
        result = forward(*bound.args, **bound.kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if not outs:
            outs = [x if x is None else x.new_empty(len(rows), *x.shape[2:]) for x in results]
        for out, x in zip(outs, results, strict=True):
            if x is not None:
                out[numbers] = x
        layer = cache.layers[layer_idx]
        after = [x for x in (*layer.conv_states.values(), *layer.recurrent_states.values()) if x is not None]
        for tensor, state in zip(tensors, after, strict=True):
            tensor.index_copy_(0, targets, state.to(tensor.dtype))
    whole = tuple(out if out is None else out[None] for out in outs)
    return whole if isinstance(result, tuple) else whole[0]


def _batches(states: StateRows) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The rows that a mixer takes at once, int64 [sequences, tokens], and the slots of the states before and after
    them, [sequences] each."""
    for some in states.rounds():
        yield some.rows[:, None], some.sources, some.targets
    device = states.singles.rows.device
    for span, source, target in states.spans:
        rows = torch.arange(span.start, span.stop, device=device)
        yield rows[None], *torch.tensor([[source], [target]]).to(device)


def _cache_of(states: list[torch.Tensor], n_conv: int, layer_idx: int) -> Any:
    """A cache of transformers with the states of a batch of sequences in the layer `layer_idx`."""
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionLayer

    layer: Any = LinearAttentionLayer(number_of_states=max(n_conv, len(states) - n_conv))
    layer.device, layer.dtype = states[0].device, states[0].dtype
    for i, state in enumerate(states):
        kind, number = ("conv", i) if i < n_conv else ("recurrent", i - n_conv)
        getattr(layer, f"{kind}_states")[number] = state
        getattr(layer, f"is_{kind}_states_initialized")[number] = True
        layer.has_previous_state[number] = True
        if kind == "conv":
            layer.conv_kernel_size[number] = state.shape[-1]
    cache = DynamicCache()
    cache.layers = [layer] * (layer_idx + 1)
    return cache
