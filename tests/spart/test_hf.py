"""The transformers backend: token-equal to transformers' own generate, for every model type it takes.

The table of types in docs/models.md is written by FASTDECODE_WRITE_DOCS=1 pytest tests/spart/test_hf.py
"""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import several_modes
from models.hf_models import SHARED, TYPES, VOCAB_SIZE, make_config, save_model
from models.spart_steps import GREEDY, interleaved, linked, run
from safetensors.torch import load_file, save_file
from sources.doc_tables import check_table

from fastdecode.daemon.rnode import RNode
from fastdecode.kernels._native import page_bytes, page_sections
from fastdecode.region.contract import KV_DTYPES, MAX_HEAD_SIZE, PAGE_TOKENS
from fastdecode.region.geometry import geometry_tuple
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.hf import indexer
from fastdecode.spart.hf.attention import running
from fastdecode.spart.hf.config import HFConfig
from fastdecode.spart.hf.decoder import HFSPart
from fastdecode.spart.hf.lora import block_linears
from fastdecode.spart.hf.model import load_hf_model
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.transports.registry import connect

#: Why a type cannot be served. Every other type of TYPES must pass.
REFUSED = {
    "doge": "makes an attention mask of its own",
    "deepseek_v4": "do not keep K and V of each token",
    "dory/last loop": "attends 6 times in a step, but keeps K and V of 4 of these only",
    "gpt_neo": "does not go through transformers' attention functions",
    "jetmoe": "has code that depends on the values of activations",
    "mamba": "has no layer that attends",
    "minimax": "keeps states in a cache of its own",
    "openai-gpt": "does not go through transformers' attention functions",
    "recurrent_gemma": "keeps a state in layer 0 in a way that is not supported",
    "rwkv": "keeps states in a cache of its own",
    "xlstm": "keeps states in a cache of its own",
}
SUPPORTED = sorted(TYPES.keys() - REFUSED.keys())
PROMPT_LENGTHS = (1, 7, 40, 600)
CHUNK, NEW_TOKENS = 256, 6


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@torch.inference_mode()
def expected(directory: Path) -> list[list[int]]:
    """What transformers generates, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    return expected_of(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    )


@torch.inference_mode()
def expected_of(model: Any) -> list[list[int]]:
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **options)[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def generate(spart: HFSPart, on_r_node: bool = False) -> list[list[int]]:
    """Greedy tokens of all prompts in two interleaved mini-batches, prompts in chunks of at most CHUNK tokens.

    Prompts are attended on the S-node, or as uncached suffixes are (`on_r_node`).
    """
    sequences = prompts()
    cached = [0] * len(sequences)
    while any(len(s) < n + NEW_TOKENS for s, n in zip(sequences, PROMPT_LENGTHS, strict=True)):
        groups, steps = [], []
        for slot in (0, 1):
            chunks, group = [], []
            for i in range(slot, len(sequences), 2):
                if len(sequences[i]) == PROMPT_LENGTHS[i] + NEW_TOKENS:
                    continue
                prefill = cached[i] < PROMPT_LENGTHS[i] and not on_r_node
                tokens = sequences[i][cached[i] : cached[i] + CHUNK]
                more = cached[i] + len(tokens) < len(sequences[i])
                chunks.append((i, Chunk(0, i, 1, cached[i], tokens, prefill, None if more else GREEDY, state=i)))
                cached[i] += len(tokens)
            chunks.sort(key=lambda pair: pair[1].prefill)
            group = [i for i, _ in chunks]
            if group:
                groups.append(group)
                steps.append(spart.step(StepBatch(slot, [chunk for _, chunk in chunks])))
        for group, output in zip(groups, interleaved(steps), strict=True):
            for i, sampled in zip(group, output.sampled, strict=True):
                if sampled is not None:
                    sequences[i].append(sampled.token)
    return [s[n:] for s, n in zip(sequences, PROMPT_LENGTHS, strict=True)]


async def ours(directory: Path, scheme: str, tmp_path: Path, on_r_node: bool = False) -> list[list[int]]:
    model = load_hf_model(directory, dtype="fp32")
    node = RNode(threads=1, kv_bytes=1 << 26)
    try:
        url = f"shm://{tmp_path}/r" if scheme == "shm" else "tcp://127.0.0.1:0"
        (url,) = await node.serve([url], None)
        hello = model.hello(n_slots=2, max_rows=2 * CHUNK, kv_dtype="fp32", kv_bytes=1 << 25, max_seqs=8)
        link = await connect(url, hello, None)
        try:
            return await asyncio.to_thread(lambda: generate(HFSPart(model, [link], state_slots=4), on_r_node))
        finally:
            await link.close()
    finally:
        await node.close()


@pytest.mark.parametrize(
    ("model_type", "text"), [("gemma3", "gemma3_text"), ("gemma4", "gemma4_text"), ("cohere2_vision", "cohere2")]
)
async def test_the_text_part_of_a_model_of_several_modes(model_type: str, text: str, tmp_path: Path) -> None:
    theirs = several_modes(model_type, tmp_path / "m", make_config(text))
    model = load_hf_model(tmp_path / "m", dtype="fp32")
    assert model.parameters == sum(p.numel() for p in theirs.get_decoder().parameters()) + _head(theirs)
    want = expected_of(theirs)
    del theirs
    assert await ours(tmp_path / "m", "shm", tmp_path) == want


def _head(model: Any) -> int:
    """The parameters of an LM head of its own."""
    return 0 if model.config.get_text_config().tie_word_embeddings else model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize("model_type", SUPPORTED)
async def test_tokens_equal_transformers(model_type: str, checkpoints: Path, tmp_path: Path) -> None:
    directory = save_model(model_type, checkpoints)
    assert await ours(directory, "shm", tmp_path) == expected(directory)


@pytest.mark.parametrize("variant", ["bamba/one group", "granitemoehybrid/one group"])
async def test_norms_with_gates_that_have_one_group(variant: str, checkpoints: Path, tmp_path: Path) -> None:
    """As published checkpoints have them. Without a gate such a norm gives what kernels/decoder gives."""
    directory = save_model(variant, checkpoints)
    assert await ours(directory, "shm", tmp_path) == expected(directory)


async def test_a_step_that_has_ended_is_not_held(checkpoints: Path, tmp_path: Path) -> None:
    """Its logits take memory, and its rows keep the regions of links mapped."""
    model = load_hf_model(save_model("gpt2", checkpoints), dtype="fp32")
    async with linked(model, tmp_path, n_slots=2) as links:
        spart = HFSPart(model, links)
        for sequence, close in enumerate((False, True)):
            step = spart.step(StepBatch(0, [Chunk(0, sequence, 1, 0, [5, 6, 7], False, GREEDY)]))
            next(step)
            forward = weakref.ref(running.forward)
            if close:
                step.close()
            else:
                run(step)
            del step
            assert forward() is None


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt2", "mixtral", "deepseek_v3", "glm_moe_dsa"])
async def test_tokens_equal_transformers_over_tcp(model_type: str, checkpoints: Path, tmp_path: Path) -> None:
    directory = save_model(model_type, checkpoints)
    assert await ours(directory, "tcp", tmp_path) == expected(directory)


@pytest.mark.parametrize(
    "model_type",
    [
        "bamba",
        "deepseek_v2",
        "deepseek_v32",
        "gemma2",
        "gemma4_text",
        "glm_moe_dsa",
        "gpt_oss",
        "llama4_text",
        "mpt",
    ],
)
async def test_prompts_attended_on_the_r_node_give_the_same_tokens(
    model_type: str, checkpoints: Path, tmp_path: Path
) -> None:
    directory = save_model(model_type, checkpoints)
    assert await ours(directory, "shm", tmp_path, on_r_node=True) == expected(directory)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_cannot_be_split_is_refused_before_its_weights_are_read(model_type: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[model_type]):
        HFConfig.from_configs(make_config(model_type), None)


def test_a_type_without_a_text_model_of_its_own_is_refused() -> None:
    from transformers import AutoConfig

    with pytest.raises(CheckpointError, match="'glm4v' has no language model of text alone in transformers"):
        HFConfig.from_configs(AutoConfig.for_model("glm4v"), None)


def test_a_configuration_that_transformers_code_cannot_run_is_refused_with_its_reason() -> None:
    config = make_config("axk1")
    config.head_dim = 16  # RoPE's, where qk_rope_head_dim is 8
    with pytest.raises(CheckpointError, match=r"fails with this config\.json \(.*must match|broadcast"):
        HFConfig.from_configs(config, None)


def test_a_model_that_no_backend_knows_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The native decoder's list of architectures says nothing about why transformers' model cannot be split."""
    with pytest.raises(CheckpointError) as refusal:
        choose_backend("auto", save_model("mamba", tmp_path))
    assert "native decoder" not in str(refusal.value) and len(str(refusal.value)) < 200


@pytest.mark.parametrize("name", ["falcon/multi-query", "deepseek_v32/padded index heads", "mpt/six heads"])
async def test_tokens_of_variants_equal_transformers(name: str, checkpoints: Path, tmp_path: Path) -> None:
    directory = save_model(name, checkpoints)
    assert await ours(directory, "shm", tmp_path) == expected(directory)


def test_adapters_change_no_linear_of_a_module_with_states(checkpoints: Path) -> None:
    """Such a module gets the rows of one sequence, or one row of each, so the adapters' rows would not be its own."""
    linears = block_linears(save_model("bamba", checkpoints))
    assert any(".self_attn.q_proj" in name for name in linears) and not any(".mamba." in name for name in linears)


def test_falcon_with_position_biases_in_bf16_is_refused() -> None:
    with pytest.raises(CheckpointError, match="round their position biases to bf16"):
        HFConfig.from_configs(make_config("falcon/alibi"), None)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_k_and_v_are_stored_once(model_type: str) -> None:
    """The last 2 of 6 layers attend to the K and V of the last layer of their kind that stores them."""
    config = HFConfig.from_configs(make_config(model_type), None)
    assert config.kv_layers == (0, 1, 2, 3, 2, 3)
    sizes = [heads.n_kv * (heads.k_size + heads.v_size) for heads in map(config.heads_of, range(4))]
    geometry, options = config.hello_geometry(1, 1, "fp32"), config.options.stored(config.windows)
    key = geometry_tuple(geometry), KV_DTYPES.index("fp32")
    page, (full, limited, _) = page_bytes(*key, **options), page_sections(*key, **options)
    assert (full + limited) * page == sum(sizes) * 4 * PAGE_TOKENS
    assert full and limited, "layers with and without windows have pages of their own"
    assert len(set(sizes)) == (2 if model_type == "gemma4_text" else 1)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "youtu"])
def test_latent_rows_are_stored_in_place_of_heads(model_type: str, tmp_path: Path) -> None:
    config = HFConfig.from_configs(make_config(model_type), None)
    assert config.heads_of(1) == (4, 1, 16 + 8, 16, True)
    page = page_bytes(geometry_tuple(config.hello_geometry(1, 1, "fp32")), 0, **config.options.stored(config.windows))
    assert page == config.n_layers * (16 + 8) * 4 * PAGE_TOKENS, "V is a part of K, so only K is stored"
    directory = save_model(model_type, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    stored = sum(tensor.numel() for name, tensor in tensors.items() if "e_score" not in name)  # a router's buffer
    assert load_hf_model(directory, dtype="fp32").parameters == stored
    changed = {name.rpartition(".")[2] for name in block_linears(directory)}
    assert "o_proj" in changed and "kv_b_proj" not in changed, "an adapter for a matrix that is absorbed is refused"


def test_layers_with_an_indexer_store_index_keys() -> None:
    config = HFConfig.from_configs(make_config("glm_moe_dsa"), None)
    assert config.options.selections == (1, 2, 2, 1)
    assert (config.index_heads, config.index_size, config.index_topk) == (32, 16, 32)
    page = page_bytes(geometry_tuple(config.hello_geometry(1, 1, "fp32")), 0, **config.options.stored(config.windows))
    assert (4 * 24 + 2 * 16) * 4 * PAGE_TOKENS <= page <= 4 * (24 + 16) * 4 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"index_topk": 5000},
            "selects 5000 tokens by heads of 16 elements; R-nodes take at most 4096",
        ),
        ({"kv_lora_rank": MAX_HEAD_SIZE}, "has latent rows of more than 576 elements or none"),
    ],
)
def test_selections_that_r_nodes_cannot_make_are_refused(changes: dict[str, int], reason: str) -> None:
    config = make_config("deepseek_v32")
    config.update(changes)
    with pytest.raises(CheckpointError, match=reason):
        HFConfig.from_configs(config, None)


def test_an_unknown_indexer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_ROPES", {})
    with pytest.raises(CheckpointError, match="selects the tokens it attends to in an unknown way"):
        HFConfig.from_configs(make_config("deepseek_v32"), None)


def test_small_heads_stay_heads() -> None:
    """One query head has no more elements than the latent row; a row beyond an R-node's heads cannot be stored."""
    few, large = make_config("deepseek_v3"), make_config("deepseek_v3")
    few.num_attention_heads = few.num_key_value_heads = 1
    few.kv_lora_rank = 32  # with RoPE 40 elements, as many as K and V of the head
    large.kv_lora_rank, large.num_attention_heads, large.num_key_value_heads = MAX_HEAD_SIZE, 64, 64
    assert HFConfig.from_configs(few, None).heads_of(0).k_size == 16 + 8
    assert HFConfig.from_configs(few, None).heads_of(0).v_size == 16
    assert HFConfig.from_configs(large, None).heads_of(0).n_kv == 64


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.Config"}}'
    )
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        HFConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: None, r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (
            lambda tensor: tensor[1:],
            r"'model\.layers\.1\.mlp\.up_proj\.weight' has shape \(95, 64\), config\.json says",
        ),
    ],
    ids=["missing", "of another shape"],
)
def test_a_tensor_that_does_not_fit_is_named(change: Any, message: str, tmp_path: Path) -> None:
    directory = save_model("gemma", tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop("model.layers.1.mlp.up_proj.weight"))
    if changed is not None:
        tensors["model.layers.1.mlp.up_proj.weight"] = changed.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    for refuse in (choose_backend("auto", directory).check_tensors, lambda: load_hf_model(directory)):
        with pytest.raises(CheckpointError, match=message):
            refuse()


def test_the_documentation_lists_every_type() -> None:
    lines = ["| model type | served | by ranks | reason |", "|---|---|---|---|"]
    for model_type in sorted(TYPES):
        reason = ""
        if model_type in REFUSED:
            with pytest.raises(CheckpointError) as refusal:
                HFConfig.from_configs(make_config(model_type), None)
            reason = str(refusal.value)
        by_ranks = "yes" if model_type in SHARED else "no"
        lines.append(f"| `{model_type}` | {'no' if reason else 'yes'} | {by_ranks} | {reason} |")
    check_table("models.md", "types", lines)
