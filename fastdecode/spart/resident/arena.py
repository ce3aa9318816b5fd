"""PageArena: KV pages in the memory of a device, and the places of each layer's K and V in them.

The page lists are the C code's of R-nodes (kernels/cache), and a page has the layout of an R-node's page, so pages may
move between the two as bytes.
"""

from __future__ import annotations

import torch

from fastdecode.kernels._native import PageLists, page_bytes
from fastdecode.region.contract import KV_DTYPES
from fastdecode.region.geometry import geometry_tuple
from fastdecode.transports.base import Hello


class PageArena:
    """`memory`, uint8 [planes, pages, bytes of a page in a plane], and the lists of the pages that sequences hold.

    `hello` says what the pages hold, and for how many sequences.
    """

    def __init__(self, hello: Hello, n_pages: int, device: torch.device):
        """Raises ValueError, MemoryError, torch.OutOfMemoryError."""
        self.hello = hello
        stored = hello.layers.stored(hello.windows)
        geometry, kv_dtype = geometry_tuple(hello.geometry), KV_DTYPES.index(hello.kv_dtype)
        self.lists = PageLists(geometry, kv_dtype, n_pages, hello.max_seqs, **stored)
        self.page_bytes = page_bytes(geometry, kv_dtype, **stored)
        self.memory = torch.empty(
            self.lists.n_planes, n_pages, self.lists.plane_bytes, dtype=torch.uint8, device=device
        )
        self.kv_layers = hello.layers.kv_layers or tuple(range(hello.geometry.n_layers))
        at = {layer: i for i, layer in enumerate(sorted(set(self.kv_layers)))}
        self._stores = [self.lists.stores[at[layer]] for layer in self.kv_layers]

    @property
    def plane_stride(self) -> int:
        """Bytes from a plane to the next."""
        return self.lists.n_pages * self.lists.plane_bytes

    def section(self, layer: int) -> int:
        """The section whose pages have the K and V that a layer attends to."""
        return self._stores[layer][0]

    def chunks(self, layer: int) -> int:
        """The address of the chunk of page 0 and KV head 0 that a layer attends to."""
        _, plane, offset, _ = self._stores[layer]
        return self.memory.data_ptr() + plane * self.plane_stride + offset
