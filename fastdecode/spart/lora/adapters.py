"""The adapters of a model, applied to the rows of a step that use them.

A step sorts its rows by adapter once. A linear with adapters then takes two grouped or batched products for all of them
together: the rows times A of their adapters, and the result times B. Rows of the base model are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.linears.base import Linear, NativeProducts
from fastdecode.spart.linears.grouped_mm import grouped_mm

if TYPE_CHECKING:
    from fastdecode.gguf.file import ModelSource
    from fastdecode.spart.lora.files import Adapter
    from fastdecode.spart.step.batch import Chunk
    from fastdecode.spart.step.step_table import StepTable

#: Ranks are padded with zeros to a multiple of this, which torch's grouped product needs.
_RANK_UNIT = 8
#: Rows are filled up to this many times their number for a batched product.
_MOST_FILLING = 2


class AdapterRows:
    """The rows of a step that use adapters: `index` int64 has their numbers, sorted by adapter, and `ends` int32
    [adapters] is where each adapter's rows end in `index`. `n_rows` counts all rows of the step.

    On a CPU, `padded` int64 [adapters, most] has the rows of each adapter, filled up to the most rows that one has, and
    `slots` int64 says where those of `index` stand in it. None: too much would be filling.
    """

    __slots__ = ("ends", "index", "n_rows", "padded", "slots")

    index: torch.Tensor
    ends: torch.Tensor
    n_rows: int
    padded: torch.Tensor | None
    slots: torch.Tensor

    def __init__(self, chunks: Sequence[Chunk], n_adapters: int, table: StepTable):
        """Adds its arrays to the step's table. Raises ValueError for an adapter that the model does not have."""
        if all(chunk.adapter is None for chunk in chunks):
            return
        of_chunks = np.array([-1 if chunk.adapter is None else chunk.adapter for chunk in chunks])
        if of_chunks.min() < -1 or of_chunks.max() >= n_adapters:
            raise ValueError(f"a chunk has adapter {of_chunks.max()}; the model has {n_adapters}")
        of_rows = of_chunks.repeat([len(chunk.tokens) for chunk in chunks])
        order = of_rows.argsort(kind="stable")
        ends = of_rows[order].searchsorted(np.arange(-1, n_adapters), side="right")
        self.n_rows = len(order)
        table.add("adapter rows", order[ends[0] :])
        table.add("adapter ends", (ends[1:] - ends[0]).astype(np.int32))

    def on_device(self, uploaded: Mapping[str, torch.Tensor]) -> AdapterRows | None:
        """This object, with its arrays of the uploaded table; None if no row uses an adapter."""
        if "adapter rows" not in uploaded:
            return None
        self.index, self.ends = uploaded["adapter rows"], uploaded["adapter ends"]
        self.padded = None
        if self.index.device.type == "cpu":
            self._pad()
        return self

    def _pad(self) -> None:
        ends = self.ends.numpy()
        counts = np.diff(ends, prepend=0)
        most, rows = int(counts.max()), np.arange(len(self.index))
        if len(counts) == 1 or len(counts) * most > _MOST_FILLING * len(rows):
            return
        starts = np.arange(len(counts)) * most - (ends - counts)
        self.slots = torch.from_numpy(rows + starts.repeat(counts))
        padded = self.index.new_zeros(len(counts) * most)
        self.padded = padded.index_copy_(0, self.slots, self.index).view(-1, most)


class Change:
    """The numbers that the adapters add to one linear's output."""

    __slots__ = ("_a", "_b")

    def __init__(self, a: torch.Tensor, b: torch.Tensor):
        """a [adapters, in, rank] and b [adapters, rank, out], of one float dtype."""
        self._a, self._b = a, b

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> None:
        """Add to y [n, out], the linear's output of the step's rows x [n, in]."""
        if rows.padded is not None:  # on a CPU a batched product takes half the time of one for each group
            ins = x.index_select(0, rows.padded.flatten()).to(self._a.dtype).view(*rows.padded.shape, -1)
            change = torch.bmm(torch.bmm(ins, self._a), self._b).flatten(0, 1).index_select(0, rows.slots)
        else:
            inner = grouped_mm(x.index_select(0, rows.index).to(self._a.dtype), self._a, rows.ends)
            change = grouped_mm(inner, self._b, rows.ends)
        y.index_add_(0, rows.index, change.to(y.dtype))

    @property
    def nbytes(self) -> int:
        return self._a.nbytes + self._b.nbytes


class AdaptedLinear(Linear):
    """A linear that adapters change for the rows that use them; `adapted_product` applies the changes."""

    __slots__ = ("_base", "change")

    def __init__(self, base: Linear, change: Change):
        self._base, self.change = base, change

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._base(x)

    @property
    def pooled(self) -> bool:
        return self._base.pooled

    @property
    def native(self) -> NativeProducts:
        return self._base.native

    @property
    def nbytes(self) -> int:
        return self._base.nbytes + self.change.nbytes


def adapted_product(linear: Linear, x: torch.Tensor, rows: AdapterRows | None) -> torch.Tensor:
    """The linear's output of a step's rows x [n, in], with the changes of their adapters. With `rows` None no row has
    an adapter."""
    y = linear(x)
    if rows is not None and isinstance(linear, AdaptedLinear):
        linear.change.add(y, x, rows)
    return y


def check_adapted(source: ModelSource, adapters: Sequence[Adapter]) -> None:
    """Raise CheckpointError for adapters of a model in a GGUF file, whose linears have other names."""
    if adapters and source.gguf is not None:
        raise CheckpointError("adapters are for safetensors, and the model is a GGUF file: serve its directory instead")


class AdapterSet:
    """The adapters that a model is loaded with. A chunk's `adapter` is an index into `names`."""

    def __init__(self, adapters: Sequence[Adapter] = ()):
        self._adapters = tuple(adapters)
        self.names = tuple(adapter.name for adapter in adapters)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear that an adapter changes, by its name."""
        return {name: (m.outs, m.ins) for adapter in self._adapters for name, m in adapter.modules.items()}

    def check(self, linears: Mapping[str, tuple[int, int]]) -> None:
        """Raise CheckpointError for an adapter of another model. `linears` are the linears that adapters may change:
        (out, in) by their names."""
        for adapter in self._adapters:
            for name, module in adapter.modules.items():
                shape = linears.get(name)
                if shape is None:
                    raise CheckpointError(
                        f"adapter {adapter.name!r} changes {name!r}, which is no linear of this model's blocks"
                    )
                if shape != (module.outs, module.ins):
                    raise CheckpointError(
                        f"adapter {adapter.name!r} is for another model: its {name!r} is {module.outs} x {module.ins}, "
                        f"the model's {shape[0]} x {shape[1]}"
                    )

    def change(
        self, names: Sequence[str], outs: Sequence[int], ins: int, device: torch.device, dtype: torch.dtype
    ) -> Change | None:
        """The change of a linear that stacks the linears `names`; the i-th of these is [outs[i], ins]. None if no
        adapter changes any of them.

        Each linear has columns of A of its own, so that B is zero outside the linear's rows. On a CPU the change is
        computed in fp32, because oneDNN's 16-bit products of few rows take several times as long as fp32 ones.
        """
        dtype = torch.float32 if device.type == "cpu" else dtype
        ranks = [self._rank(name) for name in names]
        if not any(ranks):
            return None
        rank = -(-sum(ranks) // _RANK_UNIT) * _RANK_UNIT
        a = torch.zeros(len(self._adapters), ins, rank)
        b = torch.zeros(len(self._adapters), rank, sum(outs))
        for i, adapter in enumerate(self._adapters):
            column = row = 0
            for name, own_rank, out in zip(names, ranks, outs, strict=True):
                if name in adapter.modules:
                    down, up = adapter.factors(name)
                    a[i, :, column : column + len(down)] = down.T
                    b[i, column : column + len(down), row : row + out] = up.T
                column, row = column + own_rank, row + out
        return Change(a.to(device, dtype), b.to(device, dtype))

    def _rank(self, name: str) -> int:
        """The largest rank that an adapter has for the linear `name`; 0: no adapter changes it."""
        return max((a.modules[name].rank for a in self._adapters if name in a.modules), default=0)
