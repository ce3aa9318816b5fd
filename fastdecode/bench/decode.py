"""Output tokens a second of the split system, and of the S-Part and the R-Part alone, at a given batch and context.

The two parts set a bound: the time of the slower one if each has cores of its own, the sum of both times if they take
turns on the same cores. The figure to watch is how near the split system comes to the bound. Peers run the same
checkpoint, batch and context in the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import uvloop
from tqdm import tqdm

from fastdecode.bench.load import Load
from fastdecode.bench.options import print_result
from fastdecode.bench.peers import PEERS
from fastdecode.daemon.config import WEIGHTS, NodeConfig, format_bytes
from fastdecode.daemon.decoding import DecodeShape, Decoding
from fastdecode.daemon.embedded import EmbeddedRNode, Split, split_machine
from fastdecode.daemon.machine import usable_cpus
from fastdecode.demo import model_dir
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import choose_device, choose_dtype, load_model, read_config
from fastdecode.spart.own_thread import in_own_thread

COMMAND = ("decode", "output tokens/s of the split system, of S and R alone, and the ratio to the bound that they set")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    parser.add_argument("--weights", choices=WEIGHTS, default="auto", help="as for fastdecode-node")
    parser.add_argument("--batch", type=int, default=32, help="sequences that decode at once, over all mini-batches")
    parser.add_argument("--context", type=int, default=512, help="cached tokens of each sequence")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded of each sequence in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mini-batches", type=int, help="default: by the rule of fastdecode-node --tune off")
    parser.add_argument(
        "--r-node", action="append", metavar="URL", help="R-node to use (repeatable); default: an embedded one"
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="fp16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    parser.add_argument("--threads", type=int, help="attention threads of the embedded R-node; default: by that rule")
    parser.add_argument("--s-threads", type=int, help="threads of the S-Part on a CPU; default: by that rule")
    parser.add_argument("--cpus", help="CPUs of the attention threads, for example 1 or 4-7")
    parser.add_argument("--spin-us", type=int, help="microseconds that a waiter spins before it sleeps")
    parser.add_argument(
        "--peer", action="append", choices=sorted(PEERS), default=[], help="also run this peer (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    print_result(args, uvloop.run(_run(args)), _print_table)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(args.device)
    path = NodeConfig(model=args.model).model_path() or model_dir()
    dtype = choose_dtype(args.dtype, read_config(path).dtype, device)
    argv = ["--kv-dtype", args.kv_dtype]
    for flag, value in (
        ("--mini-batches", args.mini_batches),
        ("--threads", args.threads),
        ("--s-threads", args.s_threads),
        ("--cpus", args.cpus),
        ("--spin-us", args.spin_us),
    ):
        argv += [flag, str(value)] if value is not None else []
    for url in args.r_node or ():
        argv += ["--r-node", url]
    config = NodeConfig.from_args(argv)
    split = split_machine(config, s_on_gpu=device.type == "cuda")
    args.mini_batches = split.mini_batches
    if args.batch < args.mini_batches:
        raise ValueError("--batch is smaller than --mini-batches")
    all_threads = torch.get_num_threads()
    torch.set_num_threads(split.s_threads)
    model = in_own_thread(load_model, path, device=device, dtype=dtype, progress=True, weights=args.weights)
    node = None
    if not args.r_node:
        node = EmbeddedRNode(config, split)
        await node.start()
    try:
        shape = DecodeShape(args.batch, args.context, args.steps, args.mini_batches, args.kv_dtype)
        bench = await Decoding.open(model, [node.url] if node else args.r_node, shape)
        await bench.fill()
        load = Load(path, args.batch, args.context, args.weights, args.kv_dtype, dtype, device, all_threads)
        peers = {name: PEERS[name](load) for name in args.peer}
        samples: dict[str, list[float]] = {"split": [], "s": [], "r": [], **{name: [] for name in peers}}
        for i in tqdm(range(args.rounds + 1), desc="rounds", unit="round"):
            seconds = {"split": (await bench.split_round())[0], "s": await bench.s_round(), "r": await bench.r_round()}
            seconds |= {name: peer.round(args.steps) for name, peer in peers.items()}
            if i:  # the first round is a warm-up
                for name, value in seconds.items():
                    samples[name].append(args.batch * args.steps / value)
        await bench.close()
        for peer in peers.values():
            peer.close()
    finally:
        if node:
            await node.stop()
    return _result(args, path, dtype, split, bench, samples)


def _result(
    args: argparse.Namespace,
    path: Path,
    dtype: torch.dtype,
    split: Split,
    bench: Decoding,
    samples: dict[str, list[float]],
) -> dict[str, Any]:
    in_turns = bench.model.device.type == "cpu" and split.s_threads + split.r_threads > len(usable_cpus())
    bounds = [1 / (1 / s + 1 / r) if in_turns else min(s, r) for s, r in zip(samples["s"], samples["r"], strict=True)]
    ratios = [x / bound for x, bound in zip(samples["split"], bounds, strict=True)]
    return {
        "model": path.resolve().name,
        "parameters": bench.model.parameters,
        "batch": args.batch,
        "context": args.context,
        "mini_batches": args.mini_batches,
        "split": str(split),
        "weights": args.weights,
        "weight_bytes": bench.model.weight_bytes,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": args.kv_dtype,
        "s_threads": split.s_threads,
        "r_threads": sum(link.lease.threads for link in bench.links),
        "isa": bench.links[0].lease.isa,
        "rounds": args.rounds,
        "tokens_per_s": statistics.median(samples["split"]),
        "s_tokens_per_s": statistics.median(samples["s"]),
        "r_tokens_per_s": statistics.median(samples["r"]),
        "bound": "S + R" if in_turns else "max(S, R)",
        "bound_ratio": statistics.median(ratios),
        "spread": {name: [min(values), max(values)] for name, values in {**samples, "bound_ratio": ratios}.items()},
        "peers": {
            name: {
                "tokens_per_s": statistics.median(samples[name]),
                "ratio": statistics.median(a / b for a, b in zip(samples["split"], samples[name], strict=True)),
            }
            for name in args.peer
        },
    }


def _print_table(result: dict[str, Any]) -> None:
    shape = f"batch {result['batch']}, context {result['context']}, {result['split']}"
    weights = f"weights {result['weights']} ({format_bytes(result['weight_bytes'])})"
    print(f"{result['model']}: {shape}, {weights}, {result['dtype']}, KV {result['kv_dtype']}")
    rows = [
        ("split", result["tokens_per_s"]),
        ("S alone", result["s_tokens_per_s"]),
        ("R alone", result["r_tokens_per_s"]),
    ]
    rows += [(name, peer["tokens_per_s"]) for name, peer in result["peers"].items()]
    for name, tokens in rows:
        print(f"  {name:<14}{tokens:10.1f} tokens/s")
    print(f"  {'of the bound':<14}{100 * result['bound_ratio']:10.1f} %, the time of {result['bound']}")
    for name, peer in result["peers"].items():
        print(f"  split / {name}: {peer['ratio']:.2f}x")
