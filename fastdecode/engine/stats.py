"""What an engine shows of itself in /metrics and /health."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdecode.engine.state.totals import Totals


class EngineObserver:
    """Called for single events, to fill histograms. This one does nothing.

    The calls come from the event loop, so they must not block or raise. Times are in seconds.
    """

    def started(self, queue_seconds: float) -> None:
        """A request was scheduled for the first time."""

    def first_token(self, seconds: float) -> None:
        """Time to first token, from submit."""

    def inter_token(self, seconds: float, n: int) -> None:
        """Time between two tokens of one request, for `n` tokens of a step."""

    def finished(self, prompt_tokens: int, generated_tokens: int) -> None:
        """A request ended, was cancelled or failed."""

    def step(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` rows completed `seconds` after it was handed to the S-Part."""


#: An interval of a step: (slot, number, asked, replied, ended); see Interval of spart/decoder/timeline.py.
StepInterval = tuple[int, int, float, float, float]


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One R-node as the S-node sees it."""

    url: str
    node: str
    isa: str
    threads: int
    alive: bool
    pages_total: int  # pages of the lease
    pages_max: int  # pages that the lease could have, as the R-node said last
    pages_used: int  # pages in use, excluding evictable prefix-cache pages
    sequences: int
    load: int  # tokens that its running sequences will have cached at most
    page_bytes: int  # of one KV page, for the layers of one section
    region_bytes: int  # of the link's activation region
    attention_seconds: float  # time its R-engine has worked for this S-node, as of the last refresh
    kv_bytes_read: int  # as of the last refresh
    calls: int  # layers of steps, as of the last refresh
    rows: int  # rows of these calls
    roofline: int  # bytes a second at which the R-node's threads can read memory; 0: it has not measured that
    answer_seconds: float  # time that the last refresh took, over the control connection; 0 before the first
    draining: bool = False  # it takes no new sequences, because it is to leave
    member: str = ""  # "1/2": it holds the first half of each sequence's heads, as a member of a team


@dataclass(slots=True)
class EngineStats:
    """A snapshot. `running` and `waiting` count sequences."""

    running: int
    waiting: int
    kv_usage: float  # pages used / pages that the leases of all live R-nodes could have, 0..1
    nodes: list[NodeStats] = field(default_factory=list)
    cut_sequences: int = 0  # running sequences on the S-Part's device whose first tokens are on an R-node
    exchange: str = ""  # how rows pass between the S-Part and the R-nodes, and why not in a faster way
    totals: Totals = field(default_factory=Totals)
    #: Rows that each expert has had, by the layer; empty for models without experts.
    expert_load: dict[int, list[int]] = field(default_factory=dict)
