"""Colocation: what the S-Part and the R-nodes of one machine cost each other, as measured. A section of a profile.

S-Part and R-nodes share the machine's cores, caches and memory. Attention that reads a KV-cache evicts the weights from
the caches, so the S-Part reads them from memory in each layer; the S-Part evicts the KV-cache in turn. R-nodes on the
same cores share the cores' memory bandwidth. S-Part and R-Part slow each other down when they run at the same time:
their overlap hides less of the shorter one than it would on two machines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocation:
    """One measurement: decoding steps over full caches, S-Part and R-nodes on one machine.

    Raises ValueError for numbers that cannot be.
    """

    r_nodes: int
    kv_dtype: str
    group: int  # query heads for each KV head
    kv_bytes: float  # that a step of a mini-batch reads
    #: Seconds of the step in which R-nodes had the rows, the S-Part's layers in between.
    waited: float
    layers: int
    carried: float  # bytes of the rows on their way there and back, all layers
    parameters: float  # weights of the model that was measured
    rows: int  # of a mini-batch
    s_part: float  # seconds that the S-Part of a step of `rows` rows takes, attention between its layers
    #: S-Part and R-Part side by side: the share of the shorter one's time that overlap does not hide. 0: as on two
    #: machines, 1: as in turns.
    lost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("r_nodes", "group", "kv_bytes", "waited", "layers", "carried", "parameters", "rows", "s_part"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of `colocations` is {getattr(self, name)!r}; it must be a positive number")
        if not 0 <= self.lost <= 1:
            raise ValueError(f"lost of `colocations` is {self.lost!r}; it is between 0 and 1")

    @property
    def case(self) -> tuple[int, str, int, int, float]:
        """What was measured: two measurements of one case can be compared."""
        return self.r_nodes, self.kv_dtype, self.group, self.rows, self.kv_bytes

    def kv_gbps(self, layer_seconds: float, row_seconds: float) -> float:
        """GB/s at which all R-nodes together read the cache. The rows' way and the work on them, `row_seconds` for each
        byte, are not reading. At least half of the waiting is, so that a link that was measured too slow cannot make
        the reading too fast."""
        way = self.layers * layer_seconds + self.carried * row_seconds
        return self.kv_bytes / max(self.waited - way, 0.5 * self.waited) * 1e-9


class ColocationCost(NamedTuple):
    """What S-Part and R-nodes cost each other in a step."""

    kv_gbps: float  # of all R-nodes together
    s_extra: float  # seconds that the S-Part takes longer than with next to nothing cached
    lost: float  # see Colocation


def colocation_cost(
    cells: Sequence[Colocation],
    kv_dtype: str,
    r_nodes: int,
    kv_bytes: float,
    cell_cost: Callable[[Colocation], ColocationCost],
) -> ColocationCost:
    """The cost in a step that reads `kv_bytes`; `cell_cost` gives the cost in a measurement. All `cells` have one GQA
    group.

    Between two measured sizes the cost is interpolated by the logarithm of the size; beyond them it is the cost at the
    nearest size. A number of R-nodes that was measured with another format only changes the cost of one R-node by the
    same ratio and the same difference as in that format. Raises ValueError if the format was not measured with one
    R-node.
    """
    same = [cell for cell in cells if (cell.kv_dtype, cell.r_nodes) == (kv_dtype, r_nodes)]
    if same:
        return _interpolated(same, kv_bytes, cell_cost)
    if r_nodes == 1:
        raise ValueError(f"S-Part and attention over {kv_dtype} were not measured together")
    one = colocation_cost(cells, kv_dtype, 1, kv_bytes, cell_cost)
    several = [cell for cell in cells if cell.r_nodes > 1]
    if not several:
        return one
    nearest = min(several, key=lambda c: (abs(c.r_nodes - r_nodes), abs(math.log(c.kv_bytes / kv_bytes))))
    base, many = colocation_cost(cells, nearest.kv_dtype, 1, nearest.kv_bytes, cell_cost), cell_cost(nearest)
    return ColocationCost(
        one.kv_gbps * many.kv_gbps / base.kv_gbps,
        max(0.0, one.s_extra + many.s_extra - base.s_extra),
        min(1.0, max(0.0, one.lost + many.lost - base.lost)),
    )


def _interpolated(
    cells: Sequence[Colocation], kv_bytes: float, cell_cost: Callable[[Colocation], ColocationCost]
) -> ColocationCost:
    cells = sorted(cells, key=lambda c: c.kv_bytes)
    below = next((c for c in reversed(cells) if c.kv_bytes <= kv_bytes), cells[0])
    above = next((c for c in cells if c.kv_bytes >= kv_bytes), cells[-1])
    span = math.log(above.kv_bytes / below.kv_bytes)
    fraction = math.log(kv_bytes / below.kv_bytes) / span if span > 0 else 0.0

    def mean(a: float, b: float) -> float:
        return a + fraction * (b - a)

    # Times add up, so the mean of speeds is that of the seconds for a byte.
    a, b = cell_cost(below), cell_cost(above)
    return ColocationCost(1 / mean(1 / a.kv_gbps, 1 / b.kv_gbps), mean(a.s_extra, b.s_extra), mean(a.lost, b.lost))


def fastest(profiles: Sequence[Sequence[Colocation]]) -> tuple[Colocation, ...]:
    """The best figures of several measurements of the same cases: other work can only have made one slower."""
    best: dict[tuple[int, str, int, int, float], Colocation] = {}
    for cell in (cell for cells in profiles for cell in cells):
        other = best.get(cell.case, cell)
        best[cell.case] = dataclasses.replace(
            cell,
            waited=min(cell.waited, other.waited),
            s_part=min(cell.s_part, other.s_part),
            lost=min(cell.lost, other.lost),
        )
    return tuple(best.values())
