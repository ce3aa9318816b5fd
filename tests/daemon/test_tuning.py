"""The split of a CPU between the S-Part and the embedded R-node: measured by real nodes, remembered, and overridden."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from nodes.node_process import complete, gone, traces, until

from fastdecode.daemon import machine, tuning
from fastdecode.daemon.check import report
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.split import Split
from fastdecode.daemon.split_search import MOST_SPLITS
from fastdecode.daemon.tuning import Key, Ratios, Record, Speed, in_order, is_open, recall, record_key, remember
from fastdecode.demo import model_dir
from fastdecode.spart.backend import choose_backend

LARGE = 10**9  # parameters
CONFIG = NodeConfig(model=model_dir(), port=0, kv_memory=256 << 20)
DATE = "2001-02-03"
needs_two_cpus = pytest.mark.skipif(len(machine.usable_cpus()) < 2, reason="one cpu cannot be split")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fastdecode"


def key_of_demo() -> Key:
    """The key of the demo model, whose parameters are enough for a measurement."""
    return record_key(CONFIG, choose_backend("auto", model_dir()), torch.bfloat16)


def record(key: Key, split: Split) -> Record:
    return Record(key, DATE, 32, 1000, [Speed(split, 123.4, 5.6), Speed(Split(2, 2, 1), 100.0, 7.8)])


def side_by_side() -> Split:
    """A split that this machine may choose."""
    cpus = len(machine.usable_cpus())
    return Split(cpus - cpus // 2, cpus // 2, 2)


def answer(node) -> str:
    with node.api() as api:
        return complete(api)


def start_demo(start, *options: str):
    return start("--dtype", "bf16", "--port", "0", "--kv-memory", "256MiB", *options)


@needs_two_cpus
def test_a_node_measures_the_splits_with_real_r_nodes_which_leave_nothing_behind(start, tmp_path, cache):
    remember(record(key_of_demo(), side_by_side()))
    before = traces(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    node = start_demo(start, "--tune", "always", "--secret-file", str(secret))
    said = (
        r"(in turns|side by side), (\d+) \+ (\d+) threads, (\d) mini-batch.*: [\d.]+ tokens/s, [\d.]+ with one "
        "sequence; .*; measured now"
    )
    chosen = node.wait_for(said)
    text = answer(node)
    children = node.children()
    assert len(children) == len(node.api_processes()) + (chosen[1] == "side by side")
    assert f"embedded R-node: {chosen[3]} thread(s)" in node.log.read_text()
    assert node.log.read_text().count("lease of") == 1  # the log does not show the R-nodes of the measurement
    assert node.end() == 0
    assert all(map(gone, children))
    until(lambda: traces(tmp_path) <= before)
    plain = start_demo(start, "--tune", "off")
    assert answer(plain) == text
    assert "tokens/s" not in plain.log.read_text()
    # Beside busy programs nothing is remembered.
    found = recall(key_of_demo())
    assert found and (found.date != DATE) == ("not remembered" not in chosen.string)
    split = found.speeds[0].split
    assert found.date == DATE or 1 < len({speed.split for speed in found.speeds}) <= MOST_SPLITS
    assert found.date == DATE or (split.s_threads, split.r_threads, split.mini_batches) == tuple(
        map(int, chosen.groups()[1:])
    )


def test_a_speed_of_five_digits_has_no_exponent():
    split = side_by_side()
    assert str(Speed(split, 13014.6, 99.987)) == f"{split}: 13015 tokens/s, 99.99 with one sequence"


@needs_two_cpus
def test_a_remembered_split_is_used_without_a_measurement(start):
    split = side_by_side()
    remember(record(key_of_demo(), split))
    said = (
        f"{split}: 123.4 tokens/s, 5.6 with one sequence; in turns, 2 + 2 threads, 1 mini-batch: 100 tokens/s, 7.8 "
        "with one sequence (32 sequences of 1000 tokens)"
    )
    assert said + f"; remembered from {DATE}" in report(NodeConfig(model=model_dir(), dtype="bf16", tune="auto"))
    node = start_demo(start, "--tune", "auto")
    node.wait_for(re.escape(said + f"; remembered from {DATE}"))
    assert answer(node)
    log = node.log.read_text()
    assert f"embedded R-node: {split.r_threads} thread(s)" in log
    assert "measured" not in log
    assert node.end() == 0


@needs_two_cpus
def test_the_end_of_a_node_that_measures_is_the_end_of_its_r_nodes(start, tmp_path):
    before = traces(tmp_path)
    node = start_demo(start, "--tune", "always", "--api-processes", "0", "--log-level", "debug")
    node.wait_for("embedded R-node: ")  # one that is there for the measurement
    while not (children := node.children()):  # one of them is a process, which may start after that line
        assert node.process.poll() is None
        time.sleep(0.01)
    assert node.end() == 0
    assert all(map(gone, children))
    until(lambda: traces(tmp_path) <= before)


@pytest.mark.quick
def test_options_and_models_with_nothing_to_choose_are_not_measured(monkeypatch):
    def is_open_with(n_cpus: int, parameters: int = LARGE, **options) -> bool:
        monkeypatch.setattr(tuning, "usable_cpus", lambda: list(range(n_cpus)))
        return is_open(NodeConfig(**options), parameters)

    assert is_open_with(2) and is_open_with(128)
    assert not (is_open_with(1) or is_open_with(4, parameters=1000) or is_open_with(4, max_batch_size=1))
    for fixed in (
        {"threads": 2},
        {"s_threads": 2},
        {"mini_batches": 1},
        {"cpus": (0,)},
        {"numa_node": 0},
        {"tensor_parallel": 2},
        {"r_node": ("tcp://there:7300",)},
    ):
        assert not is_open_with(4, **fixed), fixed


@pytest.mark.quick
@pytest.mark.parametrize(
    "of_many, of_one, order",
    [
        ([1, 1.5, 1.2], [1, 0.95, 1], [1, 2, 0]),
        ([1, 1.5, 1.2], [1, 0.5, 1], [2, 1, 0]),  # the fastest is slow for one sequence
        ([1, 1.5, 1.2], [1, 0.5, 0.5], [0, 1, 2]),
        ([1, 1.02, 0.9], [1, 1, 1], [0, 1, 2]),  # no faster than noise
        ([1], [1], [0]),  # only the rule was measured
    ],
)
def test_a_split_must_be_faster_for_many_sequences_and_not_slower_for_one(of_many, of_one, order):
    splits = [Split(4, 4, 1, in_turns=True), Split(2, 2, 2), Split(1, 3, 2)]
    measured = {split: Ratios(*ratios) for split, *ratios in zip(splits, of_many, of_one, strict=False)}
    assert in_order(measured) == [splits[i] for i in order]


@pytest.mark.quick
def test_check_says_which_split_a_node_would_have():
    assert "measured at start" in report(NodeConfig(model=model_dir(), tune="auto")) or len(machine.usable_cpus()) == 1
    assert "split       side by side, 3 + 1 threads, 2 mini-batches" in report(
        NodeConfig(model=model_dir(), s_threads=3, threads=1)
    )
    assert "split       in turns" in report(NodeConfig(model=model_dir(), tune="off"))
    assert "split" not in report(NodeConfig(model=model_dir(), r_node=("tcp://there:7300",)))


@pytest.mark.quick
def test_what_is_remembered_comes_back_for_the_same_model_and_machine_only():
    key = key_of_demo()
    assert recall(key) is None
    remember(record(key, side_by_side()))
    assert recall(key) == record(key, side_by_side())
    for name in key:
        assert recall(key | {name: "another"}) is None
    assert record_key(CONFIG, choose_backend("auto", model_dir()), torch.float32) != key


@pytest.mark.quick
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"key": {}, "speeds": 3}', b"another's", b"none"])
def test_a_corrupt_record_counts_as_none_and_is_replaced(content, cache):
    key = key_of_demo()
    remember(record(key, Split(1, 1, 2)))
    [path] = cache.iterdir()
    if content == b"another's":
        content = path.read_bytes().replace(str(key["cpu"]).encode(), b"i386")
    elif content == b"none":
        content = re.sub(rb'"speeds": \[.*\]', b'"speeds": []', path.read_bytes(), flags=re.DOTALL)
    path.write_bytes(content)
    assert recall(key) is None
    remember(record(key, Split(1, 1, 2)))
    assert recall(key)
    assert list(cache.iterdir()) == [path]


@pytest.mark.quick
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    """The cache's folder is a file, which stops root, too."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember(record(key_of_demo(), Split(1, 1, 2)))
    assert recall(key_of_demo()) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    remember(record(key_of_demo(), Split(1, 1, 2)))
    assert recall(key_of_demo()) and list((tmp_path / "home/.cache/fastdecode").iterdir())


def test_the_time_that_other_programs_take_is_told_from_that_of_children():
    burn = "import time\nwhile time.process_time() < 1.0: pass\nprint(flush=True)\ninput()"
    cpus = os.sched_getaffinity(0)
    own, busy = machine.own_seconds(), machine.busy_seconds(cpus)
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout and child.stdin
    child.stdout.readline()
    living, busy = machine.own_seconds() - own, machine.busy_seconds(cpus) - busy
    child.communicate(b"\n")
    assert living > 0.9
    assert busy > 0.9 * living  # the kernel counts both in ticks
    assert machine.own_seconds() - own >= living - 0.1  # the child's time stays when it has ended
