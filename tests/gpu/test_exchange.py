"""The exchange's check of a device at start, and the faults that the check names. For steps see test_replays.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastdecode.daemon import device_plan
from fastdecode.daemon.check import report
from fastdecode.daemon.config import NodeConfig
from fastdecode.spart.exchange import chosen
from fastdecode.spart.exchange.chosen import device_fault, environment_fault, try_words
from fastdecode.spart.exchange.driver import Driver, DriverError

pytestmark = pytest.mark.tools


@pytest.mark.parametrize(
    "attribute", ["CAN_USE_64_BIT_STREAM_MEM_OPS", "CAN_MAP_HOST_MEMORY", "HOST_REGISTER_SUPPORTED"]
)
def test_a_device_without_what_the_bypass_needs_is_refused_by_name(cuda, monkeypatch, attribute):
    driver = Driver()
    assert device_fault(driver) is None
    monkeypatch.setattr(driver, "attribute", lambda name: name != attribute)
    assert attribute in device_fault(driver)


@pytest.mark.parametrize(
    ("loading", "connections", "fault"),
    [
        ("EAGER", None, None),
        ("EAGER", "4", None),
        ("EAGER", "3", "MAX_CONNECTIONS is 3: 2 mini-batches need 4"),
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
    monkeypatch.setattr("fastdecode.spart.exchange.chosen._TRIAL_S", 0.05)
    simulated.reset(queues=1)
    other, stream = (int(simulated.call("cuStreamCreate", 1)) for _ in range(2))
    driver, gate = Driver(), simulated.pinned(64).view(np.uint32)
    driver.wait_word(other, int(simulated.call("cuMemHostGetDevicePointer", gate.ctypes.data, 0)), 1)
    unregister, driver.unregister = driver.unregister, lambda address: gate.fill(1) or unregister(address)
    with pytest.raises(DriverError, match="has not passed an open gate"):
        try_words(driver, stream)


def test_a_trial_whose_word_is_refused_leaves_no_stream_waiting(simulated):
    driver, stream = Driver(), int(simulated.call("cuStreamCreate", 1))
    write_word, driver.write_word = driver.write_word, lambda stream, address, value: write_word(stream, 1, value)
    with pytest.raises(DriverError, match="cuStreamWriteValue32"):
        try_words(driver, stream)
    assert simulated.finish(stream, 20.0)


def test_check_names_the_exchange_that_the_node_takes(simulated, monkeypatch):
    """Where nobody has set CUDA_MODULE_LOADING, the node sets it, and so does --check. torch's device and CuPy are
    replaced; the driver is not."""
    make_stream = lambda device: SimpleNamespace(handle=int(simulated.call("cuStreamCreate", 1)))  # noqa: E731
    monkeypatch.setattr(chosen, "GraphStream", make_stream)
    monkeypatch.setattr(chosen.Kernels, "load", lambda driver, device: simulated.kernels())
    monkeypatch.setattr(device_plan, "choose_device", lambda name: torch.device("cuda"))
    chosen._kernels.cache_clear()
    for given, found in ((None, "bypass"), ("LAZY", "staged (CUDA_MODULE_LOADING is LAZY")):
        if given:
            monkeypatch.setenv("CUDA_MODULE_LOADING", given)
        else:
            monkeypatch.delenv("CUDA_MODULE_LOADING")
        before = simulated.counts()["registered"]
        assert f"\nexchange    {found}" in report(NodeConfig(check=True))
        assert simulated.counts()["registered"] == before
    chosen._kernels.cache_clear()


def test_a_call_that_is_refused_names_itself_and_the_error(cuda):
    with pytest.raises(DriverError, match="cuMemHostRegister: CUDA_ERROR_INVALID_VALUE"):
        Driver().register(0, 0)


def test_a_stream_of_a_context_that_has_ended_is_refused(simulated):
    stream = simulated.call("cuStreamCreate", 1)
    kernel = simulated.kernel("fd_unpack_rows")
    outside = int(simulated.call("cuMemAlloc", 64))
    table = simulated.alloc(np.array([16], np.uint64))  # a row at an address that nobody has
    counts = simulated.alloc(np.array([1, 1], np.uint32))
    simulated.launch(kernel, (1, 1), stream, [outside, table, counts], [1])
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        while True:
            try_words(Driver(), int(stream))
