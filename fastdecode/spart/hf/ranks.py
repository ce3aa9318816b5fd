"""How the ranks of a tensor-parallel S-Part share a transformers model: by the plan that transformers has for it.

A plan names the linears, and the stacked matrices of experts, whose outputs ("colwise") or inputs ("rowwise") are cut,
here in equal parts. The model's own code runs with these smaller matrices: it takes the number of heads from the shapes
of Q, K and V. The ranks sum the outputs of "rowwise" linears and of experts. The LM head is cut as ranks/vocabulary.py
says; all else is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.checkpoints.tensors import open_safetensors, safetensors_files, stored_tensors
from fastdecode.spart.hf.linears import LinearModule
from fastdecode.spart.ranks.share import Cut, Share, cut_tensor
from fastdecode.spart.ranks.vocabulary import SharedHead

#: Styles of modules that are whole on every rank.
_WHOLE = frozenset(["embedding_rowwise", "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce"])
#: The axis from the last one in which a style cuts a linear's weight [out, in], or experts' [experts, out, in].
_AXES = {"colwise": -2, "rowwise": -1, "packed_colwise": -2}
#: Types whose plan leaves attention whole, and the styles that its linears have in the plans of other types.
_ATTENTION_LEFT_WHOLE = frozenset(["axk1", "deepseek_v3", "hunyuan_v1_moe", "youtu"])
_ATTENTION = {"o_proj": "rowwise"} | dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), "colwise")
#: Linears of MLPs, by name and style, whose columns some plans gather on every rank and then split again. The values
#: are the styles with which each rank keeps its own columns.
_MLP = {("gate_up_proj", "colwise_gather_output"): "packed_colwise", ("down_proj", "rowwise_split_input"): "rowwise"}
#: A matrix of one expert, where a checkpoint has the experts one by one, and the axis in which it is cut.
_EXPERT = re.compile(r"(.+)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
_EXPERT_AXES = {"gate_proj": -2, "up_proj": -2, "down_proj": -1}


class CannotShare(CheckpointError):
    """Ranks cannot share a model."""


@dataclass(frozen=True)
class _Rule:
    """Where ranks cut a matrix."""

    axis: int  # of _AXES
    stacked: int = 1  # matrices that lie side by side in this axis

    def of_rank(self, size: int, share: Share) -> Cut:
        """The rank's parts of a matrix of `size` in this axis."""
        one = size // self.stacked
        first = slice(one // share.n * share.rank, one // share.n * (share.rank + 1))
        return Cut(self.axis, tuple(slice(at + first.start, at + first.stop) for at in range(0, size, one)))


class CutPlan:
    """What ranks do with the parts of a model, by their names."""

    def __init__(self, model: Any):
        """`model` is the whole one, without weights. Raises CannotShare for a model without a plan, or with a plan of
        other styles."""
        head, kind = model.get_output_embeddings(), f"a model of type {model.config.model_type!r}"
        self.cuts: dict[str, _Rule] = {}  # of weights
        self.summed: list[str] = []  # modules
        attention = _ATTENTION if model.config.model_type in _ATTENTION_LEFT_WHOLE else {}
        for name, part in (*model.named_modules(), *model.named_parameters()):
            last = name.rpartition(".")[2]
            style = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), attention.get(last))
            style = _MLP.get((last, style), style)
            if style is None or style in _WHOLE or part is head:
                continue
            stacked = 2 if style == "packed_colwise" else 1
            if style in _AXES and type(part) is torch.nn.Linear:
                self.cuts[f"{name}.weight"] = _Rule(_AXES[style], stacked)
                if style == "rowwise":
                    self.summed.append(name)
                else:
                    self.cuts[f"{name}.bias"] = _Rule(-1, stacked)
            elif style in _AXES and isinstance(part, torch.nn.Parameter) and part.ndim == 3:
                self.cuts[name] = _Rule(_AXES[style], stacked)
            elif style == "moe_tp_experts":
                self.summed.append(name)
            else:
                raise CannotShare(
                    f"ranks cannot share {name!r} of {kind}: transformers' plan for tensor parallelism has it as "
                    f"{style!r}"
                )
        if not self.cuts:
            raise CannotShare(f"ranks cannot share {kind}: transformers has no plan for its tensor parallelism")

    def cut(self, model: Any, n: int) -> None:
        """Give a model without weights the matrices of one of `n` ranks. Raises CannotShare for a matrix that does not
        have `n` equal parts."""
        for name, cut in self.cuts.items():
            parent, _, child = name.rpartition(".")
            module = model.get_submodule(parent)
            if (whole := getattr(module, child)) is None:  # a bias
                continue
            shape = list(whole.shape)
            if (size := shape[cut.axis] // cut.stacked) % n:
                raise CannotShare(f"{n} ranks cannot share the {size} rows or columns of {name!r}")
            shape[cut.axis] //= n
            setattr(module, child, torch.nn.Parameter(whole.new_empty(shape), requires_grad=False))
            if isinstance(module, torch.nn.Linear) and child == "weight":
                module.out_features, module.in_features = shape


def cut_matrices(model: Any, n: int) -> None:
    """Give a model without weights the matrices of one of `n` ranks. Raises CannotShare."""
    CutPlan(model).cut(model, n)


def with_cut_matrices(model_class: Any, n: int) -> Any:
    """The model class `model_class` with the matrices of one of `n` ranks."""

    class OfRank(model_class):  # type: ignore[misc]
        def __init__(self, config: Any):
            super().__init__(config)
            cut_matrices(self, n)

    # By these names transformers finds what the tensors of a model are called in files.
    OfRank.__name__, OfRank.__module__ = model_class.__name__, model_class.__module__
    return OfRank


class StoredNames:
    """Finds the matrix of a model that a tensor of a checkpoint is."""

    def __init__(self, model: Any, names: dict[str, str]):
        """`model` is the whole one, without weights; `names` are patterns of the checkpoint's names and what the model
        has in their place. Raises CheckpointError."""
        self._plan, self._names = CutPlan(model), names
        self._prefix = f"{model.base_model_prefix}."  # which checkpoints of the base model lack
        self._stacks = {name.rpartition(".")[0] for name in self._plan.cuts if not name.endswith((".weight", ".bias"))}

    def _of_model(self, stored: str) -> tuple[str, ...]:
        for pattern, replacement in self._names.items():
            stored = re.sub(pattern, replacement, stored)
        return stored, self._prefix + stored

    def rule(self, stored: str) -> _Rule | None:
        """Where the ranks cut a tensor; None: it is whole on every rank."""
        for name in self._of_model(stored):
            if name in self._plan.cuts:
                return self._plan.cuts[name]
            expert = _EXPERT.fullmatch(name)
            if expert is not None and expert[1] in self._stacks:
                return _Rule(_EXPERT_AXES[expert[2]])
        return None

    def check(self, directory: Path) -> None:
        """Raise CannotShare if a checkpoint lacks a matrix that ranks cut, by the name that the model has for it."""
        found: set[str] = set()
        for stored in stored_tensors(directory):
            for name in self._of_model(stored):
                expert = _EXPERT.fullmatch(name)
                found |= {name} if expert is None else {f"{expert[1]}.gate_up_proj", f"{expert[1]}.down_proj"}
        for name in self._plan.cuts:
            if not name.endswith(".bias") and name not in found:
                raise CannotShare(f"ranks cannot share {directory}: it stores {name!r} under another name")

    def tensors_of_rank(self, directory: Path, share: Share) -> dict[str, torch.Tensor]:
        """The rank's parts of a checkpoint's tensors, by their names there. Raises CheckpointError."""
        # One rank alone has these biases, because the ranks add their outputs.
        once = {f"{name}.bias" for name in self._plan.summed}
        tensors = {}
        for path in safetensors_files(directory):
            with open_safetensors(path) as file:
                for stored in file.keys():  # noqa: SIM118
                    tensor, rule = file.get_tensor(stored), self.rule(stored)
                    if rule is not None:
                        tensor = cut_tensor(tensor, rule.of_rank(tensor.shape[rule.axis], share)).contiguous()
                    tensors[stored] = tensor
                    if share.rank and once & set(self._of_model(stored)):
                        tensors[stored] = torch.zeros_like(tensors[stored])
        return tensors


def tied_head(model: Any) -> int:
    """How many numbers the LM head of a model has if it is the embedding, else 0."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return int(head.weight.numel()) if head is not None and head.weight is embedding.weight else 0


def repeated_parameters(model: Any) -> int:
    """How many numbers of the whole model every rank has, beside its part of the others."""
    cuts, head = CutPlan(model).cuts, model.get_output_embeddings()
    repeated: list[int] = [part.numel() for name, part in model.named_parameters() if name not in cuts]
    return sum(repeated) - (0 if head is None or tied_head(model) else int(head.weight.numel()))


def cut_head(model: Any, share: Share) -> None:
    """Keep only the rank's part of the rows of a loaded model's LM head, in memory of its own."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.out_features != model.config.vocab_size:
        return
    rows = share.part(head.out_features)
    part = torch.nn.Linear(head.in_features, rows.stop - rows.start, head.bias is not None, "meta")
    part.weight = torch.nn.Parameter(head.weight.data[rows].clone(), requires_grad=False)
    if head.bias is not None:
        part.bias = torch.nn.Parameter(head.bias.data[rows].clone(), requires_grad=False)
    model.set_output_embeddings(part)


def meet(model: Any, whole: Any, share: Share) -> None:
    """Let a loaded model's ranks sum the outputs that each computes in part, and share the logits if the LM head is
    cut. `whole` is the whole model, without weights."""
    for name in CutPlan(whole).summed:
        module = model.get_submodule(name)
        module.forward = _summed(module.forward, share)
    head, vocab_size = model.get_output_embeddings(), whole.config.vocab_size
    if isinstance(head, LinearModule) and head.out_features != vocab_size:
        model.set_output_embeddings(_HeadModule(head, vocab_size, share))


def _summed(forward: Callable[..., torch.Tensor], share: Share) -> Callable[..., torch.Tensor]:
    return lambda *inputs, **options: share.reduction.sum_(forward(*inputs, **options).contiguous())


class _HeadModule(torch.nn.Module):
    """The LM head of a rank; see SharedHead."""

    def __init__(self, part: LinearModule, vocab_size: int, share: Share):
        super().__init__()
        self.weight = part.weight
        self._head = SharedHead(part.product.linear, vocab_size, share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, rows, in] -> [1, rows, vocab_size]."""
        return self._head(x[0])[None]
