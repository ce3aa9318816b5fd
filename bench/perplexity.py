"""Perplexity of a text with each KV-cache format, or each format of the weights: what fewer bits cost.

Every token is decoded and none is prefilled, so all attention reads the values that the R-node has stored. The text is
cut into sequences that advance together, one token a step. ^C and SIGTERM end a run with what it has: a format that is
cut off is compared with the first one on the tokens that both have.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.bench.steps import run_step
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.option_values import count, format_bytes
from fastdecode.daemon.options import WEIGHTS
from fastdecode.daemon.split import split_machine
from fastdecode.demo import heldout_text
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import Model, SPart, choose_device, choose_dtype, load_model, read_config
from fastdecode.spart.int4.balance import balance_for
from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch
from fastdecode.text.calibration import calibration_tokens
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect

COMMAND = ("perplexity", "perplexity of a text with each format of KV-cache or weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    add("--text", type=Path, metavar="FILE", help="text; default: the demo model's held-out text")
    add("--length", type=count, default=512, help="tokens of each sequence")
    add("--sequences", type=count, default=64, help="how many, cut from the beginning of the text")
    add("--kv-dtype", action="append", choices=KV_DTYPES,
        help="format to measure (repeatable); default: all, or with --weights fp32")  # fmt: skip
    add("--weights", action="append", choices=WEIGHTS, help="format of the weights to measure (repeatable), each with "
        "each KV-cache format; default: auto")  # fmt: skip
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of dense weights and activations")


def run(args: argparse.Namespace) -> None:
    """Exits with 128 and the number of the signal that has cut the run off."""
    cut_off_by: list[int] = []

    def cut_off(number: int, _: object) -> None:
        if cut_off_by:
            raise KeyboardInterrupt
        cut_off_by.append(number)

    # Not by the event loop, which a step blocks.
    before = {number: signal.signal(number, cut_off) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        result = uvloop.run(_run(args, cut_off_by))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print_result(args, result, _print_table)
    if cut_off_by:
        sys.exit(128 + cut_off_by[0])


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']}: {result['tokens']} tokens in sequences of {result['length']}, {result['dtype']}")
    for row in result["rows"]:
        change = "" if row["change"] is None else f"  {100 * row['change']:+.3f} %"
        nats, ppl, kept = row["nats_per_token"], row["perplexity"], format_bytes(row["weight_bytes"])
        formats = f"weights {row['weights']:<6}{kept:>10}  KV {row['kv_dtype']:<11}"
        note = "" if row["tokens"] == result["tokens"] else f"  (cut off after {row['tokens']} tokens)"
        print(f"  {formats}{nats:10.5f} nats/token  perplexity {ppl:.4f}{change}{note}")


async def _run(args: argparse.Namespace, cut_off_by: list[int]) -> dict[str, Any]:
    """The rows of all formats, or of the formats measured until `cut_off_by` has a signal's number."""
    device, path = choose_device("auto"), NodeConfig(model=args.model).model_path()
    dtype = choose_dtype(args.dtype, read_config(path).dtype, device)
    text = args.text.read_text() if args.text else heldout_text()
    tokenizer = Tokenizer.from_dir(path)
    ids = cut(tokenizer, text, args.sequences, args.length)
    calibration = calibration_tokens(tokenizer)
    config = NodeConfig()
    node = EmbeddedRNode(config, split_machine(config, s_on_gpu=device.type == "cuda"))
    await node.start()
    rows: list[dict[str, Any]] = []
    first = np.empty(0)  # what the first format has lost at each position
    try:
        for weights in args.weights or ["auto"]:
            if cut_off_by:
                break
            model = load_model(path, device=device, dtype=dtype, weights=weights, calibration=calibration)
            for kv_dtype in args.kv_dtype or (["fp32"] if args.weights else KV_DTYPES):
                if cut_off_by:
                    break
                balance_for(model, kv_dtype, calibration)
                hello = model.hello(n_slots=1, max_rows=len(ids), kv_dtype=kv_dtype, kv_bytes=None, max_seqs=len(ids))
                link = await connect(node.url, hello, None)
                name = f"weights {weights}, KV {kv_dtype}"
                lost = nats_by_position(model, link, ids, name, lambda: bool(cut_off_by))
                await link.close()
                if not len(lost):
                    break
                first = first if rows else lost
                common, nats = min(len(lost), len(first)), float(lost.mean())
                rows.append(
                    {
                        "weights": weights,
                        "weight_bytes": model.weight_bytes,
                        "kv_dtype": kv_dtype,
                        "tokens": len(lost) * len(ids),
                        "nats_per_token": nats,
                        "perplexity": math.exp(nats),
                        # Against the first row.
                        "change": math.expm1(lost[:common].mean() - first[:common].mean()) if rows else None,
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


def cut(tokenizer: Tokenizer, text: str, sequences: int, length: int) -> np.ndarray:
    """The text's first tokens as ids [sequences, length], int. Each row begins with the tokenizer's begin token if it
    has one.

    Raises ValueError if the text is too short.
    """
    opening = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)
    body = length - len(opening)
    if len(ids) < sequences * body:
        raise ValueError(f"the text has {len(ids)} tokens; {sequences} sequences of {length} need {sequences * body}")
    rows = np.array(ids[: sequences * body]).reshape(sequences, body)
    return np.hstack([np.tile(np.array(opening, dtype=rows.dtype), (sequences, 1)), rows])


def nats_by_position(
    model: Model, link: Link, ids: np.ndarray, progress: str | None = None, cut_off: Callable[[], bool] = lambda: False
) -> np.ndarray:
    """Mean of -ln p(next token) over the rows of ids [sequences, length] at each position, fp64 [length - 1]; fewer
    positions if `cut_off` becomes true. The link's lease must be unused and have room for all tokens."""
    sequences, length = ids.shape
    spart = SPart(model, [link], state_slots=sequences)
    found: list[float] = []
    for pos in tqdm(range(length - 1), desc=progress, disable=progress is None, unit="step"):
        if cut_off():
            break
        greedy = SampleSpec(temperature=0.0)
        chunks = [Chunk(0, i, 1, pos, [int(ids[i, pos])], False, greedy, state=i) for i in range(sequences)]
        output = run_step(spart.step(StepBatch(0, chunks), keep_logits=True))
        assert output.logits is not None
        logits = output.logits.double()
        target = torch.from_numpy(ids[:, pos + 1].copy()).to(logits.device)
        found.append(torch.nn.functional.cross_entropy(logits, target).item())
    return np.array(found)
