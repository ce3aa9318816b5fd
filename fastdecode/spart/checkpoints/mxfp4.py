"""MXFP4: matrices in the OCP Microscaling format (MX specification 1.0, section 5.3), as gpt-oss stores its experts.

32 neighbouring numbers share a scale, a power of two in 8 bits (E8M0). Each number is a sign, two bits of exponent and
one of mantissa (E2M1). Twice such a number is an integer from -12 to 12, so the matrix stays as it is in 4 bits: a
table has the 16 integers, and the scales are halved.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fastdecode.spart.checkpoints.config import CheckpointError, TensorNames
from fastdecode.spart.checkpoints.tensors import SafetensorsCheckpoint, Stored
from fastdecode.spart.linears.quantised import E2M1_TABLE, E2M1_ZERO, GROUP, Quantised, unpack_pairs

_NAN = 255  # the one E8M0 number that is no power of two
_SCALES = torch.tensor([2.0 ** (exponent - 128) for exponent in range(_NAN)])  # halved

_BLOCKS, _EXPONENTS = "_blocks", "_scales"  # ends of the names of a matrix's two tensors
_PACKED = GROUP // 2  # bytes of a block


def mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> Quantised:
    """The matrix of codes [out, in] uint8, below 16, and E8M0 scales [out, in / 32] uint8.

    Raises ValueError if a scale is NaN.
    """
    if bool((exponents == _NAN).any()):
        raise ValueError("a scale is NaN")
    return Quantised(codes, _SCALES[exponents.int()], None, E2M1_ZERO, 4, GROUP, table=E2M1_TABLE)


class MXFP4Checkpoint(SafetensorsCheckpoint):
    """A Hugging Face directory whose experts are in MXFP4.

    A stack of matrices NAME [experts, in, out] is stored as NAME_blocks uint8 [experts, out, in / 32, 16], whose bytes
    hold a number in the low half and the next one in the high half, and NAME_scales uint8 [experts, out, in / 32].
    """

    def __init__(self, directory: Path, names: TensorNames):
        """Raises CheckpointError."""
        super().__init__(directory, names)
        self._stacks = {name.removesuffix(_BLOCKS) for name in self.stored if name.endswith(_BLOCKS)}

    def names(self) -> set[str]:
        tensors = {name + end for name in self._stacks for end in (_BLOCKS, _EXPONENTS)}
        return set(self.stored) - tensors | self._stacks

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stacks:
            return super().shape(name)
        blocks, exponents = self._tensor_of(name, _BLOCKS), self._tensor_of(name, _EXPONENTS)
        if len(blocks.shape) != 4 or blocks.shape[3] != _PACKED or exponents.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"the tensors {blocks.name!r} {blocks.shape} and {exponents.name!r} {exponents.shape} are no MXFP4: "
                f"their shapes must be [experts, out, in / {GROUP}, {_PACKED}] and [experts, out, in / {GROUP}]"
            )
        n, outs, groups, _ = blocks.shape
        return n, groups * GROUP, outs

    def _tensor_of(self, name: str, end: str) -> Stored:
        stored = self.stored.get(name + end)
        if stored is None:
            raise CheckpointError(f"the checkpoint lacks the tensor {name + end!r}")
        if stored.dtype != "U8":
            raise CheckpointError(f"tensor {stored.name!r} is stored as {stored.dtype}, not as U8 like MXFP4")
        return stored

    def expert(self, name: str, index: int) -> torch.Tensor | Quantised:
        if name not in self._stacks:
            return super().expert(name, index)
        packed = self.read(name + _BLOCKS)[index]
        try:
            return mxfp4(unpack_pairs(packed), self.read(name + _EXPONENTS)[index])
        except ValueError as error:
            raise CheckpointError(f"tensor {name + _EXPONENTS!r} is corrupt: {error}") from None

    @property
    def quantisation(self) -> str | None:
        return "mxfp4"
