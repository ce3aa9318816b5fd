"""The R-node that an S-node without `--r-node` starts: threads of its own process, or a child."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from nodes.rnode_process import r_threads
from wire.link_driver import Payloads, hello, in_thread

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.split import Split
from fastdecode.region.geometry import Geometry
from fastdecode.transports.base import Link, LinkDown, LinkRefused
from fastdecode.transports.registry import connect

CONFIG = NodeConfig(kv_memory=64 << 20)
IN_TURNS, SIDE_BY_SIDE = Split(2, 2, 1, in_turns=True), Split(1, 1, 2)
BESIDE_A_GPU = replace(SIDE_BY_SIDE, s_on_gpu=True)
Spins = tuple[int | None, int | None]  # --spin-us and --step-spin-us


def children() -> set[int]:
    pids: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            pids |= set(map(int, (thread / "children").read_text().split()))
    return pids


async def checked_link(node: EmbeddedRNode) -> Link:
    """A link over which calls had the right results."""
    link = await connect(node.url, Payloads.HELLO, None)
    await in_thread(Payloads(link).run, 200)
    return link


async def test_an_r_node_that_takes_turns_is_in_this_process_until_it_is_stopped():
    before, others = children(), r_threads().keys()
    node = EmbeddedRNode(CONFIG, IN_TURNS)
    await node.start()
    link = await checked_link(node)
    assert not children() - before
    assert sorted(name for thread, name in r_threads().items() if thread not in others) == ["fd-r0", "fd-r1"]
    await link.close()
    await node.stop()
    await node.stop()
    assert not r_threads().keys() - others and not Path(node.url.removeprefix("shm://")).exists()


@pytest.mark.parametrize(
    ("config", "split"),
    [
        (CONFIG, SIDE_BY_SIDE),
        # The R-Part of one mini-batch beside the S-Part of the other.
        (CONFIG, Split(2, 1, 2, in_turns=True)),
        (NodeConfig(kv_memory=64 << 20, cpus=(min(os.sched_getaffinity(0)),)), Split(2, 1, 1, in_turns=True)),
    ],
    ids=["side by side", "two mini-batches", "on CPUs of its own"],
)
async def test_other_r_nodes_are_child_processes(config: NodeConfig, split: Split):
    before, others = children(), r_threads().keys()
    node = EmbeddedRNode(config, split)
    await node.start()
    link = await checked_link(node)
    assert len(children() - before) == 1 and not r_threads().keys() - others
    await link.close()
    await node.stop()
    assert not children() - before


@pytest.mark.parametrize("split", [IN_TURNS, SIDE_BY_SIDE], ids=["in turns", "side by side"])
async def test_a_link_is_opened_again_after_a_restart(split: Split):
    node = EmbeddedRNode(CONFIG, split)
    await node.start()
    link = await checked_link(node)
    await node.restart()
    async with asyncio.timeout(60):
        assert isinstance(await link.closed(), LinkDown)
    await link.close()
    await (await checked_link(node)).close()
    await node.stop()


@pytest.mark.parametrize("split", [IN_TURNS, SIDE_BY_SIDE], ids=["in turns", "side by side"])
async def test_a_lease_that_does_not_fit_is_refused_in_the_words_of_any_r_node(split: Split):
    node = EmbeddedRNode(NodeConfig(kv_memory=1 << 20), split)
    await node.start()
    many_layers = Geometry(2, 32, 64, n_q_heads=8, n_kv_heads=4, head_size=32, act_dtype="fp32")
    with pytest.raises(LinkRefused, match="no memory for a KV-cache"):
        await connect(node.url, hello(many_layers), None)
    await node.stop()


@pytest.mark.parametrize(
    ("split", "given", "passed_on"),
    [
        (IN_TURNS, (None, None), (0, None)),
        (IN_TURNS, (70, 80), (70, 80)),
        (Split(3, 2, 2, in_turns=True), (None, None), (0, None)),
        (SIDE_BY_SIDE, (None, None), (None, None)),
        (BESIDE_A_GPU, (None, None), (None, 20_000)),
        (BESIDE_A_GPU, (70, 0), (70, 0)),
    ],
)
def test_an_embedded_r_node_spins_through_steps_of_a_gpu_and_not_in_turns(split: Split, given: Spins, passed_on: Spins):
    node = EmbeddedRNode(NodeConfig(spin_us=given[0], step_spin_us=given[1]), split)
    node.remove_socket()
    run = node._run
    config = run.config if split is IN_TURNS else NodeConfig.from_args(run.argv)
    assert (config.spin_us, config.step_spin_us) == passed_on
