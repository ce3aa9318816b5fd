"""PackedAttention: attention of a prompt's rows by kernels/decoder, on a CPU.

K and V are packed as they are staged, so that a chunk of a few rows reads what came before it at memory speed.
"""

from __future__ import annotations

import torch

from fastdecode.kernels import _native
from fastdecode.spart.served import ACT_NAMES, act_code
from fastdecode.spart.shape import AttentionShape, Heads
from fastdecode.spart.threads import pool_threads

#: Tokens of a block.
BLOCK_TOKENS = 64
#: A step's prompts, for Joints.spart_layers of kernels/_native.pyi: the attention, the scale of scores, the chunks.
NativePrompts = tuple[_native.PromptAttention, float, list["NativeChunk"]]
#: A chunk's first row in the step, its rows, its position, and for each layer the address of the blocks' words, the
#: words of a head, the window and the segment.
NativeChunk = tuple[int, int, int, list[tuple[int, int, int, int]]]


class Blocks:
    """K and V of a prompt's tokens in one layer, packed as the kernels read them.

    `words` is int32 [KV heads, words of a head], with room for whole blocks.
    """

    def __init__(self, words: torch.Tensor, k_size: int, v_size: int):
        assert words.dtype is torch.int32 and words.is_contiguous()
        self._words = words  # keeps the memory
        self.native = words.data_ptr(), words.shape[1], len(words), k_size, v_size


class PackedAttention:
    """Attention of rows of one dtype to the K and V of their prompt, on a CPU.

    A row's result depends neither on the other rows nor on how the prompt is cut into chunks.
    """

    def __init__(self, dtype: torch.dtype):
        """Raises ValueError for a dtype for which this CPU has no such functions; see make_prompt_attention."""
        self.dtype = dtype
        self.native = _native.PromptAttention(act_code(dtype))

    def words(self, heads: Heads, n_tokens: int) -> int:
        """32-bit words that `n_tokens` tokens of one KV head take."""
        return -(-n_tokens // BLOCK_TOKENS) * self.native.block_words(heads.k_size, heads.v_size)

    def pack(self, blocks: Blocks, k: torch.Tensor, v: torch.Tensor, pos: int) -> None:
        """Pack k [KV heads, n, k_size] and v [KV heads, n, v_size] of tokens at positions from `pos` on. All tokens
        before them are packed."""
        _, _, n_kv, k_size, v_size = blocks.native
        n = k.shape[1]
        assert k.dtype is v.dtype is self.dtype and k.stride(2) == v.stride(2) == 1
        assert k.shape == (n_kv, n, k_size) and v.shape == (n_kv, n, v_size)
        assert -(-(pos + n) // BLOCK_TOKENS) * self.native.block_words(k_size, v_size) <= blocks.native[1]
        strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
        self.native.pack(blocks.native, k.data_ptr(), v.data_ptr(), pos, n, *strides, pool_threads())

    def attend(
        self,
        blocks: Blocks,
        q: torch.Tensor,
        out: torch.Tensor,
        pos: int,
        scale: float,
        window: int = 0,
        segment: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the attention of q [n, query heads, k_size] to `out` [n, query heads, v_size]; the rows are those of
        tokens at positions from `pos` on, all of which are packed.

        A row attends to the positions up to its own, to at most `window` of them and to those of its own segment (0: no
        such limit). `sinks`, an fp32 number for each query head, adds a score that weighs no V.
        """
        _, head_words, n_kv, k_size, v_size = blocks.native
        n, n_q = q.shape[:2]
        assert q.dtype is out.dtype is self.dtype and n_q % n_kv == 0
        assert q.shape[2] == k_size and out.shape == (n, n_q, v_size)
        assert -(-(pos + n) // BLOCK_TOKENS) * self.native.block_words(k_size, v_size) <= head_words
        for rows in (q, out):  # a row's heads stand side by side
            assert rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
        assert sinks is None or (sinks.dtype is torch.float32 and sinks.is_contiguous() and sinks.numel() == n_q)
        self.native.attend(
            blocks.native,
            q.data_ptr(),
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            q.stride(0),
            out.stride(0),
            n,
            pos,
            n_q // n_kv,
            window,
            segment,
            scale,
            pool_threads(),
        )


def make_prompt_attention(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> PackedAttention | None:
    """The native attention for a model's rows in `dtype` on `device`. None where torch computes it: on other devices
    than a CPU, for models that cap or slope their scores or select tokens, and for dtypes that the CPU has no functions
    for."""
    options = shape.options
    native = device.type == "cpu" and not (options.softcaps or options.slopes or options.selections)
    native = native and dtype in ACT_NAMES
    return PackedAttention(dtype) if native and _native.PromptAttention.supports(act_code(dtype)) else None
