"""A folder that all processes of a test session share, so that each checkpoint and library is made once a session."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_VARIABLE = "TESTS_SESSION_FOLDER"


def begin_session() -> None:
    """Make a folder for this process and the processes that it starts from now on. The folder is removed when this
    process ends."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="fastdecode-tests-")
    atexit.register(shutil.rmtree, os.environ[_VARIABLE], ignore_errors=True)


def session_folder() -> Path:
    """The folder. A process outside of a session makes its own."""
    if _VARIABLE not in os.environ:
        begin_session()
    return Path(os.environ[_VARIABLE])


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder `name` in the session's folder. `make` makes it at the path that it is given, unless a process
    has made it before."""
    path = session_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{path.name}")
            make(unfinished)
            unfinished.rename(path)
    return path
