"""A scheduler whose R-nodes only count, and the checks that every step of it must pass."""

from __future__ import annotations

from types import SimpleNamespace

from fastdecode.engine.scheduling.cluster import Cluster
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import Plan, SchedulerLimits
from fastdecode.engine.scheduling.scheduler import Scheduler
from fastdecode.engine.state.request import SamplingParams
from fastdecode.engine.state.sequence import Sequence
from fastdecode.region.contract import PAGE_TOKENS, blocks_for
from fastdecode.transports.base import Lease

END = 7  # the end token of every sequence here
WORD = 1


class World:
    """R-nodes that record every append; the caller begins and ends steps and acknowledges FREEs."""

    def __init__(
        self,
        leases=((40, 64),),
        mini_batches=2,
        max_batch_tokens=128,
        max_batch_size=16,
        watermark=0.01,
        max_staged=None,
        strict=False,
        block=1,
        state_slots=None,
        prompts_apart=False,
        resident=0,
        prefix_cache=False,
        guesses=0,
    ):
        """`block`: pages of a block. `resident`: the number of first leases that are of the S-Part's own device."""
        links = [
            SimpleNamespace(
                url=f"tcp://r{i}",
                lease=Lease(pages, pages, seqs, 4096, "avx2", 1, f"r{i}", block),
                resident=i < resident,
                bytes_per_second=None,
            )
            for i, (pages, seqs) in enumerate(leases)
        ]
        self.limits = SchedulerLimits(mini_batches, max_batch_tokens, max_batch_size, max_staged, strict, prompts_apart)
        options = EngineOptions(self.limits, watermark=watermark, prefix_cache=prefix_cache, guesses=guesses)
        self.cluster = Cluster(links, options, state_slots=state_slots)
        self.scheduler = Scheduler(self.cluster, options)
        self.flights: dict[int, Plan] = {}
        self.cached: list[dict[tuple[int, int], int]] = [{} for _ in links]  # per R-node: handle -> tokens appended
        self.appended = 0  # tokens, recomputed ones counted again
        self.ended: list[Sequence] = []
        self.admitted: list[int] = []  # orders of arrival, as they began to run
        self.lasts: dict[Sequence, int] = {}  # the length at which END comes
        self.staged: set[Sequence] = set()  # prompts that took several steps
        self._orders = 0

    def add(self, n_prompt, max_new, end_after=None, priority=0, client="") -> Sequence:
        seq = Sequence(
            request_id=f"r{self._orders}",
            order=self._orders,
            tokens=[WORD] * n_prompt,
            n_prompt=n_prompt,
            max_new=max_new,
            params=SamplingParams(priority=priority, client=client),
            seed=0,
            end_tokens=frozenset({END}),
        )
        self._orders += 1
        if end_after is not None:
            self.lasts[seq] = n_prompt + end_after
        self.scheduler.add(seq)
        return seq

    def begin(self, slot: int) -> Plan | None:
        assert slot not in self.flights
        plan = self.scheduler.schedule(slot)
        if plan is not None:
            self.check_plan(plan)
            self.flights[slot] = plan
            for chunk in plan.chunks:
                self.append(chunk)
            self.admitted += sorted({seq.order for seq in self.scheduler.running} - set(self.admitted))
        self.check_book()
        return plan

    def end(self, slot: int) -> list[Sequence]:
        """End a step in flight; returns the sequences that finished."""
        plan = self.flights.pop(slot)
        sampled = []
        for chunk in plan.chunks:
            last = len(chunk.seq.tokens) + 1 == self.lasts.get(chunk.seq)
            sampled.append(SimpleNamespace(token=END if last else WORD, error=None) if chunk.sample else None)
        outcomes = self.scheduler.complete(plan, sampled)
        done = [o.seq for o in outcomes if o.finish_reason]
        self.ended += done
        self.check_book()
        return done

    def free(self) -> bool:
        """Acknowledge every FREE; True if there was one."""
        any_freed = False
        for node, cached in zip(self.cluster.nodes, self.cached, strict=True):
            released = node.take_released()
            for seq in released:
                if not self.limits.prompts_apart:
                    del cached[seq.handle]
                else:
                    cached.pop(seq.handle, None)  # a sequence may be freed before its first chunk
            node.acknowledge_free(released)
            any_freed |= bool(released)
        return any_freed

    def append(self, chunk) -> None:
        """Append a chunk as an R-node would, with an R-node's checks."""
        seq = chunk.seq
        cached = self.cached[seq.node.position]
        if seq.cached == 0:
            assert not any(index == seq.handle.seq_index for index, _ in cached), (
                "an index is used again before its FREE"
            )
            cached[seq.handle] = 0
        assert cached[seq.handle] == seq.cached
        cached[seq.handle] += chunk.n_tokens
        self.appended += chunk.n_tokens
        used = sum(map(blocks_for, cached.values()))
        assert used <= seq.node.n_pages, "the lease is over-committed"

    def check_plan(self, plan: Plan) -> None:
        assert plan.n_tokens <= self.limits.max_batch_tokens
        assert len({chunk.seq for chunk in plan.chunks}) == len(plan.chunks) <= self.limits.max_batch_size
        kinds = [(chunk.prefill, chunk.seq.node.position) for chunk in plan.chunks]
        assert kinds == sorted(kinds), "decoding rows first, each kind in order of link"
        for chunk in plan.chunks:
            assert chunk.n_tokens >= 1
            own = chunk.seq.cached + chunk.n_tokens - chunk.seq.cut
            assert blocks_for(own) <= len(chunk.seq.pages), "a chunk without a page"
            of_prompts = plan.slot == self.limits.mini_batches
            assert of_prompts or chunk.seq.mini_batch == plan.slot or (self.scheduler.way_choice and plan.slot == 0)
            assert not self.limits.prompts_apart or chunk.prefill == of_prompts
            flying = [c.seq for other in self.flights.values() for c in other.chunks]
            assert chunk.seq not in flying, "in two steps at once"
            assert chunk.sample == (chunk.seq.cached + chunk.n_tokens == len(chunk.seq.tokens))
            if chunk.prefill and not chunk.sample:
                self.staged.add(chunk.seq)
        if self.limits.max_staged_tokens is not None:
            staged = [s.prefill_end for s in self.staged if s.node is not None and s.prefilling]
            alone = len(staged) == 1 and not self.limits.strict_staging
            assert alone or sum(staged) <= self.limits.max_staged_tokens

    def check_book(self) -> None:
        members = [seq for batch in self.scheduler.mini_batches for seq in batch]
        assert len(set(members)) == len(members), "in two mini-batches at once"
        assert not set(members) & set(self.scheduler.waiting)
        for i, batch in enumerate(self.scheduler.mini_batches):
            assert all(seq.mini_batch == i for seq in batch)
            assert len(batch) <= self.limits.max_batch_size
            in_flight = i in self.flights or self.limits.prompts_apart
            assert sum(seq.prefilling for seq in batch) <= 1 or in_flight, "two unfinished prompts"
        for node in self.cluster.nodes:
            running = self.scheduler.running.on_node(node)
            cut = [seq.prefix for seq in self.scheduler.running if seq.prefix is not None and seq.prefix.node is node]
            counted = sum(len(cached.pages) for cached in [*running, *cut])
            assert node.free_pages >= 0
            assert node.free_pages + counted + node.pages_freeing + node.pages_evictable == node.n_pages
            assert node.n_sequences - len(cut) == len(running) == sum(seq.node is node for seq in members)
            assert node.load == sum(seq.final_length for seq in running) + sum(prefix.length for prefix in cut)
            for seq in running:
                blocks = [first + len(held) for first, held in zip(seq.pages.first, seq.pages.by_group, strict=True)]
                assert seq.pages.covered == PAGE_TOKENS * min(blocks)
        if (states := self.cluster.states).total < 1000:
            slots = [seq.state.index for seq in (*members, *self.scheduler.waiting) if seq.node is not None]
            assert len(set(slots)) == len(slots) == states.total - states.free, "each placed sequence has a slot"
        queued = self.scheduler.waiting
        assert not any(seq.decoding for seq in queued if seq.node is None), "a cycle that keeps a sequence alive"
        ranks = [(seq.priority, seq.order) for seq in self.scheduler.waiting]
        assert ranks == sorted(ranks)

    def run(self, limit=100_000) -> None:
        """All slots in turn until nothing is left."""
        for _ in range(limit):
            moved = False
            for slot in range(self.limits.slots):
                if slot in self.flights:
                    self.end(slot)
                    moved = True
                moved |= self.begin(slot) is not None
            moved |= self.free()
            if not (self.scheduler.waiting or self.scheduler.running) and not self.flights:
                self.free()
                return
            assert moved, "there is work and nothing moves"
        raise AssertionError("it does not end")

    def assert_empty(self) -> None:
        assert not (self.scheduler.waiting or self.scheduler.running) and not self.flights
        for node, cached in zip(self.cluster.nodes, self.cached, strict=True):
            assert not cached and node.free_pages == node.n_pages and node.load == 0 and not node.n_sequences
