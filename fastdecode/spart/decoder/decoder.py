"""SPart: the decoder of all model families; it computes one step of one mini-batch at a time.

A step is a generator, because attention on the R-nodes cuts each layer in two:

    embed ─▶ norm, Q K V, QK norm, RoPE ─▶ post ─▶ yield ─▶ wait ─▶ O projection, MLP ─▶ next layer ... ─▶ head, sample
                                            │  prompts: SDPA   ▲
                                            └──▶ R-nodes attend ┘

The runner (engine/runner.py) resumes another mini-batch's step while the R-nodes attend for this one. The rows of all
chunks stand one after another in one matrix, those of attending chunks first; nothing is padded.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import accumulate, chain, islice
from typing import Protocol

import numpy as np
import torch

from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.block_ops import RowHeads, split_gate
from fastdecode.spart.decoder.experts import MLP, Mixture
from fastdecode.spart.decoder.joints import make_joints
from fastdecode.spart.decoder.ops_choice import make_block_ops
from fastdecode.spart.decoder.rope import RotaryEmbedding
from fastdecode.spart.decoder.timeline import StepClock, Timeline
from fastdecode.spart.decoder.weights import Block, Layer, Model, StateBlock
from fastdecode.spart.exchange import Appender, Exchange, RowExchange, SlotViews, link_rows, make_exchange
from fastdecode.spart.exchange.choice import ChosenExchange
from fastdecode.spart.exchange.heads import multiply_heads
from fastdecode.spart.lora.adapters import AdapterRows, adapted_product
from fastdecode.spart.prefill.prompt import PromptCache, PromptChunk
from fastdecode.spart.sampler.prompt_logprobs import Scorer
from fastdecode.spart.sampler.sampling import make_sampler
from fastdecode.spart.states.delta import delta_block, state_tensors
from fastdecode.spart.states.pool import StatePool, StateRows
from fastdecode.spart.step.batch import Sampled, StepBatch, StepOutput
from fastdecode.spart.step.step_table import StepTable
from fastdecode.transports.base import DataPath, Pending


class SPart:
    """A model and the links to the R-nodes that hold its KV-cache.

    Steps of different slots may be interleaved; they must not run at the same time in several threads.
    """

    def __init__(
        self,
        model: Model,
        links: Sequence[DataPath],
        exchange: ChosenExchange | None = None,
        state_slots: int = 0,
    ):
        """`links` is used as it is, not copied: the caller may append or replace a link between steps. `exchange` None
        means the exchange that always works on the model's device. `state_slots`: how many sequences can have a state
        at once, in a model whose layers keep one; see Chunk.state."""
        self.model, self.links = model, links
        self.exchange = exchange or ChosenExchange.plain(model.device)
        self._config = model.config
        self.timeline = Timeline()
        self._views: dict[tuple[int, int], SlotViews] = {}
        self._prompts = PromptCache(model.config, model.device, model.dtype)
        self._appender = None if model.device.type == "cpu" else Appender(model.device)
        self.states: StatePool | None = None
        self._prepare(state_slots)

    def _prepare(self, state_slots: int) -> None:
        """Make what the steps of the model's own backend need."""
        model, config = self.model, self.model.config
        self._weights, self._layers = model.weights, model.weights.layers
        self._ops = ops = make_block_ops(config, model.device, model.dtype)
        self._joints = make_joints(config, self._layers, ops)
        rope = config.rope
        self._rope = RotaryEmbedding(rope, config.head_size, model.device, ops.angle_dtype) if rope else None
        if config.delta is not None:
            tensors = [state_tensors(config.delta)] * len(config.delta.blocks)
            self.states = StatePool(tensors, state_slots, model.device, model.dtype)
        #: The blocks with a state before each layer, and behind the last one, with their indexes in the pool.
        self._between: list[list[tuple[int, StateBlock]]] = [[]]
        n_states = 0
        for block in model.weights.blocks:
            if isinstance(block, StateBlock):
                self._between[-1].append((n_states, block))
                n_states += 1
            else:
                self._between.append([])

    @torch.inference_mode()
    def step(self, batch: StepBatch, keep_logits: bool = False) -> Generator[Pending, float | None, StepOutput]:
        """Run `batch` through all layers. Once a layer, after the layer's rows are posted, the generator yields the
        answers that it waits for. A step yields nothing where no other step could use the time: on links of one slot,
        one call of C runs all layers. Returns a StepOutput.

        `keep_logits` puts the logits of the sampled rows into the output. Raises ValueError for a batch that breaks the
        rules of batch.py, and on a device that is not a CPU for a batch of decoding rows and prompts; CallRefused and
        LinkDown if every link of the step has failed. After an error, and after the generator was closed, no call is
        in progress in the slot on any link.
        """
        rows = StepRows(self, batch)
        bypass = self.exchange.bypass
        if bypass is not None and bypass.takes(self, rows, batch.slot):
            return (yield from bypass.step(self, rows, batch, keep_logits))
        rows.upload(self.model.device)
        exchange = make_exchange(batch.slot, rows.link_rows, self.model.device, self._appender)
        clock = StepClock(self.timeline, batch.slot, rows.started)
        try:
            exchange.arm()
            state = self._begin(rows, exchange)
            with closing(state.layers(clock, batch.layer_timeout)) as layers:
                for _ in layers:
                    clock.interval_ended()
                    clock.waits((yield exchange.pending))
                    while not exchange.ready:
                        yield exchange.pending
                    exchange.wait(batch.layer_timeout)
                    clock.replied()
            logits = state.logits()
            exchange.finish()
            while not exchange.ready:
                yield exchange.pending
            exchange.finished()
        except BaseException:
            exchange.settle(batch.layer_timeout)
            for prompt in rows.prompts:
                self._prompts.drop(prompt.key)
            raise
        link_costs = exchange.disarm()
        self._end_chunks(rows, exchange)
        sampled = self._sample(logits, rows)
        scores = rows.scorer(state.scored_logits, rows.uploaded)
        clock.interval_ended()
        return StepOutput(
            scores=scores,
            sampled=sampled,
            s_seconds=clock.s_seconds,
            r_wait_seconds=clock.r_wait_seconds,
            kv_bytes=sum(times.kv_bytes for times in link_costs.values()),
            link_costs=link_costs,
            failures=exchange.failures,
            logits=logits.float() if keep_logits else None,
        )

    def _begin(self, rows: StepRows, exchange: Exchange) -> LayerPass:
        """The way of a step's rows through the layers of the model's own backend."""
        return StepState(self, rows.uploaded, exchange, rows.prompts, rows.adapters, rows.states)

    def whole_step(self, inputs: dict[str, torch.Tensor], exchange: RowExchange) -> torch.Tensor:
        """All layers of a step without prompts, on a device that waits for the R-nodes itself.

        `inputs` has "tokens", "positions" and "last rows" as StepRows uploads them. Returns the logits of the last
        rows, [rows, vocab_size] fp32.
        """
        state = StepState(self, inputs, exchange)
        for _ in state.layers():
            exchange.wait(0.0)
        return state.logits().float()

    def _end_chunks(self, rows: StepRows, exchange: Exchange) -> None:
        """Keep the states of all chunks, and the staged K and V of prompts that go on. Sequences whose link has failed
        begin again."""
        failed = [i for i, link in enumerate(self.links) if link in exchange.failures]
        for prompt in rows.prompts:
            if prompt.chunk.link in failed:
                self._prompts.drop(prompt.key)
            else:
                self._prompts.end(prompt)
        if self.states is not None:
            for chunk in rows.chunks:
                if chunk.link not in failed:
                    self.states.record(chunk.state, chunk.pos + len(chunk.tokens))

    def drop(self, link: int, seq_index: int, tag: int) -> None:
        """Free the staged K and V of a prompt that will not be continued. May be called from any thread.

        `link` is the index of a link, `seq_index` and `tag` are the sequence's handle on it.
        """
        self._prompts.drop((link, seq_index, tag))

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that the staged K and V of unfinished prompts take."""
        return self._prompts.nbytes

    @property
    def state_slots(self) -> int | None:
        """How many sequences can have a state at once. None: the model's layers keep no states."""
        return None if self.states is None else self.states.n_slots

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the model's LoRA adapters, in the order of a chunk's `adapter`."""
        return self.model.adapters

    def is_long(self, final_length: int) -> bool:
        """True if a sequence that may grow to `final_length` tokens is computed with LongRoPE's long factors, from its
        first token on. Its K and V are then not those of other sequences."""
        rope = self._config.rope
        return rope is not None and bool(rope.long_factors) and final_length > rope.original_max_positions

    @property
    def expert_load(self) -> dict[int, list[int]]:
        """The number of rows that each expert has had, by layer, with the rows that fill up captured steps."""
        mixtures = ((i, block.mlp) for i, block in enumerate(self._weights.blocks))
        return {i: mlp.load.tolist() for i, mlp in mixtures if isinstance(mlp, Mixture) and mlp.load is not None}

    def forget_expert_load(self) -> None:
        """Count the rows of `expert_load` anew, for all S-Parts of the model."""
        for i in self.expert_load:
            mlp = self._weights.blocks[i].mlp
            assert isinstance(mlp, Mixture)
            mlp.load = None

    @property
    def config(self) -> ModelConfig:
        return self._config

    def _slot_views(self, index: int, slot: int) -> SlotViews:
        """The views of a slot of the link `index`. Raises ValueError for a link of another geometry."""
        views = self._views.get((index, slot))
        if views is None or views.link is not self.links[index]:
            link = self.links[index]
            # A view keeps its region mapped, so all views of links that were replaced are dropped at once.
            self._views = {key: v for key, v in self._views.items() if v.link is self.links[key[0]]}
            wanted = self._config.hello_geometry(link.geometry.n_slots, link.geometry.max_rows, self.model.act_dtype)
            if link.geometry != wanted:
                raise ValueError(f"the link to {link.url} has geometry {link.geometry}; the model needs {wanted}")
            views = self._views[index, slot] = SlotViews(link, slot)
        return views

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens [n], positions [n] -> the residual stream before the first layer, [n, hidden_size]."""
        w = self._weights
        x = w.embedding(tokens)
        if self._config.embed_scale != 1.0:
            x.mul_(self._config.embed_scale)
        if w.project_in is not None:
            x = w.project_in(x)
        if w.positions is not None:
            x.add_(w.positions.index_select(0, positions + self._config.position_offset))
        return x

    def _sample(self, logits: torch.Tensor, rows: StepRows) -> list[Sampled | None]:
        """Draw a token after each chunk that asks for one, and after its drafts, from logits [rows.n_drawn, vocab_size]
        in fp32 or the activation dtype.

        Returns one Sampled or None for each chunk.
        """
        return rows.per_chunk(rows.sampler(logits, rows.uploaded) if rows.n_drawn else [])

    def head_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden_size] after the last layer -> what the LM head multiplies, [n, embed_size]."""
        w = self._weights
        if w.final_norm is not None:
            x = self._ops.norm(x, w.final_norm)
        return x if w.project_out is None else w.project_out(x)

    def head(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits of some rows of x [n, hidden_size]: [len(rows), vocab_size] in fp32 or the activation dtype."""
        logits = self._weights.head(self.head_inputs(x.index_select(0, rows)))
        if self._config.logit_divisor != 1.0:
            logits = logits.float().div_(self._config.logit_divisor)
        return logits


class LayerPass(Protocol):
    """A step's way through the layers of a model."""

    def layers(self, clock: StepClock, timeout: float) -> Generator[None, None, None]:
        """Pass all layers, each of which has `timeout` seconds. Stops once a layer's rows are posted and its prompts'
        attention is computed; goes on when the exchange has waited for the R-nodes."""

    def logits(self) -> torch.Tensor:
        """After all layers: the logits after which tokens are drawn, [drawn rows, vocab_size] in fp32 or the activation
        dtype."""

    def scored_logits(self, rows: slice) -> torch.Tensor:
        """After all layers: the logits of some of the scored rows, [rows, vocab_size] fp32."""


class StepRows:
    """The rows of a step: their tokens and positions, where each chunk's rows stand, and how tokens are drawn.

    `uploaded` is the step's table on the device: "tokens" and "positions", int64 [rows], "last rows", int64 [n_drawn],
    after which tokens are drawn, and the arrays that `sampler`, `scorer` and `adapters` have added. A captured step has
    a table and a sampler of its own, and uploads these if its graph does not draw its tokens.
    """

    def __init__(self, spart: SPart, batch: StepBatch):
        """Raises ValueError for a batch that breaks the rules of batch.py."""
        self.started = time.perf_counter()
        config = spart.model.config
        self.chunks = chunks = batch.chunks
        if not chunks:
            raise ValueError("a step has no chunks")
        lengths = [len(chunk.tokens) for chunk in chunks]
        if 0 in lengths:
            raise ValueError("a chunk has no tokens")
        starts = list(accumulate(lengths, initial=0))
        stops = starts[1:]
        tokens = np.fromiter(chain.from_iterable([chunk.tokens for chunk in chunks]), np.int64, stops[-1])
        if tokens.view(np.uint64).max() >= config.vocab_size:  # a negative number is a large one
            raise ValueError(f"a token id is outside the vocabulary of {config.vocab_size} tokens")
        positions = np.array([chunk.pos for chunk in chunks])
        if stops[-1] > len(chunks):  # a row's position is that of its chunk plus the row's index within the chunk
            positions = (positions - starts[:-1]).repeat(lengths) + np.arange(stops[-1])
        if config.rope is None and positions.max() >= config.max_positions:
            raise ValueError(f"a position is outside the model's {config.max_positions}")
        self.sampled = [i for i, chunk in enumerate(chunks) if chunk.sample is not None]
        views = {index: spart._slot_views(index, batch.slot) for index in {chunk.link for chunk in chunks}}
        self.link_rows = link_rows(chunks, views)
        self.prompts = []
        for i in [i for i, chunk in enumerate(chunks) if chunk.prefill]:
            chunk, stop = chunks[i], stops[i]
            key = (chunk.link, chunk.seq_index, chunk.tag)
            self.prompts.append(spart._prompts.begin(key, chunk, slice(stop - len(chunk.tokens), stop)))
        table = StepTable()
        table.add("tokens", tokens)
        table.add("positions", positions)
        last_rows = [stops[i] - 1 for i in self.sampled]
        specs = [chunk.sample for chunk in chunks if chunk.sample is not None]
        self._drafts = [chunks[i].drafts for i in self.sampled]
        if any(self._drafts):
            rows_of = [range(row - n, row + 1) for row, n in zip(last_rows, self._drafts, strict=True)]
            last_rows = [row for some in rows_of for row in some]
            specs = [spec.later(j) for spec, n in zip(specs, self._drafts, strict=True) for j in range(n + 1)]
        self.specs = specs  # of each token to draw
        self.n_drawn = len(specs)
        table.add("last rows", np.array(last_rows, np.int64))
        if any(chunk.long for chunk in chunks):
            table.add("long", np.array([chunk.long for chunk in chunks], dtype=np.int64).repeat(lengths))
        self.states = StateRows(spart.states, chunks, starts, table) if spart.states is not None else None
        self.scorer = Scorer(chunks, starts, config.vocab_size, table)
        self._adapter_rows = AdapterRows(chunks, len(spart.model.adapters), table)
        self.adapters: AdapterRows | None = None
        self.table = table
        self.uploaded: dict[str, torch.Tensor] = {}
        self.vocab_size = config.vocab_size

    def upload(self, device: torch.device, on_host: bool = True) -> None:
        """Plan the draws, start the upload of the step's table, and fill `sampler`, `uploaded` and `adapters`.
        `on_host`: a CPU's tokens may be drawn on the host."""
        self.sampler = make_sampler(self.specs, self.vocab_size, self.table, on_host and device.type == "cpu")
        self.uploaded = self.table.upload(device)
        self.adapters = self._adapter_rows.on_device(self.uploaded)
        if self.states is not None:
            self.states.on_device(self.uploaded)

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.started

    def per_chunk(self, drawn: list[Sampled]) -> list[Sampled | None]:
        """The drawn tokens by chunk: the token after each sampled chunk, which holds the tokens after the chunk's
        drafts, and None for the other chunks."""
        if len(drawn) == len(self.chunks) and not any(self._drafts):
            return [*drawn]
        sampled: list[Sampled | None] = [None] * len(self.chunks)
        rest = iter(drawn)
        for i in self.sampled:
            first = sampled[i] = next(rest)
            first.after_drafts = list(islice(rest, self.chunks[i].drafts))
        return sampled


class StepState:
    """A LayerPass of the native decoder: the residual stream `x`, the Q, K, V and O rows, and RoPE's angles."""

    def __init__(
        self,
        spart: SPart,
        uploaded: dict[str, torch.Tensor],
        exchange: RowExchange,
        prompts: Sequence[PromptChunk] = (),
        adapters: AdapterRows | None = None,
        states: StateRows | None = None,
    ):
        c = spart.model.config
        self._spart, self._ops, self._config = spart, spart._ops, c
        self._prompts, self._exchange, self._adapters, self._states = prompts, exchange, adapters, states
        self._gate: torch.Tensor | None = None  # of the layer's heads, [n, n_q_heads * head_size]
        positions = uploaded["positions"]
        self._drawn_rows = uploaded.get("last rows", positions[:0])  # of `x`, after which tokens are drawn
        self._scored_rows = uploaded.get("scored rows", positions[:0])
        self.x = spart._embed(uploaded["tokens"], positions)
        self._o = exchange.o
        self.heads = RowHeads(exchange.q, exchange.kv, c)
        self._angles = spart._rope.angles(positions, uploaded.get("long")) if spart._rope else None
        self._layers, self._between = spart._layers, spart._between
        self._joints, self._joint_rows = spart._joints, None
        if spart._joints is not None and adapters is None and self._angles is not None:
            self._joint_rows = spart._joints.rows(self.x, self._o, self._angles, self.heads)

    def layers(self, clock: StepClock | None = None, timeout: float = 0.0) -> Generator[None, None, None]:
        """See LayerPass. `clock` None: the device itself waits for the R-nodes."""
        self.advance(0)
        n_layers = len(self._layers)
        for i in range(self._run_in_c(clock, timeout), n_layers):
            self._exchange.post(i, timeout)
            self.attend_prompts(i)
            yield
            if i == n_layers - 1 and not len(self._scored_rows) and self.keep(self._drawn_rows):
                self._drawn_rows = torch.arange(len(self._drawn_rows))
            self.advance(i + 1)

    def _run_in_c(self, clock: StepClock | None, timeout: float) -> int:
        """Run the first layers of a step that is alone on its links, as many as a call of C can. Returns how many."""
        exchange = self._exchange
        layers = self._spart_layers() if isinstance(exchange, Exchange) and exchange.alone else None
        if layers is None:
            return 0
        assert isinstance(exchange, Exchange) and clock is not None
        n_layers, done = len(self._layers), 0
        if self._prompts:  # whose rows the last layer drops
            n_layers -= 1
        while done < n_layers:
            times, complete = exchange.run_layers(layers, done, n_layers, timeout)
            clock.exchanged(times)
            done += len(times)
            if not complete:
                self.advance(done)
        return done

    def logits(self) -> torch.Tensor:
        rows = self._drawn_rows
        return self._spart.head(self.x, rows) if len(rows) else self.x.new_empty(0, self._config.vocab_size)

    def scored_logits(self, rows: slice) -> torch.Tensor:
        return self._spart.head(self.x, self._scored_rows[rows]).float()

    def keep(self, rows: torch.Tensor) -> bool:
        """Before the last layer is finished: drop all but some rows, int64 [n], of a step with prompts. Most rows of a
        prompt have no token drawn after them, and nothing else needs what the last layer makes of them. False if all
        rows are kept, as in a step without joints."""
        if self._joints is None or self._joint_rows is None or not self._prompts:
            return False
        self.x, self._o = self.x.index_select(0, rows), self._o.index_select(0, rows)
        self._joint_rows = self._joints.last_rows(self.x, self._o)
        return True

    def advance(self, index: int) -> None:
        """Finish layer `index` - 1 and project layer `index`, as far as there are such layers."""
        if self._joint_rows is not None and self._joint_rows.run(index):
            return
        if index > 0:
            self.finish(self._layers[index - 1])
        for i, block in self._between[index]:
            self.pass_state(i, block)
        if index < len(self._layers):
            self.project(self._layers[index])

    def _spart_layers(self) -> object | None:
        """`advance` and `attend_prompts` of all layers but the first in C, for Exchange.run_layers. None where
        no joints can do it, or C cannot attend the prompts."""
        if self._joint_rows is None or self._joint_rows.balanced:
            return None
        if not self._prompts:
            return self._joint_rows.spart_layers(None)
        prompts = PromptChunk.native(self._prompts)
        return None if prompts is None else self._joint_rows.spart_layers(prompts)

    def project(self, layer: Layer) -> None:
        """Compute the layer's Q, K and V rows from the residual stream, ready to be posted."""
        h = self._ops.norm(self.x, layer.attention_norm) if self._config.norm_first else self.x
        qkv = adapted_product(layer.qkv, h, self._adapters)
        if self._config.output_gate:
            qkv, self._gate = split_gate(qkv, self._config)
        self._ops.write_heads(qkv, layer, self._angles, self.heads)
        if (balance := layer.balance) is not None:
            if balance.q is not None and balance.k is not None:
                multiply_heads(self.heads.q_heads, balance.q)
                multiply_heads(self.heads.k_heads, balance.k)
            multiply_heads(self.heads.v_heads, balance.v)

    def pass_state(self, index: int, block: StateBlock) -> None:
        """Compute a block that has a state, the `index`-th of its kind."""
        c = self._config
        assert c.delta is not None and self._states is not None, "a step of such a model has rows in its states"
        h = self._ops.norm(self.x, block.attention_norm)
        self._end_block(block, delta_block(c.delta, block.delta, c.norm_eps, h, self._states, index, self._adapters))

    def attend_prompts(self, layer: int) -> None:
        """Compute the O rows of prompts."""
        exchange = self._exchange
        for prompt in self._prompts:
            rows = prompt.rows
            prompt.attend(layer, exchange.q[rows], exchange.kv[rows], out=exchange.o[rows])

    def finish(self, layer: Layer) -> None:
        """Compute the rest of the block from the O rows and the residual stream."""
        o = self._o
        if layer.balance is not None:
            o = o.clone(memory_format=torch.contiguous_format)  # the link's memory stays as the R-node wrote it
            multiply_heads(o.unflatten(1, (-1, self._config.head_size)), layer.balance.o)
        if self._gate is not None:
            o = o * self._gate.sigmoid()
        self._end_block(layer, adapted_product(layer.o, o, self._adapters))

    def _end_block(self, block: Block, mixed: torch.Tensor) -> None:
        """Add the output of attention, or of what the block has in its place, to the residual stream; then the MLP."""
        if self._config.norm_first:
            h = self._ops.add_norm(self.x, mixed, block.mlp_norm)
            self.x.add_(self._mlp(block.mlp, h), alpha=self._config.residual_scale)
        else:
            self.x = self._ops.add_norm(self.x, mixed, block.attention_norm)
            self.x = self._ops.add_norm(self.x, self._mlp(block.mlp, self.x), block.mlp_norm)

    def _mlp(self, mlp: MLP | Mixture, h: torch.Tensor) -> torch.Tensor:
        """h [n, hidden_size] -> [n, hidden_size]."""
        if isinstance(mlp, Mixture):
            y = mlp(h, self._ops.activate)
            if (shared := mlp.shared) is not None:
                y += torch.sigmoid(h @ shared.gate.T) * self._mlp(shared.mlp, h)
            return y
        up = adapted_product(mlp.up, h, self._adapters)
        return adapted_product(mlp.down, self._ops.activate(up), self._adapters)
