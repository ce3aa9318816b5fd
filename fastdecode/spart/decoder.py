"""SPart: the decoder of every family, one step of one mini-batch at a time.

A step is a generator, because a layer is cut in two by its attention:

    embed ─▶ norm, Q K V, QK norm, RoPE ─▶ post ─▶ yield ─▶ wait ─▶ O projection, MLP ─▶ next layer ... ─▶ head, sample
                                            │  prompts: SDPA   ▲
                                            └──▶ R-nodes attend ┘

Whoever runs the generators resumes another mini-batch's while this one's R-nodes attend. All rows of all chunks stand
one after another in one matrix, attending chunks first; nothing is padded.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import numpy as np
import torch

from fastdecode.spart.batch import Sampled, StepBatch, StepOutput
from fastdecode.spart.config import ModelConfig
from fastdecode.spart.exchange import Exchange, SlotViews, link_rows
from fastdecode.spart.layers import ACTIVATIONS, make_norm, norm_heads
from fastdecode.spart.prompt import PromptCache, PromptChunk
from fastdecode.spart.rope import RotaryEmbedding, rotate
from fastdecode.spart.sampling import Sampler
from fastdecode.spart.weights import Layer, Model
from fastdecode.transports.base import Link


class SPart:
    """A model and the links to the R-nodes that hold its KV-cache.

    Steps of different slots may be interleaved; they must not run at the same time in several threads.
    """

    def __init__(self, model: Model, links: list[Link], timeout: float = 60.0):
        """`links` is kept, not copied: a link may be appended or replaced between steps. `timeout`, in seconds, is how
        long an R-node may take for a layer."""
        self.model, self.links = model, links
        self._config, self._weights = model.config, model.weights
        self._timeout = timeout
        self._views: dict[tuple[int, int], SlotViews] = {}
        self._prompts = PromptCache(model.config, model.device, model.dtype)
        self._sampler = Sampler()
        self._norm = make_norm(model.config)
        self._activation = ACTIVATIONS[model.config.activation]
        rope = model.config.rope
        self._rope = RotaryEmbedding(rope, model.config.head_size, model.device, model.dtype) if rope else None

    @torch.inference_mode()
    def step(self, batch: StepBatch, keep_logits: bool = False) -> Generator[None, None, StepOutput]:
        """Run `batch` through all layers; yields once a layer, after its rows are posted. Returns a StepOutput.

        `keep_logits` adds the logits of the sampled rows. Raises ValueError for a batch that breaks batch.py's rules,
        and what Link.wait raises; by then, and also when the generator is closed, the slot is at rest on all links.
        """
        rows = StepRows(self, batch)
        exchange = Exchange(batch.slot, rows.link_rows, self.model.device, self.model.dtype)
        state = _State(self, rows, exchange)
        s_seconds, r_seconds, kv_bytes = 0.0, 0.0, 0
        resumed = rows.started
        try:
            for i, layer in enumerate(self._weights.layers):
                state.project(layer)
                exchange.post(i)
                state.attend_prompts(i)
                s_seconds += time.perf_counter() - resumed
                yield
                asked = time.perf_counter()
                kv_bytes += exchange.wait(self._timeout)
                resumed = time.perf_counter()
                r_seconds += resumed - asked
                state.finish(layer)
        except BaseException:
            exchange.settle(self._timeout)
            for prompt in rows.prompts:
                self._prompts.drop(prompt.key)
            raise
        for prompt in rows.prompts:
            self._prompts.end(prompt)
        sampled, logits = self._sample(state.x, rows)
        return StepOutput(
            sampled=sampled,
            s_seconds=s_seconds + time.perf_counter() - resumed,
            r_wait_seconds=r_seconds,
            kv_bytes=kv_bytes,
            logits=logits if keep_logits else None,
        )

    def drop(self, link: int, seq_index: int, tag: int) -> None:
        """Forget a prompt that will not be continued (aborted or preempted between its chunks). From any thread."""
        self._prompts.drop((link, seq_index, tag))

    @property
    def staged_bytes(self) -> int:
        """Memory that holds K and V of prompts between their chunks."""
        return self._prompts.nbytes

    @property
    def config(self) -> ModelConfig:
        return self._config

    def _slot_views(self, index: int, slot: int) -> SlotViews:
        views = self._views.get((index, slot))
        if views is None or views.link is not self.links[index]:
            link = self.links[index]
            # A view keeps its region mapped, so those of a link that was replaced go all at once.
            self._views = {key: v for key, v in self._views.items() if v.link is self.links[key[0]]}
            wanted = self._config.hello_geometry(link.geometry.n_slots, link.geometry.max_rows, self.model.act_dtype)
            if link.geometry != wanted:
                raise ValueError(f"link to {link.url} has geometry {link.geometry}, the model needs {wanted}")
            views = self._views[index, slot] = SlotViews(link, slot)
        return views

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        w = self._weights
        x = w.embedding.index_select(0, tokens)
        if w.project_in is not None:
            x = w.project_in(x)
        if w.positions is not None:
            x.add_(w.positions.index_select(0, positions + self._config.position_offset))
        return x

    def _sample(self, x: torch.Tensor, rows: StepRows) -> tuple[list[Sampled | None], torch.Tensor]:
        """The last rows of the chunks that want a token -> one Sampled a chunk, logits [sampled chunks, vocab] fp32."""
        sampled: list[Sampled | None] = [None] * len(rows.chunks)
        if not rows.sampled:
            return sampled, x.new_empty(0, self._config.vocab_size, dtype=torch.float32)
        w = self._weights
        last = torch.tensor([rows.last_row[i] for i in rows.sampled], device=x.device)
        x = x.index_select(0, last)
        if w.final_norm is not None:
            x = self._norm(x, w.final_norm)
        if w.project_out is not None:
            x = w.project_out(x)
        logits = w.head(x).float()
        drawn = self._sampler(logits, [rows.chunks[i].sample for i in rows.sampled])
        for i, token in zip(rows.sampled, drawn, strict=True):
            sampled[i] = token
        return sampled, logits


class StepRows:
    """A batch as rows: what stands where."""

    def __init__(self, spart: SPart, batch: StepBatch):
        self.started = time.perf_counter()
        config = spart.model.config
        self.chunks = chunks = batch.chunks
        if not chunks:
            raise ValueError("a step without chunks")
        lengths = np.array([len(chunk.tokens) for chunk in chunks])
        if not lengths.all():
            raise ValueError("a chunk without tokens")
        stops = lengths.cumsum()
        self.tokens = np.array([token for chunk in chunks for token in chunk.tokens])
        if self.tokens.min() < 0 or self.tokens.max() >= config.vocab_size:
            raise ValueError(f"a token beyond the vocabulary of {config.vocab_size}")
        # Position of a row: its chunk's, plus its place in the chunk.
        offsets = np.array([chunk.pos for chunk in chunks]) - (stops - lengths)
        self.positions = np.arange(stops[-1]) + offsets.repeat(lengths)
        if config.rope is None and self.positions.max() >= config.max_positions:
            raise ValueError(f"a position beyond the model's {config.max_positions}")
        self.last_row = stops - 1
        self.sampled = [i for i, chunk in enumerate(chunks) if chunk.sample is not None]
        views = {index: spart._slot_views(index, batch.slot) for index in {chunk.link for chunk in chunks}}
        self.link_rows = link_rows(chunks, views)
        self.prompts = []
        for chunk, stop in zip(chunks, stops.tolist(), strict=True):
            if chunk.prefill:
                key = (chunk.link, chunk.seq_index, chunk.tag)
                rows = slice(stop - len(chunk.tokens), stop)
                self.prompts.append(PromptChunk(config, key, chunk, rows, spart._prompts.begin(key, chunk)))


class _State:
    """The tensors of a step: residual stream, buffers, angles."""

    def __init__(self, spart: SPart, rows: StepRows, exchange: Exchange):
        c, model = spart.model.config, spart.model
        self._norm, self._activation, self._config = spart._norm, spart._activation, c
        self._prompts, self._exchange = rows.prompts, exchange
        tokens = torch.from_numpy(rows.tokens).to(model.device)
        positions = torch.from_numpy(rows.positions).to(model.device)
        self.x = spart._embed(tokens, positions)
        n, n_attend = len(exchange.kv), len(exchange.q)
        self._mixed = bool(rows.prompts)
        if self._mixed:  # the rows of prompts have a Q and an O too, which do not travel
            self._q = self.x.new_empty(n, exchange.q.shape[1])
            self._o = torch.empty_like(self._q)
        else:
            self._q, self._o = exchange.q, exchange.o
        self._n_attend = n_attend
        q_heads, kv_heads = (rows.view(n, -1, c.head_size) for rows in (self._q, exchange.kv))
        self._places = q_heads, kv_heads[:, : c.n_kv_heads], kv_heads[:, c.n_kv_heads :]
        self._angles = spart._rope.angles(positions) if spart._rope else None

    def project(self, layer: Layer) -> None:
        """Residual stream to Q and KV rows, ready to be posted."""
        c = self._config
        h = self._norm(self.x, layer.attention_norm) if c.norm_first else self.x
        heads = layer.qkv(h).view(len(h), -1, c.head_size)
        q, k, v = heads.split([c.n_q_heads, c.n_kv_heads, c.n_kv_heads], dim=1)
        if layer.q_norm is not None:
            q, k = norm_heads(q, layer.q_norm, c.norm_eps), norm_heads(k, layer.k_norm, c.norm_eps)
        q_place, k_place, v_place = self._places
        if self._angles is not None:
            rotate(q, *self._angles, out=q_place)
            rotate(k, *self._angles, out=k_place)
        else:
            q_place.copy_(q)
            k_place.copy_(k)
        v_place.copy_(v)
        if self._mixed and self._n_attend:
            self._exchange.q.copy_(self._q[: self._n_attend])

    def attend_prompts(self, layer: int) -> None:
        for prompt in self._prompts:
            rows = prompt.rows
            prompt.attend(layer, self._q[rows], self._exchange.kv[rows], out=self._o[rows])

    def finish(self, layer: Layer) -> None:
        """O rows and residual stream through the rest of the block."""
        if self._mixed and self._n_attend:
            self._o[: self._n_attend].copy_(self._exchange.o)
        norm_first = self._config.norm_first
        self.x.add_(layer.o(self._o))
        if not norm_first:
            self.x = self._norm(self.x, layer.attention_norm)
        h = self._norm(self.x, layer.mlp_norm) if norm_first else self.x
        up = layer.up(h)
        if self._config.gated:
            gate, value = up.chunk(2, dim=1)
            up = self._activation(gate).mul_(value)
        else:
            up = self._activation(up)
        self.x.add_(layer.down(up))
        if not norm_first:
            self.x = self._norm(self.x, layer.mlp_norm)
