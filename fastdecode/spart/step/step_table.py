"""StepTable: the numbers that a step's device needs, in one buffer that one copy uploads; and the way back.

A step synchronises the host with the device once, in `download`. So everything that the host knows about the step
(tokens, positions, row numbers, sampling parameters) goes up at its start through pinned memory, in a copy that the
host does not wait for, and all results come down in one copy at its end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: Every array starts at a multiple of this many bytes, so that its bytes in the buffer can be viewed in its own dtype.
_ALIGNMENT = 16


class StepTable:
    """Named one-dimensional arrays on their way to the device."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def add(self, name: str, values: npt.NDArray[Any]) -> None:
        """Add an array [n] of a dtype that torch has. Raises ValueError for a name that the table has already."""
        if name in self._arrays:
            raise ValueError(f"the step's table has {name!r} already")
        self._arrays[name] = values

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def upload(self, device: torch.device) -> dict[str, torch.Tensor]:
        """All arrays as tensors [n] on the device. On a CPU the tensors are the arrays themselves.

        The host does not wait. torch reuses the pinned buffer only after the copy has been made.
        """
        if device.type == "cpu":
            return {name: torch.from_numpy(values) for name, values in self._arrays.items()}
        return self.views(self.pinned().to(device, non_blocking=True)) if self._arrays else {}

    def pinned(self) -> torch.Tensor:
        """All arrays in one buffer of pinned memory."""
        staging = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        self.pack(staging.numpy())
        return staging

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that holds all arrays."""
        return self._offsets()[1]

    def pack(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Write all arrays into a buffer."""
        offsets, _ = self._offsets()
        for name, values in self._arrays.items():
            buffer[offsets[name] : offsets[name] + values.nbytes] = values.view(np.uint8)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as views of a tensor that holds what `pack` has written, on any device."""
        offsets, _ = self._offsets()
        return {
            name: buffer[offsets[name] : offsets[name] + values.nbytes].view(torch.from_numpy(values).dtype)
            for name, values in self._arrays.items()
        }

    def _offsets(self) -> tuple[dict[str, int], int]:
        """Where each array begins in a buffer, and the buffer's bytes."""
        offsets, size = {}, 0
        for name, values in self._arrays.items():
            offsets[name] = size
            size += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
        return offsets, size


def download(results: torch.Tensor) -> npt.NDArray[Any]:
    """`results` as an array on the host. On a device that is not the CPU, this is a step's one synchronisation."""
    array: npt.NDArray[Any] = results.to("cpu").numpy()
    return array
