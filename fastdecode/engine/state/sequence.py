"""One request's state, from submit to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fastdecode.engine.state.guesser import Guesser
from fastdecode.engine.state.pages import PageTable
from fastdecode.engine.state.prefixes import CachedSequence, Handle
from fastdecode.engine.state.request import OutletChoice, Output, SamplingParams

if TYPE_CHECKING:
    from fastdecode.engine.state.constraints import TokenConstraints
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.pages import Page
    from fastdecode.engine.state.prefixes import PrefixEntry
    from fastdecode.engine.state.states import SequenceState
    from fastdecode.spart.step.batch import Chunk, Sampled, SampleSpec, TokenScore
    from fastdecode.spart.step.penalties import LogitRules


class PlannedChunk(NamedTuple):
    """The tokens of one sequence in a step: [seq.cached, seq.cached + n_tokens)."""

    seq: Sequence
    n_tokens: int
    prefill: bool  # True: attended on the S-node. False: on the R-node (decode, and the suffix behind a shared prefix)
    sample: bool  # False: more of the prompt follows
    guesses: tuple[int, ...] = ()  # the last tokens of the chunk; `seq.tokens` does not have them


class KVSource(NamedTuple):
    """K and V that a sequence adopts: those at a key of an R-node."""

    node: RNodeLedger
    key: str


@dataclass(frozen=True, slots=True)
class SpilledPrefix:
    """The first `length` tokens of a sequence on the S-Part's device, which lie on an R-node."""

    node: RNodeLedger
    handle: Handle
    pages: PageTable
    length: int  # of whole pages

    def release(self) -> None:
        """Let the next FREE name the sequence `handle`."""
        self.node.end_running(self.length)
        self.node.release(CachedSequence(self.handle, self.pages))


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and, while it runs, where it is cached. Sequences are compared and hashed by identity.

    The last token of `tokens` is cached one step after the step that generated it. So a sequence that decodes has
    `cached == len(tokens) - 1`, and a sequence that ends has used at most the pages of `len(tokens) - 1` tokens. A
    sequence that has just migrated may have fewer cached tokens; its next step computes the others.
    """

    request_id: str
    order: int  # arrival number
    tokens: list[int]  # the prompt, then the generated tokens
    n_prompt: int
    max_new: int  # tokens it may generate: at most its max_tokens, and what the context and the KV-cache have room for
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]
    request: int | None = None  # the arrival number of the first choice of its request; None: it is the only choice
    hashes: list[bytes] = field(default_factory=list)  # prefixes.page_hashes of the prompt; empty: it shares no prefix
    rules: LogitRules | None = None  # None: the parameters have neither a bias nor a penalty
    constraints: TokenConstraints | None = None  # None: every token is allowed
    long: bool = False  # see SPart.is_long
    key: str | None = None  # at which R-nodes keep its K and V for another S-node; None: none may adopt them
    adopts: KVSource | None = None  # K and V that it adopts when it is placed
    prefill_locally: bool = False  # this S-node computes its prompt, not a prefill S-node (migration/prefill_client.py)
    salt: str = ""  # only sequences with equal salts share cached prefixes: an adapter or RoPE changes K and V
    adapter: int | None = None  # its LoRA adapter, as an index into the model's; None: the base model

    # Set by Cluster.admit, cleared by Cluster.release.
    node: RNodeLedger | None = None
    handle: Handle = Handle(0, 0)
    pages: PageTable = field(default_factory=PageTable)
    prefix: SpilledPrefix | None = None  # None: `node` has all of its tokens
    state: SequenceState | None = None  # None: the model's layers keep no states
    mean_length: float = 0.0  # cached tokens that it was expected to have on average when it was placed
    entry: PrefixEntry | None = None  # its own prefix entry, while it runs
    source: PrefixEntry | None = None  # the prefix entry whose first `shared_tokens` tokens it shares
    shared_tokens: int = 0

    # While it waits.
    passed_over: int = 0  # sequences behind it that started before it
    awaited: tuple[RNodeLedger, PrefixEntry] | None = None  # the entry in prefill whose prefix it waits for

    # Progress, written by the scheduler.
    mini_batch: int | None = None  # None: it waits or has ended
    #: Its tokens are in a step that has not completed, or its FORK, adoption or remote prefill is under way.
    in_flight: bool = False
    key_due: bool = False  # its R-node gets its key once a step has cached all of its tokens but the last one drawn
    migrating: bool = False  # a migration is under way: it gives back no pages
    frozen: bool = False  # it is left out of steps, because it is about to change its R-node or its S-node
    cancelled: bool = False  # to be released as soon as it is not in flight
    cached: int = 0  # tokens cached on the R-node
    #: Pages that no later row sees and that its step in flight gives back; None: the step looks for none.
    given_back: list[Page] | None = None
    overrun: bool = False  # the R-node has tokens beyond the `cached` ones: guesses that were wrong
    guesser: Guesser = field(default_factory=Guesser)
    prefill_end: int = 0  # tokens to cache before it decodes: all it had when it was placed
    #: The chunk of each step in which it decodes one token; None: no step has, since it was placed or migrated. The
    #: chunk names the sequence, so it is dropped when the sequence leaves its R-node.
    decoding: PlannedChunk | None = None
    #: The S-Part's form of that chunk, and the SampleSpec within it (engine/step_batch.py).
    reusable: tuple[Chunk, SampleSpec] | None = None

    # Output and times, written by the engine. Times are of the engine's clock, in seconds.
    output: Output = lambda event: None
    choice: OutletChoice | None = None  # `output`, if it is an OutletChoice
    arrived: float = 0.0
    started: float | None = None  # first scheduled
    last_token: float | None = None
    prompt_scores: list[TokenScore] = field(default_factory=list)  # of the prompt's tokens from the second one on
    reused: int = 0  # prompt tokens that the prefix cache had when it was first placed

    @property
    def placed_on(self) -> RNodeLedger:
        """`node` of a sequence that runs. Raises RuntimeError for one that does not."""
        if self.node is None:
            raise RuntimeError(f"request {self.request_id} is not placed on an R-node")
        return self.node

    @property
    def cut(self) -> int:
        """The tokens of `prefix`."""
        return 0 if self.prefix is None else self.prefix.length

    def has_prefix_on(self, node: RNodeLedger) -> bool:
        return self.prefix is not None and self.prefix.node is node

    @property
    def places(self) -> list[RNodeLedger]:
        """The R-nodes and the device that have its K and V while it runs."""
        return [self.placed_on] if self.prefix is None else [self.placed_on, self.prefix.node]

    @property
    def lost(self) -> bool:
        """True if a part of the K and V of a sequence that runs is lost."""
        return not (self.placed_on.alive and (self.prefix is None or self.prefix.node.alive))

    @property
    def priority(self) -> int:
        """Sequences of a lower number go first."""
        return self.params.priority

    @property
    def client(self) -> str:
        """The client that sent the request. Clients get fair shares, and outputs of one client are assumed to have
        similar lengths."""
        return self.params.client

    @property
    def paused(self) -> bool:
        """True if it waits while its R-node keeps its cache."""
        return self.mini_batch is None and self.node is not None

    def leave_node(self) -> None:
        """Record that the sequence shares no pages with others on its R-node, which it leaves."""
        self.entry = self.source = None
        self.shared_tokens = 0
        self.decoding = self.reusable = None
        self.overrun = False

    def forget_cache(self) -> None:
        """Record that no R-node caches the sequence any more: it must be recomputed, and its state with it."""
        self.leave_node()
        self.node, self.pages = None, PageTable()
        if self.prefix is not None:
            self.prefix.release()
            self.prefix = None
        if self.state is not None:
            self.state.give_back()
            self.state = None
        self.cached = self.prefill_end = 0
        self.given_back = None

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prefill_end

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def final_length(self) -> int:
        """Tokens it will have unless an end token ends it sooner."""
        return self.n_prompt + self.max_new

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens.append(token)
        if self.rules is not None:
            self.rules.generated(token)
        if self.constraints is not None:
            self.constraints.generated(token)

    def decodes_on(self, drawn: Sampled) -> bool:
        """Record a step that has decoded one token and drawn the next, if the sequence simply continues: on the same
        R-node, with the same pages. False: nothing is recorded."""
        tokens, node, token = self.tokens, self.node, drawn.token
        if self.cancelled or self.given_back is not None or node is None or not node.alive or drawn.error is not None:
            return False
        if self.prefix is not None and not self.prefix.node.alive:
            return False
        if token in self.end_tokens or len(tokens) - self.n_prompt + 1 >= self.max_new:
            return False
        self.cached += 1
        if self.rules is None and self.constraints is None:
            tokens.append(token)
        else:
            self.append(token)
        return True

    def finish_reason(self) -> str | None:
        """The reason why the last token of `tokens` ends the sequence, "stop" or "length"; None: more tokens follow."""
        tokens = self.tokens
        if tokens[-1] in self.end_tokens:
            return "stop"
        return "length" if len(tokens) - self.n_prompt >= self.max_new else None
