"""How long an R-node may take for a layer before its link counts as dead.

TCP reports a peer whose machine is gone. It does not report a data path that has gone silent while something on the way
still acknowledges, so the S-node judges by the time that a layer should take.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from fastdecode.engine.ledger import RNodeLedger
    from fastdecode.engine.scheduling.plan import Plan

#: Seconds that an R-node has beyond its work: its cores may be busy with other processes.
SLACK_S = 10.0

#: An R-node may take so many times its predicted time: it serves other S-nodes too, in turns.
_MARGIN = 20

#: Bytes a second of an R-node that has not been measured yet: a slow one's.
_UNMEASURED = 1e9


def layer_deadline(plan: Plan, n_layers: int) -> float:
    """Seconds within which each R-node answers a layer of `plan`, or takes the step.

    The prediction is generous: each row that attends on the R-node is taken to read the cache by itself, and each
    sequence to copy a page that it shares with another.
    """
    work: defaultdict[RNodeLedger, int] = defaultdict(int)  # tokens to read or write in a layer
    for seq, n_tokens, prefill, *_ in plan.chunks:
        attended = 0 if prefill else n_tokens * (seq.cached + n_tokens)
        work[seq.placed_on] += n_tokens + attended + 2 * PAGE_TOKENS * n_layers
    slowest = max(
        tokens * node.token_bytes / n_layers / (node.bandwidth.bytes_per_second or _UNMEASURED)
        for node, tokens in work.items()
    )
    return SLACK_S + _MARGIN * slowest
