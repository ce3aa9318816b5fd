"""Attention of prompts, which the S-node computes; the R-node only appends their K and V.

A prompt that is prefilled in one chunk needs only its own rows. For a prompt of several chunks, the K and V of the
earlier chunks are staged here until the last chunk has passed all layers. On a CPU a chunk attends by kernels/decoder.
torch attends to the chunk's own rows causally and to all earlier ones, in two parts that are merged, so no mask is made
that grows with the prompt.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.nn.functional as F

from fastdecode.spart.attention import attend
from fastdecode.spart.batch import Chunk
from fastdecode.spart.heads import heads_in
from fastdecode.spart.prompt_attention import PromptAttention, make_prompt_attention
from fastdecode.spart.scoring import Scoring, scoring_of
from fastdecode.spart.shape import AttentionShape

#: Rows of a block, where rows do not see all positions before them.
BLOCK_ROWS = 256
_BLOCK_SCORES = 1 << 24  # the most scores of a block, where scores are made in fp32


class PromptCache:
    """The staged K and V of unfinished prompts, by sequence."""

    def __init__(self, config: AttentionShape, device: torch.device, dtype: torch.dtype):
        self._config = config
        self._attention = make_prompt_attention(device, dtype)
        self._device, self._dtype = device, dtype
        self._prompts: dict[Hashable, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the staged K and V take."""
        # The S-Part's thread may add a prompt while another thread asks; a list is made without giving up the GIL.
        return sum(prompt.nbytes for prompt in list(self._prompts.values()))

    def begin(self, key: Hashable, chunk: Chunk, rows: slice) -> PromptChunk:
        """Make room for the K and V of a chunk, whose rows in the step are `rows`. Nothing is staged for a chunk that
        is the whole prompt.

        Raises ValueError if the chunk does not follow the last one of its prompt.
        """
        return PromptChunk(self._config, key, chunk, rows, self._stage(key, chunk), self._attention)

    def _stage(self, key: Hashable, chunk: Chunk) -> Prompt | None:
        if chunk.pos == 0:
            self.drop(key)
            if chunk.sample is not None:
                return None
        prompt = self._prompts.get(key)
        if prompt is None:
            if chunk.pos:
                raise ValueError(f"a prompt goes on at {chunk.pos}, but its first tokens are not staged: {key}")
            prompt = self._prompts[key] = Prompt(self._config, self._device, self._dtype)
            prompt.reserve(max(chunk.prompt_length, len(chunk.tokens)), exactly=True)
        if prompt.length != chunk.pos:
            raise ValueError(f"a prompt goes on at {chunk.pos}, expected at {prompt.length}: {key}")
        prompt.reserve(chunk.pos + len(chunk.tokens))
        return prompt

    def end(self, work: PromptChunk) -> None:
        """Record that a chunk has passed all layers."""
        if work.chunk.sample is not None:
            self.drop(work.key)
        elif work.prompt is not None:
            work.prompt.length = work.chunk.pos + len(work.chunk.tokens)

    def drop(self, key: Hashable) -> None:
        """Free the staged K and V of a sequence, if there are any."""
        self._prompts.pop(key, None)


class Prompt:
    """Staged K and V of one prompt, of which `length` rows are filled. The rows of a head lie side by side, so that a
    later chunk reads them as one stream."""

    def __init__(self, config: AttentionShape, device: torch.device, dtype: torch.dtype):
        self.length = 0
        self._heads = [config.heads_of(layer) for layer in range(config.n_layers)]
        self._staged = torch.empty(config.n_layers, 0, device=device, dtype=dtype)
        self._capacity, self._width = 0, config.row_sizes[1]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the rows take."""
        return self._staged.nbytes

    def reserve(self, length: int, exactly: bool = False) -> None:
        """Make room for `length` rows; for some more too, where the prompt's length is not known."""
        if length <= self._capacity:
            return
        filled = [self.rows(layer, self.length) for layer in range(len(self._heads))]
        self._capacity = length if exactly else max(length, 2 * self._capacity)
        self._staged = self._staged.new_empty(len(self._heads), self._capacity * self._width)
        for layer, rows in enumerate(filled):
            for new, old in zip(self.rows(layer, self.length), rows, strict=True):
                new.copy_(old)

    def rows(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [KV heads, length, k_size] and V [KV heads, length, v_size] of a layer's first rows."""
        heads, start, parts = self._heads[layer], 0, []
        for size in (heads.k_size, heads.v_size):
            stop = start + heads.n_kv * self._capacity * size
            parts.append(self._staged[layer, start:stop].view(heads.n_kv, self._capacity, size)[:, :length])
            start = stop
        return parts[0], parts[1]


class PromptChunk:
    """A prompt's chunk while it passes through the layers. Its rows in the step are `rows`."""

    def __init__(
        self,
        config: AttentionShape,
        key: Hashable,
        chunk: Chunk,
        rows: slice,
        prompt: Prompt | None,
        attention: PromptAttention | None,
    ):
        self.key, self.chunk, self.rows = key, chunk, rows
        self._heads_of = config.heads_of
        self._scale, self._windows = config.softmax_scale, config.windows
        self._options, self._kv_layers = config.options, config.kv_layers
        self.prompt, self._attention = prompt, attention
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the chunk's rows q and kv, whose O rows are written to `out`; the layer's heads stand at the
        beginning of these rows. A layer that shares the K and V of another gets that layer's rows as `kv`."""
        heads = self._heads_of(layer)
        n, pos, store = len(q), self.chunk.pos, self._kv_layers[layer]
        q, out = heads_in(q, 0, heads.n_q, heads.k_size), heads_in(out, 0, heads.n_q, heads.v_size)
        k = heads_in(kv, 0, heads.n_kv, heads.k_size).transpose(0, 1)
        v = heads_in(kv, heads.n_kv * heads.k_size, heads.n_kv, heads.v_size).transpose(0, 1)
        if self.prompt is not None:
            staged_k, staged_v = self.prompt.rows(store, pos + n)
            if store == layer:
                staged_k[:, pos:], staged_v[:, pos:] = k, v
            k, v = staged_k, staged_v
        window, segment = self._windows[layer], self._options.segments[layer] if self._options.segments else 0
        window, segment = (limit if limit < pos + n else 0 for limit in (window, segment))
        scoring = scoring_of(self._options, layer, len(self._windows), heads, q.device)
        if self._attention is not None and not scoring.softcap and scoring.slopes is None:
            self._attention.attend(q, k, v, out, self._scale, window, segment, scoring.sinks)
        else:
            self._attend_by_torch(window, segment, scoring, q, k, v, out)

    def _attend_by_torch(
        self,
        window: int,
        segment: int,
        scoring: Scoring,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attention of q [n, query heads, d] to k and v [KV heads, rows so far, d], written to `out`."""
        pos, group = self.chunk.pos, q.shape[1] // len(k)
        # [KV heads, query heads of each, rows, size]: K and V are read once for all query heads of a group.
        grouped = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
        if window or segment or scoring.softcap or scoring.slopes is not None:
            attended = self._attend_blocks(window, segment, scoring, grouped, k, v)
        else:
            attended, log_sum = attend(grouped, k[:, :, pos:], v[:, :, pos:], True, self._scale)
            if pos:
                # All rows see these keys, so the query heads of a group count as rows of one head: the kernel then goes
                # through the keys once for each KV head.
                merged = grouped.flatten(1, 2)[:, None]
                earlier, earlier_log_sum = attend(merged, k[:, :1, :pos], v[:, :1, :pos], False, self._scale)
                earlier, earlier_log_sum = earlier.view(attended.shape), earlier_log_sum.view(log_sum.shape)
                share = torch.sigmoid(earlier_log_sum - log_sum).to(q.dtype)[..., None]
                attended = torch.lerp(attended, earlier, share)
                log_sum = torch.logaddexp(log_sum, earlier_log_sum)
            if scoring.sinks is not None:
                attended = attended * torch.sigmoid(log_sum - scoring.sinks).to(q.dtype)[..., None]
        out.unflatten(1, (-1, group)).copy_(attended.permute(2, 0, 1, 3))

    def _attend_blocks(
        self, window: int, segment: int, scoring: Scoring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention of q [KV heads, group, n, d] where each row attends to `window` positions up to its own, and to its
        own segment (0: no such limit).

        Rows are attended in blocks, so a mask is never wider than a block and what its rows may see.
        """
        n, pos = q.shape[2], self.chunk.pos
        step = BLOCK_ROWS
        if not scoring.is_plain:  # scores are made
            step = max(1, min(step, _BLOCK_SCORES // (q.shape[0] * q.shape[1] * (pos + n))))
        parts = []
        for start in range(0, n, step):
            stop, own = min(n, start + step), pos + start
            # The earliest position that a row of the block attends to.
            first = max(own - window + 1 if window else 0, own // segment * segment if segment else 0, 0)
            block, keys = q[:, :, start:stop], slice(first, pos + stop)
            # Without a limit all rows see all positions before the block.
            masked = first if window or segment else own
            mask = self._mask(window, segment, own, stop - start, masked, q)
            if scoring.is_plain:
                attended = F.scaled_dot_product_attention(
                    block, k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=self._scale
                )
            else:
                attended = scoring.attend(block, k[:, 0, keys], v[:, 0, keys], mask, own, first, self._scale)
            parts.append(attended)
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    def _mask(self, window: int, segment: int, own: int, n: int, first: int, like: torch.Tensor) -> torch.Tensor:
        """Additive mask [n, positions from `first`] of rows whose positions begin at `own`, made once a step."""
        key = (window, segment, own, n)
        mask = self._masks.get(key)
        if mask is None:
            rows = torch.arange(own, own + n, device=like.device)[:, None]
            columns = torch.arange(first, own + n, device=like.device)
            hidden = columns > rows
            if window:
                hidden |= columns <= rows - window
            if segment:
                hidden |= columns // segment != rows // segment
            mask = self._masks[key] = like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return mask
