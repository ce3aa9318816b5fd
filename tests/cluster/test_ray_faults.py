"""What an operator and clients see of a cluster on Ray whose parts are killed, or that goes down, under load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
import pytest
from nodes import many_streams
from nodes.node_process import gone, until
from nodes.ray_head import process_ids, ray_head
from openai import APIConnectionError, OpenAI

pytest.importorskip("ray", reason="no Ray: pip install 'fastdecode[ray]'")
pytestmark = [pytest.mark.tools, pytest.mark.timeout(400)]

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
#: Numbers in fp32, so that a sequence that is computed again has the same tokens.
CONFIG = """
name: faults
r-nodes: {count: 1, kv-memory: 64MiB}
s-nodes: {count: 1, memory: 1GiB, drain-seconds: 1, options: {dtype: fp32, kv-dtype: fp32}}
router: {port: 0}
"""
N_STREAMS = 4


def rows_of(table: str) -> dict[str, dict[str, str]]:
    """The cells of a table by the name of the node and the title of the column. Cells that are empty are left out."""
    head, *lines = table.splitlines()
    starts = [head.index(title) for title in head.split()]
    cells = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]
    return {row[0]: {title: cell for title, cell in zip(head.split(), row, strict=True) if cell} for row in cells}


def begun(url: str, folder: Path) -> subprocess.Popen[str]:
    """Streams that have their first tokens. The process prints their texts at the end."""
    first = folder / f"{time.monotonic_ns()}"
    words = [sys.executable, many_streams.__file__, url, str(N_STREAMS), str(first)]
    streams = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    until(lambda: first.exists() or streams.poll() is not None, 60)
    return streams


def texts(streams: subprocess.Popen[str]) -> list[str]:
    out, _ = streams.communicate(timeout=120)
    return orjson.loads(out)["texts"]


def folders() -> list[Path]:
    return [*Path(tempfile.gettempdir()).glob("fastdecode-faults-*")]


def test_a_cluster_loses_its_directory_and_a_host_and_goes_down_under_load(tmp_path):
    with ray_head(TOKEN) as head:

        def run(command):
            ended = head.run(command, CONFIG, TOKEN)
            assert ended.returncode == 0, ended.stderr
            return ended.stdout

        url = rows_of(run("up"))["router0"]["address"]
        rows = rows_of(run("scale r-nodes=2"))
        assert [rows[name]["links"] for name in ("r0", "r1")] == ["1", "1"], "scale waits for links"
        port = rows["r1"]["address"].rpartition(":")[2]
        assert f"tcp://127.0.0.1:{port}" in run("logs r1")
        assert "Serving fastdecode-demo" in run("logs s0")
        missing = head.run("logs r7", CONFIG, TOKEN)
        assert missing.returncode == 1 and "there is no node r7" in missing.stderr

        calm = texts(begun(url, tmp_path))
        streams = begun(url, tmp_path)
        [directory] = process_ids("ray::DirectoryActor")
        os.kill(directory, signal.SIGKILL)
        why, _, table = run("status").partition("\n")
        assert why.startswith("The directory ") and why.endswith("; the table shows what each node has just answered.")
        assert {row["state"] for row in rows_of(table).values()} == {"running"} and rows_of(table).keys() == rows.keys()
        assert texts(streams) == calm

        [node] = process_ids(f"tcp://127.0.0.1:{port}")
        host = int(Path(f"/proc/{node}/stat").read_text().rpartition(")")[2].split()[1])
        streams = begun(url, tmp_path)
        os.kill(host, signal.SIGKILL)
        assert gone(node), "it ends with its host"
        assert texts(streams) == calm
        until(lambda: rows_of(run("status").rpartition(".\n")[2]).get("r1", {}).get("links") == "1", 60)

        with OpenAI(base_url=url, api_key="none", max_retries=0) as api:
            stream = api.completions.create(
                model="fastdecode-demo",
                prompt="It was",
                max_tokens=1000,
                n=32,  # choices, which together take longer than drain-seconds
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(stream)
            down = head.begin("down", CONFIG, TOKEN)
            with pytest.raises(APIConnectionError):
                for _ in stream:
                    pass
        _, errors = down.communicate(timeout=60)
        assert down.returncode == 0, errors
        assert not process_ids("fastdecode-faults-")
        until(lambda: not folders(), 20)


def test_without_ray_s_head_nodes_serve_for_a_while_then_end_and_leave_nothing(tmp_path):
    """The while is 60 s, unless Ray's processes have been told otherwise."""
    with ray_head(TOKEN | {"RAY_gcs_rpc_server_reconnect_timeout_s": "20"}) as head:
        up = head.run("up", CONFIG, TOKEN)
        assert up.returncode == 0, up.stderr
        url = rows_of(up.stdout)["router0"]["address"]
        calm = texts(begun(url, tmp_path))
        streams = begun(url, tmp_path)
        head.kill_gcs()
        assert texts(streams) == calm
        for command in ("status", "scale r-nodes=2", "drain r0", "logs r0", "down"):
            lost = head.run(command, CONFIG, TOKEN)
            assert lost.returncode == 1 and "nothing listens at ray-address" in lost.stderr, lost.stderr
            assert len(lost.stderr.splitlines()) == 1 and "RPC" not in lost.stderr
            assert bool(lost.stdout) == (command == "status")
            if command == "status":
                first, *table = lost.stdout.splitlines()
                assert first.startswith("The nodes were as follows") and table == up.stdout.splitlines()
        until(lambda: not process_ids("fastdecode-faults-") and not folders(), 60)
