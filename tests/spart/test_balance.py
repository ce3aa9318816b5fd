"""Matrices by which Q, K, V and O are multiplied: results stay as they are, and a cache of integers loses less."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention.kv_accuracy import hadamard
from nodes.rnode_process import RNodeProcess

from fastdecode.bench.perplexity import cut, nats_by_position
from fastdecode.demo import heldout_text, model_dir
from fastdecode.spart import load_model, read_config
from fastdecode.spart.int4.balance import (
    _weights,
    balance_digest,
    balance_for,
    balancing,
    hadamard_by_s_node,
    hadamard_matrix,
)
from fastdecode.spart.int4.probe import sequences_of
from fastdecode.text.calibration import calibration_tokens
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.transports.base import HadamardHeads
from fastdecode.transports.registry import connect

SEQUENCES, LENGTH = 16, 140


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = RNodeProcess(f"shm://{tmp_path_factory.mktemp('r')}/r.sock", 1 << 28)
    yield node
    node.end()


async def nats(model, node, kv_dtype: str, said: HadamardHeads | None = None) -> float:
    """Nats a token; `said`: what the S-node says of Hadamard transforms, by default what its model does."""
    ids = cut(Tokenizer.from_dir(model_dir()), heldout_text(), SEQUENCES, LENGTH)
    hello = model.hello(1, SEQUENCES, kv_dtype, None, SEQUENCES)
    if said is not None:
        hello = replace(hello, layers=replace(hello.layers, hadamard=said))
    link = await connect(node.url, hello, None)
    try:
        return float(nats_by_position(model, link, ids).mean())
    finally:
        await link.close()


def test_balanced_queries_and_keys_have_equal_second_moments() -> None:
    rows = torch.randn(2, 3, 400, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows[0, :, :, 3] *= 6
    rows[1, :, :, 5] *= 5
    queries, keys = rows.mT @ rows / 400
    matrix = balancing(queries, keys)
    inverse = torch.linalg.inv(matrix)
    of_keys, of_queries = matrix @ keys @ matrix.mT, inverse.mT @ queries @ inverse
    for head in range(3):
        ours = [x / x.trace() for x in (of_keys[head], of_queries[head])]
        assert torch.linalg.norm(ours[0] - ours[1]) < 0.05
        assert ours[0][0, 0] > 0.99 * torch.linalg.eigvalsh(ours[0])[-1]  # the largest direction comes first
        before = keys[head].trace() * queries[head].trace()
        assert of_keys[head].trace() * of_queries[head].trace() < before / 2


@pytest.mark.parametrize("size", [8, 24, 64, 80, 128, 192, 256])
def test_the_transform_is_that_of_the_kernels(size) -> None:
    rows = np.random.default_rng(size).standard_normal((3, size))
    np.testing.assert_allclose(rows @ hadamard_matrix(size).numpy(), hadamard(rows), atol=1e-12)


def test_a_row_counts_by_what_its_error_does_to_o() -> None:
    tokens, n_kv, group, size, scale = 12, 2, 3, 8, 0.4
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(tokens, heads, size, generator=generator, dtype=torch.float64)
        for heads in (n_kv * group, n_kv, n_kv)
    )
    heads = SimpleNamespace(q_heads=q, k_heads=k, v_heads=v)
    of_queries, of_keys, of_values = _weights(heads, scale)

    def outputs(values: torch.Tensor, head: int, scores: torch.Tensor) -> torch.Tensor:  # [group, tokens, size]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ values[:, head]

    for head in range(n_kv):
        scores = q[:, head * group :][:, :group].transpose(0, 1) @ k[:, head].mT * scale
        before = outputs(v, head, scores)
        moved = torch.zeros(group, tokens, tokens, dtype=torch.float64)
        for token in range(tokens):
            other, error = v.clone(), torch.randn(size, generator=generator, dtype=torch.float64)
            other[token, head] += error
            change = (outputs(other, head, scores) - before).square().sum() / error.square().sum()
            assert of_values[head, token].item() == pytest.approx(change.item(), rel=1e-4)
            nudged = scores.clone()
            nudged[:, :, token] += 1e-5
            moved[:, :, token] = ((outputs(v, head, nudged) - before) / 1e-5).square().sum(-1)
        torch.testing.assert_close(of_keys[head], moved.sum((0, 1)).sqrt(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(of_queries[head], moved.sum(2).T.flatten().sqrt(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["int4", "int8-int4"])
async def test_results_stay_and_a_cache_of_4_bits_loses_less(node, kv_dtype) -> None:
    tokens = calibration_tokens(Tokenizer.from_dir(model_dir()))
    model = load_model(model_dir(), device="cpu", dtype=torch.float32)
    exact, plain = await nats(model, node, "fp32"), await nats(model, node, kv_dtype)
    balance_for(model, kv_dtype, tokens)
    digest = balance_digest(model)
    assert model.hadamard == hadamard_by_s_node(kv_dtype) != HadamardHeads(0)
    assert await nats(model, node, "fp32") == pytest.approx(exact, rel=1e-5)
    balanced = await nats(model, node, kv_dtype)
    assert abs(math.expm1(balanced - exact)) < 0.004
    assert await nats(model, node, kv_dtype, HadamardHeads(0)) != balanced  # the R-node transforms too
    assert digest and all(layer.balance is not None for layer in model.weights.layers)
    assert all((layer.balance.k is not None) == (kv_dtype == "int4") for layer in model.weights.layers)
    assert plain != exact
    balance_for(model, kv_dtype, tokens)
    assert balance_digest(model) == digest
    balance_for(model, "bf16", tokens)
    assert not balance_digest(model) and all(layer.balance is None for layer in model.weights.layers)


@pytest.mark.parametrize("begin", [-1, 1 << 20, "<s>", [1]])
def test_a_begin_token_that_the_model_does_not_know_is_left_out(begin):
    config = replace(read_config(model_dir()), bos_token_id=begin)
    [sequence] = sequences_of(config, [5, 6, 7])
    assert sequence.tolist() == [5, 6, 7]
