"""Balanced keys: a matrix for each KV head by which Q and K are multiplied before an R-node rounds K to 4 bits.

Scores are products of Q and K, so K may be multiplied by any matrix M if Q is multiplied by the inverse of its
transpose. Integers have the same step in all of a key's directions. The error of a score is then least if keys are
large in the same directions as queries, and to the same extent: M is the square root of the geometric mean of the
inverse of K's second moments and of Q's. The direction in which both are largest becomes a head's first element. The
rotation on the R-node (kernels/attention/rotate.h) spreads this element evenly over the head, where an int4 token's
centre holds it.

The second moments are those of random tokens, so they need no text and no tokenizer. RoPE has hardly turned the slow
pairs of these few positions, so each row counts a second time as if it stood at a random later position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch

from fastdecode.spart.batch import Chunk
from fastdecode.spart.config import Rope
from fastdecode.spart.decoder import SPart, StepState
from fastdecode.spart.prompt import PromptChunk
from fastdecode.spart.rope import RotaryEmbedding, rotate
from fastdecode.spart.served import ServedModel
from fastdecode.spart.weights import Model

#: The random tokens by which the second moments are estimated, in sequences.
_SEQUENCES, _LENGTH = 2, 256
#: The positions of the rows that count a second time are below this, and within the model's context.
_LATEST = 8192
#: Added to the second moments, relative to their mean eigenvalue: what the estimate says of small ones is noise.
_LEAST = 1e-2


@torch.inference_mode()
def balance_for(model: ServedModel, kv_dtype: str) -> None:
    """Give each layer of a model its matrices, which SPart then applies, if the KV-cache stores K in 4 bits; take them
    away if not. Models of the transformers backend have none. With 4 bits this computes 512 tokens."""
    if not isinstance(model, Model):
        return
    for layer in model.weights.layers:
        layer.balance = None
    if kv_dtype != "int4":
        return
    spart = SPart(model, [])
    generator = torch.Generator().manual_seed(0)
    config = model.config
    found = []
    for _ in range(_SEQUENCES):
        tokens = torch.randint(config.vocab_size, (min(_LENGTH, config.max_positions),), generator=generator)
        if config.bos_token_id is not None:
            tokens[0] = config.bos_token_id
        latest = min(_LATEST, config.max_positions)
        later = torch.randint(max(latest - len(tokens), 1), (len(tokens),), generator=generator)
        found.append(_second_moments(spart, tokens, later))
    for layer, *of_sequences in zip(model.weights.layers, *found, strict=True):
        queries, keys = (sum(kind) for kind in zip(*of_sequences, strict=True))
        of_keys = balancing(queries, keys)
        of_queries = torch.linalg.inv(of_keys).mT
        # Rows are multiplied from the left.
        layer.balance = _stored(of_queries.mT, model), _stored(of_keys.mT, model)


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
        found.update(layer.balance[1].float().cpu().numpy().tobytes())
    return found.hexdigest()


def balancing(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The matrix of the keys, fp64 [heads, size, size], from second moments of queries and keys, of the same shape."""
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


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """A power of symmetric, positive definite matrices [heads, size, size]."""
    values, vectors = torch.linalg.eigh(matrix)
    power: torch.Tensor = (vectors * values[:, None] ** exponent) @ vectors.mT
    return power


class _NoLinks:
    """A RowExchange of a step whose rows are one prompt, which no R-node sees."""

    def __init__(self, model: Model, rows: int):
        q_size, kv_size, o_size = model.config.row_sizes
        self.kv = torch.empty(rows, kv_size, device=model.device, dtype=model.dtype)
        self.q, self.o = self.kv.new_empty(0, q_size), self.kv.new_empty(0, o_size)

    def post(self, layer: int, timeout: float) -> None:
        """Does nothing."""

    def wait(self, timeout: float) -> None:
        """Does nothing."""


def _second_moments(spart: SPart, tokens: torch.Tensor, later: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The second moments of Q and K, after RoPE, of each layer: fp64 [KV heads, head_size, head_size]. Each row counts
    at its own position and at one that is `later` [tokens] behind it."""
    model, n = spart.model, len(tokens)
    chunk = Chunk(0, 0, 0, 0, tokens.tolist(), True, None)
    prompt = PromptChunk(model.config, (0, 0, 0), chunk, slice(0, n), None)
    inputs = {"tokens": tokens.to(model.device), "positions": torch.arange(n, device=model.device)}
    state = StepState(spart, inputs, _NoLinks(model, n), [prompt])
    moments = []
    turn = _turns(model.config.rope, model.config.head_size, later)
    for i, layer in enumerate(model.weights.layers):
        state.project(layer)
        queries, keys = (
            _moments(heads, model.config.n_kv_heads) + _moments(turn(heads), model.config.n_kv_heads)
            for heads in (state.places.q_heads, state.places.k_heads)
        )
        moments.append((queries, keys))
        state.attend_prompts(i)
        state.finish(layer)
    return moments


def _turns(rope: Rope | None, head_size: int, by: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that turns heads [rows, heads, head_size] by `by` [rows] positions; without RoPE it does nothing."""
    if rope is None:
        return lambda heads: heads
    angles = RotaryEmbedding(replace(rope, attention_factor=1.0), head_size, torch.device("cpu"), torch.float32).angles(
        by
    )

    def turn(heads: torch.Tensor) -> torch.Tensor:
        heads = heads.float().cpu()
        turned = torch.empty_like(heads)
        rotate(heads, *angles, out=turned)
        return turned

    return turn


def _moments(heads: torch.Tensor, n_kv: int) -> torch.Tensor:
    """Of heads [rows, n, size], n a multiple of n_kv: fp64 [n_kv, size, size], the heads of a group together."""
    rows = heads.unflatten(1, (n_kv, -1)).transpose(0, 1).flatten(1, 2).double().cpu()
    moments: torch.Tensor = rows.mT @ rows / rows.shape[1]
    return moments
