"""Linear and Embedding: the interfaces behind which weights of every format live."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fastdecode.kernels._native import Dense16Linear, QuantisedLinear

#: Products of kernels/.
NativeProducts = tuple[Dense16Linear | QuantisedLinear, ...]


def multiplies(products: NativeProducts, act: torch.dtype) -> bool:
    """Whether there are `products`, of rows in `act`; those of quantised matrices are of fp32 rows."""
    quantised = any(isinstance(product, QuantisedLinear) for product in products)
    return bool(products) and (act is torch.float32 or not quantised)


class Weight(ABC):
    """Parameters of any format."""

    __slots__ = ()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that the parameters take."""


class Linear(Weight):
    """y = x Wᵀ + b."""

    __slots__ = ()

    @property
    def pooled(self) -> bool:
        """Whether the product is computed by the threads of kernels/, and not by torch's."""
        return bool(self.native)

    @property
    def native(self) -> NativeProducts:
        """The products of kernels/ whose outputs, side by side, are the linear's; empty if there are none."""
        return ()

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out], both in the activation dtype."""


class Embedding(Weight):
    """The rows of a matrix."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> rows [n, width] in the activation dtype, which the caller may overwrite."""
