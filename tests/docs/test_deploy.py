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
from nodes.pods import pods, secrets_of_the_page
from sources.folders import ROOT

from fastdecode.cluster.cli import _parser as cluster_parser
from fastdecode.cluster.config import ClusterConfig
from fastdecode.daemon.config import NodeConfig
from fastdecode.router.main import _parser as router_parser

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
LAYERS = ["base", "prometheus", "autoscaling"]
NODES = ["r-node", "s-node", "router"]


def documents(layer: str) -> list[dict[str, Any]]:
    """The resources that the files of a layer hold."""
    files = sorted(set((DEPLOY / "kubernetes" / layer).glob("*.yaml")) - {kustomization(layer)})
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def kustomization(layer: str) -> Path:
    return DEPLOY / "kubernetes" / layer / "kustomization.yaml"


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
        named = {r for r in yaml.safe_load(kustomization(layer).read_text())["resources"] if not r.startswith("../")}
        assert named == {file.name for file in kustomization(layer).parent.glob("*.yaml")} - {"kustomization.yaml"}


def test_the_options_of_the_pods_are_those_of_the_programs():
    assert [*pods()] == sorted(NODES)
    for name, pod in pods().items():
        (container,) = pod["containers"]
        if name == "router":
            assert container["command"] == ["fastdecode-router"]
            options = router_parser().parse_args(container["args"])
        else:
            options = NodeConfig.from_args(container["args"])
            assert options.role == name[0]
        port = 7300 if name == "r-node" else options.port
        assert [p["containerPort"] for p in container["ports"]] == [port]
        # The pod must not be killed while it drains.
        waits = container.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] > waits + options.drain_seconds


def test_every_file_that_a_pod_reads_is_a_key_of_a_secret_that_it_mounts():
    made = {s["name"]: s["files"] for s in yaml.safe_load(kustomization("base").read_text())["secretGenerator"]}
    for pod in pods().values():
        (container,) = pod["containers"]
        volumes = {v["name"]: v["secret"] for v in pod["volumes"] if "secret" in v}
        files = set()
        for mount in container["volumeMounts"]:
            if secret := volumes.get(mount["name"]):
                keys = [item["key"] for item in secret.get("items", ())] or made[secret["secretName"]]
                assert set(keys) <= set(made[secret["secretName"]])
                files |= {f"{mount['mountPath']}/{key}" for key in keys}
        named = {o.partition("=")[2] for o in container["args"] if "/etc/fastdecode/" in o}
        assert named and named <= files


def test_the_commands_of_the_page_make_what_the_secrets_hold_and_a_certificate_for_every_name(tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    secrets_of_the_page(tmp_path)
    kinds = yaml.safe_load(kustomization("base").read_text())["secretGenerator"]
    assert all((tmp_path / name).read_text() for kind in kinds for name in kind["files"])
    keys = (tmp_path / "api-keys").read_text().splitlines()
    assert len(keys) == 2 and (tmp_path / "metrics-key").read_text() == keys[0]
    assert not [name for name in (*kinds[0]["files"], *kinds[1]["files"]) if not ignored(name)]
    text = json.dumps([*documents("base"), *documents("prometheus")])
    names = {*re.findall(r"--s-nodes-dns=https://([a-z-]+):", text), *re.findall(r'"serverName": "([^"]+)"', text)}
    assert names == {"s-nodes", "fastdecode"}
    for name in names:
        verify = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", name, "tls.crt"]
        subprocess.run(verify, cwd=tmp_path, check=True, capture_output=True)


def ignored(name: str) -> bool:
    """Whether git leaves a file of the base aside."""
    path = DEPLOY / "kubernetes" / "base" / name
    return subprocess.run(["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT, check=False).returncode == 0


def test_every_selector_finds_its_pods_and_every_port_has_a_name_there():
    labels = set(NODES)
    names = {port["name"] for pod in pods().values() for port in pod["containers"][0]["ports"]}
    for layer in LAYERS:
        text = json.dumps(documents(layer))
        assert set(re.findall(r'"app.kubernetes.io/component": "([^"]+)"', text)) <= labels
        assert set(re.findall(r'"(?:targetPort|port)": "([^"]+)"', text)) <= names


@pytest.mark.tools
def test_kubernetes_takes_every_resource():
    """Each one against the schema of its kind, unknown fields included."""
    validate = pytest.importorskip("kubernetes_validate")
    for document in [document for layer in LAYERS for document in documents(layer)]:
        if document["kind"] != "PodMonitor":  # no schema of Prometheus's operator is at hand
            validate.validate(document, desired_version="1.30", strict=True)


def test_autoscalers_ask_for_metrics_that_the_adapter_makes():
    rules = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    kinds = {document["metadata"]["name"]: document["kind"] for document in documents("base")}
    asked = set()
    for scaler in documents("autoscaling"):
        target = scaler["spec"]["scaleTargetRef"]
        assert target["kind"] in ("Deployment", "StatefulSet") and target["name"] in pods()
        assert target["name"] in kinds
        asked |= {metric["external"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert asked == {rule["name"]["as"] for rule in rules}
    table = (ROOT / "docs" / "operations.md").read_text()
    for rule in rules:
        [name] = set(re.findall(r"fastdecode:\w+", rule["metricsQuery"]))
        assert rule["seriesQuery"].startswith(name) and f"| `{name}` |" in table


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
@pytest.mark.parametrize("layer", LAYERS)
def test_kustomize_builds_a_layer(layer, tmp_path):
    copy = shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    for kind in yaml.safe_load(kustomization("base").read_text())["secretGenerator"]:
        for name in kind["files"]:
            (copy / "base" / name).write_text("x" * 32)
    built = subprocess.run(["kubectl", "kustomize", str(copy / layer)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    made = [*yaml.safe_load_all(built.stdout)]
    kinds = [document["kind"] for document in made]
    assert {"StatefulSet", "Deployment", "Secret", "NetworkPolicy"} <= set(kinds)
    assert ("PodMonitor" in kinds) == (layer != "base")
    assert ("HorizontalPodAutoscaler" in kinds) == (layer == "autoscaling")
    counted = {document["metadata"]["name"] for document in made if "replicas" in document.get("spec", {})}
    assert counted == ({"router"} if layer == "autoscaling" else set(NODES))


@pytest.mark.tools
def test_the_cluster_of_kuberay_is_one_and_fits_its_workers(tmp_path):
    """No schema of RayCluster is at hand, so its pods are checked as pods, and its nodes against the workers."""
    validate = pytest.importorskip("kubernetes_validate")
    file = DEPLOY / "kubernetes" / "kuberay" / "raycluster.yaml"
    ray, config_map, *others = yaml.safe_load_all(file.read_text())
    for document in (config_map, *others):
        validate.validate(document, desired_version="1.30", strict=True)
    head, *workers = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    for group in (head, *workers):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}} | group["template"]
        validate.validate(pod, desired_version="1.30", strict=True)
    path = tmp_path / "cluster.yaml"
    path.write_text(config_map["data"]["cluster.yaml"])
    config = ClusterConfig.from_file(path)
    routers, s_nodes, r_nodes = workers
    assert json.loads(json.loads(routers["rayStartParams"]["resources"])) == {"router": 1}
    s, r = config.s_nodes, config.r_nodes
    for worker, count, cpus, n_bytes, drain_seconds in (
        (routers, config.router.count, 0, 0, s.drain_seconds),
        (s_nodes, s.count, s.cpus, s.bytes, s.drain_seconds),
        (r_nodes, r.count, r.cpus, r.kv_bytes + 2**30, r.drain_seconds),
    ):
        assert count <= worker["replicas"] and n_bytes <= int(worker["rayStartParams"].get("memory", 0))
        [container] = worker["template"]["spec"]["containers"]
        assert cpus <= int(container["resources"]["requests"]["cpu"])
        assert worker["template"]["spec"]["terminationGracePeriodSeconds"] > drain_seconds
        [*_, command] = container["lifecycle"]["preStop"]["exec"]["command"]
        words = shlex.split(command)
        assert words[0] == "fastdecode-cluster" and cluster_parser().parse_args(words[1:]).command == "drain"
        read = (words[-1], config.secret_file, s.options["api-key-file"])
        assert {Path(file).parent for file in read} <= {Path(mount["mountPath"]) for mount in container["volumeMounts"]}


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
