"""Starting the R-node that a configuration describes: that of `--role r`, or an S-node's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from fastdecode.daemon import roofline
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import available_memory, huge_pages, numa_nodes
from fastdecode.daemon.option_values import ConfigError, format_bytes
from fastdecode.daemon.rnode import RNode
from fastdecode.daemon.rnode_gpu import RNodeGpu, open_gpu

log = logging.getLogger(__name__)

#: Of a GPU's free memory; the rest is for the tables of steps and for CUDA.
_GPU_SHARE = 0.9


def make_r_node(config: NodeConfig, threads: int, *, stand_in: bool = False, quiet: bool = False) -> RNode:
    """Start the R-engine of an R-node that serves no links yet. `stand_in`, `quiet`: see RNode.

    Raises ConfigError, ValueError, RuntimeError.
    """
    gpu = open_gpu() if config.device == "cuda" and config.role == "r" else None
    return RNode(
        threads=threads,
        kv_bytes=kv_memory(config) if gpu is None else gpu_memory(config, gpu),
        cpus=config.cpus,
        spin_us=config.spin_us,
        step_spin_us=config.step_spin_us or 0,
        huge_pages=config.huge_pages,
        prefault=config.prefault,
        max_lease=config.max_lease,
        orphan_seconds=config.orphan_seconds if config.role == "r" else 0.0,  # an embedded R-node has one S-node
        stand_in=stand_in,
        quiet=quiet,
        gpu=gpu,
    )


def gpu_memory(config: NodeConfig, gpu: RNodeGpu) -> int:
    """Bytes for the KV-cache: --kv-memory, else _GPU_SHARE of the GPU's free memory. Raises ConfigError."""
    free = gpu.limits.free_bytes
    if (config.kv_memory or 0) > free:
        raise ConfigError(
            f"--kv-memory {format_bytes(config.kv_memory or 0)} is more than the {format_bytes(free)} that are free on "
            "the GPU"
        )
    return config.kv_memory or int(free * _GPU_SHARE)


def kv_memory(config: NodeConfig) -> int:
    """Bytes for the KV-cache: --kv-memory, else half of the available memory, or all free pages of the hugetlb pool.

    Raises ConfigError if --prefault asks for more than is free.
    """
    if config.huge_pages == "hugetlb":
        pages = huge_pages()
        return config.kv_memory or max(1, pages.free) * pages.size
    free = [available_memory(), *(n.free for n in numa_nodes() if n.number == config.numa_node)]
    wanted = config.kv_memory or 0
    if config.prefault and wanted > min(free):
        raise ConfigError(
            f"--prefault needs all of --kv-memory {format_bytes(wanted)} now, and only "
            f"{format_bytes(min(free))} are free"
        )
    return config.kv_memory or min(free) // 2


async def measure_roofline(node: RNode, cpus: Sequence[int]) -> None:
    """Let an R-node tell S-nodes how fast these cpus read memory; none attend on an R-node with a GPU."""
    if not cpus:
        return
    try:
        node.roofline = await asyncio.to_thread(roofline.measure, cpus)
    except (OSError, ValueError) as error:
        log.debug("the memory's read bandwidth was not measured: %s", error)
    else:
        log.debug("%d thread(s) read %.1f GB/s", len(cpus), node.roofline / 1e9)
