"""Models of the transformers backend that ranks share, against transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.checkpoints import make_checkpoint, reference, several_modes
from models.hf_models import SHARED, make_config, save_model
from models.spart_steps import EXACT
from ranks.in_threads import HFRanks, error_of

from fastdecode.spart.backend import Backend, choose_backend
from fastdecode.spart.checkpoints.config import CheckpointError

CHECKPOINTS = {"mistral": 2, "llama-mha": 4, "granite-bias": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("model_type", SHARED)
async def test_logits_equal_transformers(model_type: str, checkpoints: Path, tmp_path: Path) -> None:
    directory = save_model(model_type, checkpoints, spread=0.2)
    assert await error_of(HFRanks(directory, 2, dtype="fp32"), reference(directory), tmp_path) < EXACT


@pytest.mark.parametrize(("name", "n"), CHECKPOINTS.items())
async def test_logits_of_checkpoints_with_biases_and_of_four_ranks(name: str, n: int, tmp_path: Path) -> None:
    directory = make_checkpoint(name)
    assert await error_of(HFRanks(directory, n, dtype="fp32"), reference(directory), tmp_path) < EXACT


async def test_the_text_part_of_a_model_of_several_modes(tmp_path: Path) -> None:
    theirs = several_modes("gemma3", tmp_path / "m", make_config("gemma3_text"))
    assert await error_of(HFRanks(tmp_path / "m", 2, dtype="fp32"), theirs, tmp_path) < EXACT


@pytest.mark.parametrize("weights", ["int8", "int4"])
async def test_weights_that_are_rounded_at_load_lose_no_more_than_at_one_rank(weights: str, tmp_path: Path) -> None:
    directory = make_checkpoint("mistral")
    one, two = [
        await error_of(HFRanks(directory, n, dtype="fp32", weights=weights), reference(directory), tmp_path / str(n))
        for n in (1, 2)
    ]
    assert EXACT < two < 1.5 * one


def test_a_rank_takes_its_part_of_the_memory() -> None:
    directory = make_checkpoint("llama-mha")
    whole, *ranks = [HFRanks(directory, n, dtype="fp32").models for n in (1, 2, 4)]
    embedding = whole[0].config.vocab_size * whole[0].widths[0] * 4
    for models in ranks:
        assert all(model.parameters == whole[0].parameters for model in models)
        parts = [model.weight_bytes - embedding for model in models]
        assert max(parts) < 1.1 * (whole[0].weight_bytes - embedding) / len(models)


@pytest.mark.parametrize(
    ("model_type", "n", "why"),
    [
        ("llama", 4, "4 ranks cannot share the 4 query heads and 2 KV heads .*; possible numbers of ranks are 2$"),
        ("gpt2", 2, "transformers has no plan for its tensor parallelism"),
        ("llama4_text", 2, r"'model.layers.0.feed_forward.experts.gate_up_proj' .* has it as 'packed_rowwise'"),
        ("granite_swa", 2, "cannot share 'model.layers.0.self_attn' .* has it as 'local_params'"),
        ("phimoe", 2, "its attention is not cut by heads"),
        ("olmo2", 2, r"cannot share 'model.layers.0.self_attn.q_proj' .* has it as 'colwise_gather_output'"),
        ("qwen3_next", 2, "ranks do not share layers that keep states"),
        ("exaone", 2, "it stores 'model.layers.0.self_attn.q_proj.weight' under another name"),
        ("mixtral", 2, "it stores 'model.layers.0.mlp.experts.gate_up_proj' under another name"),
        ("minicpm3", 3, "3 ranks cannot share the 4 query heads .*; possible numbers of ranks are 2, 4$"),
    ],
)
def test_models_that_ranks_cannot_share(model_type: str, n: int, why: str, checkpoints: Path) -> None:
    backend = choose_backend("transformers", save_model(model_type, checkpoints))
    with pytest.raises(CheckpointError, match=why):
        refuse(backend, n)


def refuse(backend: Backend, n: int) -> None:
    if reason := backend.why_not_shared(n):
        raise CheckpointError(reason)


def test_an_mlp_whose_activations_depend_on_all_columns_is_refused(tmp_path: Path) -> None:
    config = make_config("gemma3n_text")
    config.activation_sparsity_pattern = [0.5] * config.num_hidden_layers
    config.architectures = ["Gemma3nForCausalLM"]
    config.save_pretrained(tmp_path)
    backend = choose_backend("transformers", tmp_path)
    with pytest.raises(CheckpointError, match="an MLP's activations depend on all of its columns"):
        refuse(backend, 2)
