"""An engine over the toy model (toy.py)."""

from __future__ import annotations

import contextlib

from toy import ToySPart, until

from fastdecode.engine.engine import Engine


@contextlib.asynccontextmanager
async def running(*links, max_positions=4096, eos=frozenset(), **options):
    """A started engine over `links`; at its end every page must have come back."""
    spart = ToySPart(links, max_positions=max_positions, eos=eos)
    engine = Engine(spart, list(links), **options)
    await engine.start()
    try:
        yield engine, spart
        spart.gate.set()
        if engine.ready:
            assert await engine.drain(20)
        await until(lambda: all(node.free_pages == node.n_pages for node in engine.cluster.alive))
        assert not spart.staged
        for node in engine.cluster.alive:
            assert not node.link.cache
    finally:
        spart.gate.set()
        await engine.stop()
