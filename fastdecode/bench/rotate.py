"""Three mini-batches that rotate over two S-node processes with one R-node (Lamina), and their tokens.

The sequences decode in four ways: three mini-batches that rotate layer by layer; four of which each S-node has two; and
both kinds on one S-node. The tokens of two S-nodes must be those of one S-node with the same mini-batches, or the
command fails. All processes share this machine's cores, so tokens/s show what the hand-over costs and not what rotation
brings (`fastdecode-plan rotate` does).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.bench.rnode_child import RNodeChild
from fastdecode.bench.rotate_child import S_NODES, Job, Load, SecondSNode, SNodeWork, Work, hidden_memory
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.decoding import DecodeShape, Decoding
from fastdecode.demo import model_dir
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import choose_device, choose_dtype, read_config

COMMAND = ("rotate", "three mini-batches that rotate over two S-node processes: their tokens, and the hand-over's cost")

#: The ways to decode, by name: what S-node 0 does, and what S-node 1 does. A way on two S-nodes stands behind the way
#: on one S-node that its tokens are compared with.
_WAYS = {
    "one S-node, 3 mini-batches": (Job(3, (0, 1, 2)), None),
    "2 S-nodes, 3 rotate": (Job(3, (0, 1, 2), rotates=True), Job(3, (0, 1, 2), rotates=True)),
    "one S-node, 4 mini-batches": (Job(4, (0, 1, 2, 3)), None),
    "2 S-nodes, 2 each": (Job(4, (0, 2)), Job(4, (1, 3))),
}
_KV_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    parser.add_argument("--batch", type=int, default=24, help="sequences that decode at once, over all mini-batches")
    parser.add_argument("--context", type=int, default=512, help="cached tokens of each sequence")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded of each sequence in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="fp16")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="attention threads of the R-node")
    parser.add_argument("--s-threads", type=int, default=1, help="threads of each S-Part")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Decode, compare and print. Raises RuntimeError if tokens differ, ValueError, TransportError, OSError."""
    if args.batch < 4:
        raise ValueError("--batch must be at least 4, a sequence for each mini-batch")
    print_result(args, uvloop.run(_run(args)), _print_table)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    path = NodeConfig(model=args.model).model_path() or model_dir()
    dtype = choose_dtype(args.dtype, read_config(path).dtype, choose_device("cpu"))
    load = Load(str(path), str(dtype).removeprefix("torch."), args.s_threads, args.batch, args.context, args.steps)
    model = load.model()
    with tempfile.TemporaryDirectory() as folder:
        node = RNodeChild(f"shm://{folder}/r.sock", 50, _KV_BYTES, None, args.threads)
        second = None
        try:
            shape = DecodeShape(args.batch, args.context, args.steps, mini_batches=4, kv_dtype=args.kv_dtype)
            bench = await Decoding.open(model, [node.url], shape)
            await bench.fill()
            fd, hidden = hidden_memory(model, bench.links[0].geometry)
            work = SNodeWork(load, bench.spart, bench.runner, 0, hidden)
            second = SecondSNode(load, bench.links[0], fd)
            rounds: dict[str, list[tuple[float, Work]]] = {way: [] for way in _WAYS}
            for i in tqdm(range(args.rounds + 1), desc="rounds", unit="round"):
                reference: dict[int, int] = {}
                for way, (own, others) in _WAYS.items():
                    seconds, done = await _decode(work, second, own, others)
                    await bench.trim()
                    if others is None:
                        reference = done.tokens
                    elif done.tokens != reference:
                        raise RuntimeError(f"{way}: the tokens are not those of one S-node")
                    if i:  # the first round is a warm-up
                        rounds[way].append((seconds, done))
            await bench.close()
        finally:
            if second is not None:
                second.close()
            node.close()
    return _result(args, path, load, rounds)


async def _decode(work: SNodeWork, second: SecondSNode, own: Job, others: Job | None) -> tuple[float, Work]:
    """The seconds of a round, and what both S-nodes did."""
    begun = time.perf_counter()
    if others is None:
        done = await work.run(own)
        return time.perf_counter() - begun, done
    second.begin(others)
    both = await asyncio.gather(work.run(own), asyncio.to_thread(second.end))
    return time.perf_counter() - begun, Work.merged(both)


def _result(
    args: argparse.Namespace, path: Path, load: Load, rounds: dict[str, list[tuple[float, Work]]]
) -> dict[str, Any]:
    ways = {}
    for way, done in rounds.items():
        hand_overs = sum(work.hand_overs for _, work in done)
        ways[way] = {
            "tokens_per_s": statistics.median(args.batch * args.steps / seconds for seconds, _ in done),
            "best_tokens_per_s": max(args.batch * args.steps / seconds for seconds, _ in done),
            "hand_over_us": 1e6 * sum(w.hand_over_seconds for _, w in done) / hand_overs if hand_overs else None,
        }
    return {
        "model": path.resolve().name,
        "dtype": load.dtype,
        "kv_dtype": args.kv_dtype,
        "batch": args.batch,
        "context": args.context,
        "steps": args.steps,
        "s_nodes": S_NODES,
        "tokens_compared": (args.rounds + 1) * 2 * args.batch * args.steps,
        "ways": ways,
    }


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['model']}, {result['dtype']}, KV {result['kv_dtype']}: batch {result['batch']}, context "
        f"{result['context']}; tokens/s, median and best round"
    )
    for way, row in result["ways"].items():
        cost = "" if row["hand_over_us"] is None else f"{row['hand_over_us']:8.1f} us for each copy of hidden states"
        print(f"  {way:<28}{row['tokens_per_s']:10.1f}{row['best_tokens_per_s']:10.1f}{cost}")
    print(f"  all {result['tokens_compared']} tokens of two S-nodes are those of one S-node")
