"""The split: how a machine's cores are divided between the S-Part and the embedded R-node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import numa_nodes, usable_cpus

#: A model of fewer parameters has no product that more threads compute sooner; while they wait for the next one, they
#: take the cores from the API process and the R-node.
SMALL_MODEL = 1 << 20


@dataclass(frozen=True, slots=True)
class Split:
    """The division of a machine's cores between the S-Part and the embedded R-node."""

    s_threads: int
    r_threads: int  # 0 without an embedded R-node
    mini_batches: int
    in_turns: bool = False  # both parts have more threads than there are cores, and take turns on them
    s_on_gpu: bool = False  # the embedded R-node has the cores for itself

    def __str__(self) -> str:
        how, plural = ("in turns", "") if self.mini_batches == 1 else ("side by side", "es")
        threads = f"{self.s_threads} + {self.r_threads} threads"
        return f"{how}, {threads}, {self.mini_batches} mini-batch{plural}"

    def for_model(self, config: NodeConfig, parameters: int) -> Split:
        """The division for a model with this number of parameters, on a CPU: one for small models, or this one."""
        if parameters >= SMALL_MODEL or config.s_threads is not None or config.tensor_parallel > 1:
            return self
        cpus = usable_cpus()
        if config.uses_r_nodes or config.threads or config.cpus or config.numa_node is not None or len(cpus) == 1:
            return replace(self, s_threads=1)
        return Split(1, len(cpus) - 1, self.mini_batches)


def split_machine(config: NodeConfig, *, s_on_gpu: bool) -> Split:
    """Choose the threads of both parts and the number of mini-batches, where the command line leaves them open.

    On a CPU both parts take turns on all cores, with one mini-batch, also if options name these numbers. Two
    mini-batches of half the size would read the weights twice, and with half of the cores each part would take twice as
    long. With --tune auto an S-node measures at start whether another split is faster (tuning.py).

    The parts work side by side if the S-Part runs on a GPU, if the command line gives one of the parts its own cores,
    or if it asks for more mini-batches. The embedded R-node then gets half of the cores (rounded down, at least one),
    or all cores but one if the S-Part runs on a GPU; bound to a NUMA node, it gets at most the cores of that node.
    """
    cores = max(1, len(usable_cpus()) // config.tensor_parallel)  # of each rank
    if config.uses_r_nodes:
        return Split(config.s_threads or cores, 0, config.mini_batches or 2)
    named = {config.threads, config.s_threads} - {None}
    side_by_side = named - {cores} or config.cpus or config.numa_node is not None
    if not s_on_gpu and not side_by_side and (config.mini_batches or 1) == 1:
        return Split(cores, cores, 1, in_turns=True)
    r_threads = config.threads or (len(config.cpus) if config.cpus else None)
    if r_threads is None:
        r_threads = max(1, cores - 1 if s_on_gpu else cores // 2)
        if config.numa_node is not None:
            r_threads = min(
                [r_threads, *(len(n.cpus) for n in numa_nodes() if n.number == config.numa_node and n.cpus)]
            )
    s_threads = config.s_threads or max(1, cores - r_threads)
    in_turns = not s_on_gpu and s_threads + r_threads > cores
    return Split(s_threads, r_threads, config.mini_batches or 2, in_turns, s_on_gpu=s_on_gpu)
