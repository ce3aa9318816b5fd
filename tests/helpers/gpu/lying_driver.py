"""The CUDA driver's part of the lying device (lying_device.py): host memory, layer words and kernels in its streams.

It takes the place of fastdecode.spart.exchange.driver.Driver. Registered memory has another address on the device, and
a kernel or word that uses a host's address fails. So does a stream that uses a word of another stream, or that waits
for a layer before it has asked for it: on a GPU such streams can hold each other up for ever.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdecode.kernels.gpu.cupy_kernels import Launch
from fastdecode.region.contract import REPLY_OFFSET, REQUEST_OFFSET
from fastdecode.spart.exchange.driver import DriverError
from fastdecode.spart.exchange.stream_rows import Kernels
from gpu.lying_device import LyingDevice

_DEVICE = 1 << 60  # the device adds this to the address of registered memory
_GIVE_UP_S = 20.0


def host_address(address: int) -> int:
    """The address at which this process reaches the device's `address`, of registered memory or of the device's own."""
    return address - _DEVICE if address >= _DEVICE else address


class LyingDriver:
    """`left_out` is a wait that does nothing: "gate" (for an R-node) or "completion" (for the end of a step)."""

    def __init__(self, device: LyingDevice, left_out: str = "none"):
        self._device, self._left_out = device, left_out
        self._registered: dict[int, int] = {}  # host address -> bytes
        self._completions = 0
        self._owners: dict[int, int] = {}  # word -> the stream that writes it or waits for it
        self._written: dict[int, int] = {}  # word -> the last value that a stream was given to write
        self.waited = 0

    def use_here(self) -> None:
        pass

    def register(self, address: int, n_bytes: int) -> int:
        for start, n in self._registered.items():
            if address < start + n and start < address + n_bytes:
                raise DriverError("cuMemHostRegister: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self._registered[address] = n_bytes
        self._completions = self._completions or address  # the proxy's page is the first
        return address + _DEVICE

    def unregister(self, address: int) -> None:
        end = address + self._registered.pop(address) + _DEVICE
        self._owners = {word: owner for word, owner in self._owners.items() if not address + _DEVICE <= word < end}

    def _host(self, address: int) -> int:
        """The address at which this process reaches the device's `address`, registered or the device's own."""
        host = host_address(address)
        inside = any(start <= host < start + n for start, n in list(self._registered.items()))
        assert inside == (address >= _DEVICE), f"{address:#x} is not an address of the device"
        return host

    def _word(self, stream: int, address: int) -> ctypes.c_uint32:
        assert self._owners.setdefault(address, stream) == stream, "two streams use the same word"
        return ctypes.c_uint32.from_address(self._host(address))

    def write_word(self, stream: int, address: int, value: int) -> None:
        word = self._word(stream, address)
        self._written[address] = value
        if self._left_out == "completion" and address - _DEVICE - self._completions in range(4096):
            word.value = value
            return

        def operation() -> None:
            word.value = value

        self._device.streams[stream].put(operation)

    def wait_word(self, stream: int, address: int, value: int) -> None:
        word = self._word(stream, address)
        asked = self._written.get(address - REPLY_OFFSET + REQUEST_OFFSET)
        assert asked == value, "a stream waits for a layer before it has asked for it"

        def operation() -> None:
            self.waited += 1
            deadline = time.monotonic() + _GIVE_UP_S
            while word.value < value and self._left_out != "gate":
                assert time.monotonic() < deadline, f"the gate shows {word.value}, not {value}"
                time.sleep(0)

        self._device.streams[stream].put(operation)

    def kernels(self) -> Kernels:
        """The kernels, as loaded."""
        driver: Any = self
        return Kernels(driver, self._launch(self._pack), self._launch(self._unpack))

    def _launch(self, kernel: Any) -> Launch:
        def launch(
            grid: tuple[int, ...], threads: int, stream: int, pointers: Sequence[int], numbers: Sequence[int]
        ) -> None:
            self._device.streams[stream].put(lambda: kernel(grid[0], pointers, numbers))

        return launch

    # -- the kernels of rows.cu, whose source tests/spart/test_exchange_kernels.py tests -------------------------------

    def _pack(self, blocks: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
        q, kv, q_slots, kv_slots, counts = map(self._host, pointers)
        n_attend, n_rows = _table(counts, 2, np.uint32)
        for source, slots, n, chunks in ((q, q_slots, n_attend, numbers[0]), (kv, kv_slots, n_rows, numbers[1])):
            for i, slot in enumerate(_table(slots, min(n, blocks), np.uint64)):
                if not slot:
                    continue
                ctypes.memmove(self._host(slot), source + i * chunks * 16, chunks * 16)

    def _unpack(self, blocks: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
        o, o_slots, counts = map(self._host, pointers)
        for i, slot in enumerate(_table(o_slots, min(_table(counts, 1, np.uint32)[0], blocks), np.uint64)):
            if not slot:
                continue
            ctypes.memmove(o + i * numbers[0] * 16, self._host(slot), numbers[0] * 16)


def _table(address: int, n: int, dtype: Any) -> list[int]:
    n_bytes = n * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype).tolist() if n else []
