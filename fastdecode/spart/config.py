"""What a Hugging Face directory says of its model: one frozen description for all families.

The decoder reads this description and nothing else, so a family is a function here that turns its config.json into a
ModelConfig. Both spellings are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and transformers 5
(`rope_parameters`, `dtype`). A key that is absent has the default of the family's class in transformers.

What would change the model's output and is not understood is an error, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode.transports.base import Geometry

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
MAX_LAYERS = 1024  # FD_MAX_LAYERS of region/region.h
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class CheckpointError(ValueError):
    """The checkpoint cannot be served; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and how its context was stretched.

    `kind` is "default", "linear", "llama3" (Llama 3.1) or "yarn" (Peng et al., arXiv 2309.00071).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn: context the model was trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # yarn: cos and sin are scaled by it


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Sizes in elements."""

    architecture: str  # as in config.json, e.g. "LlamaForCausalLM"
    dtype: str  # of the checkpoint: "fp32", "fp16", "bf16"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_size: int
    max_positions: int
    windows: tuple[int, ...]  # sliding window a layer, 0: full attention
    softmax_scale: float
    rope: Rope | None  # None: learned positions
    activation: str  # of ACTIVATIONS
    norm: str  # "rms" or "layer"
    norm_eps: float
    tied: bool  # the head is the embedding unless the checkpoint brings one that differs
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    position_offset: int = 0  # learned positions: row of position 0
    embed_size: int = 0  # of the embedding; projected to hidden_size and back where they differ
    gated: bool = True  # MLP: down(act(gate(x)) * up(x)), else down(act(up(x)))
    norm_first: bool = True  # False: each sublayer is normalised after its residual (OPT-350m)
    norm_affine: bool = True
    final_norm: bool = True
    qk_norm: bool = False  # RMS norm of every Q and K head before RoPE
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_dir(cls, directory: str | Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json. Raises CheckpointError."""
        directory = Path(directory)
        raw = _read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        return cls.from_dict(raw, _read_json(generation) if generation.is_file() else {})

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """`raw` is config.json, `generation` is generation_config.json. Raises CheckpointError."""
        keys = _Keys(raw)
        architecture = _architecture(raw)
        if quantization := _table(raw, "quantization_config"):
            method = quantization.get("quant_method", "unknown")
            raise CheckpointError(f"the checkpoint is quantised ({method}); weights must be fp32, bf16 or fp16")
        config = cls(
            architecture=architecture,
            dtype=_dtype(raw),
            vocab_size=keys.size("vocab_size"),
            hidden_size=keys.size("hidden_size"),
            n_layers=keys.size("num_hidden_layers"),
            n_q_heads=keys.size("num_attention_heads"),
            eos_token_ids=_eos(raw, generation or {}),
            bos_token_id=raw.get("bos_token_id"),
            **FAMILIES[architecture](keys),
        )
        _check(config)
        return config

    def hello_geometry(self, n_slots: int, max_rows: int, act_dtype: str) -> Geometry:
        """What an S-node of this model asks its R-nodes for."""
        return Geometry(
            n_slots=n_slots,
            max_rows=max_rows,
            n_layers=self.n_layers,
            n_q_heads=self.n_q_heads,
            n_kv_heads=self.n_kv_heads,
            head_size=self.head_size,
            act_dtype=act_dtype,
        )


class _Keys:
    """config.json with the type of what is read from it checked."""

    def __init__(self, raw: dict[str, Any]):
        self.raw = raw

    def size(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json lacks {name!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {name!r} is {value!r}, not a positive whole number")
        return value

    def number(self, name: str, default: float) -> float:
        return _positive(self.raw, name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name!r} is {value!r}, not true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        value = self.raw.get(name, default)
        if value not in ACTIVATIONS:
            raise CheckpointError(f"config.json: {name!r} is {value!r}; known are {', '.join(ACTIVATIONS)}")
        return value


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config.json: {name!r} is {value!r}, not a number")
    return float(value)


def _positive(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = _number(raw, name, default)
    if not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name!r} is {value!r}, not a positive number")
    return value


def _table(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """The object of that name; empty where it is absent or null."""
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name!r} is {value!r}, not an object")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no model directory: it has no {path.name}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path.parent} is not a directory") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: 'architectures' is {names!r}, not a list of names")
    for name in names:
        if name in FAMILIES:
            return name
    found = ", ".join(names) or f"none (model_type {raw.get('model_type')!r})"
    raise CheckpointError(f"unknown architecture {found}; known are {', '.join(FAMILIES)}")


def _dtype(raw: dict[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"config.json: dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _eos(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """End tokens of both files, without repetition: chat models often list theirs in the second alone."""
    ids: dict[int, None] = {}
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise CheckpointError(f"'eos_token_id' is {value!r}, not a token id or a list of them")
            ids[token] = None
    return tuple(ids)


def _check(c: ModelConfig) -> None:
    if c.n_layers > MAX_LAYERS:
        raise CheckpointError(f"{c.n_layers} layers are more than the {MAX_LAYERS} that are supported")
    if c.n_q_heads % c.n_kv_heads:
        raise CheckpointError(f"{c.n_q_heads} query heads are not a multiple of {c.n_kv_heads} KV heads")
    if c.head_size % 8 or not 8 <= c.head_size <= 256:
        raise CheckpointError(f"head size {c.head_size} is not supported: it must be a multiple of 8, at most 256")


def _rope(keys: _Keys, max_positions: int) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    raw = _table(keys.raw, "rope_scaling") or _table(keys.raw, "rope_parameters")
    theta = _positive(raw, "rope_theta", keys.number("rope_theta", 10000.0))
    if raw.get("partial_rotary_factor", keys.raw.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise CheckpointError("config.json: a partial_rotary_factor other than 1 is not supported")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, factor=_positive(raw, "factor"))
    if kind not in ("llama3", "yarn"):
        raise CheckpointError(f"RoPE scaling {kind!r} is not supported; known are default, linear, llama3, yarn")
    # A value beside rope_scaling, not in it, has priority in transformers (Phi 3's place for it).
    name = "original_max_position_embeddings"
    trained_on = _positive(keys.raw if keys.raw.get(name) else raw, name, max_positions)
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            factor=_positive(raw, "factor"),
            original_max_positions=int(trained_on),
            low_freq_factor=_number(raw, "low_freq_factor"),
            high_freq_factor=_number(raw, "high_freq_factor"),
        )
    for name in ("mscale", "mscale_all_dim"):
        if raw.get(name):
            raise CheckpointError(f"YaRN with {name!r} is not supported")
    factor = _positive(raw, "factor", max_positions / trained_on)
    return Rope(
        theta,
        kind,
        factor=factor,
        original_max_positions=int(trained_on),
        beta_fast=_number(raw, "beta_fast", 32.0),
        beta_slow=_number(raw, "beta_slow", 1.0),
        truncate=bool(raw.get("truncate", True)),
        attention_factor=_number(raw, "attention_factor", _yarn_attention_factor(factor)),
    )


def _yarn_attention_factor(factor: float) -> float:
    """sqrt(1/t) of arXiv 2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _llama_like(keys: _Keys, kv_heads: int, head_size: int, max_positions: int) -> dict[str, Any]:
    """What Llama, Mistral, Qwen2 and Qwen3 have in common. The arguments are defaults for absent keys."""
    max_positions = keys.size("max_position_embeddings", max_positions)
    head_size = keys.size("head_dim", head_size)
    return {
        "intermediate_size": keys.size("intermediate_size"),
        "n_kv_heads": keys.size("num_key_value_heads", kv_heads),
        "head_size": head_size,
        "max_positions": max_positions,
        "windows": (0,) * keys.size("num_hidden_layers"),
        "softmax_scale": head_size**-0.5,
        "rope": _rope(keys, max_positions),
        "activation": keys.activation("hidden_act", "silu"),
        "norm": "rms",
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "tied": keys.flag("tie_word_embeddings", False),
        "embed_size": keys.size("hidden_size"),
    }


def _equal_heads(keys: _Keys) -> int:
    """Head size where config.json does not give it."""
    return max(1, keys.size("hidden_size") // keys.size("num_attention_heads"))


def _llama(keys: _Keys) -> dict[str, Any]:
    bias = keys.flag("attention_bias", False)
    return {
        **_llama_like(keys, keys.size("num_attention_heads"), _equal_heads(keys), 2048),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": keys.flag("mlp_bias", False),
    }


def _mistral(keys: _Keys) -> dict[str, Any]:
    common = _llama_like(keys, 8, _equal_heads(keys), 131072)
    return {**common, "windows": (_window(keys),) * len(common["windows"])}


def _window(keys: _Keys) -> int:
    """`sliding_window`, where null means full attention and absent the families' default."""
    return 0 if keys.raw.get("sliding_window", 4096) is None else keys.size("sliding_window", 4096)


def _qwen_windows(keys: _Keys, n_layers: int) -> tuple[int, ...]:
    window = _window(keys) if keys.flag("use_sliding_window", False) else 0
    if not window:
        return (0,) * n_layers
    types = keys.raw.get("layer_types")
    if types is None:
        first = keys.raw.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(n_layers)]
    sizes = {"full_attention": 0, "sliding_attention": window}
    for kind in types:
        if kind not in sizes:
            raise CheckpointError(f"config.json: layer type {kind!r} is not one of {', '.join(sizes)}")
    if len(types) < n_layers:
        raise CheckpointError(f"config.json: {len(types)} layer_types for {n_layers} layers")
    return tuple(sizes[kind] for kind in types[:n_layers])


def _qwen2(keys: _Keys) -> dict[str, Any]:
    common = _llama_like(keys, keys.size("num_attention_heads"), _equal_heads(keys), 32768)
    return {**common, "windows": _qwen_windows(keys, len(common["windows"])), "qkv_bias": True}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    common = _llama_like(keys, keys.size("num_attention_heads"), 128, 32768)
    bias = keys.flag("attention_bias", False)
    windows = _qwen_windows(keys, len(common["windows"]))
    return {**common, "windows": windows, "qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _opt(keys: _Keys) -> dict[str, Any]:
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    if hidden % heads:
        raise CheckpointError(f"hidden size {hidden} is not a multiple of {heads} heads")
    norm_first = keys.flag("do_layer_norm_before", True)
    bias = keys.flag("enable_bias", True)
    return {
        "intermediate_size": keys.size("ffn_dim", 3072),
        "n_kv_heads": heads,
        "head_size": hidden // heads,
        "max_positions": keys.size("max_position_embeddings", 2048),
        "windows": (0,) * keys.size("num_hidden_layers"),
        "softmax_scale": (hidden // heads) ** -0.5,
        "rope": None,
        "position_offset": 2,
        "activation": keys.activation("activation_function", "relu"),
        "gated": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "norm_first": norm_first,
        "norm_affine": keys.flag("layer_norm_elementwise_affine", True),
        # Checkpoints fine-tuned before transformers 4.20.1 lack it (facebookresearch/metaseq#164).
        "final_norm": norm_first and not keys.flag("_remove_final_layer_norm", False),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "tied": keys.flag("tie_word_embeddings", True),
        "embed_size": keys.size("word_embed_proj_dim", hidden),
    }


#: By the name in config.json's `architectures`. Each returns the fields in which its family differs.
FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "OPTForCausalLM": _opt,
}
