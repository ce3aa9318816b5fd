"""Driver: the functions of the CUDA driver that torch and CuPy lack, through cuda-bindings.

A stream writes a word of host memory once everything before it in the stream is done, and waits until a word is large
enough ("stream memory operations"). Host memory must be registered for that, and has another address on the device.
"""

from __future__ import annotations

from typing import Any

_NOT_INSTALLED = "cuda-bindings is not installed: pip install 'fastdecode[cuda12]' or 'fastdecode[cuda13]'"


class DriverError(Exception):
    """The driver is missing, or has refused a call; the message is a sentence for the log."""


class Driver:
    """The CUDA driver, and a device's primary context, which torch uses too. Streams are given by their handles."""

    def __init__(self, device: int = 0):
        """Makes the context current on this thread. Raises DriverError."""
        try:
            from cuda.bindings import driver
        except ImportError:
            raise DriverError(_NOT_INSTALLED) from None
        self._cuda: Any = driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.use_here()

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:  # no library
            raise DriverError(str(error)) from None
        if int(code):
            raise DriverError(f"{name}: {code.name}")
        return results[0] if results else None

    def use_here(self) -> None:
        """Make the context current on this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def attribute(self, name: str) -> int:
        """An attribute of the device; `name` is that of CU_DEVICE_ATTRIBUTE_... without this prefix."""
        number = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", number, self._device))

    # -- host memory ----------------------------------------------------------------------------------------------

    def register(self, address: int, n_bytes: int) -> int:
        """Pin host memory and map it into the device. Returns its address there. Not while a stream is captured."""
        flags = self._cuda.CU_MEMHOSTREGISTER_PORTABLE | self._cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuMemHostRegister", address, n_bytes, flags)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def unregister(self, address: int) -> None:
        """Undo `register`. No operation on the memory may be under way. May be called on any thread, even while that
        thread captures a stream, when the garbage collector finds the memory's owner."""
        self.use_here()
        mode = self._call(
            "cuThreadExchangeStreamCaptureMode", self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )
        try:
            self._call("cuMemHostUnregister", address)
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", mode)

    # -- operations of a stream -----------------------------------------------------------------------------------

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Store a 32-bit word. A reader that sees it also sees everything that the stream has written before."""
        flags = self._cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        self._call("cuStreamWriteValue32", stream, address, value, int(flags))

    def wait_word(self, stream: int, address: int, value: int) -> None:
        """Hold the stream until the 32-bit word is `value` or up to 2^31 - 1 more."""
        flags = self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call("cuStreamWaitValue32", stream, address, value, int(flags))
