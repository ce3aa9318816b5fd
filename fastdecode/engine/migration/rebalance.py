"""Chooses running sequences that migrate to another R-node, because steps wait for their R-node.

Sequences end at different times, and an R-node that joins is empty, so loads that were even become uneven. A step
reads a sequence's cache once. A migration reads it once more and writes it once on the other R-node, so it pays within
a few steps, but only if steps wait for the R-node: an R-Part that the S-Part covers costs no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.rtime import Groups
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.sequence import Sequence as RunningSequence

#: The slowest R-node must take longer than even loads would by this share, for a first migration and for further ones.
_FIRST, _FURTHER = 0.25, 0.1

#: A sequence that has fewer tokens to come does not migrate.
_LEAST_TOKENS_LEFT = 32


def choose_migrations(
    sequences: Iterable[tuple[int, float]],
    groups: Groups,
    costs: Sequence[float],
    open_nodes: Sequence[int],
    covered: float,
    excess: float,
) -> list[tuple[int, int]]:
    """The migrations that would pay, as (index of the sequence, target R-node), the best first.

    `sequences` has the R-node and the cached tokens of each sequence. `groups` and `costs` (seconds a token and layer):
    see rtime.Loads. The S-Part covers `covered` seconds of a step's R-Part. `excess` is the share by which the slowest
    R-node must exceed its time with even loads.
    """
    placed = list(sequences)
    seconds = [0.0] * len(costs)
    sizes = [_token_layers(length, groups) for _, length in placed]
    for (node, _), size in zip(placed, sizes, strict=True):
        seconds[node] += size * costs[node]
    slow = max(range(len(costs)), key=seconds.__getitem__)
    targets = [node for node in open_nodes if node != slow]
    if not targets or slow not in open_nodes:  # a draining R-node is emptied anyway
        return []
    even = sum(sizes) / sum(1 / costs[node] for node in open_nodes)
    if seconds[slow] <= max(covered, (1 + excess) * even):
        return []
    target = min(targets, key=seconds.__getitem__)

    def slower(i: int) -> float:
        """Seconds of the slower of the two R-nodes after a migration."""
        return max(seconds[slow] - sizes[i] * costs[slow], seconds[target] + sizes[i] * costs[target])

    candidates = [i for i, (node, _) in enumerate(placed) if node == slow and slower(i) < seconds[slow]]
    return [(i, target) for i in sorted(candidates, key=slower)]


def _token_layers(length: float, groups: Groups) -> float:
    return sum(layers * reads.tokens(length) for reads, layers in groups)


class Rebalancer:
    """Chooses the next migration among a scheduler's sequences."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._cluster = scheduler, scheduler.cluster
        self._migrating = False

    def next_migrations(self, candidates: Iterable[RunningSequence]) -> list[tuple[RunningSequence, int]]:
        """Candidates of which one should migrate, each with its target R-node, the best first."""
        scheduler, nodes = self._scheduler, self._cluster.nodes
        s_part = scheduler.step_times.s_part
        single = [node for node in nodes if node.open and len(node.link.links) == 1]
        if s_part is None or len(single) < 2 or any(not n.bandwidth.bytes_per_second for n in single if n.n_sequences):
            return []
        running, allowed = [seq for seq in scheduler.running if not seq.placed_on.resident], set(candidates)
        migrations = choose_migrations(
            [(seq.placed_on.position, seq.cached) for seq in running],
            self._cluster.loads.groups,
            self._cluster.costs,
            [node.position for node in single],
            s_part * len(scheduler.mini_batches),
            _FURTHER if self._migrating else _FIRST,
        )
        found = [
            (running[i], target)
            for i, target in migrations
            if running[i] in allowed and running[i].final_length - len(running[i].tokens) >= _LEAST_TOKENS_LEFT
        ]
        self._migrating = bool(found)
        return found
