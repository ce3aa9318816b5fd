"""Callbacks: what the modules of this folder ask of the engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdecode.engine.state.ledger import RNodeLedger


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions of the engine, to be called in its event loop."""

    spawn: Callable[[Coroutine[None, None, None]], None]  # starts a coroutine as one of the engine's tasks
    send: Callable[[], None]  # sends what ledgers have asked for, such as FREEs and RESIZEs
    changed: Callable[[], None]  # to be called whenever the scheduler may have new work
    lost: Callable[[RNodeLedger, Exception], None]  # to be called for an R-node whose link is down
