"""Checks of options that contradict each other, or that are too large."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastdecode.daemon.config_sources import flag
from fastdecode.daemon.option_values import ConfigError
from fastdecode.kernels._native import MAX_THREADS
from fastdecode.region.contract import MAX_ROWS, MAX_SLOTS

#: Options that are numbers, and the largest each may be.
_MOST = {
    "mini_batches": MAX_SLOTS,
    "max_batch_tokens": MAX_ROWS,
    "threads": MAX_THREADS,
    "s_threads": 512,
    "spin_us": 60_000_000,
    "trim_idle_s": 10**9,
}
#: Options of an R-node that an S-node without `--r-node` passes on to its embedded R-node.
EMBEDDED_OPTIONS = ("kv_memory", "threads", "cpus", "numa_node", "huge_pages", "prefault", "trim_idle_s")


def check_options(config: Any) -> None:
    """Check a NodeConfig, whose module imports this one. Raises ConfigError."""
    fields = dataclasses.fields(config)
    defaults = {f.name: f.default for f in fields}
    for f in fields:
        if config.role not in f.metadata["role"] and getattr(config, f.name) != f.default:
            raise ConfigError(f"{flag(f.name)} is not an option of --role {config.role}")
    if config.role == "r" and not config.listen and not config.check:
        raise ConfigError("--role r needs --listen, e.g. --listen shm:///tmp/r.sock or --listen tcp://127.0.0.1:7300")
    if config.ssl_keyfile is not None and config.ssl_certfile is None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    given = [flag(name) for name in ("r_node", "r_nodes_file", "r_nodes_dns") if getattr(config, name)]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} each say which R-nodes to use: give one of them")
    if given:
        for name in EMBEDDED_OPTIONS:
            if getattr(config, name) != defaults[name]:
                raise ConfigError(
                    f"{flag(name)} is for the embedded R-node; with {given[0]}, give it to the R-node itself"
                )
    if config.partition != "sequences" and not config.r_node:
        raise ConfigError(
            f"--partition {config.partition} needs --r-node: a team of R-nodes is fixed when the node starts"
        )
    if config.prefill_at and config.prefill_file:
        raise ConfigError("--prefill-at and --prefill-file each say which S-nodes prefill: give one of them")
    takes = [flag(name) for name in ("prefill_at", "prefill_file", "take_from") if getattr(config, name)]
    if takes and (not given or config.partition != "sequences"):
        raise ConfigError(
            f"{takes[0]} needs R-nodes that other ones can reach, each with whole sequences: --r-node, and "
            "--partition sequences"
        )
    if config.cpus is not None and config.threads is not None and len(config.cpus) != config.threads:
        raise ConfigError(f"--cpus names {len(config.cpus)} cpus for --threads {config.threads}")
    if config.trim_idle_s and (config.prefault or config.huge_pages == "hugetlb"):
        other = "--prefault" if config.prefault else "--huge-pages hugetlb"
        raise ConfigError(f"--trim-idle-s returns memory that {other} keeps: give one of them")
    for name, most in _MOST.items():
        if (getattr(config, name) or 0) > most:
            raise ConfigError(f"{flag(name)} is at most {most}")
    if config.max_batch_size > config.max_batch_tokens:
        raise ConfigError("--max-batch-size is larger than --max-batch-tokens: every sequence needs a row")
