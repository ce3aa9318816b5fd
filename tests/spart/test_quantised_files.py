"""Quantised safetensors: each format, packed here by its published layout, against transformers with the same numbers.

Where the package compressed-tensors is installed, its own compressors write the files of its formats as well.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import make_checkpoint, reference
from models.quantised_checks import EXACT, edit_config, error_of_logits
from quick import quick
from safetensors.torch import load_file, save_file

from fastdecode.gguf.file import ModelSource
from fastdecode.spart import CheckpointError, load_model, read_config
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.linears.stack import PermutedLinear
from fastdecode.spart.loader import open_checkpoint

#: As EXACT, with activations in 8 bits, or weights that are rounded to 8 bits again, on tiny random models, whose 64
#: channels average little out.
ROUNDED = 0.2


def pack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers [n, m] -> int32 [n, ceil(m * bits / 32)], the first in the lowest bits."""
    per = 32 // bits
    q = torch.nn.functional.pad(q, (0, -q.shape[1] % per)).to(torch.int64).view(len(q), -1, per)
    words = (q << (torch.arange(per) * bits)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class Rounded:
    """A matrix [out, in] rounded to `bits` with a scale and a zero point for each group of inputs."""

    def __init__(self, weight: torch.Tensor, bits: int, group: int, symmetric: bool, g_idx: torch.Tensor | None = None):
        outs, ins = weight.shape
        group = group if group > 0 else ins
        self.g_idx = torch.arange(ins) // group if g_idx is None else g_idx
        groups = int(self.g_idx.max()) + 1
        most = (1 << bits) - 1
        self.scales, self.zeros = torch.empty(outs, groups), torch.empty(outs, groups, dtype=torch.int64)
        for g in range(groups):
            part = weight[:, self.g_idx == g]
            if symmetric:
                self.scales[:, g], self.zeros[:, g] = part.abs().amax(1) / (most / 2), (most + 1) // 2
            else:
                low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
                self.scales[:, g] = (high - low) / most
                self.zeros[:, g] = (-low / self.scales[:, g]).round().clamp(0, most).long()
        self.scales = self.scales.half().float()
        spread, zeros = self.scales[:, self.g_idx], self.zeros[:, self.g_idx]
        self.q = ((weight / spread).round() + zeros).clamp(0, most).long()
        self.back = (self.q - zeros) * spread


def gptq(weight: torch.Tensor, bits: int, group: int, act_order: bool = False, v2: bool = False) -> tuple[dict, Any]:
    g_idx = None
    if act_order:
        g_idx = (torch.arange(weight.shape[1]) // group)[torch.randperm(weight.shape[1])]
    r = Rounded(weight, bits, group, symmetric=False, g_idx=g_idx)
    if not v2:  # the format cannot say that a zero point is 0: it stores one less
        r.zeros = r.zeros.clamp_min(1)
        r.back = (r.q - r.zeros[:, r.g_idx]) * r.scales[:, r.g_idx]
    tensors = {
        "qweight": pack(r.q, bits).T.contiguous(),
        "qzeros": pack(r.zeros.T - (0 if v2 else 1), bits),
        "scales": r.scales.T.contiguous().half(),
        "g_idx": r.g_idx.to(torch.int32),
    }
    return tensors, r.back


def awq(weight: torch.Tensor, group: int) -> tuple[dict, Any]:
    r = Rounded(weight, 4, group, symmetric=False)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(q: torch.Tensor) -> torch.Tensor:
        return pack(q.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    return {"qweight": words(r.q.T), "qzeros": words(r.zeros.T), "scales": r.scales.T.contiguous().half()}, r.back


def packed(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[dict, Any]:
    r = Rounded(weight, bits, group, symmetric)
    tensors = {
        "weight_packed": pack(r.q, bits),
        "weight_scale": r.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(r.zeros.T, bits).T.contiguous()
    return tensors, r.back


def plain_int8(weight: torch.Tensor, symmetric: bool = True) -> tuple[dict, Any]:
    r = Rounded(weight, 8, -1, symmetric)
    tensors = {"weight": (r.q - 128).to(torch.int8), "weight_scale": r.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (r.zeros - 128).to(torch.int8)
    return tensors, r.back


def fp8(weight: torch.Tensor, grid: int) -> tuple[dict, Any]:
    """`grid`: the side of a block; 1: a scale a row, 0: one for the whole."""
    outs, ins = weight.shape
    rows, columns = (grid, grid) if grid > 1 else (1, ins) if grid else (outs, ins)
    padded = torch.nn.functional.pad(weight, (0, -ins % columns, 0, -outs % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [R, rows, C, columns]
    scales = blocks.abs().amax((1, 3)) / 448
    q = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    back = (q.float() * scales[:, None, :, None]).flatten(0, 1).flatten(1)[:outs, :ins]
    q = q.flatten(0, 1).flatten(1)[:outs, :ins].contiguous()
    name = "weight_scale_inv" if grid > 1 else "weight_scale"
    return {"weight": q, name: scales if grid else scales.reshape(())}, back


def nvfp4(weight: torch.Tensor, modelopt: bool = False) -> tuple[dict, Any]:
    """E2M1 in groups of 16, by NVIDIA's recipe: the largest number of the matrix becomes 448 * 6."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([numbers, -numbers])
    whole = weight.abs().amax() / (448 * 6)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    spread = (scales.float() * whole)[:, :, None]
    q = (groups[..., None] / spread[..., None] - numbers).abs().argmin(3).flatten(1)
    back = (numbers[q].unflatten(1, (-1, 16)) * spread).flatten(1)
    packed = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    if modelopt:
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.ones(())}, back
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / whole).reshape(1)}
    return tensors, back


def _ct(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_W8 = {"num_bits": 8, "strategy": "channel"}
_A8 = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
#: name -> (quantization_config, how a matrix is stored, budget)
FORMATS: dict[str, tuple[dict[str, Any], Any, float]] = {
    "gptq-4": (_GPTQ, lambda w: gptq(w, 4, 32), EXACT),
    "gptq-8": (_GPTQ | {"bits": 8}, lambda w: gptq(w, 8, 32), EXACT),
    "gptq-4-act-order": (_GPTQ | {"desc_act": True}, lambda w: gptq(w, 4, 32, act_order=True), EXACT),
    "gptq-v2": (_GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 4, 32, v2=True), EXACT),
    "gptq-channel": (_GPTQ | {"group_size": -1}, lambda w: gptq(w, 4, -1), EXACT),
    "gptq-group-16": (_GPTQ | {"group_size": 16}, lambda w: gptq(w, 4, 16), ROUNDED),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, lambda w: awq(w, 32), EXACT),
    "W4A16": (_ct("pack-quantized", {"num_bits": 4}), lambda w: packed(w, 4, 32, symmetric=True), EXACT),
    "W4A16-asymmetric": (_ct("pack-quantized", {"num_bits": 4}), lambda w: packed(w, 4, 32, symmetric=False), EXACT),
    "W8A16": (_ct("pack-quantized", _W8), lambda w: packed(w, 8, -1, symmetric=True), EXACT),
    "W8A8": (_ct("int-quantized", _W8, _A8), plain_int8, ROUNDED),
    "W8-asymmetric": (_ct("int-quantized", _W8), lambda w: plain_int8(w, symmetric=False), EXACT),
    "FP8": (_ct("float-quantized", {"num_bits": 8, "type": "float"}), lambda w: fp8(w, 1), ROUNDED),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda w: fp8(w, 32), ROUNDED),
    "fp8-tensor": ({"quant_method": "fp8"}, lambda w: fp8(w, 0), ROUNDED),
    "nvfp4": (_ct("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}), nvfp4, ROUNDED),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda w: nvfp4(w, modelopt=True), ROUNDED),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda w: fp8(w, 0), ROUNDED),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, lambda w: fp8(w, 1), ROUNDED),
}


def make(directory: Path, name: str, source: str = "llama-mha") -> Any:
    """Write a checkpoint in the format `name`; returns transformers' model with the same numbers."""
    config, store, _ = FORMATS[name]
    torch.manual_seed(0)
    shutil.copytree(make_checkpoint(source), directory, dirs_exist_ok=True)
    theirs = reference(directory)
    tensors = load_file(directory / "model.safetensors")
    for module_name, module in theirs.named_modules():
        if type(module) is torch.nn.Linear and module_name != "lm_head":
            weight = tensors.pop(f"{module_name}.weight").float()
            parts, back = store(weight)
            tensors |= {f"{module_name}.{part}": tensor for part, tensor in parts.items()}
            with torch.no_grad():
                module.weight.copy_(back)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    edit_config(directory, quantization_config=config)
    return theirs


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
    for module in ("self_attn.k_proj", "mlp.down_proj"):
        matrix = checkpoint.matrix(f"model.layers.1.{module}.weight")
        want = theirs.get_submodule(f"model.layers.1.{module}").weight
        steps = want.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 127
        assert ((matrix.dequantise() - want).abs() <= steps * 0.501).all()
        assert matrix.bits == 8


@pytest.mark.parametrize("source", ["qwen2", "phi3", "opt"])
async def test_biases_and_stacks_of_other_families(source, tmp_path):
    theirs = make(tmp_path / "m", "gptq-4", source)
    assert await error_of_logits(tmp_path / "m", theirs, tmp_path) < EXACT


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
        (_GPTQ | {"bits": 3}, "quantised to 3 bits by gptq; known are 4, 8"),
        (_GPTQ | {"checkpoint_format": "marlin"}, "GPTQ format 'marlin' is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version 'gemv' is not supported"),
        (_ct("mxfp8-quantized", {"num_bits": 8}), "format 'mxfp8-quantized' is not supported"),
        (_ct("pack-quantized", {"num_bits": 4, "type": "float"}), "float of 4 bits"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt algorithm 'W4A8_AWQ' is not supported"),
        (_ct("pack-quantized", {"num_bits": 2}), "int of 2 bits"),
        (_ct("pack-quantized", {"num_bits": 4}) | {"sparsity_config": {"format": "sparse-24"}}, "sparse"),
        (_ct("pack-quantized", {"num_bits": 4}) | {"transform_config": {"a": 1}}, "rotates its weights"),
        (_ct("pack-quantized", {"num_bits": 4}) | {"config_groups": {}}, "no config_groups"),
        (_ct("pack-quantized", {"num_bits": 4}) | {"config_groups": {"a": 1}}, "group without weights"),
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
