"""The S-Part over links to a real R-engine, against transformers on the same checkpoint.

Every result is compared with one forward pass of transformers in fp32 over the whole text, however the S-Part got the
text: in one prompt or many, token by token, several tokens at once, over one link or three.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from models.checkpoints import (
    FAMILIES,
    MIXTURES,
    STATEFUL,
    VARIANTS,
    beside_vision,
    make_checkpoint,
    reference,
    several_modes,
)
from models.spart_steps import EXACT, GREEDY, interleaved, linked, run, staged_bytes, text
from quick import quick
from safetensors.torch import load_file, save_file

from fastdecode.spart import Model, SPart, load_model
from fastdecode.spart.exchange import SlotViews, link_rows, make_exchange
from fastdecode.spart.int4.balance import balance_for
from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch, StepOutput
from fastdecode.spart.step.penalties import LogitRules
from fastdecode.transports.base import CallRefused, LinkDown

SLOTS = 12  # most sequences of a test whose model's layers keep states


def expected_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]: row i predicts token i + 1."""
    with torch.no_grad():
        return reference(directory)(torch.tensor([tokens])).logits[0]


def assert_close(got: torch.Tensor, want: torch.Tensor, budget: float = EXACT) -> None:
    error = ((got - want).abs().max() / want.std()).item()
    assert error < budget, f"off by {error:.2e} standard deviations of the logits, budget {budget:.0e}"


@dataclass
class Text:
    """A text that is fed piece by piece, and the logits every piece's last token must have."""

    link: int
    seq_index: int
    tokens: list[int]
    want: torch.Tensor
    pos: int = 0
    prompt: int = 0  # tokens before it go in as prompt chunks
    errors: list[float] = field(default_factory=list)

    def chunk(self, n: int) -> Chunk:
        prefill = self.pos < self.prompt
        if prefill:
            n = min(n, self.prompt - self.pos)
        tokens = self.tokens[self.pos : self.pos + n]
        more = prefill and self.pos + n < self.prompt
        self.pos += len(tokens)
        sample = None if more else GREEDY
        pos, state = self.pos - len(tokens), self.seq_index
        return Chunk(self.link, self.seq_index, 1, pos, tokens, prefill, sample, state=state)

    def check(self, logits: torch.Tensor) -> None:
        want = self.want[self.pos - 1]
        self.errors.append(((logits - want).abs().max() / self.want.std()).item())


def feed(spart: SPart, slot: int, pieces: list[tuple[Text, int]]):
    """A step that feeds `n` tokens of each text, in the order the contract asks for. Returns it and how to check it."""
    chunks = [(t, t.chunk(n)) for t, n in pieces]
    chunks.sort(key=lambda pair: (pair[1].prefill, pair[1].link))

    def check(output: StepOutput) -> None:
        sampled = [t for t, chunk in chunks if chunk.sample]
        for t, logits in zip(sampled, output.logits, strict=True):
            t.check(logits)
        tokens = [s.token for s in output.sampled if s is not None]
        assert tokens == output.logits.argmax(dim=1).tolist()

    return spart.step(StepBatch(slot, [chunk for _, chunk in chunks]), keep_logits=True), check


# -- equal to transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", quick(VARIANTS, *FAMILIES, *MIXTURES, *STATEFUL))
async def test_logits_equal_transformers(variant, tmp_path):
    """Six prompts in one step, without padding; then all of them token by token past a page's end."""
    directory = make_checkpoint(variant)
    model = load_model(directory, dtype="fp32")
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=SLOTS)
        texts = []
        for seq_index, n in enumerate([1, 2, 17, 60, 64, 130]):
            tokens = text(n + 8, seed=seq_index)
            texts.append(Text(0, seq_index, tokens, expected_logits(directory, tokens), prompt=n))
        for _ in range(9):
            step, check = feed(spart, 0, [(t, t.prompt if t.pos == 0 else 1) for t in texts])
            check(run(step))
    # The scores of this Gemma are large: the error of transformers in fp32 is half of EXACT.
    assert max(error for t in texts for error in t.errors) < (2 * EXACT if variant == "gemma" else EXACT)
    assert all(len(t.errors) == 9 for t in texts)


@pytest.mark.parametrize("variant", [*FAMILIES, *MIXTURES, *STATEFUL])
async def test_greedy_tokens_equal_transformers(variant, tmp_path):
    directory = make_checkpoint(variant)
    model, theirs = load_model(directory, dtype="fp32"), reference(directory)
    theirs.generation_config.eos_token_id = None
    prompts = [text(n, seed=n) for n in (1, 7, 64, 600)]
    n_new = 64
    async with linked(model, tmp_path, n=2) as links:
        spart = SPart(model, links, state_slots=SLOTS)
        ours = [list(p) for p in prompts]
        chunks = [Chunk(i // 2, i, 1, 0, p, True, GREEDY, state=i) for i, p in enumerate(prompts)]
        for _ in range(n_new):
            output = run(spart.step(StepBatch(0, chunks)))
            for tokens, sampled in zip(ours, output.sampled, strict=True):
                tokens.append(sampled.token)
            chunks = [Chunk(i // 2, i, 1, len(t) - 1, t[-1:], False, GREEDY, state=i) for i, t in enumerate(ours)]
    for prompt, tokens in zip(prompts, ours, strict=True):
        want = theirs.generate(torch.tensor([prompt]), max_new_tokens=n_new, do_sample=False, use_cache=True)
        assert tokens == want[0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.01])
async def test_tokens_that_a_generation_config_suppresses_are_never_drawn(temperature, tmp_path):
    directory, prompt = tmp_path / "model", text(20)
    shutil.copytree(make_checkpoint("llama-gqa"), directory)
    likely = expected_logits(directory, prompt)[-1].topk(5).indices.tolist()
    (directory / "generation_config.json").write_text(json.dumps({"suppress_tokens": [*likely, -1, 100_000]}))
    model = load_model(directory, dtype="fp32")
    async with linked(model, tmp_path) as links:
        chunk = Chunk(0, 0, 1, 0, prompt, True, replace(GREEDY, temperature=temperature))
        [sampled] = run(SPart(model, links).step(StepBatch(0, [chunk]))).sampled
    want = reference(directory).generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False)
    assert sampled.token == want[0, -1] not in likely


class OnlyToken(NamedTuple):
    """A TokenMask that allows one token."""

    token: int

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = 0
        row[self.token // 32] = np.int32(1 << self.token % 32)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_a_suppressed_token_that_is_penalised_is_drawn_where_no_other_is_allowed(temperature, tmp_path):
    directory, forced = tmp_path / "model", 40
    shutil.copytree(make_checkpoint("llama-gqa"), directory)
    (directory / "generation_config.json").write_text(json.dumps({"suppress_tokens": [forced]}))
    model = load_model(directory, dtype="fp32")
    rules = LogitRules(repetition=100.0, prompt=[forced])
    spec = SampleSpec(temperature, rules=rules, mask=OnlyToken(forced))
    async with linked(model, tmp_path) as links:
        chunk = Chunk(0, 0, 1, 0, [forced], True, spec)
        [sampled] = run(SPart(model, links).step(StepBatch(0, [chunk]))).sampled
    assert sampled.token == forced


@pytest.mark.parametrize("variant", ["qwen3.5", "qwen3.5-moe", "gemma3", "glm4-moe"])
async def test_the_text_part_of_a_model_with_vision(variant, tmp_path):
    theirs = beside_vision(make_checkpoint(variant), tmp_path / "m")
    await check_text_part(theirs, tmp_path)


@pytest.mark.parametrize(
    "model_type",
    ["mistral3", "llava", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"],
)
async def test_the_text_part_of_other_models_with_vision(model_type, tmp_path):
    await check_text_part(several_modes(model_type, tmp_path / "m"), tmp_path)


@pytest.mark.parametrize(("model_type", "variant"), [("gemma4", "gemma4-e"), ("gemma4_unified", "gemma4")])
async def test_the_text_part_of_gemma_4(model_type, variant, tmp_path):
    text_part = reference(make_checkpoint(variant)).config
    text_part.model_type = f"{model_type}_text"
    await check_text_part(several_modes(model_type, tmp_path / "m", text_part), tmp_path)


async def test_the_text_part_of_ministral_3(tmp_path):
    text_part = reference(make_checkpoint("ministral3")).config
    await check_text_part(several_modes("mistral3", tmp_path / "m", text_part), tmp_path)


async def test_stacks_of_experts_that_are_published_transposed(tmp_path):
    """As Qwen3-VL-MoE is published: [experts, in, gate and up] and [experts, in, out]."""
    theirs = several_modes("qwen3_vl_moe", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    layers = theirs.model.language_model.layers
    for name in [name for name in tensors if ".experts." in name]:
        experts = layers[int(name.split("layers.")[1].split(".")[0])].mlp.experts
        tensors[name] = getattr(experts, name.rpartition(".")[2]).data.transpose(1, 2).contiguous()
    save_file(tensors, path)
    await check_text_part(theirs, tmp_path)


async def test_the_names_that_transformers_itself_has_for_a_text_part(tmp_path):
    theirs = several_modes("mistral3", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = {n.replace("language_model.model.", "model.language_model."): t for n, t in load_file(path).items()}
    assert any(name.startswith("model.language_model.") for name in tensors)
    save_file(tensors, path)
    await check_text_part(theirs, tmp_path)


async def test_a_text_part_without_a_configuration_of_its_own(tmp_path):
    """As Qwen2-VL and Qwen2.5-VL were published."""
    theirs = several_modes("qwen2_5_vl", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config.pop("text_config") | config))
    await check_text_part(theirs, tmp_path)


async def check_text_part(theirs, tmp_path):
    """The native decoder generates the tokens that `theirs`, whose checkpoint is in tmp_path / "m", does."""
    model, prompt = load_model(tmp_path / "m", dtype="fp32"), text(70)
    tokens = list(prompt)
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=1)
        for pos in (0, *range(70, 85)):
            chunk = Chunk(0, 0, 1, pos, tokens[pos:], pos == 0, GREEDY)
            tokens.append(run(spart.step(StepBatch(0, [chunk]))).sampled[0].token)
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert tokens == want[0].tolist()


@pytest.mark.parametrize("variant", [*FAMILIES, *STATEFUL, "qwen2-window"])
@pytest.mark.parametrize(
    "sizes",
    [[1] * 90, [89, 1], [1, 89], [30, 30, 30], [15, 16, 17, 18, 24]],
    ids=["one by one", "all but one", "one first", "thirds", "around the window"],
)
async def test_a_prompt_in_chunks(variant, sizes, tmp_path):
    directory = make_checkpoint(variant)
    model, tokens = load_model(directory, dtype="fp32"), text(90)
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=SLOTS)
        whole = Text(0, 0, tokens, expected_logits(directory, tokens), prompt=len(tokens))
        for n in sizes:
            step, check = feed(spart, 0, [(whole, n)])
            check(run(step))
            assert (staged_bytes(spart._prompts) > 0) == (whole.pos < 90)
    assert len(whole.errors) == 1 and whole.errors[0] < EXACT


@pytest.mark.parametrize("variant", [*FAMILIES, *STATEFUL, "opt-projected"])
async def test_several_tokens_at_once_attend_causally_on_the_r_node(variant, tmp_path):
    directory = make_checkpoint(variant)
    model, tokens = load_model(directory, dtype="fp32"), text(150)
    want = expected_logits(directory, tokens)
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=SLOTS)
        texts = [Text(0, seq_index, tokens, want, prompt=prompt) for seq_index, prompt in enumerate([0, 1, 40])]
        for n in (1, 30, 5, 64, 2):
            step, check = feed(spart, 0, [(t, n) for t in texts])
            check(run(step))
    assert max(error for t in texts for error in t.errors) < EXACT


@pytest.mark.parametrize(
    ("variant", "scheme"),
    [("llama-gqa", "tcp"), ("qwen3.5", "tcp"), *((variant, "shm") for variant in (*FAMILIES, *STATEFUL, "gpt-oss"))],
)
async def test_any_mixture_of_work_gives_the_same_logits(variant, scheme, tmp_path):
    """Twelve texts on three R-nodes in two mini-batches whose layers are interleaved: prompts in chunks, single tokens,
    several tokens, in random combinations."""
    directory = make_checkpoint(variant)
    model, chance = load_model(directory, dtype="fp32"), random.Random(5)
    async with linked(model, tmp_path, n=3, scheme=scheme, max_rows=128) as links:
        spart = SPart(model, links, state_slots=SLOTS)
        slots: list[list[Text]] = [[], []]
        for seq_index in range(12):
            tokens = text(chance.randint(20, 100), seed=seq_index)
            prompt = chance.randint(1, len(tokens))
            slots[seq_index % 2].append(
                Text(seq_index % 3, seq_index, tokens, expected_logits(directory, tokens), prompt=prompt)
            )
        texts = slots[0] + slots[1]
        while any(t.pos < len(t.tokens) for t in texts):
            work = []
            for slot, members in enumerate(slots):
                busy = [t for t in members if t.pos < len(t.tokens)]
                if busy:
                    chosen = chance.sample(busy, chance.randint(1, len(busy)))
                    work.append(feed(spart, slot, [(t, chance.choice([1, 1, 3, 20])) for t in chosen]))
            for (_, check), output in zip(work, interleaved([step for step, _ in work]), strict=True):
                check(output)
    assert max(error for t in texts for error in t.errors) < EXACT
    assert all(t.errors for t in texts)
    assert staged_bytes(spart._prompts) == 0


async def test_sampled_tokens_do_not_depend_on_the_rest_of_the_batch(tmp_path):
    model = load_model(make_checkpoint("qwen3"), dtype="fp32")

    async def draw(company: int) -> list[int]:
        (tmp_path / str(company)).mkdir()
        async with linked(model, tmp_path / str(company)) as links:
            spart, drawn = SPart(model, links), []
            texts = [text(9, seed=i) for i in range(company + 1)]
            for index in range(20):
                chunks = []
                for seq_index, tokens in enumerate(texts):
                    first = index == 0
                    spec = SampleSpec(temperature=1.0, top_p=0.9, seed=seq_index, index=index)
                    pos = 0 if first else len(tokens) - 1
                    chunks.append(Chunk(0, seq_index, 1, pos, tokens[pos:], first, spec))
                for tokens, sampled in zip(texts, run(spart.step(StepBatch(0, chunks))).sampled, strict=True):
                    tokens.append(sampled.token)
                drawn.append(texts[0][-1])
            return drawn

    assert await draw(0) == await draw(7)


# -- what a smaller format costs --------------------------------------------------------------------------------------

#: Root mean square error of teacher-forced logits, in their standard deviations. The random checkpoints are far more
#: sensitive than trained ones: their attention is nearly one-hot, so a small error in a score changes what is read.
KV_BUDGET = {"fp16": 2e-3, "int8": 5e-2}
DTYPE_BUDGET = {"bf16": 5e-2, "fp16": 1e-2}


async def teacher_forced_rms(directory: Path, model: Model, tmp_path: Path, kv_dtype: str) -> float:
    tokens = text(120)
    want = expected_logits(directory, tokens)
    async with linked(model, tmp_path, kv_dtype=kv_dtype) as links:
        spart, got = SPart(model, links), []
        for pos, token in enumerate(tokens):
            chunk = Chunk(0, 0, 1, pos, [token], False, GREEDY)
            got.append(run(spart.step(StepBatch(0, [chunk]), keep_logits=True)).logits[0])
    return ((torch.stack(got) - want).square().mean().sqrt() / want.std()).item()


@pytest.mark.parametrize("kv_dtype", KV_BUDGET)
@pytest.mark.parametrize("variant", [*FAMILIES, "llama-mqa", "llama-mha"])
async def test_smaller_caches_stay_within_budget(variant, kv_dtype, tmp_path):
    directory = make_checkpoint(variant)
    error = await teacher_forced_rms(directory, load_model(directory, dtype="fp32"), tmp_path, kv_dtype)
    print(f"{variant} {kv_dtype}: {error:.2e}")
    assert EXACT < error < KV_BUDGET[kv_dtype]


@pytest.mark.parametrize("variant", ["gemma3", "gemma4", "gemma4-e"])
async def test_balanced_heads_change_no_logit(variant, tmp_path):
    """Layers have matrices of different sizes, or those of the layer whose K and V they share."""
    directory = make_checkpoint(variant)
    model = load_model(directory, dtype="fp32")
    balance_for(model, "int4", text(512, seed=9))
    assert all(layer.balance is not None for layer in model.weights.layers)
    assert await teacher_forced_rms(directory, model, tmp_path, "fp32") < 1e-3


@pytest.mark.parametrize("dtype", DTYPE_BUDGET)
@pytest.mark.parametrize("variant", FAMILIES)
async def test_smaller_weights_and_activations_stay_within_budget(variant, dtype, tmp_path):
    directory = make_checkpoint(variant)
    error = await teacher_forced_rms(directory, load_model(directory, dtype=dtype), tmp_path, "fp32")
    print(f"{variant} {dtype}: {error:.2e}")
    assert EXACT < error < DTYPE_BUDGET[dtype]


# -- where the rows are -----------------------------------------------------------------------------------------------


async def test_with_one_link_the_rows_are_the_slot_itself(tmp_path):
    model = load_model(make_checkpoint("llama-gqa"), dtype="fp32")
    async with linked(model, tmp_path, n=2) as links:
        views = {i: SlotViews(link, 1) for i, link in enumerate(links)}
        chunks = [Chunk(0, 0, 1, 5, [7], False, GREEDY), Chunk(0, 1, 1, 0, [7] * 3, True, GREEDY)]
        exchange = make_exchange(1, link_rows(chunks, views), torch.device("cpu"), None)
        y = links[0].layout
        start = torch.frombuffer(links[0].region, dtype=torch.uint8).data_ptr() + y.slot(1)
        assert [x.data_ptr() - start for x in (exchange.q, exchange.kv, exchange.o)] == [y.q, y.kv, y.o]
        assert [len(exchange.q), len(exchange.kv), len(exchange.o)] == [4, 4, 4]
        both = link_rows([chunks[0], Chunk(1, 0, 1, 5, [7], False, GREEDY)], views)
        apart = make_exchange(1, both, torch.device("cpu"), None)
        assert not start <= apart.q.data_ptr() < start + y.slot_bytes


async def test_step_reports_where_its_time_went(tmp_path):
    model = load_model(make_checkpoint("llama-gqa"), dtype="fp32")
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links)
        prompt = run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 0, text(40), True, GREEDY)])))
        assert prompt.kv_bytes == 0 and prompt.s_seconds > 0
        token = run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 40, [5], False, GREEDY)])))
        row = 2 * model.config.n_kv_heads * model.config.head_size * 4
        assert 41 * row * model.config.n_layers <= token.kv_bytes <= 128 * row * model.config.n_layers
        assert token.s_seconds > 0 and token.r_wait_seconds > 0 and token.logits is None


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "has no chunks"),
        ([Chunk(0, 0, 1, 0, [], True, GREEDY)], "has no tokens"),
        ([Chunk(0, 0, 1, 0, [384], True, GREEDY)], "vocabulary of 384"),
        ([Chunk(0, 0, 1, 0, [-1], True, GREEDY)], "vocabulary of 384"),
        ([Chunk(0, 0, 1, 0, [5] * 65, True, GREEDY)], "65 rows for a link that takes 64"),
        ([Chunk(0, 0, 1, 0, [5], True, GREEDY), Chunk(0, 1, 1, 0, [5], False, GREEDY)], "not in order"),
        ([Chunk(1, 0, 1, 0, [5], False, GREEDY), Chunk(0, 1, 1, 0, [5], False, GREEDY)], "not in order"),
        ([Chunk(0, 0, 1, 7, [5], True, GREEDY)], "first tokens are not staged"),
        ([Chunk(0, 0, 1, 1024, [5], False, GREEDY)], "outside the model's 1024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_batch_that_breaks_the_rules_is_refused_before_anything_is_sent(chunks, message, tmp_path):
    model = load_model(make_checkpoint("opt"), dtype="fp32")
    async with linked(model, tmp_path, n=2, max_rows=64) as links:
        spart = SPart(model, links)
        with pytest.raises(ValueError, match=message):
            run(spart.step(StepBatch(0, chunks)))
        assert [(await link.stats())["calls"] for link in links] == [0, 0]
        assert run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 0, [5], True, GREEDY)]))).sampled[0].token >= 0


async def test_a_chunk_out_of_turn_is_refused(tmp_path):
    model = load_model(make_checkpoint("qwen2"), dtype="fp32")
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links)
        run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 0, text(10), True, None)])))
        with pytest.raises(ValueError, match="goes on at 12, expected at 10"):
            run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 12, text(10), True, None)])))


async def test_a_link_of_another_geometry_is_refused(tmp_path):
    model, other = (
        load_model(make_checkpoint("qwen2"), dtype="fp32"),
        load_model(make_checkpoint("qwen3"), dtype="fp32"),
    )
    async with linked(other, tmp_path) as links:
        with pytest.raises(ValueError, match="the model needs"):
            run(SPart(model, links).step(StepBatch(0, [Chunk(0, 0, 1, 0, [5], True, GREEDY)])))


async def test_a_refused_step_costs_the_other_links_nothing(tmp_path):
    """Link 1 refuses (the sequence is not there); the step goes on over link 0, and both slots can be used again."""
    directory = make_checkpoint("llama-gqa")
    model, tokens = load_model(directory, dtype="fp32"), text(6)
    async with linked(model, tmp_path, n=2) as links:
        spart = SPart(model, links)
        run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 0, tokens[:4], True, GREEDY)])))
        chunks = [Chunk(0, 0, 1, 4, tokens[4:5], False, GREEDY), Chunk(1, 3, 1, 17, [9], False, GREEDY)]
        output = run(spart.step(StepBatch(0, chunks), keep_logits=True))
        assert_close(output.logits[0], expected_logits(directory, tokens[:5])[-1])
        assert list(output.failures) == list(output.link_costs.keys() ^ set(links)) == [links[1]]
        assert isinstance(output.failures[links[1]], CallRefused)
        with pytest.raises(CallRefused) as refusal:  # no link is left
            run(spart.step(StepBatch(0, chunks[1:])))
        assert refusal.value.link is links[1]
        output = run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 5, tokens[5:], False, GREEDY)]), keep_logits=True))
    assert_close(output.logits[0], expected_logits(directory, tokens)[-1])


async def test_a_link_that_is_lost_before_its_first_step_costs_the_other_links_nothing(tmp_path):
    directory = make_checkpoint("llama-gqa")
    model, tokens = load_model(directory, dtype="fp32"), text(5)
    async with linked(model, tmp_path, n=2) as links:
        spart = SPart(model, links)
        await links[1].close()  # its region is released
        chunks = [Chunk(i, 0, 1, 0, tokens, True, GREEDY) for i in (0, 1)]
        output = run(spart.step(StepBatch(0, chunks), keep_logits=True))
        assert_close(output.logits[0], expected_logits(directory, tokens)[-1])
        assert list(output.failures) == [links[1]] and isinstance(output.failures[links[1]], LinkDown)


async def test_a_step_goes_on_without_an_r_node_that_is_lost(tmp_path):
    model = load_model(make_checkpoint("llama-gqa"), dtype="fp32")
    async with linked(model, tmp_path, n=2) as links:
        spart = SPart(model, links)
        chunks = [Chunk(0, 0, 1, 0, text(5), True, None), Chunk(1, 0, 1, 0, text(5), True, None)]
        step = spart.step(StepBatch(0, chunks))
        next(step)
        await links[1].close()
        output = run(step)
        assert isinstance(output.failures.pop(links[1]), LinkDown) and not output.failures
        assert staged_bytes(spart._prompts) > 0  # of the prompt whose R-node lives
        spart.drop(0, 0, 1)
        assert staged_bytes(spart._prompts) == 0
        assert run(spart.step(StepBatch(0, [Chunk(0, 2, 1, 0, text(5), True, GREEDY)]))).sampled[0].token >= 0


async def test_a_step_that_is_abandoned_leaves_nothing_behind(tmp_path):
    directory = make_checkpoint("mistral")
    model, tokens = load_model(directory, dtype="fp32"), text(40)
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links)
        step = spart.step(StepBatch(0, [Chunk(0, 0, 1, 0, tokens, True, None)]))
        next(step)
        assert staged_bytes(spart._prompts) > 0
        step.close()
        assert staged_bytes(spart._prompts) == 0
        output = run(spart.step(StepBatch(0, [Chunk(0, 1, 1, 0, tokens, True, GREEDY)]), keep_logits=True))
    assert_close(output.logits[0], expected_logits(directory, tokens)[-1])


async def test_an_aborted_prompt_is_dropped(tmp_path):
    model = load_model(make_checkpoint("mistral"), dtype="fp32")
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links)
        for seq_index in (0, 1):
            run(spart.step(StepBatch(0, [Chunk(0, seq_index, 1, 0, text(40), True, None)])))
        both = staged_bytes(spart._prompts)
        spart.drop(0, 0, 1)
        spart.drop(0, 0, 1)
        assert staged_bytes(spart._prompts) == both // 2
        run(spart.step(StepBatch(0, [Chunk(0, 1, 1, 40, text(3), True, GREEDY)])))
        assert staged_bytes(spart._prompts) == 0


async def test_a_replaced_link_is_used_from_the_next_step(tmp_path):
    directory = make_checkpoint("llama-gqa")
    model, tokens = load_model(directory, dtype="fp32"), text(30)
    async with linked(model, tmp_path, n=2) as links:
        spart = SPart(model, [links[0]])
        run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 0, tokens, True, GREEDY)])))
        spart.links[0] = links[1]
        output = run(spart.step(StepBatch(0, [Chunk(0, 0, 1, 0, tokens, True, GREEDY)]), keep_logits=True))
        assert (await links[1].stats())["calls"] == model.config.n_layers
    assert_close(output.logits[0], expected_logits(directory, tokens)[-1])
