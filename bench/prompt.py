"""Attention of prompts on the S-node's CPU: kernels/decoder beside torch's fused attention, in interleaved rounds.

A cell is a chunk of some rows that begins at some position of its prompt; the K and V before it are staged. Operations
are two for each multiplication of a query with a key that its row attends to, and as many for V. The roofline is what
torch's product of two large matrices reaches in the same dtype.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.spart.prefill.prompt import PackedPrompt, PlainPrompt, PromptChunk
from fastdecode.spart.prefill.prompt_attention import make_prompt_attention
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.spart.shape import AttentionShape
from fastdecode.spart.step.batch import Chunk, SampleSpec
from fastdecode.spart.threads import set_threads

COMMAND = ("prompt", "attention of prompts on the S-node's CPU, beside torch's")

_PRODUCT = 1024  # rows and columns of the roofline's matrices
_DEFAULT_HEADS = ["12:12:64", "9:3:64", "32:8:128"]
_DEFAULT_CELLS = ["256@0", "2048@0", "512@2000", "16@8000"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--heads", action="append", metavar="Q:KV:SIZE", help=f"(repeatable); default: {_DEFAULT_HEADS}"
    )
    parser.add_argument(
        "--chunk", action="append", metavar="ROWS@POSITION", help=f"(repeatable); default: {_DEFAULT_CELLS}"
    )
    parser.add_argument("--dtype", action="append", choices=TORCH_DTYPES, help="(repeatable); default: fp32 and bf16")
    parser.add_argument("--threads", type=int, help="threads; default: all cores")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    print_result(args, measure(args), _print_table)


class _Shape(AttentionShape):
    """One layer of full attention."""

    def __init__(self, n_q: int, n_kv: int, size: int):
        self.n_layers, self.n_q_heads, self.n_kv_heads, self.head_size = 1, n_q, n_kv, size
        self.windows, self.softmax_scale = (0,), size**-0.5


@torch.inference_mode()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The cells' median times in seconds. Raises ValueError for a malformed cell."""
    set_threads(args.threads or torch.get_num_threads())
    cells = list(
        itertools.product(
            args.dtype or ["fp32", "bf16"],
            [_numbers(text, ":", 3) for text in args.heads or _DEFAULT_HEADS],
            [_numbers(text, "@", 2) for text in args.chunk or _DEFAULT_CELLS],
        )
    )
    rows = []
    for name, heads, (n, pos) in tqdm(cells, desc="cells", unit="cell"):
        rows.append(_measure_cell(name, _Shape(*heads), n, pos, args.rounds) | {"heads": heads})
    return {"threads": torch.get_num_threads(), "rows": rows}


def _measure_cell(name: str, shape: _Shape, n: int, pos: int, rounds: int) -> dict[str, Any]:
    dtype, cpu = TORCH_DTYPES[name], torch.device("cpu")
    native = make_prompt_attention(shape, cpu, dtype)
    q_size, kv_size, o_size = shape.row_sizes
    q, out = torch.randn(n, q_size).to(dtype), torch.empty(n, o_size, dtype=dtype)
    kv = torch.randn(pos + n, kv_size).to(dtype)
    chunk, works = Chunk(0, 0, 1, pos, [0] * n, True, SampleSpec()), []
    for attention in (native, None):
        prompt = PlainPrompt(shape, cpu, dtype) if attention is None else PackedPrompt(shape, cpu, attention)
        prompt.reserve(pos + n, exactly=True)
        k, v = (part.unflatten(1, (shape.n_kv_heads, -1)).transpose(0, 1) for part in kv.chunk(2, dim=1))
        prompt.stage(0, k[:, :pos], v[:, :pos], 0)
        works.append(PromptChunk(shape, "prompt", chunk, slice(0, n), prompt, attention))
    a, b = torch.randn(2, _PRODUCT, _PRODUCT).to(dtype)
    seconds: tuple[list[float], ...] = ([], [], [])
    for _ in range(rounds):
        for times, work in zip(seconds, works, strict=False):
            times.append(_time(functools.partial(work.attend, 0, q, kv[pos:], out)))
        seconds[2].append(_time(functools.partial(torch.mm, a, b)))
    ours, torchs, product = map(statistics.median, seconds)
    return {
        "dtype": name,
        "isa": native.isa if native else None,
        "rows": n,
        "position": pos,
        "seconds": ours,
        "torch_seconds": torchs,
        "operations": 4 * shape.n_q_heads * shape.head_size * (n * pos + n * (n + 1) // 2),
        "roofline": 2 * _PRODUCT**3 / product,
    }


def _time(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def _numbers(text: str, separator: str, n: int) -> list[int]:
    parts = text.split(separator)
    if len(parts) != n or not all(part.isdecimal() for part in parts):
        raise ValueError(f"'{text}' is not {n} numbers with '{separator}' between them")
    return [int(part) for part in parts]


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['threads']} thread(s); GFLOP/s of attention, and of torch's product of matrices")
    for row in result["rows"]:
        speed, peer = (row["operations"] / row[key] / 1e9 for key in ("seconds", "torch_seconds"))
        heads = "{}:{}:{}".format(*row["heads"])
        print(
            f"  {row['dtype']:<5}{row['isa'] or 'torch':<11}{heads:>10}{row['rows']:>6} rows at {row['position']:>5}"
            f"{1e3 * row['seconds']:9.2f} ms{speed:7.0f}{row['roofline'] / 1e9:7.0f}  "
            f"torch {peer:5.0f}  {speed / peer:5.2f}x"
        )
