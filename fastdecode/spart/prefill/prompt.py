"""Attention of prompts, which the S-node computes; the R-node only appends their K and V.

A prompt that is prefilled in one chunk needs only its own rows. The K and V of a prompt of several chunks are staged
here until the last chunk has passed all layers, and so are those of any prompt in a model whose layers share K and V.
On a CPU a chunk attends by kernels/decoder, to K and V that are packed in blocks; on a GPU by torch's fused kernels,
without a mask. What neither can do is attended in blocks of rows, so that no mask is wider than what a block may see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F

from fastdecode.spart.prefill.attention import attend, is_fused
from fastdecode.spart.prefill.heads import heads_in, index_in, kv_heads_in
from fastdecode.spart.prefill.prompt_attention import (
    BLOCK_TOKENS,
    Blocks,
    NativeChunk,
    NativePrompts,
    PackedAttention,
    make_prompt_attention,
)
from fastdecode.spart.prefill.scoring import Scoring, mask_of_rows, scoring_of
from fastdecode.spart.prefill.selection import attend_selected, select_tokens
from fastdecode.spart.shape import AttentionShape, Heads
from fastdecode.spart.step.batch import Chunk

#: Rows of a block, where rows do not see all positions before them.
BLOCK_ROWS = 256
_BLOCK_SCORES = 1 << 24  # the most scores of a block, where scores are made in fp32


def staged_token_bytes(config: AttentionShape, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that the K and V of one token of a staged prompt take; native attention stages tokens in whole blocks."""
    attention = make_prompt_attention(config, device, dtype)
    all_heads = [config.heads_of(layer) for layer in config.storing_layers]
    if attention is None:
        index = sum(map(config.index_size_of, config.storing_layers))
        elements = sum(heads.kv_row_size for heads in all_heads) + index
        return elements * dtype.itemsize
    return sum(heads.n_kv * attention.words(heads, BLOCK_TOKENS) * 4 // BLOCK_TOKENS for heads in all_heads)


class PromptCache:
    """The staged K and V of unfinished prompts, by sequence."""

    def __init__(self, config: AttentionShape, device: torch.device, dtype: torch.dtype):
        self._config = config
        self._attention = make_prompt_attention(config, device, dtype)
        self._device, self._dtype = device, dtype
        self._prompts: dict[Hashable, Prompt] = {}

    def begin(self, key: Hashable, chunk: Chunk, rows: slice) -> PromptChunk:
        """Make room for the K and V of a chunk, whose rows in the step are `rows`. A chunk that is the whole prompt is
        staged only if layers share K and V.

        Raises ValueError if the chunk does not follow the last one of its prompt.
        """
        return PromptChunk(self._config, key, chunk, rows, self._stage(key, chunk), self._attention)

    def _stage(self, key: Hashable, chunk: Chunk) -> Prompt | None:
        if chunk.pos == 0:
            self.drop(key)
            if chunk.sample is not None and not self._config.shares_kv:
                return None
        prompt = self._prompts.get(key)
        if prompt is None:
            if chunk.pos:
                raise ValueError(f"a prompt goes on at {chunk.pos}, but its first tokens are not staged: {key}")
            prompt = self._prompts[key] = self._new()
            prompt.reserve(max(chunk.prompt_length, len(chunk.tokens)), exactly=True)
        if prompt.length != chunk.pos:
            raise ValueError(f"a prompt goes on at {chunk.pos}, expected at {prompt.length}: {key}")
        prompt.reserve(chunk.pos + len(chunk.tokens))
        return prompt

    def _new(self) -> Prompt:
        if self._attention is None:
            return PlainPrompt(self._config, self._device, self._dtype)
        return PackedPrompt(self._config, self._device, self._attention)

    def end(self, work: PromptChunk) -> None:
        """Record that a chunk has passed all layers."""
        if work.chunk.sample is not None:
            self.drop(work.key)
        elif work.prompt is not None:
            work.prompt.length = work.chunk.pos + len(work.chunk.tokens)

    def drop(self, key: Hashable) -> None:
        """Free the staged K and V of a sequence, if there are any."""
        self._prompts.pop(key, None)


class Prompt(ABC):
    """Staged K and V of one prompt, of which `length` rows are filled."""

    def __init__(self, config: AttentionShape, device: torch.device):
        self.length = 0
        self._heads = [config.heads_of(layer) for layer in range(config.n_layers)]
        self._index_sizes = [config.index_size_of(layer) for layer in range(config.n_layers)]
        self._device = device
        self._capacity = 0
        self._storing = config.storing_layers
        self._layers: dict[int, torch.Tensor] = {}  # [KV heads, elements of a head's capacity] of each storing layer

    def reserve(self, length: int, exactly: bool = False) -> None:
        """Make room for `length` rows; for some more too, where the prompt's length is not known."""
        if length <= self._capacity:
            return
        self._capacity = length if exactly else max(length, 2 * self._capacity)
        old, self._layers = self._layers, {layer: self._empty(layer) for layer in self._storing}
        for layer, before in old.items():
            self._move(before, self._layers[layer])

    @abstractmethod
    def stage(self, layer: int, k: torch.Tensor, v: torch.Tensor, pos: int) -> None:
        """Fill rows of a layer, from `pos` on, with k [KV heads, n, k_size] and v [KV heads, n, v_size]."""

    @abstractmethod
    def _empty(self, layer: int) -> torch.Tensor:
        """Memory for the capacity of a layer."""

    @abstractmethod
    def _move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Copy what a layer has in less memory."""


class PlainPrompt(Prompt):
    """Rows as they are, those of a head side by side. An index key follows the K of its token."""

    def __init__(self, config: AttentionShape, device: torch.device, dtype: torch.dtype):
        super().__init__(config, device)
        self._dtype = dtype

    def _empty(self, layer: int) -> torch.Tensor:
        heads = self._heads[layer]
        size = heads.kv_row_size // heads.n_kv + self._index_sizes[layer]
        return torch.empty(heads.n_kv, self._capacity, size, device=self._device, dtype=self._dtype)

    def _move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        new[:, : self.length] = old[:, : self.length]

    def stage(self, layer: int, k: torch.Tensor, v: torch.Tensor, pos: int) -> None:
        for staged, rows in zip(self.rows(layer, pos + k.shape[1]), (k, v), strict=True):
            staged[:, pos:] = rows

    def rows(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [KV heads, length, k_size] and V [KV heads, length, v_size] of a layer's first rows."""
        heads = self._heads[layer]
        staged = self._layers[layer][:, :length]
        v_at = 0 if heads.v_in_k else heads.k_size
        return staged[:, :, : heads.k_size], staged[:, :, v_at : v_at + heads.v_size]

    def stage_index(self, layer: int, keys: torch.Tensor, pos: int) -> torch.Tensor:
        """Fill index keys of a layer, from `pos` on, with keys [n, index size]; returns all keys up to these."""
        staged = self._layers[layer][0, : pos + len(keys), self._heads[layer].kv_row_size :]
        staged[pos:] = keys
        return staged


class PackedPrompt(Prompt):
    """Rows in the blocks of the native attention."""

    def __init__(self, config: AttentionShape, device: torch.device, attention: PackedAttention):
        super().__init__(config, device)
        self._attention = attention

    def _empty(self, layer: int) -> torch.Tensor:
        heads = self._heads[layer]
        return torch.empty(heads.n_kv, self._attention.words(heads, self._capacity), dtype=torch.int32)

    def _move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        new[:, : old.shape[1]] = old

    def stage(self, layer: int, k: torch.Tensor, v: torch.Tensor, pos: int) -> None:
        self._attention.pack(self.blocks(layer), k, v, pos)

    def blocks(self, layer: int) -> Blocks:
        """The blocks of a layer."""
        return Blocks(self._layers[layer], self._heads[layer].k_size, self._heads[layer].v_size)


class PromptChunk:
    """A prompt's chunk while it passes through the layers. Its rows in the step are `rows`."""

    def __init__(
        self,
        config: AttentionShape,
        key: Hashable,
        chunk: Chunk,
        rows: slice,
        prompt: Prompt | None,
        attention: PackedAttention | None,
    ):
        self.key, self.chunk, self.rows = key, chunk, rows
        self._pos = chunk.pos  # of the first row
        self.prompt, self._attention = prompt, attention
        self._config, self._kv_layers, self._scale = config, config.kv_layers, config.softmax_scale
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}
        self._unstaged: dict[Heads, Blocks] = {}
        self._selected: torch.Tensor | None = None  # the tokens that the rows have selected last

    def keep_last_row(self, row: int) -> int:
        """Go on with the chunk's last row alone, as row `row` of the step, or with none if no token is drawn after it.
        Returns the next row of the step."""
        stop = row + (self.chunk.sample is not None)
        self.rows, self._pos = slice(row, stop), self.chunk.pos + len(self.chunk.tokens) - 1
        return stop

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the chunk's rows q and kv, whose O rows are written to `out`; the layer's heads stand at the
        beginning of these rows. A layer that shares the K and V of another finds them staged; a later pass of an MTP
        head may find them in `kv` still."""
        if not len(q):
            return
        heads = self._config.heads_of(layer)
        n, pos, store = len(q), self._pos, self._kv_layers[layer]
        selected = self._select(layer, heads, q, kv)
        q, out = heads_in(q, 0, heads.n_q, heads.k_size), heads_in(out, 0, heads.n_q, heads.v_size)
        k, v = (x.transpose(0, 1) for x in kv_heads_in(kv, heads))
        window, segment = self._limits(layer)
        scoring = scoring_of(self._config.options, layer, self._config.n_layers, heads, q.device)
        if self.prompt is not None and store == layer:
            self.prompt.stage(layer, k, v, pos)
        if self._attention is not None:
            blocks = self._blocks(store, heads)
            if self.prompt is None:
                self._attention.pack(blocks, k, v, 0)
            self._attention.attend(blocks, q, out, pos, self._scale, window, segment, scoring.sinks)
            return
        if isinstance(self.prompt, PlainPrompt):
            k, v = self.prompt.rows(store, pos + n)
        self._attend_by_torch(window, segment, scoring, q, k, v, out, selected)

    def _select(self, layer: int, heads: Heads, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor | None:
        """The tokens that the rows q and kv attend to in a layer, [n, index_topk]; None: all that they see."""
        config, pos, topk = self._config, self.chunk.pos, self._config.index_topk
        if config.index_size_of(layer):
            index_q, weights, rows = index_in(q, kv, heads, config)
            keys = rows[:, 0]
            if isinstance(self.prompt, PlainPrompt):
                keys = self.prompt.stage_index(layer, keys, pos)
            self._selected = select_tokens(index_q, weights, keys, pos, topk) if len(keys) > topk else None
        return self._selected if config.selection_of(layer) else None

    def _blocks(self, layer: int, heads: Heads) -> Blocks:
        """The blocks of a layer. A prompt that is not staged has the same ones in all layers with such heads."""
        if isinstance(self.prompt, PackedPrompt):
            return self.prompt.blocks(layer)
        assert self._attention is not None
        blocks = self._unstaged.get(heads)
        if blocks is None:
            words = torch.empty(heads.n_kv, self._attention.words(heads, len(self.chunk.tokens)), dtype=torch.int32)
            blocks = self._unstaged[heads] = Blocks(words, heads.k_size, heads.v_size)
        return blocks

    @staticmethod
    def native(chunks: Sequence[PromptChunk]) -> NativePrompts | None:
        """The chunks of a step for C, which packs their K and V and attends, layer by layer. None if it cannot: where
        torch attends, and where layers share K and V or have sinks."""
        first = chunks[0]
        own_kv = first._kv_layers == tuple(range(first._config.n_layers))
        if first._attention is None or first._config.options.sinks or not own_kv:
            return None
        return first._attention.native, first._scale, [chunk._native() for chunk in chunks]

    def _native(self) -> NativeChunk:
        """The chunk for C."""
        layers = []
        for layer in range(self._config.n_layers):
            words, head_words, *_ = self._blocks(layer, self._config.heads_of(layer)).native
            layers.append((words, head_words, *self._limits(layer)))
        return self.rows.start, len(self.chunk.tokens), self.chunk.pos, layers

    def _limits(self, layer: int) -> tuple[int, int]:
        """The window and the segment of a layer, 0 where the chunk's rows do not reach beyond it."""
        segment = self._config.options.segments[layer] if self._config.options.segments else 0
        stop = self.chunk.pos + len(self.chunk.tokens)
        window, segment = (limit if limit < stop else 0 for limit in (self._config.windows[layer], segment))
        return window, segment

    def _attend_by_torch(
        self,
        window: int,
        segment: int,
        scoring: Scoring,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        selected: torch.Tensor | None,
    ) -> None:
        """Attention of q [n, query heads, d] to k and v [KV heads, rows so far, d], written to `out`. `selected`: see
        `_select`."""
        group = q.shape[1] // len(k)
        # [KV heads, rows, query heads of each, size]. K and V are not repeated for the query heads of a group.
        grouped = q.unflatten(1, (-1, group)).transpose(0, 1)
        k, v = (x[:, :, None].expand(-1, -1, group, -1) for x in (k, v))
        if selected is not None:
            rows, keys, values = (x.transpose(1, 2) for x in (grouped, k, v))
            attended = attend_selected(rows, keys, values, selected, self.chunk.pos, self._scale).transpose(1, 2)
        elif is_fused(q.device) and not (segment or scoring.softcap or scoring.slopes is not None):
            attended, log_sum = attend(grouped, k, v, self._scale, window)
            if scoring.sinks is not None:
                attended = attended * torch.sigmoid(log_sum - scoring.sinks).to(q.dtype).transpose(1, 2)[..., None]
        else:
            by_heads = (x.transpose(1, 2) for x in (grouped, k, v))
            attended = self._attend_blocks(window, segment, scoring, *by_heads).transpose(1, 2)
        out.unflatten(1, (-1, group)).copy_(attended.transpose(0, 1))

    def _attend_blocks(
        self, window: int, segment: int, scoring: Scoring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention of q [KV heads, group, n, d] where each row attends to `window` positions up to its own, and to its
        own segment (0: no such limit).

        Rows are attended in blocks, so a mask is never wider than a block and what its rows may see.
        """
        n, pos = q.shape[2], self._pos
        step = BLOCK_ROWS
        if not scoring.is_plain:  # scores are made
            step = max(1, min(step, _BLOCK_SCORES // (q.shape[0] * q.shape[1] * (pos + n))))
        outputs = []
        for start in range(0, n, step):
            stop, q_pos = min(n, start + step), pos + start
            # The earliest position that a row of the block attends to.
            first = max(q_pos - window + 1 if window else 0, q_pos // segment * segment if segment else 0, 0)
            block, keys = q[:, :, start:stop], slice(first, pos + stop)
            # Without a limit all rows see all positions before the block, and scores need no mask there.
            masked = q_pos if not (window or segment or scoring.is_plain) else first
            mask = self._mask(window, segment, q_pos, stop - start, masked, q)
            if scoring.is_plain:
                attended = F.scaled_dot_product_attention(
                    block, k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=self._scale
                )
            else:
                attended = scoring.attend(block, k[:, 0, keys], v[:, 0, keys], mask, q_pos, first, self._scale)
            outputs.append(attended)
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]

    def _mask(self, window: int, segment: int, q_pos: int, n: int, first: int, like: torch.Tensor) -> torch.Tensor:
        """See mask_of_rows; made once a step."""
        key = (window, segment, q_pos, n)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = mask_of_rows(window, segment, q_pos, n, first, like)
        return mask
