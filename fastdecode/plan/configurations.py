"""Chooses the R-nodes, the batch and the KV format for a model on given hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

from fastdecode.plan.equations import (
    Steady,
    System,
    Work,
    fits,
    mean_read,
    r_nodes_in_balance,
    round_seconds,
    s_part_throughput,
    stage_times,
    steady,
)
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import Profile
from fastdecode.region.contract import PAGE_TOKENS

#: Batches that are tried: four to each doubling.
_BATCHES = sorted({round(2 ** (i / 4)) for i in range(4 * 13 + 1)})
#: Without a rate, the batch is the smallest that has this share of the best throughput: the knee of E(B).
_KNEE = 0.95
_MINI_BATCHES = (1, 2)


@dataclass(frozen=True, slots=True)
class Goal:
    """The load to serve and its objectives. Lengths are means in tokens, `rate` is in requests a second, and times are
    in seconds."""

    n_prompt: float
    n_output: float
    rate: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    max_batch_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration and its predicted figures. Times are in seconds."""

    r_nodes: int
    kv_dtype: str
    mini_batches: int
    batch: int  # sequences, of all mini-batches
    tpot: float
    ttft: float
    tokens_per_second: float
    binding: str
    balance: float  # R-nodes whose R-Part takes as long as the S-Part, equation (11)
    kv_bytes: float  # that each R-node needs
    meets: bool  # the goal
    cost: float | None  # of a million output tokens
    ranks: int = 1  # of the S-Part


def choose(
    model: PlannedModel, profile: Profile, goal: Goal, transport: str, most_r_nodes: int, ranks: Sequence[int] = (1,)
) -> list[Configuration]:
    """Every configuration with its best batch. Configurations that meet the goal come first: the cheapest, or without
    prices the one of fewest R-nodes if there is a rate to meet. Equal ones follow by throughput.

    `profile` has all sections, as one from `merged` does. `ranks`: numbers of ranks to try. Raises ProfileError.
    """
    assert profile.r_node is not None
    configurations = []
    for n, kv_dtype, r_nodes in product(ranks, profile.r_node.kv_gbps, range(1, most_r_nodes + 1)):
        system = System.from_profile(profile, transport, model, kv_dtype, r_nodes, n)
        for mini_batches in _MINI_BATCHES[: 1 if profile.in_turns else None]:
            if (configuration := _with_best_batch(system, profile, goal, mini_batches, n)) is not None:
                configurations.append(configuration)

    def order(configuration: Configuration) -> tuple[bool, float, float]:
        spent = configuration.cost if configuration.cost is not None else configuration.r_nodes if goal.rate else 0
        return not configuration.meets, spent if configuration.meets else 0, -configuration.tokens_per_second

    return sorted(configurations, key=order)


def _with_best_batch(
    system: System, profile: Profile, goal: Goal, mini_batches: int, ranks: int
) -> Configuration | None:
    """The configuration with the batch that the goal asks for; None if not even one sequence a mini-batch fits."""
    assert profile.s_node is not None and profile.r_node is not None
    token_bytes = system.model.token_bytes(system.kv_dtype)
    length = goal.n_prompt + goal.n_output / 2 + PAGE_TOKENS / 2  # cached on average; the last page is half empty
    tokens = profile.r_node.memory / token_bytes
    found: list[Steady] = []
    for batch in _BATCHES:
        if batch < mini_batches:
            continue
        if not fits(batch, 2 * length, tokens, system.r_nodes) or batch > mini_batches * goal.max_batch_tokens:
            break
        state = steady(system, batch, mini_batches, goal.n_prompt, goal.n_output)
        if found and goal.tpot is not None and state.seconds > goal.tpot:
            break
        found.append(state)
    if not found:
        return None
    best = max(state.tokens_per_second for state in found)
    wanted = goal.rate * goal.n_output if goal.rate else _KNEE * best
    state = next((s for s in found if s.tokens_per_second >= wanted), found[-1])
    ttft = first_token_seconds(system, state, mini_batches, goal)
    fast_enough = (goal.tpot is None or state.seconds <= goal.tpot) and (goal.ttft is None or ttft <= goal.ttft)
    prices = profile.s_node.price, profile.r_node.price
    cost = None
    if prices[0] is not None and prices[1] is not None:
        served = min(wanted, state.tokens_per_second) if goal.rate else state.tokens_per_second
        cost = (prices[0] + system.r_nodes * prices[1]) / (3600 * served) * 1e6
    t = state.stages.s_part / system.model.n_layers
    r = token_bytes / system.model.n_layers / system.kv_bytes_per_second
    b = state.batch / mini_batches
    read = mean_read(system.model, goal.n_prompt, goal.n_output)
    return Configuration(
        r_nodes=system.r_nodes,
        kv_dtype=system.kv_dtype,
        mini_batches=mini_batches,
        batch=round(state.batch),
        tpot=state.seconds,
        ttft=ttft,
        tokens_per_second=state.tokens_per_second,
        binding=state.binding,
        balance=r_nodes_in_balance(2 * read, r, s_part_throughput(b, t)),
        kv_bytes=state.batch * length * token_bytes / system.r_nodes,
        meets=fast_enough and state.tokens_per_second >= wanted,
        cost=cost,
        ranks=ranks,
    )


def first_token_seconds(system: System, state: Steady, mini_batches: int, goal: Goal) -> float:
    """Seconds to the first token of a prompt that starts with the next step: half of a step that is in flight, then
    steps with as many of its rows as there is room for."""
    decoding = state.batch / mini_batches
    rows = max(1.0, goal.max_batch_tokens - decoding)
    steps = ceil(goal.n_prompt / rows)
    read = decoding * mean_read(system.model, goal.n_prompt, goal.n_output)
    pairs = goal.n_prompt * (goal.n_prompt + 1) / 2 / steps
    prefilling = stage_times(system, Work(decoding, read, goal.n_prompt / steps, pairs))
    seconds, _ = round_seconds([prefilling] + [state.stages] * (mini_batches - 1), system.in_turns)
    return state.seconds / 2 + steps * seconds
