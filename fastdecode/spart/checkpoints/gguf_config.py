"""gguf_config: the metadata of a GGUF file as a ModelConfig. Its keys become those of a config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.gguf.file import GGUFError, GGUFFile, GGUFTensor, whole_number
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig, Rope
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.checkpoints.gguf import ROPE_FACTORS, float_tensor
from fastdecode.spart.checkpoints.gguf_gemma4 import GEMMA4_KEYS, GEMMA4_OTHER_KEYS, gemma4_json
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
    "gemma4": ("Gemma4ForCausalLM", "Gemma4ForCausalLM"),
    "granite": ("GraniteForCausalLM", None),
    "gpt-oss": (None, "GptOssForCausalLM"),
    "smollm3": ("SmolLM3ForCausalLM", None),
    "seed_oss": ("SeedOssForCausalLM", None),
    "mistral3": ("Ministral3ForCausalLM", None),
    "qwen2vl": ("Qwen2ForCausalLM", None),
    "qwen3vl": ("Qwen3ForCausalLM", None),
    "qwen3vlmoe": (None, "Qwen3MoeForCausalLM"),
    "glm4moe": (None, "Glm4MoeForCausalLM"),
    "deepseek2": (None, "DeepseekV3ForCausalLM"),  # V2 if the router's scores are a softmax
    "minimax-m2": (None, "MiniMaxM2ForCausalLM"),
    "olmo2": ("Olmo2ForCausalLM", None),  # OLMo 3 with windows
    "ernie4_5": ("Ernie4_5ForCausalLM", None),
    "ernie4_5-moe": (None, "Ernie4_5_MoeForCausalLM"),
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
_GLM4_MOE_KEYS = _EXPERT_KEYS | {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_DEEPSEEK2_KEYS = _GLM4_MOE_KEYS | {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
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
    "gemma4": GEMMA4_KEYS,
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "glm4moe": _GLM4_MOE_KEYS,
    "deepseek2": _DEEPSEEK2_KEYS,
    "minimax-m2": _EXPERT_KEYS
    | {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
    "olmo2": {"attention.sliding_window": "sliding_window"},
    "ernie4_5-moe": _EXPERT_KEYS
    | {"interleave_moe_layer_step": "moe_layer_interval", "leading_dense_block_count": "moe_layer_start_index"},
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
_DELTA_OTHER_KEYS = {"rope.dimension_sections", "ssm.inner_size", "attention.recurrent_layers", "nextn_predict_layers"}
#: Keys that do not change text: RoPE's three positions of images, and the number of layers that images enter.
_VISION_OTHER_KEYS = {"rope.dimension_sections", "n_deepstack_layers"}
#: Further keys like _OTHER_KEYS, which these architectures alone have.
_FAMILY_OTHER_KEYS = {
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _DELTA_OTHER_KEYS),
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe"), _VISION_OTHER_KEYS),
    "gemma4": GEMMA4_OTHER_KEYS,
    "glm4moe": {"rope.dimension_sections", "expert_gating_func", "nextn_predict_layers"},
    "deepseek2": {
        *("attention.key_length_mla", "attention.value_length_mla"),
        *("expert_gating_func", "rope.scaling.yarn_log_multiplier"),
    },
    "minimax-m2": {"expert_gating_func"},
    "olmo2": {"attention.sliding_window_pattern", "rope.freq_base_swa", "rope.scaling.attn_factor"},
    "ernie4_5-moe": {"expert_shared_count", "expert_shared_feed_forward_length"},
    "mistral3": {"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"},
}
#: What `expert_gating_func` says of scores that are a softmax, and of sigmoids; 0 leaves it to the architecture.
_SOFTMAX, _SIGMOID = 1, 2
#: The numbers of layers and of tokens of GLM-4.7-Flash, whose scores are sigmoids for llama.cpp without that key.
_GLM_4_7_FLASH = (47, 154880)
#: The keys of RoPE's scaling, and what config.json calls them in `rope_scaling`.
_SCALING_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.attn_factor": "attention_factor",
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
        generation = {"suppress_tokens": file.fields.get("tokenizer.ggml.suppress_tokens")}
        config = make_config(metadata.config_json(), generation)
    except CheckpointError as error:
        raise CheckpointError(metadata.in_its_terms(str(error))) from None
    metadata.check_heads(config)
    tensors = file.tensors
    if config.delta is not None:
        by_head = any(name.endswith(".ssm_in.weight") for name in tensors)
        config = replace(config, delta=replace(config.delta, by_head=by_head))
    if config.experts is not None:
        config = replace(config, experts=replace(config.experts, correction_rows=0))
    return replace(
        config,
        norm_offset=0.0,
        names=tensor_names(config, metadata.architecture, metadata.drafts),
        rope=_rope(file, config),
        latent=config.latent and replace(config.latent, norm_eps=config.norm_eps),
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
        others = _OTHER_KEYS | _FAMILY_OTHER_KEYS.get(architecture, set())
        if unknown := sorted(key for key in self.own if key not in self._keys and key not in others):
            raise CheckpointError(f"{file.path}: the key {prefix + unknown[0]!r} is not understood")
        #: Blocks behind those of the model, which hold an MTP head.
        self.drafts = self._whole_number("nextn_predict_layers") if "nextn_predict_layers" in others else 0

    def _whole_number(self, key: str) -> int:
        """The key `key` of the architecture, 0 without it. Raises CheckpointError."""
        try:
            return whole_number(self.own, key, self._file.path)
        except GGUFError as error:
            raise CheckpointError(str(error)) from None

    def config_json(self) -> dict[str, Any]:
        """What config.json would say. Raises CheckpointError."""
        path, fields, tensors = self._file.path, self._file.fields, self._file.tensors
        if "token_embd.weight" not in tensors or "attention.head_count" not in self.own:
            raise CheckpointError(
                f"{path} holds no language model: it lacks 'token_embd.weight' or the number of heads"
            )
        raw: dict[str, Any] = {"norm_topk_prob": True}
        if self.architecture == "glm4moe":
            raw = self._glm4_moe()
        if self.architecture == "deepseek2":
            raw = self._deepseek2()
        if self.architecture == "ernie4_5-moe":  # the size of all shared experts together
            size, shared = (self._whole_number(f"expert_{each}feed_forward_length") for each in ("", "shared_"))
            raw = {"moe_num_shared_experts": shared // size if size else 0}
        if self.architecture == "minimax-m2":
            self._check_router()
            raw = self._partial_rope()
        raw |= {name: self.own[key] for key, name in self._keys.items() if key in self.own}
        by_layer = gemma4_json(self._file) if self.architecture == "gemma4" else {}
        experts = self.own.get("expert_count", 0)
        family = FAMILIES[self.architecture][bool(experts)]
        if family is None:
            raise CheckpointError(f"{path}: {experts} experts are not understood in {self.architecture}")
        raw |= {
            "architectures": raw.get("architectures", [family]),
            "dtype": _dtype(tensors, self.architecture),
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": f"{NAMES.head}.weight" not in tensors,
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [fields[key] for key in _END_TOKENS if key in fields],
            "rope_scaling": self._rope_scaling(),
            **self._implied(ConfigJson(raw | by_layer)),
            **by_layer,
        }
        if self.drafts:
            raw["num_hidden_layers"] = self._whole_number("block_count") - self.drafts
        if self.architecture in ("gemma", "gemma2", "gemma3"):
            raw |= self._gemma(ConfigJson(raw))
        if self.architecture == "olmo2" and raw.get("sliding_window"):
            raw |= self._olmo3(ConfigJson(raw))
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
        if self.architecture == "deepseek2":
            # llama.cpp has a tenth of mscale_all_dim in these files, and assumes that mscale is the same.
            if not scaling.get("mscale_all_dim"):
                key = f"{self.architecture}.rope.scaling.yarn_log_multiplier"
                raise CheckpointError(f"{self._file.path}: {key!r} is absent, and RoPE is scaled by {kind!r}")
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * scaling["mscale_all_dim"])
        # llama.cpp assumes that mscale is 1. No key says whether YaRN rounds the ends of its ramp. gpt-oss was trained
        # with ends that are not rounded.
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
        """What llama.cpp takes for granted of the architectures of Gemma 1 to 3, too."""
        is_largest = config.size("num_hidden_layers") == _LARGEST.get(self.architecture)
        scale_of = equal_heads(config) if is_largest else config.size("head_dim")
        implied: dict[str, Any] = {"query_pre_attn_scalar": scale_of}
        if self.architecture == "gemma3" and not config.raw.get("sliding_window"):
            implied["sliding_window_pattern"] = 1  # all layers see all tokens
        return implied

    def _glm4_moe(self) -> dict[str, Any]:
        """What llama.cpp takes for granted of GLM-4-MoE where a key is absent, and what only the tensors say. Raises
        CheckpointError for another router."""
        self._check_router()
        return {
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "partial_rotary_factor": 1.0,
            **self._partial_rope(),
            "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in self._file.tensors),
        }

    def _check_router(self) -> None:
        """Raise CheckpointError for a router whose scores are no sigmoids."""
        if self.own.get("expert_gating_func", 0) not in (0, _SIGMOID):
            key = f"{self.architecture}.expert_gating_func"
            raise CheckpointError(f"{self._file.path}: {key!r} is {self.own['expert_gating_func']!r}, not {_SIGMOID}")

    def _olmo3(self, config: ConfigJson) -> dict[str, Any]:
        """What makes OLMo 3 of a file of OLMo 2. Without a list of the layers with windows, every n-th one has none."""
        n_layers, pattern = config.size("num_hidden_layers"), self.own.get("attention.sliding_window_pattern", 4)
        if not isinstance(pattern, list):
            every = self._whole_number("attention.sliding_window_pattern") or 4
            pattern = [(i + 1) % every for i in range(n_layers)]
        window_rope = {"rope_theta": self.own.get("rope.freq_base_swa", config.number("rope_theta", 10000.0))}
        return {
            "architectures": ["Olmo3ForCausalLM"],
            "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
            "rope_parameters": {"sliding_attention": window_rope},
        }

    def _deepseek2(self) -> dict[str, Any]:
        """What llama.cpp takes for granted of DeepSeek-V2 and V3 and GLM-4.7-Flash where a key is absent, and the keys
        of config.json of which it says the same in others. Raises CheckpointError for another router."""
        # Files from before llama.cpp absorbed the matrices lack the first key of each pair.
        k_size, v_size = (
            self._whole_number(f"attention.{kind}_length_mla") or self._whole_number(f"attention.{kind}_length")
            for kind in ("key", "value")
        )
        raw: dict[str, Any] = {
            "q_lora_rank": None,
            "qk_nope_head_dim": k_size - self._whole_number("rope.dimension_count"),
            "v_head_dim": v_size,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "n_shared_experts": 0,
            "n_group": 1,
            "topk_group": 1,
        }
        sizes = self._whole_number("block_count"), self._file.tensors["token_embd.weight"].shape[0]
        scores = self._whole_number("expert_gating_func") or (_SIGMOID if sizes == _GLM_4_7_FLASH else _SOFTMAX)
        if scores == _SOFTMAX:
            grouped = self._whole_number("expert_group_count") > 1
            raw |= {"architectures": ["DeepseekV2ForCausalLM"]}
            raw |= {"topk_method": "group_limited_greedy" if grouped else "greedy"}
        elif scores != _SIGMOID:
            key = f"{self.architecture}.expert_gating_func"
            raise CheckpointError(f"{self._file.path}: {key!r} is {scores}, not {_SOFTMAX} or {_SIGMOID}")
        return raw

    def _partial_rope(self) -> dict[str, Any]:
        """The part of a head that RoPE turns, if the file tells it."""
        size, turned = self._whole_number("attention.key_length"), self._whole_number("rope.dimension_count")
        return {"partial_rotary_factor": turned / size} if size and turned else {}

    def _delta(self) -> dict[str, Any]:
        """The keys of config.json in which llama.cpp says otherwise what blocks with the gated delta rule are like."""
        own, more = self.own, self._partial_rope()
        if v_heads := self._whole_number("ssm.time_step_rank"):
            more["linear_value_head_dim"] = self._whole_number("ssm.inner_size") // v_heads
        recurrent = own.get("attention.recurrent_layers")
        if isinstance(recurrent, list):
            n_blocks = self._whole_number("block_count") - self.drafts
            more["layer_types"] = ["linear_attention" if each else "full_attention" for each in recurrent[:n_blocks]]
        return more

    def in_its_terms(self, sentence: str) -> str:
        """A sentence of make_config about config.json, with the file and its keys in place of config.json and its."""
        for key, name in reversed((self._keys | _SCALING_KEYS).items()):  # the last key of a name counts
            sentence = sentence.replace(repr(name), repr(f"{self.architecture}.{key}"))
        path = str(self._file.path)
        named = sentence.replace("config.json", path)
        return named if named.startswith(path) else f"{path}: {named}"

    def check_heads(self, config: ModelConfig) -> None:
        """Raise CheckpointError if a key says another head size than that of the model."""
        # gguf_gemma4.py has compared the keys of Gemma 4, whose layers differ. Latent attention has keys of its own.
        if self.architecture == "gemma4" or config.latent is not None:
            return
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
    """RoPE with the divisors of frequencies that the file has (Llama 3.1 and later). Those of Gemma 4 are what makes
    its RoPE proportional."""
    if ROPE_FACTORS not in file.tensors or config.rope is None or config.rope.kind == "proportional":
        return config.rope
    factors = float_tensor(file.tensors[ROPE_FACTORS])
    if config.rope.kind != "default" or tuple(factors.shape) != (config.rope.width(config.head_size) // 2,):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS!r} does not fit the model's RoPE")
    if not bool((factors > 0).all()):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS!r} is {factors.tolist()}, not positive numbers")
    return replace(config.rope, kind="factors", factors=tuple(factors.tolist()))
