"""Links to an R-node on a GPU, once over each transport: answers are those of float64.

The GPU is the simulated driver, with the kernels compiled for the host. RDMA has its turn in the virtual machine of
tests/rdma.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from attention.partial_rows import PARTIAL, ask, log_sum_exp
from attention.rengine_peer import KV_ERROR, KV_FP16, attention
from gpu.cuda_driver import has_driver
from gpu.functions_on_driver import SMALL_LAYER
from gpu.layers_compiled import compile_layer
from nodes.node_process import PROGRAMS, Node
from nodes.rnode_process import LISTEN_URLS, Held
from sources.compiled import compiled
from wire.link_driver import HANG_S, SMALL, Driver, hello, in_thread, until

from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.transports.registry import connect

pytestmark = [
    pytest.mark.skipif(has_driver(), reason="needs a machine without a driver of NVIDIA's"),
    pytest.mark.timeout(4 * HANG_S),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the driver and of the kernels."""
    folder = compiled("libcuda.so.1", tmp_path_factory.mktemp("kernels")).parent
    compile_layer(SMALL_LAYER, folder)
    return folder


@pytest.fixture
def node(
    transport: str, start: Callable[..., Node], kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, int]]:
    """The URL and the process id of `fastdecode-node --role r --device cuda`."""
    monkeypatch.setitem(PROGRAMS, "gpu", "gpu.rnode_on_driver")
    monkeypatch.setenv("GPU_KERNELS", str(kernels))
    url = LISTEN_URLS[transport].format(folder=tmp_path)
    made = start(*["--role", "r", "--device", "cuda", "--insecure", "--listen"], url, program="gpu")
    yield made.wait_for(r"R-node on (\S+): cuda sm_80")[1], made.process.pid
    assert made.end(seconds=HANG_S) == 0


async def test_answers_are_those_of_float64(node):
    """Both slots, a prompt of more than a page, several sequences and rows at once, a fork, a trim, and partial rows of
    a sequence whose first tokens lie here. Of the link nothing is left."""
    url, pid = node
    before = Held.by(pid).registered
    asks = hello(replace(SMALL, act_dtype="fp16"), "fp16")
    link = await connect(url, asks, None)
    driver = Driver(link, asks)
    await in_thread(driver.fill, 0, PAGE_TOKENS + 20)
    await in_thread(driver.step, 1, [(0, 1, True), (1, 3, True)])
    await driver.fork_seq(0, 2, PAGE_TOKENS + 5)
    await in_thread(driver.step, 0, [(2, 2, True), (0, 1, True)])
    await driver.trim_seq(2, PAGE_TOKENS)
    await in_thread(driver.step, 1, [(2, 1, True), (1, 1, True)])

    cut, n_q, scale = driver.shadows[0], SMALL.n_q_heads, asks.softmax_scale
    for layer in range(SMALL.n_layers):
        q = driver.rng.standard_normal((2, n_q, SMALL.head_size)).astype(np.float16).astype(np.float64)
        table = [(0, cut.tag, cut.length, 2, PARTIAL)]
        o, sums = await in_thread(ask, driver, table, layer, q)
        k, v = cut.k[layer], cut.v[layer]
        want = attention(q[:1], k, v, cut.length - 1, 0, scale)
        assert abs(o[0] - want.ravel()).max() < 2 * KV_ERROR[KV_FP16]
        assert abs(sums[1, :n_q] - log_sum_exp(q[:1], k, scale).ravel()).max() < 2 * KV_ERROR[KV_FP16]
    assert (await link.stats())["seqs"] == 3
    del driver
    await link.close()

    async def given_back() -> bool:
        return Held.by(pid).registered == before

    await until(given_back, HANG_S)
