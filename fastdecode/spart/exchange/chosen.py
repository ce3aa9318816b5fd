"""ChosenExchange: the exchange that an S-Part takes, and the reason if it is not the bypass."""

from __future__ import annotations

import functools
import mmap
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fastdecode.kernels.gpu.cupy_kernels import KernelError
from fastdecode.spart.exchange.bypass import Bypass
from fastdecode.spart.exchange.driver import Driver, DriverError
from fastdecode.spart.exchange.graph import GraphStream
from fastdecode.spart.exchange.stream_rows import Kernels
from fastdecode.transports._native import Proxy

#: Device attributes that the bypass needs, each with the fault of a GPU or driver that lacks it.
_NEEDED = {
    "CAN_USE_64_BIT_STREAM_MEM_OPS": "does not let streams write words of memory and wait for them",
    "CAN_MAP_HOST_MEMORY": "cannot map the host's memory",
    "HOST_REGISTER_SUPPORTED": "cannot register memory of the host",
}
_TRIAL_S = 5.0
_LINE = 16  # words


class BypassImpossible(Exception):
    """The bypass was asked for and cannot be used; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class ChosenExchange:
    """The exchange of an S-Part."""

    name: str  # "direct", "staged" or "bypass"
    why: str = ""  # the reason why a device other than a CPU has no bypass
    bypass: Bypass | None = None

    def __str__(self) -> str:
        if self.bypass is not None and self.bypass.fault:
            return f"staged ({self.bypass.fault})"
        return f"{self.name} ({self.why})" if self.why else self.name

    def close(self) -> None:
        """Give back what a bypass has registered and captured, after the last step. Idempotent."""
        if self.bypass is not None:
            self.bypass.close()

    @classmethod
    def plain(cls, device: torch.device) -> ChosenExchange:
        """The exchange that always works on a device."""
        return cls("direct" if device.type == "cpu" else "staged")


def choose_exchange(
    wanted: str, device: torch.device, mini_batches: int, most_rows: int, spin_us: int, *, whole_rows: bool = True
) -> ChosenExchange:
    """The exchange for `wanted`: "auto", "staged" or "bypass". `whole_rows`: each row of a step goes to one R-node, not
    in pieces to the members of a team.

    Steps of up to `most_rows` rows are run by the bypass, whose proxy spins for `spin_us` microseconds. Raises
    BypassImpossible if "bypass" is wanted and cannot be used; "auto" takes the staged exchange then.
    """
    if device.type == "cpu":
        if wanted != "auto":
            raise BypassImpossible(f"the exchange {wanted!r} is for GPUs, and the S-Part runs on the CPU")
        return ChosenExchange.plain(device)
    if wanted == "staged":
        return ChosenExchange.plain(device)
    try:
        if not whole_rows:
            raise BypassImpossible("its kernels do not cut rows for R-nodes that share sequences (--partition)")
        if device.type != "cuda":
            raise BypassImpossible(f"the bypass needs CUDA, and the S-Part runs on {device.type}")
        return ChosenExchange("bypass", bypass=open_bypass(device, mini_batches, most_rows, spin_us))
    except (BypassImpossible, DriverError, KernelError) as error:
        if wanted == "bypass":
            raise BypassImpossible(f"the exchange 'bypass' cannot be used: {error}") from None
        return ChosenExchange("staged", str(error))


def open_bypass(device: torch.device, mini_batches: int, most_rows: int, spin_us: int) -> Bypass:
    """A bypass on a CUDA device, once a stream has shown that it works. Raises BypassImpossible, DriverError,
    KernelError."""
    if fault := environment_fault(os.environ, mini_batches):
        raise BypassImpossible(fault)
    kernels = _kernels(device.index or 0)
    kernels.driver.use_here()
    try_words(kernels.driver, GraphStream(device).handle)
    return Bypass(kernels, lambda: GraphStream(device), most_rows, Proxy(spin_us))


@functools.cache
def _kernels(device: int) -> Kernels:
    """The kernels of rows.cu on a CUDA device, which a process loads once and keeps."""
    driver = Driver(device)
    if fault := device_fault(driver):
        raise BypassImpossible(fault)
    return Kernels.load(driver, device)


def device_fault(driver: Driver) -> str | None:
    """A sentence that names the first attribute that the device lacks; None if it has all."""
    for attribute, fault in _NEEDED.items():
        if not driver.attribute(attribute):
            return f"the GPU or its driver {fault} (CU_DEVICE_ATTRIBUTE_{attribute} is 0)"
    return None


def environment_fault(environment: Mapping[str, str], mini_batches: int) -> str | None:
    """A sentence that names a variable with which a waiting stream could hold up others; None if there is none."""
    queues = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    least = mini_batches + 2  # a stream for each, the stream that computes prompts, and the one that copies their rows
    if queues is not None and not (queues.isdecimal() and int(queues) >= least):
        return f"CUDA_DEVICE_MAX_CONNECTIONS is {queues}: {mini_batches} mini-batches need {least} or more"
    loading = environment.get("CUDA_MODULE_LOADING")
    if loading != "EAGER":
        return f"CUDA_MODULE_LOADING is {loading or 'not set'}: kernels must be loaded before a stream waits (EAGER)"
    return None


def try_words(driver: Driver, stream: int) -> None:
    """Let a stream wait for a word that the host stores, and then store one itself. Raises DriverError."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    words = np.frombuffer(memory, np.uint32)
    address = words.ctypes.data
    try:
        mapped = driver.register(address, words.nbytes)
    except DriverError as error:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
        raise DriverError(f"{error}; the limit of locked memory (ulimit -l) is {locked}") from None
    try:
        driver.wait_word(stream, mapped, 1)
        driver.write_word(stream, mapped + _LINE * words.itemsize, 7)
        time.sleep(0.001)
        early = words[_LINE] != 0
        words[0] = 1
        deadline = time.monotonic() + _TRIAL_S
        while words[_LINE] != 7:
            if time.monotonic() > deadline:
                raise DriverError(f"a stream has not passed an open gate within {_TRIAL_S:.0f} s")
            time.sleep(0.0001)
        if early:
            raise DriverError("a stream has passed a closed gate")
    finally:
        words[0] = 1  # after an error too, because `unregister` waits for the stream
        driver.unregister(address)
