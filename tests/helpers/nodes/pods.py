"""The pods of deploy/kubernetes/base, and the secrets that docs/deployment.md makes for them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from sources.folders import ROOT

BASE = ROOT / "deploy" / "kubernetes" / "base"


def workloads() -> dict[str, dict[str, Any]]:
    """The specs of deployments and stateful sets by their names."""
    documents = [document for file in sorted(BASE.glob("*.yaml")) for document in yaml.safe_load_all(file.read_text())]
    return {d["metadata"]["name"]: d["spec"] for d in documents if "template" in d.get("spec", {})}


def pods() -> dict[str, dict[str, Any]]:
    """The pods' specs, by the workload's name."""
    return {name: workload["template"]["spec"] for name, workload in workloads().items()}


def secrets_of_the_page(folder: Path) -> None:
    """Make the files of the secrets in a folder, by the commands of docs/deployment.md. They need openssl."""
    page = (ROOT / "docs" / "deployment.md").read_text().split("## Kubernetes")[1]
    change_folder, *commands = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[0].splitlines()
    assert change_folder == "cd deploy/kubernetes/base"
    subprocess.run(["bash", "-ec", "\n".join(commands)], cwd=folder, check=True, capture_output=True)
