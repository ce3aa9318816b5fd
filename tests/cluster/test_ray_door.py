"""A cluster on Ray and who can reach it, by the commands of an operator: addresses, Ray's token, the secret."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from unittest.mock import Mock

import pytest
from nodes.ray_head import listening, offers, ray_head
from wire.link_driver import hello

from fastdecode.api.continuation import HEADER, router_proof
from fastdecode.cluster.config import ClusterConfig, ClusterError
from fastdecode.transports.base import LinkRefused
from fastdecode.transports.registry import connect

pytest.importorskip("ray", reason="no Ray: pip install 'fastdecode[ray]'")
pytestmark = [pytest.mark.tools, pytest.mark.timeout(400)]

TOKEN, WRONG = ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": digit * 64} for digit in "ab")
CONFIG = """
name: door
r-nodes: {count: 1, kv-memory: 64MiB}
s-nodes: {count: 1, memory: 1GiB, drain-seconds: 1, options: {dtype: fp32}}
router: {port: 0}
"""


def test_a_cluster_at_a_loopback_address_listens_there_only_and_opens_to_its_token_and_secret():
    with ray_head(TOKEN) as head:
        for auth, why in ((WRONG, "its token differs from this machine's"), ({}, "this machine has no Ray token")):
            refused = head.run("up", CONFIG, auth)
            assert refused.returncode == 1 and why in refused.stderr, refused.stderr
            assert "RPC" not in refused.stderr and len(refused.stderr.splitlines()) == 1, refused.stderr
        programs = ("fastdecode.daemon.node", "fastdecode.router.main")
        before = [listening(program).keys() for program in programs]
        head.add_machine("router", TOKEN)
        up = head.run("up", CONFIG, TOKEN)
        assert up.returncode == 0, up.stderr
        nodes, routers = [
            {pid: where for pid, where in listening(program).items() if where and pid not in old}
            for program, old in zip(programs, before, strict=True)
        ]
        assert len(nodes) >= 2 and len(routers) == 1
        assert set().union(*nodes.values(), *routers.values()) == {"127.0.0.1"}
        assert all(offers(pid, "router") for pid in routers) and not any(offers(pid, "router") for pid in nodes)
        rows = {row.split()[0]: row.split()[-1] for row in up.stdout.splitlines()[1:]}
        ask = {"model": "fastdecode-demo", "prompt": "It was", "max_tokens": 3}
        assert _ask(f"{rows['router0']}/completions", ask) == 200
        body, url = json.dumps(ask).encode(), f"{rows['s0']}/v1/completions"
        assert _ask(url, ask) == 403
        assert _ask(url, ask, {HEADER: router_proof(b"the secret of another cluster", body)}) == 403
        with pytest.raises(LinkRefused, match="the shared secrets of the two nodes differ"):
            asyncio.run(connect(rows["r0"], hello(), b"the secret of another cluster"))
        scaled = head.run("scale routers=2", CONFIG, TOKEN)
        assert scaled.returncode == 0, scaled.stderr
        rows = {row.split()[0]: row.split()[-1] for row in scaled.stdout.splitlines()[1:]}
        drained = head.run("drain router0", CONFIG, TOKEN)
        assert drained.stdout == "drained: router0\n", drained.stderr
        assert _ask(f"{rows['router1']}/completions", ask) == 200
        assert "the cluster would have no router left" in head.run("drain router1", CONFIG, TOKEN).stderr
        assert "the cluster would have no R-node left" in head.run("drain 127.0.0.1", CONFIG, TOKEN).stderr
        down = head.run("down", CONFIG, TOKEN)
        assert down.returncode == 0, down.stderr


def test_a_directory_that_is_lost_is_asked_again_after_a_pause(monkeypatch):
    from fastdecode.cluster.rays import RayCluster

    view = Mock(side_effect=ClusterError("an actor of the cluster is lost"))
    monkeypatch.setattr(RayCluster, "view", view)
    with pytest.raises(ClusterError, match="is lost"):
        RayCluster("x").wait(ClusterConfig(start_seconds=0.9))
    assert 2 <= view.call_count <= 5


def test_a_cluster_with_ray_auth_refuses_a_ray_that_asks_for_no_token():
    with ray_head({"RAY_AUTH_MODE": "disabled"}) as head:
        refused = head.run("up", CONFIG, TOKEN)
        assert refused.returncode == 1 and "asks for no token: start Ray with RAY_AUTH_MODE=token" in refused.stderr
        assert head.run("status", CONFIG + "ray-auth: disabled\n", {}).stderr.endswith("no cluster 'door' is up\n")


def _ask(url: str, body: dict[str, object], headers: dict[str, str] | None = None) -> int:
    """The status of the answer to a request."""
    headers = {"Content-Type": "application/json"} | (headers or {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
