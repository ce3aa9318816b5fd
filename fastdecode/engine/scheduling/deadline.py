"""How long an R-node may take for a layer before its link counts as dead.

TCP reports a peer whose machine is gone. It does not report a data path that has gone silent while something on the way
still acknowledges, so the S-node judges by the time that a layer should take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.plan import Plan

#: Seconds that an R-node may take besides its work: its cores may be busy with other processes.
SLACK_S = 10.0

#: An R-node may take this multiple of its predicted time: it serves other S-nodes too, in turns.
_MARGIN = 20

#: Bytes a second of an R-node that has not been measured yet: a slow one's.
_UNMEASURED = 1e9


def layer_deadline(plan: Plan, n_layers: int) -> float:
    """Seconds within which each R-node answers a layer of `plan`, or takes the step.

    The prediction is generous: the slowest R-node does all of the step's work, each row that attends on an R-node reads
    the cache by itself, and each sequence copies a page that it shares with another.
    """
    work = 2 * PAGE_TOKENS * n_layers * len(plan.chunks)  # tokens to read or write in a layer
    for seq, n_tokens, prefill, _, _ in plan.chunks:
        work += n_tokens if prefill else n_tokens * (seq.cached + n_tokens + 1)
    nodes = {chunk.seq.placed_on for chunk in plan.chunks}
    nodes |= {chunk.seq.prefix.node for chunk in plan.chunks if chunk.seq.prefix is not None}
    slowest = max(node.token_bytes / (node.bandwidth.bytes_per_second or _UNMEASURED) for node in nodes)
    return SLACK_S + _MARGIN * work * slowest / n_layers
