"""The pass of a step's rows through the layers of a model: LayerPass, and the native decoder's DecoderPass."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count
from typing import Protocol

import torch

from fastdecode.spart.decoder.block_ops import NativeBlockOps, RowHeads, norm_whole, split_gate
from fastdecode.spart.decoder.cuda_ops import make_block_ops
from fastdecode.spart.decoder.experts import MLP, Mixture
from fastdecode.spart.decoder.joints import JointRows, make_joints
from fastdecode.spart.decoder.rope import Angles, RotaryEmbedding
from fastdecode.spart.decoder.timeline import StepClock
from fastdecode.spart.decoder.weights import (
    AttentionBlock,
    Block,
    LatentLayer,
    Layer,
    Model,
    Norm,
    PerLayerInput,
    StateBlock,
)
from fastdecode.spart.exchange import Exchange, RowExchange
from fastdecode.spart.lora.adapters import AdapterRows, adapted_product
from fastdecode.spart.prefill.heads import multiply_heads
from fastdecode.spart.prefill.prompt import PromptChunk
from fastdecode.spart.ranks.reduction import of_rank_0
from fastdecode.spart.states.delta import DeltaBlock, state_tensors
from fastdecode.spart.states.pool import StateRows, StateTensor


class LayerPass(Protocol):
    """The pass of a step's rows through the layers of a model. Its generators stop where R-nodes attend."""

    def layers(self, clock: StepClock, timeout: float) -> Generator[None, None, None]:
        """Pass all layers, each of which has `timeout` seconds. Stops once a layer's rows are posted and its prompts'
        attention is computed; goes on when the exchange has waited for the R-nodes."""

    def logits(self) -> torch.Tensor:
        """After all layers: the logits after which tokens are drawn, [drawn rows, vocab_size] in fp32 or the activation
        dtype."""

    def scored_logits(self, rows: slice) -> torch.Tensor:
        """After all layers: the logits of some of the scored rows, [rows, vocab_size] fp32."""

    def draft(self, following: torch.Tensor, n: int, timeout: float) -> Generator[None, None, torch.Tensor]:
        """The passes of the MTP head, after all layers. `following` int64 [rows] has the token after each row.

        Returns the `n` tokens that the head expects after each drawn token, int64 [drawn rows, n]. The first pass
        stores K and V of all rows. Later passes go on from the drawn rows alone: their queries attend to the K and V of
        the first pass. There are `draft_passes` passes; each has `timeout` seconds, and stops as `layers` does.
        """


#: The logits of suppressed tokens. They stay finite if a penalty multiplies them, which it does by 100 at most.
_SUPPRESSED = -1e36


def draft_passes(most: int, n: int) -> int:
    """The passes of an MTP head that drafts up to `most` tokens, 0 without a head, in a step that drafts `n`: the first
    one stores K and V, so no step leaves it out."""
    return min(most, max(1, n))


class DecoderLayers:
    """A model of the native decoder, ready for steps."""

    def __init__(self, model: Model):
        config = model.config
        self.model, self.weights = model, model.weights
        self.layers = model.weights.layers
        self.ops = make_block_ops(config, model.device, model.dtype)
        if isinstance(self.ops, NativeBlockOps) and self.ops.gates_experts:
            for block in model.weights.all_blocks:
                if isinstance(block.mlp, Mixture):
                    block.mlp.run_in_c(self.ops.gelu, model.dtype)
        self.rope, self.second_rope = (self._rotary(second) for second in (False, True))
        #: A number of the dtype that embeddings have, as in transformers' code for Gemma.
        self._embed_scale = torch.tensor(config.embed_scale, dtype=model.dtype).item()
        ids = [token for token in config.suppressed if 0 <= token < config.vocab_size]
        self._suppressed = torch.tensor(ids, device=model.device) if ids else None
        #: The blocks with a state before each layer, and behind the last one, with their rules.
        self.between: list[list[tuple[StateBlock, DeltaBlock]]] = [[]]
        rules = count()
        for block in model.weights.blocks:
            if isinstance(block, StateBlock):
                assert config.delta is not None
                rule = DeltaBlock(config.delta, block.delta, config.norm_eps, next(rules), model.dtype)
                self.between[-1].append((block, rule))
            else:
                self.between.append([])
        self.joints = make_joints(config, self.layers, self.ops, model.reduction, self.between)

    def _rotary(self, second: bool) -> RotaryEmbedding | None:
        model = self.model
        config, dtype = model.config, self.ops.angle_dtype
        rope = config.second_rope if second else config.rope
        return None if rope is None else RotaryEmbedding(rope, config.rope_head_size(second), model.device, dtype)

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """The output of a sublayer, [n, hidden_size], from this rank's summand `y`, which is overwritten."""
        return y if self.model.reduction is None else self.model.reduction.sum_(y)

    def norm_over_ranks(self, qkv: torch.Tensor, layer: Layer) -> Layer:
        """The layer whose heads write_heads is to write. Where ranks share heads that are normalised as one, they sum
        the squares and normalise `qkv` in place, and write_heads is left no norm to compute."""
        if self.model.reduction is None or not self.model.config.whole_qk_norm:
            return layer
        return norm_whole(qkv, layer, self.model.config, self.model.reduction)

    @property
    def state_tensors(self) -> list[Sequence[StateTensor]]:
        """The tensors of a sequence's state in each block that keeps one."""
        rule = self.model.config.delta
        return [] if rule is None else [state_tensors(rule)] * len(rule.blocks)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens [n], positions [n] -> the residual stream before the first layer, [n, hidden_size]."""
        w = self.weights
        x = w.embedding(tokens)
        if self._embed_scale != 1.0:
            x.mul_(self._embed_scale)
        if w.project_in is not None:
            x = w.project_in(x)
        if w.positions is not None:
            x.add_(w.positions.index_select(0, positions + self.model.config.position_offset))
        return x

    def per_layer_inputs(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """tokens [n] and the residual stream x [n, hidden_size] before the first layer -> the blocks' parts of the
        per-layer embedding, [n, blocks, size]. None: the model has none."""
        config, weights = self.model.config, self.weights.per_layer
        if config.per_layer is None or weights is None:
            return None
        parts = -1, config.per_layer.size
        scale = torch.tensor(config.per_layer.size**0.5, dtype=self.model.dtype).item()
        projected = weights.projection(x).mul_(config.hidden_size**-0.5).unflatten(1, parts)
        embedded = weights.table(tokens).mul_(scale).unflatten(1, parts)
        return self.ops.norm_heads(projected, weights.norm).add_(embedded).mul_(0.5**0.5)

    def head_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden_size] after the last layer -> what the LM head multiplies, [n, embed_size]."""
        w = self.weights
        if w.final_norm is not None:
            x = self.ops.norm(x, w.final_norm)
        return x if w.project_out is None else w.project_out(x)

    def head(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits of some rows of x [n, hidden_size]: [len(rows), vocab_size] in fp32 or the activation dtype."""
        logits = self.weights.head(self.head_inputs(x.index_select(0, rows)))
        config = self.model.config
        if config.logit_divisor != 1.0:
            logits = logits.float().div_(config.logit_divisor)
        if cap := config.logit_softcap:
            logits = logits.float().div_(cap).tanh_().mul_(cap)
        if self._suppressed is not None:
            logits.index_fill_(1, self._suppressed, max(torch.finfo(logits.dtype).min, _SUPPRESSED))
        return logits


class DecoderPass:
    """A LayerPass of the native decoder: the residual stream `x`, the Q, K, V and O rows, and RoPE's angles."""

    def __init__(
        self,
        layers: DecoderLayers,
        uploaded: dict[str, torch.Tensor],
        exchange: RowExchange,
        prompts: Sequence[PromptChunk] = (),
        adapters: AdapterRows | None = None,
        states: StateRows | None = None,
    ):
        c = layers.model.config
        self._decoder, self._ops, self._config = layers, layers.ops, c
        self._positions, self._long = uploaded["positions"], uploaded.get("long")
        self._prompts, self._exchange, self._adapters, self._states = prompts, exchange, adapters, states
        self._gate: torch.Tensor | None = None  # of the layer's heads, [n, n_q_heads * head_size]
        positions = uploaded["positions"]
        self._drawn_rows = uploaded.get("last rows", positions[:0])  # of `x`, after which tokens are drawn
        self._scored_rows = uploaded.get("scored rows", positions[:0])
        self.x = layers.embed(uploaded["tokens"], positions)
        self._per_layer = layers.per_layer_inputs(uploaded["tokens"], self.x)
        self._o = exchange.o
        self.heads = RowHeads(exchange.q, exchange.kv, c.heads_of(0))  # those of the layer that was projected last
        self._angles = layers.rope.angles(positions, self._long) if layers.rope else None
        self._second_angles = layers.second_rope.angles(positions) if layers.second_rope else None
        self._layers, self._between = layers.layers, layers.between
        self._joints = None if adapters is not None else layers.joints
        self._joint_rows = self._make_joint_rows()

    def _make_joint_rows(self) -> JointRows | None:
        """The step's rows for the model's joints. None: there are none for them."""
        if self._joints is None or self._angles is None:
            return None
        angles = self._angles, self._second_angles
        return self._joints.rows(self.x, self._o, angles[0], self.heads, angles[1], self._per_layer, self._states)

    def layers(self, clock: StepClock | None = None, timeout: float = 0.0) -> Generator[None, None, None]:
        """See LayerPass. `clock` None: the device itself waits for the R-nodes."""
        self.advance(0)
        n_layers = len(self._layers)
        for i in range(self._run_in_c(clock, timeout), n_layers):
            self._exchange.post(i, timeout)
            self.attend_prompts(i)
            yield
            if i == self._config.last_storing_layer and not len(self._scored_rows):
                self.drop_rows(i == n_layers - 1)
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
        return self._decoder.head(self.x, rows) if len(rows) else self.x.new_empty(0, self._config.vocab_size)

    def scored_logits(self, rows: slice) -> torch.Tensor:
        return self._decoder.head(self.x, self._scored_rows[rows]).float()

    def draft(self, following: torch.Tensor, n: int, timeout: float) -> Generator[None, None, torch.Tensor]:
        """See LayerPass."""
        w, exchange, drawn = self._decoder.weights, self._exchange, self._drawn_rows
        assert w.mtp is not None and w.final_norm is not None, "ModelConfig.mtp says that there is a head"
        self._adapters = None  # the head is not adapted
        self.x = self._mtp_inputs(following, self._ops.norm(self.x, w.final_norm))
        self.project(w.mtp.layer)
        drafts = []
        for i in range(draft_passes(self._config.mtp, n)):
            exchange.post(len(self._layers) + i, timeout)
            self.attend_prompts(len(self._layers) + i)  # the first pass also stages the K and V of prompts
            yield
            if i >= n:
                break
            if i == 0:
                self._narrow(drawn)
            self._o = exchange.o.index_select(0, drawn)
            self.finish(w.mtp.layer)
            hidden = self._ops.norm(self.x, w.mtp.final_norm)
            drafts.append(of_rank_0(w.head(hidden).argmax(dim=1), self._decoder.model.reduction))
            if i + 1 < n:
                self.x = self._mtp_inputs(drafts[-1], hidden)
                if self._decoder.rope is not None:
                    long = None if self._long is None else self._long.index_select(0, drawn)
                    self._angles = self._decoder.rope.angles(self._positions.index_select(0, drawn) + i + 1, long)
                self.project(w.mtp.layer)
                exchange.q.index_copy_(0, drawn, self.heads.q)
        return torch.stack(drafts, dim=1) if drafts else drawn.new_empty(len(drawn), 0)

    def _mtp_inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """tokens [n] and the normalised hidden states before them [n, hidden_size] -> the input of the head's layer."""
        mtp = self._decoder.weights.mtp
        assert mtp is not None
        embedded = self._decoder.embed(tokens, tokens)
        pairs = self._ops.norm(embedded, mtp.embedding_norm), self._ops.norm(hidden, mtp.hidden_norm)
        return mtp.fc(torch.cat(pairs, dim=1))

    def _narrow(self, rows: torch.Tensor) -> None:
        """Go on with some rows alone, int64 [n], whose heads get memory of their own."""
        self.x = self.x.index_select(0, rows)
        if self._gate is not None:
            self._gate = self._gate.index_select(0, rows)
        q, kv = (heads.new_empty(len(rows), heads.shape[1]) for heads in (self.heads.q, self.heads.kv))
        self.heads = RowHeads(q, kv, self.heads.heads)

    def drop_rows(self, last: bool) -> None:
        """Before a layer is finished behind which no layer stores K and V: drop the rows of prompts that have no token
        drawn after them, because nothing else needs what the rest of the model makes of them. `last`: no layer follows.

        All rows are kept in a step without joints, unless layers share K and V or ranks share the model: these sum the
        same rows, and one of them may have joints. A step with adapters has joints at no rank. In a step with states or
        an MTP head all rows pass."""
        has_joints = self._joint_rows is not None or self._decoder.model.reduction is not None
        all_pass = self._config.mtp or self._adapters is not None or self._states is not None
        if not self._prompts or all_pass or not (has_joints or self._config.shares_kv):
            return
        rows, attending = self._drawn_rows, 0
        if not last:  # the next layers have rows that R-nodes attend to
            attending = self._prompts[0].rows.start
            prompts = rows[len(rows) - sum(prompt.chunk.sample is not None for prompt in self._prompts) :]
            if attending:
                rows = torch.cat([torch.arange(attending, device=rows.device), prompts])
            self._narrow_exchange(rows, attending)
            drawn = self._drawn_rows[: len(self._drawn_rows) - len(prompts)]
            behind = torch.arange(attending, len(rows), device=rows.device)
            self._drawn_rows = torch.cat([drawn, behind])
        else:
            self._o = self._o.index_select(0, rows)
            self._drawn_rows = torch.arange(len(rows), device=rows.device)
        self.x = self.x.index_select(0, rows)
        if self._per_layer is not None:
            self._per_layer = self._per_layer.index_select(0, rows)
        if self._joints is not None and self._joint_rows is not None:
            if last:
                self._joint_rows = self._joints.last_rows(self.x, self._o, self._per_layer)
            else:
                self._joint_rows = self._make_joint_rows()

    def _narrow_exchange(self, rows: torch.Tensor, attending: int) -> None:
        """Keep the rows `rows`, int64 [n], of the exchange. R-nodes attend to the first `attending` of them. The S-Part
        attends to the others, which are rows of prompts and move up behind those."""
        n, exchange = len(rows), self._exchange
        exchange.o[attending:n] = exchange.o.index_select(0, rows[attending:])
        self._o = exchange.o[:n]
        self.heads = RowHeads(exchange.q[:n], exchange.kv[:n], self.heads.heads)
        for prompt in self._prompts:
            attending = prompt.keep_last_row(attending)
        self._angles, self._second_angles = (
            None if angles is None else Angles(*(x.index_select(0, rows) for x in angles))
            for angles in (self._angles, self._second_angles)
        )

    def advance(self, index: int) -> None:
        """Finish layer `index` - 1 and project layer `index`, as far as there are such layers."""
        if not len(self.x):  # the step draws no token, and its prompts' rows are dropped
            return
        if self._joint_rows is not None and self._joint_rows.run(index):
            return
        if index > 0:
            self.finish(self._layers[index - 1])
        for block, rule in self._between[index]:
            self.pass_state(block, rule)
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

    def project(self, layer: AttentionBlock) -> None:
        """Compute the layer's Q, K and V rows from the residual stream, ready to be posted."""
        h = self._normed(self.x, layer.attention_norm) if self._config.norm_first else self.x
        if isinstance(layer, LatentLayer):
            assert self._angles is not None, "latent attention has RoPE"
            layer.latent.project(h, self._angles, self.heads.q_heads, self.heads.kv, self._ops, self._adapters)
            return
        assert isinstance(layer, Layer)
        qkv = adapted_product(layer.qkv, h, self._adapters)
        if layer.k_as_v:
            qkv = torch.cat([qkv, qkv[:, layer.heads.n_q * layer.heads.k_size :]], dim=1)
        if layer.heads != self.heads.heads:
            self.heads = RowHeads(self.heads.q, self.heads.kv, layer.heads)
        if self._config.output_gate:
            qkv, self._gate = split_gate(qkv, layer.heads)
        angles = self._second_angles if layer.second_rope else self._angles
        self._ops.write_heads(qkv, self._decoder.norm_over_ranks(qkv, layer), angles, self.heads)
        if (balance := layer.balance) is not None:
            if balance.q is not None:
                multiply_heads(self.heads.q_heads, balance.q)
            if balance.k is not None and layer.heads.n_kv:
                multiply_heads(self.heads.k_heads, balance.k)
            if layer.heads.n_kv:
                multiply_heads(self.heads.v_heads, balance.v)

    def pass_state(self, block: StateBlock, rule: DeltaBlock) -> None:
        """Compute a block that has a state."""
        assert self._states is not None, "a step of such a model has rows in its states"
        h = self._normed(self.x, block.attention_norm)
        self._end_block(block, rule(h, self._states, self._adapters))

    def attend_prompts(self, layer: int) -> None:
        """Compute the O rows of prompts."""
        exchange = self._exchange
        for prompt in self._prompts:
            rows = prompt.rows
            prompt.attend(layer, exchange.q[rows], exchange.kv[rows], out=exchange.o[rows])

    def finish(self, layer: AttentionBlock) -> None:
        """Compute the rest of the block from the O rows and the residual stream."""
        if isinstance(layer, LatentLayer):
            self._end_block(layer, layer.latent.finish(self._o, self._adapters))
            return
        assert isinstance(layer, Layer)
        o, width = self._o, layer.heads.n_q * layer.heads.v_size
        if width < o.shape[1]:
            o = o[:, :width].contiguous()
        if layer.balance is not None:
            o = o.clone(memory_format=torch.contiguous_format)  # the link's memory stays as the R-node wrote it
            multiply_heads(o.unflatten(1, (-1, layer.heads.v_size)), layer.balance.o)
        if self._gate is not None:
            o = o * self._gate.sigmoid()
        self._end_block(layer, adapted_product(layer.o, o, self._adapters))

    def _end_block(self, block: Block, mixed: torch.Tensor) -> None:
        """Add the output of attention, or of what the block has in its place, to the residual stream; then the MLP."""
        mixed = self._normed(self._decoder.summed(mixed), block.attention_post_norm)
        if self._config.norm_first:
            h = self._added(mixed, block.mlp_norm)
            self._added(self._normed(self._feed_forward(block, h), block.mlp_post_norm), None)
            if block.per_layer is not None:
                self._add_per_layer(block.per_layer)
            if block.scale is not None:
                self.x.mul_(block.scale)
        else:
            self.x = self._added(mixed, block.attention_norm)
            y = self._normed(self._feed_forward(block, self.x), block.mlp_post_norm)
            self.x = self._added(y, block.mlp_norm)

    def _added(self, y: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Add a sublayer's output y to the residual stream, and return its rows, normalised if there is a norm."""
        if norm is None:
            return self.x.add_(y, alpha=self._config.residual_scale)
        return self._ops.add_norm(self.x, y, norm)

    def _add_per_layer(self, own: PerLayerInput) -> None:
        """Add a block's part of the per-layer embedding to the residual stream."""
        assert self._per_layer is not None
        gate = adapted_product(own.gate, self.x, self._adapters)
        gated = self._ops.activate(torch.cat([gate, self._per_layer[:, own.block]], dim=1))
        self.x.add_(self._normed(adapted_product(own.out, gated, self._adapters), own.post_norm))

    def _feed_forward(self, block: Block, h: torch.Tensor) -> torch.Tensor:
        """The output of a block's MLP or mixture, h [n, hidden_size] -> [n, hidden_size], over all ranks."""
        mlp, norms = block.mlp, block.mixture_norms
        if norms is None:
            return self._decoder.summed(self._mlp(mlp, h))
        assert isinstance(mlp, Mixture) and mlp.shared is not None
        inputs, router_input = self._ops.norm(self.x, norms.experts), self._ops.norm(self.x, norms.router)
        y = self._normed(self._decoder.summed(mlp(inputs, self._ops.activate, router_input)), norms.experts_post)
        return y.add_(self._normed(self._decoder.summed(self._mlp(mlp.shared.mlp, h)), norms.shared_post))

    def _normed(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """x [n, hidden_size], normalised if there is a norm."""
        return x if norm is None else self._ops.norm(x.contiguous(), norm)

    def _mlp(self, mlp: MLP | Mixture, h: torch.Tensor) -> torch.Tensor:
        """h [n, hidden_size] -> [n, hidden_size]."""
        if isinstance(mlp, Mixture):
            y = mlp(h, self._ops.activate)
            if (shared := mlp.shared) is not None:
                of_shared = self._mlp(shared.mlp, h)
                y += of_shared if shared.gate is None else torch.sigmoid(h @ shared.gate.T) * of_shared
            return y
        up = adapted_product(mlp.up, h, self._adapters)
        return adapted_product(mlp.down, self._ops.activate(up), self._adapters)
