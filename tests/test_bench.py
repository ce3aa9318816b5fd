"""`fastdecode-bench` prints what it promises. No figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

BENCH = [sys.executable, "-m", "fastdecode.bench.cli"]


def bench(*argv: str) -> str:
    done = subprocess.run([*BENCH, *argv], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_decode_prints_one_object_with_the_split_its_parts_and_a_peer():
    argv = ["--batch", "5", "--context", "70", "--steps", "2", "--rounds", "2", "--mini-batches", "2"]
    result = json.loads(bench("decode", *argv, "--peer", "transformers", "--json"))
    for name in ("tokens_per_s", "s_tokens_per_s", "r_tokens_per_s", "bound_ratio"):
        assert result[name] > 0
    assert (result["batch"], result["context"], result["mini_batches"]) == (5, 70, 2)
    low, high = result["spread"]["bound_ratio"]
    assert low <= result["bound_ratio"] <= high
    assert result["peers"]["transformers"]["tokens_per_s"] > 0


def test_decode_on_a_checkpoint_it_made(tmp_path):
    shape = ["--layers", "2", "--hidden", "64", "--intermediate", "96", "--heads", "4", "--kv-heads", "2"]
    out = bench("checkpoint", "--out", str(tmp_path / "random"), *shape, "--head-size", "24", "--vocab", "300")
    assert "parameters" in out
    argv = ["--batch", "3", "--context", "1", "--steps", "1", "--rounds", "1", "--kv-dtype", "int8"]
    table = bench("decode", "--model", str(tmp_path / "random"), *argv)
    assert all(name in table for name in ("split", "S alone", "R alone", "to the bound"))


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["decode", "--batch", "1", "--mini-batches", "2"], "--batch is smaller than --mini-batches"),
        (["decode", "--batch", "2", "--context", "99999999"], "KV pages"),
        (["decode", "--model", "/nonexistent"], "/nonexistent"),
    ],
)
def test_a_bad_call_is_one_sentence(argv, sentence):
    done = subprocess.run([*BENCH, *argv], capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert sentence in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
