"""The exchange's own code over the simulated driver: what it asks of a device at start, and a step that it captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from captured_steps import GEOMETRY, HOST_SLOT, Payload, by_host
from cuda_driver import Cuda
from link_driver import HANG_S, hello, in_thread

from fastdecode.spart.exchange.base import LinkRows
from fastdecode.spart.exchange.choice import device_fault, environment_fault, try_words
from fastdecode.spart.exchange.driver import Driver, DriverError
from fastdecode.spart.exchange.stream_rows import Kernels, MappedRegion, StreamRows, step_addresses
from fastdecode.transports._native import Proxy
from fastdecode.transports.registry import connect

pytestmark = pytest.mark.tools


class DeviceRows:
    """Rows in the device's memory: as much of a tensor as StreamRows needs."""

    def __init__(self, cuda: Cuda, values: np.ndarray):
        self.shape, self._item = values.shape, values.itemsize
        self._pointer = cuda.alloc(values)

    def __len__(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return self._item

    def data_ptr(self) -> int:
        return self._pointer


@pytest.mark.parametrize(
    "attribute", ["CAN_USE_64_BIT_STREAM_MEM_OPS", "CAN_MAP_HOST_MEMORY", "HOST_REGISTER_SUPPORTED"]
)
def test_a_device_without_what_the_bypass_needs_is_refused_by_name(cuda, monkeypatch, attribute):
    driver = Driver()
    assert device_fault(driver) is None and driver.architecture.startswith("sm_")
    monkeypatch.setattr(driver, "attribute", lambda name: name != attribute)
    assert attribute in device_fault(driver)


@pytest.mark.parametrize(
    ("loading", "connections", "fault"),
    [
        ("EAGER", None, None),
        ("EAGER", "3", None),
        ("EAGER", "2", "MAX_CONNECTIONS is 2: 2 mini-batches need 3"),
        ("EAGER", "many", "MAX_CONNECTIONS is many"),
        ("LAZY", None, "CUDA_MODULE_LOADING is LAZY"),
        (None, None, "CUDA_MODULE_LOADING is not set"),
    ],
)
def test_variables_with_which_a_waiting_stream_holds_up_others_are_named(loading, connections, fault):
    given = {"CUDA_MODULE_LOADING": loading, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    found = environment_fault({name: value for name, value in given.items() if value is not None}, 2)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize("queues", [1, 8])
def test_the_trial_passes_where_streams_wait_and_write(simulated, queues):
    simulated.reset(queues, delay_us=50)
    try_words(Driver(), int(simulated.call("cuStreamCreate", 1)))


def test_the_trial_fails_where_the_stream_is_held_up(simulated, monkeypatch):
    monkeypatch.setattr("fastdecode.spart.exchange.choice._TRIAL_S", 0.05)
    simulated.reset(queues=1)
    other, stream = (int(simulated.call("cuStreamCreate", 1)) for _ in range(2))
    driver, gate = Driver(), simulated.pinned(64).view(np.uint32)
    driver.wait_word(other, int(simulated.call("cuMemHostGetDevicePointer", gate.ctypes.data, 0)), 1)
    unregister, driver.unregister = driver.unregister, lambda address: gate.fill(1) or unregister(address)
    with pytest.raises(DriverError, match="has not passed an open gate"):
        try_words(driver, stream)


def test_a_call_that_is_refused_names_itself_and_the_error(cuda):
    with pytest.raises(DriverError, match="cuMemHostRegister: CUDA_ERROR_INVALID_VALUE"):
        Driver().register(0, 0)


async def test_a_captured_step_of_the_exchange_is_bit_for_bit_that_of_the_host(cuda, shared_node):
    link = await connect(shared_node.url, hello(GEOMETRY), None)
    payload, slot, tag = Payload.random(1, 5), 0, 2
    want = await in_thread(by_host, [link], payload, 1)
    await link.free(payload.handles(0, HOST_SLOT, 1))
    driver = Driver()
    kernels = Kernels.load(driver, cuda.image)
    region = MappedRegion(driver, link)
    views: Any = SimpleNamespace(link=link)
    part = LinkRows(views, payload.table(0, slot, tag), payload.attending[0], payload.appended[0])
    addresses = step_addresses([region], slot, [part])
    tables: Any = {name: DeviceRows(cuda, getattr(addresses, name)) for name in ("q", "kv", "o", "counts")}
    stream = int(cuda.call("cuStreamCreate", 1))
    layers: list[Any] = []
    for q, kv in zip(payload.q, payload.kv, strict=True):
        rows: Any = tuple(DeviceRows(cuda, x) for x in (q, kv, np.full_like(q, np.nan)))
        layers.append(StreamRows(kernels, stream, [region.gate(slot)], rows, tables))

    def work() -> None:
        for i, layer in enumerate(layers):
            layer.post(i)
            layer.wait()

    for warm in layers:  # a kernel must not be loaded while a stream is captured
        StreamRows(kernels, stream, (), (warm.q, warm.kv, warm.o), tables).wait()
        StreamRows(kernels, stream, (), (warm.q, warm.kv, warm.o), tables).post(0)
    assert cuda.finish(stream, HANG_S)
    graph = cuda.capture(stream, work)
    proxy = Proxy()
    link.arm(slot, payload.table(0, slot, tag))
    await in_thread(link.wait, slot, HANG_S)
    proxy.begin(link.port, slot, HANG_S)
    cuda.call("cuGraphLaunch", graph, stream)
    finished = cuda.finish(stream, HANG_S)
    if not finished:
        cuda.forget([link.region])  # lets the stream go
    ended = proxy.end(link.port, slot)
    assert finished and ended is True and link.disarm(slot) is not None
    got = np.stack([cuda.download(layer.o.data_ptr(), want[0]) for layer in layers])
    assert got.tobytes() == want.tobytes()
    layers.clear()
    del region, part, views
    await link.close()
