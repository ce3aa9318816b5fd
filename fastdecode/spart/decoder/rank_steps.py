"""The steps of a tensor-parallel S-Part: rank 0 schedules them, the others follow.

Each step's batch goes to the other ranks as rank 0 begins it. With several mini-batches, rank 0 also tells which step
it resumes: the ranks must meet at the same sum, and the order in which R-nodes answer differs between ranks. A rank
whose link has failed goes on without the link's rows, so that the other ranks do not wait for it. From the first step
on, ranks that wait for a message watch the thread that computes in rank 0, as they do in a sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn, TypeAlias

import msgspec
import torch
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import asdict

from fastdecode.spart.decoder.decoder import SPart
from fastdecode.spart.decoder.step_rows import StepRows
from fastdecode.spart.decoder.weights import Model
from fastdecode.spart.ranks.reduction import RankError, Reduction
from fastdecode.spart.step.batch import Chunk, Sampled, SampleSpec, ScoreSpec, StepBatch, StepOutput
from fastdecode.transports.base import DataPath, Pending, StepCost
from fastdecode.transports.rank_team import LinkFailure, RankTeam, described, restored

_ANY_SAMPLE = SampleSpec(temperature=0.0)


class RankChunk(msgspec.Struct, array_like=True):
    """What a rank that draws no tokens needs to know of a Chunk."""

    link: int
    seq_index: int
    tag: int
    pos: int
    tokens: list[int]
    prefill: bool
    sample: bool  # a token is drawn after the chunk
    prompt_length: int
    score: ScoreSpec | None
    adapter: int | None
    drafts: int
    trim: bool
    long: bool
    state: int
    states_after: tuple[tuple[int, int], ...]
    following: int | None
    slide: bool

    @classmethod
    def of(cls, chunk: Chunk) -> RankChunk:
        """The message for a chunk of rank 0."""
        values = {name: getattr(chunk, name) for name in cls.__struct_fields__}
        return cls(**values | {"sample": chunk.sample is not None})

    @property
    def chunk(self) -> Chunk:
        """The chunk for another rank."""
        return Chunk(**asdict(self) | {"sample": _ANY_SAMPLE if self.sample else None})


class PrepareSteps(msgspec.Struct, array_like=True, tag=True):
    """Make what steps need; the first step comes later. See SPart."""

    state_slots: int


class BeginStep(msgspec.Struct, array_like=True, tag=True):
    """Begin a step."""

    slot: int
    layer_timeout: float
    chunks: list[RankChunk]
    links: dict[int, tuple[int, ...]]  # by the index of each link of the batch: its number at each of the other ranks
    alone: bool  # no other step can be in progress: run it to its end
    drafts: int  # see StepBatch


class ResumeStep(msgspec.Struct, array_like=True, tag=True):
    """Go on with the step of a slot, up to its next yield."""

    slot: int


class CloseStep(msgspec.Struct, array_like=True, tag=True):
    """Close the step of a slot, which the runner has given up."""

    slot: int


class DropPrompt(msgspec.Struct, array_like=True, tag=True):
    """See SPart.drop."""

    link: int
    seq_index: int
    tag: int


class BalanceHeads(msgspec.Struct, array_like=True, tag=True):
    """Let balance_for find the matrices of the rank's heads (fastdecode/spart/int4/balance.py)."""

    kv_dtype: str
    tokens: list[int]


StepMessage: TypeAlias = PrepareSteps | BeginStep | ResumeStep | CloseStep | DropPrompt | BalanceHeads


class RankOutput(msgspec.Struct, array_like=True):
    """A rank's result of a step, by the index of each link; empty after BalanceHeads."""

    failures: dict[int, LinkFailure] = {}
    costs: dict[int, StepCost] = {}


class Followers:
    """The connections to the threads in which the other ranks compute, from rank 1 on."""

    def __init__(self, connections: Sequence[Connection], lost: Callable[[BaseException], NoReturn]):
        """`lost` ends the process, because a step has failed for good by this error."""
        self._connections, self.lost = connections, lost
        self._encoder, self._decoder = Encoder(), Decoder(RankOutput)
        self._lock = threading.Lock()  # the event loop drops prompts while the S-Part's thread runs steps

    def send(self, message: StepMessage) -> None:
        with self._lock:
            data = self._encoder.encode(message)
            for connection in self._connections:
                connection.send_bytes(data)

    def balance(self, kv_dtype: str, tokens: Sequence[int]) -> None:
        """Let the other ranks do what BalanceHeads says; `ended` waits for them."""
        self.send(BalanceHeads(kv_dtype, list(tokens)))

    def ended(self, reduction: Reduction) -> list[RankOutput]:
        """Wait until all have ended the step that rank 0 has ended. Raises RankError, EOFError."""
        received = [reduction.receive(connection, i) for i, connection in enumerate(self._connections, 1)]
        return [self._decoder.decode(data) for data in received]


class LeadSPart(SPart):
    """The S-Part of rank 0."""

    _goes_on = True

    def __init__(self, model: Model, links: Sequence[DataPath], followers: Followers, state_slots: int = 0):
        super().__init__(model, links, state_slots=state_slots)
        self._followers = followers
        followers.send(PrepareSteps(state_slots))

    def step(self, batch: StepBatch, keep_logits: bool = False) -> Generator[Pending, float | None, StepOutput]:
        teams = {i: self.links[i] for i in {chunk.link for chunk in batch.chunks}}
        numbers = {i: team.numbers for i, team in teams.items() if isinstance(team, RankTeam)}
        alone = all(team.geometry.n_slots == 1 for team in teams.values())
        chunks = [RankChunk.of(chunk) for chunk in batch.chunks]
        self._followers.send(BeginStep(batch.slot, batch.layer_timeout, chunks, numbers, alone, batch.drafts))
        step, idle_since = super().step(batch, keep_logits), None
        reduction = self.model.reduction
        assert reduction is not None
        try:
            while True:
                idle_since = yield step.send(idle_since)
                if not alone:
                    self._followers.send(ResumeStep(batch.slot))
        except StopIteration as end:
            output: StepOutput = end.value
        except GeneratorExit:
            self._followers.send(CloseStep(batch.slot))
            step.close()
            raise
        except BaseException as error:
            reduction.leave()  # the other ranks wait in this step
            self._followers.lost(error)
        try:
            others = self._followers.ended(reduction)
        except (RankError, EOFError) as error:
            self._followers.lost(error)
        for ended in others:
            for i, failure in ended.failures.items():
                output.failures.setdefault(teams[i], restored(failure, teams[i]))
            for i, cost in ended.costs.items():
                if teams[i] in output.link_costs:
                    output.link_costs[teams[i]] = StepCost.of_members([output.link_costs[teams[i]], cost])
        output.link_costs = {link: cost for link, cost in output.link_costs.items() if link not in output.failures}
        output.kv_bytes = sum(cost.kv_bytes for cost in output.link_costs.values())
        return output

    def drop(self, link: int, seq_index: int, tag: int) -> None:
        super().drop(link, seq_index, tag)
        self._followers.send(DropPrompt(link, seq_index, tag))


@dataclass(slots=True)
class _Step:
    """A step that a rank follows."""

    work: Generator[Pending, float | None, StepOutput]
    alone: bool
    links: dict[int, DataPath]

    def advance(self) -> StepOutput | None:
        """Go on with the step, up to its next yield. Returns the output of a step that has ended."""
        try:
            next(self.work)
            while self.alone:
                next(self.work)
        except StopIteration as end:
            output: StepOutput = end.value
            return output
        return None

    def ended(self, output: StepOutput) -> RankOutput:
        index = {link: i for i, link in self.links.items()}
        return RankOutput(
            {index[link]: described(error) for link, error in output.failures.items()},
            {index[link]: cost for link, cost in output.link_costs.items()},
        )


class FollowingSPart(SPart):
    """The S-Part of another rank than 0."""

    _goes_on = True

    def __init__(self, model: Model, rank: int):
        self._own_links: list[DataPath] = []
        super().__init__(model, self._own_links)
        self._rank = rank

    def _prepare(self, state_slots: int) -> None:
        """Wait for PrepareSteps."""

    def _draw(self, logits: torch.Tensor, rows: StepRows) -> list[Sampled]:
        return [Sampled(-1) for _ in range(rows.n_drawn)]

    def follow(
        self, lead: Connection, links: Mapping[int, DataPath], balance: Callable[[str, list[int]], None]
    ) -> None:
        """Run the steps of rank 0 until it closes the connection. `links` by their numbers at this rank; `balance` does
        what BalanceHeads asks for. Raises what steps raise."""
        steps: dict[int, _Step] = {}
        decoder, encoder = Decoder(StepMessage), Encoder()
        receive: Callable[[], bytes] = lead.recv_bytes
        reduction = self.model.reduction
        assert reduction is not None
        while True:
            try:
                message = decoder.decode(receive())
            except EOFError:
                return
            if isinstance(message, PrepareSteps):
                super()._prepare(message.state_slots)
                continue
            if isinstance(message, DropPrompt):
                self.drop(message.link, message.seq_index, message.tag)
                continue
            if isinstance(message, BalanceHeads):
                balance(message.kv_dtype, message.tokens)
                lead.send_bytes(encoder.encode(RankOutput()))
                continue
            if isinstance(message, BeginStep):
                receive = partial(reduction.receive, lead, 0)
                own = {i: links[numbers[self._rank - 1]] for i, numbers in message.links.items()}
                self._use(own)
                chunks = [one.chunk for one in message.chunks]
                work = self.step(StepBatch(message.slot, chunks, message.layer_timeout, message.drafts))
                step = steps[message.slot] = _Step(work, message.alone, own)
            else:
                step = steps[message.slot]
            if isinstance(message, CloseStep):
                step.work.close()
            elif (output := step.advance()) is not None:
                lead.send_bytes(encoder.encode(step.ended(output)))

    def _use(self, links: dict[int, DataPath]) -> None:
        """Let the links of rank 0 with these indexes be these of this rank."""
        for i, link in links.items():
            while len(self._own_links) <= i:
                self._own_links.append(link)
            self._own_links[i] = link
