"""The memory of its device that a step of the S-Part takes, beside the weights and the staged prompts."""

from __future__ import annotations

import torch

from fastdecode.spart.exchange.graph_table import GraphTable
from fastdecode.spart.prefill.prompt import BLOCK_ROWS
from fastdecode.spart.sampler.results import rows_of_block
from fastdecode.spart.served import ServedModel

#: fp32 copies of a block's logits that sampling has at most at once: masks, penalties, filters, weights.
_LOGIT_COPIES = 7


def step_bytes(model: ServedModel, rows: int, sampled: int) -> int:
    """An upper bound of the memory that the tensors of one step take at once, in bytes.

    `rows` are the step's rows, `sampled` the tokens that are drawn. Memory that torch's kernels allocate for
    themselves is not counted, nor are the scores of the few models that cap or slope them.
    tests/spart/test_memory.py compares the bound with the live tensors of steps.
    """
    logits = _logit_bytes(model, rows if model.all_logits else sampled)
    layer = max(_layer_bytes(model, rows), model.state_step_bytes(rows, sampled))
    return _kept_bytes(model, rows) + max(layer, logits + sampling_bytes(model, sampled))


def graph_bytes(model: ServedModel, rows: int) -> int:
    """Bytes that the captured decode steps of one mini-batch keep (exchange/bypass.py): the tensors of a step of `rows`
    rows, in memory that the graphs share, and the table, the Q, KV and O rows, the logits and the results that all
    graphs use."""
    vocab = model.config.vocab_size
    own = model.dtype.itemsize * sum(model.config.row_sizes) + torch.float32.itemsize * (vocab + 2)
    return step_bytes(model, rows, rows) + rows * own + GraphTable.most_bytes(rows, vocab)


def _kept_bytes(model: ServedModel, rows: int) -> int:
    """Bytes that a step keeps between layers: the residual stream, Q, KV and O rows (twice with prompts), angles, K and
    V that are staged, and what the model says."""
    shape, (hidden, _) = model.config, model.widths
    q, kv, o = shape.row_sizes
    angles = torch.float32.itemsize * 2 * shape.most_heads.k_size  # twice, for layers with a RoPE of their own
    width = hidden + 2 * (q + o) + kv + shape.staged_width + model.kept_width
    return rows * (model.dtype.itemsize * width + angles + 16)


def _layer_bytes(model: ServedModel, rows: int) -> int:
    """Bytes that a layer takes at its widest: its projections, attention of prompts with the masks that segments need,
    or the MLP."""
    shape, (hidden, widest) = model.config, model.widths
    q, kv, o = shape.row_sizes
    itemsize, single = model.dtype.itemsize, torch.float32.itemsize
    norm = rows * hidden * (2 * single + itemsize)  # statistics and products in fp32
    attention = rows * itemsize * (2 * (q + o) + kv) + 3 * rows * shape.n_q_heads * single
    limits = {limit for limit in shape.options.segments if limit}
    attention += sum(min(rows, BLOCK_ROWS) * (min(rows, BLOCK_ROWS) + limit) * (itemsize + single) for limit in limits)
    mlp = rows * itemsize * (2 * widest + 2 * hidden)
    # The inputs of a linear and their changes, in the activation dtype and in that of the adapters.
    changes = rows * (itemsize + single) * 2 * widest if model.adapters else 0
    return norm + max(rows * itemsize * (q + kv), attention, mlp) + changes


def _logit_bytes(model: ServedModel, rows: int) -> int:
    """Bytes of the logits of some rows, in the activation dtype and in fp32, and of the final norm before them."""
    vocab, (hidden, _) = model.config.vocab_size, model.widths
    single = torch.float32.itemsize
    return rows * (3 * hidden * single + vocab * (model.dtype.itemsize + single))


def sampling_bytes(model: ServedModel, sampled: int) -> int:
    """An upper bound of the memory that drawing `sampled` tokens takes beside their logits, in bytes."""
    vocab = model.config.vocab_size
    return _LOGIT_COPIES * min(sampled, rows_of_block(vocab)) * vocab * torch.float32.itemsize
