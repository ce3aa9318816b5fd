"""The command line and what it refuses; what the machine offers."""

from __future__ import annotations

import dataclasses
import os

import pytest

from fastdecode import machine
from fastdecode.config import ConfigError, NodeConfig, format_bytes, parse_bytes


def test_defaults_are_those_of_the_dataclass():
    assert NodeConfig.from_args([]) == NodeConfig()


def test_every_field_is_an_option(capsys):
    with pytest.raises(SystemExit) as exit_:
        NodeConfig.from_args(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(NodeConfig):
        assert "--" + field.name.replace("_", "-") in text


def test_values_are_parsed():
    config = NodeConfig.from_args(
        [
            "--role",
            "r",
            "--listen",
            "tcp://127.0.0.1:7300",
            "--listen",
            "shm:///tmp/r",
            "--kv-memory",
            "4GiB",
            "--cpus",
            "0-2,5",
        ]
    )
    assert config.listen == ("tcp://127.0.0.1:7300", "shm:///tmp/r")
    assert config.kv_memory == 4 << 30
    assert config.cpus == (0, 1, 2, 5)


@pytest.mark.parametrize(
    "argv, complaint",
    [
        ("--role x", "invalid choice: 'x'"),
        ("--role r", "needs --listen"),
        ("--role r --listen /tmp/r", "not a URL"),
        ("--role r --listen shm:///tmp/r --port 80", "--port is not an option of --role r"),
        ("--listen shm:///tmp/r", "--listen is not an option of --role s"),
        ("--port 65536", "65536 is not a TCP port"),
        ("--kv-memory 4parsecs", "not a size"),
        ("--kv-memory 0", "not a size"),
        ("--kv-memory 1e400", "not a size"),
        ("--kv-memory 1e9TiB", "not a size"),
        ("--cpus 0-99999999999", "cpus are numbered 0 to 1023"),
        ("--threads 4294967297", "--threads is at most 512"),
        ("--spin-us 4294967296", "--spin-us is at most 60000000"),
        ("--mini-batches 0", "0 is not a positive number"),
        ("--mini-batches 17", "at most 16"),
        ("--max-batch-tokens 70000", "at most 65536"),
        ("--max-batch-size 600", "every sequence needs a row"),
        ("--kv-dtype int3", "invalid choice: 'int3'"),
        ("--r-node tcp://h:1 --threads 2", "--threads is for the embedded R-node"),
        ("--cpus 0-1 --threads 3", "names 2 cpus for --threads 3"),
        ("--cpus 3-1", "not a list of cpus"),
        ("--drain-seconds nan", "not a time"),
        ("--modle x", "unrecognized arguments"),
        ("--mini 3", "unrecognized arguments"),
    ],
)
def test_bad_option_is_an_error_that_names_it(argv, complaint, capsys):
    with pytest.raises(SystemExit) as exit_:
        NodeConfig.from_args(argv.split())
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_secret_file_must_exist_and_say_something(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        NodeConfig(secret_file=tmp_path / "none").read_secret()
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        NodeConfig(secret_file=empty).read_secret()
    good = tmp_path / "good"
    good.write_text("s3cret\n")
    assert NodeConfig(secret_file=good).read_secret() == b"s3cret"


@pytest.mark.parametrize(
    "text, size",
    [
        ("1", 1),
        ("1b", 1),
        ("2k", 2000),
        ("2KiB", 2048),
        ("1.5GiB", 3 << 29),
        ("4G", 4 * 10**9),
        ("512 MiB", 512 << 20),
        ("1e9", 10**9),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


def test_sizes_are_printed_for_people():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]


def test_usable_cpus_follow_the_affinity_mask():
    before = os.sched_getaffinity(0)
    one = min(before)
    os.sched_setaffinity(0, {one})
    try:
        assert machine.usable_cpus() == [one]
    finally:
        os.sched_setaffinity(0, before)


def test_cgroup_limits_hold_though_the_host_has_more(tmp_path, monkeypatch):
    """The leaf (cgroup v2) allows a core and a half and 3 GiB; 1 GiB is used, a quarter of which is page cache."""
    leaf = tmp_path / "a" / "b"
    leaf.mkdir(parents=True)
    (leaf / "cpu.max").write_text("150000 100000\n")
    (leaf / "memory.max").write_text(f"{3 << 30}\n")
    (leaf / "memory.current").write_text(f"{1 << 30}\n")
    (leaf / "memory.stat").write_text(f"anon 1\ninactive_file {1 << 28}\n")
    (tmp_path / "a" / "memory.max").write_text("max\n")
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(machine, "_cgroup_dirs", lambda: [leaf, tmp_path / "a", tmp_path])
    monkeypatch.setattr(machine, "_meminfo", lambda field: 64 << 30)
    assert len(machine.usable_cpus()) == 1
    assert machine.available_memory() == (3 << 30) - (1 << 30) + (1 << 28)
