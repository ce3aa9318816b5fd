"""The sampler against transformers' logits processors, and its draws against the distributions they are drawn from."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastdecode.spart.batch import SampleSpec
from fastdecode.spart.penalties import LogitRules
from fastdecode.spart.sampling import Sampler, filtered, uniforms

pytestmark = pytest.mark.quick

VOCAB = 3000  # more than the prefix in which the cut of top-p is looked for first


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(8, VOCAB, generator=generator) * torch.linspace(0.1, 5.0, 8)[:, None]


def hugging_face(logits: torch.Tensor, spec: SampleSpec) -> torch.Tensor:
    """Probabilities after transformers' warpers, in the order generate() applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(spec.temperature)])
    if spec.top_k:
        warpers.append(TopKLogitsWarper(spec.top_k))
    if spec.top_p < 1:
        warpers.append(TopPLogitsWarper(spec.top_p))
    if spec.min_p > 0:
        warpers.append(MinPLogitsWarper(spec.min_p))
    return warpers(None, logits.clone()).softmax(dim=1)


FILTERS = [
    SampleSpec(temperature=0.7),
    SampleSpec(temperature=1.3, top_k=1),
    SampleSpec(temperature=1.0, top_k=40),
    SampleSpec(temperature=1.0, top_k=VOCAB + 1),
    SampleSpec(temperature=1.0, top_p=0.0),
    SampleSpec(temperature=0.9, top_p=0.6),
    SampleSpec(temperature=1.0, top_p=0.999),
    SampleSpec(temperature=1.5, min_p=0.05),
    SampleSpec(temperature=0.8, top_k=100, top_p=0.8, min_p=0.02),
    SampleSpec(temperature=2.0, top_k=2000, top_p=0.95),
]


@pytest.mark.parametrize("spec", FILTERS, ids=str)
def test_filtered_distribution_is_hugging_faces(logits, spec):
    ours = filtered(logits, [spec] * len(logits)).softmax(dim=1)
    theirs = hugging_face(logits, spec)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_every_row_of_a_mixed_batch_has_its_own_filters(logits):
    ours = filtered(logits, FILTERS[: len(logits)]).softmax(dim=1)
    for row, spec in enumerate(FILTERS[: len(logits)]):
        theirs = hugging_face(logits[row : row + 1], spec)[0]
        assert torch.equal(ours[row] > 0, theirs > 0)
        torch.testing.assert_close(ours[row], theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "spec",
    [
        SampleSpec(temperature=1.0),
        SampleSpec(temperature=0.7, top_k=20, top_p=0.9),
        SampleSpec(temperature=1.4, min_p=0.1),
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(spec):
    """Pearson's chi-square over 20000 draws; seeds are fixed, so it passes always or never."""
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = hugging_face(row, spec)[0].double()
    n = 20000
    specs = [SampleSpec(spec.temperature, spec.top_k, spec.top_p, spec.min_p, seed=11, index=i) for i in range(n)]
    tokens = torch.tensor([s.token for s in Sampler()(row.expand(n, -1), specs)])
    counts = tokens.bincount(minlength=50).double()
    assert counts[expected == 0].sum() == 0
    common = expected * n >= 5
    chi2 = ((counts - expected * n) ** 2 / (expected * n))[common].sum().item()
    degrees = common.sum().item() - 1
    # Wilson-Hilferty: the cube root of chi-square/degrees is close to normal; 3.1 deviations are one in a thousand.
    spread = math.sqrt(2 / (9 * degrees))
    assert (chi2 / degrees) ** (1 / 3) < 1 - 2 / (9 * degrees) + 3.1 * spread


def test_uniforms_are_uniform_and_uncorrelated_between_neighbours():
    """Counters 0, 1, 2, ... and neighbouring seeds are the worst case for a hash."""
    u = torch.from_numpy(uniforms([s for s in range(100) for _ in range(100)], list(range(100)) * 100)).view(100, 100)
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u.flatten(), bins=100, min=0, max=1)
    assert ((counts - 100) ** 2 / 100).sum() < 149  # chi-square, 99 degrees, one in a thousand
    for matrix in (u, u.T):
        correlations = torch.corrcoef(matrix)
        off_diagonal = correlations[~torch.eye(100, dtype=torch.bool)]
        assert off_diagonal.abs().max() < 0.45  # 4.5 deviations of 1/sqrt(100), 4950 pairs


def test_uniforms_take_any_integer_for_a_seed():
    seeds = [-1, 2**64 - 1, 2**80 + 5, 5]
    first, second, third, fourth = uniforms(seeds, [0] * 4)
    assert first == second and third == fourth and first != third


def test_draws_do_not_depend_on_the_batch(logits):
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1, VOCAB, generator=generator) * 2
    for i, spec in enumerate(FILTERS):
        spec = SampleSpec(spec.temperature, spec.top_k, spec.top_p, spec.min_p, seed=99 + i, index=i)
        alone = Sampler()(row, [spec])[0].token
        # Among rows of other kinds, whose top-k is larger and whose top-p needs a full sort.
        batch = torch.cat([logits, row, logits])
        others = [SampleSpec(f.temperature, f.top_k, f.top_p, f.min_p, seed=5) for f in FILTERS[: len(logits)]]
        assert Sampler()(batch, [*others, spec, *others])[len(logits)].token == alone


def test_index_and_seed_change_the_draw():
    row = torch.zeros(64, 1000)
    by_index = [s.token for s in Sampler()(row, [SampleSpec(seed=1, index=i) for i in range(64)])]
    by_seed = [s.token for s in Sampler()(row, [SampleSpec(seed=i, index=1) for i in range(64)])]
    assert len(set(by_index)) > 48 and len(set(by_seed)) > 48 and by_index != by_seed


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_is_greedy(logits, temperature):
    greedy = SampleSpec(temperature=temperature, top_k=5, top_p=0.1, seed=4)
    specs = [greedy, SampleSpec(temperature=1.0, seed=1)] * 4
    tokens = [s.token for s in Sampler()(logits, specs)]
    assert tokens[::2] == logits.argmax(dim=1).tolist()[::2]


def test_tied_tokens_are_kept_or_dropped_together():
    row = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0, 2.0]])
    by_k = filtered(row, [SampleSpec(top_k=2)])
    assert by_k.isfinite().tolist() == [[False, True, True, True, False, False]]
    by_p = filtered(row, [SampleSpec(top_p=0.5)])
    assert by_p.isfinite().tolist() == [[False, True, True, True, False, False]]
    flat = filtered(torch.zeros(1, 2000), [SampleSpec(top_p=0.9)])
    assert flat.isfinite().all()


def test_logprobs_are_of_the_raw_distribution(logits):
    specs = [SampleSpec(temperature=0.5, top_k=3, seed=i, logprobs=n) for i, n in enumerate([0, 1, 5, 20])]
    sampled = Sampler()(logits[:4], [*specs])
    expected = torch.log_softmax(logits[:4].double(), dim=1)
    for row, (result, spec) in enumerate(zip(sampled, specs, strict=True)):
        assert result.logprob == pytest.approx(expected[row, result.token].item(), abs=1e-5)
        best = expected[row].topk(20)
        assert [token for token, _ in result.top] == best.indices[: spec.logprobs].tolist()
        assert [p for _, p in result.top] == pytest.approx(best.values[: spec.logprobs].tolist(), abs=1e-5)
    without = Sampler()(logits[:1], [SampleSpec(temperature=0.0)])[0]
    assert without.logprob is None and without.top == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_alone(logits, bad, temperature):
    broken = logits.clone()
    broken[2, 17] = bad
    specs = [SampleSpec(temperature=temperature, seed=i, logprobs=2) for i in range(len(logits))]
    want, got = Sampler()(logits, specs), Sampler()(broken, specs)
    assert got[2].token == -1 and "not finite" in got[2].error and got[2].logprob is None
    assert [s.token for i, s in enumerate(got) if i != 2] == [s.token for i, s in enumerate(want) if i != 2]
    assert all(s.error is None for i, s in enumerate(got) if i != 2)


def test_a_banned_token_is_never_drawn():
    row = torch.full((1, 100), -math.inf)
    row[0, 41], row[0, 42] = 0.0, 0.0
    drawn = {s.token for s in Sampler()(row.expand(200, -1), [SampleSpec(seed=9, index=i) for i in range(200)])}
    assert drawn == {41, 42}


def test_extreme_temperatures_stay_finite():
    row = torch.tensor([[60000.0, -60000.0, 59999.0]])
    cold, hot = Sampler()(row.expand(2, -1), [SampleSpec(temperature=2e-5), SampleSpec(temperature=1e30, seed=3)])
    assert cold.token == 0 and hot.error is None


def draw(logits: torch.Tensor, rules: list[LogitRules | None], temperature: float) -> list[int]:
    specs = [SampleSpec(temperature, top_k=50, seed=i, index=3, rules=rule) for i, rule in enumerate(rules)]
    return [s.token for s in Sampler()(logits, specs)]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("repetition", [1.0, 1.4, 0.5])
def test_bias_and_repetition_penalty_are_hugging_faces(logits, repetition, temperature):
    before = logits.clone()
    best = logits.topk(40, dim=1).indices
    prompt, output = best[:, ::3], best[:, [0, 1, 0, 4, 0]]
    bias = {int(best[0, 2]): 3.5, int(best[1, 0]): -100.0, 5: 0.25}
    rules = []
    for row in range(len(logits)):
        rules.append(LogitRules(bias=bias.items(), repetition=repetition, prompt=prompt[row].tolist()))
        for token in output[row].tolist():
            rules[-1].generated(token)
    theirs = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(None, logits.clone())
    if repetition != 1.0:
        theirs = RepetitionPenaltyLogitsProcessor(repetition)(torch.cat([prompt, output], dim=1), theirs)
    assert draw(logits, rules, temperature) == draw(theirs, [None] * len(theirs), temperature)
    assert draw(logits, rules, temperature) != draw(logits, [None] * len(rules), temperature)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.1), (1.3, -0.4), (-0.2, 2.0)])
def test_frequency_and_presence_penalties_are_openais(logits, frequency, presence, temperature):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, over what was generated, whatever the prompt."""
    output = logits.topk(30, dim=1).indices[:, [0] * 3 + [1] * 20 + list(range(3, 30))]
    rules = []
    theirs = logits.double()
    for row, tokens in enumerate(output.tolist()):
        rules.append(LogitRules(frequency=frequency, presence=presence, prompt=[7, 8, *tokens[:5]]))
        for token in tokens:
            rules[-1].generated(token)
        counts = torch.tensor(tokens).bincount(minlength=VOCAB).double()
        theirs[row] -= counts * frequency + (counts > 0) * presence
    theirs = theirs.float()
    assert draw(logits, rules, temperature) == draw(theirs, [None] * len(theirs), temperature)
    assert draw(logits, rules, temperature) != draw(logits, [None] * len(rules), temperature)


def test_rules_of_one_row_leave_the_others_and_all_logprobs_alone(logits):
    best = logits.argmax(dim=1).tolist()
    forbidden = LogitRules(bias=[(best[3], -100.0)])
    specs = [SampleSpec(temperature=0.0, logprobs=2, rules=forbidden if i == 3 else None) for i in range(len(logits))]
    sampled = Sampler()(logits, specs)
    assert [s.token for s in sampled[:3] + sampled[4:]] == best[:3] + best[4:]
    assert sampled[3].token == logits[3].topk(2).indices[1]
    raw = logits[3].double().log_softmax(dim=0)
    assert sampled[3].logprob == pytest.approx(raw[sampled[3].token].item(), abs=1e-5)
    assert [token for token, _ in sampled[3].top] == logits[3].topk(2).indices.tolist()
