"""The model that each rank of a tensor-parallel S-Part has (Shoeybi et al., arXiv 1909.08053). Imports no torch.

The outputs of Q, K and V are cut by heads, those of `up` by columns, and the inputs of O and of `down` like the outputs
before them. After O and after `down` each rank has a summand of the rows, and the ranks sum them. Experts are cut like
an MLP, and a gated delta rule by its K heads, with the V heads and the states that these serve. Norms and routers are
whole on every rank, and the vocabulary is cut as vocabulary.py says. Of fewer KV heads than ranks, each is on several
ranks, which share its query heads.
"""

from __future__ import annotations

from dataclasses import replace

from fastdecode.spart.checkpoints.config import CheckpointError, DeltaRule, ModelConfig
from fastdecode.spart.shape import Heads

#: Columns are cut between blocks of as many, because those of a quantised matrix share a scale.
_BLOCK = 32


def part_of(size: int, rank: int, n: int) -> slice:
    """The part of `size` rows or columns that rank `rank` of `n` has: whole blocks, where there are enough."""
    block = _BLOCK if size % _BLOCK == 0 and size // _BLOCK >= n else 1
    return slice(size // block * rank // n * block, size // block * (rank + 1) // n * block)


def heads_of_rank(heads: Heads, rank: int, n: int) -> tuple[slice, slice]:
    """The query heads and the KV heads of a layer with such heads that rank `rank` of `n` has."""
    n_q, n_kv = heads.n_q, heads.n_kv
    kv = slice(n_kv * rank // n, max(n_kv * (rank + 1) // n, n_kv * rank // n + 1))
    if n > n_kv:
        return slice(n_q // n * rank, n_q // n * (rank + 1)), kv
    group = n_q // n_kv
    return slice(kv.start * group, kv.stop * group), kv


def delta_heads_of_rank(rule: DeltaRule, rank: int, n: int) -> slice:
    """The K heads of a gated delta rule that rank `rank` of `n` has, each with the V heads that it serves."""
    return slice(rule.k_heads * rank // n, rule.k_heads * (rank + 1) // n)


def _can_share_heads(config: ModelConfig, n: int) -> bool:
    if config.delta is not None and n > config.delta.k_heads:
        return False
    layers = {config.heads_of(layer) for layer in range(config.n_layers)}
    return all(n <= heads.n_kv or (n % heads.n_kv == 0 and heads.n_q % n == 0) for heads in layers)


def why_not_shared(config: ModelConfig, n: int) -> str | None:
    """The reason why `n` ranks cannot share a model, or None if they can."""
    experts = config.experts
    if not _can_share_heads(config, n):
        possible = [str(m) for m in range(2, config.n_q_heads + 1) if _can_share_heads(config, m)]
        linear = "" if config.delta is None else f", and the {config.delta.k_heads} K heads of the layers with states,"
        return (
            f"{n} ranks cannot share the {config.n_q_heads} query heads and {config.n_kv_heads} KV heads{linear} of "
            f"{config.architecture}; possible numbers of ranks are {', '.join(possible) or 'none'}"
        )
    sizes = [config.intermediate_size, *config.mlp_sizes]
    if experts is not None:
        sizes = [experts.intermediate_size, *([experts.shared_size] if experts.shared_size else [])]
        sizes += [config.intermediate_size] if experts.dense_layers else []
    for size in sizes:
        if part_of(size, 0, n).stop == 0:
            return f"{n} ranks cannot share the {size} columns of an MLP of {config.architecture}"
    return None


def cut_config(config: ModelConfig, rank: int, n: int) -> ModelConfig:
    """The model that rank `rank` of `n` has. Raises CheckpointError if the ranks cannot share the model."""
    if reason := why_not_shared(config, n):
        raise CheckpointError(reason)

    def columns(size: int) -> int:
        return len(range(size)[part_of(size, rank, n)])

    def cut(heads: Heads) -> tuple[int, int, int, int]:
        q, kv = heads_of_rank(heads, rank, n)
        return q.stop - q.start, kv.stop - kv.start, heads.k_size, heads.v_size

    layers = tuple(cut(config.heads_of(layer)) for layer in range(config.n_layers))
    experts = config.experts
    if experts is not None:
        size, shared = columns(experts.intermediate_size), columns(experts.shared_size)
        experts = replace(experts, intermediate_size=size, shared_size=shared)
    delta = config.delta
    if delta is not None:
        k_heads = len(range(delta.k_heads)[delta_heads_of_rank(delta, rank, n)])
        delta = replace(delta, k_heads=k_heads, v_heads=delta.v_heads // delta.k_heads * k_heads)
    return replace(
        config,
        n_q_heads=layers[0][0],
        n_kv_heads=layers[0][1],
        options=replace(config.options, heads=layers) if config.options.heads else config.options,
        intermediate_size=columns(config.intermediate_size),
        mlp_sizes=tuple(map(columns, config.mlp_sizes)),
        experts=experts,
        delta=delta,
    )
