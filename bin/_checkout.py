"""Makes a bare checkout importable: its root on the path, its C extensions built in place."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def prepare() -> None:
    """Import fastdecode from this checkout from now on. Exits with the compiler's status if the build fails."""
    sys.path.insert(0, str(ROOT))
    # An embedded R-node is a child process, which must find the same package.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if all(importlib.util.find_spec(f"fastdecode.{room}._native") for room in ("region", "kernels", "transports")):
        return
    print(f"Building fastdecode's C extensions in {ROOT}; this happens once and takes about a minute.", file=sys.stderr)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    if status := subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode:
        sys.exit(status)
    importlib.invalidate_caches()
