"""HFConfig: the description of a transformers model for the links and the scheduler.

Layers may differ in their heads. A head is padded with zeros to a multiple of HEAD_SIZE_UNIT elements, and a layer's
own softmax scale is folded into its queries; neither changes a score. A layer that shares another's K and V is stored
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastdecode.region.contract import HEAD_SIZE_UNIT, MAX_HEAD_SIZE, MAX_INDEX_TOPK, MAX_LAYERS
from fastdecode.spart.checkpoints.config import CheckpointError, check_layers, first_line
from fastdecode.spart.checkpoints.config_json import DTYPES
from fastdecode.spart.hf.interface import slopes_of
from fastdecode.spart.hf.mixers import Mixer
from fastdecode.spart.hf.mtp import with_head_layer
from fastdecode.spart.hf.ranks import CannotShare, cut_matrices
from fastdecode.spart.hf.trace import AttentionLayer, trace
from fastdecode.spart.shape import AttentionShape
from fastdecode.transports.base import LayerOptions

#: BLOOM has no limit in itself; it was trained on sequences of this length.
_BLOOM_POSITIONS = 2048

#: Models of several modes in which all tokens of a prompt attend to each other.
_PREFIX_MODELS = frozenset(["paligemma"])

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class HFConfig(AttentionShape):
    """A transformers model. The numbers of heads and their size are those of the first layer."""

    layers: tuple[AttentionLayer, ...]
    mixers: tuple[Mixer, ...] = ()

    @classmethod
    def from_dir(cls, directory: str | Path, mtp: int = 0) -> HFConfig:
        """Read a model directory and trace its model on the meta device. `mtp`: tokens that an MTP head drafts. Raises
        CheckpointError."""
        return cls.from_configs(*read_configs(directory, mtp), mtp)

    @classmethod
    def from_configs(cls, config: Any, generation: Any, mtp: int = 0, n_ranks: int = 1) -> HFConfig:
        """`config` is a PretrainedConfig, with `mtp` one of read_configs; `generation` is a GenerationConfig or
        None. With `n_ranks` the description is that of the model that each of as many ranks has. Raises
        CheckpointError."""
        check_layers(getattr(config.get_text_config(), "num_hidden_layers", 1))
        traced, mixers = trace(config)
        if n_ranks > 1:
            if mixers:
                raise CheckpointError("ranks do not share layers that keep states")
            traced = _of_rank(config, traced, n_ranks)
        layers = tuple(traced)
        if mtp > 1:  # later passes attend to the K and V of the first one, and to the tokens that it has selected
            later = replace(layers[-1], kv_layer=len(layers) - 1, selection=2 if layers[-1].selection else 0)
            layers += (replace(later, indexer=(0, 0, 0)),) * (mtp - 1)
        _check(config, layers)
        text, names = config.get_text_config(), config.architectures
        kv_layers = tuple(layer.kv_layer for layer in layers)
        heads = [_heads(layer) for layer in layers]
        v_in_k = all(layer.v_in_k for layer in layers)
        n_q, n_kv, k_size, v_size = heads[0]
        index_heads, index_size, index_topk = max(layer.indexer for layer in layers)
        alike = set(heads) == {heads[0]} and k_size == v_size
        return cls(
            architecture=names[0] if isinstance(names, list) and names else type(config).__name__,
            dtype=DTYPES.get(str(config.dtype).removeprefix("torch."), "fp32"),
            vocab_size=text.vocab_size,
            n_layers=len(layers),
            n_q_heads=n_q,
            n_kv_heads=n_kv,
            head_size=k_size,
            max_positions=_max_positions(text),
            windows=tuple(layer.window for layer in layers),
            softmax_scale=layers[0].scale,
            eos_token_ids=_token_ids(*(getattr(each, "eos_token_id", None) for each in (generation, text, config))),
            bos_token_id=text.bos_token_id,
            layers=layers,
            mixers=mixers,
            options=LayerOptions(
                segments=_unless_plain(layer.chunk for layer in layers),
                kv_layers=() if len({layer.kv_layer for layer in layers}) == len(layers) else kv_layers,
                selections=_unless_plain(layer.selection for layer in layers),
                softcaps=_unless_plain(layer.softcap for layer in layers),
                slopes=slopes_of(config),
                heads=() if alike else tuple(heads),
            ),
            v_in_k=v_in_k,
            index_heads=index_heads,
            index_size=_padded(index_size),
            index_topk=index_topk,
            mtp=mtp,
        )

    def state_bytes(self, itemsize: int) -> int:
        tensors = (tensor for mixer in self.mixers for tensor in mixer.tensors)
        return sum(math.prod(t.shape) * (t.dtype.itemsize if t.dtype else itemsize) for t in tensors)

    @property
    def rope(self) -> None:
        """None, so that StepRows refuses positions beyond `max_positions`, whatever the model's position embedding
        is."""
        return None


def read_configs(directory: str | Path, mtp: int = 0) -> tuple[Any, Any]:
    """The PretrainedConfig and the GenerationConfig (or None) of a model directory; of a model of several modes, the
    PretrainedConfig of its text part, if transformers has it as a model of its own. With `mtp` the PretrainedConfig has
    the layer of the MTP head. Raises CheckpointError."""
    try:
        from transformers import AutoConfig, GenerationConfig
    except ImportError:
        raise CheckpointError("the transformers backend needs transformers: pip install 'fastdecode[models]'") from None
    if not (Path(directory) / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json, so it is not a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        generation = None
        if (Path(directory) / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a wrong value
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            reason = "the checkpoint needs code of its own (trust_remote_code), which fastdecode does not run"
        raise CheckpointError(f"transformers cannot read {directory}: {reason}") from None
    config = _text_part(config)
    return (with_head_layer(config, Path(directory)) if mtp else config), generation


def _text_part(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    if text is config or config.model_type in _PREFIX_MODELS or type(text) not in AutoModelForCausalLM._model_mapping:
        return config
    for name in ("architectures", "dtype", "tie_word_embeddings"):
        setattr(text, name, getattr(config, name))
    if text.eos_token_id is None:
        text.eos_token_id = getattr(config, "eos_token_id", None)
    return text


def _check(config: Any, layers: tuple[AttentionLayer, ...]) -> None:
    kind = f"a model of type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{kind} has an encoder; only decoder-only models can be served")
    if quantisation := getattr(config, "quantization_config", None):
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        if method != "mxfp4":  # which transformers itself dequantises
            raise CheckpointError(f"{kind} is quantised by {method!r}, which the transformers backend does not read")
    if len(layers) > MAX_LAYERS:
        raise CheckpointError(f"{kind} has {len(layers)} layers, at most {MAX_LAYERS} are supported")
    largest = max(max(layer.k_size, layer.v_size) for layer in layers)
    if largest > MAX_HEAD_SIZE:
        raise CheckpointError(f"{kind} has heads of {largest} elements, R-nodes take at most {MAX_HEAD_SIZE}")
    _check_selections(kind, layers)
    if len({bool(layer.sinks) for layer in layers}) > 1:
        raise CheckpointError(f"{kind} has layers with and without attention sinks, which is not supported")
    if layers[0].sinks and len({layer.n_q_heads for layer in layers}) > 1:
        raise CheckpointError(f"{kind} has attention sinks in layers of different heads, which is not supported")


def _check_selections(kind: str, layers: tuple[AttentionLayer, ...]) -> None:
    """Raise CheckpointError for layers that select the tokens they attend to, and that R-nodes cannot have."""
    selecting = [layer for layer in layers if layer.selection]
    if len({layer.indexer for layer in selecting if layer.selection == 1}) > 1:
        raise CheckpointError(f"{kind} has indexers of different sizes, which is not supported")
    if any(layer.window or layer.chunk or layer.softcap or layer.sinks for layer in selecting):
        raise CheckpointError(
            f"{kind} selects the tokens it attends to in layers with windows, chunks, soft-capping or attention sinks, "
            "which is not supported"
        )
    if selecting and not all(layer.v_in_k for layer in layers):
        raise CheckpointError(f"{kind} selects tokens beside layers without latent rows, which is not supported")
    largest = max((layer.indexer for layer in selecting), default=(0, 0, 0))
    if largest[1] > MAX_HEAD_SIZE or largest[2] > MAX_INDEX_TOPK:
        raise CheckpointError(
            f"{kind} has an indexer that selects {largest[2]} tokens by heads of {largest[1]} elements; R-nodes take "
            f"at most {MAX_INDEX_TOPK} and {MAX_HEAD_SIZE}"
        )


def _of_rank(config: Any, whole: list[AttentionLayer], n: int) -> list[AttentionLayer]:
    """The layers of one of `n` ranks, which has the same part of the heads of each. Raises CheckpointError."""
    kind = f"a model of type {config.model_type!r}"
    for layer in whole:
        common = layer.n_q_heads if layer.v_in_k else math.gcd(layer.n_q_heads, layer.n_kv_heads)
        if common % n:
            possible = ", ".join(str(m) for m in range(2, common + 1) if not common % m)
            raise CheckpointError(
                f"{n} ranks cannot share the {layer.n_q_heads} query heads and {layer.n_kv_heads} KV heads of {kind}; "
                f"possible numbers of ranks are {possible or 'none'}"
            )
    if any(getattr(config, "activation_sparsity_pattern", None) or []):
        raise CheckpointError(f"ranks cannot share {kind}: an MLP's activations depend on all of its columns")
    try:
        layers, _ = trace(config, partial(cut_matrices, n=n))
    except CannotShare:
        raise
    except CheckpointError as error:
        raise CannotShare(f"ranks cannot share {kind}: its code needs whole matrices") from error
    if layers != [_with_heads(layer, n) for layer in whole]:
        raise CheckpointError(f"ranks cannot share {kind}: its attention is not cut by heads")
    return layers


def _with_heads(layer: AttentionLayer, n: int) -> AttentionLayer:
    """A layer with the heads of one of `n` ranks, each of which has the one KV head of latent attention."""
    return replace(layer, n_q_heads=layer.n_q_heads // n, n_kv_heads=layer.n_kv_heads // (1 if layer.v_in_k else n))


def _heads(layer: AttentionLayer) -> tuple[int, int, int, int]:
    """The layer's element of LayerOptions.heads."""
    return layer.n_q_heads, layer.n_kv_heads, _padded(layer.k_size), _padded(layer.v_size)


def _padded(size: int) -> int:
    return -(-size // HEAD_SIZE_UNIT) * HEAD_SIZE_UNIT


def _unless_plain(values: Iterable[_Number]) -> tuple[_Number, ...]:
    """The layers' values, or an empty tuple if all are 0."""
    found = tuple(values)
    return found if any(found) else ()


def _max_positions(text: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if value := getattr(text, name, None):
            return int(value)
    if text.model_type == "bloom":
        return _BLOOM_POSITIONS
    raise CheckpointError("config.json does not say how many positions the model has")


def _token_ids(*values: Any) -> tuple[int, ...]:
    """Each of the token ids, single ones or lists of them, once."""
    listed = [value if isinstance(value, list | tuple) else [value] for value in values]
    return tuple(dict.fromkeys(token for tokens in listed for token in tokens if token is not None))
