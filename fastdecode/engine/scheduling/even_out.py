"""Evens out the steps of mini-batches. A sequence may change its mini-batch at no cost: its cache stays where it is."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.queue import BY_RANK
from fastdecode.engine.scheduling.rtime import Groups, Loads
from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from fastdecode.engine.state.sequence import Sequence

#: The share of a step that a change must save.
_LEAST_GAIN = 0.02


def even_out(batches: Seq[list[Sequence]], source: int, groups: Groups, costs: Seq[float], max_batch_size: int) -> bool:
    """Put sequences of the mini-batch `source`, which has no step in flight, into mini-batches of shorter steps; True
    if any sequence has changed its mini-batch.

    The length of a step is its predicted R-Part. In it, every sequence counts one page more than it has, for the work
    of its row. Each change takes the sequence of the slowest R-node that evens out two mini-batches best. An unfinished
    prompt stays, so that no mini-batch gets a second one. `groups` and `costs`: see rtime.Loads; `max_batch_size`
    bounds a mini-batch.
    """
    loads = [_loads(batch, groups, len(costs)) for batch in batches]
    seconds = [load.seconds(costs) for load in loads]
    changed = False
    while True:
        open_ones = [i for i, batch in enumerate(batches) if i != source and len(batch) < max_batch_size]
        target = min(open_ones, key=seconds.__getitem__, default=source)
        surplus = (seconds[source] - seconds[target]) / 2
        if surplus <= 0:
            return changed
        slowest = max(range(len(costs)), key=lambda node: sum(loads[source].tokens[node]) * costs[node])
        candidates = [s for s in batches[source] if not s.prefilling and s.placed_on.position == slowest]
        if not candidates:
            return changed
        seq = min(candidates, key=lambda s: abs(surplus - _row_tokens(s) * costs[slowest] * loads[source].n_layers))
        loads[source].add(slowest, _row_tokens(seq), -1)
        loads[target].add(slowest, _row_tokens(seq))
        after = loads[source].seconds(costs), loads[target].seconds(costs)
        if max(after) > (1 - _LEAST_GAIN) * seconds[source]:
            return changed
        seconds[source], seconds[target] = after
        batches[source].remove(seq)
        insort(batches[target], seq, key=BY_RANK)
        seq.mini_batch = target
        changed = True


def _loads(batch: list[Sequence], groups: Groups, n_nodes: int) -> Loads:
    loads = Loads(groups, [[0.0] * len(groups) for _ in range(n_nodes)])
    for seq in batch:
        loads.add(seq.placed_on.position, _row_tokens(seq))
    return loads


def _row_tokens(seq: Sequence) -> int:
    """A sequence's cost in a step, as a number of cached tokens."""
    return seq.cached + PAGE_TOKENS
