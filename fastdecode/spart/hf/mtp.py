"""MTP heads (DeepSeek-V3, arXiv 2412.19437, section 2.2) of transformers models.

Checkpoints of DeepSeek and GLM have the head as one more decoder layer behind the last one, with three norms and a
linear of its own. transformers leaves these tensors aside. A model of one more layer has places for all of them, so
transformers' own loader reads them; the model's forward pass then leaves the layer out.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.checkpoints.tensors import stored_tensors

#: Types whose decoder layer N is an MTP head, where N is num_hidden_layers.
_TYPES = frozenset(["deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"])

#: What a list with an element for each layer says of the head's layer; another list repeats its last element.
_OF_HEAD = {"mlp_layer_types": "sparse", "indexer_types": "full"}


def with_head_layer(config: Any, directory: Path) -> Any:
    """A copy of `config`, the PretrainedConfig of a model directory, with one more layer: the MTP head's. Raises
    CheckpointError for a directory without a head, and for a type whose head is not supported."""
    if config.model_type not in _TYPES:
        raise CheckpointError(f"an MTP head of a model of type {config.model_type!r} is not supported")
    longer, n = copy.deepcopy(config), config.num_hidden_layers
    linear = f"model.layers.{n}.eh_proj.weight"
    if any(directory.glob("*.safetensors")) and linear not in stored_tensors(directory):
        raise CheckpointError(f"the checkpoint has no MTP head to draft tokens: it lacks the tensor {linear!r}")
    for name, values in vars(config).items():
        if isinstance(values, list) and len(values) == n and name.endswith("_types"):
            setattr(longer, name, [*values, _OF_HEAD.get(name, values[-1])])
    longer.num_hidden_layers = n + 1
    return longer


def with_head_modules(factory: Any) -> Any:
    """The model class `factory`, whose last decoder layer has the modules of an MTP head, too."""

    class WithHead(factory):  # type: ignore[misc]
        def __init__(self, config: Any):
            super().__init__(config)
            layer, norm = self.model.layers[-1], type(self.model.norm)
            layer.enorm, layer.hnorm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))
            layer.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            layer.shared_head = torch.nn.Module()
            layer.shared_head.norm = norm(config.hidden_size, eps=config.rms_norm_eps)

    return WithHead


class MTPHead:
    """The head of a model of `with_head_modules`, with the model's own embedding and LM head. Hidden states are those
    behind a final norm, the model's or the head's."""

    def __init__(self, module: Any):
        """From now on the forward pass of `module` leaves out the head's layer."""
        self._module, self._layer = module, module.model.layers[-1]
        module.config.num_hidden_layers -= 1

    def hidden_states(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's own hidden states of tokens [rows] at positions [rows], [rows, hidden_size]."""
        out = self._module.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        states: torch.Tensor = out.last_hidden_state[0]
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] fp32."""
        logits: torch.Tensor = self._module.lm_head(hidden[None])[0]
        return logits.float()

    def attended(self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The layer up to its attention: tokens [n], the hidden states before them [n, hidden_size] and these states'
        positions [n] -> the residual stream [n, hidden_size]."""
        layer, model, hidden, at = self._layer, self._module.model, hidden[None], positions[None]
        pairs = layer.enorm(model.embed_tokens(tokens[None])), layer.hnorm(hidden)
        x: torch.Tensor = layer.eh_proj(torch.cat(pairs, dim=2))
        mixed, *_ = layer.self_attn(
            hidden_states=layer.input_layernorm(x),
            attention_mask=None,
            position_ids=at,
            position_embeddings=model.rotary_emb(x, position_ids=at),
        )
        stream: torch.Tensor = x + mixed
        return stream[0]

    def finished(self, x: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: the residual stream x [n, hidden_size] -> the head's hidden states."""
        layer, x = self._layer, x[None]
        states: torch.Tensor = layer.shared_head.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
        return states[0]
