"""Steps that are alone on their links: one call of C runs all layers, with the results of layer after layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.checkpoints import make_checkpoint
from models.spart_steps import GREEDY, linked, run, text
from ranks.rank_processes import make_reductions

from fastdecode.kernels import _native
from fastdecode.spart import SPart, load_model
from fastdecode.spart.decoder.layer_pass import DecoderLayers
from fastdecode.spart.decoder.weights import Balance
from fastdecode.spart.exchange.base import Exchange
from fastdecode.spart.prefill.prompt_attention import PackedAttention
from fastdecode.spart.ranks.reduction import RankError
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.transports.base import LinkDown

pytestmark = pytest.mark.skipif(_native.isa_supported() == ("scalar",), reason="an ISA without vectors has no joints")


@pytest.fixture(scope="module")
def model():
    return load_model(make_checkpoint("llama-gqa"), device=torch.device("cpu"), dtype="fp32", weights="int8")


@pytest.fixture
def calls(monkeypatch):
    """The first layers of the calls that run several."""
    first: list[int] = []
    real = Exchange.run_layers

    def counting(self, layers, from_layer, *rest):
        first.append(from_layer)
        return real(self, layers, from_layer, *rest)

    monkeypatch.setattr(Exchange, "run_layers", counting)
    return first


def steps(n_links: int) -> list[list[Chunk]]:
    """A prompt for every link, two steps that decode, and two with the chunks of a longer prompt for every link."""
    links = range(n_links)
    prompts = [Chunk(i, 0, 1, 0, text(20 + i), True, GREEDY, state=i) for i in links]
    decodes = [[Chunk(i, 0, 1, 20 + i + step, [5 + step], False, GREEDY, state=i) for i in links] for step in range(4)]
    first = [Chunk(i, 1, 1, 0, text(70 + i), True, None, state=n_links + i) for i in links]
    second = [Chunk(i, 1, 1, 70 + i, text(9), True, GREEDY, state=n_links + i) for i in links]
    return [prompts, *decodes[:2], decodes[2] + first, decodes[3] + second]


async def outputs(model, tmp_path, n_links: int, scheme: str, n_slots: int, stand_in: bool = False):
    tmp_path.mkdir()
    async with linked(model, tmp_path, n=n_links, scheme=scheme, n_slots=n_slots, stand_in=stand_in) as links:
        spart = SPart(model, links, state_slots=2 * n_links)
        return [run(spart.step(StepBatch(0, chunks), keep_logits=True)) for chunks in steps(n_links)], spart.timeline


@pytest.mark.parametrize(("scheme", "stand_in"), [("shm", False), ("shm", True), ("tcp", False)])
@pytest.mark.parametrize("n_links", [1, 2])
async def test_the_results_are_those_of_layer_after_layer(model, n_links, scheme, stand_in, tmp_path, calls):
    n_intervals = model.config.n_layers + 1
    layer_after_layer, _ = await outputs(model, tmp_path / "a", n_links, scheme, n_slots=2)
    assert calls == []
    at_once, timeline = await outputs(model, tmp_path / "b", n_links, scheme, 1, stand_in)
    assert calls == [0] * 5
    for got, want in zip(at_once, layer_after_layer, strict=True):
        assert torch.equal(got.logits, want.logits)
        assert got.kv_bytes == want.kv_bytes
    for i, output in enumerate(at_once):
        intervals = timeline.last((len(at_once) - i) * n_intervals)[:n_intervals]
        assert [interval.number for interval in intervals] == list(range(n_intervals))
        times = [time for each in intervals for time in (each.asked, each.replied, each.ended)]
        assert times == sorted(times)
        assert output.s_seconds == pytest.approx(sum(each.ended - each.replied for each in intervals))
        assert output.r_wait_seconds == pytest.approx(sum(each.replied - each.asked for each in intervals))


@pytest.mark.parametrize(("name", "weights"), [("qwen2-window", "int8"), ("mistral", "int4"), ("llama-bf16", "dense")])
async def test_prompts_attend_as_layer_after_layer(name, weights, tmp_path, calls):
    model = load_model(make_checkpoint(name), device=torch.device("cpu"), weights=weights)
    layer_after_layer, _ = await outputs(model, tmp_path / "a", 1, "shm", n_slots=2)
    at_once, _ = await outputs(model, tmp_path / "b", 1, "shm", n_slots=1)
    for got, want in zip(at_once, layer_after_layer, strict=True):
        assert torch.equal(got.logits, want.logits)
    assert bool(calls) == (DecoderLayers(model).joints is not None)


@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen3.5", "qwen3-next", "qwen3.5-last", "gemma4", "gemma4-e", "gemma4-moe", "deepseek-v2"],
)
async def test_layers_of_other_kinds_run_at_once(name, tmp_path, calls):
    model = load_model(make_checkpoint(name), device=torch.device("cpu"), dtype="fp32", weights="int8")
    layer_after_layer, _ = await outputs(model, tmp_path / "a", 2, "shm", n_slots=2)
    at_once, _ = await outputs(model, tmp_path / "b", 2, "shm", n_slots=1)
    assert len(calls) == (2 if model.config.shares_kv else 5)  # C attends no prompts to K and V of other layers
    for got, want in zip(at_once, layer_after_layer, strict=True):
        assert torch.equal(got.logits, want.logits)


@pytest.mark.parametrize(("change", "match"), [
    ({"rows": 5}, "beyond the step's"),
    ({"first": 1}, "beyond the step's"),
    ({"pos": 61}, "beyond its blocks"),
    ({"pos": 2**62}, "beyond its blocks"),
    ({"pos": -1}, "before 0"),
    ({"rows": 0}, "no rows"),
    ({"head_words": -1}, "negative"),
    ({"window": -1}, "negative"),
    ({"segment": -1}, "negative"),
    ({"layers": 1}, "the model's layers"),
])  # fmt: skip
def test_a_chunk_beyond_the_step_or_its_blocks_is_refused(model, change, match):
    joints, attention = DecoderLayers(model).joints, PackedAttention(model.dtype)
    good = {"first": 0, "rows": 4, "pos": 60, "layers": model.config.n_layers}
    good |= {"head_words": attention.words(model.config.heads_of(0), 64), "window": 0, "segment": 0}

    def capsule(first, rows, pos, layers, *layer):
        step = (*[0] * 10, (0,) * 4, 0, (0,) * 4, 0, (), (0,) * 6, 4, 1)
        return joints._native.spart_layers(step, (attention.native, 1.0, [(first, rows, pos, [(0, *layer)] * layers)]))

    assert capsule(*good.values())
    with pytest.raises(ValueError, match=match):
        capsule(*(good | change).values())


def test_prompts_of_another_kind_are_refused(model):
    joints, attention = DecoderLayers(model).joints._native, PackedAttention(model.dtype).native
    step = (*[0] * 10, (0,) * 4, 0, (0,) * 4, 0, (), (0,) * 6, 4, 1)
    with pytest.raises(TypeError, match="of the joints' dtype"):
        joints.spart_layers(step, (PackedAttention(torch.float16).native, 1.0, []))
    for prompts in ([attention, 1.0, []], (attention, 1.0, [[0, 4, 0, []]]), (joints, 1.0, [])):
        with pytest.raises(TypeError):
            joints.spart_layers(step, prompts)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize("step", [1, 4])
async def test_an_r_node_that_is_lost_on_the_way_costs_the_others_nothing(model, scheme, step, tmp_path, monkeypatch):
    wants, _ = await outputs(model, tmp_path / "whole", 2, scheme, n_slots=1)
    async with linked(model, tmp_path, n=2, scheme=scheme, n_slots=1) as links:
        spart = SPart(model, links)
        for chunks in steps(2)[:step]:
            run(spart.step(StepBatch(0, chunks)))
        lossy = steps(2)[step]
        real, begun = Exchange.run_layers, []

        def losing(self, layers, from_layer, to_layer, timeout):
            if begun:
                return real(self, layers, from_layer, to_layer, timeout)
            begun.append(from_layer)
            times, whole = real(self, layers, from_layer, from_layer + 1, timeout)
            links[1].port.kill("its R-node is gone")
            return times, whole

        monkeypatch.setattr(Exchange, "run_layers", losing)
        output = run(spart.step(StepBatch(0, lossy), keep_logits=True))
        assert list(output.failures) == [links[1]] and isinstance(output.failures[links[1]], LinkDown)
        kept = [i for i, chunk in enumerate(chunk for chunk in lossy if chunk.sample) if chunk.link == 0]
        assert torch.equal(output.logits[kept], wants[step].logits[kept])
        begun.clear()
        links[0].port.kill("nor is this one there")
        with pytest.raises(LinkDown):
            run(spart.step(StepBatch(0, steps(2)[1])))


async def test_a_lost_rank_ends_the_step(model, tmp_path, calls, monkeypatch):
    (reduction,) = make_reductions(1)
    model = replace(model, reduction=reduction)
    async with linked(model, tmp_path, n_slots=1) as links:
        spart = SPart(model, links)
        first, decode, *_ = steps(1)
        run(spart.step(StepBatch(0, first)))
        decoding = spart.step(StepBatch(0, decode))
        real = Exchange.run_layers

        def losing(*args):
            reduction.leave()
            return real(*args)

        monkeypatch.setattr(Exchange, "run_layers", losing)
        with pytest.raises(RankError, match=r"rank 0 \(pid \d+\) has left"):
            run(decoding)
    assert calls == [0, 0]


async def test_a_late_r_node_is_lost(model, tmp_path):
    async with linked(model, tmp_path, n_slots=1) as links:
        spart = SPart(model, links)
        first, decode, *_ = steps(1)
        run(spart.step(StepBatch(0, first)))
        with pytest.raises(LinkDown, match="within"):
            run(spart.step(StepBatch(0, decode, layer_timeout=0.0)))


async def test_balanced_layers_run_one_after_another(model, tmp_path, calls, monkeypatch):
    eye = torch.eye(model.config.head_size).repeat(model.config.n_kv_heads, 1, 1)
    monkeypatch.setattr(model.weights.layers[1], "balance", Balance(None, None, eye, eye))
    await outputs(model, tmp_path / "a", 1, "shm", n_slots=1)
    assert calls == []


async def test_a_lone_step_yields_nothing(model, tmp_path):
    async with linked(model, tmp_path, n_slots=1) as links:
        spart = SPart(model, links)
        first, decode, *_ = steps(1)
        run(spart.step(StepBatch(0, first)))
        with pytest.raises(StopIteration):
            next(spart.step(StepBatch(0, decode)))
