"""R-nodes that a measurement starts on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

from fastdecode.bench.rnode_child import RNodeChild
from fastdecode.daemon.machine import usable_cpus

_SPIN_US = 100


@contextmanager
def r_node(where: str, threads: int | None = None, kv_bytes: int = 1 << 30) -> Iterator[str]:
    """The URL of an R-node: one that is started here for a transport, or `where` itself if that is a URL."""
    if "://" in where:
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="fastdecode-") as directory:
        url = f"shm://{directory}/r.sock" if where == "shm" else f"{where}://127.0.0.1:0"
        with closing(RNodeChild(url, _SPIN_US, kv_bytes, None, threads or len(usable_cpus()))) as child:
            yield child.url
