"""The prefix cache over the toy model: prompts share pages with running and with ended sequences.

A mistake in the cache shows as a wrong token.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from engines.token_stream import submit, tokens_of
from engines.toy import POISON, ToyLink, continuation, until
from engines.toy_engine import ASK, ask, keeping

from fastdecode.engine.state.prefixes import CachedSequence, Handle, PrefixEntry, PrefixIndex, page_hashes
from fastdecode.engine.state.request import GenerationFailed, SamplingParams
from fastdecode.region.contract import PAGE_TOKENS

# -- the index --------------------------------------------------------------------------------------------------------


def text(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(POISON) for _ in range(n)]


def make_entry(tokens, pages=None):
    return PrefixEntry(
        CachedSequence(Handle(0, 1), pages or -(-len(tokens) // PAGE_TOKENS)), list(tokens), page_hashes(tokens)
    )


def match(index, tokens):
    return index.match(tokens, page_hashes(tokens))


def test_the_longest_common_prefix_is_found_to_the_token():
    index, tokens = PrefixIndex(), text(1000)
    short, long, other = make_entry(tokens[:300]), make_entry(tokens[:600] + text(50, 1)), make_entry(text(700, 2))
    for entry in (short, long, other):
        index.insert(entry)
    assert match(index, tokens) == (long, 600)
    assert match(index, tokens[:400]) == (long, 399)  # the last token must be computed
    assert match(index, tokens[:256]) == (long, 255)
    assert match(index, tokens[:280] + text(50, 3)) == (long, 280)
    assert match(index, tokens[:129]) == (long, 128)
    assert match(index, tokens[:128]) is None  # less than a page could be shared
    assert match(index, tokens[1:]) is None
    assert match(index, [*other.tokens, 5]) == (other, 700)
    index.remove(long)
    assert match(index, tokens) == (short, 300)
    index.remove(short)
    assert match(index, tokens) is None
    assert list(index) == [other]


def test_a_page_hash_covers_all_tokens_before_it():
    tokens = text(1000)
    hashes = page_hashes(tokens)
    assert len(hashes) == 7 and len(set(hashes)) == 7
    for changed in (0, 127, 128, 500):
        other = [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]]
        whole = changed // PAGE_TOKENS
        assert page_hashes(other)[:whole] == hashes[:whole]
        assert not set(page_hashes(other)[whole:]) & set(hashes)
    assert page_hashes(tokens, "", hashes[:3]) == hashes
    assert not set(page_hashes(tokens, "salt")) & set(hashes)


@pytest.mark.parametrize("seed", range(8))
def test_any_look_up_finds_what_a_comparison_with_every_entry_finds(seed):
    """Random entries that branch anywhere, running or ended, prefilling or not, against a plain search."""
    rng, index, entries = random.Random(seed), PrefixIndex(), []
    roots = [[rng.randrange(3) for _ in range(700)] for _ in range(2)]

    def branch():
        root = rng.choice(roots)
        return root[: rng.choice([rng.randint(0, 700), 128 * rng.randint(0, 5)])] + text(
            rng.randint(1, 300), rng.random()
        )

    def shared(entry, tokens):
        n = 0
        while n < min(len(entry.told), len(tokens) - 1) and entry.told[n] == tokens[n]:
            n += 1
        n -= n % PAGE_TOKENS if entry.running else 0
        return n if n >= PAGE_TOKENS else 0

    class Told(PrefixEntry):
        told: list[int]

    for step in range(400):
        action = rng.random()
        if action < 0.4:
            tokens = branch()
            running = rng.random() < 0.5
            entry = Told(CachedSequence(Handle(step, 0), []), [] if running else tokens, page_hashes(tokens))
            entry.told, entry.running, entry.computed = tokens, running, not running or rng.random() < 0.5
            index.insert(entry)
            entries.append(entry)
        elif action < 0.5 and entries:
            index.remove(entries.pop(rng.randrange(len(entries))))
        elif action < 0.6 and (waiting := [e for e in entries if not e.computed]):
            index.mark_computed(rng.choice(waiting))
        elif action < 0.7 and (runs := [e for e in entries if e.running]):
            entry = rng.choice(runs)
            entry.told = entry.told + text(rng.randint(0, 200), rng.random())
            index.mark_ended(entry, entry.cached, entry.told)
        tokens = branch()
        for computed in (True, False):
            best = max((shared(e, tokens) for e in entries if e.computed == computed), default=0)
            found = index.match(tokens, page_hashes(tokens), computed)
            assert (found[1] if found else 0) == best
            if found:
                assert found[0].computed == computed and shared(found[0], tokens) == best
    for entry in list(index):
        index.remove(entry)
    assert not index._nodes


def test_the_least_recently_used_entry_is_evicted_first_unless_it_is_being_forked():
    index = PrefixIndex()
    first, second, third = (make_entry(text(200, seed)) for seed in range(3))
    for entry in (first, second, third):
        index.insert(entry)
    assert index.least_recently_used() is first
    index.touch(first)
    assert index.least_recently_used() is second
    second.pins = 1
    assert index.least_recently_used() is third
    first.pins = third.pins = 1
    assert index.least_recently_used() is None


def test_whole_pages_of_a_running_sequence_are_shared_once_they_are_computed():
    index, tokens = PrefixIndex(), text(600)
    runs, ended = make_entry(tokens[:500]), make_entry(tokens[:300])
    runs.running, runs.computed = True, False
    index.insert(runs)
    index.insert(ended)
    assert match(index, tokens) == (ended, 300)
    assert index.match(tokens, page_hashes(tokens), computed=False) == (runs, 384)
    index.mark_computed(runs)
    assert match(index, tokens) == (runs, 384)
    assert match(index, tokens[:384]) == (ended, 300)  # of the running one 256: the last token is to be computed
    index.remove(ended)
    assert match(index, tokens[:384]) == (runs, 256)
    assert match(index, tokens[:128]) is None
    assert index.least_recently_used() is None
    index.mark_ended(runs, CachedSequence(Handle(0, 1), 5), tokens[:550])
    assert match(index, tokens) == (runs, 550)
    assert index.least_recently_used() is runs
    assert list(index) == [runs]


# -- the engine -------------------------------------------------------------------------------------------------------


async def test_a_prompt_seen_before_is_not_computed_again():
    link, prompt = ToyLink(), text(700)
    async with keeping(link) as (engine, _):
        assert await ask(engine, prompt) == 0
        assert await ask(engine, prompt) == 699
        assert await ask(engine, prompt[:300] + text(400, 1)) == 300
        assert await ask(engine, prompt[:127]) == 0
        assert link.forks == 2
        totals = engine.stats.totals
        assert (totals.prefix_queries, totals.prefix_hits) == (700 + 700 + 700 + 127, 699 + 300)


async def test_a_conversation_is_one_entry():
    link, history = ToyLink(), text(200)
    async with keeping(link) as (engine, _):
        for turn in range(5):
            reused = await ask(engine, history)
            assert (reused > 0) == (turn > 0)
            history += continuation(history, 10) + text(30, turn)
        node = engine.cluster.nodes[0]
        assert len(node.prefixes) == 1
        await until(lambda: engine.stats.kv_usage == 0)  # the one before is being freed


async def test_a_long_uncached_suffix_shares_steps_with_others():
    link, prompt = ToyLink(), text(900)
    async with keeping(link, max_batch_tokens=64, max_batch_size=32, mini_batches=2) as (engine, _):
        await ask(engine, prompt[:200])
        asks = [prompt, prompt[:150] + text(600, 1), text(500, 2), text(20, 3), prompt[:199] + text(700, 4)]
        reused = await asyncio.gather(*(ask(engine, p) for p in asks))
        assert reused == [200, 150, 0, 0, 199]


async def test_a_prompt_with_too_long_an_uncached_suffix_shares_nothing():
    link, prompt = ToyLink(), text(400)
    async with keeping(link, max_uncached_suffix=100) as (engine, _):
        await ask(engine, prompt)
        assert await ask(engine, prompt[:300] + text(101, 1)) == 0
        assert await ask(engine, prompt[:300] + text(100, 2)) == 300


async def test_an_entry_in_use_is_not_evicted_first():
    link, prompt = ToyLink(n_pages=15), text(500)
    async with keeping(link) as (engine, _):
        await ask(engine, prompt)
        for i in range(2):
            await ask(engine, text(400, i))
        assert await ask(engine, prompt + text(100, 9)) == 500


async def test_a_tenth_of_a_lease_stays_free_for_new_sequences():
    async with keeping(ToyLink(n_pages=40)) as (engine, _):
        for i in range(20):
            await ask(engine, text(400, i))
        node = engine.cluster.nodes[0]
        await until(lambda: not node.pages_freeing)
        assert 4 <= node.free_pages < 8


async def test_entries_make_room_for_new_sequences():
    link = ToyLink(n_pages=12)
    async with keeping(link) as (engine, _):
        for i in range(30):
            await ask(engine, text(random.Random(i).randint(100, 1500), i))
        assert engine.stats.totals.preemptions == 0
        assert len(engine.cluster.nodes[0].prefixes) >= 1
        await ask(engine, text(12 * PAGE_TOKENS - 9, 99))  # all of the lease


async def test_entries_are_evicted_before_a_sequence_is_preempted():
    link = ToyLink(n_pages=10)
    async with keeping(link, watermark=0.0) as (engine, _):
        for i in range(4):
            await ask(engine, text(2 * PAGE_TOKENS - 10, i))
        growing = SamplingParams(temperature=0.0, max_tokens=500)
        await asyncio.gather(*(ask(engine, text(100, 10 + i), growing) for i in range(2)))
        assert engine.stats.totals.preemptions == 0


async def test_entries_free_their_sequence_indexes_when_they_run_out():
    link = ToyLink(max_seqs=3)
    async with keeping(link) as (engine, _):
        for i in range(10):
            await ask(engine, text(200, i))
        assert len(engine.cluster.nodes[0].prefixes) <= 3


async def test_sequences_that_arrive_together_start_together_although_entries_hold_all_indexes():
    link, once = ToyLink(n_pages=200, max_seqs=64), SamplingParams(temperature=0.0, max_tokens=1)
    async with keeping(link) as (engine, _):
        for i in range(64):
            await ask(engine, text(200, i))
        before = engine.totals.steps
        await asyncio.gather(*(ask(engine, text(5, 100 + i), once) for i in range(48)))
        assert engine.totals.steps - before <= 12  # a step each if room were made for one at a time


async def test_a_refused_fork_costs_time_only():
    link, prompt = ToyLink(), text(400)
    async with keeping(link) as (engine, _):
        await ask(engine, prompt)
        link.refuse_forks = True
        assert await ask(engine, prompt) == 0
        link.refuse_forks = False
        assert await ask(engine, prompt) == 399


async def test_an_r_node_that_dies_while_it_forks_costs_time_only():
    links, prompt = [ToyLink("tcp://a"), ToyLink("tcp://b")], text(400)
    async with keeping(*links) as (engine, _):
        await ask(engine, prompt)
        (link,) = [link for link in links if link.cache]
        link.forking.clear()
        again = asyncio.create_task(ask(engine, prompt))
        await link.fork_asked.wait()
        link.kill()
        link.forking.set()
        assert await again == 0
    async with keeping(ToyLink()) as (engine, _):
        await ask(engine, prompt)
        link = engine.cluster.nodes[0].link
        link.forking.clear()
        again = asyncio.create_task(ask(engine, prompt))
        await link.fork_asked.wait()
        link.kill()
        link.forking.set()
        with pytest.raises(GenerationFailed, match="lost"):
            await again


async def test_a_request_cancelled_while_it_is_forked_leaves_nothing():
    link, prompt = ToyLink(), text(400)
    async with keeping(link) as (engine, _):
        await ask(engine, prompt)
        link.forking.clear()
        stream = submit(engine, prompt, ASK)
        await link.fork_asked.wait()
        stream.cancel()
        assert await tokens_of(stream) == []
        link.forking.set()
        assert await ask(engine, prompt) == 399


async def test_a_request_cancelled_while_decoding_becomes_an_entry_and_one_cancelled_in_its_prompt_does_not():
    link, prompt = ToyLink(), text(700)
    async with keeping(link, max_batch_tokens=64, max_batch_size=32, mini_batches=1) as (engine, spart):
        stream = submit(engine, prompt, ASK)
        await anext(stream)
        stream.cancel()
        assert await ask(engine, prompt) == 699
        fresh = text(700, 1)
        spart.gate.clear()
        stream = submit(engine, fresh, ASK)
        await until(lambda: spart.staged)
        stream.cancel()
        spart.gate.set()
        assert await ask(engine, fresh) == 0


async def test_a_failed_sequence_becomes_no_entry():
    link, poisoned = ToyLink(), [*text(300), POISON]
    async with keeping(link) as (engine, spart):
        with pytest.raises(GenerationFailed, match="not finite"):
            await tokens_of(submit(engine, poisoned, ASK))
        spart.gate.clear()
        spart.posted.clear()
        stream = submit(engine, poisoned, ASK)
        await asyncio.to_thread(spart.posted.wait, 20)
        stream.cancel()  # before the failure is known
        spart.gate.set()
        await until(lambda: not (engine.scheduler.waiting or engine.scheduler.running))
        assert len(engine.cluster.nodes[0].prefixes) == 0


@pytest.mark.parametrize("mini_batches", [1, 2])
async def test_simultaneous_requests_compute_a_common_prompt_once(mini_batches):
    link, prompt = ToyLink(), text(700)
    async with keeping(link, max_batch_tokens=64, max_batch_size=32, mini_batches=mini_batches) as (engine, _):
        assert sorted(await asyncio.gather(*(ask(engine, prompt) for _ in range(5)))) == [0, 640, 640, 640, 640]
        assert link.forks == 4
        ends = [prompt[:500] + text(100, seed) for seed in range(4)]
        assert sorted(await asyncio.gather(*(ask(engine, end) for end in ends))) == [500] * 4


async def test_a_prompt_does_not_wait_for_a_small_common_prefix():
    prompt, gate = text(200), SamplingParams(temperature=0.0, max_tokens=3)
    async with keeping(ToyLink(), max_batch_tokens=64, max_batch_size=32, mini_batches=2) as (engine, spart):
        spart.gate.clear()
        streams = [submit(engine, prompt + text(n, n), gate) for n in (10, 300)]
        await until(lambda: len(engine.scheduler.running) == 2)
        spart.gate.set()
        for stream, n in zip(streams, (10, 300), strict=True):
            assert await tokens_of(stream) == continuation(prompt + text(n, n), 3)


async def test_a_running_sequence_cancelled_while_it_is_forked_costs_time_only():
    link, prompt = ToyLink(), text(400)
    async with keeping(link) as (engine, _):
        stream = submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=1000))
        await anext(stream)
        link.forking.clear()
        again = asyncio.create_task(ask(engine, prompt))
        await link.fork_asked.wait()
        stream.cancel()
        await until(lambda: len(engine.scheduler.running) == 1)
        link.forking.set()
        assert await again == 384
        link.refuse_forks = True
        stream = submit(engine, prompt[:300] + text(200, 1), SamplingParams(temperature=0.0, max_tokens=1000))
        await anext(stream)
        assert await ask(engine, prompt[:300] + text(200, 1)) == 0
        stream.cancel()
        link.refuse_forks = False


async def test_a_prompt_that_waited_for_a_cancelled_one_is_computed():
    prompt = text(700)
    async with keeping(ToyLink(), max_batch_tokens=64, max_batch_size=32, mini_batches=2) as (engine, spart):
        spart.gate.clear()
        stream = submit(engine, prompt, ASK)
        await until(lambda: spart.staged)
        again = asyncio.create_task(ask(engine, prompt))
        await asyncio.sleep(0.01)
        assert len(engine.scheduler.running) == 1  # the other one waits for it
        stream.cancel()
        spart.gate.set()
        assert await again == 0


@pytest.mark.parametrize(
    ("mini_batches", "n_links", "priorities", "state_slots"),
    [  # every pair of values
        (1, 1, [0], None),
        (1, 3, [0, 0, 1, -2], 40),
        (2, 1, [0, 0, 1, -2], 40),
        (2, 3, [0], 40),
        (2, 3, [0, 0, 1, -2], None),
    ],
)
async def test_many_prompts_with_common_prefixes_in_a_cache_too_small(mini_batches, n_links, priorities, state_slots):
    rng = random.Random(10 * mini_batches + n_links)
    links = [ToyLink(f"tcp://r{i}", n_pages=60 // n_links, max_seqs=20) for i in range(n_links)]
    roots = [text(500, seed) for seed in range(4)]

    async def client(engine, i):
        prompt = rng.choice(roots)[: rng.randint(1, 500)] + text(rng.randint(1, 300), 100 + i)
        await asyncio.sleep(rng.random())
        params = SamplingParams(temperature=0.0, max_tokens=(n := rng.randint(1, 150)), priority=rng.choice(priorities))
        stream = submit(engine, prompt, params)
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.02)
            stream.cancel()
            tokens = await tokens_of(stream)
            assert tokens == continuation(prompt, n)[: len(tokens)]
        else:
            assert await tokens_of(stream) == continuation(prompt, n)

    options = {"mini_batches": mini_batches, "max_batch_tokens": 128, "max_batch_size": 16, "state_slots": state_slots}
    async with keeping(*links, **options) as (engine, _):
        await asyncio.gather(*(client(engine, i) for i in range(120)))
        totals = engine.stats.totals
        assert totals.prefix_hits > 1000
        assert sum(link.forks for link in links) > 10
