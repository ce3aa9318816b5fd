"""The sampler against transformers' logits processors, and its draws against the distributions they are drawn from."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
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

from fastdecode.kernels import _native
from fastdecode.spart.sampler import host_sampling
from fastdecode.spart.sampler.draws import draw, stream_keys, uniforms
from fastdecode.spart.sampler.host_sampling import HostSampler
from fastdecode.spart.sampler.sampling import Sampler
from fastdecode.spart.sampler.sampling_kinds import GREEDY, TOP_P_PREFIX, Kind, kind_of
from fastdecode.spart.step.batch import Sampled, SampleSpec
from fastdecode.spart.step.penalties import LogitRules
from fastdecode.spart.step.step_table import StepTable

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


def sample_on_host(logits: torch.Tensor, specs: list[SampleSpec]) -> list[Sampled]:
    return HostSampler(specs, logits.shape[1])(logits, {})


def sample_on_device(logits: torch.Tensor, specs: list[SampleSpec]) -> list[Sampled]:
    table = StepTable()
    return Sampler(specs, logits.shape[1], table)(logits, table.upload(logits.device))


@pytest.fixture(params=["host", "device"])
def sample(request):
    return {"host": sample_on_host, "device": sample_on_device}[request.param]


#: ISAs for which the draws are compiled; the others take the functions of one of them.
ISAS = [isa for isa in ("scalar", "avx2", "avx512") if isa in _native.isa_supported()]


@pytest.fixture(params=["device", *ISAS])
def weights(request, monkeypatch):
    """The distributions that tokens are drawn from, each scaled so that its maximum is 1."""
    if request.param == "device":
        return weights_on_device
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    host_sampling._native_draws.cache_clear()
    request.addfinalizer(host_sampling._native_draws.cache_clear)

    def weights_on_host(logits, specs):
        _, _, found = HostSampler(specs, logits.shape[1]).run(logits, keep_weights=True)
        assert not found[:, logits.shape[1] :].any()
        return found[:, : logits.shape[1]]

    return weights_on_host


def weights_on_device(logits: torch.Tensor, specs: list[SampleSpec], prefix: int = 1024) -> torch.Tensor:
    table = StepTable()
    sampler = Sampler(specs, logits.shape[1], table, top_p_prefix=prefix)
    (block,) = sampler._blocks
    found, reached = block.weights(logits, table.upload(logits.device))
    assert not found[:, logits.shape[1] :].any()
    if reached is not None and not reached.all():
        return weights_on_device(logits, specs, prefix=logits.shape[1])
    return found[:, : logits.shape[1]]


@pytest.fixture
def filtered(weights):
    """The same as probabilities."""

    def normalised(logits, specs):
        found = weights(logits, specs)
        return found / found.sum(dim=1, keepdim=True)

    return normalised


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
def test_filtered_distribution_is_hugging_faces(logits, spec, filtered):
    ours = filtered(logits, [spec] * len(logits))
    theirs = hugging_face(logits, spec)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_every_row_of_a_mixed_batch_has_its_own_filters(logits, filtered):
    ours = filtered(logits, FILTERS[: len(logits)])
    for row, spec in enumerate(FILTERS[: len(logits)]):
        theirs = hugging_face(logits[row : row + 1], spec)[0]
        assert torch.equal(ours[row] > 0, theirs > 0)
        torch.testing.assert_close(ours[row], theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("vocab", [50, 700])
@pytest.mark.parametrize(
    "spec",
    [
        SampleSpec(temperature=1.0),
        SampleSpec(temperature=0.7, top_k=20, top_p=0.9),
        SampleSpec(temperature=1.4, min_p=0.1),
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(spec, vocab, sample):
    """Pearson's chi-square over 40000 draws against float64; seeds are fixed, so it passes always or never."""
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = hugging_face(row.double(), spec)[0]
    n = 40000
    specs = [SampleSpec(spec.temperature, spec.top_k, spec.top_p, spec.min_p, seed=11, index=i) for i in range(n)]
    tokens = torch.tensor([s.token for s in sample(row.expand(n, -1), specs)])
    assert follows(tokens, expected)


def follows(tokens: torch.Tensor, expected: torch.Tensor) -> bool:
    """Pearson's chi-square: True unless the tokens would be one in a thousand draws of `expected` [vocab_size]."""
    n = len(tokens)
    counts = tokens.bincount(minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    rare = expected * n < 5  # the rare ones together are one cell
    expected, counts = (torch.cat([x[~rare], x[rare].sum(dim=0, keepdim=True)]) for x in (expected * n, counts))
    cells = expected > 0
    chi2 = ((counts - expected) ** 2 / expected)[cells].sum().item()
    degrees = cells.sum().item() - 1
    # Wilson-Hilferty: the cube root of chi-square/degrees is close to normal; 3.1 deviations are one in a thousand.
    spread = math.sqrt(2 / (9 * degrees))
    return (chi2 / degrees) ** (1 / 3) < 1 - 2 / (9 * degrees) + 3.1 * spread


def test_the_chi_square_test_sees_a_small_error():
    """The same check refuses draws from a distribution that is a tenth off in temperature."""
    row = torch.randn(1, 700, generator=torch.Generator().manual_seed(3)).double() * 1.5
    drawn = row.div(1.1).softmax(dim=1)[0].multinomial(40000, True, generator=torch.Generator().manual_seed(4))
    sound = row.softmax(dim=1)[0].multinomial(40000, True, generator=torch.Generator().manual_seed(4))
    assert follows(sound, row.softmax(dim=1)[0]) and not follows(drawn, row.softmax(dim=1)[0])


def test_draws_follow_weights_that_differ_by_orders_of_magnitude():
    """One span with nearly all of the weight, one with little, one with none, and a light token beside heavy ones."""
    weights = torch.zeros(1, 3 * 256)
    weights[0, :3], weights[0, 256:300] = torch.tensor([1.0, 0.3, 1e-3]), 2e-3
    n = 40000
    keys = torch.from_numpy(stream_keys([5] * n, list(range(n))))[:, None]
    assert follows(draw(weights.expand(n, -1).contiguous(), keys), weights[0].double() / weights[0].double().sum())


def splitmix64(state: int, n: int) -> list[int]:
    """The first outputs of splitmix64, as its authors' C program computes them."""
    outputs = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


@pytest.mark.parametrize("key", [0, 1, 1234567, -1, -(2**63), 2**63 - 1])
def test_random_numbers_are_the_outputs_of_splitmix64(key):
    got = uniforms(torch.tensor([key]), torch.arange(1000))
    assert got.tolist() == [((z >> 12) + 0.5) / 2**52 for z in splitmix64(key % 2**64, 1000)]
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # published with the generator


def test_keys_are_splitmix64_of_seed_and_index():
    seeds, indices = [0, 7, -1, 2**80 + 5, 5], [0, 3, 2, 1, 1]
    want = [splitmix64(splitmix64(s % 2**64, 1)[0] ^ i, 1)[0] for s, i in zip(seeds, indices, strict=True)]
    assert stream_keys(seeds, indices).tolist() == [z - 2**64 if z >> 63 else z for z in want]
    assert want[3] == want[4] and len(set(want)) == 4


def test_uniforms_are_uniform_and_uncorrelated_between_neighbours():
    """Indices and numbers 0, 1, 2, ... and neighbouring seeds are the worst case for a hash."""
    keys = torch.from_numpy(stream_keys([s for s in range(10) for _ in range(10)], list(range(10)) * 10))
    u = uniforms(keys[:, None], torch.arange(100))
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u.flatten(), bins=100, min=0, max=1)
    assert ((counts - 100) ** 2 / 100).sum() < 149  # chi-square, 99 degrees, one in a thousand
    for matrix in (u, u.T):
        correlations = torch.corrcoef(matrix)
        off_diagonal = correlations[~torch.eye(100, dtype=torch.bool)]
        assert off_diagonal.abs().max() < 0.45  # 4.5 deviations of 1/sqrt(100), 4950 pairs


def test_draws_do_not_depend_on_the_batch(logits, sample):
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1, VOCAB, generator=generator) * 2
    for i, spec in enumerate(FILTERS):
        spec = SampleSpec(spec.temperature, spec.top_k, spec.top_p, spec.min_p, seed=99 + i, index=i)
        alone = sample(row, [spec])[0].token
        # Among rows of other kinds, whose top-k is larger and whose top-p needs a full sort.
        batch = torch.cat([logits, row, logits])
        others = [SampleSpec(f.temperature, f.top_k, f.top_p, f.min_p, seed=5) for f in FILTERS[: len(logits)]]
        assert sample(batch, [*others, spec, *others])[len(logits)].token == alone


def test_index_and_seed_change_the_draw(sample):
    row = torch.zeros(64, 1000)
    by_index = [s.token for s in sample(row, [SampleSpec(seed=1, index=i) for i in range(64)])]
    by_seed = [s.token for s in sample(row, [SampleSpec(seed=i, index=1) for i in range(64)])]
    assert len(set(by_index)) > 48 and len(set(by_seed)) > 48 and by_index != by_seed


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_is_greedy(logits, temperature, sample):
    greedy = SampleSpec(temperature=temperature, top_k=5, top_p=0.1, seed=4)
    specs = [greedy, SampleSpec(temperature=1.0, seed=1)] * 4
    tokens = [s.token for s in sample(logits, specs)]
    assert tokens[::2] == logits.argmax(dim=1).tolist()[::2]


@pytest.mark.parametrize("scale", [1e-3, 3.0, 30.0])
@pytest.mark.parametrize(
    "spec", [SampleSpec(top_k=k) for k in (1, 40, 30_000, 59_000)] + [SampleSpec(top_p=0.95)], ids=str
)
def test_filters_of_a_large_vocabulary(weights, spec, scale):
    """The cut is looked for in several passes, among equal logits, forbidden tokens, and logits far below the best."""
    logits = torch.randn(3, 60_000, generator=torch.Generator().manual_seed(1)) * scale
    logits[0] = (logits[0] * 8 / scale).round()
    logits[1, ::2] = -math.inf
    logits[2, 7] = 500.0 * scale
    ours = weights(logits, [spec] * 3)
    if spec.top_k:
        smallest, largest = logits.topk(spec.top_k, dim=1).values[:, -1:], logits.amax(dim=1, keepdim=True)
        # Rounding decides about neighbours of the smallest one, and about weights that are nearly 0 in fp32.
        sure = (smallest == logits) | ((smallest - logits).abs() > 1e-6 * largest)
        sure &= (logits > largest - 87) | (logits < largest - 104)
        kept = (logits >= smallest) & (logits > largest - 87)
        assert torch.equal((ours > 0)[sure], kept[sure])
    else:
        shares = torch.where(ours > 0, logits.double().softmax(dim=1), 0.0)
        lowest = torch.where(ours > 0, logits, math.inf).amin(dim=1, keepdim=True)
        assert torch.equal(ours > 0, logits >= lowest)
        assert (shares.sum(dim=1) >= 0.95 - 1e-5).all()
        more = torch.where(logits > lowest, logits.double().softmax(dim=1), 0.0)
        assert (more.sum(dim=1) < 0.95 + 1e-5).all()


def test_logits_of_bf16_are_taken_as_they_are(logits):
    halves = logits.bfloat16()
    specs = [replace(spec, seed=i) for i, spec in enumerate([GREEDY, *FILTERS[:7]])]
    assert sample_on_host(halves, specs) == sample_on_host(halves.float(), specs)


def test_tied_tokens_are_kept_or_dropped_together(weights):
    row = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0, 2.0]])
    best = [[False, True, True, True, False, False]]
    assert (weights(row, [SampleSpec(top_k=2)]) > 0).tolist() == best
    assert (weights(row, [SampleSpec(top_p=0.5)]) > 0).tolist() == best
    assert (weights(row, [SampleSpec(top_k=2, top_p=0.9)]) > 0).tolist() == best
    assert (weights(torch.zeros(1, 2000), [SampleSpec(top_p=0.9)]) > 0).all()


def test_a_nucleus_beyond_the_prefix_is_drawn_from_all_of_its_tokens(sample):
    """A nearly flat distribution: most of the nucleus lies beyond the prefix that top-p looks at first."""
    row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 0.1
    expected = hugging_face(row.double(), SampleSpec(top_p=0.9))[0]
    specs = [SampleSpec(top_p=0.9, seed=1, index=i, logprobs=1) for i in range(4000)]
    drawn = sample(row.expand(len(specs), -1), specs)
    tokens = torch.tensor([s.token for s in drawn])
    assert (expected[tokens] > 0).all() and len(tokens.unique()) > 1500
    logprobs = row.double().log_softmax(dim=1)[0]
    assert [s.logprob for s in drawn] == pytest.approx(logprobs[tokens].tolist(), abs=1e-5)
    # Among rows that need no second draw, each token is that of its own row.
    mixed = sample(torch.cat([row, row * 100, row]), [specs[0], SampleSpec(temperature=0.0), specs[1]])
    assert [s.token for s in mixed] == [drawn[0].token, int(row.argmax()), drawn[1].token]


def test_rows_of_several_blocks_are_each_drawn_by_their_own_parameters(monkeypatch):
    """A small block size must not change any result."""
    logits = torch.randn(30, 300, generator=torch.Generator().manual_seed(6)) * 3
    specs = []
    for i in range(30):
        rules = LogitRules(bias=[(i, 2.0)], presence=0.5) if i % 7 == 0 else None
        if rules:
            rules.generated(i + 3)
        kind = FILTERS[i % len(FILTERS)]
        temperature = 0.0 if i % 5 == 0 else kind.temperature
        logprobs = i % 3 if i % 4 else None
        specs.append(SampleSpec(temperature, kind.top_k, kind.top_p, kind.min_p, i, i, logprobs, rules))
    whole = sample_on_device(logits, specs)
    monkeypatch.setattr("fastdecode.spart.sampler.results.BLOCK_BYTES", 7 * 300 * 4)
    blocks = sample_on_device(logits, specs)
    assert [(s.token, [t for t, _ in s.top]) for s in blocks] == [(s.token, [t for t, _ in s.top]) for s in whole]
    for one, other, spec in zip(whole, blocks, specs, strict=True):
        assert (one.logprob is None) == (spec.logprobs is None)
        if one.logprob is not None:
            assert other.logprob == pytest.approx(one.logprob, abs=1e-5)


def test_logprobs_are_of_the_raw_distribution(logits, sample):
    specs = [SampleSpec(temperature=0.5, top_k=3, seed=i, logprobs=n) for i, n in enumerate([0, 1, 5, 20])]
    sampled = sample(logits[:4], [*specs])
    expected = torch.log_softmax(logits[:4].double(), dim=1)
    for row, (result, spec) in enumerate(zip(sampled, specs, strict=True)):
        assert result.logprob == pytest.approx(expected[row, result.token].item(), abs=1e-5)
        best = expected[row].topk(20)
        assert [token for token, _ in result.top] == best.indices[: spec.logprobs].tolist()
        assert [p for _, p in result.top] == pytest.approx(best.values[: spec.logprobs].tolist(), abs=1e-5)
    without = sample(logits[:1], [SampleSpec(temperature=0.0)])[0]
    assert without.logprob is None and not without.top


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_alone(logits, bad, temperature, sample):
    broken = logits.clone()
    broken[2, 17] = bad
    specs = [SampleSpec(temperature=temperature, seed=i, logprobs=2) for i in range(len(logits))]
    want, got = sample(logits, specs), sample(broken, specs)
    assert got[2].token == -1 and "not finite" in got[2].error and got[2].logprob is None
    assert [s.token for i, s in enumerate(got) if i != 2] == [s.token for i, s in enumerate(want) if i != 2]
    assert all(s.error is None for i, s in enumerate(got) if i != 2)


def test_a_banned_token_is_never_drawn(sample):
    row = torch.full((1, 100), -math.inf)
    row[0, 41], row[0, 42] = 0.0, 0.0
    drawn = {s.token for s in sample(row.expand(200, -1), [SampleSpec(seed=9, index=i) for i in range(200)])}
    assert drawn == {41, 42}


def test_extreme_temperatures_stay_finite(sample):
    row = torch.tensor([[60000.0, -60000.0, 59999.0]])
    cold, hot = sample(row.expand(2, -1), [SampleSpec(temperature=2e-5), SampleSpec(temperature=1e30, seed=3)])
    assert cold.token == 0 and hot.error is None


def tokens_with(sample, logits: torch.Tensor, rules: list[LogitRules | None], temperature: float) -> list[int]:
    specs = [SampleSpec(temperature, top_k=50, seed=i, index=3, rules=rule) for i, rule in enumerate(rules)]
    return [s.token for s in sample(logits, specs)]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("repetition", [1.0, 1.4, 0.5])
def test_bias_and_repetition_penalty_are_hugging_faces(logits, repetition, temperature, sample):
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
    assert tokens_with(sample, logits, rules, temperature) == tokens_with(
        sample, theirs, [None] * len(theirs), temperature
    )
    assert tokens_with(sample, logits, rules, temperature) != tokens_with(
        sample, logits, [None] * len(rules), temperature
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.1), (1.3, -0.4), (-0.2, 2.0)])
def test_frequency_and_presence_penalties_are_openais(logits, frequency, presence, temperature, sample):
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
    assert tokens_with(sample, logits, rules, temperature) == tokens_with(
        sample, theirs, [None] * len(theirs), temperature
    )
    assert tokens_with(sample, logits, rules, temperature) != tokens_with(
        sample, logits, [None] * len(rules), temperature
    )


def test_rules_of_one_row_leave_the_others_and_all_logprobs_alone(logits, sample):
    best = logits.argmax(dim=1).tolist()
    forbidden = LogitRules(bias=[(best[3], -100.0)])
    specs = [SampleSpec(temperature=0.0, logprobs=2, rules=forbidden if i == 3 else None) for i in range(len(logits))]
    sampled = sample(logits, specs)
    assert [s.token for s in sampled[:3] + sampled[4:]] == best[:3] + best[4:]
    assert sampled[3].token == logits[3].topk(2).indices[1]
    raw = logits[3].double().log_softmax(dim=0)
    assert sampled[3].logprob == pytest.approx(raw[sampled[3].token].item(), abs=1e-5)
    assert [token for token, _ in sampled[3].top] == logits[3].topk(2).indices.tolist()


KINDS = [
    [SampleSpec(temperature=0.0)] * 5,
    [SampleSpec(temperature=0.0), SampleSpec(temperature=0.6, seed=1), SampleSpec(seed=2, index=9)],
    [replace(spec, seed=i, index=i) for i, spec in enumerate(FILTERS) if spec.top_k <= TOP_P_PREFIX],
    [SampleSpec(temperature=0.0, top_k=3, top_p=0.1), SampleSpec(top_p=0.999, seed=3), SampleSpec(min_p=0.3, seed=4)],
]


@pytest.mark.parametrize("specs", KINDS, ids=["greedy", "temperatures", "filters", "mixed"])
@pytest.mark.parametrize("block_rows", [3, 64])
def test_a_captured_step_draws_the_tokens_of_any_other(logits, specs, block_rows, monkeypatch, sample):
    """And its arrays have the same names and sizes as those of any other step of its kind, whatever these draw."""
    monkeypatch.setattr("fastdecode.spart.sampler.results.BLOCK_BYTES", block_rows * VOCAB * 4)
    logits = logits.repeat(2, 1)[:12]
    kind = kind_of(specs, VOCAB)
    assert isinstance(kind, Kind)
    table, neutral = StepTable(), StepTable()
    Sampler.of_kind(kind, len(logits), [], VOCAB, neutral)
    sampler = Sampler.of_kind(kind, len(logits), specs, VOCAB, table)
    uploaded, other = (each.upload(logits.device) for each in (table, neutral))
    assert [(n, x.shape, x.dtype) for n, x in uploaded.items()] == [(n, x.shape, x.dtype) for n, x in other.items()]
    drawn = sampler(logits, uploaded)
    assert len(drawn) == len(logits)
    assert [s.token for s in drawn[: len(specs)]] == [s.token for s in sample(logits[: len(specs)], specs)]


def test_what_a_captured_step_cannot_draw_is_named():
    for spec, reason in (
        (SampleSpec(mask=Allowed([3])), "masks"),
        (SampleSpec(logprobs=0), "log-probabilities"),
        (SampleSpec(top_k=TOP_P_PREFIX + 1), f"top-k of more than {TOP_P_PREFIX}"),
        (SampleSpec(rules=LogitRules(bias=[(3, 1.0)])), "biases and penalties"),
    ):
        assert reason in kind_of([GREEDY, spec], 100_000)
    # A top-k beyond the vocabulary, and filters of a greedy row, filter nothing.
    assert kind_of([SampleSpec(top_k=5000), SampleSpec(temperature=0.0, top_p=0.1)], 384) == Kind(draws=True)


class Allowed:
    """A mask of the tokens `allowed`."""

    def __init__(self, allowed: list[int]):
        self._allowed = allowed

    def fill(self, row: np.ndarray) -> None:
        bits = np.zeros(len(row) * 32, bool)
        bits[self._allowed] = True
        row &= np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_masks_are_logits_of_minus_infinity(logits, everywhere, temperature, sample):
    """A mask comes before bias, penalties and filters; log-probabilities are of the distribution without it."""
    allowed = [[7, 8, 31, 32, VOCAB - 1], [0, 63, 64], [5], *([[1, 2, 3]] * 5)]
    theirs, specs, unmasked = logits.clone(), [], []
    for row, tokens in enumerate(allowed):
        rules = LogitRules(bias=[(9, 50.0), (tokens[0], -2.0)]) if row % 2 else None
        mask = Allowed(tokens) if everywhere or row % 3 else None
        if mask:
            forbidden = torch.ones(VOCAB, dtype=torch.bool)
            forbidden[tokens] = False
            theirs[row, forbidden] = -math.inf
        specs.append(SampleSpec(temperature, top_k=2, seed=row, logprobs=1, rules=rules, mask=mask))
        unmasked.append(SampleSpec(temperature, top_k=2, seed=row, rules=rules))
    ours = sample(logits, specs)
    assert [s.token for s in ours] == [s.token for s in sample(theirs, unmasked)]
    assert all(s.token in a for s, a, spec in zip(ours, allowed, specs, strict=True) if spec.mask)
    logprobs = logits.double().log_softmax(dim=1)
    want = [logprobs[i, s.token].item() for i, s in enumerate(ours)]
    assert [s.logprob for s in ours] == pytest.approx(want, abs=1e-5)


def test_a_mask_that_allows_nothing_fails_its_row_alone(logits, sample):
    specs = [SampleSpec(temperature=i % 2, seed=i, mask=Allowed([]) if i in (1, 2) else None) for i in range(8)]
    sampled = sample(logits, specs)
    assert [s.token == -1 for s in sampled] == [i in (1, 2) for i in range(8)]
    assert all("allow no next token" in sampled[i].error for i in (1, 2))
