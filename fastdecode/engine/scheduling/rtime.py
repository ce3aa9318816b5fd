"""The predicted time of the R-Part, and the distribution of sequences over R-nodes that keeps it short.

A layer of a step ends when its slowest R-node has answered. So the R-Part of a step takes the sum over the layers of
the slowest R-node's bytes divided by its bandwidth. A layer with a sliding window reads a sequence up to that window,
and one that selects tokens reads these and the index keys of all, so layers that read alike make a group. Pure
arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fastdecode.spart.shape import LayerReads

#: What a row reads in a layer of each group, and the number of its layers.
Groups = tuple[tuple[LayerReads, int], ...]


@dataclass(slots=True)
class Loads:
    """Tokens to read on each R-node in each group of layers: `tokens[node][group]`."""

    groups: Groups
    tokens: list[list[float]] = field(default_factory=list)

    @property
    def n_layers(self) -> int:
        return sum(layers for _, layers in self.groups)

    def add(self, node: int, length: float, sign: int = 1) -> None:
        """Add (or with `sign` -1 take away) a sequence of `length` tokens."""
        row = self.tokens[node]
        for i, (reads, _) in enumerate(self.groups):
            row[i] += sign * reads.tokens(length)

    def seconds(self, costs: Sequence[float]) -> float:
        """The R-Part of a step over these loads. `costs` has each R-node's seconds a token and layer."""
        return sum(
            layers * max(row[i] * cost for row, cost in zip(self.tokens, costs, strict=True))
            for i, (_, layers) in enumerate(self.groups)
        )

    def evenness(self, costs: Sequence[float]) -> float:
        """Sum over the R-nodes of their own time squared: tells apart two loads with the same slowest R-node."""
        layers = [n for _, n in self.groups]
        return sum(
            (cost * sum(n * tokens for n, tokens in zip(layers, row, strict=True))) ** 2
            for row, cost in zip(self.tokens, costs, strict=True)
        )


def layer_groups(layers: Iterable[LayerReads]) -> Groups:
    """The groups of a model with these layers."""
    return tuple(sorted(Counter(layers).items()))


def assign(
    loads: Loads, costs: Sequence[float], lengths: Sequence[float], allowed: Sequence[Sequence[int]]
) -> list[int]:
    """Distribute sequences of `lengths` tokens over R-nodes beside `loads`, so that the R-Part of a step is short.

    `allowed` lists for each sequence the R-nodes that have room for it, at least one. Longest first, each goes where it
    lengthens the step least; then single changes and exchanges of two are made as long as they shorten the step.
    Returns each sequence's R-node. `loads` is unchanged.
    """
    work = Loads(loads.groups, [row[:] for row in loads.tokens])
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    chosen = [-1] * len(lengths)
    for i in order:
        chosen[i] = min(allowed[i], key=lambda node: _score_with(work, costs, [(i, -1, node)], lengths))
        work.add(chosen[i], lengths[i])
    best = work.seconds(costs), work.evenness(costs)
    for _ in range(4 * len(lengths)):
        changes = [[(i, chosen[i], node)] for i in order for node in allowed[i] if node != chosen[i]]
        changes += [
            [(i, chosen[i], chosen[j]), (j, chosen[j], chosen[i])]
            for i in order
            for j in order
            if i < j and chosen[i] != chosen[j] and chosen[j] in allowed[i] and chosen[i] in allowed[j]
        ]
        if not changes:
            break
        scores = [_score_with(work, costs, change, lengths) for change in changes]
        score = min(scores)
        if score >= (best[0] * (1 - 1e-9), best[1]):
            break
        best = score
        for i, source, target in changes[scores.index(score)]:
            work.add(source, lengths[i], -1)
            work.add(target, lengths[i])
            chosen[i] = target
    return chosen


def _score_with(
    loads: Loads, costs: Sequence[float], changes: list[tuple[int, int, int]], lengths: Sequence[float]
) -> tuple[float, float]:
    """The R-Part of a step, and its evenness, after `changes` of (sequence, from R-node or -1, to R-node)."""
    for i, source, target in changes:
        if source >= 0:
            loads.add(source, lengths[i], -1)
        loads.add(target, lengths[i])
    score = loads.seconds(costs), loads.evenness(costs)
    for i, source, target in changes:
        if source >= 0:
            loads.add(source, lengths[i])
        loads.add(target, lengths[i], -1)
    return score
