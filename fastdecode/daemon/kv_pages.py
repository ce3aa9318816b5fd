"""The KV pages of a model on an R-node: how large they are, and how many of them a block takes."""

from __future__ import annotations

from typing import Any

from fastdecode.engine.state.pages import PageGroups
from fastdecode.kernels._native import page_bytes, page_sections
from fastdecode.region.contract import KV_DTYPES
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.transports.base import Hello, LayerOptions


class KVPages:
    """The pages of a link, as the R-engine counts them."""

    def __init__(self, geometry: Geometry, kv_dtype: str, windows: tuple[int, ...], layers: LayerOptions):
        """The arguments are those of a Hello. Raises ValueError for layers that no link can have."""
        self.geometry, self.kv_dtype = geometry_tuple(geometry), KV_DTYPES.index(kv_dtype)
        self.options: dict[str, Any] = layers.stored(windows)
        self.n_layers = len(set(layers.kv_layers)) or geometry.n_layers  # with K and V of their own
        self.page_bytes = page_bytes(self.geometry, self.kv_dtype, **self.options)
        self.sections = page_sections(self.geometry, self.kv_dtype, **self.options)  # the last three fields of a Lease
        self.block = sum(self.sections[:2])  # pages that PAGE_TOKENS tokens take
        self.block_bytes = self.block * self.page_bytes

    @classmethod
    def from_hello(cls, hello: Hello) -> KVPages:
        return cls(hello.geometry, hello.kv_dtype, hello.windows, hello.layers)

    def groups(self, step_rows: int) -> PageGroups:
        """The pages as an S-node counts them, whose steps have at most `step_rows` rows."""
        return PageGroups(*self.sections, step_rows)
