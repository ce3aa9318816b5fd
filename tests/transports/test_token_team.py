"""R-nodes that share the tokens of every sequence, as one link: every merged O row equals float64 attention."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from wire.link_driver import SMALL, Driver, hello, in_thread

from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.transports.base import Hello, LayerOptions, TransportError
from fastdecode.transports.token_team import TokenTeam, pages_of, part_length, token_part_of

WIDE = dataclasses.replace(SMALL, max_rows=700)


@pytest.mark.quick
def test_the_parts_of_any_length_add_up_and_each_token_has_one_part():
    for n in (1, 2, 3, 64):
        lengths = [[part_length(length, i, n) for i in range(n)] for length in range(5 * PAGE_TOKENS * min(n, 4))]
        for length, parts in enumerate(lengths):
            assert sum(parts) == length
        for before, after in itertools.pairwise(lengths):
            assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (n - 1) + [1]


@pytest.mark.quick
def test_no_sequences_need_more_pages_than_the_first_member_has():
    rng = random.Random(0)
    for _ in range(200):
        n, seqs, n_pages = rng.randrange(2, 6), rng.randrange(1, 9), rng.randrange(1, 60)
        left, used = pages_of(n_pages, n, seqs), 0
        for _ in range(seqs):
            taken = rng.randrange(left + 1)
            left -= taken
            used += -(-taken // n)
        assert used <= n_pages


def many_steps(team: TokenTeam, wanted: Hello, seed: int) -> None:
    """Steps of one row and of many, over the bounds of pages, in both slots."""
    rng, driver = random.Random(seed), Driver(team, wanted, seed)
    driver.fill(0, 3 * PAGE_TOKENS - 2)
    driver.step(0, [(0, 1, True), (1, 1, True)])
    driver.step(1, [(0, 5, True), (1, PAGE_TOKENS, True), (2, 2 * PAGE_TOKENS + 3, False)])
    for slot in (0, 1) * 4:
        rows = [(seq, rng.choice((1, 1, 3, 140)), True) for seq in rng.sample(range(4), 3)]
        driver.step(slot, rows)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int4"])
async def test_attention_equals_float64(team_of, n, kv_dtype):
    wanted = hello(WIDE, kv_dtype)
    team = await team_of(wanted, n, "tokens")
    await in_thread(many_steps, team, wanted, n)
    assert (await team.stats())["seqs"] == 4


async def test_sinks_softcaps_and_layers_with_their_own_heads(team_of):
    layers = LayerOptions(
        softcaps=(0, 1.5), sinks=np.arange(8).astype("<f4").tobytes(), heads=((4, 2, 16, 16), (4, 1, 16, 8))
    )
    wanted = hello(WIDE, layers=layers)
    await in_thread(many_steps, await team_of(wanted, 2, "tokens"), wanted, 1)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "int4"])
async def test_v_in_k(team_of, kv_dtype):
    latent = dataclasses.replace(WIDE, n_q_heads=20, n_kv_heads=1, head_size=40, v_size=32, v_in_k=True)
    wanted = hello(latent, kv_dtype)
    await in_thread(many_steps, await team_of(wanted, 2, "tokens"), wanted, 3)


@pytest.mark.parametrize("act_dtype", ["fp16", "bf16"])
async def test_half_precision_rows(team_of, act_dtype):
    wanted = hello(dataclasses.replace(WIDE, act_dtype=act_dtype), kv_dtype="fp16")
    await in_thread(many_steps, await team_of(wanted, 2, "tokens"), wanted, 2)


async def test_trim_fork_cut_and_free(team_of):
    """Also to lengths at which a member keeps nothing."""
    wanted = hello(WIDE)
    team = await team_of(wanted, 2, "tokens")
    driver = Driver(team, wanted)
    await in_thread(driver.fill, 0, 2 * PAGE_TOKENS + 36)
    await driver.fork_seq(0, 1, PAGE_TOKENS + 6)
    await driver.fork_seq(0, 2, 7)
    await in_thread(lambda: driver.step(0, [(0, 2, True), (1, 2, True), (2, 1, True)]))
    driver.cut(1, PAGE_TOKENS)
    await in_thread(lambda: driver.step(0, [(1, 2, True)]))
    await driver.trim_seq(0, PAGE_TOKENS - 1)
    await in_thread(lambda: driver.step(0, [(0, PAGE_TOKENS + 3, True), (1, 1, True)]))
    for seq in range(3):
        await driver.free_seq(seq)
    for member in team.members:
        stats = await member.link.stats()
        assert (stats["pages_used"], stats["seqs"]) == (0, 0)
    more = team.lease.n_pages + 5
    assert more <= (await team.resize(more))["pages_total"] <= more + 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"windows": (0, 70)}, "sliding window"),
        ({"layers": LayerOptions(segments=(0, 128))}, "chunked attention"),
        ({"layers": LayerOptions(slopes=np.ones(4, "<f4").tobytes())}, "ALiBi"),
        ({"layers": LayerOptions(selections=(1, 2))}, "trained sparse attention"),
    ],
)
def test_models_that_cannot_share_tokens_are_refused(changes, reason):
    with pytest.raises(TransportError, match=reason):
        token_part_of(hello(SMALL, **changes), 0, 2)
