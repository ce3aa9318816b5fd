"""Perplexity of a text with each KV-cache format: what a smaller cache costs.

Every token is decoded and none is prefilled, so all attention reads the values that the R-node has stored. The text is
cut into sequences that advance together, one token a step.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import uvloop
from tokenizers import Tokenizer
from tqdm import tqdm

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode, split_machine
from fastdecode.demo import heldout_text, model_dir
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import Model, SPart, choose_device, choose_dtype, load_model, read_config
from fastdecode.spart.batch import Chunk, SampleSpec, StepBatch
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect

COMMAND = ("perplexity", "perplexity of a text with each KV-cache format")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint; default: the demo model")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text; default: the demo model's held-out text")
    parser.add_argument("--length", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--sequences", type=int, default=64, help="how many, cut from the beginning of the text")
    parser.add_argument(
        "--kv-dtype", action="append", choices=KV_DTYPES, help="format to measure (repeatable); default: all"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of weights and activations")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    result = uvloop.run(_run(args))
    if args.json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
        return
    print(f"{result['model']}: {result['tokens']} tokens in sequences of {result['length']}, {result['dtype']} weights")
    for row in result["rows"]:
        change = "" if row["change"] is None else f"  {100 * row['change']:+.3f} %"
        nats, ppl = row["nats_per_token"], row["perplexity"]
        print(f"  KV {row['kv_dtype']:<11}{nats:10.5f} nats/token  perplexity {ppl:.4f}{change}")


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    device, directory = choose_device("auto"), args.model or model_dir()
    model = load_model(directory, device=device, dtype=choose_dtype(args.dtype, read_config(directory).dtype, device))
    text = args.text.read_text() if args.text else heldout_text()
    ids = cut(directory, text, args.sequences, args.length)
    config = NodeConfig()
    node = EmbeddedRNode(config, split_machine(config, s_on_gpu=device.type == "cuda"))
    await node.start()
    rows: list[dict[str, Any]] = []
    try:
        for kv_dtype in args.kv_dtype or KV_DTYPES:
            hello = model.hello(n_slots=1, max_rows=len(ids), kv_dtype=kv_dtype, kv_bytes=None, max_seqs=len(ids))
            link = await connect(node.url, hello, None)
            nats = nats_per_token(model, link, ids, progress=f"KV {kv_dtype}")
            await link.close()
            base = next((row["perplexity"] for row in rows if row["kv_dtype"] == "fp32"), None)
            ppl = math.exp(nats)
            change = None if base is None else ppl / base - 1
            rows.append({"kv_dtype": kv_dtype, "nats_per_token": nats, "perplexity": ppl, "change": change})
    finally:
        await node.stop()
    return {
        "model": directory.resolve().name,
        "dtype": args.dtype,
        "length": args.length,
        "tokens": ids.size - len(ids),
        "rows": rows,
    }


def cut(directory: Path, text: str, sequences: int, length: int) -> np.ndarray:
    """The text's first tokens as ids [sequences, length], int. Each row begins with the tokenizer's begin token if it
    has one.

    Raises ValueError if the text is too short.
    """
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    opening = tokenizer.encode("").ids
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    body = length - len(opening)
    if len(ids) < sequences * body:
        raise ValueError(f"the text has {len(ids)} tokens; {sequences} sequences of {length} need {sequences * body}")
    rows = np.array(ids[: sequences * body]).reshape(sequences, body)
    return np.hstack([np.tile(np.array(opening, dtype=rows.dtype), (sequences, 1)), rows])


def nats_per_token(model: Model, link: Link, ids: np.ndarray, progress: str | None = None) -> float:
    """Mean of -ln p(next token) over ids [sequences, length]. The link's lease must be unused and have room for all
    tokens."""
    spart = SPart(model, [link])
    sequences, length = ids.shape
    total = 0.0
    for pos in tqdm(range(length - 1), desc=progress, disable=progress is None, unit="step"):
        chunks = [Chunk(0, i, 1, pos, [int(ids[i, pos])], False, SampleSpec(temperature=0.0)) for i in range(sequences)]
        step = spart.step(StepBatch(0, chunks), keep_logits=True)
        try:
            while True:
                next(step)
        except StopIteration as end:
            logits = end.value.logits.double()
        target = torch.from_numpy(ids[:, pos + 1].copy()).to(logits.device)
        total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
    return float(total / (sequences * (length - 1)))
