"""The files in deploy/: the commands, options and metrics in them are there, and their readers accept them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from sources.folders import ROOT

from fastdecode.cluster.config import ClusterConfig
from fastdecode.daemon.config import NodeConfig

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
LAYERS = ["base", "prometheus"]


def documents(layer: str) -> list[dict[str, Any]]:
    """The resources that the files of a layer hold."""
    files = sorted(set((DEPLOY / "kubernetes" / layer).glob("*.yaml")) - {kustomization(layer)})
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def kustomization(layer: str) -> Path:
    return DEPLOY / "kubernetes" / layer / "kustomization.yaml"


def pods() -> dict[str, dict[str, Any]]:
    """The pods' specs, by the workload's name."""
    return {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]
        for document in documents("base")
        if "template" in document["spec"]
    }


# ---- systemd ----


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_options_of_a_unit_are_those_of_the_node(unit, tmp_path):
    (command,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.M)
    program, *options = shlex.split(command)
    assert Path(program).name == "fastdecode-node"
    config = tmp_path / "node.yaml"
    config.write_text("log-level: info")
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    given = {"/etc/fastdecode/r.yaml": config, "/etc/fastdecode/s.yaml": config}
    options = [str(given.get(o, o.replace("${CREDENTIALS_DIRECTORY}/secret", str(secret)))) for o in options]
    assert NodeConfig.from_args(options).role == unit.stem.removeprefix("fastdecode-")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_a_unit(unit, tmp_path):
    program = tmp_path / "fastdecode-node"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/fastdecode/bin/fastdecode-node", str(program)))
    verdict = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert not [line for line in verdict.stderr.splitlines() if unit.name in line]


# ---- Kubernetes ----


def test_every_file_of_a_layer_is_one_of_its_resources():
    for layer in LAYERS:
        named = set(yaml.safe_load(kustomization(layer).read_text())["resources"]) - {"../base"}
        assert named == {file.name for file in kustomization(layer).parent.glob("*.yaml")} - {"kustomization.yaml"}


def test_the_options_of_the_pods_are_those_of_the_node(tmp_path):
    (tmp_path / "secret").write_text("x" * 32)
    roles = {}
    for name, pod in pods().items():
        (container,) = pod["containers"]
        options = [o.replace("/etc/fastdecode/secret", str(tmp_path / "secret")) for o in container["args"]]
        config = NodeConfig.from_args([o.replace("/models/chat", "chat") for o in options])
        roles[name] = config.role
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == ({"http": config.port} if config.role == "s" else {"link": 7300})
        if config.role == "s":
            # The pod must not be killed while it drains.
            assert pod["terminationGracePeriodSeconds"] > config.drain_seconds
    assert roles == {"r-node": "r", "s-node": "s"}


def test_every_selector_finds_its_pods_and_every_port_has_a_name_there():
    labels = {"r-node", "s-node"}
    names = {port["name"] for pod in pods().values() for port in pod["containers"][0]["ports"]}
    for document in [*documents("base"), *documents("prometheus")]:
        text = json.dumps(document)
        assert set(re.findall(r'"app.kubernetes.io/component": "([^"]+)"', text)) <= labels
        assert set(re.findall(r'"(?:targetPort|port)": "([^"]+)"', text)) <= names


@pytest.mark.tools
def test_kubernetes_takes_every_resource():
    """Each one against the schema of its kind, unknown fields included."""
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents("base"):
        validate.validate(document, desired_version="1.30", strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
@pytest.mark.parametrize("layer", LAYERS)
def test_kustomize_builds_a_layer(layer, tmp_path):
    copy = shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    (copy / "base" / "secret").write_text("x" * 32)
    built = subprocess.run(["kubectl", "kustomize", str(copy / layer)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    kinds = [document["kind"] for document in yaml.safe_load_all(built.stdout)]
    assert {"StatefulSet", "Deployment", "Secret", "NetworkPolicy"} <= set(kinds)
    assert ("PodMonitor" in kinds) == (layer == "prometheus")


@pytest.mark.tools
def test_the_cluster_of_kuberay_is_one_and_fits_its_workers(tmp_path):
    """No schema of RayCluster is at hand, so its pods are checked as pods, and its nodes against the workers."""
    validate = pytest.importorskip("kubernetes_validate")
    file = DEPLOY / "kubernetes" / "kuberay" / "raycluster.yaml"
    ray, config_map, service = yaml.safe_load_all(file.read_text())
    for document in (config_map, service):
        validate.validate(document, desired_version="1.30", strict=True)
    head, *workers = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    for group in (head, *workers):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}} | group["template"]
        validate.validate(pod, desired_version="1.30", strict=True)
    path = tmp_path / "cluster.yaml"
    path.write_text(config_map["data"]["cluster.yaml"])
    config = ClusterConfig.from_file(path)
    for worker, nodes, wanted in zip(
        workers,
        (config.s_nodes, config.r_nodes),
        (config.s_nodes.bytes, config.r_nodes.kv_bytes + 2**30),
        strict=True,
    ):
        assert nodes.count <= worker["replicas"] and wanted <= int(worker["rayStartParams"]["memory"])
        [container] = worker["template"]["spec"]["containers"]
        assert nodes.cpus <= int(container["resources"]["requests"]["cpu"])


# ---- Grafana, the image ----


def test_the_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"fastdecode:\w+", expression)}
    table = dict(
        re.findall(r"^\| `(fastdecode:\w+)` \| (\w+) \|", (ROOT / "docs" / "operations.md").read_text(), re.M)
    )  # test_docs.py compares it with what a node exposes
    assert len(names) > 15
    for name in names:
        assert table.get(name) or table.get(name.removesuffix("_bucket")) == "histogram", name


def test_the_image_installs_extras_that_there_are():
    text = (DEPLOY / "Containerfile").read_text()
    installed = re.findall(r'pip install .*"/source\[([\w,]+)\]"', text)
    project = (ROOT / "pyproject.toml").read_text()
    for extra in ",".join(installed).split(","):
        assert re.search(rf"^{extra} = \[", project, re.M)
    assert len(installed) == 2 and 'ENTRYPOINT ["fastdecode-node"]' in text


def test_the_image_is_built_from_all_that_setup_reads():
    left_out = set((ROOT / ".dockerignore").read_text().splitlines())
    read = {
        "fastdecode",
        "region",
        "kernels",
        "transports",
        "bench",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    assert not left_out & read and all((ROOT / name).exists() for name in read)
