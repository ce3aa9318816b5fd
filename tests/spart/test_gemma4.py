"""Gemma 4: what the configurations of its checkpoints mean, and which keys are refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from typing import Any

import pytest
import torch
from models.checkpoints import make_checkpoint
from models.spart_steps import GREEDY, linked, run
from safetensors.torch import load_file, save_file

from fastdecode.spart import CheckpointError, ModelConfig, SPart, load_model
from fastdecode.spart.checkpoints.config import PerLayerEmbedding, Rope
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.decoder.layer_pass import DecoderPass
from fastdecode.spart.linears.dense import DenseEmbedding
from fastdecode.spart.step.batch import Chunk, StepBatch

#: A configuration in the form of Gemma 4 E2B's: one of a model with a text part, in which layers share K and V.
E2B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "final_logit_softcapping": 30.0,
    },
}


def config_of(variant: str, **changes: Any) -> ModelConfig:
    """The configuration of a variant's checkpoint with other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint(variant) / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


def test_the_keys_of_a_small_model():
    config = make_config(E2B)
    assert (config.n_q_heads, config.vocab_size, config.eos_token_ids, config.tied) == (8, 262144, (1,), True)
    windowed, full = (8, 1, 256, 256), (8, 1, 512, 512)
    assert config.options.heads == ((windowed,) * 4 + (full,)) * 7
    assert config.windows == (512, 512, 512, 512, 0) * 7
    assert config.kv_layers == (*range(15), *((13, 13, 13, 13, 14) * 4))
    assert config.mlp_sizes == (6144,) * 15 + (12288,) * 20
    assert config.per_layer == PerLayerEmbedding(262144, 256)
    assert config.rope == Rope(theta=1e6, kind="proportional", fraction=0.25)
    assert config.second_rope == Rope(theta=1e4)
    assert (config.softmax_scale, config.logit_softcap, config.k_as_v_layers) == (1.0, 30.0, frozenset())


def test_the_unified_models_have_defaults_of_their_own():
    text = {"model_type": "gemma4_unified_text", "num_hidden_layers": 6, "attention_k_eq_v": True}
    names = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
    config = make_config(names | {"text_config": {**text, "num_global_key_value_heads": 1}})
    assert config.windows == (1024,) * 5 + (0,)
    assert config.options.heads == ((8, 4, 256, 256),) * 5 + ((8, 1, 512, 512),)
    assert (config.max_positions, config.per_layer, config.k_as_v_layers) == (262144, None, frozenset([5]))


def test_the_last_layer_sees_all_tokens():
    types = ["full_attention", "sliding_attention"] * 2
    assert config_of("gemma4", layer_types=types, per_layer_config={}).windows == (0, 16, 0, 0)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        ("gemma4", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
        ("gemma4", {"per_layer_config": {"1": {"intermediate_size": 8}}}, "'per_layer_config' has 'intermediate_size'"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 32}}}, "in layers with one RoPE"),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "lacks 'sliding_attention'"),
        ("gemma4-e", {"num_kv_shared_layers": 5}, "'num_kv_shared_layers' is 5, so that no layer of type"),
        ("gemma4-e", {"vocab_size_per_layer_input": 100}, "'vocab_size_per_layer_input' is 100, less than"),
        ("gemma4-moe", {"use_double_wide_mlp": True, "num_kv_shared_layers": 2}, "'use_double_wide_mlp' is not"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(variant, changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(variant, **changes)


def test_keys_and_values_of_layers_that_share_those_of_others_are_left_aside(tmp_path, caplog):
    """As in the published checkpoints; transformers leaves them aside as well."""
    shutil.copytree(make_checkpoint("gemma4-e"), tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    own, shared = (f"model.layers.{i}.self_attn." for i in (2, 4))
    more = {shared + name: tensors[own + name].clone() for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight")}
    assert not more.keys() & tensors.keys()
    save_file(tensors | more, tmp_path / "m/model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        model = load_model(tmp_path / "m", dtype="fp32")
    assert not caplog.records
    assert model.parameters == sum(tensor.numel() for tensor in tensors.values())


def test_a_table_of_16_bits_stays_so(tmp_path):
    """Most of a small model is this table."""
    shutil.copytree(make_checkpoint("gemma4-e"), tmp_path / "m")
    name, tensors = "model.embed_tokens_per_layer.weight", load_file(tmp_path / "m/model.safetensors")
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, tmp_path / "m/model.safetensors", {"format": "pt"})
    table = load_model(tmp_path / "m", dtype="fp32").weights.per_layer.table
    assert isinstance(table, DenseEmbedding) and table.nbytes == tensors[name].nbytes
    rows = table(torch.tensor([5, 3]))
    assert rows.dtype is torch.float32 and torch.equal(rows, tensors[name][[5, 3]].float())


@pytest.mark.parametrize("attending", [0, 2])
async def test_rows_that_serve_no_later_layer_are_dropped(attending, tmp_path, monkeypatch):
    """The last layers attend to K and V of earlier ones, so only rows before a drawn token pass them."""
    model = load_model(make_checkpoint("gemma4-e"), dtype="fp32")
    rows: list[int] = []
    finish = DecoderPass.finish
    monkeypatch.setattr(DecoderPass, "finish", lambda self, layer: (rows.append(len(self.x)), finish(self, layer)))
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links)
        decoding = [Chunk(0, i, 1, 0, [7, 8 + i], False, GREEDY) for i in range(attending)]
        prompts = [(5, 9, 6, 4, 8), (9, 5, 6), (3, 7)]
        samples = [GREEDY, None, GREEDY]
        chunks = [
            Chunk(0, 4 + i, 1, 0, list(p), True, s) for i, (p, s) in enumerate(zip(prompts, samples, strict=True))
        ]
        run(spart.step(StepBatch(slot=0, chunks=decoding + chunks)))
    first = model.config.last_storing_layer
    assert rows == [10 + 2 * attending] * first + [2 + 2 * attending] * (model.config.n_layers - first)
