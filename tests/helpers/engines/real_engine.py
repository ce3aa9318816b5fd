"""A real engine for tests: an R-node in this process, a link (over shared memory), a tiny checkpoint on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engines.make_engine import make_engine
from fastdecode.daemon.rnode import RNode
from fastdecode.engine.engine import Engine
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.lora.files import Adapter
from fastdecode.transports.partition import connect_team


@contextlib.asynccontextmanager
async def real_engine(
    checkpoint: Path,
    tmp_path: Path,
    *,
    kv_bytes: int = 2**24,
    mini_batches: int = 2,
    max_batch_size: int = 16,
    max_batch_tokens: int = 64,
    url: str | None = None,
    r_nodes: Sequence[str] = (),
    partition: str = "heads",
    backend: str = "native",
    adapters: Sequence[Adapter] = (),
    state_slots: int = 0,
    mtp: int = 0,
    **options: Any,
) -> AsyncIterator[Engine]:
    """A started engine. Its R-node listens at `url`, or it uses the one at `r_nodes`, or the team of these. `mtp`:
    guesses of the model's MTP head. `options`: see make_engine."""
    torch.set_num_threads(1)
    chosen = choose_backend(backend, checkpoint).with_mtp(mtp)
    model = chosen.load(torch.device("cpu"), torch.float32, adapters=adapters)
    hello = model.hello(
        n_slots=mini_batches,
        max_rows=max_batch_tokens,
        kv_dtype="fp32",
        kv_bytes=kv_bytes // 4 if r_nodes else None,
        max_seqs=2 * mini_batches * max_batch_size,
    )
    async with contextlib.AsyncExitStack() as stack:
        if not r_nodes:
            node = RNode(threads=1, kv_bytes=kv_bytes)
            stack.push_async_callback(node.close)
            r_nodes = await node.serve([url or f"shm://{tmp_path}/r.sock"], None)
        link = await connect_team(r_nodes, hello, None, partition=partition)
        stack.push_async_callback(link.close)
        engine = make_engine(
            chosen.make_spart(model, [link], state_slots=state_slots),
            [link],
            mini_batches=mini_batches,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            **({"guesses": mtp} if mtp else {}),
            **options,
        )
        await engine.start()
        stack.push_async_callback(engine.stop)
        yield engine
