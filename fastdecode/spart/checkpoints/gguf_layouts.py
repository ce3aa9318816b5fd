"""How llama.cpp stores a model's tensors in a GGUF file: their names by architecture, and how their numbers lie there.

A layout differs from that of Hugging Face's checkpoints in these ways, each of which a Part undoes:

    Q and K of Llama and others    RoPE's pairs stand side by side, where Hugging Face has halves of a head
    experts                        one tensor [experts, out, in] for each matrix of a layer, [experts, out] for a bias
    norms of Qwen3-Next, Qwen3.5,  1 is added to the weights (ModelConfig.norm_offset is 0 for such a file)
        Gemma
    decay of the delta rule        -exp(A) in place of A
    convolution                    [channels, kernel] in place of [channels, 1, kernel]
    V heads of Qwen3.5             the first V head of each K head, then the second of each, and so on
    beta and decay of Qwen3-Next   one matrix, K head by K head
    matrices of latent attention   K's transposed [heads, rank, k_size] beside V's [heads, v_size, rank]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastdecode.gguf.file import GGUFTensor
from fastdecode.spart.checkpoints.config import (
    DeltaNames,
    DeltaRule,
    Latent,
    LatentNames,
    MixtureNormNames,
    ModelConfig,
    MTPNames,
    PerLayerNames,
    TensorNames,
)
from fastdecode.spart.checkpoints.interleaved import halves_of_heads

#: Architectures whose files hold Q and K with RoPE's pairs side by side.
_INTERLEAVED = ("llama", "mistral3", "granite", "smollm3")
#: Architectures whose files have the V heads of the delta rule in another order.
_TILED = ("qwen35", "qwen35moe")

NAMES = TensorNames(
    embedding="token_embd",
    block="blk.{i}.",
    attention_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    o="attn_output",
    mlp_norm="ffn_norm",
    up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    final_norm="output_norm",
    head="output",
    router="ffn_gate_inp",
    expert_up=("ffn_gate_exps.{e}", "ffn_up_exps.{e}"),
    expert_down="ffn_down_exps.{e}",
)
_PHI3_NAMES = replace(NAMES, qkv=("attn_qkv",), up=("ffn_up",))
#: Of the architectures that name the MLP's norm by the attention before it.
_POST_ATTENTION_NAMES = replace(NAMES, mlp_norm="post_attention_norm")
_GPT_OSS_NAMES = replace(_POST_ATTENTION_NAMES, sinks="attn_sinks.weight")
_GEMMA2_NAMES = replace(NAMES, attention_post_norm="post_attention_norm", mlp_post_norm="post_ffw_norm")
_GEMMA4_NAMES = replace(
    _GEMMA2_NAMES,
    block_scale="layer_output_scale.weight",
    per_layer=PerLayerNames(
        table="per_layer_token_embd",
        projection="per_layer_model_proj",
        norm="per_layer_proj_norm",
        gate="inp_gate",
        out="proj",
        post_norm="post_norm",
    ),
    expert_scale="ffn_down_exps.scale",
    shared_up=NAMES.up,
    shared_down=NAMES.down,
    mixture_norms=MixtureNormNames(
        router="ffn_gate_inp.scale",
        experts="pre_ffw_norm_2",
        experts_post="post_ffw_norm_2",
        shared_post="post_ffw_norm_1",
    ),
)
_OLMO2_NAMES = replace(_GEMMA2_NAMES, attention_norm=None, mlp_norm=None)
_MINIMAX_M2_NAMES = replace(NAMES, router_correction="exp_probs_b.bias")
_KV = ("attn_k", "attn_k_norm", "attn_v")
_DELTA_NAMES = DeltaNames(
    inputs=("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"),
    conv="ssm_conv1d",
    decay="ssm_a",
    decay_bias="ssm_dt.bias",
    norm="ssm_norm",
    out="ssm_out",
)
_SHARED_EXPERT_NAMES = replace(
    _POST_ATTENTION_NAMES, shared_up=("ffn_gate_shexp", "ffn_up_shexp"), shared_down="ffn_down_shexp"
)
_GLM4_MOE_NAMES = replace(_SHARED_EXPERT_NAMES, router_correction="exp_probs_b.bias")
_ERNIE4_5_MOE_NAMES = replace(_GLM4_MOE_NAMES, mlp_norm=NAMES.mlp_norm)
_DEEPSEEK2_NAMES = replace(
    _GLM4_MOE_NAMES,
    qkv=(),
    mlp_norm=NAMES.mlp_norm,
    latent=LatentNames(
        q="attn_q",
        q_a="attn_q_a",
        q_a_norm="attn_q_a_norm",
        q_b="attn_q_b",
        kv_a="attn_kv_a_mqa",
        kv_a_norm="attn_kv_a_norm",
        kv_b="attn_kv_b",
    ),
)
_QWEN3_5_NAMES = replace(_SHARED_EXPERT_NAMES, shared_gate="ffn_gate_inp_shexp", delta=_DELTA_NAMES)
#: The names of the architectures that have others than NAMES.
_OTHER_NAMES = {
    "phi3": _PHI3_NAMES,
    "seed_oss": _POST_ATTENTION_NAMES,
    "gpt-oss": _GPT_OSS_NAMES,
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA2_NAMES),
    "gemma4": _GEMMA4_NAMES,
    "glm4moe": _GLM4_MOE_NAMES,
    "deepseek2": _DEEPSEEK2_NAMES,
    "minimax-m2": _MINIMAX_M2_NAMES,
    "olmo2": _OLMO2_NAMES,
    "ernie4_5-moe": _ERNIE4_5_MOE_NAMES,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _QWEN3_5_NAMES),
}


def tensor_names(config: ModelConfig, architecture: str, drafts: int) -> TensorNames:
    """The names of an architecture's tensors. `drafts`: the blocks of the file behind those of the model, which hold an
    MTP head."""
    names = _OTHER_NAMES.get(architecture, NAMES)
    if config.delta is not None and config.delta.by_head:
        names = replace(names, delta=replace(_DELTA_NAMES, inputs=("ssm_in", "ssm_ba")))
    if config.names.router_correction is None:
        names = replace(names, router_correction=None)
    # Files may have K and V of layers that share those of others.
    shared = [i for i, kv_layer in enumerate(config.kv_layers) if kv_layer != i]
    names = replace(names, aside=tuple(f"blk.{i}.{name}." for i in shared for name in _KV))
    if not drafts:
        return names
    block = f"blk.{config.n_blocks}."
    mtp = MTPNames(
        block=block,
        fc=f"{block}nextn.eh_proj",
        embedding_norm=f"{block}nextn.enorm",
        hidden_norm=f"{block}nextn.hnorm",
        final_norm=f"{block}nextn.shared_head_norm",
    )
    return replace(names, mtp=mtp, aside=tuple(f"blk.{config.n_blocks + i}." for i in range(drafts)))


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a model in a GGUF file: a tensor of the file, or some rows of one, and how its numbers lie there."""

    tensor: GGUFTensor
    rows: torch.Tensor | None = None  # the file's row for each of the model's; None: the same
    inputs: torch.Tensor | None = None  # the file's column for each of the model's; None: the same
    #: The model's tensor has this shape; None: that of the file's.
    reshaped: tuple[int, ...] | None = None
    negative_exp: bool = False  # the file has -exp(x) in place of x
    #: The matrices of V [heads, v_size, rank] of latent attention, behind which `tensor` has those of K [heads, rank,
    #: k_size]: the model's tensor is [heads * (k_size + v_size), rank].
    v_heads: GGUFTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the model's tensor."""
        if self.v_heads is not None:
            (heads, rank, k_size), v_size = self.tensor.shape, self.v_heads.shape[1]
            return heads * (k_size + v_size), rank
        if self.reshaped is not None:
            return self.reshaped
        return self.tensor.shape if self.rows is None else (len(self.rows), *self.tensor.shape[1:])


def find_parts(tensors: dict[str, GGUFTensor], architecture: str, config: ModelConfig) -> dict[str, Part]:
    """The tensors of a model, by their names, in a file's `tensors`. A tensor whose shape is not that of the model is
    taken as it is, and compared with the model later."""
    parts = {name: Part(tensor) for name, tensor in tensors.items()}
    if config.experts is not None:
        _split_experts(parts, config.experts.n)
    if architecture in _INTERLEAVED:
        for name, part in parts.items():
            if not name.startswith("blk."):
                continue
            heads = {"attn_q": config.n_q_heads, "attn_k": config.n_kv_heads}.get(name.split(".")[-2])
            if heads and part.shape[0] % (2 * heads) == 0:
                parts[name] = replace(part, rows=halves_of_heads(part.shape[0], heads))
    if config.latent is not None:
        _join_latent_heads(parts, config.latent)
    if config.delta is not None and _fits(parts, config.delta):
        _undo_delta(parts, config.delta, tiled=architecture in _TILED)
    return parts


def _join_latent_heads(parts: dict[str, Part], latent: Latent) -> None:
    """Give the matrices of K and V of all heads, which files have as two tensors of a layer, the name of both."""
    for name in [name for name in parts if name.endswith(".attn_k_b.weight")]:
        k_heads, v_heads = parts[name], parts.get(name.replace("attn_k_b", "attn_v_b"))
        if v_heads is None:
            continue
        n, sizes = len(k_heads.tensor.shape) == 3 and k_heads.tensor.shape[0], (latent.rank, latent.k_size)
        if k_heads.tensor.shape == (n, *sizes) and v_heads.tensor.shape == (n, latent.v_size, latent.rank):
            del parts[name], parts[name.replace("attn_k_b", "attn_v_b")]
            parts[name.replace("attn_k_b", "attn_kv_b")] = replace(k_heads, v_heads=v_heads.tensor)


def _split_experts(parts: dict[str, Part], n: int) -> None:
    """Replace each tensor [n, out, in] by the matrices of `n` experts, each [n, out] by their biases, and one with gate
    over up by both."""
    members = {
        "ffn_gate_exps": ("ffn_gate_exps",),
        "ffn_up_exps": ("ffn_up_exps",),
        "ffn_down_exps": ("ffn_down_exps",),
        "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    }
    for name in list(parts):
        module, _, end = name.rpartition(".")
        block, _, kind = module.rpartition(".")
        tensor = parts[name].tensor
        stems, dimensions = members.get(kind), {"weight": 3, "bias": 2}.get(end)
        if stems is None or len(tensor.shape) != dimensions or tensor.shape[0] != n or tensor.shape[1] % len(stems):
            continue
        del parts[name]
        shape = (tensor.shape[1] // len(stems), *tensor.shape[2:])
        size = len(tensor.data) // (n * len(stems))
        for i in range(n * len(stems)):
            one = f"{block}.{stems[i % len(stems)]}.{i // len(stems)}.{end}"
            parts[one] = Part(replace(tensor, name=one, shape=shape, data=tensor.data[i * size : (i + 1) * size]))


def _fits(parts: dict[str, Part], rule: DeltaRule) -> bool:
    """Whether the tensors of the first block with a delta rule have the sizes of the rule."""
    block = f"blk.{min(rule.blocks)}." if rule.blocks else ""
    conv, decay = (parts.get(block + name) for name in ("ssm_conv1d.weight", "ssm_a"))
    if conv is None or decay is None:
        return False
    return conv.shape == (rule.channels, rule.kernel) and math.prod(decay.shape) == rule.v_heads


def _undo_delta(parts: dict[str, Part], rule: DeltaRule, tiled: bool) -> None:
    """Give the parameters of a gated delta rule their own layout. `tiled`: the V heads have llama.cpp's order."""
    heads = _tiled_heads(rule) if tiled and rule.v_heads != rule.k_heads else None
    values = None if heads is None else (heads[:, None] * rule.v_size + torch.arange(rule.v_size)).flatten()
    before = rule.channels - rule.v_width  # Q and K
    channels = None if values is None else torch.cat([torch.arange(before), before + values])
    for i in rule.blocks:
        block = f"blk.{i}."
        both = parts.get(f"{block}ssm_ba.weight")
        if both and not rule.by_head and both.shape[0] == 2 * rule.v_heads:
            del parts[f"{block}ssm_ba.weight"]
            beta, decay = torch.arange(2 * rule.v_heads).view(rule.k_heads, 2, -1).unbind(1)
            parts[f"{block}ssm_beta.weight"] = replace(both, rows=beta.flatten())
            parts[f"{block}ssm_alpha.weight"] = replace(both, rows=decay.flatten())
        changes: dict[str, dict[str, Any]] = {
            "attn_qkv.weight": {"rows": channels},
            "attn_gate.weight": {"rows": values},
            "ssm_conv1d.weight": {"rows": channels, "reshaped": (rule.channels, 1, rule.kernel)},
            "ssm_a": {"rows": heads, "reshaped": (rule.v_heads,), "negative_exp": True},
            "ssm_dt.bias": {"rows": heads},
            "ssm_out.weight": {"inputs": values},
        }
        if heads is not None:
            changes |= {"ssm_beta.weight": {"rows": heads}, "ssm_alpha.weight": {"rows": heads}}
        for name, change in changes.items():
            if part := parts.get(block + name):
                parts[block + name] = _changed(part, **change)
    for name, part in parts.items():
        if name.endswith("ffn_gate_inp_shexp.weight"):  # a vector, or a matrix of one row
            parts[name] = _changed(part, reshaped=(1, part.tensor.shape[-1]))


def _changed(part: Part, **change: Any) -> Part:
    """The part with another layout; unchanged if the tensor has another number of rows, columns or elements."""
    changed = replace(part, **change)
    shape = part.tensor.shape if changed.reshaped is None else changed.reshaped
    suits = (
        [n for n in shape if n != 1] == [n for n in part.tensor.shape if n != 1]
        and (changed.rows is None or len(changed.rows) == shape[0])
        and (changed.inputs is None or (len(shape) == 2 and len(changed.inputs) == shape[1]))
    )
    return changed if suits else part


def _tiled_heads(rule: DeltaRule) -> torch.Tensor:
    """The file's V head for each of ours, which stand K head by K head."""
    return torch.arange(rule.v_heads).view(-1, rule.k_heads).T.flatten()
