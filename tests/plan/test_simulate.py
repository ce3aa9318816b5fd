"""The engine in virtual time: the clock, the pace of steps that share a system, and `fastdecode-plan simulate`."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from engines.virtual import PAGE_BYTES, serve, toy_system

from fastdecode.bench.serving.workload import MOONCAKE_BLOCK, LoadRequest
from fastdecode.plan import simulation
from fastdecode.plan.cli import main
from fastdecode.plan.equations import StageTimes, Work, steady
from fastdecode.plan.virtual_system import VirtualRunner, VirtualStep
from fastdecode.spart.step.batch import StepOutput

FLAT = ((1, 0.010), (512, 0.0101))


def test_the_clock_jumps_to_the_next_timer():
    async def work():
        loop, ended = asyncio.get_running_loop(), []

        async def one(seconds):
            await asyncio.sleep(seconds)
            ended.append((seconds, loop.time()))

        await asyncio.gather(*(one(seconds) for seconds in (7200.0, 1.5, 86400.0, 0.0)))
        return ended

    assert simulation.run(work()) == [(t, pytest.approx(t)) for t in (0.0, 1.5, 7200.0, 86400.0)]


def test_work_that_nothing_can_wake_is_an_error():
    async def work():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="everything waits"):
        simulation.run(work())


@pytest.mark.parametrize("in_turns", [False, True])
def test_steps_that_share_a_system_slow_each_other_down(in_turns):
    """A takes 4 s by itself, B 4.5 s; B begins 1 s after A."""
    a, b = StageTimes(3.0, 1.0, 0, 0, 0), StageTimes(4.0, 0.5, 0, 0, 0)

    async def work():
        loop, runner = asyncio.get_running_loop(), VirtualRunner(in_turns)

        def submit(parts):
            future = runner.submit(VirtualStep(Work(1, 1), parts, StepOutput([], 0.0, 0.0, 0)))
            future.add_done_callback(lambda _: ended.append(loop.time()))
            return future

        ended: list[float] = []
        first = submit(a)
        await asyncio.sleep(1.0)
        await asyncio.gather(first, submit(b))
        return ended

    # A has three quarters to come, at a pace of 7 s a step, the two S-Parts (in turns: 8.5); then B ends by itself.
    first = 1.0 + 0.75 * (8.5 if in_turns else 7.0)
    second = first + (1 - 0.75) * 4.5
    assert simulation.run(work()) == pytest.approx([first, second])


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_full_system_serves_what_the_equations_say(mini_batches):
    """Sequences of mixed ages: they arrive evenly, as many as the slots can hold."""
    system, slots, length = toy_system(((1, 0.010), (9, 0.012)), 2e-5), 8 * mini_batches, 100
    predicted = steady(system, slots, mini_batches, n_prompt=10, n_output=length)
    every = predicted.seconds * length / slots
    load = [(i * every, 10, length) for i in range(8 * slots)]
    run = serve(load, system, batch=8, mini_batches=mini_batches, target_tbt=None, pages=64)
    middle = [step for step in run.steps if 2 * slots * every < step.end < 7 * slots * every]
    rate = sum(step.rows for step in middle) / (middle[-1].end - middle[0].end)
    assert rate == pytest.approx(predicted.tokens_per_second, rel=0.1)
    usage = [sample["kv_cache_usage_perc"] for sample in run.run.samples]
    assert 0.7 * slots / 64 < max(usage) <= 1.3 * slots / 64  # a page holds a sequence; a FREE takes a moment


def test_a_shared_prefix_is_computed_once():
    shared = [LoadRequest(0.1 * i, 4 * MOONCAKE_BLOCK + 10, 2, (1, 2, 3, 4)) for i in range(8)]
    apart = [LoadRequest(r.arrival, r.prompt_tokens, 2) for r in shared]
    system = toy_system(((1, 0.010), (101, 0.020)), 1e-9)
    once, each = (serve(load, system).run.seconds for load in (shared, apart))
    assert once < 0.5 * each


def test_sequences_that_outgrow_the_gpu_are_cut_and_read_in_both_places():
    """Two sequences of up to 512 tokens on a GPU of five pages are cut. The GPU reads ten times as fast as the
    R-node, so the steps tell where tokens were read."""
    system = dataclasses.replace(toy_system(FLAT, 1e-5), gpu_bytes_per_second=64 / 1e-6)
    load = [(0.0, 200, 300), (0.0, 200, 300)]
    resident, cut, remote = (serve(load, system, gpu_kv=pages * PAGE_BYTES, target_tbt=None) for pages in (20, 5, 0))
    assert not any(run.preemptions for run in (resident, cut, remote))
    assert all(step.read_tokens == 0 for step in resident.steps)
    on_r_node = [step.read_tokens for step in cut.steps]
    assert on_r_node[0] == 0 and on_r_node[-1] == 384  # three of eight pages
    assert resident.run.seconds < cut.run.seconds < remote.run.seconds


def test_without_r_nodes_a_gpu_preempts():
    system = dataclasses.replace(toy_system(FLAT, 1e-5, r_nodes=0), gpu_bytes_per_second=64 / 1e-6)
    run = serve([(0.0, 200, 300), (0.0, 200, 300)], system, gpu_kv=5 * PAGE_BYTES, target_tbt=None)
    assert [answer.output_tokens for answer in run.run.answers] == [300, 300]
    assert run.preemptions == 1


def test_users_send_their_next_request_when_the_last_one_is_answered():
    run = serve([(0.0, 10, 20)] * 6, toy_system(FLAT, 1e-6), users=2)
    answers = run.run.answers
    assert [answer.sent for answer in answers[:2]] == [0.0, 0.0]
    assert [answer.sent for answer in answers[2:]] == sorted(answer.finished for answer in answers)[:4]


def test_a_prompt_that_cannot_fit_fails_and_the_others_do_not():
    run = serve([(0.0, 300, 5), (0.0, 3000, 5), (0.0, 200, 5)], toy_system(FLAT, 1e-6), pages=4)
    answers = run.run.answers
    assert [answer.output_tokens for answer in answers] == [5, 0, 5]
    assert "PromptTooLong" in answers[1].error


ARGV = ["simulate", "--profile", "a10-epyc7452", "--requests", "24", "--input-tokens", "20", "--output-tokens", "40"]


def test_both_schedules_are_set_side_by_side(capsys):
    main([*ARGV, "--max-batch-size", "4", "--output-bound", "40"])
    text = capsys.readouterr().out
    assert "--schedule greedy" in text and "--schedule stable" in text and "virtual times" in text
    assert "stable beside greedy" in text and "(data sheet)" in text


def test_the_figures_are_those_of_serve(capsys, tmp_path):
    trace = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{i:02d}.0,{50 + i},{10 + i}" for i in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    argv = ["--trace", str(trace), "--history", "10", "--requests", "20", "--slo-ttft", "5", "--json"]
    main(["simulate", "--profile", "a10-epyc7452", "--schedule", "stable", "--r-nodes", "2", *argv])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    tokens = sum(10 + i for i in range(10, 30))
    assert (row["completed"], row["failed"]) == (20, 0)
    assert row["output_tokens_per_s"] == pytest.approx(tokens / row["seconds"])
    assert row["goodput_per_s"] == pytest.approx(20 / row["seconds"])
    assert 19 < row["seconds"] < 25 and row["ttft_ms"]["p50"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--history", "5"], "--history needs a --trace"),
        (["--rate", "1,2"], "one --rate"),
        (["--kv-memory", "1KiB"], "do not hold one KV page"),
        (["--r-nodes", "0"], "--gpu-kv says where"),
    ],
)
def test_what_cannot_be_is_refused(argv, message):
    with pytest.raises(SystemExit, match=message):
        main([*ARGV, *argv])
