"""The CUDA driver: this machine's, or else a simulated one."""

from __future__ import annotations

import pytest
from gpu import cuda_driver
from gpu.cuda_driver import Cuda, SimulatedCuda, open_driver


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Cuda:
    if reason := cuda_driver.missing():
        pytest.skip(reason)
    return open_driver(tmp_path_factory.getbasetemp())


@pytest.fixture
def cuda(driver: Cuda) -> Cuda:
    """The driver, current on this thread. The simulated one has nothing in it, eight queues and no delays."""
    if driver.simulated:
        driver.reset()
    driver.use_here()
    return driver


@pytest.fixture
def simulated(driver: Cuda) -> SimulatedCuda:
    """The simulated driver, like `cuda`."""
    if not isinstance(driver, SimulatedCuda):
        pytest.skip("this machine has a driver of its own")
    driver.reset()
    driver.use_here()
    return driver
