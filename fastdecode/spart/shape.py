"""A model's attention as its links see it: the base class of both backends' configurations."""

from __future__ import annotations

from fastdecode.region.geometry import Geometry
from fastdecode.transports.base import LayerOptions


class AttentionShape:
    """A configuration's description of the attention. Sizes in elements."""

    __slots__ = ()

    vocab_size: int
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_size: int
    windows: tuple[int, ...]  # sliding window of each layer; 0: full attention
    softmax_scale: float
    options: LayerOptions = LayerOptions()  # what few models' attention does besides

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layer whose K and V each layer attends to: itself, or an earlier one."""
        return self.options.kv_layers or tuple(range(self.n_layers))

    @property
    def stored_layers(self) -> int:
        """The number of layers that store K and V of their own."""
        return len(set(self.kv_layers))

    @property
    def padding(self) -> float:
        """The share of the KV-cache that is padding, because layers differ and a link has one geometry."""
        return 0.0

    def hello_geometry(self, n_slots: int, max_rows: int, act_dtype: str) -> Geometry:
        """The region geometry that an S-node with this model asks its R-nodes for."""
        return Geometry(
            n_slots=n_slots,
            max_rows=max_rows,
            n_layers=self.n_layers,
            n_q_heads=self.n_q_heads,
            n_kv_heads=self.n_kv_heads,
            head_size=self.head_size,
            act_dtype=act_dtype,
        )
