"""The linears that a transformers model computes with on a CPU, or with quantised weights.

Linears of one module that multiply the same rows, such as `q_proj`, `k_proj` and `v_proj`, become one product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fastdecode.spart.linears.base import Linear
from fastdecode.spart.linears.quantised import HEAD_BITS
from fastdecode.spart.linears.stack import make_linear

#: Names of a module's linears that multiply the same rows, in the order in which the models call them.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product:
    """The product of several linears with the same rows. The last rows and their product are kept until each linear has
    taken its part."""

    def __init__(self, linear: Linear, outs: Sequence[int]):
        """`outs` are the linears' numbers of outputs."""
        self.linear = linear
        self._ends = list(accumulate(outs, initial=0))
        self._rows: torch.Tensor | None = None
        self._product: torch.Tensor | None = None
        self._left = 0

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
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
    a part of a larger matrix."""

    def __init__(self, module: torch.nn.Linear, product: Product, index: int):
        super().__init__()
        self.in_features, self.out_features = module.in_features, module.out_features
        #: Without data, for code that asks a layer for its dtype or shape.
        self.weight = torch.nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
        self.product, self.index = product, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return self.product.part(self.index, x)


def replace_linears(module: Any, head: Any, bits: int | None) -> None:
    """Replace every plain nn.Linear below `module`, product by product, so that few weights exist twice at a time.

    `bits` to quantise to; None: the module's own dtype. `head` is the LM head, which is quantised to HEAD_BITS. A
    matrix in another kind of module stays as it is.
    """
    for parent in list(module.modules()):
        linears = {
            name: child
            for name, child in parent.named_children()
            if type(child) is torch.nn.Linear and (bits or child.weight.device.type == "cpu")
        }
        for names in _together(linears):
            members = {name: linears[name] for name in names}
            wanted = HEAD_BITS if bits and head in members.values() else bits
            with contextlib.suppress(AttributeError):
                _replace(parent, members, wanted)


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


def _replace(parent: torch.nn.Module, members: dict[str, torch.nn.Linear], bits: int | None) -> None:
    modules = list(members.values())
    weights = [module.weight.data for module in modules]
    biases = [module.bias.data for module in modules if module.bias is not None]
    bias = torch.cat(biases) if biases else None
    linear = make_linear(weights, bias, weights[0].device, weights[0].dtype, bits)
    product = Product(linear, [module.out_features for module in modules])
    for index, (name, module) in enumerate(members.items()):
        setattr(parent, name, LinearModule(module, product, index))


def replaced_bytes(module: Any) -> int:
    """Bytes of memory that the products of replaced linears take."""
    products = {part.product for part in module.modules() if isinstance(part, LinearModule)}
    return sum(product.linear.nbytes for product in products)
