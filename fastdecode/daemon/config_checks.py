"""Checks of options that contradict each other, that are too large, or that this machine cannot meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from fastdecode.daemon.config_sources import flag
from fastdecode.daemon.machine import huge_pages, numa_nodes, total_memory, usable_cpus
from fastdecode.daemon.option_values import ConfigError, format_bytes
from fastdecode.daemon.options import NodeOptions
from fastdecode.kernels._native import MAX_RANKS, MAX_THREADS
from fastdecode.region.contract import MAX_ROWS, MAX_SLOTS

#: Options that are numbers, and the largest each may be.
_MOST = {
    "mini_batches": MAX_SLOTS,
    "max_batch_tokens": MAX_ROWS,
    "threads": MAX_THREADS,
    "s_threads": 512,
    "tensor_parallel": MAX_RANKS,
    "spin_us": 60_000_000,
    "step_spin_us": 60_000_000,
    "orphan_seconds": 3600,
    "resume_seconds": 3600,
}
#: Options of an R-node for pages in the host's memory, and threads that attend.
_HOST_OPTIONS = ("threads", "cpus", "huge_pages", "prefault")
#: Options that an S-node of several ranks does not have yet.
_NOT_OF_RANKS = ("partition", "prefill_at", "prefill_file", "prefill_listen", "cpus", "numa_node", "save_weights")
#: Options that say which R-nodes an S-node uses, and which S-nodes compute its prompts.
_R_NODE_OPTIONS = ("r_node", "r_nodes_file", "r_nodes_dns")
_PREFILL_OPTIONS = ("prefill_at", "prefill_file")
#: Options of an R-node that an S-node without `--r-node` passes on to its embedded R-node.
EMBEDDED_OPTIONS = ("kv_memory", "threads", "cpus", "numa_node", "huge_pages", "prefault")


class _Check(NamedTuple):
    """A contradiction between options."""

    holds: Callable[[NodeOptions], object]
    message: Callable[[NodeOptions], str]  # names the option to change


_CHECKS = (
    _Check(
        lambda c: c.role == "r" and not c.listen and not c.check,
        lambda c: "--role r needs --listen, e.g. --listen shm:///tmp/r.sock or --listen tcp://127.0.0.1:7300",
    ),
    _Check(
        lambda c: c.ssl_keyfile is not None and c.ssl_certfile is None,
        lambda c: "--ssl-keyfile needs --ssl-certfile",
    ),
    _Check(
        lambda c: c.router_only and c.secret_file is None,
        lambda c: "--router-only needs --secret-file, the secret that routers prove",
    ),
    _Check(
        lambda c: len(given(c, *_R_NODE_OPTIONS)) > 1,
        lambda c: f"{' and '.join(given(c, *_R_NODE_OPTIONS)[:2])} each say which R-nodes to use: give one of them",
    ),
    _Check(
        lambda c: c.uses_r_nodes and given(c, *EMBEDDED_OPTIONS),
        lambda c: (
            f"{given(c, *EMBEDDED_OPTIONS)[0]} is for the embedded R-node; with {given(c, *_R_NODE_OPTIONS)[0]}, "
            "give it to the R-node itself"
        ),
    ),
    _Check(
        lambda c: c.partition != "sequences" and not c.r_node,
        lambda c: f"--partition {c.partition} needs --r-node: a team of R-nodes is fixed when the node starts",
    ),
    _Check(
        lambda c: c.prefill_at and c.prefill_file,
        lambda c: "--prefill-at and --prefill-file each say which S-nodes prefill: give one of them",
    ),
    _Check(
        lambda c: given(c, *_PREFILL_OPTIONS) and (not c.uses_r_nodes or c.partition != "sequences"),
        lambda c: (
            f"{given(c, *_PREFILL_OPTIONS)[0]} needs --r-node, and --partition sequences: whole sequences move "
            "between R-nodes of two S-nodes"
        ),
    ),
    _Check(
        lambda c: c.role == "r" and c.device == "cuda" and given(c, *_HOST_OPTIONS),
        lambda c: (
            f"{given(c, *_HOST_OPTIONS)[0]} is for an R-node on CPUs: with --device cuda a GPU holds the pages and "
            "attends"
        ),
    ),
    _Check(
        lambda c: c.tensor_parallel > 1 and given(c, *_NOT_OF_RANKS),
        lambda c: f"--tensor-parallel and {given(c, *_NOT_OF_RANKS)[0]} are not supported together",
    ),
    _Check(
        lambda c: c.tensor_parallel > 1 and c.device == "cuda",
        lambda c: "--tensor-parallel is for S-Parts on CPUs: no --device cuda",
    ),
    _Check(
        lambda c: c.tensor_parallel > 1 and c.weights == "int4" and not c.no_calibration,
        lambda c: (
            "--tensor-parallel and --weights int4 need --no-calibration, since ranks do not round by a text: "
            "--save-weights, without ranks, saves a model that they read"
        ),
    ),
    _Check(
        lambda c: c.save_weights is not None and c.weights not in ("int8", "int4"),
        lambda c: "--save-weights needs --weights int8 or int4, which round the weights",
    ),
    _Check(
        lambda c: c.cpus is not None and c.threads is not None and len(c.cpus) != c.threads,
        lambda c: f"--cpus names {len(c.cpus or ())} cpus for --threads {c.threads}",
    ),
    _Check(
        lambda c: c.max_batch_size > c.step_rows,
        lambda c: "--max-batch-size is larger than --max-batch-tokens: every sequence needs a row",
    ),
)


def check_options(config: NodeOptions) -> None:
    """Raise ConfigError for the first fault."""
    for f in dataclasses.fields(config):
        if config.role not in f.metadata["role"] and getattr(config, f.name) != f.default:
            raise ConfigError(f"{flag(f.name)} is not an option of --role {config.role}")
    for name, most in _MOST.items():
        if (getattr(config, name) or 0) > most:
            raise ConfigError(f"{flag(name)} is at most {most}")
    for check in _CHECKS:
        if check.holds(config):
            raise ConfigError(check.message(config))


def check_machine(config: NodeOptions) -> None:
    """Raise ConfigError for an option that asks for memory or cpus that this machine does not have, or for a new
    directory that exists. The node calls this at start alone, because it makes such a directory itself later."""
    wanted, total = config.kv_memory or 0, total_memory()
    if config.huge_pages == "hugetlb":  # the pool of huge pages has a limit of its own
        pool = huge_pages()
        needed = -(-max(wanted, 1) // pool.size) if pool.size else 1
        if needed > pool.free and not config.uses_r_nodes:
            raise ConfigError(
                f"--huge-pages hugetlb: {needed} huge pages are needed and {pool.free} are free: "
                f"set vm.nr_hugepages to {pool.total - pool.free + needed} or more"
            )
    elif wanted > total and (config.role, config.device) != ("r", "cuda"):
        raise ConfigError(
            f"--kv-memory {format_bytes(wanted)} is more than the {format_bytes(total)} that this process may use"
        )
    if missing := set(config.cpus or ()).difference(usable_cpus()):
        raise ConfigError(f"--cpus: {min(missing)} is not a cpu that this process may use")
    known = [node.number for node in numa_nodes()]
    if config.numa_node is not None and config.numa_node not in known:
        there = ", ".join(map(str, known)) or "none"
        raise ConfigError(f"--numa-node: there is no NUMA node {config.numa_node}, there are: {there}")
    if config.save_weights is not None and config.save_weights.exists():
        raise ConfigError(
            f"--save-weights {config.save_weights}: this exists already; if an earlier start saved its weights there, "
            f"--model {config.save_weights} without --weights takes them"
        )


def given(config: NodeOptions, *names: str) -> list[str]:
    """The flags of these options that differ from their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    return [flag(name) for name in names if getattr(config, name) != defaults[name]]
