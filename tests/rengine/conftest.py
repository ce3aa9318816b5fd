"""R-engines and links to them, which a test makes and which end with it."""

from __future__ import annotations

import pytest
from attention.rengine_peer import Link

from fastdecode.kernels import _native


@pytest.fixture
def engines():
    """A function that makes engines; open ones are closed at the end."""
    made = []

    def make(threads: int = 2, kv_bytes: int = 1 << 28, **kwargs) -> _native.REngine:
        made.append(_native.REngine(threads, kv_bytes, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def links(engines):
    """A function that makes links, each to an engine of its own unless one is given; they are closed at the end."""
    made = []

    def make(*args, engine=None, threads: int = 2, **kwargs) -> Link:
        made.append(Link(engine or engines(threads), *args, **kwargs))
        return made[-1]

    yield make
    for link in made:
        link.close()
