"""The ranks of a tensor-parallel S-Part, with embedded R-nodes, as a peer of the decode benchmark; see worker.py."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.decoding import DecodeShape, Decoding
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.ranks import Ranks
from fastdecode.daemon.split import split_machine
from fastdecode.spart import Model, choose_dtype
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.decoder.rank_steps import Followers, LeadSPart
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.spart.threads import set_threads
from fastdecode.transports.registry import connect

_PROMPT_ROWS = 512  # of a chunk with which a sequence's tokens are cached


class Worker:
    """Rank 0, whose child processes are the other ranks."""

    def __init__(self, options: list[str], mini_batches: int, steps: int):
        """`options` are those of a node."""
        self._loop, self._steps, self._mini_batches = asyncio.new_event_loop(), steps, mini_batches
        config = NodeConfig.from_args(options)
        backend = choose_backend("native", config.model_path())
        self._ranks = Ranks(config, backend.config.vocab_size)
        split = split_machine(config, s_on_gpu=False)
        set_threads(split.s_threads)
        import torch

        device = torch.device("cpu")
        dtype = choose_dtype(config.dtype, backend.config.dtype, device)
        self._model = in_own_thread(backend.load, device, dtype, weights=config.weights, share=self._ranks.share)
        assert isinstance(self._model, Model), "the native decoder has loaded it"
        self._ranks.wait_until_loaded()
        set_threads(split.s_threads, self._model)
        self._node = EmbeddedRNode(config, split)
        self._loop.run_until_complete(self._node.start())
        self._decoding: Decoding | None = None

    def fill(self, batch: int, context: int, format: str) -> None:
        """Cache the tokens of prompts, because rank 0 reaches the KV pages of the other ranks by steps alone."""
        self._loop.run_until_complete(self._fill(batch, context, format))

    async def _fill(self, batch: int, context: int, kv_dtype: str) -> None:
        shape = DecodeShape(batch, context, self._steps, min(self._mini_batches, batch), kv_dtype)
        hello = shape.hello(self._model)
        assert hello.kv_bytes is not None
        # Pages are those of the rank with the most KV heads, of which it has up to twice as many as rank 0.
        hello = replace(hello, kv_bytes=2 * hello.kv_bytes)
        team = await self._ranks.team(await connect(self._node.url, hello, None), None, hello)
        self._decoding = Decoding(self._model, [team], shape, partial(_lead, self._ranks.followers))
        for seq_index in range(batch):
            for pos in range(0, context, _PROMPT_ROWS):
                tokens = [3] * min(_PROMPT_ROWS, context - pos)
                chunk = Chunk(0, seq_index, 1, pos, tokens, True, None, prompt_length=context)
                await self._decoding.runner.submit(self._decoding.spart.step(StepBatch(0, [chunk])))
            self._decoding.spart.drop(0, seq_index, 1)

    def round(self, steps: int) -> float:
        """Seconds of a round."""
        assert self._decoding is not None
        return self._loop.run_until_complete(self._decoding.split_round(steps)).elapsed

    def clear(self) -> None:
        if self._decoding is not None:
            self._loop.run_until_complete(self._decoding.close())
            self._decoding = None


def _lead(followers: Followers, model: Model, links: Any, *_: Any) -> LeadSPart:
    return LeadSPart(model, links, followers)
