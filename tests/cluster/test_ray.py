"""fastdecode-cluster on a local Ray cluster, whose nodes cluster_recovery.py kills, drains and adds under load."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from nodes import cluster_recovery

pytest.importorskip("ray", reason="no Ray: pip install 'fastdecode[ray]'")
pytestmark = [pytest.mark.tools, pytest.mark.timeout(420)]

#: All events take minutes on two cores.
EVENTS = os.environ.get("FASTDECODE_CLUSTER_EVENTS", "kill-r,drain-r,kill-router,kill-s,kill-p,drain-p")


def test_streams_go_on_while_nodes_come_and_go(tmp_path):
    """No stream fails, unless its S-node and its R-nodes are lost at once, and every text is the undisturbed one."""
    recovery = [sys.executable, "-P", cluster_recovery.__file__, "--json", "--streams", "4", "--tokens", "200"]
    with (tmp_path / "stderr").open("w+") as errors:
        ended = subprocess.run(
            [*recovery, "--r-nodes", "3", "--prefill-nodes", "1", "--events", EVENTS],
            stdout=subprocess.PIPE,
            stderr=errors,
            check=False,
        )
        errors.seek(0)
        assert ended.returncode == 0, errors.read()[-5000:]
    result = json.loads(ended.stdout)
    assert result["prompts_taken"]
    assert [row["event"] for row in result["events"]] == EVENTS.split(",")
    for row in result["events"]:
        failed = {"ended with s_node_lost", "ended with generation_failed"}
        allowed = {"identical", *(failed if row["event"] == "kill-raylet" else ())}
        assert row["outcomes"]["identical"] and row["outcomes"].keys() <= allowed, row
