"""The gated delta rule against its recurrence in float64, and what the pool of states refuses."""

from __future__ import annotations

import re

import pytest
import torch
from models.checkpoints import make_checkpoint
from models.spart_steps import EXACT, GREEDY, linked, run, text

from fastdecode.kernels import _native
from fastdecode.spart import SPart, load_model
from fastdecode.spart.checkpoints.config import DeltaRule
from fastdecode.spart.states.delta import DeltaBlock, DeltaWeights, _advance_chunk, _advance_rows, state_tensors
from fastdecode.spart.states.pool import StatePool, StateRows
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.spart.step.step_table import StepTable

HEADS, K_SIZE, V_SIZE = 3, 16, 24
#: The functions that an ISA takes.
EXPECTED = {"avxvnni": "avx2", "avx512vnni": "avx512", "avx512bf16": "avx512", "amx": "avx512"}


def one_by_one(state, q, k, v, beta, decay):
    """The rule's equations (arXiv 2412.06464, equation 10), a token and a head at a time, in float64."""
    outs = torch.empty_like(v)
    for t in range(len(q)):
        for head in range(HEADS):
            key, value, s = k[t, head], v[t, head], state[head] * decay[t, head].exp()
            s = s - beta[t, head] * torch.outer(key, key @ s) + beta[t, head] * torch.outer(key, value)
            state[head], outs[t, head] = s, q[t, head] @ s
    return outs


def tokens_of(n, weakest, strongest):
    """n tokens, whose states decay by exp(-10 ** x) with x between two numbers."""
    generator = torch.Generator().manual_seed(n)
    q, k = (torch.nn.functional.normalize(torch.randn(n, HEADS, K_SIZE, generator=generator), dim=2) for _ in "qk")
    v = torch.randn(n, HEADS, V_SIZE, generator=generator)
    beta, power = torch.rand(n, HEADS, generator=generator), torch.rand(n, HEADS, generator=generator)
    return q, k, v, beta, -(10 ** (weakest + (strongest - weakest) * power))


@pytest.mark.quick
@pytest.mark.parametrize("decays", [(-4, -2), (-2, 0), (0, 2.5), (-4, 3)], ids=["slow", "medium", "at once", "all"])
@pytest.mark.parametrize("n", [1, 2, 63, 64])
def test_tokens_that_advance_together_equal_the_recurrence(n, decays):
    start = torch.randn(HEADS, K_SIZE, V_SIZE, generator=torch.Generator().manual_seed(1))
    inputs = tokens_of(n, *decays)
    want_state = start.double()
    want = one_by_one(want_state, *(x.double() for x in inputs))
    state = start.clone()
    got = _advance_chunk(state, *inputs)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(state.double(), want_state, rtol=0, atol=2e-5)


@pytest.mark.quick
def test_single_tokens_of_many_sequences_equal_the_recurrence():
    inputs = tokens_of(7, -3, 1)
    start = torch.randn(7, HEADS, K_SIZE, V_SIZE, generator=torch.Generator().manual_seed(2))
    states = start.clone()
    got = _advance_rows(states, *inputs)
    for i in range(7):
        want_state = start[i].double()
        want = one_by_one(want_state, *(x[i : i + 1].double() for x in inputs))
        torch.testing.assert_close(got[i : i + 1].double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(states[i].double(), want_state, rtol=0, atol=1e-5)


class Projected:
    """A Linear that stands for the projections before and after a rule."""

    native = ()

    def __call__(self, x):
        return x


#: Sizes that are multiples of no vector, and those of Qwen3.5 with fewer heads.
RULES = [(2, 6, 20, 27, 3), (2, 4, 128, 128, 4)]


@pytest.mark.parametrize("isa", _native.isa_supported())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by_head", [False, True], ids=["", "by head"])
@pytest.mark.parametrize("sizes", RULES, ids=str)
def test_rows_of_a_block_equal_the_equations(sizes, by_head, dtype, isa, monkeypatch):
    """Two sequences in their own slots, one that begins from another slot, and one with two guesses; two prompts, one
    of which leaves states after some of its tokens, twice after the same; the scalar ISA has no rule, so that torch
    computes it."""
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    rule = DeltaRule(frozenset(range(2)), *sizes, by_head)
    generator = torch.Generator().manual_seed(5)

    def random(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator)

    weights = DeltaWeights(
        Projected(),
        random(rule.channels, 1, rule.kernel),
        random(rule.v_heads, scale=3),
        random(rule.v_heads),
        1 + random(rule.v_size, scale=0.1),
        Projected(),
    )
    pool = StatePool([state_tensors(rule)] * 2, 14, torch.device("cpu"), dtype)
    for tensors in pool.blocks:
        for tensor in tensors:
            tensor.copy_(random(*tensor.shape))
    after = [((1, 0),), ((1, 4),), ((1, 5), (2, 6), (3, 7)), ((2, 9), (72, 10), (72, 11), (135, 8)), ((5, 12),)]
    chunks = [
        Chunk(0, i, 1, 9, [5] * states[-1][0], i > 2, GREEDY, state=state, states_after=states)
        for i, (state, states) in enumerate(zip([0, 3, 5, 8, 13], after, strict=True))
    ]
    pool.pretend(9)
    table = StepTable()
    starts = [0, 1, 2, 5, 140]
    rows = StateRows(pool, chunks, starts, table)
    rows.on_device(table.upload(torch.device("cpu")))
    block = DeltaBlock(rule, weights, 1e-6, 1, dtype)
    assert (block.isa or "scalar") == EXPECTED.get(isa, isa)
    y = random(145, rule.channels + rule.v_width + 2 * rule.v_heads)
    y[:, -2 * rule.v_heads :] *= 6  # tokens that clear a state, and tokens that leave it as it is
    y = y.to(dtype)
    before = [tensor.double() for tensor in pool.blocks[1]]
    got = block(y, rows, None)
    budget = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for first, chunk in zip(starts, chunks, strict=True):
        inputs, sums = (tensor[chunk.state] for tensor in before)
        for n in range(1, len(chunk.tokens) + 1):
            row = first + n - 1
            want, inputs, sums = block_of_equations(rule, weights, y[row].double(), inputs, sums)
            torch.testing.assert_close(got[row].double(), want, rtol=budget, atol=budget)
            for slot in [slot for m, slot in chunk.states_after if m == n]:
                torch.testing.assert_close(pool.blocks[1][0][slot].double(), inputs, rtol=0, atol=0)
                torch.testing.assert_close(pool.blocks[1][1][slot].double(), sums, rtol=1e-5, atol=1e-5)


def block_of_equations(rule, weights, y, inputs, sums):
    """A token's output and states, in float64, a V head at a time."""
    group = rule.v_heads // rule.k_heads
    if rule.by_head:
        wide, narrow = y.split([rule.channels + rule.v_width, 2 * rule.v_heads])
        widths = [rule.k_size, rule.k_size, group * rule.v_size, group * rule.v_size]
        q, k, v, z = (x.flatten() for x in wide.view(rule.k_heads, -1).split(widths, dim=1))
        beta, decay = (x.flatten() for x in narrow.view(rule.k_heads, -1).split(group, dim=1))
        x = torch.cat([q, k, v])
    else:
        x, z, beta, decay = y.split([rule.channels, rule.v_width, rule.v_heads, rule.v_heads])
    seen = torch.cat([inputs, x[None]])
    mixed = torch.nn.functional.silu((seen * weights.conv[:, 0].T.double()).sum(0))
    width = rule.k_heads * rule.k_size
    q, k, v = (part.view(-1, size) for part, size in zip(
        mixed.split([width, width, rule.v_width]), (rule.k_size, rule.k_size, rule.v_size), strict=True
    ))  # fmt: skip
    states, outs = sums.clone(), []
    for head in range(rule.v_heads):
        query, key = (one[head // group] / (one[head // group].square().sum() + 1e-6).sqrt() for one in (q, k))
        rate = torch.nn.functional.softplus(decay[head] + weights.decay_bias[head].double())
        state = sums[head] * (-weights.decay[head].double().exp() * rate).exp()
        state = state + beta[head].sigmoid() * torch.outer(key, v[head] - key @ state)
        states[head], o = state, query * rule.k_size**-0.5 @ state
        o = o / (o.square().mean() + 1e-6).sqrt() * weights.norm.double()
        outs.append(o * torch.nn.functional.silu(z.view(rule.v_heads, -1)[head]))
    return torch.cat(outs), seen[1:], states


@pytest.mark.parametrize("variant", ["qwen3.5", "qwen3-next"])
async def test_a_sequence_goes_on_from_any_state_that_a_chunk_left(variant, tmp_path):
    """Chunks leave states after some of their tokens, each in a slot of its own; from each one another sequence goes
    on, beside others, as if it had had the whole text."""
    model, tokens = load_model(make_checkpoint(variant), dtype="fp32"), text(90)
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=10)

        def logits(*chunks):
            return run(spart.step(StepBatch(0, list(chunks)), keep_logits=True)).logits

        want = logits(Chunk(0, 0, 1, 0, tokens, True, GREEDY, state=0))
        logits(
            Chunk(0, 1, 1, 0, tokens[:3], False, GREEDY, state=1, states_after=((1, 2), (2, 3), (3, 1))),
            Chunk(0, 2, 1, 0, tokens[:1], False, GREEDY, state=4),
            Chunk(0, 3, 1, 0, tokens[:80], True, GREEDY, state=5, states_after=((70, 6), (71, 7), (80, 9), (80, 5))),
        )
        for i, (pos, source) in enumerate([(1, 2), (2, 3), (3, 1), (1, 4), (70, 6), (71, 7), (80, 5), (80, 9)], 4):
            logits(Chunk(0, i, 1, 0, tokens[:pos], True, GREEDY, state=8))  # only K and V are needed
            rest = tokens[pos:]
            after = ((len(rest), 8),)
            got = logits(Chunk(0, i, 1, pos, rest, False, GREEDY, state=source, states_after=after))
            torch.testing.assert_close(got, want, rtol=0, atol=EXACT * want.std().item())


async def test_a_chunk_that_does_not_follow_its_state_is_refused(tmp_path):
    model = load_model(make_checkpoint("qwen3.5"), dtype="fp32")
    with pytest.raises(ValueError, match="so its S-Part needs state_slots"):
        SPart(model, [])
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=2)

        def step(pos, tokens, state):
            run(spart.step(StepBatch(0, [Chunk(0, 0, 1, pos, tokens, False, GREEDY, state=state)])))

        with pytest.raises(ValueError, match="state slot 2, not one of the pool's 2"):
            step(0, text(5), 2)
        for after, numbers in (((4, 1),), "[4]"), (((3, 1), (2, 0), (5, 1)), "[3, 2, 5]"):
            chunk = Chunk(0, 0, 1, 0, text(5), True, GREEDY, states_after=after)
            with pytest.raises(ValueError, match=re.escape(f"a chunk of 5 tokens has states after {numbers} of them")):
                run(spart.step(StepBatch(0, [chunk])))
        step(0, text(5), 1)
        for pos, state in ((6, 1), (5, 0)):
            with pytest.raises(ValueError, match=f"goes on at {pos}, its state is that of"):
                step(pos, [7], state)
