"""`fastdecode-node --check`: a report of the machine as the node sees it."""

from __future__ import annotations

import os
import platform
import resource
from contextlib import closing
from typing import TYPE_CHECKING

from fastdecode import __version__
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import available_memory, huge_pages, node_of_rank, numa_nodes, usable_cpus, usable_nodes
from fastdecode.daemon.option_values import format_bytes
from fastdecode.kernels import _native
from fastdecode.transports import rdma_endpoint

if TYPE_CHECKING:
    import torch

    from fastdecode.spart.backend import Backend


def report(config: NodeConfig) -> str:
    """The report as text for users: a name and a value on each line.

    Raises ConfigError, or ValueError or OSError with a sentence, for a model that cannot be served.
    """
    from fastdecode.daemon.device_plan import node_device

    device = node_device(config)
    rows = [
        ("fastdecode", f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"),
        ("cores", f"{len(usable_cpus())} usable of {os.cpu_count()}"),
        ("memory", f"{format_bytes(available_memory())} available"),
        ("ISA", _isa()),
        ("NUMA", _numa()),
        ("huge pages", _huge_pages()),
        ("memlock", _memlock()),
        ("GPU", _gpu()),
        *([("exchange", _exchange(config, device))] if config.role == "s" else []),
        *([("ranks", ranks)] if config.role == "s" and device.type == "cpu" and (ranks := _ranks(config)) else []),
        ("RDMA", rdma_endpoint.report()),
    ]
    if config.model is not None:
        from fastdecode.daemon import check_model
        from fastdecode.daemon.api_settings import ApiSettings
        from fastdecode.daemon.model_checks import node_backend
        from fastdecode.spart.checkpoints.config_file import open_source

        source = open_source(config.model_path())
        ApiSettings.make(config, source)  # raises what a node would raise
        backend = node_backend(config, source)
        rows += check_model.rows(config, backend)
        if config.role == "s" and not config.uses_r_nodes and (split := _split(config, backend, device)):
            rows.append(("split", split))
    return "\n".join(f"{name:<11} {value}".replace("\n", f"\n{'':<11} ") for name, value in rows)


def _isa() -> str:
    forced = os.environ.get("FASTDECODE_ISA")
    supported = _native.isa_supported()
    if forced is None:
        return f"{_native.isa_best()} (kernels for {', '.join(supported)})"
    verdict = "set by FASTDECODE_ISA" if forced in supported else "set by FASTDECODE_ISA, but this CPU lacks it"
    return f"{forced} {verdict} (kernels for {', '.join(supported)})"


def _numa() -> str:
    nodes = (
        f"node {n.number}: {len(n.cpus)} cpu(s), {format_bytes(n.free)} free (without huge pages)" for n in numa_nodes()
    )
    return "\n".join(nodes) or "not supported by this kernel"


def _ranks(config: NodeConfig) -> str | None:
    """Where the ranks of an S-Part on CPUs compute; None for one process on one NUMA node."""
    n, nodes = config.tensor_parallel, len(usable_nodes())
    if n == 1:
        advice = f"1, on the cpus of {nodes} NUMA nodes; --tensor-parallel {nodes} would give each node a rank"
        return advice if nodes > 1 else None
    if bound := [node.number for rank in range(n) if (node := node_of_rank(rank, n))]:
        return ", ".join(f"rank {rank} on NUMA node {number}" for rank, number in enumerate(bound))
    return f"{n}, on any of the cpus" + (f": {nodes} NUMA nodes cannot have equally many" if nodes > 1 else "")


def _huge_pages() -> str:
    pages = huge_pages()
    hugetlb = f"{pages.free} of {pages.total} free, {format_bytes(pages.size)} each" if pages.size else "not supported"
    return f"transparent: {pages.transparent or 'not supported'}; hugetlb: {hugetlb}"


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def _exchange(config: NodeConfig, device: torch.device) -> str:
    from fastdecode.daemon.device_plan import node_exchange

    with closing(node_exchange(config, device, config.mini_batches or 2)) as exchange:
        return str(exchange)


def _split(config: NodeConfig, backend: Backend, device: torch.device) -> str | None:
    """The split of the cpus; None with a GPU."""
    from fastdecode.daemon import tuning
    from fastdecode.daemon.weights import parameters
    from fastdecode.spart import choose_dtype

    if device.type != "cpu":
        return None
    dtype = choose_dtype(config.dtype, backend.config.dtype, device)
    return tuning.report(config, backend, dtype, parameters(backend))


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"none (torch {torch.__version__})"
    names = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return ", ".join(f"{p.name}, {format_bytes(p.total_memory)}" for p in names) + f" (torch {torch.__version__})"
