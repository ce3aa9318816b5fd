"""The simulated driver finds the mistakes that other tests rely on it to find: it refuses, holds up and poisons.

The rules are those of the CUDA driver API's documentation (groups CUDA_MEM, CUDA_MEMOP, CUDA_STREAM, CUDA_GRAPH).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gpu.cuda_driver import CudaError, SimulatedCuda

from fastdecode.spart.exchange.graph import GraphStream
from fastdecode.spart.exchange.stream_rows import MappedMemory

pytestmark = pytest.mark.tools

EQUAL, AT_LEAST = 1, 0  # CUstreamWaitValue_flags
SOON_S, HANG_S = 0.1, 20.0


@pytest.fixture
def cuda(simulated: SimulatedCuda) -> SimulatedCuda:
    return simulated


@pytest.fixture
def memory() -> mmap.mmap:
    """Shared memory, as a link's region is."""
    return mmap.mmap(-1, 1 << 14)


def words(memory: mmap.mmap) -> np.ndarray:
    return np.frombuffer(memory, np.uint32)


def refused(code: int, why: str, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(CudaError, match=why) as error:
        call(*arguments)
    assert error.value.code == code


def test_registered_memory_has_another_address_on_the_device(cuda, memory):
    at = words(memory).ctypes.data
    refused(1, "not registered", cuda.call, "cuMemHostGetDevicePointer", at, 0)
    pointer = cuda.register(memory)
    assert pointer != at
    refused(712, "is registered", cuda.register, memory)
    assert int(cuda.call("cuMemHostGetDevicePointer", at + 100, 0)) == pointer + 100
    stream = cuda.call("cuStreamCreate", 1)
    cuda.call("cuStreamWriteValue32", stream, pointer + 8, 7, 0)
    cuda.call("cuStreamSynchronize", stream)
    assert words(memory)[2] == 7
    cuda.unregister(memory)
    refused(1, "no device pointer", cuda.call, "cuStreamWriteValue32", stream, pointer + 8, 8, 0)
    refused(713, "registered", cuda.unregister, memory)


def test_private_memory_can_be_registered_too(cuda):
    private = mmap.mmap(-1, 1 << 13, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    words(private)[5] = 99
    pointer = cuda.register(private)
    target = cuda.pinned(4)
    stream = cuda.call("cuStreamCreate", 1)
    cuda.call("cuMemcpyDtoHAsync", target.ctypes.data, pointer + 20, 4, stream)
    cuda.call("cuStreamSynchronize", stream)
    assert target.view(np.uint32)[0] == 99
    words(private)[6] = 98
    assert cuda.download(pointer + 24, np.empty(1, np.uint32))[0] == 98


def test_host_pointers_are_refused_where_device_pointers_must_be(cuda, memory):
    stream, at = cuda.call("cuStreamCreate", 1), words(memory).ctypes.data
    inside = cuda.alloc(np.zeros(64, np.uint8))
    refused(1, "not registered", cuda.call, "cuMemcpyHtoDAsync", inside, at, 64, stream)
    cuda.register(memory)
    refused(1, "it is a host pointer", cuda.call, "cuStreamWriteValue32", stream, at, 1, 0)
    refused(1, "it is a host pointer", cuda.call, "cuStreamWaitValue32", stream, at, 1, EQUAL)
    refused(1, "no device pointer", cuda.call, "cuMemcpyDtoHAsync", at, at, 64, stream)
    refused(1, "is not aligned", cuda.call, "cuStreamWriteValue32", stream, inside + 2, 1, 0)
    refused(1, "no device pointer", cuda.call, "cuMemcpyHtoDAsync", inside, at, 65, stream)  # beyond its end
    pack = cuda.kernel("fd_pack_rows")
    arguments = [inside, at, inside, inside, inside]
    refused(1, "argument 1 of fd_pack_rows", cuda.launch, pack, (1, 2), stream, arguments, [1, 1])


def test_a_kernel_that_is_given_a_host_address_in_a_table_ends_the_context(cuda, memory):
    """As on a GPU: the launch succeeds, and everything after it fails with CUDA_ERROR_ILLEGAL_ADDRESS."""
    at, stream = words(memory).ctypes.data, cuda.call("cuStreamCreate", 1)
    pointer = cuda.register(memory)
    rows = cuda.alloc(np.arange(8, dtype=np.uint32))
    pack = cuda.kernel("fd_pack_rows")
    counts = cuda.alloc(np.array([1, 0], np.uint32))

    def pack_to(address: int) -> None:
        table = cuda.alloc(np.array([address], np.uint64))
        cuda.launch(pack, (3, 2), stream, [rows, rows, table, table, counts], [2, 2])
        cuda.call("cuStreamSynchronize", stream)

    pack_to(pointer + 64)
    assert np.array_equal(words(memory)[16:24], np.arange(8))
    refused(700, "writes to .* which is a host pointer", pack_to, at + 64)
    refused(700, "which is a host pointer", cuda.call, "cuMemAlloc", 64)
    cuda.reset()
    refused(1, "argument 0", pack_to, pointer + 64)  # all of it is gone


def test_host_memory_holds_poison_until_the_copy_to_it_has_run(cuda, memory):
    pointer, stream = cuda.register(memory), cuda.call("cuStreamCreate", 1)
    target, event = cuda.pinned(64), cuda.call("cuEventCreate", 0)
    inside = cuda.alloc(np.full(64, 3, np.uint8))
    target[:] = 3
    cuda.call("cuStreamWaitValue32", stream, pointer, 1, AT_LEAST)
    cuda.call("cuMemcpyDtoHAsync", target.ctypes.data, inside, 64, stream)
    cuda.call("cuEventRecord", event, stream)
    refused(600, "not done", cuda.call, "cuEventQuery", event)
    assert (target == 0xFF).all()
    words(memory)[0] = 1
    cuda.call("cuEventSynchronize", event)
    assert (target == 3).all()
    assert np.isnan(cuda.download(int(cuda.call("cuMemAlloc", 64)), np.empty(16, np.float32))).all()


@pytest.mark.parametrize("queues", [1, 8, 32])
def test_a_wait_before_its_release_on_another_stream_hangs_where_both_share_a_queue(cuda, memory, queues):
    """NVSHMEM's documentation of false dependencies: publish before you wait, or let the host release."""
    cuda.reset(queues)
    pointer = cuda.register(memory)
    first, second = (cuda.call("cuStreamCreate", 1) for _ in range(2))
    cuda.call("cuStreamWaitValue32", first, pointer, 1, AT_LEAST)
    cuda.call("cuStreamWriteValue32", second, pointer, 1, 0)
    assert cuda.finish(first, HANG_S if queues > 1 else SOON_S) == (queues > 1)
    words(memory)[0] = 1  # the host can always release it
    assert cuda.finish(first, HANG_S) and cuda.finish(second, HANG_S)
    words(memory)[0] = 0
    cuda.call("cuStreamWriteValue32", second, pointer, 1, 0)
    cuda.call("cuStreamWaitValue32", first, pointer, 1, AT_LEAST)
    assert cuda.finish(first, HANG_S)  # published before the wait


def test_a_wait_for_an_event_that_is_recorded_later_does_not_hang(cuda, memory):
    cuda.reset(1)
    pointer = cuda.register(memory)
    first, second = (cuda.call("cuStreamCreate", 1) for _ in range(2))
    event = cuda.call("cuEventCreate", 2)
    cuda.call("cuStreamWaitEvent", first, event, 0)  # no record yet, so nothing to wait for
    assert cuda.finish(first, HANG_S)
    cuda.call("cuStreamWaitValue32", second, pointer, 1, AT_LEAST)
    cuda.call("cuEventRecord", event, second)
    cuda.call("cuStreamWaitEvent", first, event, 0)
    assert not cuda.finish(first, SOON_S)
    words(memory)[0] = 1
    assert cuda.finish(first, HANG_S)


#: Calls that no stream may be captured during, each with its arguments.
UNSAFE = {
    "cuMemHostRegister": lambda cuda, memory: (words(memory).ctypes.data, len(memory), 3),
    "cuMemHostUnregister": lambda cuda, memory: cuda.register(memory) and (words(memory).ctypes.data,),
    "cuMemAlloc": lambda cuda, memory: (64,),
    "cuMemHostAlloc": lambda cuda, memory: (64, 0),
    "cuStreamCreate": lambda cuda, memory: (1,),
    "cuCtxSynchronize": lambda cuda, memory: (),
    "cuModuleLoadData": lambda cuda, memory: (cuda.image,),
}


@pytest.mark.parametrize("call", UNSAFE)
def test_calls_that_synchronise_end_a_capture(cuda, memory, call):
    stream, arguments = cuda.call("cuStreamCreate", 1), UNSAFE[call](cuda, memory)
    modes = cuda.driver.CUstreamCaptureMode
    cuda.call("cuStreamBeginCapture", stream, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    refused(900, "while a stream is captured", cuda.call, call, *arguments)
    refused(901, "has ended it", cuda.call, "cuStreamEndCapture", stream)
    cuda.call("cuStreamBeginCapture", stream, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
    cuda.call(call, *arguments)
    cuda.call("cuStreamEndCapture", stream)


def test_memory_is_given_back_within_a_capture(cuda, memory):
    """The garbage collector may find the owner of registered memory on a thread that captures."""
    stream, pointer = cuda.call("cuStreamCreate", 1), cuda.alloc(np.zeros(1, np.uint32))
    owner = MappedMemory(cuda.product, np.frombuffer(memory, np.uint8))

    def work() -> None:
        cuda.call("cuStreamWriteValue32", stream, pointer, 1, 0)
        owner.close()
        cuda.call("cuStreamWriteValue32", stream, pointer, 2, 0)

    graph = cuda.capture(stream, work)
    cuda.register(memory)  # which is refused for registered memory
    cuda.call("cuGraphLaunch", graph, stream)
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.download(pointer, np.empty(1, np.uint32)) == 2


def test_a_capture_that_fails_names_the_first_error(monkeypatch):
    """The error names the call that no capture allows, and not the capture's end, which fails for the same reason."""

    class Graph:
        def capture_begin(self, pool, capture_error_mode): ...
        def capture_end(self):
            raise RuntimeError("operation failed due to a previous error during capture")

    def work() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    stream = GraphStream.__new__(GraphStream)  # torch has no stream without a GPU
    stream._stream = stream._pool = None
    with pytest.raises(RuntimeError, match="not permitted"):
        stream.capture(work)


def test_a_capture_forbids_its_own_thread_alone_unless_it_is_global(cuda):
    stream, modes = cuda.call("cuStreamCreate", 1), cuda.driver.CUstreamCaptureMode
    outcomes = []

    def elsewhere() -> None:
        cuda.use_here()
        try:
            cuda.call("cuMemAlloc", 64)
            outcomes.append(0)
        except CudaError as error:
            outcomes.append(error.code)

    for mode in (modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, modes.CU_STREAM_CAPTURE_MODE_GLOBAL):
        cuda.call("cuStreamBeginCapture", stream, mode)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        cuda.driver.cuStreamEndCapture(stream)
    assert outcomes == [0, 900]


def test_a_graph_holds_the_values_and_arguments_of_its_capture(cuda, memory):
    pointer, stream = cuda.register(memory), cuda.call("cuStreamCreate", 1)
    cuda.call("cuStreamSynchronize", stream)

    def work() -> None:
        cuda.call("cuStreamWriteValue32", stream, pointer, 5, 0)
        cuda.call("cuStreamWaitValue32", stream, pointer + 64, 3, AT_LEAST)
        cuda.call("cuStreamWriteValue32", stream, pointer + 4, 6, 0)

    graph = cuda.capture(stream, work)
    assert not words(memory).any()  # a capture runs nothing
    for _ in range(3):
        words(memory)[:] = 0
        cuda.call("cuGraphLaunch", graph, stream)
        assert not cuda.finish(stream, 0.01) and words(memory)[1] == 0
        words(memory)[16] = 3
        assert cuda.finish(stream, HANG_S) and words(memory)[:2].tolist() == [5, 6]


def test_batches_and_the_ways_to_compare(cuda, memory):
    pointer, stream = cuda.register(memory), cuda.call("cuStreamCreate", 1)
    kinds = cuda.driver.CUstreamBatchMemOpType

    def operation(kind: str, at: int, value: int, flags: int) -> object:
        made = cuda.driver.CUstreamBatchMemOpParams()
        kind_of = getattr(kinds, f"CU_STREAM_MEM_OP_{kind}_VALUE_32")
        part = made.writeValue if kind == "WRITE" else made.waitValue
        made.operation = part.operation = kind_of
        part.address, part.value, part.flags = cuda.driver.CUdeviceptr(pointer + at), value, flags
        return made

    batch = [operation("WRITE", 0, 1, 0), operation("WAIT", 64, 1, EQUAL), operation("WRITE", 64, 0, 0)]
    cuda.call("cuStreamBatchMemOp", stream, len(batch), batch, 0)
    while not words(memory)[0]:
        time.sleep(0.001)
    assert not cuda.finish(stream, 0.01)
    words(memory)[16] = 1
    assert cuda.finish(stream, HANG_S) and words(memory)[16] == 0
    for how, value, closed, opens in [(0, 2**32 - 1, 2**32 - 2, 3), (1, 7, 8, 7), (2, 4, 3, 12), (3, 1, 2**32 - 1, 1)]:
        words(memory)[0] = closed
        cuda.call("cuStreamWaitValue32", stream, pointer, value, how)
        assert not cuda.finish(stream, 0.005), how
        words(memory)[0] = opens
        assert cuda.finish(stream, HANG_S), how


def test_every_thread_needs_a_current_context(cuda):
    outcome = []

    def elsewhere() -> None:
        with pytest.raises(CudaError, match="no current context") as error:
            cuda.call("cuStreamCreate", 1)
        outcome.append(error.value.code)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert outcome == [201]


def test_lazy_loading_waits_for_an_open_gate_and_eager_loading_does_not(cuda, memory, monkeypatch):
    """The first launch of a kernel synchronises, unless its module was loaded eagerly."""
    pointer, stream = cuda.register(memory), cuda.call("cuStreamCreate", 1)
    other = cuda.call("cuStreamCreate", 1)
    inside = cuda.alloc(np.zeros(64, np.uint8))
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    eager = cuda.kernel("fd_unpack_rows")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    lazy = cuda.kernel("fd_unpack_rows")
    cuda.call("cuStreamWaitValue32", stream, pointer, 1, AT_LEAST)
    cuda.launch(eager, (1, 1), other, [inside] * 3, [0])
    assert cuda.finish(other, HANG_S)

    def first_launch() -> None:
        cuda.use_here()
        cuda.launch(lazy, (1, 1), other, [inside] * 3, [0])

    thread = threading.Thread(target=first_launch)
    thread.start()
    thread.join(SOON_S)
    assert thread.is_alive()
    words(memory)[0] = 1
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_memory_of_the_device_is_bounded(cuda):
    cuda.set_memory(1 << 20)
    first = cuda.call("cuMemAlloc", 1 << 19)
    refused(2, "are free", cuda.call, "cuMemAlloc", (1 << 19) + 1)
    assert cuda.call("cuMemGetInfo") == (1 << 19, 1 << 20)
    cuda.call("cuMemFree", first)
    refused(1, "not the start", cuda.call, "cuMemFree", first)
    assert cuda.call("cuMemGetInfo") == (1 << 20, 1 << 20)


def test_a_host_function_runs_in_the_order_of_its_stream(cuda, memory):
    pointer, stream = cuda.register(memory), cuda.call("cuStreamCreate", 1)
    seen = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(int(words(memory)[0])))
    cuda.call("cuStreamWriteValue32", stream, pointer, 4, 0)
    cuda.call("cuLaunchHostFunc", stream, ctypes.cast(function, ctypes.c_void_p).value, 0)
    cuda.call("cuStreamWriteValue32", stream, pointer, 5, 0)
    assert cuda.finish(stream, HANG_S)
    assert seen == [4] and words(memory)[0] == 5
