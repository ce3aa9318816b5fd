"""Share: what one rank of a tensor-parallel S-Part has of a model (Shoeybi et al., arXiv 1909.08053).

A rank's model is one with fewer heads and columns (cut.py). The shapes of the tensors that its blueprint asks for show
where to cut those of the checkpoint: in the only axis in which the two shapes differ.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastdecode.spart.checkpoints.config import CheckpointError, DeltaRule, ModelConfig
from fastdecode.spart.checkpoints.tensors import Checkpoint
from fastdecode.spart.linears.quantised import HeadMatrices, Quantised, rows_of
from fastdecode.spart.lora.files import Adapter
from fastdecode.spart.ranks.cut import delta_heads_of_rank, heads_of_rank, part_of
from fastdecode.spart.ranks.reduction import Reduction

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank` of `n`, and the memory that the ranks share."""

    rank: int
    n: int
    reduction: Reduction
    logits: torch.Tensor  # uint8 [bytes]: room for the logits of a step, in any dtype

    @classmethod
    def join(cls, rank: int, n: int, segment: int, logits: int) -> Share:
        """The share of a rank that joins the memory behind two descriptors, which may be closed afterwards: a segment
        of create_segment, and memory for logits."""
        return cls(rank, n, Reduction(segment, rank, n), torch.frombuffer(mmap.mmap(logits, 0), dtype=torch.uint8))

    def part(self, size: int) -> slice:
        """The rank's part of `size` rows or columns."""
        return part_of(size, self.rank, self.n)


class Cut(NamedTuple):
    """Where a rank's parts of a tensor are."""

    axis: int
    parts: tuple[slice, ...]  # of the axis, one of each of the stacked tensors


class CutCheckpoint(Checkpoint):
    """A rank's share of the tensors of a checkpoint, of which it reads no more than that."""

    def __init__(self, whole: Checkpoint, config: ModelConfig, shapes: Shapes, cut: Shapes, share: Share):
        """`config` and `shapes` are those of the whole model, `cut` the shapes of a rank's."""
        self._whole, self._config, self._share = whole, config, share
        names = config.names
        self._cuts = {}
        for name, shape in shapes.items():
            if cut[name] != shape:
                [axis] = [i for i, sizes in enumerate(zip(shape, cut[name], strict=True)) if sizes[0] != sizes[1]]
                self._cuts[name] = Cut(axis, self._parts(name, shape[axis]))
        for name in (names.embedding, names.head):
            self._cuts[f"{name}.weight"] = Cut(0, (share.part(config.vocab_size),))
        if config.per_layer and names.per_layer:
            self._cuts[f"{names.per_layer.table}.weight"] = Cut(0, (share.part(config.per_layer.rows),))
        # The ranks' summands are added, so only one of them may have the bias.
        self._added = tuple(f"{name}.bias" for name in (names.o, names.down))
        if names.expert_down is not None:
            down, n = names.expert_down, config.experts.n if config.experts else 0
            self._added += (f"{down}_bias", *(f"{down}.bias".replace("{e}", str(e)) for e in range(n)))

    def _parts(self, name: str, size: int) -> tuple[slice, ...]:
        """The rank's parts of the axis, of `size`, in which the tensor `name` is cut."""
        config, names, share = self._config, self._config.names, self._share
        module = name.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias")
        heads = config.heads_of(self._layer_of(name))
        q_heads, kv_heads = heads_of_rank(heads, share.rank, share.n)
        q, kv = _scaled(q_heads, heads.k_size), _scaled(kv_heads, heads.k_size)
        if config.delta is not None and names.delta is not None:
            cut = (*names.delta.inputs, names.delta.conv, names.delta.decay, names.delta.decay_bias, names.delta.out)
            if name.removesuffix(".weight").endswith(cut):
                return _delta_parts(config.delta, delta_heads_of_rank(config.delta, share.rank, share.n), size)
        if names.sinks is not None and name.endswith(names.sinks):
            return (q_heads,)
        if module.endswith(names.qkv) and len(names.qkv) == 1:
            n_q, n_kv = heads.n_q * heads.k_size, heads.n_kv * heads.k_size
            return q, _moved(kv, n_q), _moved(kv, n_q + n_kv)
        latent = names.latent
        of_q_heads = names.qkv[:1] if latent is None else (latent.q, latent.q_b, latent.kv_b)
        if module.endswith((*of_q_heads, names.o, names.q_norm or names.o)):
            return (_scaled(q_heads, size // heads.n_q),)  # a gate may stand beside each Q head
        if module.endswith((*names.qkv, names.k_norm or names.o)):
            return (kv,)
        if len(names.up) == 1 and config.gated and module.endswith(names.up[0]):
            columns = share.part(size // 2)
            return columns, _moved(columns, size // 2)
        if len(names.expert_up) == 1 and module.endswith(names.expert_up[0]):
            return (_scaled(share.part(size // 2), 2),)  # columns of gate and up alternate
        return (share.part(size),)

    def _layer_of(self, name: str) -> int:
        """The layer that the tensor `name` belongs to, 0 if all layers are alike."""
        first = self._config.names.block.partition("{i}")[0]
        number = name.removeprefix(first).partition(".")[0]
        return int(number) if self._config.options.heads and number.isdecimal() else 0

    def names(self) -> set[str]:
        return self._whole.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._whole.shape(name))
        if name in self._cuts:
            cut = self._cuts[name]
            shape[cut.axis] = sum(part.stop - part.start for part in cut.parts)
        return tuple(shape)

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._whole.tensor(name)
        if name.endswith(self._added) and self._share.rank:
            return torch.zeros_like(tensor)
        return cut_tensor(tensor, self._cuts[name]) if name in self._cuts else tensor

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        [matrix] = self.matrices(name)
        return matrix

    def matrices(self, name: str) -> list[torch.Tensor | Quantised]:
        matrices, cut = self._whole.matrices(name), self._cuts.get(name)
        if cut is None:
            return matrices
        if len(matrices) == 1 or cut.axis == 1:
            return [self._part_of(matrix, cut, name) for matrix in matrices]
        quantised = [matrix for matrix in matrices if isinstance(matrix, Quantised)]
        return [rows for part in cut.parts for rows in rows_of(quantised, part.start, part.stop)]

    def expert(self, name: str, index: int) -> torch.Tensor | Quantised:
        cut = self._cuts[name]  # of the tensor [experts, in, out]; the matrix is [out, in]
        return self._part_of(self._whole.expert(name, index), cut._replace(axis=2 - cut.axis), name)

    def absorbed(self, name: str, heads: int, k_size: int) -> tuple[HeadMatrices, HeadMatrices]:
        whole, [own], of_head = self._whole.shape(name)[0], self._cuts[name].parts, self.shape(name)[0] // heads
        k, v = self._whole.absorbed(name, whole // of_head, k_size)
        part = slice(own.start // of_head, own.stop // of_head)
        return k[part], v[part]

    def _part_of(self, matrix: torch.Tensor | Quantised, cut: Cut, name: str) -> torch.Tensor | Quantised:
        if isinstance(matrix, torch.Tensor):
            return cut_tensor(matrix, cut)
        if cut.axis == 0:
            return matrix.select_rows(torch.cat([torch.arange(part.start, part.stop) for part in cut.parts]))
        try:
            return matrix.slice_inputs(cut.parts[0])
        except ValueError as error:
            raise CheckpointError(f"{self._share.n} ranks cannot share the tensor {name!r}: {error}") from None

    def factors(self, module: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank's share of an adapter's factors of a linear, as Adapter.factors has them."""
        cut = self._cuts.get(f"{module}.weight")
        if cut is None:
            return a, b
        return (a, cut_tensor(b, cut)) if cut.axis == 0 else (cut_tensor(a, cut), b)

    @property
    def quantisation(self) -> str | None:
        return self._whole.quantisation


@dataclass(frozen=True, slots=True)
class CutAdapter(Adapter):
    """A rank's share of an adapter."""

    checkpoint: CutCheckpoint

    @classmethod
    def of(cls, whole: Adapter, checkpoint: CutCheckpoint) -> CutAdapter:
        """The share of `whole` in the model of a checkpoint."""
        return cls(whole.name, whole.directory, whole.modules, checkpoint, rows=whole.rows)

    def factors(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank's share of the whole adapter's factors."""
        return self.checkpoint.factors(module, *Adapter.factors(self, module))


def cut_tensor(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """A rank's parts of a tensor, side by side; a view if it is one part."""
    parts = [tensor.narrow(cut.axis, part.start, part.stop - part.start) for part in cut.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut.axis)


def _delta_parts(rule: DeltaRule, k_heads: slice, size: int) -> tuple[slice, ...]:
    """The parts that belong to some K heads in the axis, of `size`, of a parameter of the rule: K head by K head, but
    Q, K and V one after another where there are only these."""
    if size != rule.channels:
        return (_scaled(k_heads, size // rule.k_heads),)
    k, width = _scaled(k_heads, rule.k_size), rule.k_heads * rule.k_size
    return k, _moved(k, width), _moved(_scaled(k_heads, rule.v_width // rule.k_heads), 2 * width)


def _scaled(part: slice, step: int) -> slice:
    return slice(part.start * step, part.stop * step)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
