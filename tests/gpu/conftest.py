"""The simulated driver, built once."""

from __future__ import annotations

import pytest
import simulated_cuda
from simulated_cuda import SimulatedCuda


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> SimulatedCuda:
    if reason := simulated_cuda.missing():
        pytest.skip(reason)
    return SimulatedCuda.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def cuda(driver: SimulatedCuda) -> SimulatedCuda:
    """The driver with nothing in it, eight queues and no delays."""
    driver.reset()
    driver.use_here()
    return driver
