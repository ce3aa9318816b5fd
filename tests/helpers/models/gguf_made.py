"""GGUF files of tiny random models, written with the package gguf, and the same weights as transformers' model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from fastdecode.gguf.file import TYPES
from models.checkpoints import BLOCK_SCALE, BUFFERS, CORRECTION

#: Types whose numbers the package can make from floats.
QUANTISABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "experts.down_proj": "ffn_down_exps",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
#: The modules outside of layers.
_OUTER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_ENDS = ("weight", "bias")
_WHOLE_NAMES = {
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "sinks": "attn_sinks.weight",
    CORRECTION: "exp_probs_b.bias",
    "gate_up_proj_bias": "ffn_gate_up_exps.bias",
    "down_proj_bias": "ffn_down_exps.bias",
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
    BLOCK_SCALE: "layer_output_scale.weight",
}
#: The modules of an MTP head.
_HEAD_MODULES = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}
#: `general.architecture` of a model type, where llama.cpp has another name.
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "ministral3": "mistral3",
    "glm4_moe": "glm4moe",
    **dict.fromkeys(("glm4_moe_lite", "deepseek_v2", "deepseek_v3"), "deepseek2"),
    "minimax_m2": "minimax-m2",
    "olmo3": "olmo2",
    "ernie4_5_moe": "ernie4_5-moe",
}


def gguf_name(name: str) -> str:
    """ "model.layers.1.mlp.up_proj.weight" -> "blk.1.ffn_up.weight"."""
    stem, _, end = name.rpartition(".")
    if stem in _HEAD_MODULES:
        return f"{_HEAD_MODULES[stem]}.{end}"
    if not stem.startswith("model.layers."):
        return f"{_OUTER_NAMES[stem]}.{end}"
    number, _, module = stem.removeprefix("model.layers.").partition(".")
    if end in _WHOLE_NAMES:
        return f"blk.{number}.{_WHOLE_NAMES[end]}"
    if end not in _ENDS:  # a stack of experts has no ending
        module, end = f"{module}.{end}", "weight"
    return f"blk.{number}.{_NAMES[module]}.{end}"


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K in the order of llama.cpp: a rotated pair's two elements side by side."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _tile(values: torch.Tensor, config: Any, size: int, dim: int = 0) -> torch.Tensor:
    """V heads of `size` elements along `dim`, in the order of llama.cpp: the first of each K head, then the second."""
    k_heads = config.linear_num_key_heads
    heads = values.unflatten(dim, (k_heads, config.linear_num_value_heads // k_heads, size))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _delta_layout(module: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """A parameter of Qwen3.5's gated delta rule in the order of llama.cpp."""
    size = config.linear_value_head_dim
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim  # Q and K
    match module:
        case "in_proj_qkv" | "conv1d":
            return torch.cat([values[:before], _tile(values[before:], config, size)])
        case "in_proj_z":
            return _tile(values, config, size)
        case "out_proj":
            return _tile(values, config, size, dim=1)
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return _tile(values, config, 1)
    return values


def stored_tensors(
    name: str, values: torch.Tensor, config: Any, legacy: bool, fused: bool
) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a GGUF file that hold a parameter of transformers' model, in the order of llama.cpp. `legacy`:
    files of Qwen3-Next before llama.cpp took Q, K, V and Z apart, and of DeepSeek before it absorbed matrices. `fused`:
    gate and up of experts in one tensor."""
    stored, parts = gguf_name(name), name.split(".")
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    part = stored.split(".")[-2]
    if part == "attn_kv_b" and not legacy:
        k, v = values.unflatten(0, (config.num_attention_heads, -1)).split(
            [config.qk_nope_head_dim, config.v_head_dim], 1
        )
        return [(stored.replace("kv_b", "k_b"), k.transpose(1, 2)), (stored.replace("kv_b", "v_b"), v)]
    if architecture in ("llama", "granite", "smollm3", "mistral3") and part in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        return [(stored, interleave(values, heads))]
    if architecture == "gpt-oss" and "experts" in parts:
        values = values.mT if values.ndim == 3 else values
    if part == "ffn_gate_up_exps" and not fused:
        gate, up = (values[:, 0::2], values[:, 1::2]) if architecture == "gpt-oss" else values.chunk(2, dim=1)
        return [(stored.replace("gate_up", "gate"), gate), (stored.replace("gate_up", "up"), up)]
    if part == "exp_probs_b":
        return [(stored, values.flatten())]
    if part == "ffn_gate_inp_shexp":
        return [(stored, values[0])]
    if "post_attention_layernorm" in parts and (
        hasattr(config, "linear_num_key_heads")
        or architecture in ("gemma2", "gemma3", "gemma4", "gpt-oss", "seed_oss", "glm4moe", "olmo2")
    ):
        return [(stored.replace("ffn_norm", "post_attention_norm"), values)]
    if "linear_attn" not in parts:
        return [(stored, values)]
    module = parts[-2] if parts[-1] in _ENDS else parts[-1]
    if module == "in_proj_qkvz" and not legacy:
        k_size, heads = config.linear_key_head_dim, config.linear_num_key_heads
        v_size = config.linear_value_head_dim * config.linear_num_value_heads // heads
        *qkv, z = values.unflatten(0, (heads, -1)).split([k_size, k_size, v_size, v_size], dim=1)
        qkv = torch.cat([x.flatten(0, 1) for x in qkv])
        return [(stored.replace("ssm_in", "attn_qkv"), qkv), (stored.replace("ssm_in", "attn_gate"), z.flatten(0, 1))]
    if architecture.startswith("qwen35"):
        values = _delta_layout(module, values, config)
    return [(stored, values[:, 0] if module == "conv1d" else values)]


def _changes(name: str, config: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What llama.cpp does to the values of a parameter, and how it is undone."""
    if name.endswith("A_log"):
        return lambda x: -x.exp(), lambda x: (-x).log()
    adds = hasattr(config, "linear_num_key_heads") or config.model_type in ("gemma", "gemma2", "gemma3_text")
    if adds and "norm" in name and "linear_attn" not in name:
        return lambda x: x + 1, lambda x: x - 1
    return lambda x: x, lambda x: x


def write_gguf(
    path: Path,
    model: Any,
    kinds: str | dict[str, str],
    fields: dict[str, Any] | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    head: Any = None,
    legacy: bool = False,
    fused: bool = False,
    architecture: str | None = None,
    split: int = 0,
) -> None:
    """Write transformers' `model`, and give it the weights that the file has.

    `kinds`: the type of all matrices, or of those whose GGUF names contain a key ("": of the others). `more` adds what
    else the file shall have. `head` is an MTPHead. `legacy` and `fused`: see stored_tensors. `architecture`: that of
    the file, if it is not that of the model's type. With `split` there are several files, each with as many tensors.
    """
    config = model.config
    architecture = architecture or _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + (head is not None))
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    if architecture == "gemma4":
        _add_gemma4(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads if architecture != "deepseek2" or legacy else 1)
        if intermediate_size := getattr(config, "intermediate_size", None):
            writer.add_feed_forward_length(intermediate_size)
        if architecture == "deepseek2":
            _add_deepseek2(writer, config, legacy)
        elif head_dim := getattr(config, "head_dim", None):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    if architecture in ("gemma2", "gemma3"):
        _add_gemma(writer, config)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if experts := getattr(config, "num_experts", getattr(config, "num_local_experts", None)):
        writer.add_expert_count(experts)
        used = config.top_k_experts if architecture == "gemma4" else config.num_experts_per_tok
        writer.add_expert_used_count(used)
        if size := getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(size)
        if size := getattr(config, "shared_expert_intermediate_size", None):
            writer.add_expert_shared_feed_forward_length(size)
    if hasattr(config, "linear_num_key_heads"):
        _add_delta(writer, config)
    if architecture == "glm4moe":
        _add_glm4_moe(writer, config)
    if architecture == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_num_shared_experts * config.moe_intermediate_size)
    if architecture == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        _add_yarn(writer, config.rope_parameters["full_attention"])
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        _add_yarn(writer, config.rope_parameters)
    if config.model_type == "ministral3":
        _add_yarn(writer, config.rope_parameters)
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    if head is not None:
        writer.add_nextn_predict_layers(1)
    for key, value in (fields or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    more(writer)
    kinds = {"": kinds} if isinstance(kinds, str) else kinds
    with torch.no_grad():
        for name, parameter in _parameters(model, head):
            positions = torch.arange(parameter.numel()).view(parameter.shape)
            change, undo = _changes(name, config)
            for stored, places in stored_tensors(name, positions, config, legacy, fused):
                wanted = next((kinds[key] for key in kinds if key and key in stored), kinds[""])
                small = places.ndim == 1 or any(each in stored for each in ("ssm_conv1d", "ffn_gate_inp", "bias"))
                kind = Kind["F32" if small else wanted]
                values = change(parameter.data.flatten()[places])
                data = gguf.quants.quantize(values.numpy().astype(np.float32), kind)
                back = gguf.quants.dequantize(data, kind).astype(np.float32).reshape(places.shape)
                parameter.data.view(-1)[places] = undo(torch.from_numpy(back))
                block = f"blk.{config.num_hidden_layers}." if stored.startswith("nextn.") else ""
                writer.add_tensor(block + stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.attn_logit_softcapping is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    full = config.rope_parameters.get("full_attention", config.rope_parameters)
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys and the divisors of frequencies that llama.cpp's converter writes."""
    types, shared = config.layer_types, config.num_kv_shared_layers
    full, local = (config.per_layer_config[types.index(kind)] for kind in ("full_attention", "sliding_attention"))
    kv_heads = [(full if kind == "full_attention" else local).num_key_value_heads for kind in types]
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else kv_heads[0])
    widths = [config.intermediate_size] * (len(types) - shared)
    widths += [config.intermediate_size * (1 + config.use_double_wide_mlp)] * shared
    writer.add_feed_forward_length(widths if config.use_double_wide_mlp else config.intermediate_size)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(full.head_dim)
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(local.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    pairs = full.head_dim // 2
    turned = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32))


def _add_delta(writer: gguf.GGUFWriter, config: Any) -> None:
    kinds = config.layer_types
    interval = kinds.index("full_attention") + 1
    writer.add_full_attention_interval(interval)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if "qwen3_5" in config.model_type:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if any((i % interval == interval - 1) != (kind == "full_attention") for i, kind in enumerate(kinds)):
        recurrent = [kind == "linear_attention" for kind in kinds]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)


def _add_glm4_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def _add_deepseek2(writer: gguf.GGUFWriter, config: Any, legacy: bool) -> None:
    k_size, v_size = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    writer.add_key_length(k_size if legacy else config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(v_size if legacy else config.kv_lora_rank)
    if not legacy:
        writer.add_key_length_mla(k_size)
        writer.add_value_length_mla(v_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    sigmoid = config.model_type != "deepseek_v2"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if sigmoid or config.topk_method != "greedy":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.rope_parameters["rope_type"] == "yarn":
        _add_yarn(writer, config.rope_parameters)
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _add_yarn(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _parameters(model: Any, head: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model and of its MTP head, whose block stands behind those of the model."""
    tied = model.config.tie_word_embeddings
    yield from ((name, p) for name, p in _own(model) if not (tied and name.startswith("lm_head")))
    for name, parameter in () if head is None else _own(head):
        yield name.replace("layers.0.", f"model.layers.{model.config.num_hidden_layers}."), parameter


def _own(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module that a checkpoint has."""
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(BUFFERS))


def tokenizer_fields(directory: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """The metadata for a byte-level tokenizer.json."""
    raw = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    added = {token["content"]: token["special"] for token in raw["added_tokens"]}
    tokens += [token for token in added if token not in vocabulary]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{True: 3, False: 4}.get(added.get(token), 1) for token in tokens],
        "tokenizer.ggml.merges": merges,
    }


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """uint8 [rows, blocks, bytes]: any numbers, with fp16 factors of a usual size."""
    form = next(form for form in TYPES.values() if form.name == name)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, blocks, form.bytes), dtype=np.uint8)
    factors = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(name, [0])
    if name in ("Q2_K", "Q3_K"):
        factors = {"Q2_K": [80, 82], "Q3_K": [108]}[name]
    if name == "MXFP4":  # the factor is a power of two in one byte
        factors, data[..., 0] = [], rng.integers(110, 130, (rows, blocks))
    for at in factors:
        values = (rng.random((rows, blocks, 1)) * 0.02).astype(np.float16)
        data[..., at : at + 2] = values.view(np.uint8)
    return data
