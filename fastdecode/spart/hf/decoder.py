"""HFSPart: one step of one mini-batch through a transformers model.

The model's forward pass runs in a greenlet. Each layer calls our attention function, which posts the layer's rows to
the R-nodes, attends the prompts, and pauses the greenlet. Meanwhile the generator `SPart.step` yields to the runner,
which resumes another mini-batch, as with the native decoder. All rows of a step are one packed sequence [1, rows],
because no part of a model but attention mixes rows.

In a captured step (exchange/bypass.py) nothing is waited for, so the attention function calls straight through, without
a greenlet.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fastdecode.spart.decoder.decoder import SPart
from fastdecode.spart.decoder.layer_pass import LayerPass
from fastdecode.spart.decoder.rank_steps import FollowingSPart, LeadSPart
from fastdecode.spart.decoder.step_rows import StepRows
from fastdecode.spart.decoder.timeline import StepClock
from fastdecode.spart.exchange import RowExchange, StepExchange
from fastdecode.spart.hf.attention import running
from fastdecode.spart.hf.indexer import Index
from fastdecode.spart.lora.adapters import AdapterRows
from fastdecode.spart.prefill.heads import heads_in, index_in, kv_heads_in
from fastdecode.spart.prefill.prompt import PromptChunk
from fastdecode.spart.ranks.reduction import of_rank_0
from fastdecode.spart.states.pool import StatePool, StateRows


class HFSPart(SPart):
    """A transformers model and the links to the R-nodes that hold its KV-cache; see SPart.

    If the model's own code makes the host wait for its device, the capture of its first step fails, and all steps are
    staged.
    """

    model: Any
    _config: Any

    def _prepare(self, state_slots: int) -> None:
        if mixers := self._config.mixers:
            tensors = [mixer.tensors for mixer in mixers]
            self.states = StatePool(tensors, state_slots, self.model.device, self.model.dtype)
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(self.model.module.forward).parameters

    def _begin(self, rows: StepRows, exchange: StepExchange) -> LayerPass:
        return _Forward(self, rows.uploaded, exchange, rows.prompts, rows.adapters, rows.states)

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


class HFLeadSPart(LeadSPart, HFSPart):
    """The S-Part of rank 0."""


class HFFollowingSPart(FollowingSPart, HFSPart):
    """The S-Part of another rank than 0."""


class _Forward:
    """A LayerPass of transformers: the model's own forward pass, and the rows that its attention function exchanges."""

    def __init__(
        self,
        spart: HFSPart,
        inputs: dict[str, torch.Tensor],
        exchange: RowExchange,
        prompts: Sequence[PromptChunk] = (),
        adapters: AdapterRows | None = None,
        states: StateRows | None = None,
    ):
        """`inputs` is the step's table on the device."""
        self._spart, self._inputs, self._exchange = spart, inputs, exchange
        self._prompts, self.adapters, self.states = prompts, adapters, states
        self._config = spart.model.config
        self._layer, self._timeout = 0, 0.0
        self._logits: torch.Tensor
        self._hidden: torch.Tensor  # [rows, hidden_size] of a model with an MTP head
        self._later_rows: torch.Tensor | None = None  # of a pass of the MTP head after its first one
        self._in_greenlet = False

    def layers(self, clock: StepClock, timeout: float) -> Generator[None, None, None]:
        self._logits = yield from self._pausing(self.run, timeout)

    def draft(self, following: torch.Tensor, n: int, timeout: float) -> Generator[None, None, torch.Tensor]:
        """See LayerPass."""
        self.adapters = None  # the head is not adapted
        passes = self._pausing(partial(self._drafts, following, n), timeout)
        if n:
            return (yield from passes)
        with closing(passes):  # the first pass only posts its K and V
            next(passes)
            yield
        return following.new_empty(len(self._inputs["last rows"]), 0)

    def _drafts(self, following: torch.Tensor, n: int) -> torch.Tensor:
        """The first `n` passes of the MTP head."""
        model, rows, positions = self._spart.model, self._inputs["last rows"], self._inputs["positions"]
        head = model.head
        x = head.attended(following, self._hidden, positions).index_select(0, rows)
        self._later_rows, positions = rows, positions.index_select(0, rows)
        hidden = head.finished(x)
        drafts = [of_rank_0(head.logits(hidden).argmax(dim=1), model.reduction)]
        for i in range(1, n):
            hidden = head.finished(head.attended(drafts[-1], hidden, positions + i))
            drafts.append(of_rank_0(head.logits(hidden).argmax(dim=1), model.reduction))
        return torch.stack(drafts, dim=1)

    def _pausing(self, run: Callable[[], torch.Tensor], timeout: float) -> Generator[None, None, torch.Tensor]:
        """Call `run`, which stops in each layer that it calls; each has `timeout` seconds."""
        from greenlet import greenlet

        self._timeout, self._in_greenlet = timeout, True
        # Every resume comes from this generator, so the greenlet's parent is whichever frame resumes it.
        paused = greenlet(run)
        try:
            while True:
                running.forward = self
                paused.parent = _current()
                result: torch.Tensor = paused.switch()
                if paused.dead:
                    return result
                yield
        finally:
            if not paused.dead:
                # A generator that the garbage collector closes in another thread cannot reach its greenlet, which then
                # ends with its thread.
                with contextlib.suppress(ValueError):
                    paused.parent = _current()
                    paused.throw()
            if running.forward is self:
                running.forward = None  # so that the thread does not hold the step's tensors until its next step

    def run(self) -> torch.Tensor:
        """Run the model; returns logits [drawn + scored rows, vocab_size] fp32."""
        tokens, positions, keep = (self._inputs[name] for name in ("tokens", "positions", "last rows"))
        if "scored rows" in self._inputs:
            keep = torch.cat([keep, self._inputs["scored rows"]])
        n = len(keep)
        if not n:  # the pass computes the logits of one row, because not every model accepts an empty `keep`
            keep = tokens.new_zeros(1)
        head, n_layers = self._spart.model.head, self._config.n_layers - self._config.mtp
        if head is None:
            logits = self._spart.logits_of(tokens, positions, keep)
        else:
            self._hidden = head.hidden_states(tokens, positions)
            logits = head.logits(self._hidden[keep])
        if self._layer != n_layers:
            raise RuntimeError(f"the model called attention {self._layer} times; the trace has {n_layers}")
        return logits[:n]

    def logits(self) -> torch.Tensor:
        return self._logits[: len(self._inputs["last rows"])]

    def scored_logits(self, rows: slice) -> torch.Tensor:
        return self._logits[len(self._inputs["last rows"]) :][rows]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Index | None) -> torch.Tensor:
        """See ForwardPass."""
        number, exchange, config = self._layer, self._exchange, self._config
        layer, heads = config.layers[number], config.heads_of(number)
        self._layer += 1
        later = self._later_rows
        self._write(heads_in(exchange.q, 0, heads.n_q, heads.k_size), q, layer.scale / config.softmax_scale, later)
        if layer.kv_layer == number and later is None:  # K and V that layers share are stored already
            k_heads, v_heads = kv_heads_in(exchange.kv, heads)
            self._write(k_heads, k)
            if not heads.v_in_k:
                self._write(v_heads, v)
        if index is not None and config.index_size_of(number):
            index_q, weights, keys = index_in(exchange.q, exchange.kv, heads, config)
            self._write(index_q, index.q)
            self._write(keys, index.k)
            weights.copy_(index.weights[0])
        exchange.post(number, self._timeout)
        for prompt in self._prompts:
            rows = prompt.rows
            prompt.attend(number, exchange.q[rows], exchange.kv[rows], out=exchange.o[rows])
        if self._in_greenlet:
            _current().parent.switch()  # to `layers`; SPart.step waits for the R-nodes before it resumes this greenlet
        else:
            exchange.wait(self._timeout)
        # A copy, because the next layer overwrites the slot's O rows and a model may hold on to its attention's output.
        o = heads_in(exchange.o, 0, heads.n_q, heads.v_size)[:, :, : layer.v_size]
        return (o.clone() if later is None else o.index_select(0, later))[None]

    @staticmethod
    def _write(
        heads: torch.Tensor, values: torch.Tensor, factor: float = 1.0, rows: torch.Tensor | None = None
    ) -> None:
        """Write values [1, heads, n, size] times `factor` into all rows, or into the n rows `rows`, of heads [rows,
        heads, head_size]; further elements of a head become zero."""
        values = values[0].transpose(0, 1)
        if factor != 1.0:
            values = values * factor
        if (missing := heads.shape[2] - values.shape[2]) > 0:
            values = F.pad(values, (0, missing))
        if rows is None:
            heads.copy_(values)
        else:
            heads.index_copy_(0, rows, values)


def _current() -> Any:
    from greenlet import getcurrent

    return getcurrent()
