"""`fastdecode-bench decode` over several cells: peers in processes of their own, which may hang, refuse or die."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes.forked import run

from fastdecode.bench.contenders import PeerRun, SplitSystem
from fastdecode.bench.decode_cell import Limits, Measured, take_turns
from fastdecode.bench.decode_report import row_of
from fastdecode.bench.load import Cell, PeerLoad
from fastdecode.bench.peers import Command, Peer
from fastdecode.demo import model_dir

BENCH = ["-m", "fastdecode.bench.cli", "decode", "--steps", "2", "--rounds", "2"]
LOAD = PeerLoad(model_dir(), "auto", torch.float32, torch.device("cpu"), 1, 2, 40, 4)


def decode(*argv: str) -> subprocess.CompletedProcess[str]:
    return run(*BENCH, *argv)


def test_a_sweep_keeps_its_cells_and_goes_on_with_those_it_lacks(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    argv = ["--context", "16", "--context", "140", "--kv-dtype", "fp32", "--kv-dtype", "int8", "--out", str(out)]
    can_plot = importlib.util.find_spec("matplotlib") is not None
    argv += ["--peer", "transformers", *(["--plot", str(plot)] if can_plot else [])]
    done = decode("--batch", "2", *argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("x met") + done.stdout.count("x missed") >= 4
    assert not can_plot or plot.read_bytes().startswith(b"\x89PNG")
    first = json.loads(out.read_bytes())["rows"]
    assert [(row["context"], row["kv_dtype"]) for row in first] == [
        (context, kv_dtype) for context in (16, 140) for kv_dtype in ("fp32", "int8")
    ]
    for row in first:
        assert row["peers"]["transformers"]["ratio"] == row["best_ratio"] > 0 and row["note"] == ""
        assert row["s_gbps"] > 0 and row["s_roofline_gbps"] > 0
        loops = row["s_loops"]
        shares = [loop[name] for loop in loops.values() for name in ("late", "done", "split_late") if name in loop]
        assert all(0 <= share <= 1 for share in shares)
        assert list(loops)[-1] == "alone" and loops["alone"]["seconds"] > 0
        if "qkv" in loops:  # not with one thread, nor where torch multiplies
            counts = {name: loop.get("loops") for name, loop in loops.items()}
            counts.setdefault("o", 5)  # with panels of 32 outputs it is too small for two threads
            assert [counts[name] for name in ("qkv", "o", "up", "down", "other")] == [5, 5, 5, 5, 1]
        assert row["step_shares"]["s"] + row["step_shares"]["r"] + row["step_shares"]["hand_over"] == pytest.approx(1)
    fp32, int8 = first[:2]  # transformers has one format, so both formats took turns with the same rounds
    assert fp32["spread"]["transformers"] == int8["spread"]["transformers"]
    kept = json.loads(out.read_bytes())
    kept["rows"] = first[:3]  # as if the run had ended there
    out.write_text(json.dumps(kept))
    result = json.loads(decode("--batch", "2", *argv, "--json").stdout)
    assert result["rows"][:3] == first[:3] and len(result["rows"]) == 4
    assert result["rows"][3]["tokens_per_s"] != first[3]["tokens_per_s"]
    assert "other settings" in decode("--batch", "2", *argv, "--weights", "dense").stderr


def test_an_interrupted_sweep_prints_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    contexts = [16, 24, 32, 40, 48]
    options = [option for context in contexts for option in ("--context", str(context))]
    argv = ["--batch", "1", *options, "--out", str(out), "--rounds", "1000000"]
    process = subprocess.Popen(
        [sys.executable, *BENCH, *argv, "--cell-seconds", "5"], stdout=subprocess.PIPE, text=True
    )
    while not out.exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "cut off after 5 s" in printed  # the first cell has ended by its time
    rows = json.loads(out.read_bytes())["rows"]
    assert len(rows) < len(contexts)
    assert [row["context"] for row in rows] == contexts[: len(rows)]
    assert all(row["rounds"] > 1 for row in rows)


def test_a_cell_that_memory_does_not_hold_is_a_word_in_the_table(tmp_path: Path) -> None:
    argv = ["--batch", "1", "--context", "16", "--context", "99999999", "--peer", "transformers"]
    done = decode(*argv)
    assert done.returncode == 0, done.stderr
    assert "no memory" in done.stdout and "of memory" in done.stdout and "GiB are free" in done.stdout


class Stub(Peer):
    """A peer whose worker is the text of a class."""

    name = "stub"

    def __init__(self, folder: Path, text: str):
        super().__init__(LOAD)
        self._file = folder / "stub_worker.py"
        self._file.write_text("import os, time\nclass Worker:\n" + text)

    def format_of(self, kv_dtype: str) -> str:
        return "fp32"

    def command(self, kv_format: str, kv_bytes: int) -> Command:
        return Command(sys.executable, self._file, {}, {})


FILL = "    def fill(self, **shape): print('on stdout')\n    def clear(self): pass\n"


async def in_turns(folder: Path, text: str, *cells: Cell) -> list[Measured]:
    """What a stub did in each cell, with five seconds in each."""
    run, limits = PeerRun(Stub(folder, text), "fp32", 8, 0), Limits(1, 3, 5.0, 30.0, asyncio.Event())
    results: list[Measured] = []
    try:
        for cell in cells:
            results.append(Measured())
            await take_turns(cell, {run: results[-1]}, limits, 0)
    finally:
        await run.close()
    return results


async def test_a_peer_that_hangs_is_cut_off_and_not_tried_in_larger_cells(tmp_path: Path) -> None:
    text = f"""
    def fill(self, batch, context, format):
        if context > 40:
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
            time.sleep(600)
    def round(self, steps): return 0.5
    def clear(self): pass
"""
    cells = Cell(2, 40), Cell(2, 41), Cell(3, 50), Cell(1, 40)
    small, large, larger, small_again = await in_turns(tmp_path, text, *cells)
    assert (list(small.rounds), small.note) == ([0, 1, 2, 3], "")
    assert (large.rounds, large.note) == ({}, "cut off after 5 s")
    assert (larger.rounds, larger.note) == ({}, "not tried: cut off at batch 2, context 41")
    assert (len(small_again.rounds), small_again.note) == (4, "")  # its process was started again
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_a_peer_that_is_slow_keeps_the_rounds_that_it_ended(tmp_path: Path) -> None:
    text = FILL + "    def round(self, steps):\n        time.sleep(600 if os.path.exists('ended') else 0)\n"
    text += f"        os.chdir({str(tmp_path)!r})\n        open('ended', 'w').close()\n        return 0.25\n"
    (slow,) = await in_turns(tmp_path, text, Cell(1, 1))
    assert (slow.note, slow.rounds, slow.judged) == ("cut off after 5 s", {0: {"all": 0.25}}, {0: {"all": 0.25}})


@pytest.mark.parametrize(
    "text, note",
    [
        ("    def __init__(self): raise MemoryError('so much')\n", "does not start: MemoryError: so much"),
        (FILL + "    def round(self, steps): raise ValueError('no')\n", "ValueError: no"),
        (FILL + "    def round(self, steps): os._exit(7)\n", "ended with status 7"),
    ],
)
async def test_a_peer_that_refuses_says_why(tmp_path: Path, text: str, note: str) -> None:
    one, two = await in_turns(tmp_path, text, Cell(1, 1), Cell(2, 2))
    assert one.note == two.note == note and not one.rounds and not two.rounds


class Reading(SplitSystem):
    """A split system whose steps read 1000 bytes of KV-cache."""

    def step_bytes(self, cell: Cell) -> float:
        return 1000.0


def test_goals_follow_the_bytes_of_a_step(tmp_path: Path) -> None:
    """Where a step reads more bytes of KV-cache than of weights, more is asked for, and most of int8."""
    own = Measured({n: {"all": 1.0, "s": 0.5, "r": 0.25} for n in (0, 1, 2)})
    peers = [
        (PeerRun(Stub(tmp_path, ""), "q8_0", 8, 0), Measured({n: {"all": 1.7} for n in (0, 1, 2)})),
        (PeerRun(Stub(tmp_path, ""), "fp16", 8, 0), Measured({n: {"all": 1.9} for n in (5, 6)})),
    ]

    def row(kv_dtype: str, weight_bytes: int) -> dict[str, Any]:
        split = Reading(None, [], kv_dtype, 8, 1)  # type: ignore[arg-type]
        return row_of(
            Cell(4, 100),
            split,
            own,
            peers[:1],
            peers,
            in_turns=True,
            weight_bytes=weight_bytes,
            read_bytes=5 * 10**9,
            roofline=200.0,
        )

    small = row("int8", 999)
    # The S-Part alone takes half a second for 8 steps, each of which reads the weights.
    assert (small["s_gbps"], small["s_roofline_gbps"]) == (pytest.approx(80.0), 200.0)
    assert (small["tokens_per_s"], small["bound_ratio"]) == (32.0, pytest.approx(0.75))
    assert small["step_shares"] == pytest.approx({"s": 0.5, "r": 0.25, "hand_over": 0.25})
    assert [(goal["wanted"], goal["ratio"], goal["met"]) for goal in small["goals"]] == [
        (1.5, pytest.approx(1.7), True),
        (2.0, pytest.approx(1.9), False),
    ]
    assert [goal["wanted"] for goal in row("fp16", 999)["goals"]] == [1.5]
    assert [goal["wanted"] for goal in row("int8", 1000)["goals"]] == [1.0]
