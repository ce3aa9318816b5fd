"""Balanced heads: matrices by which Q, K, V and O are multiplied, so that K and V lose less in 4 bits.

Scores are products of Q and K, so K may be multiplied by any matrix M if Q is multiplied by the inverse of its
transpose. Integers have the same step in all of a key's directions. The error of a score is then least if keys are
large in the same directions as queries, and to the same extent: M is the square root of the geometric mean of the
inverse of K's second moments and of Q's. The direction in which both are largest becomes a head's first element. A
Hadamard transform (kernels/cpu/hadamard.h) spreads this element evenly over the head, where an int4 token's centre
holds it. The matrices include the transform, so the R-node computes none (HadamardHeads).

O is a sum of rows of V, so V may be multiplied by a matrix, too, if O is multiplied by its inverse. The products of the
O projection's columns then take the place of Q's second moments.

The second moments are those of a text, because they differ from those of random tokens. RoPE has hardly turned the slow
pairs of its few positions, so each row of Q and K counts a second time as if it stood at a random later position.

A row counts by what its error does to O (`_weights`). Few tokens get most of the attention, so the errors of the other
tokens hardly matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fastdecode.spart.checkpoints.config import Rope
from fastdecode.spart.decoder.block_ops import RowHeads
from fastdecode.spart.decoder.layer_pass import DecoderLayers
from fastdecode.spart.decoder.rope import RotaryEmbedding, apply_rope
from fastdecode.spart.decoder.weights import Balance, Layer, Model
from fastdecode.spart.int4.probe import prompt_pass, sequences_of
from fastdecode.spart.served import ServedModel
from fastdecode.transports.base import HadamardHeads

#: The most sequences by which the second moments are estimated.
_SEQUENCES = 4
#: The positions of the rows that count a second time are below this, and within the model's context.
_LATEST = 8192
#: FD_HADAMARD_MAX of kernels/cpu/hadamard.h.
_LARGEST_BLOCK = 128
#: The number that is added to the second moments, relative to their mean eigenvalue, because the estimates of small
#: eigenvalues are noise.
_LEAST = 1e-2


def hadamard_by_s_node(kv_dtype: str) -> HadamardHeads:
    """The heads that the matrices of a model transform in place of the R-nodes: Model.hadamard after balance_for."""
    heads = {"int4": HadamardHeads.QK | HadamardHeads.VO, "int8-int4": HadamardHeads.VO}
    return heads.get(kv_dtype, HadamardHeads(0))


@torch.inference_mode()
def balance_for(model: ServedModel, kv_dtype: str, tokens: Sequence[int]) -> None:
    """Give each layer of a model its matrices, which steps then apply, if the KV-cache stores V in 4 bits; take them
    away if not. Models of the transformers backend, and models whose layers keep states or latent rows, have none.
    `tokens` are those of some text; with 4 bits this computes at most 1,024 of them."""
    if not isinstance(model, Model) or model.config.delta is not None or model.config.latent is not None:
        return
    for layer in model.weights.layers:
        layer.balance = None
    if not kv_dtype.endswith("int4"):
        return
    layers = DecoderLayers(model)
    generator = torch.Generator().manual_seed(0)
    config = model.config
    latest = min(_LATEST, config.max_positions)
    found = []
    for sequence in sequences_of(config, tokens)[:_SEQUENCES]:
        later = torch.randint(max(latest - len(sequence), 1), (len(sequence),), generator=generator)
        found.append(_second_moments(layers, sequence, later))
    for i, layer in enumerate(model.weights.layers):
        assert isinstance(layer, Layer)
        if config.kv_layers[i] != i:  # K and V that the layer shares have been multiplied
            layer.balance = model.weights.layers[config.kv_layers[i]].balance
            continue
        queries, keys, values = (sum(kind) for kind in zip(*(moments[i] for moments in found), strict=True))
        turned = hadamard_matrix(layer.heads.k_size)
        of_values = turned @ balancing(_output_moments(layer, model), values)
        of_keys = of_queries = None
        if kv_dtype == "int4":
            of_keys = turned @ balancing(queries, keys)
            of_queries = torch.linalg.inv(of_keys).mT
        # Rows are multiplied from the left.
        layer.balance = Balance(
            q=None if of_queries is None else _stored(of_queries.mT, model),
            k=None if of_keys is None else _stored(of_keys.mT, model),
            v=_stored(of_values.mT, model),
            o=_stored(torch.linalg.inv(of_values).mT, model),
        )


def _output_moments(layer: Layer, model: Model) -> torch.Tensor:
    """The products of the columns of the O projection that multiply a head: fp64 [KV heads, head_size, head_size],
    added over the heads of a group."""
    size = layer.heads.v_size
    width = layer.heads.n_q * size
    of_head = width // layer.heads.n_kv
    bias = layer.o(torch.zeros(1, width, dtype=model.dtype, device=model.device)).double()
    moments = []
    for first in range(0, width, of_head):
        rows = torch.zeros(of_head, width, dtype=model.dtype, device=model.device)
        rows[:, first : first + of_head] = torch.eye(of_head, dtype=model.dtype, device=model.device)
        columns = (layer.o(rows).double() - bias).unflatten(0, (-1, size))
        moments.append((columns @ columns.mT).sum(0).cpu())
    return torch.stack(moments)


def _stored(matrices: torch.Tensor, model: Model) -> torch.Tensor:
    return matrices.to(model.device, model.dtype).contiguous()


def balance_digest(model: ServedModel) -> str:
    """A digest of the model's matrices, "" without any. S-nodes that use each other's pages must have the same."""
    if not isinstance(model, Model):
        return ""
    found = hashlib.blake2b(digest_size=16)
    for layer in model.weights.layers:
        if layer.balance is None:
            return ""
        for matrices in (layer.balance.k, layer.balance.v):
            if matrices is not None:
                found.update(matrices.float().cpu().numpy().tobytes())
    return found.hexdigest()


def balancing(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The matrix of the keys, fp64 [heads, size, size], from second moments of queries and keys, of the same shape; or
    that of the values, from the products of the O projection's columns and the second moments of the values."""
    size = keys.shape[1]
    eye = torch.eye(size, dtype=torch.float64)
    queries, keys = (
        m / m.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None] + _LEAST * eye for m in (queries, keys)
    )
    root, inverse_root = _power(keys, 0.5), _power(keys, -0.5)
    mean = inverse_root @ _power(root @ queries @ root, 0.5) @ inverse_root
    matrix = _power(mean, 0.5)
    # A reflection brings the largest direction of the balanced keys to the first element.
    largest = torch.linalg.eigh(matrix @ keys @ matrix)[1][:, :, -1]
    largest = largest * largest.gather(1, largest.abs().argmax(1, keepdim=True)).sign()
    normal = largest - eye[0]
    normal = normal / normal.norm(dim=1, keepdim=True).clamp_min(1e-12)
    reflected: torch.Tensor = matrix - 2 * normal[:, :, None] * (normal[:, None] @ matrix)
    return reflected


def hadamard_matrix(size: int) -> torch.Tensor:
    """The matrix, fp64 [size, size], of the transform in kernels/cpu/hadamard.h, which is its own inverse. `size` is
    a multiple of 8."""
    blocks, left = [], size
    while left:
        block = torch.ones(1, 1, dtype=torch.float64)
        while len(block) < min(_LARGEST_BLOCK, 1 << left.bit_length() - 1):
            block = torch.kron(block, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)) * 0.5**0.5
        blocks.append(block)
        left -= len(block)
    matrix: torch.Tensor = torch.block_diag(*blocks)
    return matrix


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """A power of symmetric, positive definite matrices [heads, size, size]."""
    values, vectors = torch.linalg.eigh(matrix)
    power: torch.Tensor = (vectors * values[:, None] ** exponent) @ vectors.mT
    return power


def _second_moments(
    layers: DecoderLayers, tokens: torch.Tensor, later: torch.Tensor
) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The second moments of Q and K, after RoPE, and of V, of each layer that projects K and V: fp64 [KV heads,
    head_size, head_size]. Each row of Q and K counts at its own position and at one that is `later` [tokens] behind
    it."""
    model, config = layers.model, layers.model.config
    layer_pass = prompt_pass(layers, [tokens])
    moments = {}
    ropes = (config.rope, config.rope_head_size(False)), (config.second_rope, config.rope_head_size(True))
    turns = [_turns(rope, size, later) for rope, size in ropes]
    for i, layer in enumerate(model.weights.layers):
        layer_pass.project(layer)
        turn, n_kv, rows = turns[layer.second_rope], layer.heads.n_kv, layer_pass.heads
        if config.kv_layers[i] == i:
            of_queries, of_keys, of_values = _weights(rows, config.softmax_scale)
            queries, keys = (
                _moments(heads, n_kv, weights) + _moments(turn(heads), n_kv, weights)
                for heads, weights in ((rows.q_heads, of_queries), (rows.k_heads, of_keys))
            )
            moments[i] = queries, keys, _moments(rows.v_heads, n_kv, of_values)
        layer_pass.attend_prompts(i)
        layer_pass.finish(layer)
    return moments


def _turns(rope: Rope | None, head_size: int, by: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that turns heads [rows, heads, head_size] by `by` [rows] positions; without RoPE it does nothing."""
    if rope is None:
        return lambda heads: heads
    plain = replace(rope, attention_factor=1.0)
    angles = RotaryEmbedding(plain, head_size, torch.device("cpu"), torch.float32).angles(by)

    def turn(heads: torch.Tensor) -> torch.Tensor:
        heads = heads.float().cpu()
        turned = torch.empty_like(heads)
        apply_rope(heads, angles.cos, angles.sin, out=turned)
        return turned

    return turn


def _weights(heads: RowHeads, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How much the rows of the queries [KV heads, tokens * group], keys and values [KV heads, tokens] of one sequence
    count: fp64.

    O of a query is the sum of values times shares of attention, and the errors of two tokens are independent. So the
    error of a value counts by the sum of the squares of its shares. The error of a score moves O by the token's share
    times the distance between the token's value and O. Keys and queries count by the square root of the sum of the
    squares of these products, because without the root a handful of tokens would decide. Sinks, windows, caps and
    biases of the scores are left out.
    """
    n_kv = heads.k_heads.shape[1]
    queries = heads.q_heads.unflatten(1, (n_kv, -1)).permute(1, 2, 0, 3).float()
    keys, values = (rows.transpose(0, 1)[:, None].float() for rows in (heads.k_heads, heads.v_heads))
    scores = queries @ keys.mT * scale
    shares = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    moved = (shares * torch.cdist(shares @ values, values)).square()  # [KV heads, group, queries, keys]
    of_queries = moved.sum(3).transpose(1, 2).flatten(1).sqrt()
    of_keys, of_values = moved.sum((1, 2)).sqrt(), shares.square().sum((1, 2))
    return of_queries.double().cpu(), of_keys.double().cpu(), of_values.double().cpu()


def _moments(heads: torch.Tensor, n_kv: int, weights: torch.Tensor) -> torch.Tensor:
    """The second moments of heads [rows, n, size], n a multiple of n_kv: fp64 [n_kv, size, size], the heads of a group
    together. Each row counts as often as `weights` [n_kv, rows of all heads of a group] says."""
    rows = heads.unflatten(1, (n_kv, -1)).transpose(0, 1).flatten(1, 2).double().cpu()
    moments: torch.Tensor = (rows * weights[:, :, None]).mT @ rows / rows.shape[1]
    return moments
