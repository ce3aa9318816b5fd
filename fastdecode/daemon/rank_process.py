"""A rank of `--tensor-parallel N` other than rank 0: it follows the steps of the S-node that has started it.

    python -m fastdecode.daemon.rank_process RANK,FDS OPTIONS

FDS are the numbers of open descriptors: the connections for steps and for requests, and the memory of Share.join.
OPTIONS are the S-node's. The process ends with the S-node, or when the S-node closes the connection for steps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from msgspec.msgpack import encode

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.machine import stay_on_node
from fastdecode.daemon.model_checks import node_backend
from fastdecode.daemon.process import freeze, set_up_logging
from fastdecode.daemon.rank_messages import (
    TO_RANK,
    Beat,
    Failed,
    FromRank,
    LinkEnded,
    Loaded,
    OpenLink,
    RankAnswer,
    ToRank,
)
from fastdecode.daemon.ranks import HEARTBEAT_SECONDS, SILENT_BEATS
from fastdecode.daemon.split import Split, split_machine
from fastdecode.spart import Model, choose_dtype
from fastdecode.spart.backend import Backend
from fastdecode.spart.checkpoints.config_file import open_source
from fastdecode.spart.int4.balance import balance_for
from fastdecode.spart.lora.files import read_adapter
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.ranks.reduction import RankError
from fastdecode.spart.ranks.share import Share
from fastdecode.spart.threads import set_threads
from fastdecode.transports.base import Link, TransportError
from fastdecode.transports.rank_team import LinkFailure, Opened, described
from fastdecode.transports.registry import connect

if TYPE_CHECKING:
    from fastdecode.spart.hf.model import HFModel

log = logging.getLogger("fastdecode.daemon.rank_process")  # __name__ is "__main__" here

_END_SECONDS = 1.0  # within which rank 0 ends if another rank has failed


def main() -> None:
    # A service manager sends these to all processes of the S-node, which says itself when the end has come.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    rank, steps, control, *memory = map(int, sys.argv[1].split(","))
    config = NodeConfig.from_args(sys.argv[2:])
    set_up_logging(config.log_level, config.log_format)
    lead, requests = Connection(steps), Connection(control)
    split = split_machine(config, s_on_gpu=False)
    stay_on_node(rank, config.tensor_parallel)
    set_threads(split.s_threads)
    try:
        backend = node_backend(config, open_source(config.model_path()))
        model = _load(config, backend, Share.join(rank, config.tensor_parallel, *memory))
    except Exception as error:
        log.debug("rank %d has not loaded its weights", rank, exc_info=True)
        requests.send_bytes(encode(Failed(f"rank {rank} (pid {os.getpid()}) has failed: {error}")))
        sys.exit(1)
    set_threads(split.s_threads, model)
    freeze()
    requests.send_bytes(encode(Loaded()))
    asyncio.run(_Follower(config, split, backend, model, rank, lead, requests).run())
    logging.shutdown()
    os._exit(0)  # if Python ended as usual, libraries that transformers imports would list their leaks


def _load(config: NodeConfig, backend: Backend, share: Share) -> Model | HFModel:
    """Load the rank's share of the model. Raises what Backend.load raises."""
    import torch

    device = torch.device("cpu")
    dtype = choose_dtype(config.dtype, backend.config.dtype, device)
    adapters = [read_adapter(name, directory) for name, directory in config.lora]
    return in_own_thread(backend.load, device, dtype, weights=config.weights, adapters=adapters, share=share)


class _Follower:
    """The rank's event loop."""

    def __init__(
        self,
        config: NodeConfig,
        split: Split,
        backend: Backend,
        model: Model | HFModel,
        rank: int,
        lead: Connection,
        requests: Connection,
    ):
        self._config, self._split, self._backend, self._model = config, split, backend, model
        self._rank, self._lead, self._requests = rank, lead, requests
        self._links: dict[int, Link] = {}
        self._embedded: EmbeddedRNode | None = None
        self._secret = config.read_secret()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()  # of sending

    async def run(self) -> None:
        """Serve rank 0 until it closes the connection for steps."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._requests.fileno(), self._take)
        threading.Thread(target=self._follow, args=(loop, ended), daemon=True, name="fastdecode-s-part").start()
        threading.Thread(target=self._beat, daemon=True).start()
        await ended.wait()
        loop.remove_reader(self._requests.fileno())
        for link in self._links.values():
            await link.close()
        if self._embedded is not None:
            await self._embedded.stop()

    def _follow(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        try:
            balance = partial(balance_for, self._model)
            self._backend.make_follower(self._model, self._rank).follow(self._lead, self._links, balance)
        except BaseException as error:
            if not isinstance(error, RankError):
                log.exception("a step has failed in rank %d", self._rank)
            how = f"a step has failed in rank {self._rank}: {error}"
            self._send(Failed(how))
            time.sleep(_END_SECONDS)  # rank 0 ends, and with it this process
            reduction = self._model.reduction
            _end_rank_0(reduction.fault or how if reduction is not None else how)  # rank 0 should have ended
        loop.call_soon_threadsafe(ended.set)

    def _beat(self) -> None:
        """Tell rank 0 every second that this process lives. End rank 0 if its process has used no processor time for
        SILENT_BEATS seconds: the threads of a process that runs take these messages."""
        rank_0 = os.getppid()
        clock, seen, still = ~rank_0 << 3 | 2, 0, 0  # clock_getcpuclockid(3) of the process
        while True:
            self._send(Beat())
            time.sleep(HEARTBEAT_SECONDS)
            before, seen = seen, time.clock_gettime_ns(clock)
            still = still + 1 if seen == before else 0
            if still == SILENT_BEATS:
                _end_rank_0(f"rank 0 (pid {rank_0}) does not run")

    def _send(self, message: FromRank) -> None:
        with self._lock:
            self._requests.send_bytes(encode(message))

    def _take(self) -> None:
        try:
            request = TO_RANK.decode(self._requests.recv_bytes())
        except EOFError:  # rank 0 has ended
            os._exit(1)
        self._spawn(self._serve(request))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: ToRank) -> None:
        """Do what a request of rank 0 asks for, and answer it."""
        answer = RankAnswer(request.number)
        try:
            if isinstance(request, OpenLink):
                answer.opened = await self._open(request)
            else:
                answer.value = await getattr(self._links[request.link], request.method)(*request.arguments)
        except TransportError as error:
            answer.failure = described(error)
        except (OSError, RuntimeError) as error:
            answer.failure = LinkFailure(None, str(error))
        self._send(answer)

    async def _open(self, request: OpenLink) -> Opened:
        """Open the link that rank 0 asks an R-node for, with the options of this rank's heads."""
        own = self._model.hello(request.n_slots, request.max_rows, request.kv_dtype, request.kv_bytes, request.max_seqs)
        address = await self._embedded_url() if request.url is None else request.url
        link = await connect(address, own, self._secret, spin_us=self._config.spin_us)
        if self._embedded is not None:
            self._embedded.remove_socket()
        self._links[request.link] = link
        self._spawn(self._watch(request.link, link))
        return Opened(link.url, link.lease, link.region_bytes)

    async def _embedded_url(self) -> str:
        if self._embedded is None:
            self._embedded = EmbeddedRNode(self._config, self._split)
            await self._embedded.start()
        else:  # rank 0 has lost a link, which has ended those of all ranks
            await self._embedded.restart()
        return self._embedded.url

    async def _watch(self, number: int, link: Link) -> None:
        error = await link.closed()
        self._send(LinkEnded(number, None if error is None else described(error)))


def _end_rank_0(why: str) -> None:
    log.critical("the S-node ends, because %s", why)
    os.kill(os.getppid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
