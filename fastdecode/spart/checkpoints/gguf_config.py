"""gguf_config: the metadata of a GGUF file as a ModelConfig. Its keys become those of a config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.gguf.file import GGUFError, GGUFFile, GGUFTensor, whole_number
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig, Rope
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.checkpoints.gguf import ROPE_FACTORS, float_tensor
from fastdecode.spart.checkpoints.gguf_layouts import NAMES, tensor_names
from fastdecode.spart.checkpoints.llama_like import equal_heads

#: The native family of each `general.architecture`; that of a mixture of experts, if it has another one.
FAMILIES = {
    "llama": ("LlamaForCausalLM", "MixtralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM", None),
    "qwen3": ("Qwen3ForCausalLM", None),
    "qwen3moe": (None, "Qwen3MoeForCausalLM"),
    "qwen3next": (None, "Qwen3NextForCausalLM"),
    "qwen35": ("Qwen3_5ForCausalLM", None),
    "qwen35moe": (None, "Qwen3_5MoeForCausalLM"),
    "phi3": ("Phi3ForCausalLM", None),
    "gemma": ("GemmaForCausalLM", None),
    "gemma2": ("Gemma2ForCausalLM", None),
    "gemma3": ("Gemma3ForCausalLM", None),
    "granite": ("GraniteForCausalLM", None),
    "gpt-oss": (None, "GptOssForCausalLM"),
    "smollm3": ("SmolLM3ForCausalLM", None),
    "seed_oss": ("SeedOssForCausalLM", None),
    "mistral3": ("Ministral3ForCausalLM", None),
    "qwen2vl": ("Qwen2ForCausalLM", None),
    "qwen3vl": ("Qwen3ForCausalLM", None),
    "qwen3vlmoe": (None, "Qwen3MoeForCausalLM"),
}
#: Keys behind the architecture's name, and what config.json calls them.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
_GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SHARED_KEYS = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
#: More such keys, which only these architectures' families read.
_FAMILY_KEYS = {
    "llama": _EXPERT_KEYS,
    "qwen3moe": _EXPERT_KEYS,
    "qwen3vlmoe": _EXPERT_KEYS,
    "qwen3next": _EXPERT_KEYS | _SHARED_KEYS | _DELTA_KEYS,
    "qwen35": _DELTA_KEYS,
    "qwen35moe": _EXPERT_KEYS | _SHARED_KEYS | _DELTA_KEYS,
    "phi3": {"attention.sliding_window": "sliding_window"},
    "gemma2": _GEMMA_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
    "gemma3": _GEMMA_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "gpt-oss": _EXPERT_KEYS
    | {"attention.sliding_window": "sliding_window", "expert_feed_forward_length": "intermediate_size"},
}
#: Keys that repeat the tensors or the keys above, and keys that are read below.
_OTHER_KEYS = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
}
#: The same for architectures with the gated delta rule. `rope.dimension_sections`: the three positions of images.
_DELTA_OTHER_KEYS = {"rope.dimension_sections", "ssm.inner_size", "attention.recurrent_layers", "nextn_predict_layers"}
#: Architectures of the text parts of models that see images.
_SEEING = ("qwen2vl", "qwen3vl", "qwen3vlmoe")
#: Further keys of these that do not change text: RoPE's three positions, and the number of layers that images enter.
_VISION_OTHER_KEYS = {"rope.dimension_sections", "n_deepstack_layers"}
#: Further keys of the architecture mistral3: of YaRN, and of the scale of queries.
_MISTRAL_OTHER_KEYS = {"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"}
#: The keys of RoPE's scaling, and what config.json calls them in `rope_scaling`.
_SCALING_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
#: The number of layers of the largest model of an architecture, in which llama.cpp scales scores by the hidden size
#: over the heads in place of the head size.
_LARGEST = {"gemma2": 46, "gemma3": 62}
_END_TOKENS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model of a GGUF file. Raises CheckpointError for a key or an architecture that is not understood, by name."""
    metadata = _Metadata(file)
    try:
        config = make_config(metadata.config_json())
    except CheckpointError as error:
        raise CheckpointError(metadata.in_its_terms(str(error))) from None
    metadata.check_heads(config)
    tensors = file.tensors
    if config.delta is not None:
        by_head = any(name.endswith(".ssm_in.weight") for name in tensors)
        config = replace(config, delta=replace(config.delta, by_head=by_head))
    return replace(
        config,
        norm_offset=0.0,
        names=tensor_names(config, metadata.architecture, metadata.drafts),
        rope=_rope(file, config),
        qkv_bias=any(name.endswith(".attn_q.bias") for name in tensors),
        o_bias=any(name.endswith(".attn_output.bias") for name in tensors),
        mlp_bias=any(name.endswith(".ffn_down.bias") for name in tensors),
    )


class _Metadata:
    """The metadata of a file. `own` has those whose keys begin with the architecture's name, by the rest of the key."""

    def __init__(self, file: GGUFFile):
        """Raises CheckpointError for an architecture or a key that is not understood."""
        self._file, fields = file, file.fields
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise CheckpointError(
                f"{file.path}: architecture {architecture!r} is not known; known are {', '.join(FAMILIES)}"
            )
        self.architecture, prefix = architecture, f"{architecture}."
        self.own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
        self._keys = _KEYS | _FAMILY_KEYS.get(architecture, {})
        self._has_delta = "ssm.conv_kernel" in self._keys
        others = _OTHER_KEYS | (_DELTA_OTHER_KEYS if self._has_delta else set())
        others |= _VISION_OTHER_KEYS if architecture in _SEEING else set()
        others |= _MISTRAL_OTHER_KEYS if architecture == "mistral3" else set()
        if unknown := sorted(key for key in self.own if key not in self._keys and key not in others):
            raise CheckpointError(f"{file.path}: the key {prefix + unknown[0]!r} is not understood")
        #: Blocks behind those of the model, which hold an MTP head.
        self.drafts = self._whole_number("nextn_predict_layers") if self._has_delta else 0

    def _whole_number(self, key: str) -> int:
        """The key `key` of the architecture, 0 without it. Raises CheckpointError."""
        try:
            return whole_number(self.own, key, self._file.path)
        except GGUFError as error:
            raise CheckpointError(str(error)) from None

    def config_json(self) -> dict[str, Any]:
        """What config.json would say. Raises CheckpointError."""
        path, fields, tensors = self._file.path, self._file.fields, self._file.tensors
        raw: dict[str, Any] = {name: self.own[key] for key, name in self._keys.items() if key in self.own}
        if "token_embd.weight" not in tensors or "num_attention_heads" not in raw:
            raise CheckpointError(
                f"{path} holds no language model: it lacks 'token_embd.weight' or the number of heads"
            )
        experts = raw.get("num_experts", 0)
        family = FAMILIES[self.architecture][bool(experts)]
        if family is None:
            raise CheckpointError(f"{path}: {experts} experts are not understood in {self.architecture}")
        raw |= {
            "architectures": [family],
            "dtype": _dtype(tensors, self.architecture),
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": f"{NAMES.head}.weight" not in tensors,
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [fields[key] for key in _END_TOKENS if key in fields],
            "rope_scaling": self._rope_scaling(),
            "norm_topk_prob": True,
            **self._implied(ConfigJson(raw)),
        }
        if self.architecture.startswith("gemma"):
            raw |= self._gemma(ConfigJson(raw))
        return raw | self._delta() if self._has_delta else raw

    def _rope_scaling(self) -> dict[str, Any]:
        # A factor without a type is a linear one, as in llama.cpp.
        kind = self.own.get("rope.scaling.type", "linear" if self.own.get("rope.scaling.factor") else "none")
        if not isinstance(kind, str):
            key = f"{self.architecture}.rope.scaling.type"
            raise CheckpointError(f"{self._file.path}: {key!r} is {kind!r}, not a string")
        scaling = {name: value for key, name in _SCALING_KEYS.items() if (value := self.own.get(key))}
        if kind == "none":
            return {**scaling, "rope_type": "default"}
        # llama.cpp takes it that mscale is 1. No key says whether YaRN rounds the ends of its ramp. gpt-oss is trained
        # without it.
        scaling = {"factor": None, "mscale": 1.0, **scaling}
        return {**scaling, "rope_type": kind, "truncate": self.architecture != "gpt-oss"}

    @staticmethod
    def _implied(config: ConfigJson) -> dict[str, Any]:
        """What llama.cpp takes for granted of every architecture."""
        return {
            "head_dim": config.size("head_dim", equal_heads(config)),
            "num_key_value_heads": config.size("num_key_value_heads", config.size("num_attention_heads")),
            "rope_theta": config.number("rope_theta", 10000.0),
        }

    def _gemma(self, config: ConfigJson) -> dict[str, Any]:
        """What llama.cpp takes for granted of the architectures of Gemma, too."""
        is_largest = config.size("num_hidden_layers") == _LARGEST.get(self.architecture)
        scale_of = equal_heads(config) if is_largest else config.size("head_dim")
        implied: dict[str, Any] = {"query_pre_attn_scalar": scale_of}
        if self.architecture == "gemma3" and not config.raw.get("sliding_window"):
            implied["sliding_window_pattern"] = 1  # all layers see all tokens
        return implied

    def _delta(self) -> dict[str, Any]:
        """The keys of config.json in which llama.cpp says otherwise what blocks with the gated delta rule are like."""
        own = self.own
        n_blocks = self._whole_number("block_count") - self.drafts
        more: dict[str, Any] = {"num_hidden_layers": n_blocks}
        if v_heads := self._whole_number("ssm.time_step_rank"):
            more["linear_value_head_dim"] = self._whole_number("ssm.inner_size") // v_heads
        size, turned = self._whole_number("attention.key_length"), self._whole_number("rope.dimension_count")
        if size and turned:
            more["partial_rotary_factor"] = turned / size
        recurrent = own.get("attention.recurrent_layers")
        if isinstance(recurrent, list):
            more["layer_types"] = ["linear_attention" if each else "full_attention" for each in recurrent[:n_blocks]]
        return more

    def in_its_terms(self, sentence: str) -> str:
        """A sentence of make_config about config.json, with the file and its keys in place of config.json and its."""
        for key, name in reversed((self._keys | _SCALING_KEYS).items()):  # the last key of a name counts
            sentence = sentence.replace(repr(name), repr(f"{self.architecture}.{key}"))
        named = sentence.replace("config.json", str(self._file.path))
        return named if named != sentence else f"{self._file.path}: {sentence}"

    def check_heads(self, config: ModelConfig) -> None:
        """Raise CheckpointError if a key says another head size than that of the model."""
        turned = config.rope.width(config.head_size) if config.rope else config.head_size
        for key, size in (("attention.value_length", config.head_size), ("rope.dimension_count", turned)):
            if self.own.get(key, size) != size:
                raise CheckpointError(
                    f"{self._file.path}: {self.architecture}.{key} is {self.own[key]!r}, the head size "
                    f"{config.head_size}"
                )


def _dtype(tensors: dict[str, GGUFTensor], architecture: str) -> str:
    """The dtype of the matrices that are not quantised. Small ones are in F32 in every file. fp16 if all others are
    quantised: a GPU then computes in it. bf16 for Gemma, whose activations may exceed fp16."""
    kinds = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1} - {"F32"}
    if not kinds:
        return "float32"
    return "bfloat16" if kinds == {"BF16"} or architecture.startswith("gemma") else "float16"


def _rope(file: GGUFFile, config: ModelConfig) -> Rope | None:
    """RoPE with the divisors of frequencies that the file has (Llama 3.1 and later)."""
    if ROPE_FACTORS not in file.tensors or config.rope is None:
        return config.rope
    factors = float_tensor(file.tensors[ROPE_FACTORS])
    if config.rope.kind != "default" or tuple(factors.shape) != (config.head_size // 2,):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS!r} does not fit the model's RoPE")
    if not bool((factors > 0).all()):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS!r} is {factors.tolist()}, not positive numbers")
    return Rope(config.rope.theta, "factors", factors=tuple(factors.tolist()))
