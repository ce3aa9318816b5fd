"""HFSPart: one step of one mini-batch through a transformers model.

The model's forward pass runs in a greenlet. Each layer calls our attention function, which posts the layer's rows to
the R-nodes, attends the prompts, and pauses the greenlet. Meanwhile the generator `HFSPart.step` yields to the runner,
which resumes another mini-batch, as with the native decoder. All rows of a step are one packed sequence [1, rows],
because no part of a model but attention mixes rows.

In a captured step (exchange/bypass.py) nothing is waited for, so the attention function calls straight through, without
a greenlet.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Sequence
from typing import Any

import torch

from fastdecode.spart.decoder.decoder import SPart, StepRows
from fastdecode.spart.decoder.timeline import StepClock, Timeline
from fastdecode.spart.exchange import RowExchange, SlotViews, make_exchange
from fastdecode.spart.exchange.choice import ChosenExchange
from fastdecode.spart.exchange.heads import heads_in
from fastdecode.spart.hf.attention import running
from fastdecode.spart.hf.model import HFModel
from fastdecode.spart.prefill.prompt import PromptCache
from fastdecode.spart.step.batch import StepBatch, StepOutput
from fastdecode.transports.base import DataPath, Pending


class HFSPart(SPart):
    """A transformers model and the links to the R-nodes that hold its KV-cache; see SPart."""

    def __init__(self, model: HFModel, links: Sequence[DataPath], exchange: ChosenExchange | None = None):
        """`links` and `exchange` are those of SPart. If the model's own code makes the host wait for its device, the
        capture of its first step fails, and all steps are staged."""
        self.model: Any = model
        self.links = links
        self.exchange = exchange or ChosenExchange.plain(model.device)
        self._config: Any = model.config
        self.timeline = Timeline()
        self._views: dict[tuple[int, int], SlotViews] = {}
        self._prompts = PromptCache(self._config, model.device, model.dtype)
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(model.module.forward).parameters

    @torch.inference_mode()
    def step(self, batch: StepBatch, keep_logits: bool = False) -> Generator[Pending, float | None, StepOutput]:
        """Run `batch` through the model; see SPart.step."""
        from greenlet import greenlet

        rows = StepRows(self, batch)
        bypass = self.exchange.bypass
        if bypass is not None and bypass.takes(self, rows, batch.slot):
            return (yield from bypass.step(self, rows, batch, keep_logits))
        rows.upload(self.model.device)
        exchange = make_exchange(batch.slot, rows.link_rows, self.model.device)
        forward = _Forward(self, rows.uploaded, exchange, rows, batch.layer_timeout)
        # Every resume comes from this generator, so the greenlet's parent is whichever frame resumes it.
        paused = greenlet(forward.run)
        clock = StepClock(self.timeline, batch.slot, rows.started)
        try:
            exchange.arm()
            while True:
                running.forward = forward
                paused.parent = _current()
                logits = paused.switch()
                if paused.dead:
                    break
                clock.part_ended()
                clock.waits((yield exchange.pending))
                exchange.wait(batch.layer_timeout)
                clock.replied()
            scored = logits[rows.n_drawn :]
            sampled = self._sample(logits[: rows.n_drawn], rows)
            scores = rows.scorer(lambda part: scored[part], rows.uploaded)
        except BaseException:
            if not paused.dead:
                # A generator that the garbage collector closes in another thread cannot reach its greenlet, which then
                # ends with its thread.
                with contextlib.suppress(ValueError):
                    paused.parent = _current()
                    paused.throw()
            exchange.settle(batch.layer_timeout)
            for prompt in rows.prompts:
                self._prompts.drop(prompt.key)
            raise
        link_costs = exchange.disarm()
        self._end_prompts(rows, exchange)
        clock.part_ended()
        return StepOutput(
            scores=scores,
            sampled=sampled,
            s_seconds=clock.s_seconds,
            r_wait_seconds=clock.r_wait_seconds,
            kv_bytes=sum(times.kv_bytes for times in link_costs.values()),
            link_costs=link_costs,
            failures=exchange.failures,
            logits=logits[: rows.n_drawn] if keep_logits else None,
        )

    def whole_step(self, inputs: dict[str, torch.Tensor], exchange: RowExchange) -> torch.Tensor:
        """All layers of a step without prompts; see SPart.whole_step."""
        running.forward = forward = _Forward(self, inputs, exchange)
        try:
            return forward.run()
        finally:
            running.forward = None

    @property
    def expert_load(self) -> dict[int, list[int]]:
        """Empty: the model's own code chooses the experts."""
        return {}

    def logits_of(self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """tokens [rows], positions [rows] -> logits [len(keep), vocab_size] fp32 of the rows `keep`."""
        options = {"logits_to_keep": keep} if self._keeps_some_logits else {}
        out = self.model.module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **options)
        logits: torch.Tensor = out.logits[0]
        return (logits if self._keeps_some_logits else logits[keep]).float()


class _Forward:
    """One pass of a step's rows through the model, and the rows that its attention function exchanges."""

    def __init__(
        self,
        spart: HFSPart,
        inputs: dict[str, torch.Tensor],
        exchange: RowExchange,
        rows: StepRows | None = None,
        timeout: float = 0.0,
    ):
        """`inputs` is the step's table on the device. `rows` None: a step without prompts, which is captured."""
        self._spart, self._inputs, self._exchange, self._timeout = spart, inputs, exchange, timeout
        self._in_greenlet = rows is not None
        self._prompts = rows.prompts if rows else []
        self._n_scored = rows.scorer.n_rows if rows else 0
        self.adapters = rows.adapters if rows else None
        self._config = spart.model.config
        self._layer = 0

    def run(self) -> torch.Tensor:
        """Run the model; returns logits [drawn + scored rows, vocab_size] fp32."""
        tokens, positions, keep = (self._inputs[name] for name in ("tokens", "positions", "last rows"))
        n = len(keep) + self._n_scored
        if self._n_scored:
            keep = torch.cat([keep, self._inputs["scored rows"]])
        if not len(keep):  # the pass computes the logits of one row, because not every model accepts an empty `keep`
            keep = tokens.new_zeros(1)
        logits = self._spart.logits_of(tokens, positions, keep)
        if self._layer != self._config.n_layers:
            raise RuntimeError(f"the model called attention {self._layer} times; the trace has {self._config.n_layers}")
        return logits[:n]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one layer: q [1, n_q_heads, rows, k_size], k and v with KV heads -> O [1, rows, n_q_heads,
        v_size]."""
        index, exchange, config = self._layer, self._exchange, self._config
        layer, heads = config.layers[index], config.heads_of(index)
        self._layer += 1
        self._write(heads_in(exchange.q, 0, heads.n_q, heads.k_size), q, layer.scale / config.softmax_scale)
        if layer.kv_layer == index or self._prompts:  # the R-nodes have the K and V that layers share
            self._write(heads_in(exchange.kv, 0, heads.n_kv, heads.k_size), k)
            self._write(heads_in(exchange.kv, heads.n_kv * heads.k_size, heads.n_kv, heads.v_size), v)
        exchange.post(index, self._timeout)
        for prompt in self._prompts:
            rows = prompt.rows
            prompt.attend(index, exchange.q[rows], exchange.kv[rows], out=exchange.o[rows])
        if self._in_greenlet:
            _current().parent.switch()  # to HFSPart.step, which waits for the R-nodes before it resumes this greenlet
        else:
            exchange.wait(self._timeout)
        # A copy, because the next layer overwrites the slot's O rows and a model may hold on to its attention's output.
        return heads_in(exchange.o, 0, heads.n_q, heads.v_size)[None, :, :, : layer.v_size].clone()

    @staticmethod
    def _write(heads: torch.Tensor, values: torch.Tensor, factor: float = 1.0) -> None:
        """Write values [1, heads, rows, size] times `factor` into heads [rows, heads, head_size]; further elements of a
        head become zero."""
        values = values[0].transpose(0, 1)
        size = values.shape[2]
        if factor != 1.0:
            values = values * factor
        heads[:, :, :size].copy_(values)
        if size < heads.shape[2]:
            heads[:, :, size:].zero_()


def _current() -> Any:
    from greenlet import getcurrent

    return getcurrent()
