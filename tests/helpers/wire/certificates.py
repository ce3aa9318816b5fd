"""Certificates of TLS that openssl makes: authorities, and what they sign."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


class Authority:
    """An authority that has signed its own certificate, which is in `file`."""

    def __init__(self, folder: Path, name: str):
        self._folder = folder
        self.file, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _request(self.file, self._key, name)

    def sign(self, name: str, *others: str) -> tuple[Path, Path]:
        """A certificate for other names, such as IP:127.0.0.1 or DNS:s-nodes, and its key."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        names = ["-addext", f"subjectAltName={','.join(others)}", "-addext", "basicConstraints=critical,CA:FALSE"]
        _request(certificate, key, name, "-CA", self.file, "-CAkey", self._key, *names)
        return certificate, key


def _request(certificate: Path, key: Path, name: str, *more: str | Path) -> None:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    words = ["openssl", "req", "-x509", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", certificate, *more]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
