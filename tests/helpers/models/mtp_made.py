"""MTP heads (multi-token prediction) for checkpoints of Qwen, DeepSeek and GLM, of transformers' own modules.

transformers leaves these heads aside, so `MTPHead` is the reference for them: the next token's embedding and the hidden
state behind the final norm, each normalised, side by side, pass a linear, a block that attends and a norm before the
model's LM head (DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 23). `LayerHead` is that of DeepSeek and
GLM.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.checkpoints import CORRECTION, reference


class MTPHead(torch.nn.Module):
    """A random head of `model`, in fp32."""

    def __init__(self, model: Any, seed: int = 0):
        super().__init__()
        object.__setattr__(self, "model", model)  # not a part of the head
        config = model.config
        modules = importlib.import_module(type(model).__module__)
        prefix = type(model).__name__.removesuffix("ForCausalLM")
        norm = getattr(modules, f"{prefix}RMSNorm")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            attends = self._attends(config)
            self.layers = torch.nn.ModuleList([getattr(modules, f"{prefix}DecoderLayer")(config, attends)])
            self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
                setattr(self, name, norm(config.hidden_size, eps=config.rms_norm_eps))
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, 0.0, 0.2)
                else:
                    torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
            for name, buffer in self.named_buffers():
                if name.endswith(CORRECTION):
                    torch.nn.init.normal_(buffer, 0.0, 0.5)

    def _attends(self, config: Any) -> int:
        """The number of a layer like that of the head."""
        return config.layer_types.index("full_attention")

    def inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the block gets for tokens [n] and the hidden states before them [n, hidden_size]."""
        embedded = self.pre_fc_norm_embedding(self.model.model.embed_tokens(tokens))
        return self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], dim=-1))

    def block(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The head's hidden states for the block's inputs x [n, hidden_size]; row i sees row j where mask[i, j]."""
        angles = self.model.model.rotary_emb(x[None], torch.arange(len(x))[None])
        bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
        out = self.layers[0](x[None], position_embeddings=angles, attention_mask=bias)
        out = out[0] if isinstance(out, tuple) else out
        return self.norm(out[0] if out.ndim == 3 else out)

    def hidden_states(self, tokens: Sequence[int]) -> torch.Tensor:
        """The model's own hidden states before the last of its tokens, [len(tokens) - 1, hidden_size]."""
        with torch.no_grad():
            return self.model.model(torch.tensor([list(tokens[:-1])])).last_hidden_state[0]

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], n: int) -> list[int]:
        """The `n` tokens that the head expects after `tokens`. Later passes see the rows of the first one."""
        x = self.inputs(torch.tensor(list(tokens[1:])), self.hidden_states(tokens))
        first = len(x)
        found: list[int] = []
        for _ in range(n):
            mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
            mask[:, first:] = False
            mask[range(first, len(x)), range(first, len(x))] = False
            hidden = self.block(x, mask)[-1:]
            found.append(int(self.model.lm_head(hidden).argmax()))
            x = torch.cat([x, self.inputs(torch.tensor(found[-1:]), hidden)])
        return found

    def learn(self, texts: Sequence[Sequence[int]], steps: int) -> None:
        """Fit the head to what follows in `texts`."""
        known = [(torch.tensor(list(text)), self.hidden_states(text)) for text in texts]
        optimiser = torch.optim.Adam(self.parameters(), lr=3e-3)
        for _ in range(steps):
            loss = torch.zeros(())
            for tokens, hidden in known:
                mask = torch.ones(len(hidden) - 1, len(hidden) - 1, dtype=torch.bool).tril()
                states = self.block(self.inputs(tokens[1:-1], hidden[:-1]), mask)
                loss = loss + torch.nn.functional.cross_entropy(self.model.lm_head(states), tokens[2:])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def save(self, directory: Path, target: Path) -> Path:
        """Copy the checkpoint in `directory` to `target`, with this head. Returns `target`."""
        shutil.copytree(directory, target)
        tensors = load_file(target / "model.safetensors")
        tensors |= {name: tensor.contiguous() for name, tensor in self.tensors().items()}
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        return target

    def tensors(self) -> dict[str, torch.Tensor]:
        """The head as a checkpoint has it."""
        return {f"mtp.{name}": tensor for name, tensor in self.state_dict().items()}


class LayerHead(MTPHead):
    """The head of DeepSeek's and GLM's checkpoints: the decoder layer behind the last one. The final norm of `model`
    becomes random, so that the hidden states before it are others than those behind it."""

    def __init__(self, model: Any, seed: int = 0):
        super().__init__(model, seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            torch.nn.init.normal_(model.model.norm.weight, 1.0, 0.3)
        indexer = getattr(self.layers[0].self_attn, "indexer", None)
        if indexer is not None:
            indexer.register_forward_hook(self._of_first_rows)
        self._first = 0  # rows of the first pass

    def _attends(self, config: Any) -> int:
        """The last layer, which has experts and, in a model with indexers, one of its own."""
        return config.num_hidden_layers - 1

    def _of_first_rows(self, indexer: Any, arguments: Any, selected: torch.Tensor) -> torch.Tensor:
        """Rows of later passes attend to the tokens that the row before them has selected in the first pass."""
        later = selected[:, self._first - 1 : self._first].expand(-1, selected.shape[1] - self._first, -1)
        return torch.cat([selected[:, : self._first], later], dim=1)

    def block(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self._first = int(mask.diagonal().sum())
        return super().block(x, mask)

    def tensors(self) -> dict[str, torch.Tensor]:
        modules = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
        modules |= {"norm": "shared_head.norm"}
        found = {"embed_tokens.weight": self.model.model.embed_tokens.weight.clone()}
        found["shared_head.head.weight"] = self.model.lm_head.weight.clone()
        for name, tensor in self.state_dict().items():
            module, _, rest = name.partition(".")
            if rest.endswith("experts.gate_up_proj"):
                for e, (gate, up) in enumerate(stack.chunk(2) for stack in tensor):
                    found[f"mlp.experts.{e}.gate_proj.weight"], found[f"mlp.experts.{e}.up_proj.weight"] = gate, up
            elif rest.endswith("experts.down_proj"):
                found |= {f"mlp.experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
            else:
                found[f"{modules[module]}.{rest}" if module in modules else rest.removeprefix("0.")] = tensor
        prefix = f"model.layers.{self.model.config.num_hidden_layers}."
        head = {f"{prefix}{name}": tensor for name, tensor in found.items()}
        return {**head, "model.norm.weight": self.model.model.norm.weight}


def make_head(directory: Path, seed: int = 0) -> MTPHead:
    """A random head of the checkpoint in `directory`."""
    model = reference(directory)
    model.requires_grad_(False)
    return kind_of_head(model)(model, seed)


def kind_of_head(model: Any) -> type[MTPHead]:
    return LayerHead if hasattr(model.config, "num_nextn_predict_layers") else MTPHead
