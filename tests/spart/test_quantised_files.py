"""Quantised safetensors: each format, packed here by its published layout, against transformers with the same numbers.

Where the package compressed-tensors is installed, its own compressors write the files of its formats as well.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from models.checkpoints import make_checkpoint
from models.quantised_checks import EXACT, edit_config, error_of_logits
from models.quantised_made import FORMATS, GPTQ, compressed_tensors, make, nvfp4, pack
from quick import quick
from safetensors.torch import load_file, save_file

from fastdecode.gguf.file import ModelSource
from fastdecode.spart import CheckpointError, load_model, read_config
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.linears.stack import PermutedLinear
from fastdecode.spart.loader import open_checkpoint


@pytest.mark.parametrize("name", quick(FORMATS, "gptq-4", "awq", "W4A16"))
async def test_logits_of_each_format(name, tmp_path):
    theirs = make(tmp_path / "m", name)
    assert await error_of_logits(tmp_path / "m", theirs, tmp_path) < FORMATS[name][2]


@pytest.mark.parametrize(
    "name", ["FP8", "fp8-blocks", "fp8-tensor", "fbgemm_fp8", "gptq-group-16", "nvfp4", "modelopt-nvfp4"]
)
def test_numbers_that_are_rounded_again_move_by_half_a_step(name, tmp_path):
    theirs = make(tmp_path / "m", name)
    config = read_config(tmp_path / "m")
    checkpoint = open_checkpoint(ModelSource.open(tmp_path / "m"), config)
    assert not any("scale" in each for each in checkpoint.names()), "a tensor that no parameter needs is a warning"
    for module in ("self_attn.k_proj", "mlp.down_proj"):
        matrix = checkpoint.matrix(f"model.layers.1.{module}.weight")
        want = theirs.get_submodule(f"model.layers.1.{module}").weight
        steps = want.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 127
        assert ((matrix.dequantise() - want).abs() <= steps * 0.501).all()
        assert matrix.bits == 8


@pytest.mark.parametrize("source", ["qwen2", "phi3", "opt", "ernie4.5"])
async def test_biases_and_stacks_of_other_families(source, tmp_path):
    theirs = make(tmp_path / "m", "gptq-4", source)
    assert await error_of_logits(tmp_path / "m", theirs, tmp_path) < EXACT


#: Linears of hybrids that real checkpoints leave in 16 bits.
IGNORED = ("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate")


@pytest.mark.parametrize("name", ["gptq-4", "awq", "W4A16", "W8A8", "FP8", "modelopt-nvfp4"])
async def test_models_whose_layers_keep_states(name, tmp_path):
    """The last group of the inputs of `out_proj` is cut off: 144 of them, in groups of 32."""
    theirs = make(tmp_path / "m", name, "qwen3.5", IGNORED)
    assert await error_of_logits(tmp_path / "m", theirs, tmp_path) < FORMATS[name][2]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("qwen3.5-moe", "W4A16"),
        ("qwen3-next", "W4A16"),
        ("glm4-moe", "W4A16"),
        ("glm4-moe", "FP8"),
        ("minimax-m2", "fp8-blocks"),
        ("deepseek-v3", "fp8-blocks"),
        ("deepseek-v2-lite", "W4A16"),
    ],
)
async def test_mixtures(source, name, tmp_path):
    """Shared experts of Qwen have 48 inputs, whose second group of 32 is cut off."""
    theirs = make(tmp_path / "m", name, source, IGNORED)
    assert await error_of_logits(tmp_path / "m", theirs, tmp_path) < FORMATS[name][2]


@pytest.mark.parametrize("name", ["W8A16", "fp8-blocks"])
def test_a_small_matrix_that_is_quantised_is_dequantised(name, tmp_path):
    theirs = make(tmp_path / "m", name, "qwen3.5-moe")
    gate = load_model(tmp_path / "m", dtype="fp32").weights.blocks[0].mlp.shared.gate
    want = theirs.model.layers[0].mlp.shared_expert_gate.weight
    torch.testing.assert_close(gate, want.detach(), rtol=0, atol=want.abs().max().item() / 127)


def test_memory_holds_the_numbers_of_the_file(tmp_path):
    make(tmp_path / "m", "gptq-4")
    float_bytes = load_model(make_checkpoint("llama-mha"), dtype="fp32").weight_bytes
    model = load_model(tmp_path / "m", dtype="fp32")
    rest = sum(
        load_file(tmp_path / "m" / "model.safetensors")[n].nbytes
        for n in ("lm_head.weight", "model.embed_tokens.weight")
    )
    assert model.weight_bytes - rest < (float_bytes - rest) * 6 / 32  # 4 bits, scale, zero point and a unit a row


def test_parts_of_one_order_stay_one_matrix(tmp_path):
    """Q, K and V have orders of their own here; a single matrix is permuted as a whole."""
    make(tmp_path / "m", "gptq-4-act-order")
    assert isinstance(load_model(tmp_path / "m").weights.layers[0].o, PermutedLinear)


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_numbers_packed_by_compressed_tensors_are_unpacked(bits, symmetric, tmp_path):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    q = torch.randint(-(1 << bits - 1), 1 << bits - 1, (6, 64), dtype=torch.int8)
    ours = pack(q.long() + (1 << bits - 1), bits)
    assert torch.equal(pack_to_int32(q, bits), ours)
    zeros = torch.randint(-(1 << bits - 1), 1 << bits - 1, (32, 3), dtype=torch.int8)
    theirs = pack_to_int32(zeros, bits, packed_dim=0)
    assert torch.equal(theirs, pack(zeros.T.long() + (1 << bits - 1), bits).T)


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
def test_numbers_of_nvfp4_are_those_of_compressed_tensors(tmp_path):
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    tensors, back = nvfp4(torch.randn(8, 64))
    theirs = unpack_fp4_from_uint8(tensors["weight_packed"], 8, 64).float().unflatten(1, (-1, 16))
    scales = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    torch.testing.assert_close((theirs * scales[:, :, None]).flatten(1), back)


# ---- refusals ----


@pytest.mark.quick
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quantised by 'hqq', which is not supported; known are compressed-tensors, gptq"),
        ({"bits": 4}, "quantised by None"),
        (GPTQ | {"bits": 3}, "quantised to 3 bits by gptq; known are 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ format 'marlin' is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version 'gemv' is not supported"),
        (compressed_tensors("mxfp8-quantized", {"num_bits": 8}), "format 'mxfp8-quantized' is not supported"),
        (compressed_tensors("pack-quantized", {"num_bits": 4, "type": "float"}), "float of 4 bits"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt algorithm 'W4A8_AWQ' is not supported"),
        (compressed_tensors("pack-quantized", {"num_bits": 2}), "int of 2 bits"),
        (
            compressed_tensors("pack-quantized", {"num_bits": 4}) | {"sparsity_config": {"format": "sparse-24"}},
            "sparse",
        ),
        (compressed_tensors("pack-quantized", {"num_bits": 4}) | {"transform_config": {"a": 1}}, "rotates its weights"),
        (compressed_tensors("pack-quantized", {"num_bits": 4}) | {"config_groups": {}}, "no config_groups"),
        (compressed_tensors("pack-quantized", {"num_bits": 4}) | {"config_groups": {"a": 1}}, "group without weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_read_is_named(config, message, tmp_path):
    directory = Path(shutil.copytree(make_checkpoint("llama-mha"), tmp_path / "m"))
    edit_config(directory, quantization_config=config)
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)
    with pytest.raises(CheckpointError, match=f"native decoder: .*{message}.*transformers backend: .*is quantised by"):
        choose_backend("auto", directory)


@pytest.mark.parametrize(
    ("name", "config", "tensor", "change"),
    [
        ("gptq-4", {"group_size": 48}, "scales", lambda t: t),
        ("W4A16", {}, "weight_scale", lambda t: t[:, :0]),
        ("W4A16", {}, "weight_shape", lambda t: t[0]),
        ("fp8-blocks", {}, "weight_scale_inv", lambda t: t[:, :1]),
        ("fp8-blocks", {"weight_block_size": [64, 64]}, "weight_scale_inv", lambda t: t),
        ("fp8-tensor", {}, "weight_scale_inv", lambda t: t.expand(3, 1)),
        ("fp8-tensor", {}, "weight_scale_inv", lambda t: t.reshape(1)[:0]),
    ],
)
def test_scales_that_do_not_fit_are_refused(name, config, tensor, change, tmp_path):
    make(tmp_path / "m", name)
    path, module = tmp_path / "m" / "model.safetensors", "model.layers.1.mlp.down_proj"
    tensors = load_file(path)
    tensors[f"{module}.{tensor}"] = change(tensors[f"{module}.{tensor}"]).contiguous()
    save_file(tensors, path)
    edit_config(tmp_path / "m", quantization_config=FORMATS[name][0] | config)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.\d\.(mlp|self_attn)\.\w+\.weight"):
        load_model(tmp_path / "m")


def test_rows_that_the_shape_does_not_have_are_refused(tmp_path):
    make(tmp_path / "m", "W4A16")
    path, module = tmp_path / "m" / "model.safetensors", "model.layers.1.mlp.down_proj"
    tensors = load_file(path)
    for name in (f"{module}.weight_packed", f"{module}.weight_scale"):
        tensors[name] = tensors[name][:8].contiguous()
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"'{module}\.weight_packed' has 8 rows, its weight_shape is \(64, 96\)"):
        load_model(tmp_path / "m")


def test_a_reordered_matrix_without_its_order_is_refused(tmp_path):
    make(tmp_path / "m", "gptq-4-act-order")
    path = tmp_path / "m" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.endswith("g_idx")}, path)
    with pytest.raises(CheckpointError, match=r"lacks the tensor '.*\.g_idx'"):
        load_model(tmp_path / "m")


def test_tensors_that_do_not_fit_are_named(tmp_path):
    make(tmp_path / "m", "gptq-4")
    path = tmp_path / "m" / "model.safetensors"
    whole = load_file(path)
    module = "model.layers.1.mlp.down_proj"

    def changed(name: str, tensor: torch.Tensor | None) -> None:
        tensors = {k: v for k, v in whole.items() if k != f"{module}.{name}"}
        save_file(tensors if tensor is None else tensors | {f"{module}.{name}": tensor}, path)

    for name in ("scales", "qzeros"):
        changed(name, None)
        with pytest.raises(CheckpointError, match=rf"lacks the tensor 'model\.layers\.1\.mlp\.down_proj\.{name}'"):
            load_model(tmp_path / "m")
    changed("qweight", whole[f"{module}.qweight"][:-1].contiguous())
    with pytest.raises(CheckpointError, match=r"down_proj\.weight' has shape \(64, 88\), config\.json says \(64, 96\)"):
        load_model(tmp_path / "m")
    changed("scales", whole[f"{module}.scales"][:, :-1].contiguous())
    with pytest.raises(
        CheckpointError, match=r"quantised tensors of 'model\.layers\.1\.mlp\.down_proj\.weight' do not"
    ):
        load_model(tmp_path / "m")
    changed("qweight", None)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        load_model(tmp_path / "m")
    changed("g_idx", torch.full((96,), 77, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="groups from 77 to 77"):
        load_model(tmp_path / "m")
