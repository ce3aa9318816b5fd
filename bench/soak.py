"""Several S-nodes share one R-node under mixed load while one S-node after another is killed.

Starts an R-node over TCP and S-nodes of different tiny models as processes. Clients send short and long prompts,
prompts that start alike and n = 3 over HTTP, and leave some streams. Every --kill-every seconds an S-node gets SIGKILL
and is started again. Each greedy answer is compared with the model's answer to the same request alone. At the end, when
the S-nodes have gone, the R-node must hold what it held before them. Exit status 1 if an answer or a count is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from fastdecode.bench import checkpoint
from fastdecode.bench.soaking.load import SoakClient, SoakLoad, make_requests
from fastdecode.bench.soaking.processes import Held, Node, free_memory, start_threads
from fastdecode.daemon.option_values import count, format_bytes, size_option

COMMAND = ("soak", "several S-nodes share an R-node under load, and are killed in turn")

#: Layers, heads, KV heads, head size and hidden size of the models, which the S-nodes have in turn.
_SHAPES = [(2, 4, 2, 16, 64), (3, 6, 1, 16, 96), (1, 4, 4, 32, 128)]
_LONGEST = 900  # tokens of the longest prompts
_MODEL_LENGTH = 1280
#: Bytes by which the R-node may be larger at the end than before the S-nodes came: its Python's memory.
_SLACK = 16 << 20
_IDLE_SECONDS = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench soak`."""
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="length of the load (default: 10)")
    add("--snodes", type=count, default=3, metavar="N", help="number of S-nodes (default: 3)")
    add("--clients", type=count, default=6, metavar="N", help="requests under way at each S-node (default: 6)")
    add("--kill-every", type=float, default=30.0, metavar="S", help="seconds between two kills (default: 30)")
    add("--kv-memory", type=size_option, default=16 << 20, metavar="SIZE", help="of the R-node (default: 16MiB)")
    add("--max-lease", type=size_option, default=8 << 20, metavar="SIZE", help="of the R-node (default: 8MiB)")
    add("--logs", type=Path, metavar="DIR", help="keep the nodes' logs there")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    """Run the soak and print its result. Raises RuntimeError if an answer or a count is wrong."""
    if args.minutes <= 0 or args.kill_every <= 0:
        raise ValueError("--minutes and --kill-every must be positive")
    with tempfile.TemporaryDirectory(prefix="fastdecode-soak-") as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(_Soak(args, Path(folder), logs).run())
    print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() if args.json else _table(result), flush=True)
    if result["faults"]:
        raise RuntimeError("; ".join(result["faults"]))


class _Soak:
    """One run. `loads[i]` are the clients of the i-th S-node."""

    def __init__(self, args: argparse.Namespace, folder: Path, logs: Path):
        self.args, self.folder, self.logs = args, folder, logs
        self.nodes: list[Node | None] = [None] * args.snodes
        self.loads: list[SoakLoad] = []
        self.r_node_url = ""
        self.peak = Held(0, 0, 0, 0)
        self.most_leased = 0.0
        self.most_over = 0.0  # most bytes by which the R-node's memory has exceeded what its S-nodes have leased
        self._begun = time.monotonic()

    async def run(self) -> dict[str, Any]:
        """Run the soak. Returns the result. Raises RuntimeError, OSError, TransportError."""
        r_node: Node | None = None
        try:
            r_node = self._node(
                "r-node", "--role", "r", "--listen", "tcp://127.0.0.1:0", "--threads", "1", *self._memory()
            )
            self.r_node_url = await r_node.read(r"R-node on (tcp://\S+):")
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
                await self._learn(session)
                for _ in range(3):
                    await start_threads(self.r_node_url)
                free = await self._idle()
                before = Held.by(r_node.process.pid)
                self._say(f"before: {_held(before)}; {format_bytes(free)} free")
                await self._load(r_node.process.pid, before)
            free_after = await self._idle(free)
            await asyncio.sleep(1)
            after = Held.by(r_node.process.pid)
            self._say(f"after: {_held(after)}; {format_bytes(free_after)} free")
            status = await r_node.end()
            return self._result(before, after, free, free_after, status)
        finally:
            for node in (*self.nodes, r_node):
                if node is not None and node.process.poll() is None:
                    node.kill()

    def _memory(self) -> list[str]:
        return ["--kv-memory", str(self.args.kv_memory), "--max-lease", str(self.args.max_lease)]

    def _node(self, name: str, *argv: str) -> Node:
        return Node(self.logs / f"{name}.log", *argv)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:6.0f} s  {text}", file=sys.stderr, flush=True)

    # -- the parts of a run ---------------------------------------------------------------------------------------

    async def _learn(self, session: aiohttp.ClientSession) -> None:
        """Make the models, and learn the right answers from S-nodes that do one request at a time and keep nothing."""
        for i in range(self.args.snodes):
            directory = self.folder / f"model-{i}"
            checkpoint.write(_checkpoint(directory, i, self.args.seed))
            requests = make_requests(self.args.seed * 1000 + i, _LONGEST)
            self.loads.append(SoakLoad(SoakClient(session, directory.name), requests, self.args.seed * 1000 + i))
        await asyncio.gather(*(self._start(i, "--no-prefix-cache") for i in range(self.args.snodes)))
        known = await asyncio.gather(*(load.client.learn(load.requests) for load in self.loads))
        for load, requests in zip(self.loads, known, strict=True):
            load.requests = requests
        await self._end_all()
        self._say(f"right answers: {', '.join(str(len(load.requests)) for load in self.loads)} requests")

    async def _start(self, i: int, *options: str) -> None:
        argv = ["--role", "s", "--model", str(self.folder / f"model-{i}"), "--port", "0", "--r-node", self.r_node_url]
        argv += ["--dtype", "fp32", "--kv-dtype", "fp32", "--s-threads", "1", "--max-model-len", str(_MODEL_LENGTH)]
        argv += ["--max-batch-size", "8", "--max-batch-tokens", "128", "--drain-seconds", "1", *options]
        node = self.nodes[i] = self._node(f"s-node-{i}", *argv)
        self.loads[i].client.url = await node.read(r"Serving \S+ on (http://\S+)/v1")
        self.loads[i].up.set()

    async def _end_all(self) -> None:
        """End all S-nodes. Raises RuntimeError if one ends with an error."""
        ended = await asyncio.gather(*(node.end() for node in self.nodes if node))
        if any(ended):
            raise RuntimeError(f"S-nodes ended with the statuses {ended}, see {self.logs}")

    async def _idle(self, expected: int = -1) -> int:
        """Wait until the R-node has no other link and, if `expected` is not -1, that much free memory; return it."""
        deadline, free, last = time.monotonic() + _IDLE_SECONDS, -1, -2
        while (free != last if expected < 0 else free != expected) and time.monotonic() < deadline:
            last, free = free, await free_memory(self.r_node_url)
            await asyncio.sleep(0.5)
        return free

    async def _load(self, r_node: int, before: Held) -> None:
        await asyncio.gather(*(self._start(i) for i in range(self.args.snodes)))
        over = asyncio.Event()
        work = [asyncio.create_task(load.run(self.args.clients, over)) for load in self.loads]
        work.append(asyncio.create_task(self._kill_in_turn(over)))
        watch = asyncio.create_task(self._watch(r_node, before))
        try:
            done, _ = await asyncio.wait(
                [*work, watch], timeout=60 * self.args.minutes, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
            over.set()
            await asyncio.gather(*work)
        finally:
            for task in (*work, watch):
                task.cancel()
            await asyncio.gather(*work, watch, return_exceptions=True)
        await self._end_all()

    async def _kill_in_turn(self, until: asyncio.Event) -> None:
        begun = time.monotonic()
        for turn in itertools.count():
            if until.is_set():
                return  # wait_for would not notice it without a pause
            with contextlib.suppress(TimeoutError):
                pause = begun + (turn + 1) * self.args.kill_every - time.monotonic()
                await asyncio.wait_for(until.wait(), max(0.0, pause))
                return
            i = turn % self.args.snodes
            node, load = self.nodes[i], self.loads[i]
            assert node is not None
            load.up.clear()
            load.starts += 1
            node.kill()
            self._say(f"killed S-node {i}")
            await self._start(i)

    async def _watch(self, pid: int, before: Held) -> None:
        """Follow the R-node's memory against what its S-nodes have leased, and print progress."""
        said = time.monotonic()
        while True:
            await asyncio.sleep(1)
            leased = 0.0
            starts = [load.starts for load in self.loads]
            all_up = all(load.up.is_set() for load in self.loads)
            with contextlib.suppress(aiohttp.ClientError, OSError, KeyError):
                for load in self.loads:
                    gauges = await load.client.metrics()
                    leased += gauges["kv_bytes_leased"] + gauges["region_bytes"]
                held = Held.by(pid)
                if all_up and starts == [load.starts for load in self.loads]:
                    self.most_leased = max(self.most_leased, leased)
                    self.most_over = max(self.most_over, held.rss - before.rss - leased)
            held = Held.by(pid)
            pairs = zip(dataclasses.astuple(held), dataclasses.astuple(self.peak), strict=True)
            self.peak = Held(*map(max, pairs))
            if time.monotonic() - said >= 10:
                said = time.monotonic()
                counts = ", ".join(
                    f"{i}: {load.tally.answers['equal']} equal, {load.tally.answers['wrong']} wrong"
                    for i, load in enumerate(self.loads)
                )
                self._say(f"{counts}; leased {format_bytes(leased)}; R-node: {_held(held)}")

    # -- the result -----------------------------------------------------------------------------------------------

    def _result(self, before: Held, after: Held, free: int, free_after: int, status: int) -> dict[str, Any]:
        faults = [f"an S-node's clients saw: {problem}" for load in self.loads for problem in load.tally.problems]
        faults += [f"S-node {i} has answered nothing" for i, load in enumerate(self.loads) if not load.tally.tokens]
        for name, now, then in (
            ("open descriptors", after.descriptors, before.descriptors),
            ("threads", after.threads, before.threads),
            ("files in /dev/shm", after.shm, before.shm),
        ):
            if now > then:
                faults.append(f"the R-node is left with {now} {name}, there were {then}")
        if after.rss > before.rss + _SLACK:
            faults.append(f"the R-node is left with {format_bytes(after.rss)}, it had {format_bytes(before.rss)}")
        if free_after != free:
            faults.append(f"{free_after} bytes of KV-cache are free at the end, there were {free}")
        if self.most_over > _SLACK:
            faults.append(f"the R-node's memory exceeded the leases by {format_bytes(self.most_over)}")
        if self.most_leased > self.args.kv_memory:
            faults.append(f"{format_bytes(self.most_leased)} were leased of {format_bytes(self.args.kv_memory)}")
        if status:
            faults.append(f"the R-node ended with status {status}")
        names = ("equal", "wrong", "left", "cut", "failed")
        return {
            "minutes": self.args.minutes,
            "snodes": [
                {"kills": load.starts, "tokens": load.tally.tokens} | {name: load.tally.answers[name] for name in names}
                for load in self.loads
            ],
            "r_node": {
                "before": dataclasses.asdict(before) | {"free": free},
                "most": dataclasses.asdict(self.peak),
                "after": dataclasses.asdict(after) | {"free": free_after},
                "most_leased": int(self.most_leased),
                "most_over_leased": int(self.most_over),
            },
            "faults": faults,
        }


def _checkpoint(directory: Path, i: int, seed: int) -> Namespace:
    layers, heads, kv_heads, head_size, hidden = _SHAPES[i % len(_SHAPES)]
    return Namespace(
        out=directory,
        model="llama-125m",  # gives the sizes that are not given here
        family="llama",
        layers=layers,
        hidden=hidden,
        intermediate=2 * hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab=4096,
        max_positions=4096,
        dtype="fp32",
        seed=1000 * seed + i,
    )


def _held(held: Held) -> str:
    return f"{format_bytes(held.rss)}, {held.descriptors} descriptors, {held.threads} threads"


def _table(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    columns = ["kills", "equal", "wrong", "left", "cut", "failed", "tokens"]
    lines = ["S-node" + "".join(f"{name:>9}" for name in columns)]
    for i, row in enumerate(result["snodes"]):
        lines.append(f"{i:<6}" + "".join(f"{row[name]:>9}" for name in columns))
    r_node = result["r_node"]
    lines += ["", f"{'R-node':<12}{'memory':>12}{'descriptors':>13}{'threads':>9}{'/dev/shm':>10}{'KV free':>12}"]
    for when in ("before", "most", "after"):
        held = r_node[when]
        free = format_bytes(held["free"]) if "free" in held else ""
        numbers = f"{held['descriptors']:>13}{held['threads']:>9}{held['shm']:>10}"
        lines.append(f"{when:<12}{format_bytes(held['rss']):>12}{numbers}{free:>12}")
    lines.append(
        f"\nmost leased {format_bytes(r_node['most_leased'])}; the R-node's memory was at most "
        f"{format_bytes(r_node['most_over_leased'])} over what it held before plus what was leased"
    )
    return "\n".join(lines)
