"""What this process may use of the machine: cores and memory, as its affinity mask and its cgroup allow."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus() -> list[int]:
    """The cpus this process may run on; fewer where the cgroup's quota allows less time than they have."""
    cpus = sorted(os.sched_getaffinity(0))
    quota = _cpu_quota()
    if quota is not None:
        cpus = cpus[: max(1, int(quota))]
    return cpus


def available_memory() -> int:
    """Bytes this process can take without swapping: the least of the host's and its cgroups' (v1, v2) free memory."""
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
    """Page cache counts as used in memory.current, yet the kernel gives it back on demand."""
    try:
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return max(0, used - int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return used


def _cgroup_dirs() -> list[Path]:
    """This process's cgroup v2 directory and its ancestors: every one of their limits holds."""
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
