"""Rotational pipelining (Lamina, arXiv 2405.01814, "rotational staggered pipelining") in closed form.

n mini-batches run over m S-nodes that share R-nodes. Layer by layer a mini-batch needs an S-node, then the R-nodes. If
n is a multiple of m, each mini-batch stays at one S-node: n = m and n = 2 m are what S-nodes with one or two
mini-batches of their own do. Else the mini-batches rotate: layer k of mini-batch j runs on S-node (j + k) mod m, and
its hidden states go to the next S-node while the R-nodes attend. Lamina's case is n = m + 1. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastdecode.plan.equations import System, Work, part_times


class HandOver(NamedTuple):
    """The way of hidden states from one S-node to the next."""

    latency: float
    gbps: float  # GB/s; the rows for the R-nodes leave an S-node by the same wire


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`mini_batches` equal mini-batches over `s_nodes` S-nodes that share R-nodes. The times are those of one
    mini-batch in one layer."""

    s_nodes: int
    mini_batches: int
    s_part: float  # T(B) of FastDecode, a fixed part and a part for each row
    r_part: float  # by all R-nodes together
    out: float = 0.0  # Q, K and V on the S-node's wire
    back: float = 0.0  # O on the way back
    latency: float = 0.0  # of the link, there and back
    hand_over_wire: float = 0.0  # hidden states on the S-node's wire, if the mini-batches rotate
    hand_over_latency: float = 0.0

    @property
    def rotates(self) -> bool:
        """True if the mini-batches do not divide evenly among the S-nodes, so that they must go from one to another."""
        return self.mini_batches % self.s_nodes != 0

    @property
    def alone(self) -> float:
        """A layer of a mini-batch with nothing beside it: S-Part, way out, then R-Part and way back, or the hand-over
        if that takes longer. The residual stream is complete before the rows are posted, so both happen at once."""
        attended = self.latency + self.r_part + self.back
        handed_over = self.hand_over_latency + self.hand_over_wire if self.rotates else 0.0
        return self.s_part + self.out + max(attended, handed_over)

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds in which all mini-batches can do a layer, by what they share or wait for. Each S-node has
        n / m mini-batches a layer, the R-nodes have n."""
        share = self.mini_batches / self.s_nodes
        sent = self.out + (self.hand_over_wire if self.rotates else 0.0)
        return {
            "S-Part": share * self.s_part,
            "R-Part": self.mini_batches * self.r_part,
            "wire": share * max(sent, self.back),
            "one mini-batch": self.alone,
        }

    @property
    def binding(self) -> str:
        """What bounds the pace."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def period(self) -> float:
        """Seconds in which every mini-batch does a layer.

        With nothing but S-Part and R-Part, n = m + 1 and t_R = t_S / m this is t_S + t_R, and neither side idles:
        Lamina's condition.
        """
        return max(self.bounds.values())

    @property
    def s_idle(self) -> float:
        """The share of time in which an S-node has nothing to compute."""
        return 1 - self.bounds["S-Part"] / self.period

    @property
    def r_idle(self) -> float:
        """The share of time in which the R-nodes have nothing to attend."""
        return 1 - self.bounds["R-Part"] / self.period


def pipeline(
    system: System, batch: float, length: float, s_nodes: int, mini_batches: int, hand_over: HandOver
) -> Pipeline:
    """`batch` decoding sequences of `length` cached tokens over `system.r_nodes` R-nodes and `s_nodes` S-nodes.

    Each node has a machine of its own. The embedding, the LM head and the engine's work for a step count evenly among
    the layers.
    """
    layers, rows = system.model.n_layers, batch / mini_batches
    parts = part_times(system, Work(rows, rows * system.model.read_tokens(length)))
    overlap = parts.overlap if mini_batches > s_nodes else 1.0
    return Pipeline(
        s_nodes=s_nodes,
        mini_batches=mini_batches,
        s_part=(overlap * parts.s_part + parts.engine) / layers,
        r_part=parts.r_part / layers,
        out=parts.wire / layers,
        back=parts.back / layers,
        latency=parts.latency / layers,
        hand_over_wire=rows * system.model.hidden_bytes / (1e9 * hand_over.gbps),
        hand_over_latency=hand_over.latency,
    )


def most_gain(s_nodes: int) -> float:
    """The most that m + 1 rotating mini-batches gain over the better of m and 2 m that stay: (m - 1) / m^2.

    With a fixed number of sequences, t_S = a + b rows and no time on the way, let P be the period and f = a n / (m P)
    the share of the S-Part that does not depend on rows. Beside two mini-batches an S-node rotation saves (m - 1) / m
    of a, a gain of f (n - 2) / n; beside one mini-batch an S-node it gains (1 - f m / n) / m in balance, and less out
    of balance. Both are equal at f = n / m^2.
    """
    return (s_nodes - 1) / s_nodes**2
