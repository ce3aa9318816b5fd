"""One S-node's part of mini-batches that rotate over several S-nodes on one machine (Lamina, arXiv 2405.01814).

A mini-batch's decode steps are a line of slices. Slice k finishes layer k - 1 and projects layer k; layers count on
over all steps, so the slice between two steps also draws tokens and embeds them. Slice k of mini-batch j runs on S-node
(j + k) mod m. All S-nodes map the region of the same links over shared memory, and one more piece of memory for the
hidden states. An S-node writes hidden states before it rings the layer, and the next one reads them when the R-nodes
have answered the layer, so the R-nodes' answer is the bell of the hand-over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch

from fastdecode.spart.decoder.decoder import SPart, StepRows, StepState
from fastdecode.spart.exchange import make_exchange
from fastdecode.spart.step.batch import Sampled, StepBatch
from fastdecode.transports.base import Pending


@dataclass(slots=True)
class RotatedOutput:
    """What an S-node did for a mini-batch. Seconds."""

    sampled: dict[int, list[Sampled | None]] = field(default_factory=dict)  # by step, of the steps that ended here
    hand_overs: int = 0  # hidden states that were written for another S-node, or read
    hand_over_seconds: float = 0.0  # of these copies


class Rotation:
    """S-node `index` of `n_s_nodes`, on a CPU. Its mini-batches may be interleaved, as those of SPart."""

    def __init__(self, spart: SPart, index: int, n_s_nodes: int, hidden: torch.Tensor):
        """`hidden` [slots, rows, hidden_size]: memory that all S-nodes share, in the model's dtype.

        Raises ValueError for a model with too few layers: an S-node waits for the reply to a layer while another one is
        up to `n_s_nodes` layers before it, and must not take a reply of the step before for that.
        """
        if spart.config.n_layers <= n_s_nodes + 1:
            raise ValueError(f"a model of {spart.config.n_layers} layers cannot rotate over {n_s_nodes} S-nodes")
        self._spart, self._index, self._n_s_nodes, self._hidden = spart, index, n_s_nodes, hidden

    @torch.inference_mode()
    def mini_batch(
        self, slot: int, n_steps: int, batch_of: Callable[[int, list[Sampled | None] | None], StepBatch]
    ) -> Generator[Pending, float | None, RotatedOutput]:
        """This S-node's slices of `n_steps` decode steps of the mini-batch `slot`. Yields like SPart.step.

        `batch_of` makes a step's batch from its number and what was drawn in the step before; from None if that is
        another S-node's: then its tokens do not count, except in step 0, where all S-nodes know them. Raises what
        SPart.step raises.
        """
        layers = self._spart.model.weights.layers
        total = n_steps * len(layers)
        output = RotatedOutput()
        drawn: list[Sampled | None] | None = None
        step: _Step | None = None
        try:
            for k in range((self._index - slot) % self._n_s_nodes, total + 1, self._n_s_nodes):
                if k:
                    number, i = divmod(k - 1, len(layers))
                    if step is None or step.number != number:
                        step = _Step(
                            self._spart, number, batch_of(number, None), self._hidden[slot], output, begins=False
                        )
                    yield from step.follow(i)
                    step.take()
                    step.state.finish(layers[i])
                    if i == len(layers) - 1:
                        output.sampled[number] = drawn = step.end()
                if k < total:
                    number, i = divmod(k, len(layers))
                    if i == 0:
                        step = _Step(
                            self._spart, number, batch_of(number, drawn), self._hidden[slot], output, begins=True
                        )
                        step.exchange.arm()
                    assert step is not None
                    step.state.project(layers[i])
                    step.give()
                    step.exchange.post(i, step.timeout)
            if step is not None and n_steps - 1 not in output.sampled:
                yield from step.follow(len(layers) - 1)  # so that the slot is idle at every S-node
                step.exchange.disarm()
        except BaseException:
            if step is not None:
                step.exchange.settle(step.timeout)
            raise
        return output


class _Step:
    """A decode step at one of the S-nodes."""

    def __init__(
        self, spart: SPart, number: int, batch: StepBatch, hidden: torch.Tensor, output: RotatedOutput, begins: bool
    ):
        device = spart.model.device
        self.number, self.timeout = number, batch.layer_timeout
        self._spart, self._output = spart, output
        self._rows = StepRows(spart, batch)
        self._rows.upload(device)
        self.exchange = make_exchange(batch.slot, self._rows.link_rows, device)
        self._hidden = hidden[: len(self.exchange.kv)]
        x = None if begins else torch.empty_like(self._hidden)
        self.state = StepState(spart, self._rows.uploaded, self.exchange, adapters=self._rows.adapters, x=x)

    def follow(self, layer: int) -> Generator[Pending, float | None, None]:
        """Wait for a layer that the S-node before this one asks for."""
        self.exchange.follow(layer)
        yield self.exchange.pending
        self.exchange.wait(self.timeout)

    def take(self) -> None:
        """Read the hidden states of the S-node before this one."""
        self._copy(self.state.x, self._hidden)

    def give(self) -> None:
        """Write hidden states for the S-node behind this one."""
        self._copy(self._hidden, self.state.x)

    def end(self) -> list[Sampled | None]:
        """Draw the step's tokens, after its last layer."""
        self.exchange.disarm()
        return self._spart.draw(self.state.x, self._rows)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        begun = time.perf_counter()
        to.copy_(source)
        self._output.hand_overs += 1
        self._output.hand_over_seconds += time.perf_counter() - begun
