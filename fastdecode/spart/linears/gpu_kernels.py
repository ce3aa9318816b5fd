"""KernelProduct: packed matrices multiplied by the kernels of humming-kernels, the library from which vLLM takes them.

Humming compiles a kernel for each shape by NVRTC when a matrix is loaded, and keeps it on disk. It takes every form of
PackedMatrix as it is: 4 and 8 bits, groups of 32 and more, whole rows, E2M1, in fp16 (from compute capability 7.5 on)
and bf16 (8.0); and stacks of experts, whose rows the host need not know. Its kernels serve all numbers of rows, so that
prompts take them too.

What torch has is not used: `_weight_int4pack_mm` takes bf16 only and reads the weights once for every 16 rows,
`_weight_int8pack_mm` has one scale a row and multiplies in fp32 without tensor cores, `_int_mm` has one scale for a row
of activations and takes no fewer than 17 rows, `_scaled_mm` rounds activations to FP8. torchao calls these functions.
Marlin, as gptqmodel ships it, is compiled by nvcc on the user's machine.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fastdecode.spart.linears.packed import PackedMatrix

log = logging.getLogger(__name__)

#: The first CUDA devices that have kernels, by the activation dtype.
_CAPABILITIES = {torch.float16: (7, 5), torch.bfloat16: (8, 0)}
#: Rows and columns are padded to multiples of this number, the kernels' tiles.
_TILE = 128
#: Words by which the blocks of a kernel wait for each other. A stream has its own, because kernels of two streams may
#: run at the same time. torch gives out 32 streams of each of four priorities, beside the default stream.
_LOCKS, _STREAMS = 2048, 129
#: The rows of a trial, and the largest error of its result, relative to the root mean square: sums of 16-bit products
#: that are added in another order.
_TRIAL_ROWS, _TRIAL_ERROR = 5, 0.05


class KernelProduct:
    """A matrix, or a stack of the matrices of experts, in the order in which the kernels read it."""

    def __init__(self, matrices: Sequence[PackedMatrix]):
        """The matrices have one form; several are those of experts. Raises an error of Humming."""
        from humming import ops
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors

        first = matrices[0]
        self._outs, self._ins, self._columns = len(first.codes), first.ins, first.columns
        self._gemm = ops.humming_gemm
        stacked = len(matrices) > 1
        whole_rows = first.group == first.columns

        def stack(tensors: list[Any]) -> Any:
            return torch.stack(tensors) if stacked else tensors[0]

        schema = HummingWeightSchema(
            b_dtype=f"uint{first.bits}" if first.table is None else "float4e2m1",
            weight_scale_group_size=0 if whole_rows else first.group,
            has_zero_point=first.zeros is not None,
            is_fp_zero_point=first.zeros is not None,
        )
        config = prepare_layer_config(
            shape_n=self._outs,
            shape_k=self._columns,
            weight_schema=schema,
            num_experts=len(matrices) if stacked else None,
            pad_n_to_multiple=_TILE,
            pad_k_to_multiple=_TILE if whole_rows else max(_TILE, first.group),
            torch_dtype=first.scales.dtype,
            device=first.codes.device,
        )
        tensors = {
            "weight": stack([matrix.codes.view(torch.int32) for matrix in matrices]),
            "weight_scale": stack([matrix.scales for matrix in matrices]),
        }
        if first.zeros is not None:
            tensors["zero_point"] = stack([matrix.zeros for matrix in matrices])
        self._tensors: dict[str, torch.Tensor] = transform_humming_tensors(config, tensors)
        self._config = config.to_str()
        self._how = json.dumps({"gemm_type": "grouped_contiguous"}) if stacked else None

    def __call__(self, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, ins] in the activation dtype -> [n, rows of the packed matrix]. `ends` int32 [experts] is the end of
        each expert's rows."""
        if not len(x):
            return x.new_empty(0, self._outs)
        if self._columns > self._ins:
            x = F.pad(x, (0, self._columns - self._ins))
        return self._gemm(  # type: ignore[no-any-return]
            layer_config=self._config,
            compute_config=self._how,
            inputs=x.contiguous(),
            **self._tensors,
            expert_layout=None if ends is None else F.pad(ends, (1, 0)),
            locks=_locks(x.device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the matrices take."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


def kernel_product(matrices: Sequence[PackedMatrix]) -> KernelProduct | None:
    """The product of matrices by the kernels, once a trial has given what the converted matrices give. None if the
    matrices must be converted at each call; the log says why."""
    first = matrices[0]
    if kernels_fault(first.codes.device, first.scales.dtype):
        return None
    try:
        product = KernelProduct(matrices)
        error = _trial_error(product, matrices)
        reason = "" if error <= _TRIAL_ERROR else f"its product is off by {error:.2g}"
    except Exception as problem:  # the library's: what it raises is not its contract
        reason = f"{type(problem).__name__}: {problem}"
    if reason:
        log.warning("a matrix of %d x %d is converted at each call: %s", first.outs, first.ins, reason)
        return None
    return product


@functools.cache
def kernels_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why packed matrices are converted at each call on a device, for people; None if there are kernels. The log has it
    once."""
    if fault := _fault(device, dtype):
        log.warning("weights in few bits are converted at each call: %s", fault)
    return fault


def _fault(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    if dtype not in _CAPABILITIES:
        return f"the kernels have no {str(dtype).removeprefix('torch.')} activations"
    least, has = _CAPABILITIES[dtype], torch.cuda.get_device_capability(device)
    if has < least:
        return f"the kernels need compute capability {least[0]}.{least[1]}, the GPU has {has[0]}.{has[1]}"
    if importlib.util.find_spec("humming") is None:
        return "humming-kernels is not installed: pip install 'fastdecode[cuda12]' or 'fastdecode[cuda13]'"
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")  # its launcher is in the package
    return None


def _trial_error(product: KernelProduct, matrices: Sequence[PackedMatrix]) -> float:
    """The largest difference between the product and that of the converted matrices, for random rows of each expert and
    the first and the last outputs, in units of the result's root mean square. Compiles the kernels."""
    first = matrices[0]
    device, n_outs = first.codes.device, len(first.codes)
    outs = torch.arange(n_outs, device=device)
    outs = torch.cat([outs[:_TILE], outs[_TILE:][-_TILE:]])
    n = _TRIAL_ROWS * len(matrices)
    x = torch.randn(n, first.ins, generator=torch.Generator(device).manual_seed(0), device=device)
    x = x.to(first.scales.dtype)
    ends = torch.arange(_TRIAL_ROWS, n + 1, _TRIAL_ROWS, device=device, dtype=torch.int32)
    got = product(x, ends if len(matrices) > 1 else None)[:, outs]
    parts = zip(x.split(_TRIAL_ROWS), matrices, strict=True)
    want = torch.cat([F.linear(rows, matrix.rows(outs)) for rows, matrix in parts])
    error = (got - want).float().abs().amax() / want.float().square().mean().sqrt().clamp_min(1e-30)
    return float(error.nan_to_num(torch.inf))


@functools.cache
def _all_locks(device: torch.device) -> tuple[torch.Tensor, dict[int, int]]:
    """Words for all streams, which are 0 between two kernels, and the index of each stream that has used some."""
    return torch.zeros(_STREAMS, _LOCKS, dtype=torch.int32, device=device), {}


def _locks(device: torch.device) -> torch.Tensor:
    """The words of the current stream."""
    words, index = _all_locks(device)
    return words.select(0, index.setdefault(torch.cuda.current_stream(device).cuda_stream, len(index)))
