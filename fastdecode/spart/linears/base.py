"""Linear and Embedding: the interfaces behind which weights of every format live."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Linear(ABC):
    """y = x Wᵀ + b."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out], both in the activation dtype."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that the parameters take."""


class Embedding(ABC):
    """The rows of a matrix."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> rows [n, width] in the activation dtype, which the caller may overwrite."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that the parameters take."""
