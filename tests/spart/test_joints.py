"""What a CPU computes between the attention of two layers: in one call of kernels/decoder, and one by one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from models.checkpoints import VARIANTS, make_checkpoint, make_model
from models.gguf_made import tokenizer_fields, write_gguf
from models.spart_steps import GREEDY, linked, run, text
from quick import quick
from ranks.rank_processes import make_reductions

from fastdecode.kernels import _native
from fastdecode.spart import ModelConfig, SPart, load_model, read_config
from fastdecode.spart.decoder import layer_pass
from fastdecode.spart.decoder.block_ops import RowHeads
from fastdecode.spart.decoder.cuda_ops import make_block_ops
from fastdecode.spart.decoder.experts import MLP
from fastdecode.spart.decoder.joints import JointRows, LayerJoints, make_joints, why_no_joints
from fastdecode.spart.decoder.layer_pass import DecoderLayers, DecoderPass
from fastdecode.spart.decoder.rope import Angles
from fastdecode.spart.decoder.weights import Balance, Layer, Norm
from fastdecode.spart.linears.dense16 import Linear16
from fastdecode.spart.ranks.reduction import Reduction
from fastdecode.spart.step.batch import Chunk, StepBatch

CPU = torch.device("cpu")
VECTOR_ISAS = [isa for isa in _native.isa_supported() if isa != "scalar"]
#: Checkpoints, the weights they are loaded with, and whether they have joints.
MODELS = {
    ("llama-bf16", "dense"): True,
    ("llama-fp16", "dense"): True,
    ("llama-gqa", "dense"): False,  # kernels/ has no fp32 weights
    ("llama-gqa", "int8"): True,
    ("llama-gqa", "int4"): True,
    ("llama-llama3", "int8"): True,  # with biases
    ("qwen3", "int4"): True,  # with norms of the heads
    ("granite", "int8"): True,  # what a block adds is scaled
    ("phi3-longrope", "int8"): True,
    ("gemma", "int8"): True,  # with GELU
    ("gemma3", "int4"): True,  # with norms of what a block adds, and two kinds of RoPE
    ("smollm3", "int8"): True,  # with layers whose heads are not turned
    ("ministral3", "int4"): True,  # with queries scaled by their position
    ("olmo2", "int4"): True,  # with norms of what a block adds alone, and of all heads as one
    ("olmo3", "int8"): True,
    ("mixtral", "int8"): True,
    ("gpt-oss", "int4"): True,  # with a clamped gate
    ("glm4-moe", "int8"): True,  # with a shared expert, and a layer without experts
    ("qwen3-next", "int8"): True,  # with states, and gates of Q heads and of the shared expert
    ("qwen3-next-bf16", "dense"): True,
    ("qwen3.5-last", "int4"): True,  # with a state behind the last layer
    ("gemma4", "int8"): True,  # with layers of other heads, and K as V
    ("gemma4-e", "int8"): True,  # with layers that attend to K and V of others, and a per-layer embedding
    ("gemma4-moe", "int4"): True,  # with a mixture that has norms of its own
    ("deepseek-v2", "int8"): True,  # with latent attention
    ("deepseek-v2-lite", "int4"): True,  # whose queries are made of no row of their own
    ("glm4-moe-lite-halves", "dense"): True,  # with RoPE of halves
    ("deepseek-v3", "int8"): False,  # a checkpoint in fp32
    ("opt", "int8"): False,
}
#: Every variant is among them, because why_no_joints could lack an option that only one variant sets.
FORMS = [*MODELS, *((name, "int8") for name in VARIANTS if (name, "int8") not in MODELS)]


@pytest.fixture(params=VECTOR_ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    return request.param


def load(name, weights):
    return load_model(make_checkpoint(name), device=CPU, dtype="fp32", weights=weights)


def joints_of(model):
    return DecoderLayers(model).joints


async def logits(spart_of, tmp_path, model) -> list[torch.Tensor]:
    """The logits of five steps: a prompt, a decode beside a prompt, a decode beside a part of a prompt, two decodes,
    and guesses beside a decode."""
    tokens = text(40)
    first = Chunk(0, 0, 1, 0, tokens[:20], True, GREEDY)
    steps = [
        [first],
        [Chunk(0, 0, 1, 20, tokens[20:21], False, GREEDY), Chunk(0, 1, 2, 0, tokens[:30], True, GREEDY, state=1)],
        [Chunk(0, 0, 1, 21, tokens[21:23], False, GREEDY), Chunk(0, 2, 3, 0, tokens[:9], True, None, state=2)],
        [Chunk(0, 0, 1, 23, tokens[23:24], False, GREEDY), Chunk(0, 1, 2, 30, tokens[30:31], False, GREEDY, state=1)],
        [
            Chunk(0, 0, 1, 24, tokens[24:27], False, GREEDY, states_after=((1, 3), (2, 4), (3, 0))),
            Chunk(0, 1, 2, 31, tokens[31:32], False, GREEDY, state=1),
        ],
    ]
    tmp_path.mkdir(exist_ok=True)
    async with linked(model, tmp_path, kv_dtype="fp16") as links:
        spart = spart_of(model, links, state_slots=5)
        return [run(spart.step(StepBatch(0, chunks), keep_logits=True)).logits for chunks in steps]


@pytest.fixture
def counted(monkeypatch):
    """The joints that were run, and whether each one was done."""
    done: list[bool] = []
    real = JointRows.run

    def counting(self, joint):
        done.append(real(self, joint))
        return done[-1]

    monkeypatch.setattr(JointRows, "run", counting)
    return done


@pytest.mark.skipif(not VECTOR_ISAS, reason="an ISA without vectors")
@pytest.mark.parametrize("form", quick(FORMS, ("llama-gqa", "int8")), ids="-".join)
async def test_a_joint_gives_the_results_of_its_operations(form, isa, tmp_path, counted, monkeypatch):
    model = load(*form)
    with_joints = await logits(SPart, tmp_path / "a", model)
    n_joints = len(with_joints) * (model.config.n_layers + 1) if joints_of(model) else 0
    assert counted == [True] * n_joints
    monkeypatch.setattr(layer_pass, "make_joints", lambda *_: None)
    one_by_one = await logits(SPart, tmp_path / "b", model)
    assert len(counted) == n_joints
    for got, want in zip(with_joints, one_by_one, strict=True):
        if model.config.output_gate:  # torch has another sigmoid, which may round a number of an int8 row the other way
            assert (got - want).abs().max() < (1e-4 if form[1] == "dense" else 0.1) * want.std()
        else:
            assert torch.equal(got, want)


@pytest.mark.skipif(not VECTOR_ISAS, reason="an ISA without vectors")
async def test_a_joint_multiplies_heads_as_a_file_stores_them(isa, tmp_path, monkeypatch):
    fields = tokenizer_fields(make_checkpoint("glm4-moe-lite"), "glm4")
    write_gguf(tmp_path / "m.gguf", make_model("glm4-moe-lite"), "Q8_0", fields)
    model = load_model(tmp_path / "m.gguf", device=CPU, dtype="fp32")
    assert joints_of(model)
    with_joints = await logits(SPart, tmp_path / "a", model)
    monkeypatch.setattr(layer_pass, "make_joints", lambda *_: None)
    one_by_one = await logits(SPart, tmp_path / "b", model)
    assert all(torch.equal(got, want) for got, want in zip(with_joints, one_by_one, strict=True))


@pytest.mark.skipif(not VECTOR_ISAS, reason="an ISA without vectors")
@pytest.mark.parametrize(("name", "weights", "has"), [(*model, has) for model, has in MODELS.items()])
def test_models_of_other_blocks_have_no_joints(name, weights, has):
    assert (joints_of(load(name, weights)) is not None) == has


@pytest.mark.skipif(not VECTOR_ISAS, reason="an ISA without vectors")
@pytest.mark.parametrize(
    ("name", "weights", "dtype", "reason"),
    [
        ("opt", "int8", "fp32", "RMS norms"),
        ("deepseek-v3", "int8", "fp32", "latent attention in fp32"),
        ("mixtral", "int8", "bf16", "experts of bf16 rows"),
        ("llama-gqa", "dense", "fp32", "products of fp32 rows"),
        ("llama-gqa", "int8", "bf16", "products of bf16 rows"),
    ],
)
def test_a_model_without_joints_says_why(name, weights, dtype, reason):
    model = load_model(make_checkpoint(name), device=CPU, dtype=dtype, weights=weights)
    assert reason in why_no_joints(model.config, model.weights.layers, DecoderLayers(model).ops)


@pytest.mark.skipif(not VECTOR_ISAS, reason="an ISA without vectors")
async def test_balanced_layers_are_computed_one_by_one(tmp_path, counted):
    model = load("llama-gqa", "int8")
    c = model.config
    eye = torch.eye(c.head_size).repeat(c.n_kv_heads, 1, 1)
    model.weights.layers[1].balance = Balance(None, None, eye, eye)
    balanced = await logits(SPart, tmp_path / "a", model)
    assert counted == 5 * [True, False, False, *[True] * (c.n_layers - 2)]
    model.weights.layers[1].balance = None
    for got, want in zip(balanced, await logits(SPart, tmp_path / "b", model), strict=True):
        assert (got - want).abs().max() < 1e-4 * want.std()


@pytest.mark.skipif(not VECTOR_ISAS, reason="an ISA without vectors")
def test_linears_of_other_sizes_are_refused():
    model = load("llama-gqa", "int8")
    ops, layers = make_block_ops(model.config, CPU, torch.float32), model.weights.layers
    for wrong in ({"hidden_size": 32}, {"intermediate_size": 128}):
        with pytest.raises(ValueError, match=r"has|have"):
            make_joints(replace(model.config, **wrong), layers, ops)
    for heads in ({"n_kv": 1}, {"n_q": 2}, {"k_size": 8}):
        wrong_heads = [replace(layer, heads=layer.heads._replace(**heads)) for layer in layers]
        with pytest.raises(ValueError, match=r"has|have"):
            make_joints(model.config, wrong_heads, ops)


def cut(config: ModelConfig, n: int) -> ModelConfig:
    """The model of one of `n` ranks: a share of the heads and of the MLP's columns."""
    return replace(
        config,
        n_q_heads=config.n_q_heads // n,
        n_kv_heads=config.n_kv_heads // n,
        intermediate_size=config.intermediate_size // n,
    )


def random_layers(config: ModelConfig, n: int, rank: int) -> list[Layer]:
    """One rank's share of two layers with random weights, whose whole is the same for every `n`."""
    generator, size = torch.Generator().manual_seed(1), config.head_size

    def share(outs: int, ins: int, blocks: Sequence[int] = (), columns: bool = False) -> Linear16:
        """The rank's columns, or its rows of each of the matrix's blocks of rows."""
        weight = (torch.randn(outs, ins, generator=generator) * ins**-0.5).bfloat16()
        parts = [weight.chunk(n, dim=1)[rank]] if columns else [x.chunk(n)[rank] for x in weight.split(list(blocks))]
        return Linear16(torch.cat(parts))

    def norm() -> Norm:
        return Norm(torch.randn(config.hidden_size, generator=generator), None)

    hidden, inner, q, kv = (
        config.hidden_size,
        config.intermediate_size,
        config.n_q_heads * size,
        config.n_kv_heads * size,
    )
    return [
        Layer(
            attention_norm=norm(),
            mlp_norm=norm(),
            heads=cut(config, n).heads_of(i),
            qkv=share(q + 2 * kv, hidden, (q, kv, kv)),
            q_norm=None,
            k_norm=None,
            o=share(hidden, q, columns=True),
            sinks=None,
            mlp=MLP(share(2 * inner, hidden, (inner, inner)), share(hidden, inner, columns=True)),
            attention_post_norm=norm() if config.post_norms else None,
            mlp_post_norm=norm() if config.post_norms else None,
            second_rope=config.second_rope is not None and i == 0,
        )
        for i in range(2)
    ]


def pass_joints(config: ModelConfig, n: int, rank: int, reduction: Reduction | None) -> list[torch.Tensor]:
    """The rank's Q and KV rows of both layers, and the residual stream behind them, which all ranks have."""
    layers, cut_config = random_layers(config, n, rank), cut(config, n)
    joints = LayerJoints(cut_config, layers, "fp32", reduction, gelu=config.activation != "silu")
    generator, rows, pairs = torch.Generator().manual_seed(2), 5, config.head_size // 2
    x = torch.randn(rows, config.hidden_size, generator=generator)
    o = torch.randn(rows, config.n_q_heads * config.head_size, generator=generator).chunk(n, dim=1)[rank].contiguous()
    angles, second_angles = (Angles(*each) for each in torch.randn(2, 4, rows, 1, pairs, generator=generator))
    q = torch.empty_like(o)
    kv = torch.empty(rows, 2 * cut_config.n_kv_heads * config.head_size)
    joint_rows, results = joints.rows(x, o, angles, RowHeads(q, kv, cut_config.heads_of(0)), second_angles), []
    for joint in range(len(layers) + 1):
        assert joint_rows.run(joint)
        results += [q.clone(), *kv.clone().chunk(2, dim=1)]
    return [*results, x]


@pytest.mark.skipif(not VECTOR_ISAS, reason="an ISA without vectors")
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ranks_compute_what_one_computes(n, name):
    config = replace(read_config(make_checkpoint(name)), n_q_heads=8, n_kv_heads=4, residual_scale=0.5)
    whole = pass_joints(config, 1, 0, None)
    with ThreadPoolExecutor(n) as pool:
        ranks = list(pool.map(partial(pass_joints, config, n), range(n), make_reductions(n)))
    for i, want in enumerate(whole):
        shares = [results[i] for results in ranks]
        if i == len(whole) - 1:
            assert all(torch.equal(share, shares[0]) for share in shares)
            shares = shares[:1]
        assert (torch.cat(shares, dim=1) - want).abs().max() < 1e-5 * want.std()


@pytest.mark.skipif(not VECTOR_ISAS, reason="an ISA without vectors")
async def test_the_last_layer_finishes_only_rows_with_a_token_to_draw(tmp_path, monkeypatch):
    model, rows = load("llama-gqa", "int8"), []
    drop = DecoderPass.drop_rows

    def drop_rows(self, last):
        drop(self, last)
        rows.append(len(self.x))

    monkeypatch.setattr(DecoderPass, "drop_rows", drop_rows)
    await logits(SPart, tmp_path, model)
    assert rows == [1, 2, 1, 2, 4]  # a step that only decodes keeps its rows as they are
