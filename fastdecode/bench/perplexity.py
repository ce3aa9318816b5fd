"""Perplexity of a text with each KV-cache format, or each format of the weights: what fewer bits cost.

Every token is decoded and none is prefilled, so all attention reads the values that the R-node has stored. The text is
cut into sequences that advance together, one token a step.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.bench.steps import run_step
from fastdecode.daemon.config import WEIGHTS, NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode, split_machine
from fastdecode.daemon.sizes import format_bytes
from fastdecode.demo import heldout_text, model_dir
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import Model, SPart, choose_device, choose_dtype, load_model, read_config
from fastdecode.spart.balance import balance_for
from fastdecode.spart.batch import Chunk, SampleSpec, StepBatch
from fastdecode.text.calibration import calibration_tokens
from fastdecode.text.cut import cut
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect

COMMAND = ("perplexity", "perplexity of a text with each format of KV-cache or weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text; default: the demo model's held-out text")
    parser.add_argument("--length", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--sequences", type=int, default=64, help="how many, cut from the beginning of the text")
    parser.add_argument(
        "--kv-dtype",
        action="append",
        choices=KV_DTYPES,
        help="format to measure (repeatable); default: all, or with --weights fp32",
    )
    parser.add_argument(
        "--weights",
        action="append",
        choices=WEIGHTS,
        help="format of the weights to measure (repeatable), each with each KV-cache format; default: auto",
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of dense weights and activations"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    print_result(args, uvloop.run(_run(args)), _print_table)


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']}: {result['tokens']} tokens in sequences of {result['length']}, {result['dtype']}")
    for row in result["rows"]:
        change = "" if row["change"] is None else f"  {100 * row['change']:+.3f} %"
        nats, ppl, kept = row["nats_per_token"], row["perplexity"], format_bytes(row["weight_bytes"])
        formats = f"weights {row['weights']:<6}{kept:>10}  KV {row['kv_dtype']:<11}"
        print(f"  {formats}{nats:10.5f} nats/token  perplexity {ppl:.4f}{change}")


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    device, path = choose_device("auto"), NodeConfig(model=args.model).model_path() or model_dir()
    dtype = choose_dtype(args.dtype, read_config(path).dtype, device)
    text = args.text.read_text() if args.text else heldout_text()
    tokenizer = Tokenizer.from_dir(path)
    ids = cut(tokenizer, text, args.sequences, args.length)
    calibration = calibration_tokens(tokenizer)
    config = NodeConfig()
    node = EmbeddedRNode(config, split_machine(config, s_on_gpu=device.type == "cuda"))
    await node.start()
    rows: list[dict[str, Any]] = []
    try:
        for weights in args.weights or ["auto"]:
            model = load_model(path, device=device, dtype=dtype, weights=weights, calibration=calibration)
            for kv_dtype in args.kv_dtype or (["fp32"] if args.weights else KV_DTYPES):
                balance_for(model, kv_dtype, calibration)
                hello = model.hello(n_slots=1, max_rows=len(ids), kv_dtype=kv_dtype, kv_bytes=None, max_seqs=len(ids))
                link = await connect(node.url, hello, None)
                nats = nats_per_token(model, link, ids, progress=f"weights {weights}, KV {kv_dtype}")
                await link.close()
                ppl = math.exp(nats)
                rows.append(
                    {
                        "weights": weights,
                        "weight_bytes": model.weight_bytes,
                        "kv_dtype": kv_dtype,
                        "nats_per_token": nats,
                        "perplexity": ppl,
                        "change": ppl / rows[0]["perplexity"] - 1 if rows else None,  # against the first row
                    }
                )
    finally:
        await node.stop()
    return {
        "model": path.resolve().name,
        "dtype": args.dtype,
        "length": args.length,
        "tokens": ids.size - len(ids),
        "rows": rows,
    }


def nats_per_token(model: Model, link: Link, ids: np.ndarray, progress: str | None = None) -> float:
    """Mean of -ln p(next token) over ids [sequences, length]. The link's lease must be unused and have room for all
    tokens."""
    spart = SPart(model, [link])
    sequences, length = ids.shape
    total = 0.0
    for pos in tqdm(range(length - 1), desc=progress, disable=progress is None, unit="step"):
        chunks = [Chunk(0, i, 1, pos, [int(ids[i, pos])], False, SampleSpec(temperature=0.0)) for i in range(sequences)]
        output = run_step(spart.step(StepBatch(0, chunks), keep_logits=True))
        assert output.logits is not None
        logits = output.logits.double()
        target = torch.from_numpy(ids[:, pos + 1].copy()).to(logits.device)
        total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
    return float(total / (sequences * (length - 1)))
