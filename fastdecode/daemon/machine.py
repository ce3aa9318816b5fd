"""The cores and the memory that this process may use, as its affinity mask and its cgroups allow."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node of the machine. `free` is its free memory in bytes; page cache counts as free."""

    number: int
    cpus: tuple[int, ...]
    free: int


def parse_cpu_list(text: str, limit: int = 1 << 16) -> tuple[int, ...]:
    """ "0-3,8" -> (0, 1, 2, 3, 8); "" -> (). Raises ValueError for bad syntax, and for a cpu number >= `limit`."""
    cpus: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if span.stop > limit:
            raise ValueError(f"{text!r}: cpus are numbered 0 to {limit - 1}")
        cpus.extend(span)
    return tuple(cpus)


def numa_nodes(sysfs: Path = _SYSFS) -> list[NumaNode]:
    """The NUMA nodes that are online, also nodes with memory but no cpus. Empty if the kernel has no NUMA support."""
    root = sysfs / "devices" / "system" / "node"
    try:
        online = parse_cpu_list((root / "online").read_text().strip())
    except (OSError, ValueError):
        return []
    nodes = []
    for number in online:
        directory = root / f"node{number}"
        cpus = parse_cpu_list((directory / "cpulist").read_text().strip())
        lines = (directory / "meminfo").read_text().splitlines()  # "Node 0 MemFree:  123 kB"
        fields = {line.split()[2].rstrip(":"): int(line.split()[3]) * 1024 for line in lines}
        free = fields["MemFree"] + fields["Active(file)"] + fields["Inactive(file)"]
        nodes.append(NumaNode(number, cpus, free))
    return nodes


def node_of_rank(rank: int, n_ranks: int) -> NumaNode | None:
    """The NUMA node whose cpus a rank of --tensor-parallel has to itself and the other ranks of the node. None if all
    usable cpus are of one node, or their nodes cannot have equally many ranks."""
    nodes = usable_nodes()
    return nodes[rank * len(nodes) // n_ranks] if len(nodes) > 1 and n_ranks % len(nodes) == 0 else None


def usable_nodes() -> list[NumaNode]:
    """The NUMA nodes with cpus that this process may use."""
    usable = os.sched_getaffinity(0)
    return [node for node in numa_nodes() if usable.intersection(node.cpus)]


def stay_on_node(rank: int, n_ranks: int) -> None:
    """Let this thread, and the threads that it starts from now on, run on the cpus of the rank's NUMA node alone.

    Memory that they touch first then lies on the node while it has room. Binding memory would need a privilege.
    """
    if (node := node_of_rank(rank, n_ranks)) is not None:
        os.sched_setaffinity(0, os.sched_getaffinity(0).intersection(node.cpus))


@dataclass(frozen=True, slots=True)
class HugePages:
    """The machine's huge pages.

    `transparent` is the kernel's setting for transparent huge pages, or None without support. `size` is the size of a
    hugetlb page in bytes, `total` the number of pages in the pool, and `free` the number that are neither used nor
    reserved.
    """

    transparent: str | None
    size: int
    total: int
    free: int


def huge_pages(sysfs: Path = _SYSFS) -> HugePages:
    """Read the huge-page settings and the hugetlb pool of the default page size."""
    try:
        setting = (sysfs / "kernel" / "mm" / "transparent_hugepage" / "enabled").read_text()
        transparent = setting[setting.find("[") + 1 : setting.find("]")]
    except OSError:
        transparent = None
    try:
        size = _meminfo("Hugepagesize")
    except RuntimeError:
        return HugePages(transparent, 0, 0, 0)
    pool = sysfs / "kernel" / "mm" / "hugepages" / f"hugepages-{size // 1024}kB"
    total, unused, reserved = (_read_int(pool / f"{name}_hugepages") or 0 for name in ("nr", "free", "resv"))
    return HugePages(transparent, size, total, max(0, unused - reserved))


def usable_cpus() -> list[int]:
    """The cpus that this process may run on, cut to the number of cpus that its cgroup's time quota pays for."""
    cpus = sorted(os.sched_getaffinity(0))
    quota = _cpu_quota()
    if quota is not None:
        cpus = cpus[: max(1, int(quota))]
    return cpus


def cpu_model() -> str:
    """The name of the processor, or of its architecture where the kernel does not tell the name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def busy_seconds(cpus: Iterable[int]) -> float:
    """The time that `cpus` have computed since the machine was started, or that a hypervisor has given to others."""
    names, ticks = {f"cpu{cpu}" for cpu in cpus}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *times = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, *others = map(int, times[:8])  # guests' time is part of user and nice
            ticks += user + nice + system + sum(others)
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Seconds of computation of this process, of its children, and of its children that have ended."""
    ticks = 0
    for pid in [os.getpid(), *_children()]:
        with contextlib.suppress(OSError):  # a child that has ended
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
            ticks += sum(map(int, times))  # utime and stime, and those of its own ended children
    return ticks / os.sysconf("SC_CLK_TCK")


def _children() -> list[int]:
    pids: list[int] = []
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            pids += map(int, listing.read_text().split())
    return pids


def total_memory() -> int:
    """Bytes of memory that this process may use in all: the minimum over the host and its cgroups (v1, v2)."""
    limits = [_read_int(directory / "memory.max") for directory in _cgroup_dirs()]
    limits.append(_read_int(_CGROUP_ROOT / "memory" / "memory.limit_in_bytes"))
    return min([_meminfo("MemTotal"), *(limit for limit in limits if limit is not None)])


def available_memory() -> int:
    """Bytes that this process can allocate without swapping: the minimum over the host and its cgroups (v1, v2)."""
    free = [_meminfo("MemAvailable")]
    for directory in _cgroup_dirs():
        limit = _read_int(directory / "memory.max")
        used = _read_int(directory / "memory.current")
        if limit is not None:
            free.append(max(0, limit - _unreclaimable(directory, used or 0)))
    limit = _read_int(_CGROUP_ROOT / "memory" / "memory.limit_in_bytes")
    used = _read_int(_CGROUP_ROOT / "memory" / "memory.usage_in_bytes")
    if limit is not None and limit < 1 << 60:
        free.append(max(0, limit - (used or 0)))
    return min(free)


def _unreclaimable(directory: Path, used: int) -> int:
    """`used` bytes of a cgroup without page cache, which memory.current counts but the kernel can reclaim."""
    try:
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return max(0, used - int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return used


def _cgroup_dirs() -> list[Path]:
    """This process's cgroup v2 directory and its ancestors; the limits of all of them apply."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            hierarchy, _, path = line.split(":", 2)
            if hierarchy == "0":
                leaf = _CGROUP_ROOT / path.lstrip("/")
                return [d for d in (leaf, *leaf.parents) if d.is_relative_to(_CGROUP_ROOT)]
    except (OSError, ValueError):
        pass
    return []


def _cpu_quota() -> float | None:
    quotas = []
    for directory in _cgroup_dirs():
        try:
            quota, period = (directory / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            quotas.append(int(quota) / int(period))
    quota_us = _read_int(_CGROUP_ROOT / "cpu" / "cpu.cfs_quota_us")
    period_us = _read_int(_CGROUP_ROOT / "cpu" / "cpu.cfs_period_us")
    if quota_us and period_us and quota_us > 0:
        quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {field}")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
