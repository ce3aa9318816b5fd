"""Hosts of a cluster with certificates: real nodes, and a directory in this process in place of Ray's actors."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from nodes.node_process import until
from openai import DefaultHttpxClient, OpenAI
from wire.certificates import Authority

from fastdecode.cluster.config import ClusterConfig, ClusterError, RNodesConfig, RouterConfig, SNodesConfig, TlsConfig
from fastdecode.cluster.directory import Directory
from fastdecode.cluster.hosts import HOSTS

SMALL = {
    "r_nodes": RNodesConfig(kv_memory="64MiB", drain_seconds=1, numa=False),
    "s_nodes": SNodesConfig(drain_seconds=1),
    "router": RouterConfig(port=0),
}


@contextlib.contextmanager
def cluster(tls, *roles):
    """Hosts by their names, and the directory to which they report."""
    config, directory = ClusterConfig(tls=tls, **SMALL), Directory()
    with contextlib.ExitStack() as stack:
        for role in roles:
            host = HOSTS[role](role, config, directory.report, "127.0.0.1")
            stack.callback(host.drain, 0.0)
            host.start()
        yield lambda: {entry.name: entry for entry in directory.view().entries}


def test_a_cluster_with_a_certificate_serves_over_tls_alone(tmp_path):
    authority = Authority(tmp_path, "authority")
    certificate, key = map(str, authority.sign("machine", "IP:127.0.0.1"))
    tls = TlsConfig(certfile=certificate, keyfile=key, ca=str(authority.file))
    with cluster(tls, "r", "s", "router") as entries:
        until(lambda: [entry.state for entry in entries().values()] == ["running"] * 3, 90)
        assert entries()["s"].url.startswith("https://") and entries()["router"].url.startswith("https://")
        trusting = DefaultHttpxClient(verify=ssl.create_default_context(cafile=authority.file))
        with OpenAI(base_url=entries()["router"].url, api_key="none", max_retries=0, http_client=trusting) as api:
            until(lambda: trusting.get(entries()["router"].url.replace("/v1", "/health")).status_code == 200)
            assert api.completions.create(
                model="fastdecode-demo", prompt="It was", max_tokens=3
            ).usage.completion_tokens


def test_a_certificate_of_another_host_is_named_in_the_report_of_the_s_node(tmp_path):
    authority = Authority(tmp_path, "authority")
    certificate, key = map(str, authority.sign("machine", "IP:192.0.2.1"))
    with cluster(TlsConfig(certfile=certificate, keyfile=key, ca=str(authority.file)), "r", "s") as entries:
        until(lambda: "s" in entries() and entries()["s"].load, 90)
        why = "its certificate is refused: IP address mismatch, certificate is not valid for '127.0.0.1'."
        assert entries()["s"].load == {"status": why} and entries()["s"].state == "starting"


@pytest.mark.quick
def test_a_file_that_a_machine_lacks_is_named_with_the_machine(tmp_path):
    tls = TlsConfig(certfile=str(tmp_path / "none"))
    with pytest.raises(ClusterError, match=r"tls: on the machine 127.0.0.1, --ssl-certfile .*No such file"):
        HOSTS["s"]("s0", ClusterConfig(tls=tls), lambda entry: None, "127.0.0.1")
