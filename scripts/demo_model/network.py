"""The demo model's network, for training: a Llama in plain PyTorch.

Modules carry the parameter names of `transformers`' `LlamaForCausalLM`
(without the leading `model.`), and the arithmetic is the same, so that the
trained weights are a Llama checkpoint as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.heads, self.kv_heads, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c["hidden_size"], bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, the two halves of a head paired."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Block(nn.Module):
    """One decoder layer; dropout acts on what it adds to the residual stream."""

    def __init__(self, c: dict[str, Any], dropout: float):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended: Tensor = self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        x = x + attended
        projected: Tensor = self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return x + projected


class Llama(nn.Module):
    """The transformer up to the final norm; the head shares the embedding."""

    cos: Tensor  # [positions, head_dim], as sin
    sin: Tensor

    def __init__(self, c: dict[str, Any], dropout: float):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c, dropout) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.dropout = nn.Dropout(dropout)
        frequency = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angle = torch.outer(torch.arange(c["max_position_embeddings"]), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c["num_hidden_layers"]) if residual else 0.02)

    def loss(self, tokens: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy of every token given those before it in its row."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.dropout(self.embed_tokens(inputs))
        cos, sin = self.cos[: inputs.shape[1]], self.sin[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)
