"""The R-engine against float64 attention, driven through a region as an S-node drives it."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from attention import kernel_calls
from attention.rengine_peer import FP16, KV_FP16, KV_FP32, Geometry, Link

from fastdecode.kernels import _native
from fastdecode.region.contract import (
    ACT_DTYPES,
    KV_DTYPES,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_PAGES,
    MAX_ROWS,
    MAX_SEQS,
    MAX_SLOTS,
    PAGE_TOKENS,
    POISON,
    Status,
)

ISAS = _native.isa_supported()


@pytest.mark.quick
@pytest.mark.parametrize("kv_dtype", range(len(KV_DTYPES)), ids=KV_DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_mixed_batches_equal_float64_attention(engines, links, isa, threads, kv_dtype):
    engine = engines(threads, isa=isa)
    assert (engine.isa, engine.threads) == (isa, threads)
    link = links(Geometry(max_rows=256, n_layers=2), kv_dtype, 2 * 96, 40, engine=engine, windows=[0, 100])
    link.fill(0, 1700)  # long enough to be cut among threads
    link.fill(1, PAGE_TOKENS)  # ends on a page boundary
    link.step(0, [(seq_index, 1 + seq_index % 3, True) for seq_index in range(2, 34)])  # many short ones share an item
    for _ in range(3):
        link.step(1, [(0, 1, True), (1, 1, True), (2, 1, True), (34, 90, False)])
    link.step(0, [(0, 5, True), (1, 70, True), (34, 1, True)])


@pytest.mark.parametrize("act_dtype", range(len(ACT_DTYPES)), ids=ACT_DTYPES)
@pytest.mark.parametrize(("n_q_heads", "n_kv_heads", "head_size"), [(3, 3, 8), (6, 2, 80), (8, 1, 128), (40, 1, 256)])
def test_head_geometries_and_activation_dtypes(links, n_q_heads, n_kv_heads, head_size, act_dtype):
    link = links(Geometry(1, 200, 1, n_q_heads, n_kv_heads, head_size, act_dtype), n_pages=40, threads=3)
    link.fill(0, 900)
    link.step(0, [(0, 1, True), (1, 33, True), (2, 3, True), (3, 100, False)])
    link.step(0, [(0, 2, True), (3, 1, True)])


@pytest.mark.parametrize("windows", [(1, 64, 65), (100, 0, 1000), (2**32 - 1, 2**31, 63)])
def test_each_layer_keeps_its_window(links, windows):
    link = links(Geometry(n_layers=3, max_rows=128), n_pages=64, windows=windows, threads=3)
    link.fill(0, 2000)
    link.fill(1, 30)
    for n in (1, 7, 100):
        link.step(0, [(0, n, True), (1, 1, True)])


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_new_rows_may_begin_and_end_anywhere_in_a_page(links, length, n):
    link = links(Geometry(1, 256, 1), n_pages=16, threads=2)
    link.fill(0, length)
    link.step(0, [(0, n, True)])
    link.step(0, [(0, 1, True)])


def test_steps_of_several_slots_interleave(links):
    link = links(Geometry(n_slots=3, n_layers=3))
    a, b = link.begin(0, [(0, 3, True)]), link.begin(2, [(1, 2, True), (2, 5, False)])
    for layer in range(3):
        a.call(layer)
        bell = b.post(layer)
        b.finish(layer, bell)
    bells = [(step, step.post(0)) for step in (link.begin(s, [(s + 3, 4, True)]) for s in range(3))]
    for step, bell in bells:
        step.finish(0, bell)


def test_kv_bytes_of_a_report_are_the_pages_read(links):
    link = links(Geometry(n_layers=1, n_kv_heads=2, n_q_heads=4, head_size=16, max_rows=300), n_pages=16, windows=[180])
    link.fill(0, 300)
    reply = link.begin(0, [(0, 1, True)]).call(0)  # position 300 sees 121..300: pages 0, 1, 2
    assert reply.kv_bytes == 3 * link.g.n_kv_heads * kernel_calls.chunk_bytes("fp32", 16)
    stats = link.lease.stats()
    assert (stats["calls"], stats["rows"], stats["refused"]) == (2, 301, 0)
    assert stats["kv_bytes"] == reply.kv_bytes and 0 < reply.busy_ns <= stats["busy_ns"]


def test_links_have_caches_of_their_own(engines, links):
    engine = engines(2)
    g = Geometry()
    a, b = links(g, engine=engine), links(Geometry(head_size=32, act_dtype=FP16), KV_FP16, engine=engine)
    for _ in range(3):
        a.step(0, [(0, 2, True)])
        b.step(1, [(0, 3, True)])
    a.close()
    b.step(0, [(0, 1, True)])


def test_pages_are_counted_freed_and_used_again(links):
    link = links(Geometry(max_rows=64, n_layers=1), n_pages=4)
    for _ in range(5):
        link.fill(0, 2 * PAGE_TOKENS + 1)
        assert link.lease.stats() | {"pages_total": 4, "pages_used": 3, "seqs": 1} == link.lease.stats()
        link.step(0, [(0, 1, True), (1, 3, True)])
        assert link.lease.stats()["pages_used"] == 4
        link.forget(0)
        link.forget(1)
        assert link.lease.stats() | {"pages_used": 0, "seqs": 0} == link.lease.stats()


@pytest.mark.quick
def test_trim_rolls_back(links):
    link = links(Geometry(max_rows=200, n_layers=2), n_pages=8)
    link.fill(0, 400)
    link.trim(0, PAGE_TOKENS + 6)
    assert link.lease.stats()["pages_used"] == 2
    link.step(0, [(0, 3, True)])
    link.trim(0, PAGE_TOKENS)
    link.step(0, [(0, 1, True)])
    link.trim(0, 0)
    assert link.lease.stats() | {"pages_used": 0, "seqs": 0} == link.lease.stats()
    link.shadows[0].tag = 77  # an empty sequence takes a new tag
    link.step(0, [(0, 1, True)])


def test_a_flooding_link_starves_no_other(engines, links):
    """Two peers in threads of their own, one of which floods the engine; every answer to both is right."""
    engine = engines(2, spin_us=20)
    a, b = links(Geometry(n_slots=1), engine=engine), links(Geometry(n_slots=1), engine=engine)
    failures: list[BaseException] = []

    def run(link: Link) -> None:
        try:
            for _ in range(60):
                link.step(0, [(0, 1, True), (1, 2, True)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(x,)) for x in (a, b)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_a_sleeping_engine_is_woken_and_costs_nothing(engines, links):
    link = links(Geometry(n_layers=1), engine=engines(2, spin_us=0))
    link.step(0, [(0, 1, True)])
    deadline = time.monotonic() + 60
    while not link.map[64]:
        assert time.monotonic() < deadline, "the engine never slept"
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    link.step(0, [(0, 1, True)])
    link.map[64] = 0  # a peer that scribbles here only delays itself
    link.step(0, [(0, 1, True)])


def voluntary_switches() -> dict[str, int]:
    """How often each thread of this process's R-engines has gone to sleep, by the thread's name."""
    counts = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("fd-r"):
            lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            counts[name] = int(lines["voluntary_ctxt_switches"])
    return counts


def test_no_thread_sleeps_within_a_step(engines, links):
    """Threads that sleep at once between steps stay awake until the last layer, however late it is asked for."""
    link = links(Geometry(n_layers=2), engine=engines(2, spin_us=0, step_spin_us=60_000_000))
    step = link.begin(0, [(0, 8, True), (1, 8, True)])
    step.call(0)
    for _ in range(3):  # a thread that was about to sleep when the step began does so, once
        within = voluntary_switches()
        time.sleep(1.2)  # a thread that sleeps looks around once a second
        if voluntary_switches() == within:
            break
    else:
        pytest.fail(f"the threads sleep: {voluntary_switches()}")
    assert within.keys() == {"fd-r0", "fd-r1"}
    step.call(1)
    await_sleep(within)


def test_threads_sleep_if_a_step_is_not_gone_on_with(engines, links):
    link = links(Geometry(n_layers=2), engine=engines(2, spin_us=0, step_spin_us=1000))
    step = link.begin(0, [(0, 8, True), (1, 8, True)])
    step.call(0)
    await_sleep(voluntary_switches())
    step.call(1)


def await_sleep(before: dict[str, int]) -> None:
    """Wait until each thread has gone to sleep once more."""
    deadline = time.monotonic() + 60
    while any(count <= before[name] for name, count in voluntary_switches().items()):
        assert time.monotonic() < deadline, "a thread has not gone to sleep"
        time.sleep(0.01)


def test_a_link_removed_under_load_is_never_touched_again(engines, links):
    engine = engines(2)
    for _ in range(10):
        link = links(Geometry(n_slots=1, n_layers=1), engine=engine)
        link.wake_fd = engine.eventfd  # the link's own is closed with it
        table = link.entries([(0, 1, False)])
        stop = threading.Event()

        def flood(link=link, stop=stop, table=table) -> None:
            link.table(0, table)
            while not stop.is_set():  # the R-engine refuses all but the first of these steps
                link.numbers[0] += 1
                link.header(0, link.numbers[0], 1, 1, 0)
                link.ring_arm(0, link.numbers[0])
                link.ring_layer(0, 1)

        thread = threading.Thread(target=flood)
        thread.start()
        time.sleep(0.01)
        link.lease.close()
        bell = link.armed_bell(0)
        time.sleep(0.01)
        stop.set()
        thread.join()
        assert link.armed_bell(0) == bell
        with pytest.raises(RuntimeError, match="the link is closed"):
            link.lease.stats()
    assert engine.kv_free == 1 << 28


@pytest.mark.parametrize("armed", [False, True])
def test_a_step_on_a_link_that_is_being_closed_is_answered(engines, links, armed):
    """The waiter gets an answer; the layer may or may not have been served first."""
    engine = engines(1, spin_us=0)
    for _ in range(20):
        link = links(Geometry(n_slots=1, n_layers=2), engine=engine)
        link.table(0, link.entries([(0, 1, False)]))
        if armed:
            bell = link.post(0, 0, 1, 1, 0, True)
            link.close()
            assert link.wait(0, bell).status in (Status.OK, Status.LINK_CLOSED)
            assert link.layer_reply(0) == POISON
        else:
            link.numbers[0] = 1
            link.header(0, 1, 1, 1, 0)
            link.ring_arm(0, 1)
            link.close()
            assert link.verdict(0, 1).status in (Status.OK, Status.LINK_CLOSED)


def test_sequences_freed_during_their_calls_harm_nobody_else(engines, links):
    engine = engines(2)
    bad, good = links(Geometry(n_slots=1), engine=engine), links(Geometry(n_slots=1), engine=engine)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            step = bad.begin(0, [(0, 20, True), (1, 12, True)])
            bad.wait(0, step.post(0))
            bell = step.post(1)
            bad.lease.free(0, bad.shadows[0].tag)
            bad.lease.fork(1, bad.shadows[1].tag, 0, 1, 7)
            bad.lease.free(0, 1)
            bad.wait(0, bell)
            bad.forget(1)
            bad.shadows.clear()

    thread = threading.Thread(target=churn)
    thread.start()
    for _ in range(60):
        good.step(0, [(0, 3, True)])
    stop.set()
    thread.join()


def test_the_carrier_sends_each_verdict_and_each_reply(engines, links):
    calls = []
    send = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int)(lambda *call: calls.append(call))

    class Ops(ctypes.Structure):
        _fields_ = [
            ("send", type(send)),
            ("poll", ctypes.c_void_p),
            ("poll_fd", ctypes.c_void_p),
            ("probe", ctypes.c_void_p),
            ("wakes", ctypes.c_bool),
        ]

    class Carrier(ctypes.Structure):
        _fields_ = [("ops", ctypes.POINTER(Ops)), ("self", ctypes.c_void_p)]

    ops = Ops(send, None, None, None, True)
    target = Carrier(ctypes.pointer(ops), 42)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new(ctypes.addressof(target), b"fastdecode.carrier", None)
    engine, g = engines(1), Geometry(n_slots=2, n_layers=1)
    quiet = links(g, engine=engine)
    quiet.close()
    lease = engine.add_link(quiet.map, g.tuple(), KV_FP32, 4, 4, 1.0, [0], capsule)
    quiet.lease, quiet.wake_fd = lease, lease.eventfd
    quiet.numbers = [0, 0]
    verdict, reply = 2, 3
    try:
        quiet.step(1, [(0, 1, True)])
        assert quiet.arm(0, 1, 1, 3).status == Status.BAD_CALL
        deadline = time.monotonic() + 60
        while len(calls) < 3:  # a word appears before it is sent
            assert time.monotonic() < deadline, "never sent"
            time.sleep(0.001)
        assert calls == [(42, 1, verdict), (42, 1, reply), (42, 0, verdict)]
    finally:
        lease.close()
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        other = new(ctypes.addressof(target), b"something.else", None)
        engine.add_link(quiet.map, g.tuple(), KV_FP32, 4, 4, 1.0, [0], other)


def test_leases_share_one_budget(engines, links):
    g = Geometry()
    page = _native.page_bytes(g.tuple(), KV_FP16)
    assert page == g.n_layers * g.n_kv_heads * kernel_calls.chunk_bytes("fp16", g.head_size)
    engine = engines(1, kv_bytes=10 * page)
    a = links(g, KV_FP16, 6, engine=engine)
    assert engine.kv_free == 4 * page
    with pytest.raises(MemoryError, match=f"5 pages need {5 * page} bytes of KV-cache, but {4 * page} are free"):
        Link(engine, g, KV_FP16, 5)
    with pytest.raises(RuntimeError, match="still serves 1 links"):
        engine.close()
    a.close()
    assert engine.kv_free == 10 * page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"geometry": (0, 1, 1, 1, 1, 8, 0, 8, 0, 0, 0, 0)}, "number of slots"),
        ({"geometry": (1, 1, 1, 3, 2, 8, 0, 8, 0, 0, 0, 0)}, "not a multiple of KV heads"),
        ({"geometry": (1, 1, 1, 1, 1, 12, 0, 12, 0, 0, 0, 0)}, "head size"),
        ({"geometry": (1, MAX_ROWS + 1, 1, 1, 1, 8, 0, 8, 0, 0, 0, 0)}, "rows per call"),
        (
            {"geometry": (MAX_SLOTS, MAX_ROWS, 2, MAX_HEADS, MAX_HEADS, MAX_HEAD_SIZE, 0, 8, 0, 0, 0, 0)},
            "the region has",
        ),
        ({"kv_dtype": len(KV_DTYPES)}, f"unknown KV-cache dtype {len(KV_DTYPES)}"),
        ({"n_pages": 0}, "0 pages are not within"),
        ({"max_seqs": MAX_SEQS + 1}, f"{MAX_SEQS + 1} sequences are not within 1..{MAX_SEQS}"),
        ({"n_pages": MAX_PAGES + 1}, f"{MAX_PAGES + 1} pages are not within 1..{MAX_PAGES}"),
        ({"softmax_scale": float("nan")}, "softmax scale is not finite"),
        ({"windows": [0]}, "windows: 1 given, 2 needed"),
        ({"windows": [0, -1]}, "windows: -1 is not within"),
        ({"region": bytearray(4096)}, "the region has 4096 bytes"),
    ],
)
def test_an_invalid_link_is_refused(engines, links, change, message):
    engine = engines(1)
    link = links(Geometry(), engine=engine)
    arguments = {
        "region": link.map,
        "geometry": link.g.tuple(),
        "kv_dtype": KV_FP32,
        "n_pages": 4,
        "max_seqs": 4,
        "softmax_scale": 1.0,
        "windows": [0, 0],
    }
    free = engine.kv_free
    with pytest.raises(ValueError, match=message):
        engine.add_link(**(arguments | change))
    assert engine.kv_free == free


def test_isa_is_argument_then_environment_then_best(monkeypatch, engines):
    monkeypatch.delenv("FASTDECODE_ISA", raising=False)
    assert engines(1).isa == _native.isa_best()
    monkeypatch.setenv("FASTDECODE_ISA", "scalar")
    assert engines(1).isa == "scalar"
    assert engines(1, isa=ISAS[-1]).isa == ISAS[-1]
    monkeypatch.setenv("FASTDECODE_ISA", "sse9")
    with pytest.raises(ValueError, match="FASTDECODE_ISA 'sse9' cannot be used; this machine has scalar"):
        engines(1)


def test_threads_are_pinned_where_asked(engines):
    cpu = min(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    engines(2, cpus=[cpu, cpu])
    new = set(os.listdir("/proc/self/task")) - before
    assert len(new) == 2 and all(os.sched_getaffinity(int(t)) == {cpu} for t in new)
    with pytest.raises(ValueError, match="on CPU 1023"):
        engines(1, cpus=[1023])
    with pytest.raises(ValueError, match="cpus: 1 given, 2 needed"):
        engines(2, cpus=[0])


@pytest.mark.quick
def test_random_walk(links):
    """Random steps, forks, trims and frees over shared prefixes, every O row checked."""
    link = links(Geometry(n_slots=2, max_rows=128, n_layers=2), KV_FP32, 2 * 60, 12, windows=[0, 180], threads=3)
    rng = np.random.default_rng(5)
    for _ in range(250):
        live, action = sorted(link.shadows), rng.integers(10)
        src = int(rng.choice(live)) if live else None
        if live and action == 0:
            link.forget(src)
        elif live and action == 1:
            link.trim(src, int(rng.integers(1, link.shadows[src].length + 1)))
        elif live and action == 2 and len(live) < 12 and link.lease.stats()["pages_used"] < 60:
            dst = next(s for s in range(12) if s not in live)
            link.fork(src, dst, int(rng.integers(1, link.shadows[src].length + 1)))
        elif link.lease.stats()["pages_used"] < 45:
            chosen = rng.permutation(12)[: rng.integers(1, 5)]
            kinds = sorted((bool(rng.integers(3)) for _ in chosen), reverse=True)
            step = [(int(s), int(rng.integers(1, 32)), kind) for s, kind in zip(chosen, kinds, strict=True)]
            link.step(int(rng.integers(2)), step)
        else:
            link.forget(max(live, key=lambda s: link.shadows[s].length))
    assert link.lease.stats()["refused"] == 0
