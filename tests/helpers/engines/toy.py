"""An S-Part without weights over R-nodes without attention, for tests of the scheduler and the engine.

The toy model's next token is a hash of all the tokens its R-node has cached, so a lost, doubled or foreign row changes
the output; its R-nodes check handles, positions and pages as the real ones do.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections import Counter
from types import SimpleNamespace

from fastdecode.region.contract import PAGE_TOKENS, Status, blocks_for
from fastdecode.spart.shape import LayerReads
from fastdecode.spart.step.batch import Sampled, StepOutput
from fastdecode.transports.base import CallRefused, LinkDown, StepCost

VOCAB = 1000
TOKENS: dict[str, tuple[ToyLink, tuple[int, int]]] = {}  # of RECEIVEs: where the sequence goes
KEYS: dict[str, tuple[ToyLink, tuple[int, int]]] = {}  # of KEEPs: the sequence that has the key
POISON = VOCAB - 1  # a prompt that ends with it has no next token


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(repr(tokens).encode()) % POISON


def continuation(prompt: list[int], n: int, ends: frozenset[int] = frozenset()) -> list[int]:
    """The toy model's continuation of a prompt: at most n tokens, up to the first of `ends`."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + n:
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class ToyLink:
    resident = False

    def __init__(self, url="tcp://toy", n_pages=1000, max_seqs=64, n_slots=4, max_rows=512, max_pages=0):
        """`pool` pages of the R-node are free for a lease that grows to at most `max_pages`."""
        self.url = url
        self.peer_url = None
        self.pool = max_pages
        self.pages = n_pages
        self.resizes: list[int] = []
        self.resizing = asyncio.Event()  # RESIZEs; cleared, they wait
        self.resizing.set()
        self.members = (SimpleNamespace(link=self),)
        self.links = (self,)
        self.region_bytes = 8192
        self.geometry = SimpleNamespace(n_slots=n_slots, max_rows=max_rows)
        self.lease = SimpleNamespace(
            n_pages=n_pages,
            max_pages=max(n_pages, max_pages),
            max_seqs=max_seqs,
            page_bytes=4096,
            isa="toy",
            threads=1,
            node=url.removeprefix("tcp://"),
            full_sections=1,
            limited_sections=0,
            reach=0,
        )
        self.cache: dict[int, tuple[int, list[int]]] = {}  # sequence index -> tag, tokens
        self.held: dict[int, list[object]] = {}  # sequence index -> its pages; a FORK shares them
        self.frames: list[list[tuple[int, int]]] = []  # FREEs
        self.dead = False
        self.refuse_forks = False
        self.forks = 0
        self.fork_asked = asyncio.Event()
        self.forking = asyncio.Event()  # FORKs; cleared, they wait
        self.forking.set()
        self.answering = asyncio.Event()  # FREEs; cleared, they wait
        self.answering.set()
        self.refuse_adoptions = False
        self.adopting = asyncio.Event()  # ADOPTs; cleared, they wait
        self.adopting.set()
        self.refuse_pushes = False
        self.pushes: list[tuple[range, int]] = []
        self.pushed = asyncio.Event()
        self.pushing = asyncio.Event()  # PUSHes of whole pages; cleared, they wait
        self.finishing = asyncio.Event()  # PUSHes of the rest
        self.pushing.set()
        self.finishing.set()
        self._closed = asyncio.get_running_loop().create_future()

    def append(self, chunk) -> None:
        self.check_alive()
        if chunk.pos == 0:
            if chunk.seq_index in self.cache:
                raise CallRefused(Status.BAD_SEQUENCE, f"sequence {chunk.seq_index} is in use", self)
            self.cache[chunk.seq_index], self.held[chunk.seq_index] = (chunk.tag, []), []
        tag, tokens = self.cache.get(chunk.seq_index, (None, []))
        if tag != chunk.tag or len(tokens) != chunk.pos:
            raise CallRefused(Status.BAD_SEQUENCE, f"sequence {chunk.seq_index}: tag or position", self)
        pages = self.held[chunk.seq_index]
        if len(tokens) % PAGE_TOKENS and sum(pages[-1] in held for held in list(self.held.values())) > 1:
            pages[-1] = object()  # a page that is shared is copied before it is written
        tokens += chunk.tokens
        pages += [object() for _ in range(blocks_for(len(tokens)) - len(pages))]
        if len({page for held in list(self.held.values()) for page in held}) > self.pages:
            raise CallRefused(Status.OUT_OF_PAGES, "no page left", self)

    def check_alive(self) -> None:
        if self.dead:
            raise LinkDown(f"{self.url}: connection lost", self)

    def kill(self, *, silently: bool = False) -> None:
        """Lose the peer; with `silently`, only the next use of the link notices."""
        self.dead = True
        if not silently and not self._closed.done():
            self._closed.set_result(LinkDown(f"{self.url}: connection lost"))

    async def free(self, handles) -> None:
        self.frames.append(list(handles))
        await asyncio.sleep(0.001)
        await self.answering.wait()
        self.check_alive()
        unknown = [(seq_index, tag) for seq_index, tag in handles if self.cache.get(seq_index, (None,))[0] != tag]
        for seq_index, _ in set(handles) - set(unknown):
            del self.cache[seq_index], self.held[seq_index]
        if unknown:
            raise CallRefused(Status.BAD_SEQUENCE, f"nothing to free for {unknown}")

    async def fork(self, src, dst, length) -> None:
        await asyncio.sleep(0.001)
        self.fork_asked.set()
        await self.forking.wait()
        self.check_alive()
        if self.refuse_forks:
            raise CallRefused(Status.BAD_SEQUENCE, "no forks today")
        tag, tokens = self.cache.get(src[0], (None, []))
        if tag != src[1] or dst[0] in self.cache or not 1 <= length <= len(tokens):
            raise CallRefused(Status.BAD_SEQUENCE, f"cannot fork {src} to {dst}")
        self.cache[dst[0]] = (dst[1], tokens[:length])
        self.held[dst[0]] = self.held[src[0]][: blocks_for(length)]
        self.forks += 1

    async def admit_migration(self, seq, length, token) -> None:
        await asyncio.sleep(0.001)
        self.check_alive()
        if seq[0] in self.cache:
            raise CallRefused(Status.BAD_SEQUENCE, f"sequence {seq[0]} is in use")
        self.cache[seq[0]], self.held[seq[0]] = (seq[1], []), [object() for _ in range(blocks_for(length))]
        if len({page for held in list(self.held.values()) for page in held}) > self.pages:
            raise CallRefused(Status.OUT_OF_PAGES, "no page left")
        TOKENS[token] = self, seq

    async def migrate(self, seq, pages, length, url, token) -> None:
        self.check_alive()
        self.pushes.append((pages, length))
        self.pushed.set()
        tag, tokens = self.cache[seq[0]]
        whole = tokens[: length or pages.stop * PAGE_TOKENS]  # these do not change while they are sent
        await asyncio.sleep(0.001)
        await (self.finishing if length else self.pushing).wait()
        self.check_alive()
        if self.refuse_pushes:
            raise CallRefused(Status.INTERNAL, "no pushes today")
        target, (seq_index, target_tag) = TOKENS[token]
        if target.url != url or target.dead or tag != seq[1] or target.cache.get(seq_index, (None,))[0] != target_tag:
            raise CallRefused(Status.INTERNAL, "the target is gone")
        assert tokens[: len(whole)] == whole and pages.stop * PAGE_TOKENS <= len(tokens) + PAGE_TOKENS * bool(length)
        there = target.cache[seq_index][1]
        there[pages.start * PAGE_TOKENS :] = whole[pages.start * PAGE_TOKENS :]
        if length:
            del there[length:]
            assert len(there) == length
            del target.held[seq_index][blocks_for(length) :]

    async def keep(self, sequences) -> None:
        await asyncio.sleep(0.001)
        self.check_alive()
        for seq_index, tag, key in sequences:
            for old in [key for key, place in KEYS.items() if place == (self, (seq_index, tag))]:
                del KEYS[old]
            if key is not None:
                assert key not in KEYS and len(key) == 64
                KEYS[key] = self, (seq_index, tag)

    def kept(self, key, length) -> list[int] | None:
        """The tokens at a key of this R-node, to which this link and others with its URL lead."""
        link, (seq_index, tag) = KEYS.get(key, (None, (0, 0)))
        if link is None or link.url != self.url:
            return None
        kept_tag, tokens = link.cache.get(seq_index, (None, []))
        return tokens[:length] if kept_tag == tag and len(tokens) >= length else None

    async def find(self, key, length) -> bool:
        await asyncio.sleep(0.001)
        self.check_alive()
        return self.kept(key, length) is not None

    async def adopt(self, seq, length, key) -> None:
        await self.adopting.wait()
        self.check_alive()
        tokens = self.kept(key, length)
        if self.refuse_adoptions or tokens is None or seq[0] in self.cache:
            raise CallRefused(Status.BAD_SEQUENCE, "no adoptions today")
        del KEYS[key]
        self.cache[seq[0]], self.held[seq[0]] = (seq[1], tokens), [object() for _ in range(blocks_for(length))]

    async def resize(self, n_pages) -> dict:
        self.resizes.append(n_pages)
        await asyncio.sleep(0.001)
        await self.resizing.wait()
        self.check_alive()
        granted = max(0, min(n_pages - self.pages, self.pool, self.lease.max_pages - self.pages))
        self.pages, self.pool = self.pages + granted, self.pool - granted
        return await self.stats()

    async def stats(self) -> dict:
        self.check_alive()
        counters = {"pages_total": self.pages, "pages_max": min(self.pages + self.pool, self.lease.max_pages)}
        return {"calls": 3, "busy_ns": 2_000_000_000, "kv_bytes": 5} | counters

    async def closed(self) -> LinkDown | None:
        return await asyncio.shield(self._closed)


class ToySPart:
    """`steps` counts the steps begun. Clear `gate` to hold every step between its post and its reply."""

    def __init__(self, links, *, max_positions=4096, eos=frozenset(), state_slots=None):
        self.links, self.adapters, self.expert_load, self.exchange = list(links), (), {}, "direct"
        self.config = SimpleNamespace(
            max_positions=max_positions, eos_token_ids=eos, vocab_size=VOCAB, reads=(LayerReads(),) * 2, mtp=0
        )
        self.state_slots = state_slots
        self.states: dict[int, list[int]] = {}  # slot -> the tokens that its state has seen
        self.staged: dict[tuple[int, int, int], int] = {}  # handle -> tokens of an unfinished prompt
        self.gate = threading.Event()
        self.gate.set()
        self.posted = threading.Event()
        self.steps = 0
        self.s_seconds = 0.25  # of each step
        self.seconds_per_token: float | None = None  # of the R-nodes' attention; None: it is not reported
        self.fault: Exception | None = None  # raised once, by the next step to be answered
        self.early_fault: Exception | None = None  # raised once, by the next step, before anything is posted

    def is_long(self, final_length):
        return False

    def step(self, batch, keep_logits=False):
        self.steps += 1
        if self.early_fault is not None:
            self.early_fault, fault = None, self.early_fault
            raise fault
        for chunk in batch.chunks:
            handle = (chunk.link, chunk.seq_index, chunk.tag)
            if chunk.prefill:
                assert self.staged.pop(handle, 0) == chunk.pos, "the prompt's earlier K/V is not staged"
                if chunk.sample is None:
                    self.staged[handle] = chunk.pos + len(chunk.tokens)
            self.links[chunk.link].append(chunk)
            if self.state_slots is not None:
                self.advance_state(chunk)
        for _ in range(2):  # layers
            self.posted.set()
            yield
            assert self.gate.wait(60)
            if self.fault is not None:
                self.fault, fault = None, self.fault
                raise fault
            for chunk in batch.chunks:
                self.links[chunk.link].check_alive()
        sampled = [self.sample(chunk) for chunk in batch.chunks]
        output = StepOutput(sampled, s_seconds=self.s_seconds, r_wait_seconds=0.5, kv_bytes=10)
        if self.seconds_per_token is not None:
            tokens = Counter()
            for chunk in batch.chunks:
                tokens[self.links[chunk.link]] += chunk.pos + len(chunk.tokens)
            for link, n in tokens.items():
                token_bytes = link.lease.page_bytes // PAGE_TOKENS
                output.link_costs[link] = StepCost(round(1e9 * n * self.seconds_per_token), n * token_bytes)
        return output

    def advance_state(self, chunk) -> None:
        before, cached = self.states.get(chunk.state), self.links[chunk.link].cache[chunk.seq_index][1]
        assert not chunk.pos or before == cached[: chunk.pos], "the state is another one than that of the cached tokens"
        for n, slot in chunk.states_after or [(len(chunk.tokens), chunk.state)]:
            assert 0 <= slot < self.state_slots
            self.states[slot] = cached[: chunk.pos + n]

    def sample(self, chunk) -> Sampled | None:
        spec = chunk.sample
        if spec is None:
            return None
        cached = self.links[chunk.link].cache[chunk.seq_index][1]
        if chunk.tokens[-1] == POISON:
            return Sampled(-1, error="the logits are not finite")
        if spec.temperature == 0:
            return Sampled(next_token(cached))
        return Sampled(next_token([spec.seed, spec.index, *cached]))

    def drop(self, link: int, seq_index: int, tag: int) -> None:
        self.staged.pop((link, seq_index, tag), None)
