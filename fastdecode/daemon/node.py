"""`fastdecode-node`: the console script of both roles."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvloop

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.logs import set_up_logging
from fastdecode.daemon.machine import available_memory, huge_pages, numa_nodes, total_memory, usable_cpus
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.shutdown import wait_for_shutdown
from fastdecode.daemon.sizes import format_bytes
from fastdecode.transports.base import TransportError

if TYPE_CHECKING:
    from fastdecode.daemon.rnode import RNode

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a node with the options of `argv` (default: sys.argv).

    Exit status: 0 after a clean end, 2 for a bad option, 130 if interrupted while it loads, 1 for any other error.
    """
    config = NodeConfig.from_args(argv)
    set_up_logging(config.log_level, config.log_format)
    try:
        if config.check:
            from fastdecode.daemon.check import report

            print(report(config))
        elif config.role == "r":
            _check_kv_memory(config)
            uvloop.run(run_r_node(config))
        else:
            # Before torch is imported, which takes seconds.
            config.model_path()
            _check_kv_memory(config)
            from fastdecode.daemon.snode import run_s_node

            run_s_node(config)
    except ConfigError as error:
        _exit_with(error, 2)
    except KeyboardInterrupt:
        sys.exit(130)  # the interrupt came before wait_for_shutdown, so no request was running
    except (TransportError, OSError, RuntimeError, MemoryError, ValueError) as error:
        log.debug("the node ended", exc_info=True)
        _exit_with(error, 1)


def _exit_with(error: BaseException, status: int) -> None:
    print(f"fastdecode-node: error: {error}", file=sys.stderr)
    sys.exit(status)


def _check_kv_memory(config: NodeConfig) -> None:
    """Raise ConfigError if --kv-memory is more than the memory of this machine."""
    wanted, total = config.kv_memory or 0, total_memory()
    if wanted > total and config.huge_pages != "hugetlb":  # the pool of huge pages has a limit of its own
        raise ConfigError(
            f"--kv-memory {format_bytes(wanted)} is more than the {format_bytes(total)} that this process may use"
        )


def _kv_memory(config: NodeConfig) -> int:
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


async def run_r_node(config: NodeConfig) -> None:
    """Run an R-node until SIGTERM. Raises ConfigError, TransportError, OSError, RuntimeError, ValueError."""
    from fastdecode.daemon.garbage import freeze
    from fastdecode.daemon.rnode import RNode, bind_to_node

    shutdown = asyncio.create_task(wait_for_shutdown())
    if config.numa_node is not None:
        bind_to_node(config.numa_node)
        if wrong := set(config.cpus or ()) - os.sched_getaffinity(0):
            raise ConfigError(f"--cpus: {min(wrong)} is not a cpu of --numa-node {config.numa_node}")
    threads = config.threads or (len(config.cpus) if config.cpus else len(usable_cpus()))
    kv_memory = _kv_memory(config)
    node = RNode(
        threads=threads,
        kv_bytes=kv_memory,
        cpus=config.cpus,
        spin_us=config.spin_us,
        huge_pages=config.huge_pages,
        prefault=config.prefault,
        trim_idle_s=config.trim_idle_s,
        max_lease=config.max_lease,
    )
    try:
        for url in await node.serve(config.listen, config.read_secret(), insecure=config.insecure):
            log.info("R-node on %s: %s, %d thread(s), %s of KV-cache", url, node.isa, threads, format_bytes(kv_memory))
        freeze()
        # Beside the links, because an S-node need not wait for a figure that nothing but the page of the cluster shows.
        measuring = asyncio.create_task(_measure_roofline(node, config.cpus or usable_cpus()[:threads]))
        await shutdown
        measuring.cancel()
        log.info("draining: S-nodes have %.0f s to move their sequences away", config.drain_seconds)
        await node.drain(config.drain_seconds)
    finally:
        await node.close()
    log.info("R-node ended")


async def _measure_roofline(node: RNode, cpus: Sequence[int]) -> None:
    from fastdecode.daemon import roofline

    try:
        node.roofline = await asyncio.to_thread(roofline.measure, cpus)
    except (OSError, ValueError) as error:
        log.debug("the memory's read bandwidth was not measured: %s", error)
    else:
        log.debug("%d thread(s) read %.1f GB/s", len(cpus), node.roofline / 1e9)


if __name__ == "__main__":
    main()
