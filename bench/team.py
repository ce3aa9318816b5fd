"""The time of a layer's attention when n R-nodes share the heads or tokens of every sequence (--partition), against
1/n of the time that one R-node takes.

Each R-node is a process with one thread on a CPU of its own, over shared memory. For comparison, one R-node with n
threads does the same work: on one machine, n R-nodes can read no faster than that one. All of them take turns in every
round, because memory is as fast as the machine's other work lets it be. "R time" is the time that the slowest
R-engine worked on a layer; "layer" is the time from ringing a layer to its O rows, with the copies of the rows and the
messages.

With `--at-once 1` R-nodes take turns, each on its share of all layers, and each has the memory for itself, as on a
machine of its own. So the R time is measured and the time of the whole layer is not. More R-nodes than
CPUs take turns too, as many at once as there are CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fastdecode.bench.options import numbers, print_result
from fastdecode.bench.rnode_child import RNodeChild
from fastdecode.daemon.machine import usable_cpus
from fastdecode.kernels._native import page_bytes
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.transports import registry
from fastdecode.transports.base import Hello, Link
from fastdecode.transports.teams import PARTITIONS, connect_team, member_of
from fastdecode.transports.token_team import MAX_PARTS

COMMAND = ("team", "R time of a layer when 1, 2, 4 R-nodes share the heads or the tokens, against 1/n")

_FILL_ROWS = 512  # appended by one call when the cache is filled
_TIMEOUT = 60.0
_SPIN_US = 1000  # of an idle R-engine
#: The R times of a layer, one for each turn, and the whole time, in microseconds; None: not measured.
_Times = tuple[list[float], float | None]
_REGION_BYTES = 64 << 20  # room for the activation regions of an R-node's links


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cpus = len(usable_cpus())
    parser.add_argument(
        "--r-nodes",
        type=numbers,
        default=[n for n in (1, 2, 4) if n <= cpus],
        metavar="N,...",
        help="numbers of R-nodes; default: those of 1, 2 and 4 for which there are CPUs. More take turns",
    )
    parser.add_argument("--partition", choices=tuple(PARTITIONS), default="heads", help="what the R-nodes share")
    parser.add_argument(
        "--at-once", type=int, default=cpus, metavar="N", help="R-nodes that work at once; default: one a CPU"
    )
    parser.add_argument("--sequences", type=int, default=1, help="sequences that decode at once")
    parser.add_argument("--context", type=int, default=32768, help="cached tokens of each sequence")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="fp16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    cpus = sorted(usable_cpus())
    if not 1 <= args.at_once <= len(cpus):
        raise ValueError(f"--at-once: from 1 to {len(cpus)} R-nodes have CPUs of their own")
    most = args.kv_heads if args.partition == "heads" else MAX_PARTS
    if not all(1 <= n <= most for n in args.r_nodes):
        raise ValueError(f"--r-nodes: from 1 to {most} R-nodes can share {args.partition} here")
    geometry = Geometry(1, _FILL_ROWS, args.layers, args.heads, args.kv_heads, args.head_size, "fp16")
    hello = Hello(geometry, args.kv_dtype, (0,) * args.layers, args.head_size**-0.5, None, args.sequences)
    hellos = {n: replace(hello, kv_bytes=_member_bytes(args, hello, n)) for n in (1, *args.r_nodes)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = []
        for i in range(max(args.r_nodes)):  # the i-th R-node serves every team of more than i
            memory = sum((hello.kv_bytes or 0) + _REGION_BYTES for n, hello in hellos.items() if n > i)
            children.append(RNodeChild(f"shm://{folder}/{i}", _SPIN_US, memory, cpus[i % len(cpus)]))
            stack.callback(children[-1].close)
        cases = {(n, 1): ([child.url for child in children[:n]], hellos[n]) for n in args.r_nodes}
        for n in args.r_nodes:
            if 1 < n <= args.at_once:
                memory = (hellos[1].kv_bytes or 0) + _REGION_BYTES
                children.append(RNodeChild(f"shm://{folder}/{n}-threads", _SPIN_US, memory, None, n))
                stack.callback(children[-1].close)
                cases[1, n] = [children[-1].url], hellos[1]
        rows = asyncio.run(_measure(args, cases))
    shape = {
        name: getattr(args, name)
        for name in ("partition", "at_once", "sequences", "context", "layers", "heads", "kv_heads", "kv_dtype")
    }
    print_result(args, shape | {"teams": rows}, _print_table)


def _member_bytes(args: argparse.Namespace, hello: Hello, n: int) -> int:
    """KV-cache memory of a member of a team of `n`."""
    pages = -(-(args.context + args.rounds + 1) // PAGE_TOKENS)
    pages = args.sequences * (-(-pages // n) if args.partition == "tokens" else pages)
    part = member_of(hello, 0, n, args.partition)
    return int(pages * page_bytes(geometry_tuple(part.geometry), KV_DTYPES.index(part.kv_dtype)))


async def _measure(
    args: argparse.Namespace, cases: dict[tuple[int, int], tuple[list[str], Hello]]
) -> list[dict[str, Any]]:
    """`cases`: (R-nodes, threads of each) -> their URLs, and the link to ask them for."""
    links: dict[tuple[int, int], list[Link]] = {}
    taken: dict[tuple[int, int], list[_Times]] = {case: [] for case in cases}
    try:
        for case, (urls, hello) in cases.items():
            links[case] = []
            if len(urls) <= args.at_once:
                links[case].append(await connect_team(urls, hello, None, partition=args.partition))
            for i, url in enumerate(urls if len(urls) > args.at_once else ()):
                part = member_of(hello, i, len(urls), args.partition)
                links[case].append(await registry.connect(url, part, None))
            for link in links[case]:
                await asyncio.to_thread(_fill, link, args)
        for i in tqdm(range(args.rounds + 1), desc="rounds", unit="round"):
            for case, group in links.items():
                waves = [group[at : at + args.at_once] for at in range(0, len(group), args.at_once)]
                times = [await asyncio.to_thread(_step, wave, args, i) for wave in waves]
                if i:  # the first round is a warm-up
                    taken[case].append(([r_us for r_us, _ in times], times[0][1] if len(group) == 1 else None))
    finally:
        for group in links.values():
            for link in group:
                await link.close()
    return _rows(taken)


def _fill(link: Link, args: argparse.Namespace) -> None:
    """Cache random K and V, and write random Q, K and V rows for the steps."""
    y, rng = link.layout, np.random.default_rng(0)
    for at, row_bytes in ((y.q, y.q_row_bytes), (y.kv, y.kv_row_bytes)):
        rows = rng.standard_normal(_FILL_ROWS * row_bytes // 2, np.float32).astype(np.float16)
        link.region[y.slot(0) + at : y.slot(0) + at + rows.nbytes] = rows.tobytes()
    for seq_index in range(args.sequences):
        for pos in range(0, args.context, _FILL_ROWS):
            _run([link], [(seq_index, 1, pos, min(_FILL_ROWS, args.context - pos), 0, 0)])


def _step(links: list[Link], args: argparse.Namespace, i: int) -> tuple[float, float]:
    """One token of every sequence, over all links at once. Returns the longest R time and the whole time of a layer,
    in microseconds."""
    pos = args.context + i
    return _run(links, [(seq_index, 1, pos, 1, ROW_ATTEND, 0) for seq_index in range(args.sequences)])


def _run(links: list[Link], entries: list[tuple[int, ...]]) -> tuple[float, float]:
    for link in links:
        link.arm(0, np.array(entries, ROW_DTYPE))
        link.wait(0, _TIMEOUT)
    layers = links[0].geometry.n_layers
    start = time.perf_counter()
    for layer in range(layers):
        for link in links:
            link.ring(0, layer)
        for link in links:
            link.wait(0, _TIMEOUT)
    seconds = time.perf_counter() - start
    times = [link.disarm(0) for link in links]
    return max(t.busy_ns for t in times if t is not None) / 1e3 / layers, seconds * 1e6 / layers


def _rows(taken: dict[tuple[int, int], list[_Times]]) -> list[dict[str, Any]]:
    """A row for each case. `r_of_ideal` and `layer_of_ideal` are ratios to 1/n of the time that one R-node of one
    thread, or the smallest team, took in the same round; n is the number of threads in all."""
    least = min(case for case in taken if case[1] == 1)
    rows = []
    for (r_nodes, threads), times in taken.items():
        share = r_nodes * threads / least[0]
        turns = list(zip(*(r_us for r_us, _ in times), strict=True))
        theirs = [r_us[0] for r_us, _ in taken[least]]
        row: dict[str, Any] = {"r_nodes": r_nodes, "threads": threads}
        # Each turn has a noise of its own, so the slowest turn is that of the longest median.
        row["r_us"] = max(map(statistics.median, turns))
        row["r_of_ideal"] = max(_median_ratio(turn, theirs, share) for turn in turns)
        layers = [layer_us for _, layer_us in times if layer_us is not None]
        whole = [layer_us for _, layer_us in taken[least] if layer_us is not None]
        row["layer_us"] = statistics.median(layers) if layers else None
        row["layer_of_ideal"] = _median_ratio(layers, whole, share) if layers and whole else None
        rows.append(row)
    return rows


def _median_ratio(ours: Sequence[float], theirs: Sequence[float], share: float) -> float:
    return statistics.median(share * a / b for a, b in zip(ours, theirs, strict=True))


def _print_table(result: dict[str, Any]) -> None:
    if result["partition"] == "tokens":
        print("the R-nodes share the tokens of every sequence")
    heads = f"{result['heads']} query and {result['kv_heads']} KV heads, KV {result['kv_dtype']}"
    print(f"time of a layer, us; {result['sequences']} sequence(s) of {result['context']} tokens, {heads}")
    print(f"{'R-nodes':>7} {'threads of each':>16} {'R time':>9} {'of 1/n':>7} {'layer':>9} {'of 1/n':>7}")
    for row in result["teams"]:
        whole = "they took turns"
        if row["layer_us"] is not None:
            whole = f"{row['layer_us']:9.1f} {row['layer_of_ideal']:7.2f}"
        print(f"{row['r_nodes']:7} {row['threads']:16} {row['r_us']:9.1f} {row['r_of_ideal']:7.2f} {whole:>17}")
