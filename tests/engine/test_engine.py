"""The engine over a toy model whose output shows every mistake in what is cached (toy.py)."""

from __future__ import annotations

import asyncio
import random

import pytest
from engines.make_engine import make_engine
from engines.token_stream import submit, tokens_of
from engines.toy import POISON, VOCAB, ToyLink, ToySPart, continuation, until
from engines.toy_engine import running

from fastdecode.engine.scheduling.queue import StartRate
from fastdecode.engine.state.request import (
    GenerationFailed,
    InvalidPrompt,
    NotReady,
    Overloaded,
    PromptTooLong,
    SamplingParams,
)
from fastdecode.transports.base import CallRefused

pytestmark = pytest.mark.quick

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def prompts(n, longest=300, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(POISON) for _ in range(rng.randint(1, longest))] for _ in range(n)]


@pytest.mark.parametrize("mini_batches", [1, 2, 3])
@pytest.mark.parametrize("n_links", [1, 3])
@pytest.mark.parametrize("options", [{}, {"target_tbt": 1e-4, "max_staged_tokens": 0}], ids=["", "small chunks"])
async def test_requests_at_random_times_get_their_own_tokens(mini_batches, n_links, options):
    rng = random.Random(mini_batches)
    links = [ToyLink(f"tcp://r{i}") for i in range(n_links)]

    async def client(engine, prompt, n):
        await asyncio.sleep(rng.random() * 0.05)
        stream = submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=n))
        assert await tokens_of(stream) == continuation(prompt, n)

    options |= {"mini_batches": mini_batches, "max_batch_tokens": 128, "max_batch_size": 32}
    async with running(*links, **options) as (engine, _):
        await asyncio.gather(*(client(engine, prompt, rng.randint(1, 90)) for prompt in prompts(48)))
        assert engine.stats.totals.preemptions == 0
        assert all(link.frames for link in links), "every R-node had work"


@pytest.mark.parametrize("priorities", [[0], [0, 1, 2]], ids=["", "priorities"])
async def test_too_small_a_lease_costs_time_not_tokens(priorities):
    link = ToyLink(n_pages=9)
    async with running(link, max_batch_tokens=64, max_batch_size=16) as (engine, _):
        given = prompts(12, longest=150)
        streams = [
            submit(engine, p, SamplingParams(temperature=0.0, max_tokens=150, priority=priorities[i % len(priorities)]))
            for i, p in enumerate(given)
        ]
        for prompt, tokens in zip(given, await asyncio.gather(*map(tokens_of, streams)), strict=True):
            assert tokens == continuation(prompt, 150)
        assert engine.stats.totals.preemptions > 0


async def test_seed_fixes_the_draw_whatever_happens_to_the_sequence():
    params = SamplingParams(max_tokens=120, seed=42)

    async def alone():
        async with running(ToyLink()) as (engine, _):
            return await tokens_of(submit(engine, [1, 2, 3], params))

    async with running(ToyLink(n_pages=5), max_batch_tokens=64, max_batch_size=16) as (engine, _):
        crowd = [submit(engine, p, SamplingParams(temperature=0.0, max_tokens=120)) for p in prompts(5, longest=60)]
        seeded = submit(engine, [1, 2, 3], params)
        unseeded = [submit(engine, [1, 2, 3], SamplingParams(max_tokens=120)) for _ in range(2)]
        crowded, *others = await asyncio.gather(*map(tokens_of, [seeded, *unseeded, *crowd]))
        assert engine.stats.totals.preemptions > 0
    assert crowded == await alone()
    assert others[0] != others[1] != crowded


async def test_without_max_tokens_it_goes_on_to_the_end_of_the_context():
    async with running(ToyLink(), max_positions=100, max_model_len=90) as (engine, _):
        events = [event async for event in submit(engine, [5] * 30, SamplingParams(temperature=0.0))]
        assert [e.token for e in events] == continuation([5] * 30, 60)
        assert [e.finish_reason for e in events] == [None] * 59 + ["length"]


async def test_lease_smaller_than_the_context_is_the_context():
    async with running(ToyLink(n_pages=2)) as (engine, _):
        assert len(await tokens_of(submit(engine, [5] * 100, SamplingParams(temperature=0.0)))) == 157
        assert len(await tokens_of(submit(engine, [5] * 256, SamplingParams(temperature=0.0)))) == 1
        with pytest.raises(PromptTooLong, match="257 tokens; the KV-cache holds at most 256"):
            submit(engine, [5] * 257, GREEDY)


async def test_end_tokens():
    prompt = [1, 2, 3]
    plain = continuation(prompt, 20)
    eos, stop = plain[9], plain[4]
    async with running(ToyLink(), eos=frozenset({eos})) as (engine, _):
        events = [event async for event in submit(engine, prompt, GREEDY)]
        assert [e.token for e in events] == plain[:10] and events[-1].finish_reason == "stop"
        ignoring = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        assert await tokens_of(submit(engine, prompt, ignoring)) == plain
        stopping = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=frozenset({stop}))
        assert await tokens_of(submit(engine, prompt, stopping)) == plain[:5]


async def test_a_request_that_cannot_run_is_refused_at_submit():
    link = ToyLink()
    engine = make_engine(ToySPart([link], max_positions=50), [link], max_queued=2)
    with pytest.raises(NotReady, match="not started"):
        submit(engine, [1], GREEDY)
    options = {"max_queued": 2, "mini_batches": 1, "max_batch_size": 1}
    async with running(ToyLink(), max_positions=50, **options) as (engine, _):
        with pytest.raises(PromptTooLong, match="50 tokens; the context is 50"):
            submit(engine, [1] * 50, GREEDY)
        for prompt in ([], [VOCAB], [-1]):
            with pytest.raises(InvalidPrompt):
                submit(engine, prompt, GREEDY)
        streams = [submit(engine, [1] * 49, GREEDY) for _ in range(3)]  # the first has room to run at once
        with pytest.raises(Overloaded, match="3 requests"):
            submit(engine, [1], GREEDY)
        for stream in streams:
            assert len(await tokens_of(stream)) == 1


@pytest.mark.parametrize(
    ("link", "options", "taken"),
    [
        ({}, {}, 32 + 4),
        ({"n_pages": 26, "max_seqs": 32}, {}, 20 + 4),  # the watermark keeps no page of an empty R-node
        ({"max_seqs": 5}, {}, 5 + 4),
        ({}, {"mini_batches": 2, "max_batch_size": 3}, 6 + 4),
    ],
    ids=["room for all", "pages", "indexes", "sequences"],
)
async def test_requests_with_room_to_run_are_not_counted_as_waiting(link, options, taken):
    """Requests that arrive in one go are all queued before the first of them can be scheduled."""
    async with running(ToyLink(**{"max_seqs": 32} | link), max_queued=4, **options) as (engine, spart):
        if "n_pages" in link:
            await tokens_of(submit(engine, [1] * 6 * 128, GREEDY))
            await until(lambda: engine.cluster.nodes[0].free_pages == 26)
            spart.gate.clear()
            first = submit(engine, [1] * 6 * 128, SamplingParams(temperature=0.0, max_tokens=1))
            await until(lambda: engine.stats.running == 1)
            spart.posted.clear()
        streams = []
        with pytest.raises(Overloaded) as caught:
            while True:
                streams.append(submit(engine, [len(streams)] * 20, GREEDY))
        assert len(streams) == taken
        assert caught.value.retry_after >= 1
        spart.gate.set()
        for i, stream in enumerate(streams):
            assert await tokens_of(stream) == continuation([i] * 20, 20)
        if "n_pages" in link:
            await tokens_of(first)


def test_retry_after_is_the_time_in_which_the_queue_empties():
    rate = StartRate()
    assert rate.seconds_for(1000, 5.0) == 1, "nothing is known"
    for i in range(200):
        rate.started(100 + 0.25 * i)  # four a second
    now = 100 + 0.25 * 200
    assert rate.seconds_for(40, now) == 10
    assert rate.seconds_for(1, now) == 1
    assert rate.seconds_for(64, now + 16) == 32, "nothing has started for as long as the 64 before took"
    assert rate.seconds_for(10**6, now) == 300


async def test_links_and_limits_that_do_not_fit_are_refused():
    link = ToyLink(n_slots=2, max_rows=100)
    spart = ToySPart([link], max_positions=50)
    for options, message in [
        ({"mini_batches": 3, "max_batch_tokens": 100, "max_batch_size": 9}, "2 slots for 3"),
        ({"max_batch_tokens": 101, "max_batch_size": 9}, "100 rows"),
        ({"max_batch_tokens": 100, "max_batch_size": 101}, "max_batch_size"),
        ({"max_batch_tokens": 100, "max_batch_size": 9, "max_model_len": 51}, "50 positions"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_engine(spart, [link], **options)
    with pytest.raises(ValueError, match="at least one R-node"):
        make_engine(spart, [])


async def test_cancel_in_the_queue_in_prefill_and_in_decode():
    long = SamplingParams(temperature=0.0, max_tokens=1000)
    async with running(ToyLink(), mini_batches=1, max_batch_tokens=16, max_batch_size=8) as (engine, spart):
        decoding = submit(engine, [1], long)
        await anext(decoding)
        prefilling, queued = submit(engine, [2] * 4000, long), submit(engine, [3], long)
        await until(lambda: spart.staged)
        spart.gate.clear()
        assert (engine.stats.running, engine.stats.waiting) == (2, 1)
        for stream in (queued, prefilling, decoding):
            stream.cancel()
            stream.cancel()
            assert len(await tokens_of(stream)) < 100, "ends after what is already there"
        assert engine.stats.waiting == 0
        spart.gate.set()
        await until(lambda: engine.stats.running == 0)


async def test_cancel_after_the_end_does_nothing():
    async with running(ToyLink()) as (engine, _):
        stream = submit(engine, [1], GREEDY)
        assert len(await tokens_of(stream)) == 20
        stream.cancel()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_waiting_frees_travel_in_one_frame():
    link = ToyLink()
    async with running(link) as (engine, _):
        await asyncio.gather(*(tokens_of(submit(engine, [i], GREEDY)) for i in range(20)))
    assert sum(map(len, link.frames)) == 20
    assert len(link.frames) < 10


@pytest.mark.parametrize("fault", [CallRefused(3, "tag does not match"), MemoryError("no memory")])
@pytest.mark.parametrize("when", ["early_fault", "fault"])
async def test_failed_step_fails_its_own_sequences_only(fault, when, caplog):
    async with running(ToyLink(), mini_batches=2) as (engine, spart):
        spart.gate.clear()
        one = submit(engine, [1], GREEDY)
        await until(spart.posted.is_set)
        setattr(spart, when, fault)
        other = submit(engine, [2], GREEDY)
        await until(lambda: engine.stats.waiting == 0)
        spart.gate.set()
        results = await asyncio.gather(tokens_of(one), tokens_of(other), return_exceptions=True)
        failed = [result for result in results if isinstance(result, GenerationFailed)]
        assert len(failed) == 1 and "step" in str(failed[0])
        assert continuation([1], 20) in results or continuation([2], 20) in results
        assert await tokens_of(submit(engine, [1], GREEDY)) == continuation([1], 20)
    assert "step" in caplog.text


async def test_row_without_finite_logits_fails_alone():
    async with running(ToyLink()) as (engine, _):
        bad, good = submit(engine, [1, POISON], GREEDY), submit(engine, [1, 2], GREEDY)
        with pytest.raises(GenerationFailed, match="not finite"):
            await tokens_of(bad)
        assert await tokens_of(good) == continuation([1, 2], 20)


@pytest.mark.parametrize("silently", [False, True])
async def test_streams_of_a_lost_node_go_on_at_another(silently):
    links = [ToyLink("tcp://r0"), ToyLink("tcp://r1")]
    params = SamplingParams(temperature=0.0, max_tokens=200)
    async with running(*links, max_batch_tokens=64, max_batch_size=16) as (engine, _):
        given = prompts(16)
        streams = [submit(engine, p, params) for p in given]
        await anext(streams[3])
        await until(lambda: all(node.n_sequences for node in engine.cluster.nodes))
        links[1].kill(silently=silently)
        results = await asyncio.gather(*map(tokens_of, streams))
        for i, (prompt, tokens) in enumerate(zip(given, results, strict=True)):
            assert tokens == continuation(prompt, 200)[i == 3 :]
        assert [node.alive for node in engine.stats.nodes] == [True, False]


@pytest.mark.parametrize("silently", [False, True])
async def test_loss_of_the_only_node_ends_streams_until_it_is_back(silently):
    link = ToyLink("tcp://r0")
    params = SamplingParams(temperature=0.0, max_tokens=1000)
    async with running(link, mini_batches=2, max_batch_tokens=32, max_batch_size=4) as (engine, spart):
        streams = [submit(engine, p, params) for p in prompts(12)]
        await anext(streams[0])
        link.kill(silently=silently)
        for stream in streams:
            with pytest.raises(GenerationFailed, match="tcp://r0 was lost"):
                await tokens_of(stream)
        with pytest.raises(NotReady, match="no R-node"):
            submit(engine, [1], GREEDY)
        assert not engine.ready and engine.stalled_seconds == 0
        await until(lambda: not spart.staged)
        fresh = ToyLink("tcp://r0")
        engine.replace_link(0, fresh)
        assert engine.ready
        assert await tokens_of(submit(engine, [1], GREEDY)) == continuation([1], 20)


async def test_replaced_link_waits_for_the_steps_that_use_the_old_one():
    old, fresh = ToyLink("tcp://r0"), ToyLink("tcp://r0")
    other = ToyLink("tcp://r1", n_pages=20)
    async with running(old, other, mini_batches=2) as (engine, spart):
        spart.gate.clear()
        stream = submit(engine, [1], GREEDY)
        await until(spart.posted.is_set)
        old.kill()
        engine.replace_link(0, fresh)
        assert spart.links[0] is old
        spart.gate.set()
        assert await tokens_of(stream) == continuation([1], 20)
        assert spart.links[0] is fresh
        assert await tokens_of(submit(engine, [2], GREEDY)) == continuation([2], 20)
        assert fresh.frames or fresh.cache


async def test_replaced_link_inherits_no_staged_prompt():
    """The new link reuses the old link's handles; prompts staged under them must be gone, even while a FREE hangs."""
    old, fresh = ToyLink("tcp://r0"), ToyLink("tcp://r0")
    async with running(old, max_batch_tokens=16, max_batch_size=8) as (engine, spart):
        old.answering.clear()
        await tokens_of(submit(engine, [1], GREEDY))
        await until(lambda: old.frames)
        stream = submit(engine, [2] * 4000, GREEDY)
        await until(lambda: spart.staged)
        old.kill()
        engine.replace_link(0, fresh)
        with pytest.raises(GenerationFailed, match="lost"):
            await tokens_of(stream)
        await until(lambda: spart.links[0] is fresh)
        assert not spart.staged
        old.answering.set()
        assert await tokens_of(submit(engine, [3] * 100, GREEDY)) == continuation([3] * 100, 20)


async def test_replacing_link_must_fit():
    async with running(ToyLink()) as (engine, _):
        with pytest.raises(ValueError, match="1 slots"):
            engine.replace_link(0, ToyLink(n_slots=1))
        assert engine.ready


async def test_stop_fails_unfinished_requests():
    link = ToyLink()
    spart = ToySPart([link])
    engine = make_engine(spart, [link])
    await engine.start()
    streams = [submit(engine, [i], SamplingParams(temperature=0.0, max_tokens=4000)) for i in range(5)]
    await anext(streams[0])
    await engine.stop()
    await engine.stop()
    for stream in streams:
        with pytest.raises(GenerationFailed, match="shutting down"):
            await tokens_of(stream)


async def test_defect_in_the_engine_is_said_to_every_client(caplog):
    """When the engine's task dies, clients must not wait forever and the node must not look healthy."""
    link = ToyLink()
    spart = ToySPart([link])
    engine = make_engine(spart, [link])
    await engine.start()
    spart.gate.clear()
    stream = submit(engine, [1], GREEDY)
    await until(spart.posted.is_set)
    engine.scheduler.complete = None
    spart.gate.set()
    with pytest.raises(GenerationFailed, match="broke"):
        await tokens_of(stream)
    with pytest.raises(NotReady, match="broke"):
        submit(engine, [1], GREEDY)
    await engine.stop()
    assert "the engine broke" in caplog.text


async def test_an_r_node_that_refuses_its_counters_keeps_its_last_ones():
    async def refuse():
        raise CallRefused(1, "not now")

    link = ToyLink("tcp://r0", n_pages=10)
    async with running(link) as (engine, _):
        await engine.r_nodes.refresh()
        link.stats = refuse
        await engine.r_nodes.refresh()
        assert engine.stats.nodes[0].calls == 3


async def test_counters_and_observer():
    class Observer:
        def __init__(self):
            self.seen = []

        def __getattr__(self, name):
            return lambda *args: self.seen.append((name, args))

    observer = Observer()
    async with running(ToyLink("tcp://r0", n_pages=10)) as (engine, spart):
        engine.observer = observer
        await tokens_of(submit(engine, [1] * 7, GREEDY))
        spart.gate.clear()
        stream = submit(engine, [2] * 134, GREEDY)
        await until(lambda: engine.stats.running == 1)
        assert engine.stalled_seconds > 0
        await engine.r_nodes.refresh()
        stats = engine.stats
        assert (stats.running, stats.waiting, stats.kv_usage) == (1, 0, 0.2)
        assert (stats.totals.requests, stats.totals.prompt_tokens, stats.totals.generated_tokens) == (2, 141, 20)
        assert (stats.totals.steps, stats.totals.s_seconds, stats.totals.r_wait_seconds) == (20, 5.0, 10.0)
        node = stats.nodes[0]
        assert (node.url, node.alive, node.pages_used, node.sequences, node.load) == ("tcp://r0", True, 2, 1, 154)
        assert (node.attention_seconds, node.kv_bytes_read, node.calls) == (2.0, 5, 3)
        stream.cancel()
    names = [name for name, _ in observer.seen]
    assert {name: names.count(name) for name in set(names)} == {
        "started": 2, "step": 21, "first_token": 1, "inter_token": 19, "finished": 2,
    }  # fmt: skip
    assert [args for name, args in observer.seen if name == "finished"] == [(7, 20), (134, 0)]
