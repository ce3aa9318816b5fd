"""The R-engine and every installed peer of the attention benchmark compute attention, compared with float64."""

from __future__ import annotations

import argparse
import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest

from fastdecode.bench import attention
from fastdecode.bench.attention_peers import PEERS, TOLERANCE, check, expected
from fastdecode.bench.other_version_peer import OtherVersionAttention
from fastdecode.bench.rpart import RPart
from fastdecode.bench.shape import Shape
from fastdecode.daemon.machine import usable_cpus
from fastdecode.daemon.roofline import Roofline
from fastdecode.kernels._native import read_seconds, read_variants
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS

pytestmark = pytest.mark.quick

SHAPE = Shape(context=130, group=3, head_size=64, kv_heads=2)  # the last page or block is not full
KV_BYTES = 1 << 20


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_r_engine_of_the_benchmark_attends_to_every_token_of_every_sequence(kv_dtype):
    ours = RPart(SHAPE, kv_dtype, KV_BYTES, [0], progress=False)
    try:
        for _ in range(2):  # the second call finds the cache as the first one did
            seconds, kv_bytes = ours.layer()
            assert seconds > 0 and kv_bytes == ours.kv_bytes
            np.testing.assert_allclose(ours.output() - expected(SHAPE), 0, atol=TOLERANCE[kv_dtype])
    finally:
        ours.close()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_attends_to_every_token_of_every_sequence(name, kv_dtype, monkeypatch):
    monkeypatch.setenv("FASTDECODE_OTHER_PYTHON", sys.executable)  # this version stands in for another one
    if not PEERS[name].installed():
        pytest.skip(f"needs {PEERS[name].needs}")
    peer = PEERS[name](SHAPE, kv_dtype, KV_BYTES, 1)
    try:
        assert peer.layer() > 0
        assert peer.kv_bytes >= KV_BYTES
        check(peer, SHAPE, kv_dtype)
    finally:
        peer.close()


@pytest.mark.parametrize("scattered", [False, True])
def test_the_pages_of_another_version_are_scattered_as_ours_are(scattered, monkeypatch):
    monkeypatch.setenv("FASTDECODE_OTHER_PYTHON", sys.executable)
    long = replace(SHAPE, context=8 * PAGE_TOKENS)
    peer = OtherVersionAttention(long, "int8", 64 << 20, 1, scattered)
    try:
        assert (peer.run_pages < 1.5) == scattered
    finally:
        peer.close()


def test_rounds_are_shared_among_fills(monkeypatch):
    monkeypatch.setenv("FASTDECODE_OTHER_PYTHON", sys.executable)
    parser = argparse.ArgumentParser()
    attention.add_arguments(parser)
    argv = ["--kv-dtype", "int8", "--kv-bytes", "1MiB", "--rounds", "4", "--fills", "2", "--judge-below", "1000000"]
    rows = attention._peer_rows(parser.parse_args(argv), "int8", SHAPE, usable_cpus()[:1], ["torch", "fastdecode"])
    assert [(row["peer"], row["rounds"]) for row in rows] == [("torch", 4), ("fastdecode", 4)]
    assert all(row["ours_to_peer"] > 0 for row in rows)


def test_a_peer_that_does_not_see_every_token_is_not_timed():
    peer = PEERS["torch"](SHAPE, "fp32", KV_BYTES, 1)
    try:
        peer.layer()
        check(peer, SHAPE, "fp32")
        with pytest.raises(RuntimeError, match="is wrong by"):
            check(peer, replace(SHAPE, context=SHAPE.context - 1), "fp32")
    finally:
        peer.close()


@pytest.mark.parametrize("cold", [False, True])
def test_the_roofline_counts_every_pass(cold):
    roofline = Roofline(1 << 20, [0], cold=cold)
    try:
        assert roofline.gbps() > 0 and roofline.gbps(20) > 0
    finally:
        roofline.close()


def test_taking_a_buffer_out_of_the_caches_keeps_its_bytes():
    buffer = np.random.default_rng(1).bytes(1 << 16)
    numbers = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    numbers[:] = np.frombuffer(buffer, np.uint8)
    read_seconds(numbers, [0], 1, 0, True)
    assert numbers.tobytes() == buffer


def test_the_roofline_keeps_a_variant_that_exists():
    roofline = Roofline(1 << 20, [0], variant=len(read_variants()))
    try:
        with pytest.raises(ValueError, match="there is no variant"):
            roofline.gbps()
        roofline.variant = 0
        assert roofline.choose() > 0 and 0 <= roofline.variant < len(read_variants())
    finally:
        roofline.close()
