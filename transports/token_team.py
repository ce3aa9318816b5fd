"""Token-level partition: several R-nodes that share the tokens of every sequence, as one link.

Positions are cut into blocks of PAGE_TOKENS, and member i of n keeps the blocks b with b % n == i
(kernels/engine/parts.h). Each Q row goes to every member. A member answers with the attention to its own tokens, O_i,
and with the log-sum-exp L_i of their scores for each query head, which stands behind its O heads. The S-node merges
them (FlashDecoding; Dao et al., 2023):

    m = max_i L_i      O = sum_i exp(L_i - m) O_i / (sum_i exp(L_i - m) + exp(sink - m))

The term of the sink is there if the head has one (attention sinks of gpt-oss); members know no sinks. This is the
attention to all tokens, apart from rounding: O_i is rounded to the activation dtype and the sums are in fp32, so O is
within two roundings of the activation dtype, relative to the largest |O_i|, of what one R-node would have answered.

All members have the same sequences at the same indexes, but the one with the most pages decides how many the team has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.region.geometry import region_layout

from .base import Hello, LayerOptions, Lease, Link, TransportError
from .team import Team, heads_of

#: As many members as the R-engine takes (FD_MAX_PARTS of kernels/engine/parts.h).
MAX_PARTS = 64
#: Elements of V that a head gets in the members' rows, beyond its own: room for an fp32 number in any dtype.
_SUM_ELEMENTS = 8


def check_tokens(windows: Sequence[int], layers: LayerOptions) -> None:
    """Raise TransportError if R-nodes cannot share the tokens of a model with these windows (Hello.windows)."""
    if any(windows) or any(layers.segments):
        raise TransportError("layers with a sliding window or chunked attention see too few tokens to share them")
    if any(layers.selections):
        raise TransportError(
            "layers that select the tokens they attend to (trained sparse attention) cannot share tokens: a member "
            "does not know the index scores of the others"
        )
    if layers.slopes:
        raise TransportError("a model with ALiBi cannot share tokens: a member does not know their distances")


def token_part_of(hello: Hello, i: int, n: int) -> Hello:
    """The link that a team of `n` R-nodes asks its member `i` for, if one R-node would be asked for `hello`.

    Raises TransportError if the tokens cannot be shared.
    """
    check_tokens(hello.windows, hello.layers)
    if n > MAX_PARTS:
        raise TransportError(f"{n} R-nodes cannot share tokens, at most {MAX_PARTS} can")
    layers = replace(hello.layers, sinks=b"", heads=tuple(heads_of(hello)), part=(i, n))
    return replace(hello, geometry=replace(hello.geometry, v_size=hello.geometry.v_size + _SUM_ELEMENTS), layers=layers)


def part_length(length: int, i: int, n: int) -> int:
    """How many of the first `length` tokens of a sequence member `i` of `n` keeps."""
    rounds, rest = divmod(length, n * PAGE_TOKENS)
    return rounds * PAGE_TOKENS + min(max(rest - i * PAGE_TOKENS, 0), PAGE_TOKENS)


class TokenTeam(Team):
    """A link whose tokens are shared among the R-nodes of several links."""

    def __init__(self, links: Sequence[Link], hello: Hello):
        """Member i of n is `links[i]`, which was opened with token_part_of(hello, i, n). Owns the links, and starts on
        the running event loop. Raises RegionError."""
        self._heads = heads_of(hello)
        self._part_o_bytes = region_layout(token_part_of(hello, 0, len(links)).geometry).o_row_bytes
        self._sinks = np.frombuffer(hello.layers.sinks, "<f4").reshape(-1, hello.geometry.n_q_heads)
        self._parts: dict[int, np.ndarray] = {}  # O rows of all members, of the step in each slot
        self._layers: dict[int, int] = {}  # that were rung last
        super().__init__(links, hello)

    @property
    def o_row_bytes(self) -> int:
        """Bytes of the O rows of all members, one after another."""
        return len(self.links) * self._part_o_bytes

    def _columns(self, hello: Hello, i: int, n: int) -> np.ndarray:
        element = region_layout(hello.geometry).q_row_bytes // (hello.geometry.n_q_heads * hello.geometry.head_size)
        start = i * self._part_o_bytes
        columns = []
        for n_q, n_kv, k_size, v_size in self._heads:
            k, v = n_kv * k_size * element, 0 if hello.geometry.v_in_k else n_kv * v_size * element
            o = n_q * v_size * element + n_q * 4
            columns.append([[0, n_q * k_size * element], [0, k], [k, k + v], [start, start + o]])
        return np.array(columns, np.uint32)

    def merge(self, layer: int, parts: np.ndarray, o: np.ndarray) -> None:
        """Merge the members' O rows of a layer: `parts`, uint8 [rows, o_row_bytes], into `o`, uint8 [rows, bytes of an
        O row]. The formula is that of this module."""
        n_q, _, _, v_size = self._heads[layer]
        rows, n, kind = len(parts), len(self.links), self.geometry.act_dtype
        o_bytes = n_q * v_size * (4 if kind == "fp32" else 2)
        parts = parts.reshape(rows, n, self._part_o_bytes)
        sums = parts[:, :, o_bytes : o_bytes + 4 * n_q].view("<f4")
        largest = sums.max(axis=1, keepdims=True)
        if sinks := len(self._sinks):
            largest = np.maximum(largest, self._sinks[layer, :n_q])
        weights = np.exp(sums - largest)
        total = weights.sum(axis=1, keepdims=True)
        if sinks:
            total += np.exp(self._sinks[layer, :n_q] - largest)
        weights /= total
        heads = _to_fp32(parts[:, :, :o_bytes], kind).reshape(rows, n, n_q, v_size)
        merged = np.einsum("rph,rphv->rhv", weights, heads).reshape(rows, n_q * v_size)
        o[:, :o_bytes] = _from_fp32(merged, kind)

    # ---- data path ----

    def _rows(self, slot: int, n_attend: int, n_rows: int) -> Sequence[np.ndarray]:
        q, kv, _ = super()._rows(slot, n_attend, n_rows)
        self._parts[slot] = np.empty((n_attend, self.o_row_bytes), np.uint8)
        return q, kv, self._parts[slot]

    def ring(self, slot: int, layer: int) -> None:
        super().ring(slot, layer)
        self._layers[slot] = layer

    def wait(self, slot: int, timeout: float) -> None:
        super().wait(slot, timeout)
        if (layer := self._layers.pop(slot, None)) is not None:
            parts, y = self._parts[slot], self.layout
            start = y.slot(slot) + y.o
            o = np.frombuffer(self.region, np.uint8, len(parts) * y.o_row_bytes, start)
            self.merge(layer, parts, o.reshape(len(parts), y.o_row_bytes))

    # ---- control path ----

    def _part_length(self, length: int, i: int) -> int:
        return part_length(length, i, len(self.links))

    async def resize(self, n_pages: int) -> dict[str, int]:
        n, seqs = len(self.links), self.lease.max_seqs
        wanted = min(n_pages, -(-(n_pages + seqs * (n - 1)) // n))
        return self._common_stats(await self._each(lambda link: link.resize(wanted)))

    # ---- lease and counters ----

    @staticmethod
    def _common_lease(leases: Sequence[Lease]) -> Lease:
        lease, n = Team._common_lease(leases), len(leases)
        return replace(
            lease,
            n_pages=pages_of(lease.n_pages, n, lease.max_seqs),
            max_pages=pages_of(lease.max_pages, n, lease.max_seqs),
            page_bytes=leases[0].page_bytes,
        )

    def _common_stats(self, members: Sequence[dict[str, int]]) -> dict[str, int]:
        common, n = super()._common_stats(members), len(members)
        common |= {name: pages_of(common[name], n, self.lease.max_seqs) for name in _PAGES if name in common}
        common["pages_used"] = sum(counters["pages_used"] for counters in members)
        common["seqs"] = max(counters["seqs"] for counters in members)
        return common


_PAGES = ("pages_total", "pages_max")


def pages_of(n_pages: int, n: int, max_seqs: int) -> int:
    """The pages of a team of `n` whose smallest member has `n_pages`, whatever sequences they hold.

    Member 0, which has the most, keeps at most (p + n - 1) / n of a sequence's p pages.
    """
    return max(n_pages, n * n_pages - max_seqs * (n - 1))


def _to_fp32(rows: np.ndarray, act_dtype: str) -> np.ndarray:
    """fp32 numbers of uint8 rows; a bf16 number is the upper half of an fp32 number."""
    if act_dtype == "bf16":
        bits: np.ndarray = rows.view("<u2").astype("<u4") << 16
        return np.asarray(bits.view("<f4"))
    return rows.view("<f4" if act_dtype == "fp32" else "<f2").astype("<f4")


def _from_fp32(values: np.ndarray, act_dtype: str) -> np.ndarray:
    """uint8 rows of fp32 numbers, rounded to nearest even."""
    if act_dtype == "bf16":
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        rounded: np.ndarray = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return rounded.astype("<u2").view(np.uint8)
    return np.ascontiguousarray(values, "<f4" if act_dtype == "fp32" else "<f2").view(np.uint8)
