"""Decides when pages of sequences on the S-Part's device move to R-nodes, and back.

Nothing moves while the device's free pages exceed what its running sequences need in the next steps. Below that
reserve a sequence gives up its oldest whole pages, at most half of its unshared pages: one that is cut
already, else the longest. Pages that it shares, with its siblings say, are copied but stay for the others. The R-node
then attends to the tokens before the cut and the device to the others, to which new tokens are appended
(spart/step/batch.RemotePrefix). When the device has more free pages than its sequences need for many steps, the newest
pages of the shortest cut come back. One cut moves at a time (cut_moves.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import islice
from typing import TYPE_CHECKING, cast

from fastdecode.engine.migration.cut_moves import CutMove, Refill, Spill
from fastdecode.engine.migration.migrator import MoveCancelled
from fastdecode.engine.migration.prefix_moves import PrefixMoves
from fastdecode.engine.scheduling.ways import Way
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.transports.base import CallRefused, LinkDown

if TYPE_CHECKING:
    from fastdecode.engine.migration.callbacks import Callbacks
    from fastdecode.engine.migration.migrator import Migrator
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.sequence import Sequence
    from fastdecode.spart.resident.link import ResidentLink

log = logging.getLogger(__name__)

#: Nothing moves for this many seconds after a move that has failed.
_FAILED_SECONDS = 1.0
#: Where no pages could be spilled ahead of need, they are looked for again after this many changes of the schedule.
_LOOK_EVERY = 16
#: Pages are spilled when fewer are free than running sequences need in `_SPILL_STEPS` steps, until the free ones
#: suffice for `_REFILL_STEPS`. Pages come back as long as the free ones suffice for `_REFILL_STEPS` still. A page that
#: has come back therefore stays for the difference at least, unless sequences start meanwhile.
_SPILL_STEPS, _REFILL_STEPS = PAGE_TOKENS // 2, 2 * PAGE_TOKENS
#: Most bytes that come back at once.
_REFILL_BYTES = 64 << 20
#: Longest time between two pieces of them. Without it, sequences that wait for the end of the move would wait for ever.
_PAUSE_SECONDS = 0.1


class Spiller:
    """Belongs to the engine's event loop."""

    def __init__(self, scheduler: Scheduler, migrator: Migrator, engine: Callbacks):
        self.move: CutMove | None = None  # under way
        self._scheduler, self._cluster, self._migrator, self._engine = scheduler, scheduler.cluster, migrator, engine
        self._failed: float | None = None  # when a move has failed last
        self._passed = _LOOK_EVERY  # calls of `keep_reserve` since it last found no pages to spill
        self._cut: dict[Sequence, None] = {}  # the sequences that have been cut, except those known to be whole again
        self._copying = asyncio.Lock()
        self.prefixes: PrefixMoves | None = None  # None: no place is the S-Part's device
        device = self._cluster.nodes[0]
        if device.resident:
            pause = self._pause_between_pieces
            self.prefixes = PrefixMoves(self._cluster, self._copying, pause, engine)
            device.spill_prefix = self.prefixes.spill
            self._cluster.placer.returns = self.prefixes

    def keep_reserve(self) -> None:
        """Begin to spill pages ahead of need, or to bring pages back."""
        device = self._cluster.nodes[0]
        if not (device.resident and device.alive) or self.move is not None:
            return
        unused = device.unused_pages
        if unused < device.n_sequences * device.groups.block and unused < self._need(device, _SPILL_STEPS):
            self._passed += 1
            ahead = not self._apart and self._scheduler.far_pays()
            if self._passed >= _LOOK_EVERY and not (ahead and self.spill(device)):
                self._passed = 0
        elif self._cut:
            self._refill(device)

    def spill(self, device: RNodeLedger) -> bool:
        """Begin to spill pages of a sequence on the S-Part's device. True if pages move now."""
        if self.move is not None or self._has_failed():
            return self.move is not None
        lacking = self._need(device, _REFILL_STEPS) - device.unused_pages
        wanted = max(1, -(-lacking // device.groups.block))
        found = ((seq, *self._blocks(seq, wanted)) for seq in self._scheduler.running)
        candidates = [(seq, blocks, gain) for seq, blocks, gain in found if gain]
        for seq, blocks, _ in sorted(candidates, key=lambda one: (one[0].prefix is not None, one[2]), reverse=True):
            target = self._target(seq, blocks * device.groups.block)
            if target is not None:
                self._begin(Spill(self._cluster, seq, target, seq.cut + blocks * PAGE_TOKENS))
                return True
        return False

    @property
    def _apart(self) -> bool:
        """True if sequences that R-nodes attend to have steps of their own: then pages of a cut sequence on the device
        serve few steps."""
        choice = self._scheduler.way_choice
        return choice is not None and choice.way is Way.APART

    @property
    def cut_sequences(self) -> list[Sequence]:
        """The sequences that are cut."""
        self._cut = {seq: None for seq in self._cut if seq.prefix is not None}
        return list(self._cut)

    def _need(self, device: RNodeLedger, steps: int) -> int:
        """Pages of the device that its running sequences lack for their next `steps` tokens."""
        lacking = 0
        for seq in self._scheduler.running:
            if seq.node is device and seq.pages.covered < max(seq.cached, seq.prefill_end) + steps:
                last = max(seq.final_length - 1, seq.cached)
                lacking += seq.pages.lacking(min(max(seq.cached, seq.prefill_end) + steps, last))
        return lacking

    def _has_failed(self) -> bool:
        """True if a move has failed just now."""
        return self._failed is not None and time.monotonic() - self._failed < _FAILED_SECONDS

    @staticmethod
    def _may_move(seq: Sequence) -> bool:
        busy = seq.mini_batch is None or seq.prefilling or seq.cancelled or seq.frozen or seq.migrating
        return not busy and seq.placed_on.resident and cast("ResidentLink", seq.placed_on.link).may_cut

    def _blocks(self, seq: Sequence, wanted: int) -> tuple[int, int]:
        """How many blocks a sequence would spill, and how many of them no other running sequence uses: `wanted` blocks,
        or half of its unshared ones, or all if cut sequences have steps of their own. (0, 0): it cannot be cut."""
        if not self._may_move(seq):
            return 0, 0
        whole = seq.cached // PAGE_TOKENS - seq.cut // PAGE_TOKENS
        own = [i for i, page in enumerate(islice(seq.pages.by_group[0], whole), 1) if page.users == 1]
        gain = len(own) if self._apart else min((len(own) + 1) // 2, wanted)
        return (own[gain - 1], gain) if gain else (0, 0)

    def _target(self, seq: Sequence, n_pages: int) -> RNodeLedger | None:
        """The R-node with room for pages of a sequence: the one that has its prefix, else the least loaded one."""
        nodes = [seq.prefix.node] if seq.prefix is not None else self._cluster.nodes
        limits = self._scheduler.limits
        # A query with a prefix has two rows in a slot.
        rows = limits.max_batch_tokens + min(len(self.cut_sequences) + 1, limits.max_batch_size)
        fit = [
            node
            for node in nodes
            if node.open
            and not node.resident
            and node.has_free_index
            and rows <= node.link.geometry.max_rows
            and n_pages + self._cluster.placer.watermark(node) <= node.free_pages
        ]
        return min(fit, key=lambda node: node.load, default=None)

    def _refill(self, device: RNodeLedger) -> None:
        """Begin to bring back pages of the shortest cut, if there is room."""
        if self._has_failed() or device.paused or self._scheduler.running.starved or not device.has_free_index:
            return
        candidates = [seq for seq in self.cut_sequences if self._may_move(seq) and not seq.lost]
        seq = min(candidates, key=lambda seq: seq.cut, default=None)
        if seq is None or seq.prefix is None or not seq.prefix.node.has_free_index:
            return
        block = device.groups.block
        room = device.unused_pages - self._need(device, _REFILL_STEPS) - self._cluster.placer.watermark(device)
        most = max(1, int(_REFILL_BYTES / (device.token_bytes * PAGE_TOKENS)))
        blocks = min(seq.cut // PAGE_TOKENS, room // block, most)
        if blocks <= 0:
            return
        if blocks * block <= device.free_pages:
            self._begin(Refill(self._cluster, seq, seq.cut - blocks * PAGE_TOKENS))
        else:
            device.evict_for(blocks * block, index=False)

    def _begin(self, move: CutMove) -> None:
        self.move = move
        move.seq.migrating = True
        self._engine.spawn(self._run(move))

    async def _run(self, move: CutMove) -> None:
        done, seq = False, move.seq
        try:
            async with self._copying:
                move.check()
                await move.copy(lambda: self._pause(move))
            await self._migrator.freeze(seq, move.check)
            done = True
            move.switch()
            self._scheduler.running.go_home(seq)
            self._count(move)
        except MoveCancelled:
            pass
        except CallRefused as error:
            log.warning("pages could not move between the GPU and R-node %s: %s", move.r_node.url, error)
            self._failed = time.monotonic()
        except LinkDown as error:
            self._engine.lost(move.r_node, error)
        finally:
            seq.frozen = seq.migrating = False
            self.move = None
            move.end(done)
            self._engine.changed()

    async def _pause(self, move: CutMove) -> None:
        """Wait for the start or the end of a step. Raises MoveCancelled."""
        await self._migrator.change(_PAUSE_SECONDS)
        move.check()

    async def _pause_between_pieces(self) -> None:
        """Wait for the start or the end of a step if there is one: a prompt waits for the pieces of a prefix."""
        if any(seq.in_flight for seq in self._scheduler.running):
            await self._migrator.change(_PAUSE_SECONDS)

    def _count(self, move: CutMove) -> None:
        n_bytes = move.n_blocks * round(move.seq.placed_on.token_bytes * PAGE_TOKENS)
        if isinstance(move, Spill):
            self._cluster.totals.spilled_bytes += n_bytes
            self._cut[move.seq] = None
        else:
            self._cluster.totals.refilled_bytes += n_bytes
