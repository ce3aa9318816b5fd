"""`fastdecode-node`: the console script of both roles."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_checks import check_machine
from fastdecode.daemon.machine import usable_cpus
from fastdecode.daemon.option_help import FIRST_WORDS
from fastdecode.daemon.option_values import ConfigError, format_bytes
from fastdecode.daemon.process import set_up_logging, wait_for_shutdown
from fastdecode.transports.base import TransportError

log = logging.getLogger("fastdecode.daemon.node")  # __name__ is "__main__" here


def main(argv: Sequence[str] | None = None) -> None:
    """Run a node with the options of `argv` (default: sys.argv).

    Exit status: 0 after a clean end, 2 for a bad option, 130 if interrupted while it loads, 1 for any other error.
    """
    if not (sys.argv[1:] if argv is None else argv) and not any(name.startswith("FASTDECODE_") for name in os.environ):
        print(FIRST_WORDS, file=sys.stderr)
        sys.exit(2)
    config = NodeConfig.from_args(argv)
    set_up_logging(config.log_level, config.log_format)
    try:
        check_machine(config)
        if config.check:
            from fastdecode.daemon.check import report

            print(report(config))
        elif config.role == "r":
            uvloop.run(run_r_node(config))
        else:
            from fastdecode.daemon.snode_start import run_s_node

            run_s_node(config)
    except ConfigError as error:
        _exit_with(error, 2, config.log_format)
    except KeyboardInterrupt:
        sys.exit(130)  # the interrupt came before wait_for_shutdown, so no request was running
    except (TransportError, OSError, RuntimeError, MemoryError, ValueError) as error:
        log.debug("the node ended", exc_info=True)
        _exit_with(error, 1, config.log_format)


def _exit_with(error: BaseException, status: int, log_format: str) -> None:
    if log_format == "json":
        log.critical("%s", error)
    else:
        print(f"fastdecode-node: error: {error}", file=sys.stderr)
    sys.exit(status)


async def run_r_node(config: NodeConfig) -> None:
    """Run an R-node until SIGTERM. Raises ConfigError, TransportError, OSError, RuntimeError, ValueError."""
    from fastdecode.daemon.process import freeze
    from fastdecode.daemon.rnode import bind_to_node
    from fastdecode.daemon.rnode_start import make_r_node, measure_roofline

    shutdown = asyncio.create_task(wait_for_shutdown())
    if config.numa_node is not None:
        bind_to_node(config.numa_node)
        if wrong := set(config.cpus or ()) - os.sched_getaffinity(0):
            raise ConfigError(f"--cpus: {min(wrong)} is not a cpu of --numa-node {config.numa_node}")
    on_gpu = config.device == "cuda"
    threads = 1 if on_gpu else config.threads or (len(config.cpus) if config.cpus else len(usable_cpus()))
    node = make_r_node(config, threads)
    try:
        for url in await node.serve(config.listen, config.read_secret(), insecure=config.insecure):
            log.info(
                "R-node on %s: %s, %d thread(s), %s of KV-cache", url, node.isa, threads, format_bytes(node.kv_bytes)
            )
        freeze()
        # Beside the links, because an S-node need not wait for a figure that nothing but the page of the cluster shows.
        cpus = () if on_gpu else config.cpus or usable_cpus()[:threads]
        measuring = asyncio.create_task(measure_roofline(node, cpus))
        await shutdown
        measuring.cancel()
        log.info("draining: S-nodes have %.0f s to move their sequences away", config.drain_seconds)
        await node.drain(config.drain_seconds)
    finally:
        await node.close()
    log.info("R-node ended")


if __name__ == "__main__":
    main()
