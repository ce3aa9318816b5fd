"""The text of the source: linted, and no wider than 120 columns."""

from __future__ import annotations

import subprocess
import sys

from sources import ROOT


def test_ruff_is_silent():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, str(ROOT)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
