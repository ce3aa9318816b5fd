"""The metadata of Gemma 4's GGUF files as keys of a config.json.

Keys that end in `_swa` describe layers with a sliding window, and the same keys without it the layers that see all
tokens; other keys have a number for each layer. Only the tensors tell whether K is V, and which part of a head RoPE
turns.
"""

from __future__ import annotations

from typing import Any

from fastdecode.gguf.file import GGUFFile
from fastdecode.spart.checkpoints.config import CheckpointError, check_layers
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.gguf import ROPE_FACTORS, float_tensor

#: Keys behind the architecture's name, and what config.json calls them.
GEMMA4_KEYS = {
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window": "sliding_window",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "top_k_experts",
    "final_logit_softcapping": "final_logit_softcapping",
}
#: Keys that are read below.
GEMMA4_OTHER_KEYS = {
    "attention.sliding_window_pattern",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
    "rope.freq_base_swa",
}
_PREFIX = "gemma4."
#: Keys without which llama.cpp does not read a file, though a config.json may lack what they say.
_REQUIRED = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.key_length_swa",
    "attention.sliding_window",
    "embedding_length_per_layer_input",
    "feed_forward_length",
)
#: A frequency with at least this divisor turns nothing: the converter writes 1e30.
_ENDLESS = 1e20


def gemma4_json(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say of a file's layers. Raises CheckpointError."""
    fields, tensors = ConfigJson(file.fields), file.tensors
    for key in _REQUIRED:
        if _PREFIX + key not in fields.raw:
            raise CheckpointError(f"{file.path} lacks the key {_PREFIX + key!r}")
    if scaling := sorted(key for key in fields.raw if key.startswith(f"{_PREFIX}rope.scaling.")):
        raise CheckpointError(f"{file.path}: the key {scaling[0]!r} is not understood")
    _check_sizes(fields)
    n_layers = fields.size(f"{_PREFIX}block_count")
    check_layers(n_layers)
    windowed, kv_heads = _windowed(fields, n_layers), _each(fields, f"{_PREFIX}attention.head_count_kv", n_layers)
    head_size, local_size = (fields.size(f"{_PREFIX}attention.key_length{end}") for end in ("", "_swa"))
    shared = fields.size(f"{_PREFIX}attention.shared_kv_layers", 0, least=0)
    if shared > n_layers:
        raise CheckpointError(f"config.json: '{_PREFIX}attention.shared_kv_layers' is {shared} of {n_layers} layers")
    full = [i for i in range(n_layers - shared) if not windowed[i]]
    per_layer = tensors.get("per_layer_token_embd.weight")
    theta, local_theta = (fields.number(f"{_PREFIX}rope.freq_base{end}", 10000.0) for end in ("", "_swa"))
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            str(i): {"head_dim": local_size if window else head_size, "num_key_value_heads": n}
            for i, (window, n) in enumerate(zip(windowed, kv_heads, strict=True))
        },
        **_mlp_sizes(fields, n_layers, shared),
        "attention_k_eq_v": not any(f"blk.{i}.attn_v.weight" in tensors for i in full),
        "enable_moe_block": bool(fields.raw.get(f"{_PREFIX}expert_count")),
        "vocab_size_per_layer_input": per_layer.shape[0] if per_layer else None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": _turned_part(file, head_size),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


def _check_sizes(fields: ConfigJson) -> None:
    """Raise CheckpointError for heads of V that are not as large as those of K, and for a RoPE of a part of a head."""
    for end in ("", "_swa"):
        key = f"{_PREFIX}attention.key_length{end}"
        size = fields.size(key)
        for other in (f"{_PREFIX}attention.value_length{end}", f"{_PREFIX}rope.dimension_count{end}"):
            if fields.size(other, size) != size:
                raise CheckpointError(f"config.json: {other!r} is {fields.raw[other]}, {key!r} {size}")


def _windowed(fields: ConfigJson, n_layers: int) -> list[bool]:
    """Whether each layer has a sliding window. The last one has none in Gemma 4."""
    key = f"{_PREFIX}attention.sliding_window_pattern"
    pattern = fields.raw.get(key)
    if not isinstance(pattern, list) or len(pattern) != n_layers or not all(isinstance(each, bool) for each in pattern):
        raise CheckpointError(f"config.json: {key!r} is not a list of {n_layers} truth values")
    if pattern[-1]:
        raise CheckpointError(f"config.json: {key!r} gives the last layer a window")
    return pattern


def _each(fields: ConfigJson, key: str, n_layers: int) -> list[int]:
    """The number of each layer; a single one holds for all."""
    value = fields.raw[key]
    if not isinstance(value, list):
        return [fields.size(key)] * n_layers
    if len(value) != n_layers:
        raise CheckpointError(f"config.json: {key!r} has {len(value)} numbers for {n_layers} layers")
    return [ConfigJson({key: each}).size(key) for each in value]


def _mlp_sizes(fields: ConfigJson, n_layers: int, shared: int) -> dict[str, Any]:
    """The MLPs of the last `shared` layers, which have no K and V, may be twice as wide as the others."""
    key = f"{_PREFIX}feed_forward_length"
    numbers = _each(fields, key, n_layers)
    last = _only(key, numbers[n_layers - shared :]) if shared else 0
    size = _only(key, numbers[: n_layers - shared]) if shared < n_layers else last
    if shared and last not in (size, 2 * size):
        raise CheckpointError(f"config.json: {key!r} is {size}, and {last} in layers that share K and V")
    return {"intermediate_size": size, "use_double_wide_mlp": bool(shared) and last != size}


def _only(key: str, numbers: list[int]) -> int:
    """The number that all of these layers have. Raises CheckpointError if they differ."""
    found = sorted(set(numbers))
    if len(found) > 1:
        raise CheckpointError(f"config.json: {key!r} has {', '.join(map(str, found))} for layers of one type")
    return found[0]


def _turned_part(file: GGUFFile, head_size: int) -> float:
    """The part of a head that RoPE turns in layers that see all tokens: its divisors of frequencies are 1 for the first
    pairs, and without end for the others."""
    if ROPE_FACTORS not in file.tensors:
        raise CheckpointError(f"{file.path} lacks the tensor {ROPE_FACTORS!r}")
    factors = float_tensor(file.tensors[ROPE_FACTORS])
    turned = int((factors == 1).sum())
    fits = tuple(factors.shape) == (head_size // 2,) and turned > 0
    if not fits or not bool((factors[:turned] == 1).all() and (factors[turned:] >= _ENDLESS).all()):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS!r} does not fit the model's RoPE")
    return 2 * turned / head_size
