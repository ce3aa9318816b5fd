"""`fastdecode-plan stress`: streams beside disturbances in virtual time, and what it prints."""

from __future__ import annotations

import json
from functools import partial

from engines.virtual import PAGE_BYTES, toy_system

from fastdecode.demo import model_dir
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.plan.cli import main
from fastdecode.plan.simulation import simulate
from fastdecode.plan.stress import Stress

SYSTEM = toy_system(((1, 0.010), (101, 0.020)), 1e-8)


def stress(target=None, pages=10_000):
    limits = SchedulerLimits(2, 512, 16)
    memory = pages * PAGE_BYTES
    return Stress(partial(simulate, system=SYSTEM, limits=limits, memory=memory, target_tbt=target), limits)


def test_long_prompts_keep_the_target_and_without_one_they_do_not():
    """The steps of streams alone take 20 ms; a chunk of 512 rows takes 51 ms more."""
    alone, beside, _ = stress(0.026).beside(8, 2000, 4, 300)
    assert beside["tbt_p99_ms"] < 1.5 * alone["tbt_p99_ms"]
    alone, beside, _ = stress().beside(8, 2000, 4, 300)
    assert beside["tbt_p99_ms"] > 2 * alone["tbt_p99_ms"]


def test_overload_is_refused_and_those_that_are_taken_are_not_slower():
    """32 sequences of 256 tokens have room in 64 pages, so none is paused."""
    capacity, over = stress(0.040, pages=64).overload(10.0, 5.0, max_queued=4)
    assert over["refused"] > 5 * over["taken"] > 0 and not over["failed"]
    assert over["tbt_p99_ms"] < 1.2 * capacity["tbt_p99_ms"]
    assert over["recomputed_share"] < 0.02


def test_the_table_and_the_json_have_all_loads(capsys):
    argv = ["stress", "--model", str(model_dir()), "--profile", "a10-epyc7452", "--profile", "desktop-ddr4"]
    argv += ["--streams", "2", "--choices", "2", "--minutes", "0.001", "--max-batch-size", "4"]
    main(argv)
    printed = capsys.readouterr().out
    main([*argv, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 5 and all(row["load"] in printed for row in rows)
    assert "data sheet" in printed
