"""trace: the attention layers of a transformers model, found by a forward pass on the meta device.

The pass runs the model's own code on tensors without data. An attention function and a mask function record each
layer's shapes, scale, window and other options, so all of them are known before a weight is read. A second pass is made
without masks, as steps make it. So a model that needs a mask, or more than K, V and states, is refused before it is
served.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastdecode.region.contract import MAX_HEAD_SIZE
from fastdecode.spart.checkpoints.config import CheckpointError, first_line
from fastdecode.spart.hf.indexer import Index
from fastdecode.spart.hf.interface import implementation, use_attention
from fastdecode.spart.hf.latent import latent_heads
from fastdecode.spart.hf.mixers import Mixer, find_mixers

_NAME = "fastdecode-trace"
_STEP_NAME = "fastdecode-trace-step"  # no mask function has this name, so no mask is made
_TOKENS = 4
#: What a model's cache holds for a layer whose K, V and index keys R-nodes can hold, and for one without any.
_PLAIN_CACHES = {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"}
_recording = threading.local()


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention. Sizes are in elements."""

    n_q_heads: int
    n_kv_heads: int
    k_size: int  # of a Q and of a K head
    v_size: int  # of a V and of an O head
    scale: float  # of the scores
    window: int  # a token attends to itself and window - 1 tokens before it; 0: to all tokens before it
    chunk: int  # a token attends within its own chunk of this many positions (Llama 4); 0: no chunks
    softcap: float  # scores become softcap * tanh(scores / softcap) (Gemma 2); 0: no soft-capping
    sinks: str  # the name of the parameter [n_q_heads] with each head's one more score (gpt-oss); empty: none
    v_in_k: bool  # V of a head is the first elements of its K
    kv_layer: int  # the layer whose K and V this layer attends to: itself, or an earlier one (Gemma 3n)
    selection: int = 0  # LayerOptions.selections
    indexer: tuple[int, int, int] = (0, 0, 0)  # heads of the layer's own indexer, their size, tokens that it selects


def trace(
    config: Any, change: Callable[[Any], None] = lambda model: None
) -> tuple[list[AttentionLayer], tuple[Mixer, ...]]:
    """The attention layers and the mixers of the model that `config`, a PretrainedConfig, describes. `change` may
    change the model before. Raises CheckpointError."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(_NAME, _attention)
    AttentionInterface.register(_STEP_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    factory: Any = AutoModelForCausalLM
    if type(config) not in factory._model_mapping:
        raise CheckpointError(f"{_type(config)} has no language model of text alone in transformers")
    try:
        with torch.device("meta"):
            model = factory.from_config(config, attn_implementation=implementation(config, _NAME)).eval()
        change(model)
        use_attention(model, _attention)
    except CheckpointError:
        raise
    except KeyError:
        raise CheckpointError(f"{_type(config)} does not go through transformers' attention functions") from None
    except Exception as error:  # of the model's own code, which a wrong value may reach
        raise CheckpointError(f"{_type(config)} cannot be split at its attention: {first_line(error)[:200]}") from None
    _use_static_experts(model)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "position_ids": torch.arange(_TOKENS, device="meta")[None]}
    mixers: tuple[Mixer, ...] = ()
    if _keeps_states(config, model):
        from transformers import DynamicCache

        cache, called = DynamicCache(config=config), set[Any]()
        hooks = [m.register_forward_hook(lambda module, *_: called.add(module)) for m in model.modules()]
        layers, attending = _pass(config, model, {**inputs, "cache": cache, "use_cache": True})
        for hook in hooks:
            hook.remove()
        mixers = find_mixers(model, cache, attending, called)
    else:
        inputs |= {"attention_mask": torch.ones_like(ids)}
        layers, attending = _pass(config, model, inputs)
    if len(attending) < len(layers):
        _check_repeated(config, model, attending, inputs)
    if not layers and mixers:
        raise CheckpointError(f"{_type(config)} has no layer that attends, so there is nothing for R-nodes to keep")
    if not layers:
        raise CheckpointError(f"{_type(config)} does not go through transformers' attention functions")
    model.set_attn_implementation(implementation(config, _STEP_NAME))
    _pass(config, model, inputs)
    return layers, mixers


def _pass(config: Any, model: Any, inputs: dict[str, Any]) -> tuple[list[AttentionLayer], set[Any]]:
    """The attention layers that a forward pass calls, and their modules. Raises CheckpointError."""
    layers: list[AttentionLayer] = []
    attending: set[Any] = set()
    _recording.layers, _recording.attending, _recording.kv, _recording.model = layers, attending, [], model
    _recording.index = None
    try:
        with torch.inference_mode():
            model(**{"use_cache": False, **inputs})
    except CheckpointError:
        raise
    except Exception as error:
        # Any exception: the pass runs the model's whole code, which may fail in any way on tensors without data.
        raise CheckpointError(f"{_type(config)} {_reason(model, error)}") from None
    finally:
        del _recording.layers, _recording.attending, _recording.kv, _recording.model, _recording.index
    return layers, attending


def _check_repeated(config: Any, model: Any, attending: set[Any], inputs: dict[str, Any]) -> None:
    """Raise CheckpointError for a model that passes some of the modules `attending` several times, if a pass does not
    keep K and V of its own there (Dory's "last_loop"): R-nodes keep K and V of each."""
    from transformers import DynamicCache

    passed: list[Any] = []
    hooks = [module.register_forward_hook(lambda module, *_: passed.append(module)) for module in attending]
    cache = DynamicCache(config=config)
    _pass(config, model, {**inputs, "cache": cache, "use_cache": True})
    for hook in hooks:
        hook.remove()
    kept = sum(getattr(layer, "keys", None) is not None for layer in cache.layers)
    if len(passed) > len(attending) and kept != len(passed):
        raise CheckpointError(
            f"{_type(config)} attends {len(passed)} times in a step, but keeps K and V of {kept} of these only, which "
            "is not supported"
        )


def _reason(model: Any, error: Exception) -> str:
    """Why a forward pass on the meta device fails, for people."""
    from transformers import Cache

    code = sys.modules[type(model).__module__]
    caches = [c for c in vars(code).values() if isinstance(c, type) and issubclass(c, Cache)]
    if any(cache.__module__ == code.__name__ for cache in caches):
        return "keeps states in a cache of its own, which is not supported"
    if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
        return "has code that depends on the values of activations, so it cannot be split before its weights are read"
    return f"cannot run: transformers' code for it fails with this config.json ({first_line(error)[:200]})"


def _keeps_states(config: Any, model: Any) -> bool:
    """True if layers of a model keep states, as its own cache says. Raises CheckpointError if they keep anything but
    states, K and V."""
    from transformers import DynamicCache

    caches = {type(layer).__name__: layer for layer in DynamicCache(config=config).layers}
    others = [layer for name, layer in caches.items() if name not in _PLAIN_CACHES]
    if getattr(model, "_is_stateful", False) and not others:
        raise CheckpointError(f"{_type(config)} keeps states in a cache of its own, which is not supported")
    unknown = [type(layer).__name__ for layer in others if not hasattr(layer, "recurrent_states")]
    if unknown:
        raise CheckpointError(f"{_type(config)} has layers that do not keep K and V of each token, but a {unknown[0]}")
    return bool(others)


def _use_static_experts(model: Any) -> None:
    """Choose the implementation of experts whose shapes do not depend on which experts are chosen."""
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError, AttributeError):  # a model without mixtures of experts
            model.set_experts_implementation("batched_mm")


def _attention(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Record a layer: q, k and v [1, heads, tokens, size] -> O [1, tokens, heads, size of V], without data."""
    window, chunk = getattr(attention_mask, "fastdecode_limits", (sliding_window or 0, 0))
    if attention_mask is not None and attention_mask.dtype != torch.bool:  # `_mask` makes masks of bool
        raise CheckpointError(f"{type(module).__name__} makes an attention mask of its own, which is not supported")
    if kwargs.get("position_bias") is not None:
        raise CheckpointError(f"{type(module).__name__} adds a position bias to its scores, which is not supported")
    if k.shape[2] != q.shape[2]:
        raise CheckpointError(f"{type(module).__name__} attends to other tokens than its own (cross-attention)")
    latent, (selection, indexer) = latent_heads(module), _selection(module, kwargs.get("indices"))
    if selection and latent is None:
        raise CheckpointError(
            f"{type(module).__name__} selects the tokens it attends to, and has latent rows of more than "
            f"{MAX_HEAD_SIZE} elements or none, which is not supported"
        )
    o = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    if latent is not None:
        q, o = latent.queries(q), latent.outputs(o)
    layer = AttentionLayer(
        n_q_heads=q.shape[1],
        n_kv_heads=k.shape[1],
        k_size=k.shape[3],
        v_size=v.shape[3],
        scale=float(scaling) if scaling is not None else q.shape[3] ** -0.5,
        window=window,
        chunk=chunk,
        softcap=float(softcap or 0.0),
        sinks="" if s_aux is None else _parameter_name(s_aux),
        v_in_k=latent is not None,
        kv_layer=next((i for i, kv in enumerate(_recording.kv) if kv[0] is k and kv[1] is v), len(_recording.layers)),
        selection=selection,
        indexer=indexer,
    )
    _recording.layers.append(layer)
    _recording.attending.add(module)
    _recording.kv.append((k, v))
    return o, None


def _selection(module: torch.nn.Module, indices: Any) -> tuple[int, tuple[int, int, int]]:
    """AttentionLayer.selection and AttentionLayer.indexer of a layer that gets `indices` from its indexer, or from that
    of the last layer with one."""
    if indices is None:
        return 0, (0, 0, 0)
    if not isinstance(indices, Index):
        raise CheckpointError(f"{type(module).__name__} selects the tokens it attends to in an unknown way")
    shared, _recording.index = indices is _recording.index, indices
    return (2, (0, 0, 0)) if shared else (1, (indices.q.shape[1], indices.q.shape[3], indices.topk))


def _parameter_name(values: torch.Tensor) -> str:
    for name, parameter in _recording.model.named_parameters():
        if parameter is values:
            return str(name)
    raise CheckpointError("the model computes its attention sinks, which is not supported")


def _mask(
    *, q_length: int, kv_length: int, mask_function: Any, local_size: int | None = None, **_: Any
) -> torch.Tensor:
    """A mask without data that has its window or chunk size as an attribute, found with transformers' mask function."""

    def visible(query: int, key: int) -> bool:
        zero = torch.zeros((), dtype=torch.long)
        try:
            return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))
        except NotImplementedError:  # chunks depend on the padding, which is a tensor without data here
            return key <= query and (not local_size or query // local_size == key // local_size)

    if visible(0, 1):
        raise CheckpointError("the model attends to later tokens (bidirectional attention), so it cannot be served")
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    size = local_size or 0
    # From position `size`, a window of that size reaches position 1; a chunk that begins there does not.
    mask.fastdecode_limits = (size, 0) if not size or visible(size, 1) else (0, size)  # type: ignore[attr-defined]
    return mask


def _type(config: Any) -> str:
    return f"a model of type {config.model_type!r}"
