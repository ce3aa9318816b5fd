"""Output tokens a second of the split system, and of the S-Part and the R-Part alone, in one cell or several.

A cell is a batch and a context. The two parts set a bound: the time of the slower one if each has cores of its own, the
sum of both times if they take turns on the same cores. The figure to watch is how near the split system comes to the
bound. Peers run the same checkpoint, batch and context in the same rounds. With --out, every cell is kept as it ends,
and the same command goes on with what is missing; ^C and SIGTERM end a run with the table of what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import uvloop

from fastdecode.bench.contenders import PeerRun, SplitSystem
from fastdecode.bench.decode_cell import Limits, measure
from fastdecode.bench.decode_report import print_one, print_sweep, row_of
from fastdecode.bench.load import Cell, PeerLoad
from fastdecode.bench.options import keep, print_result, read_kept
from fastdecode.bench.peers import PEERS, Peer
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.device_plan import node_device
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.machine import total_memory, usable_cpus
from fastdecode.daemon.option_values import count
from fastdecode.daemon.options import WEIGHTS
from fastdecode.daemon.roofline import Roofline
from fastdecode.daemon.split import split_machine
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import Model, choose_dtype, load_model, read_config
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.threads import set_threads

COMMAND = ("decode", "output tokens/s of the split system, of S and R alone, and the ratio to the bound that they set")

#: The options that a file of --out must have been measured with.
_SETTINGS = ("weights", "steps", "rounds", "mini_batches", "r_node", "device", "dtype", "threads", "s_threads", "cpus",
    "spin_us", "peer", "ranks", "cell_seconds", "load_seconds")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench decode`."""
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    add("--weights", choices=WEIGHTS, default="auto", help="as for fastdecode-node")
    add("--batch", action="append", type=count, metavar="N",
        help="sequences that decode at once, over all mini-batches (repeatable); default: 32")  # fmt: skip
    add("--context", action="append", type=count, metavar="N",
        help="cached tokens of each sequence (repeatable); default: 512")  # fmt: skip
    add("--steps", type=count, default=16, help="tokens decoded of each sequence in a round")
    add("--rounds", type=count, default=7)
    add("--cell-seconds", type=float, default=60.0, metavar="S",
        help="time of fastdecode in a cell, and of each peer, filling included (60)")  # fmt: skip
    add("--load-seconds", type=float, default=300.0, metavar="S",
        help="time in which a peer loads the model, once for all cells (300)")  # fmt: skip
    add("--mini-batches", type=count, help="default: by the rule of fastdecode-node --tune off")
    add("--r-node", action="append", metavar="URL", help="R-node to use (repeatable); default: an embedded one")
    add("--kv-dtype", action="append", choices=KV_DTYPES, help="KV format (repeatable); default: fp16")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    add("--threads", type=count, help="attention threads of the embedded R-node; default: by that rule")
    add("--s-threads", type=count, help="threads of the S-Part on a CPU; default: by that rule")
    add("--cpus", help="CPUs of the attention threads, for example 1 or 4-7")
    add("--spin-us", type=int, help="microseconds that a waiter spins before it sleeps")
    add("--peer", action="append", choices=sorted(PEERS), default=[], help="also run this peer (repeatable)")
    add("--ranks", type=count, default=2, metavar="N",
        help="of --peer ranks, the same system with --tensor-parallel N on the same cores (2)")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="keep every cell in FILE, and measure only what it lacks")
    add("--plot", type=Path, metavar="FILE", help="PNG: ratio to the best peer by batch and context")


def run(args: argparse.Namespace) -> None:
    """Measure and print. Raises ValueError, OSError, RuntimeError, TransportError."""
    args.batch, args.context = args.batch or [32], args.context or [512]
    args.kv_dtype = args.kv_dtype or ["fp16"]
    if args.mini_batches and min(args.batch) < args.mini_batches:
        raise ValueError("--batch is smaller than --mini-batches")
    result, ended_by = uvloop.run(_run(args))
    single = len(args.batch) == len(args.context) == len(args.kv_dtype) == 1 and not (args.out or args.plot)
    if single and result["rows"]:
        (row,) = result.pop("rows")
        if "tokens_per_s" not in row:
            raise ValueError(f"batch {row['batch']}, context {row['context']}: {row['note']}")
        del result["settings"]
        print_result(args, result | row, print_one)
    else:
        print_result(args, result, print_sweep)
    if args.plot and any("tokens_per_s" in row for row in result["rows"]):
        from fastdecode.bench import plot

        plot.decode(result, args.plot)
    if ended_by:
        sys.exit(128 + ended_by)


async def _run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The rows of all cells, and the signal that has ended the run or 0."""
    config = NodeConfig.from_args(_node_options(args))
    device = node_device(config)
    path = NodeConfig(model=args.model).model_path()
    dtype = choose_dtype(args.dtype, read_config(path).dtype, device)
    settings = {name: getattr(args, name) for name in _SETTINGS} | {"model": path.resolve().name}
    kept = read_kept(args.out, settings) or {"settings": settings, "rows": []}
    stop, ended_by = asyncio.Event(), [0]

    def end_by(number: int) -> None:
        ended_by[0] = number
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end_by, number)
    cells = sorted({Cell(*pair) for pair in itertools.product(args.batch, args.context)}, key=_size)
    missing = {cell: [name for name in dict.fromkeys(args.kv_dtype) if not _has(kept, cell, name)] for cell in cells}
    missing = {cell: names for cell, names in missing.items() if names}
    if not missing:
        return kept, 0
    split = split_machine(config, s_on_gpu=device.type == "cuda")
    batch, context = max(args.batch), max(args.context)
    cores = torch.get_num_threads()
    load = PeerLoad(
        path, args.weights, dtype, device, cores, batch, context, args.steps, args.ranks, split.mini_batches
    )
    peers = [PEERS[name](load) for name in dict.fromkeys(args.peer)]
    set_threads(split.s_threads)
    model = in_own_thread(load_model, path, device=device, dtype=dtype, progress=True, weights=args.weights)
    set_threads(split.s_threads, model)
    in_turns = device.type == "cpu" and split.s_threads + split.r_threads > len(usable_cpus())
    kept |= {"parameters": model.parameters, "weight_bytes": model.weight_bytes, "weights": args.weights}
    kept |= {"model": path.resolve().name, "dtype": str(dtype).removeprefix("torch."), "s_threads": split.s_threads}
    node = None
    if not args.r_node:
        node = EmbeddedRNode(config, split)
        await node.start()
    runs = _peer_runs(peers, model, args.kv_dtype)
    limits = Limits(args.steps, args.rounds, args.cell_seconds, args.load_seconds, stop)
    try:
        urls = [node.url] if node else args.r_node
        for cell, kv_dtypes in missing.items():
            if stop.is_set():
                break
            splits = [SplitSystem(model, urls, name, args.steps, split.mini_batches) for name in kv_dtypes]
            roofline = None if device.type == "cuda" else _roofline(model, split.s_threads)
            measured = await measure(cell, splits, runs, limits)
            others = [(run, its) for run, its in measured.items() if isinstance(run, PeerRun)]
            rows = []
            for one in splits:
                nearest = [(run, measured[run]) for run in runs[one.kv_format]]
                row = row_of(
                    cell,
                    one,
                    measured[one],
                    nearest,
                    others,
                    in_turns=in_turns,
                    weight_bytes=model.weight_bytes,
                    read_bytes=_read_bytes(model),
                    roofline=roofline,
                )
                rows.append(row)
                if one.isa:
                    kept |= {"r_threads": one.r_threads, "isa": one.isa, "exchange": one.exchange}
            kept["rows"] += [row for row in rows if not stop.is_set() or "tokens_per_s" in row]
            if not stop.is_set():  # an interrupted cell is measured again
                keep(args.out, kept)
    finally:
        for run in {run for listed in runs.values() for run in listed}:
            await run.close()
        for peer in peers:
            peer.close()
        if node:
            await node.stop()
    return kept, ended_by[0]


def _roofline(model: Model, threads: int) -> float:
    """GB/s at which the S-Part's threads read as many bytes as the weights have, up to 1 GiB: some last-level caches
    hold the weights of a small model."""
    with closing(Roofline(min(model.weight_bytes, 1 << 30), usable_cpus()[:threads])) as roofline:
        return roofline.choose()


def _read_bytes(model: Model) -> int | None:
    """Bytes of weights that the step of a mini-batch reads; None: experts are read as the tokens choose them."""
    if model.config.experts is not None:
        return None
    unused = 0 if model.config.tied else model.weights.embedding.nbytes
    return int(model.weight_bytes - unused)


def _node_options(args: argparse.Namespace) -> list[str]:
    """The command line of a node with the options that the benchmark has in common with it."""
    argv = ["--log-level", "warning"]
    if not args.r_node:
        argv += ["--kv-memory", str(total_memory())]  # a limit: the links lease what they need
    for name in ("device", "mini_batches", "threads", "s_threads", "cpus", "spin_us"):
        if (value := getattr(args, name)) is not None:
            argv += [f"--{name.replace('_', '-')}", str(value)]
    for url in args.r_node or ():
        argv += ["--r-node", url]
    return argv


def _peer_runs(peers: Sequence[Peer], model: Model, kv_dtypes: Sequence[str]) -> dict[str, list[PeerRun]]:
    """For each KV format the peers in their nearest formats. A peer with one format for several is there once."""
    layers = (model.config.heads_of(layer) for layer in range(model.config.n_layers))
    elements = sum(heads.kv_row_size for heads in layers)
    runs: dict[tuple[Peer, str], PeerRun] = {}
    for peer, kv_dtype in itertools.product(peers, kv_dtypes):
        kv_format = peer.format_of(kv_dtype)
        if (peer, kv_format) not in runs:
            runs[peer, kv_format] = PeerRun(peer, kv_format, elements, model.weight_bytes)
    return {kv_dtype: [runs[peer, peer.format_of(kv_dtype)] for peer in peers] for kv_dtype in kv_dtypes}


def _size(cell: Cell) -> tuple[int, int]:
    return cell.batch * cell.context, cell.batch


def _has(kept: dict[str, Any], cell: Cell, kv_dtype: str) -> bool:
    wanted = (cell.batch, cell.context, kv_dtype)
    return any((row["batch"], row["context"], row["kv_dtype"]) == wanted for row in kept["rows"])
