"""A model's attention as its links see it: the base class of both backends' configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastdecode.region.contract import HEAD_SIZE_UNIT, KV_DTYPES
from fastdecode.region.geometry import Geometry
from fastdecode.transports.base import LayerOptions


class Heads(NamedTuple):
    """The heads of one layer. Sizes are in elements; Q heads have `k_size` too, and O heads `v_size`."""

    n_q: int
    n_kv: int
    k_size: int
    v_size: int
    v_in_k: bool = False  # V of a head is the first elements of its K (latent attention), and has no place in a KV row

    @property
    def kv_row_size(self) -> int:
        """Elements of a KV row."""
        return self.n_kv * (self.k_size if self.v_in_k else self.k_size + self.v_size)


class LayerReads(NamedTuple):
    """What a row reads of a sequence's cache in one layer."""

    window: int = 0  # most tokens that it sees; 0: all
    topk: int = 0  # most tokens that it selects to attend to; 0: it attends to all that it sees
    index_share: float = 0.0  # of a token's bytes, its index key, which the row reads of every token

    def tokens(self, length: float) -> float:
        """As many tokens have the bytes that a row reads of a sequence of `length` tokens in the layer."""
        limit = self.window or self.topk
        attended = min(length, limit) if limit else length
        return attended + self.index_share * (length - attended) if self.index_share else attended


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The fields that both backends' configurations have. Sizes in elements."""

    architecture: str  # as in config.json, for example "LlamaForCausalLM"
    dtype: str  # of the checkpoint: "fp32", "fp16" or "bf16"
    vocab_size: int
    n_layers: int  # that attend, with K and V on the R-nodes
    n_q_heads: int
    n_kv_heads: int
    head_size: int
    max_positions: int
    windows: tuple[int, ...]  # sliding window of each layer in tokens; 0: full attention
    softmax_scale: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    options: LayerOptions = LayerOptions()  # changes that few models make to attention
    v_in_k: bool = False  # Heads.v_in_k of all layers
    # Trained sparse attention: heads of an indexer, elements of one, and tokens that a row selects; 0 without it
    index_heads: int = 0
    index_size: int = 0
    index_topk: int = 0
    mtp: int = 0  # tokens that an MTP head drafts in a step; the last layers, as many, are its passes

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layer whose K and V each layer attends to: itself, or an earlier one."""
        return self.options.kv_layers or tuple(range(self.n_layers))

    @property
    def storing_layers(self) -> tuple[int, ...]:
        """The layers that store K and V of their own."""
        return tuple(sorted(set(self.kv_layers)))

    @property
    def shares_kv(self) -> bool:
        """Whether layers share K and V, the passes of an MTP head aside."""
        n_layers = self.n_layers - self.mtp
        return len(set(self.kv_layers[:n_layers])) < n_layers

    @property
    def last_storing_layer(self) -> int:
        """The last layer that stores K and V of its own, the passes of an MTP head aside. Behind it most rows of a
        prompt serve nothing."""
        return max(self.kv_layers[: self.n_layers - self.mtp])

    @property
    def staged_width(self) -> int:
        """Elements of K and V that are staged of each row of a prompt, though the prompt may be a single chunk."""
        return sum(self.heads_of(layer).kv_row_size for layer in self.storing_layers) if self.shares_kv else 0

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """The formats of the KV-cache. A V that is a part of K cannot be stored in other bits than K."""
        return tuple(name for name in KV_DTYPES if not (self.v_in_k and name == "int8-int4"))

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of the state that layers without attention keep of a sequence in the S-Part, with activations of
        `itemsize` bytes. 0: all layers attend."""
        return 0

    def heads_of(self, layer: int) -> Heads:
        """The heads of a layer."""
        if self.options.heads:
            return Heads(*self.options.heads[layer], self.v_in_k)
        return Heads(self.n_q_heads, self.n_kv_heads, self.head_size, self.head_size, self.v_in_k)

    def selection_of(self, layer: int) -> int:
        """LayerOptions.selections of a layer."""
        return self.options.selections[layer] if self.options.selections else 0

    def index_size_of(self, layer: int) -> int:
        """Elements of an index key of a layer; 0 for a layer without an indexer of its own. The key stands behind K in
        a KV row, and the index queries and their weights behind Q in a Q row."""
        return self.index_size if self.selection_of(layer) == 1 else 0

    @property
    def reads(self) -> tuple[LayerReads, ...]:
        """What a row reads of a sequence in each layer."""
        reads = []
        for layer, window in enumerate(self.windows):
            index, kv = self.index_size_of(layer), self.heads_of(layer).kv_row_size
            topk = self.index_topk if self.selection_of(layer) else 0
            reads.append(LayerReads(window, topk, index / (index + kv)))
        return tuple(reads)

    @property
    def most_heads(self) -> Heads:
        """The most heads, and the largest, of any layer. KV heads divide query heads."""
        n_q, n_kv, k_size, v_size, _ = map(max, zip(*map(self.heads_of, range(self.n_layers)), strict=True))
        return Heads(-(-n_q // n_kv) * n_kv, n_kv, k_size, v_size, self.v_in_k)

    @property
    def row_sizes(self) -> tuple[int, int, int]:
        """Elements of a Q, a KV and an O row. A layer with fewer or smaller heads uses the first elements."""
        most = self.most_heads
        index_q = self.index_heads * self.index_size + -(-self.index_heads // HEAD_SIZE_UNIT) * HEAD_SIZE_UNIT
        return most.n_q * most.k_size + index_q, most.kv_row_size + self.index_size, most.n_q * most.v_size

    def hello_geometry(self, n_slots: int, max_rows: int, act_dtype: str) -> Geometry:
        """The region geometry that an S-node with this model asks its R-nodes for."""
        most = self.most_heads
        return Geometry(
            n_slots,
            max_rows,
            self.n_layers,
            most.n_q,
            most.n_kv,
            most.k_size,
            act_dtype,
            most.v_size,
            self.v_in_k,
            self.index_heads,
            self.index_size,
            self.index_topk,
        )
