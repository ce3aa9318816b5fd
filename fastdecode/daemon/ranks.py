"""The ranks of `--tensor-parallel N`: the S-node is rank 0, and starts the others as child processes.

Two connections lead to each rank. Over one, the thread that computes follows the steps of rank 0; over the other, the
rank's event loop opens links and passes requests on to R-nodes, and tells every second that the process lives. A rank
that ends, falls silent, or does not go on in a step (kernels/decoder/rank_watch.h) ends the S-node: the sums of its
steps cannot be completed. The other ranks watch the thread that computes in rank 0, too, and end rank 0 if its process
does not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing import Pipe
from typing import NoReturn, TypeVar

import msgspec

from fastdecode.daemon.child import child_environment, module_command
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import stay_on_node
from fastdecode.daemon.process import die_with_parent
from fastdecode.daemon.rank_messages import (
    FROM_RANK,
    CallLink,
    Failed,
    FromRank,
    LinkEnded,
    Loaded,
    OpenLink,
    RankAnswer,
    ToRank,
)
from fastdecode.spart.decoder.rank_steps import Followers
from fastdecode.spart.int4.balance import balance_for
from fastdecode.spart.ranks.reduction import RankError, create_segment
from fastdecode.spart.ranks.share import Share
from fastdecode.spart.served import ServedModel
from fastdecode.transports.base import Hello, Link, LinkDown
from fastdecode.transports.rank_team import RankTeam, RemoteLink, restored

log = logging.getLogger(__name__)

_T = TypeVar("_T")

HEARTBEAT_SECONDS = 1.0
SILENT_BEATS = 4  # after which a rank is lost
_END_SECONDS = 5.0  # within which a rank ends whose connections are closed
_NAMED_SECONDS = 0.5  # within which the threads that listen to ranks hear of the end of one


class _Rank:
    """The process of another rank."""

    def __init__(self, config: NodeConfig, rank: int, memory: Sequence[int], lost: Callable[[str], NoReturn]):
        """`memory`: see Share.join. `lost` is called with a sentence if the rank fails or ends after it has loaded its
        weights. To be called in the thread with whose end the S-node ends."""
        self.steps, their_steps = Pipe()
        self._control, their_control = Pipe()
        self._n, self._lost = config.tensor_parallel, lost
        fds = [their_steps.fileno(), their_control.fileno(), *memory]
        self._process = subprocess.Popen(
            module_command("fastdecode.daemon.rank_process", ",".join(map(str, [rank, *fds])), *config.to_args()),
            stdin=subprocess.DEVNULL,
            env=child_environment(),
            pass_fds=fds,
            preexec_fn=die_with_parent,
        )
        their_steps.close()
        their_control.close()
        self._name = f"rank {rank} (pid {self._process.pid})"
        self.loaded: Future[None] = Future()
        self._ids = itertools.count()
        self._answers: dict[int, Callable[[RankAnswer], None]] = {}
        self._links: dict[int, Callable[[LinkDown | None], None]] = {}
        self._ending = False
        threading.Thread(target=self._listen, daemon=True, name=f"rank {rank}").start()

    def _listen(self) -> None:
        """Take the rank's messages until it ends."""
        silent, how = 0, "has ended"
        with contextlib.suppress(EOFError, OSError):
            while silent < SILENT_BEATS or not self.loaded.done():
                if self._control.poll(HEARTBEAT_SECONDS):
                    silent = 0
                    self._take(FROM_RANK.decode(self._control.recv_bytes()))
                else:
                    silent += 1
            how = "does not answer"
        if not self._ending:
            self._failed(f"{self._name} {how}")

    def _failed(self, how: str) -> None:
        if self.loaded.done():
            self._lost(how)
        self._ending = True
        self.loaded.set_exception(RuntimeError(f"{how} before all ranks had loaded their weights"))

    def _take(self, message: FromRank) -> None:
        match message:
            case Loaded():
                self.loaded.set_result(None)
            case Failed():
                self._failed(message.how)
            case RankAnswer():
                self._answers.pop(message.number)(message)
            case LinkEnded() if message.link in self._links:
                failure = message.failure
                self._links.pop(message.link)(None if failure is None else LinkDown(failure.message))

    async def _ask(self, request: ToRank) -> RankAnswer:
        """Let the rank's event loop do something, and return its answer. Raises CallRefused, LinkDown."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[RankAnswer] = loop.create_future()
        self._answers[request.number] = partial(_set_soon, loop, answered)
        self._control.send_bytes(msgspec.msgpack.encode(request))
        answer = await answered
        if answer.failure is not None:
            raise restored(answer.failure)
        return answer

    async def _call(self, link: int, method: str, *arguments: object) -> bool | dict[str, int] | None:
        return (await self._ask(CallLink(next(self._ids), link, method, arguments))).value

    async def open(self, url: str | None, hello: Hello) -> RemoteLink:
        """Let the rank open a link. Raises LinkDown."""
        loop, number, g = asyncio.get_running_loop(), next(self._ids), hello.geometry
        ended: asyncio.Future[LinkDown | None] = loop.create_future()
        self._links[number] = partial(_set_soon, loop, ended)
        request = OpenLink(
            next(self._ids), number, url, g.n_slots, g.max_rows, hello.kv_dtype, hello.kv_bytes, hello.max_seqs
        )
        opened = (await self._ask(request)).opened
        assert opened is not None, "a rank answers OpenLink with a link"
        return RemoteLink(number, opened, self._n, self._call, ended)

    def end(self) -> None:
        """Close the connection for steps, and wait until the process has ended. Idempotent."""
        self._ending = True
        self.steps.close()
        if not self.loaded.done():
            self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _set_soon(loop: asyncio.AbstractEventLoop, future: asyncio.Future[_T], value: _T) -> None:
    def answer() -> None:
        if not future.done():
            future.set_result(value)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(answer)


class Ranks:
    """All ranks of the S-node."""

    def __init__(self, config: NodeConfig, vocab_size: int):
        """Start the other ranks, which load their weights."""
        n, rows = config.tensor_parallel, config.step_rows
        segment = create_segment(n)
        logits = os.memfd_create("fastdecode-logits", os.MFD_CLOEXEC)
        try:
            os.ftruncate(logits, rows * vocab_size * 4)
            self._others = [_Rank(config, rank, (segment, logits), self._lost) for rank in range(1, n)]
            stay_on_node(0, n)
            self.share = Share.join(0, n, segment, logits)
        finally:
            os.close(segment)
            os.close(logits)
        self.followers = Followers([rank.steps for rank in self._others], self._step_failed)

    def _step_failed(self, error: BaseException) -> NoReturn:
        """End the S-node, because a step of rank 0 has failed for good."""
        if not isinstance(error, (RankError, EOFError)):
            log.error("a step has failed", exc_info=error)
        if self.share.reduction.fault is None:
            time.sleep(_NAMED_SECONDS)  # a thread that listens to the lost rank ends the S-node with its name
        self._lost("a rank has ended")

    def _lost(self, how: str) -> NoReturn:
        """End the S-node: the sums of its steps cannot be completed."""
        log.critical("the S-node ends, because %s", self.share.reduction.fault or how)
        os._exit(1)

    def wait_until_loaded(self) -> None:
        """Wait until the other ranks have their weights. Raises RuntimeError if one could not load them."""
        for rank in self._others:
            rank.loaded.result()

    def balance(self, model: ServedModel, kv_dtype: str, tokens: Sequence[int]) -> None:
        """balance_for at all ranks at once, each for its heads. `model` is that of rank 0. Raises RankError."""
        self.followers.balance(kv_dtype, tokens)
        balance_for(model, kv_dtype, tokens)
        self.followers.ended(self.share.reduction)

    async def team(self, own: Link, url: str | None, hello: Hello) -> RankTeam:
        """Let the other ranks open links to the R-node of rank 0's link `own`. `url` None: each rank has an embedded
        R-node of its own. Raises what connect_team raises."""
        opening = [asyncio.ensure_future(rank.open(url, hello)) for rank in self._others]
        done = await asyncio.gather(*opening, return_exceptions=True)
        links = [link for link in done if isinstance(link, RemoteLink)]
        if errors := [error for error in done if isinstance(error, BaseException)]:
            for link in [own, *links]:
                await link.close()
            raise errors[0]
        return RankTeam(own, links)

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        for rank in self._others:
            rank.end()
