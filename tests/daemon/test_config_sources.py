"""Options from environment variables and from a YAML file, behind the command line."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from fastdecode.daemon.child import child_environment
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_sources import check_environment, variable

pytestmark = pytest.mark.quick


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "node.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def setenv(monkeypatch):
    return lambda name, value: monkeypatch.setenv(variable(name), value)


def test_a_file_sets_options(write):
    text = (
        "port: 9000\nserved-model-name: [a, org/b]\nkv_memory: 2GiB\nno-prefix-cache: true\nprefault: false\n"
        "r-node:\n  - tcp://h1:7300\n  - tcp://h2:7300\ndrain_seconds: 1.5\nmax_model_len:\n"
    )
    with pytest.raises(SystemExit):  # --kv-memory is for an embedded R-node
        NodeConfig.from_args(["--config", write(text)])
    config = NodeConfig.from_args(["--config", write(text.replace("kv_memory: 2GiB\n", ""))])
    assert (config.port, config.served_model_name, config.drain_seconds) == (9000, ("a", "org/b"), 1.5)
    assert config.r_node == ("tcp://h1:7300", "tcp://h2:7300")
    assert config.no_prefix_cache and not config.prefault and config.max_model_len is None


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(write, setenv):
    path = write("port: 1\nhost: file\nmax_queued: 1\nr_node: [tcp://file:1]\n")
    setenv("port", "2")
    setenv("host", "environment")
    setenv("r_node", "tcp://e:1, tcp://e:2")
    setenv("config", path)
    config = NodeConfig.from_args(["--port", "3"])
    assert (config.port, config.host, config.max_queued) == (3, "environment", 1)
    assert config.r_node == ("tcp://e:1", "tcp://e:2")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("no", False), ("0", False)])
def test_switches_in_the_environment(setenv, text, value):
    setenv("no_prefix_cache", text)
    assert NodeConfig.from_args([]).no_prefix_cache is value


def test_the_environment_of_one_role_does_not_disturb_the_other(setenv):
    setenv("port", "9000")
    config = NodeConfig.from_args(["--role", "r", "--listen", "shm:///tmp/r.sock"])
    assert config.port == NodeConfig().port


def test_a_role_from_a_file_counts_for_the_environment(write, setenv):
    setenv("listen", "shm:///tmp/r.sock")
    assert NodeConfig.from_args(["--config", write("role: r")]).listen == ("shm:///tmp/r.sock",)


def test_an_unknown_role_in_the_environment_is_named(setenv, capsys):
    setenv("role", "x")
    with pytest.raises(SystemExit):
        NodeConfig.from_args([])
    assert "environment: argument --role: invalid choice: 'x'" in capsys.readouterr().err


def test_a_child_gets_no_options_by_its_environment(setenv):
    setenv("port", "1")
    setenv("isa", "avx2")
    kept = child_environment()
    assert variable("port") not in kept and kept[variable("isa")] == "avx2" and kept["PATH"] == os.environ["PATH"]


def test_off_in_a_file_is_the_choice_off(write):
    """YAML reads it as false."""
    config = NodeConfig.from_args(["--config", write("tune: off\nhuge-pages: off\nspeculate: off")])
    assert (config.tune, config.huge_pages, config.speculate) == ("off", "off", "off")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port: many", "node.yaml: argument --port: 'many' is not a whole number"),
        ("nonsense: 1", "there is no option 'nonsense' ("),
        ("modle: x", "there is no option 'modle'; did you mean model?"),
        ("config: x", "there is no option 'config'"),
        ("port: true", "port: must not be true or false"),
        ("port: off", "port: must not be true or false"),
        ("tune: on", "tune: must not be true or false"),
        ("no_prefix_cache: 1", "no_prefix_cache: must be true or false"),
        ("port: [1, 2]", "port: must be one value"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "node.yaml: is not YAML: line 1: expected the node content, but found '<stream end>'"),
        ("listen: tcp://127.0.0.1:1", "--listen is not an option of --role s"),
    ],
)
def test_a_mistake_in_a_file_is_named(write, capsys, text, says):
    with pytest.raises(SystemExit) as ended:
        NodeConfig.from_args(["--config", write(text)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_an_unknown_variable_is_named(monkeypatch, capsys):
    monkeypatch.setenv(variable("prot"), "9000")
    with pytest.raises(SystemExit):
        NodeConfig.from_args([])
    message = f"{variable('prot')} is no option of fastdecode; did you mean {variable('port')}?"
    assert message in capsys.readouterr().err


def test_the_repositorys_own_variables_are_known():
    """The variables that the tests, the scripts and the kernels read."""
    root = Path(__file__).parents[2]
    listed = subprocess.run(["git", "grep", "-ohE", r"FASTDECODE_[A-Z0-9_]+"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository")
    found = set(listed.stdout.split())
    check_environment(dataclasses.fields(NodeConfig), dict.fromkeys(found, ""))


def test_a_mistake_in_the_environment_is_named(setenv, capsys):
    setenv("port", "99999")
    with pytest.raises(SystemExit):
        NodeConfig.from_args([])
    assert "environment: argument --port: 99999 is not a TCP port" in capsys.readouterr().err
    setenv("port", "9")
    setenv("prefault", "maybe")
    with pytest.raises(SystemExit):
        NodeConfig.from_args([])
    assert "must be true or false, not 'maybe'" in capsys.readouterr().err


def test_no_file(capsys, tmp_path):
    with pytest.raises(SystemExit):
        NodeConfig.from_args(["--config", str(tmp_path / "none.yaml")])
    assert "none.yaml: No such file" in capsys.readouterr().err
