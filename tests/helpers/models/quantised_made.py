"""Quantised safetensors checkpoints, packed here by the published layout of each format."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.checkpoints import make_checkpoint, reference
from models.quantised_checks import EXACT, edit_config

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


def fp8_static(weight: torch.Tensor) -> tuple[dict, Any]:
    """One scale for the whole, and one for activations, as Ministral 3 and Devstral Small 2 are published."""
    tensors, back = fp8(weight, 0)
    scale = tensors.pop("weight_scale")
    return tensors | {"weight_scale_inv": scale, "activation_scale": torch.ones(())}, back


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


def compressed_tensors(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
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
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
#: name -> (quantization_config, how a matrix is stored, budget)
FORMATS: dict[str, tuple[dict[str, Any], Any, float]] = {
    "gptq-4": (GPTQ, lambda w: gptq(w, 4, 32), EXACT),
    "gptq-8": (GPTQ | {"bits": 8}, lambda w: gptq(w, 8, 32), EXACT),
    "gptq-4-act-order": (GPTQ | {"desc_act": True}, lambda w: gptq(w, 4, 32, act_order=True), EXACT),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 4, 32, v2=True), EXACT),
    "gptq-channel": (GPTQ | {"group_size": -1}, lambda w: gptq(w, 4, -1), EXACT),
    "gptq-group-16": (GPTQ | {"group_size": 16}, lambda w: gptq(w, 4, 16), ROUNDED),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, lambda w: awq(w, 32), EXACT),
    "W4A16": (compressed_tensors("pack-quantized", {"num_bits": 4}), lambda w: packed(w, 4, 32, symmetric=True), EXACT),
    "W4A16-asymmetric": (
        compressed_tensors("pack-quantized", {"num_bits": 4}),
        lambda w: packed(w, 4, 32, symmetric=False),
        EXACT,
    ),
    # Groups whose size does not divide 96 inputs.
    "gptq-group-64": (GPTQ | {"group_size": 64}, lambda w: gptq(w, 4, 64), EXACT),
    "awq-group-64": ({"quant_method": "awq", "bits": 4, "group_size": 64}, lambda w: awq(w, 64), EXACT),
    "W4A16-group-64": (
        compressed_tensors("pack-quantized", {"num_bits": 4, "group_size": 64}),
        lambda w: packed(w, 4, 64, symmetric=True),
        EXACT,
    ),
    "W4A16-group-48": (
        compressed_tensors("pack-quantized", {"num_bits": 4, "group_size": 48}),
        lambda w: packed(w, 4, 48, symmetric=True),
        ROUNDED,
    ),
    "fp8-blocks-of-48": ({"quant_method": "fp8", "weight_block_size": [48, 48]}, lambda w: fp8(w, 48), ROUNDED),
    "W8A16": (compressed_tensors("pack-quantized", _W8), lambda w: packed(w, 8, -1, symmetric=True), EXACT),
    "W8A8": (compressed_tensors("int-quantized", _W8, _A8), plain_int8, ROUNDED),
    "W8-asymmetric": (compressed_tensors("int-quantized", _W8), lambda w: plain_int8(w, symmetric=False), EXACT),
    "FP8": (compressed_tensors("float-quantized", {"num_bits": 8, "type": "float"}), lambda w: fp8(w, 1), ROUNDED),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda w: fp8(w, 32), ROUNDED),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_static, ROUNDED),
    "nvfp4": (
        compressed_tensors("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}),
        nvfp4,
        ROUNDED,
    ),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda w: nvfp4(w, modelopt=True), ROUNDED),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda w: fp8(w, 0), ROUNDED),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, lambda w: fp8(w, 1), ROUNDED),
}


def make(directory: Path, name: str, source: str = "llama-mha", ignored: tuple[str, ...] = ("lm_head",)) -> Any:
    """Write a checkpoint in the format `name`; returns transformers' model with the same numbers. Linears whose names
    end in one of `ignored` stay as they are."""
    config, store, _ = FORMATS[name]
    torch.manual_seed(0)
    shutil.copytree(make_checkpoint(source), directory, dirs_exist_ok=True)
    theirs = reference(directory)
    tensors = load_file(directory / "model.safetensors")
    for module_name, module in theirs.named_modules():
        if type(module) is torch.nn.Linear and not module_name.endswith(ignored):
            weight = tensors.pop(f"{module_name}.weight").float()
            parts, back = store(weight)
            tensors |= {f"{module_name}.{part}": tensor for part, tensor in parts.items()}
            with torch.no_grad():
                module.weight.copy_(back)
    for tensor_name in [key for key in tensors if re.search(r"\.experts\.\d+\.\w+\.weight$", key)]:
        parts, back = store(tensors.pop(tensor_name).float())
        tensors |= {f"{tensor_name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        with torch.no_grad():
            _of_stack(theirs, tensor_name).copy_(back)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    edit_config(directory, quantization_config=config)
    return theirs


def _of_stack(theirs: Any, tensor_name: str) -> torch.Tensor:
    """The matrix of one expert in transformers' two tensors of a layer."""
    block, _, rest = tensor_name.partition(".experts.")
    index, kind, _ = rest.split(".")
    experts = theirs.get_submodule(f"{block.replace('block_sparse_moe', 'mlp')}.experts")
    if kind in ("down_proj", "w2"):
        return experts.down_proj[int(index)]
    return experts.gate_up_proj[int(index)].chunk(2)[kind in ("up_proj", "w3")]


def e2m1(code: int) -> float:
    """The number of a code, by the specification's formula: sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def pack_mxfp4(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, in, out] -> blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32] of numbers nearby."""
    groups = stack.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(3).log2().floor().int() - 2 + 127
    numbers = torch.tensor([e2m1(code) for code in range(16)])
    scaled = groups / torch.exp2(exponents.float() - 127)[..., None]
    codes = (scaled[..., None] - numbers).abs().argmin(4).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, exponents.to(torch.uint8)


def make_mxfp4(directory: Path) -> Path:
    """A tiny gpt-oss whose experts are in MXFP4."""
    shutil.copytree(make_checkpoint("gpt-oss"), directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pack_mxfp4(tensors.pop(name))
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return directory
