"""SPart: the decoder of all model families; it computes one step of one mini-batch at a time.

A step is a generator, because attention on the R-nodes cuts each layer in two:

    embed ─▶ norm, Q K V, QK norm, RoPE ─▶ post ─▶ yield ─▶ wait ─▶ O projection, MLP ─▶ next layer ... ─▶ head, sample
                                            │  prompts: SDPA   ▲
                                            └──▶ R-nodes attend ┘

The runner (engine/runner.py) resumes another mini-batch's step while the R-nodes attend for this one. The rows of all
chunks stand one after another in one matrix, those of attending chunks first; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from typing import TypeVar, cast

import torch

from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.experts import Mixture
from fastdecode.spart.decoder.layer_pass import DecoderLayers, DecoderPass, LayerPass, draft_passes
from fastdecode.spart.decoder.step_rows import StepRows
from fastdecode.spart.decoder.timeline import StepClock, Timeline
from fastdecode.spart.decoder.weights import Model
from fastdecode.spart.exchange import Appender, Exchange, RowExchange, SlotViews, StepExchange, make_exchange
from fastdecode.spart.exchange.chosen import ChosenExchange
from fastdecode.spart.prefill.prompt import PromptCache
from fastdecode.spart.ranks.reduction import of_rank_0
from fastdecode.spart.states.pool import StatePool
from fastdecode.spart.step.batch import Sampled, StepBatch, StepOutput
from fastdecode.transports.base import DataPath, Pending

_Result = TypeVar("_Result")


class SPart:
    """A model and the links to the R-nodes that hold its KV-cache.

    Steps of different slots may be interleaved; they must not run at the same time in several threads.
    """

    _goes_on = False  # True: a step goes on when all of its links have failed, because other ranks wait for it

    def __init__(
        self, model: Model, links: Sequence[DataPath], exchange: ChosenExchange | None = None, state_slots: int = 0
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
        self._layers = DecoderLayers(self.model)
        if tensors := self._layers.state_tensors:
            self.states = StatePool(tensors, state_slots, self.model.device, self.model.dtype)

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
        rows = StepRows(batch, self.model, self._prompts, self.states, partial(self._slot_views, slot=batch.slot))
        bypass = self.exchange.bypass
        if bypass is not None and bypass.takes(self, rows, batch.slot):
            return (yield from bypass.step(self, rows, batch, keep_logits))
        rows.upload(self.model.device)
        exchange = make_exchange(batch.slot, rows.link_rows, self.model.device, self._appender)
        if isinstance(exchange, Exchange):
            exchange.goes_on = self._goes_on
        clock = StepClock(self.timeline, batch.slot, rows.started)
        try:
            n_drafts = batch.drafts if rows.n_drawn else 0
            exchange.arm(self._config.n_layers - self._config.mtp + draft_passes(self._config.mtp, n_drafts))
            layer_pass = self._begin(rows, exchange)
            timeout = batch.layer_timeout
            yield from _exchanged(layer_pass.layers(clock, timeout), exchange, clock, timeout)
            logits = layer_pass.logits()
            drawn: list[Sampled] | None = None
            if self._config.mtp:
                drawn = self._draw(logits, rows)  # before the head is called again, which overwrites logits of ranks
                scores = rows.scorer(layer_pass.scored_logits, rows.uploaded)
                passes = layer_pass.draft(of_rank_0(rows.following(drawn), self.model.reduction), n_drafts, timeout)
                drafts = yield from _exchanged(passes, exchange, clock, timeout)
                for one, tokens in zip(drawn, drafts.tolist(), strict=True):
                    one.drafts = tokens
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
        if drawn is None:
            drawn = self._draw(logits, rows)
            scores = rows.scorer(layer_pass.scored_logits, rows.uploaded)
        clock.interval_ended()
        return StepOutput(
            scores=scores,
            sampled=rows.per_chunk(drawn),
            s_seconds=clock.s_seconds,
            r_wait_seconds=clock.r_wait_seconds,
            kv_bytes=sum(times.kv_bytes for times in link_costs.values()),
            link_costs=link_costs,
            failures=exchange.failures,
            logits=logits.float() if keep_logits else None,
        )

    def _begin(self, rows: StepRows, exchange: StepExchange) -> LayerPass:
        """The pass of a step's rows through the layers, by the model's own backend."""
        return DecoderPass(self._layers, rows.uploaded, exchange, rows.prompts, rows.adapters, rows.states)

    def _draw(self, logits: torch.Tensor, rows: StepRows) -> list[Sampled]:
        """Draw a token after each chunk that asks for one, and after its drafts, from logits [rows.n_drawn, vocab_size]
        in fp32 or the activation dtype."""
        return rows.sampler(logits, rows.uploaded) if rows.n_drawn else []

    def whole_step(self, inputs: dict[str, torch.Tensor], exchange: RowExchange) -> torch.Tensor:
        """All layers of a step without prompts, on a device that waits for the R-nodes itself.

        `inputs` has "tokens", "positions" and "last rows" as StepRows uploads them. Returns the logits of the last
        rows, [rows, vocab_size] fp32.
        """
        layer_pass = DecoderPass(self._layers, inputs, exchange)
        for _ in layer_pass.layers():
            exchange.wait(0.0)
        return layer_pass.logits().float()

    def _end_chunks(self, rows: StepRows, exchange: StepExchange) -> None:
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
                if chunk.link not in failed and (chunk.prefix is None or chunk.prefix.link not in failed):
                    self.states.end(chunk)

    def drop(self, link: int, seq_index: int, tag: int) -> None:
        """Free the staged K and V of a prompt that will not be continued. May be called from any thread.

        `link` is the index of a link, `seq_index` and `tag` are the sequence's handle on it.
        """
        self._prompts.drop((link, seq_index, tag))

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
        mixtures = ((i, block.mlp) for i, block in enumerate(self.model.weights.blocks))
        return {i: mlp.load.tolist() for i, mlp in mixtures if isinstance(mlp, Mixture)}

    def forget_expert_load(self) -> None:
        """Count the rows of `expert_load` anew, for all S-Parts of the model."""
        for i in self.expert_load:
            mlp = self.model.weights.blocks[i].mlp
            assert isinstance(mlp, Mixture)
            mlp.load.zero_()

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


def _exchanged(
    layers: Generator[None, None, _Result], exchange: StepExchange, clock: StepClock, timeout: float
) -> Generator[Pending, float | None, _Result]:
    """Wait for the R-nodes wherever `layers` stops, with `timeout` seconds for each layer. Yields as SPart.step does.
    Returns the result of `layers`."""
    with closing(layers):
        while True:
            try:
                next(layers)
            except StopIteration as stop:
                return cast(_Result, stop.value)
            clock.interval_ended()
            clock.waits((yield exchange.pending))
            while not exchange.ready:
                yield exchange.pending
            exchange.wait(timeout)
            clock.replied()
