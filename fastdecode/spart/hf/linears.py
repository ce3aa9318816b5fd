"""The linears that a transformers model computes with on a CPU, or with quantised weights.

Linears of one module that multiply the same rows, such as `q_proj`, `k_proj` and `v_proj`, become one product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fastdecode.spart.int4.gptq import quantise_head
from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.linears.quantised import Quantised, activation_bits
from fastdecode.spart.linears.rounding import quantise
from fastdecode.spart.linears.stack import make_linear, quantised_embedding, tied_quantised

#: Names of a module's linears that multiply the same rows, in the order in which the models call them.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

#: The linear that 8 bits serve better than 4; see Blueprint.
_PRECISE = "v_proj"


class Product:
    """The product of several linears with the same rows. The last rows and their product are kept until each linear has
    taken its outputs."""

    def __init__(self, linear: Linear, outs: Sequence[int]):
        """`outs` are the linears' numbers of outputs."""
        self.linear = linear
        self._ends = list(accumulate(outs, initial=0))
        self._rows: torch.Tensor | None = None
        self._product: torch.Tensor | None = None
        self._left = 0

    def outputs(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The outputs of the linear `index`: x [..., in] -> [..., outs[index]], a view."""
        if self._rows is not x or self._product is None:
            self._rows, self._product, self._left = x, self.whole(x), len(self._ends) - 1
        y = self._product[..., self._ends[index] : self._ends[index + 1]]
        self._left -= 1
        if not self._left:
            self._rows = self._product = None
        return y

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., sum of outs], contiguous."""
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._ends[-1])


class LinearModule(torch.nn.Module):
    """A replacement for an nn.Linear: its weight is quantised, or in the order that oneDNN's kernels read. It may be
    some rows of a larger matrix."""

    def __init__(self, module: torch.nn.Linear, product: Product, index: int):
        super().__init__()
        self.in_features, self.out_features = module.in_features, module.out_features
        #: A tensor without data, for code that asks a layer for its dtype or shape.
        self.weight = torch.nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
        self.product, self.index = product, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return self.product.outputs(self.index, x)


class EmbeddingModule(torch.nn.Module):
    """A replacement for a quantised nn.Embedding, whose memory may be the LM head's."""

    def __init__(self, module: torch.nn.Embedding, rows: Embedding):
        super().__init__()
        #: A tensor without data, as LinearModule has.
        self.weight = torch.nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
        self.rows = rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> [..., width]."""
        return self.rows(ids.flatten()).view(*ids.shape, -1)


def quantise_embedding(model: Any, bits: int) -> None:
    """Replace the embedding of a model, and the LM head where both are one matrix. Does nothing to other kinds of
    embeddings."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not torch.nn.Embedding:
        return
    weight = embedding.weight.data
    device, dtype = weight.device, weight.dtype
    tied = type(head) is torch.nn.Linear and head.weight.data_ptr() == weight.data_ptr()
    activations = activation_bits(device)
    if tied:
        matrices = quantise_head(weight, bits, activation_bits=activations)
        rows, linear = tied_quantised(matrices, device, dtype)
        model.set_output_embeddings(LinearModule(head, Product(linear, [head.out_features]), 0))
    else:
        rows = quantised_embedding([quantise(weight, bits, activations)], device, dtype)
    model.set_input_embeddings(EmbeddingModule(embedding, rows))


def replace_linears(module: Any, head: Any, bits: int | None, kept: Sequence[torch.nn.Module] = ()) -> None:
    """Replace every plain nn.Linear below `module`, product by product, so that few weights exist twice at a time.

    `bits` to quantise to; None: the module's own dtype. `head` is the LM head; see quantise_head. The linears `kept`,
    and a matrix in another kind of module, stay as they are.
    """
    for parent in list(module.modules()):
        linears = {
            name: child
            for name, child in parent.named_children()
            if type(child) is torch.nn.Linear and child not in kept and (bits or child.weight.device.type == "cpu")
        }
        for names in _together(linears):
            members = {name: linears[name] for name in names}
            with contextlib.suppress(AttributeError):
                _replace(parent, members, bits, head in members.values())


def _together(linears: dict[str, torch.nn.Linear]) -> list[tuple[str, ...]]:
    """The names of `linears`, those together whose product is one."""
    groups: list[tuple[str, ...]] = []
    for names in _TOGETHER:
        members = [linears.get(name) for name in names]
        forms = {(m.in_features, m.bias is None, m.weight.dtype) for m in members if m is not None}
        if None not in members and len(forms) == 1:
            groups.append(names)
    taken = {name for names in groups for name in names}
    return groups + [(name,) for name in linears if name not in taken]


def _replace(parent: torch.nn.Module, members: dict[str, torch.nn.Linear], bits: int | None, is_head: bool) -> None:
    modules = list(members.values())
    weights = [module.weight.data for module in modules]
    biases = [module.bias.data for module in modules if module.bias is not None]
    bias = torch.cat(biases) if biases else None
    device, dtype = weights[0].device, weights[0].dtype
    matrices: Sequence[torch.Tensor | Quantised] = weights
    if bits and is_head:
        matrices = quantise_head(weights[0], bits, activation_bits=activation_bits(device))
    elif bits:
        own = [8 if name == _PRECISE else bits for name in members]
        matrices = [quantise(weight, n, activation_bits(device)) for weight, n in zip(weights, own, strict=True)]
    linear = make_linear(matrices, bias, device, dtype)
    product = Product(linear, [module.out_features for module in modules])
    for index, (name, module) in enumerate(members.items()):
        setattr(parent, name, LinearModule(module, product, index))


def replaced_bytes(module: Any) -> int:
    """Bytes of memory that the products of replaced linears and a replaced embedding take."""
    products = {child.product for child in module.modules() if isinstance(child, LinearModule)}
    embeddings = [child.rows for child in module.modules() if isinstance(child, EmbeddingModule)]
    return sum(product.linear.nbytes for product in products) + sum(rows.nbytes for rows in embeddings)
