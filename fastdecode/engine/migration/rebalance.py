"""Chooses running sequences that move to another R-node, because a step waits for theirs.

Sequences end at different times, and an R-node that joins is empty, so loads that were even become uneven. A step
reads a sequence's cache once at its R-node. A move reads it there once more and writes it once at the other R-node, so
it pays within a few steps, but only if steps wait for that R-node: what the S-Part covers costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.sequence import Sequence as RunningSequence

#: The slowest R-node must take longer than even loads would by this part, for a first move and for further ones.
_FIRST, _FURTHER = 0.25, 0.1

#: Tokens that a sequence must at least have to come.
_LEAST_REST = 32


def choose_move(
    sequences: Iterable[tuple[int, float]],
    groups: tuple[tuple[int, int], ...],
    costs: Sequence[float],
    open_nodes: Sequence[int],
    covered: float,
    excess: float,
) -> list[tuple[int, int]]:
    """The sequences that might move and where to, as (index, R-node), the best first; none if no move pays.

    `sequences` have the R-node of each and its cached tokens. `groups` and `costs` (seconds a token and layer): see
    rtime.Loads. The S-Part covers `covered` seconds of a step's R-Part; `excess` is the part by which the slowest
    R-node must exceed what it would take with even loads.
    """
    placed = list(sequences)
    seconds = [0.0] * len(costs)
    sizes = [_token_layers(length, groups) for _, length in placed]
    for (node, _), size in zip(placed, sizes, strict=True):
        seconds[node] += size * costs[node]
    slow = max(range(len(costs)), key=seconds.__getitem__)
    targets = [node for node in open_nodes if node != slow]
    if not targets or slow not in open_nodes:  # one that is drained is emptied anyway
        return []
    even = sum(sizes) / sum(1 / costs[node] for node in open_nodes)
    if seconds[slow] <= max(covered, (1 + excess) * even):
        return []
    target = min(targets, key=seconds.__getitem__)

    def slower(i: int) -> float:
        """The slower of the two R-nodes after a move."""
        return max(seconds[slow] - sizes[i] * costs[slow], seconds[target] + sizes[i] * costs[target])

    candidates = [i for i, (node, _) in enumerate(placed) if node == slow and slower(i) < seconds[slow]]
    return [(i, target) for i in sorted(candidates, key=slower)]


def _token_layers(length: float, groups: tuple[tuple[int, int], ...]) -> float:
    return sum(layers * (min(length, window) if window else length) for window, layers in groups)


class Rebalancer:
    """Chooses the next move of a scheduler's sequences."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._cluster = scheduler, scheduler.cluster
        self._moving = False

    def next_move(self, movable: Iterable[RunningSequence]) -> list[tuple[RunningSequence, int]]:
        """The sequences of `movable` of which one should move, and the R-node of each, the best first."""
        scheduler, nodes = self._scheduler, self._cluster.nodes
        s_part = scheduler.step_times.s_part
        single = [node for node in nodes if node.open and len(node.link.members) == 1]
        if s_part is None or len(single) < 2 or any(not n.bandwidth.bytes_per_second for n in single if n.n_sequences):
            return []
        running, allowed = scheduler.running, set(movable)
        moves = choose_move(
            [(seq.placed_on.position, seq.cached) for seq in running],
            self._cluster.loads.groups,
            self._cluster.costs,
            [node.position for node in single],
            s_part * len(scheduler.mini_batches),
            _FURTHER if self._moving else _FIRST,
        )
        found = [
            (running[i], target)
            for i, target in moves
            if running[i] in allowed and running[i].final_length - len(running[i].tokens) >= _LEAST_REST
        ]
        self._moving = bool(found)
        return found
