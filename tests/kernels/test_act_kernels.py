"""Loading activations and storing finished O rows, by every ISA that this machine has or emulates.

Against NumPy's fp16 and torch's bf16.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention import kernel_calls
from attention.emulated import NEON, SCALAR, kernels, params

from fastdecode.kernels import _native as native

pytestmark = pytest.mark.quick

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

by_isa = pytest.mark.parametrize("isa", params([*native.isa_supported(), NEON, SCALAR]))
by_act_dtype = pytest.mark.parametrize("act_dtype", TORCH_DTYPES)


def bits_equal(got: np.ndarray, want: np.ndarray, infinity: int) -> bool:
    """Whether both, given as unsigned integers, are equal bit for bit; any NaN equals any other."""
    sign = 1 << (8 * want.itemsize - 1)
    nan = (want & ~want.dtype.type(sign)) > infinity
    return bool(((got[nan] & ~got.dtype.type(sign)) > infinity).all()) and np.array_equal(got[~nan], want[~nan])


@by_isa
def test_load_act_widens_every_two_byte_float(isa: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    got = np.empty(len(patterns), np.float32)
    kernels(isa).load_act(isa, got, patterns, "fp16", 1.0)
    assert bits_equal(got.view(np.uint32), patterns.view(np.float16).astype(np.float32).view(np.uint32), 0x7F800000)
    kernels(isa).load_act(isa, got, patterns, "bf16", 1.0)
    assert bits_equal(got.view(np.uint32), patterns.astype(np.uint32) << 16, 0x7F800000)


@by_act_dtype
@by_isa
def test_load_act_scales_any_length(isa: str, act_dtype: str) -> None:
    for n in [*range(40), 1000]:
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(TORCH_DTYPES[act_dtype])
        guarded = np.full(n + 1, 7, np.float32)
        kernels(isa).load_act(isa, guarded[:n], x.view(torch.uint8).numpy(), act_dtype, 0.3)
        assert np.array_equal(guarded[:n], x.float().numpy() * np.float32(0.3)) and guarded[n] == 7, n


def rounding_probes() -> np.ndarray:
    """All fp16 and bf16 values, the ties between neighbours, a float either side of each tie, random bit patterns."""
    half = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    upper = np.arange(0x7F80, dtype=np.uint32) << 16
    ties = np.concatenate([(half[:-1] + half[1:]) / 2, (upper | 0x8000).view(np.float32), np.float32([65520])])
    around = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(3e38))]
    noise = np.random.default_rng(9).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    positive = np.concatenate([half, upper.view(np.float32), ties, *around, noise, np.float32([np.inf, np.nan])])
    return np.concatenate([positive, -positive])


@by_isa
def test_finished_rows_are_rounded_to_nearest_even(isa: str) -> None:
    x, one = rounding_probes(), np.ones(1, np.float32)
    fp16, bf16, fp32 = (np.empty(len(x), dtype) for dtype in (np.uint16, np.uint16, np.uint32))
    kernels(isa).attend_finish(isa, fp16, x[None], one, "fp16")
    with np.errstate(over="ignore", invalid="ignore"):
        assert bits_equal(fp16, x.astype(np.float16).view(np.uint16), 0x7C00)
    kernels(isa).attend_finish(isa, bf16, x[None], one, "bf16")
    assert bits_equal(bf16, torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy(), 0x7F80)
    kernels(isa).attend_finish(isa, fp32, x[None], one, "fp32")
    assert bits_equal(fp32, x.view(np.uint32), 0x7F800000)


@by_act_dtype
@by_isa
def test_finish_divides_and_writes_no_further_than_asked(isa: str, act_dtype: str) -> None:
    for n in range(40):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        rows = torch.stack([x / 4, torch.zeros(n), x]).to(TORCH_DTYPES[act_dtype]).view(torch.uint8).numpy().ravel()
        guarded = np.full(len(rows) + 64, 0xA5, np.uint8)
        acc, l = np.stack([x.numpy(), np.full(n, np.nan, np.float32), x.numpy()]), np.float32([4, 0, 1])  # noqa: E741
        kernels(isa).attend_finish(isa, guarded[: len(rows)], acc, l, act_dtype)
        assert np.array_equal(guarded[: len(rows)], rows) and (guarded[len(rows) :] == 0xA5).all(), n


def test_lengths_that_do_not_agree_are_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        kernel_calls.load_act("scalar", np.zeros(3, np.float32), np.zeros(4, np.uint16), "fp16", 1.0)
    acc, l = np.zeros((2, 3), np.float32), np.ones(2, np.float32)  # noqa: E741
    with pytest.raises(ValueError, match="length"):
        kernel_calls.attend_finish("scalar", np.zeros(7, np.uint16), acc, l, "bf16")
    with pytest.raises(ValueError, match="shapes"):
        kernel_calls.attend_finish("scalar", np.zeros(6, np.uint16), acc, l[:1], "bf16")
