"""Recovery of a cluster: nodes are added, killed and drained while clients stream through two routers.

A Ray cluster of several raylets is started on this machine, and S-nodes, R-nodes and the routers on it as
`fastdecode-cluster up` does. Each client asks for the same greedy completion again and again, in fp32, so every text is
compared with the undisturbed one. A client whose connection breaks comes back through the other router with its
Last-Event-ID. "recovered" is the time from the event until all nodes serve and all links are open;
"longest pause" is the longest time between two events of a stream that ran meanwhile. All nodes share this machine's
cores, so the start of a process takes longer here than on machines of their own.

`python tests/helpers/nodes/cluster_recovery.py` prints a table; tests/cluster judges what it prints with --json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from fastdecode.api.continuation import HEADER, router_proof
from fastdecode.bench.options import print_result
from fastdecode.cluster.config import (
    ClusterConfig,
    ClusterError,
    PrefillNodesConfig,
    RNodesConfig,
    RouterConfig,
    SNodesConfig,
)
from fastdecode.cluster.directory import links_to
from fastdecode.daemon.config_files import read_secret

_EVENTS = (
    "scale",
    "kill-r",
    "kill-r-actor",
    "kill-s",
    "drain-r",
    "drain-s",
    "kill-router",
    "kill-directory",
    "kill-raylet",
)
_PREFILL_EVENTS = ("kill-p", "drain-p")
_WHAT = {
    "scale": "R-nodes scaled from 1 to 4",
    "kill-r": "kill -9 of an R-node",
    "kill-r-actor": "kill -9 of an R-node's actor",
    "kill-s": "kill -9 of an S-node",
    "drain-r": "an R-node drained",
    "drain-s": "an S-node drained",
    "kill-router": "kill -9 of a router",
    "kill-directory": "kill -9 of the directory",
    "kill-raylet": "kill -9 of a raylet",
    "kill-p": "kill -9 of a prefill S-node",
    "drain-p": "a prefill S-node drained",
}
_OBJECT_STORE = 80 << 20  # bytes, Ray's least is 75 MB
#: Ray takes a raylet for dead that has not answered for 20 s, or whose port is closed for 4 s. Its own values suit
#: machines that do not run everything at once.
_SYSTEM = {"health_check_period_ms": 1000, "health_check_timeout_ms": 20000, "health_check_failure_threshold": 4}
_PATIENCE = {"RAY_raylet_start_wait_time_s": "120", "RAY_worker_niceness": "0"}
_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 180.0
_MOST_CONNECTIONS = 8  # that one request takes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=8, help="clients that stream all the time")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each completion")
    parser.add_argument("--raylets", type=int, default=2, help="raylets beside the head's")
    parser.add_argument("--s-nodes", type=int, default=2)
    parser.add_argument("--r-nodes", type=int, default=2, help="R-nodes at first, without the event `scale`")
    parser.add_argument(
        "--prefill-nodes", type=int, default=0, help="S-nodes that compute the prompts, which then have 300 words"
    )
    parser.add_argument("--transport", choices=("auto", "tcp"), default="auto")
    parser.add_argument("--events", type=_events, default=list(_EVENTS), metavar="EVENT,...",
                        help=", ".join((*_EVENTS, *_PREFILL_EVENTS)))  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _events(text: str) -> list[str]:
    events = text.split(",")
    for event in events:
        if event not in _WHAT:
            raise argparse.ArgumentTypeError(f"{event!r} is not one of {', '.join(_WHAT)}")
    return events


def run(args: argparse.Namespace) -> None:
    if not args.prefill_nodes and (events := [event for event in args.events if event in _PREFILL_EVENTS]):
        raise ValueError(f"--events {events[0]} needs --prefill-nodes")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # before Ray reads them
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ModuleNotFoundError:
        raise RuntimeError("Ray is not installed: pip install 'fastdecode[ray]'") from None

    from fastdecode.cluster.rays import RayCluster

    with ExitStack() as stack:
        options = {"object_store_memory": _OBJECT_STORE}
        head = options | {"num_cpus": 0, "include_dashboard": False, "_system_config": _SYSTEM}
        os.environ |= {name: value for name, value in _PATIENCE.items() if name not in os.environ}
        raylets = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(raylets.shutdown)
        nodes = [raylets.add_node(**options, num_cpus=16, memory=32 << 30) for _ in range(args.raylets)]
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory()), "secret")
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        config = ClusterConfig(
            name="bench",
            secret_file=str(secret),
            ray_address=raylets.address,
            placement="spread",
            transport=args.transport,
            r_nodes=RNodesConfig(
                count=1 if "scale" in args.events else args.r_nodes, kv_memory="128MiB", drain_seconds=60.0
            ),
            # Without a prefix cache, each prompt is computed by a prefill S-node.
            s_nodes=SNodesConfig(
                count=args.s_nodes,
                memory="1GiB",
                options={"dtype": "fp32", "kv-dtype": "fp32", "no-prefix-cache": bool(args.prefill_nodes)},
            ),
            prefill_nodes=PrefillNodesConfig(count=args.prefill_nodes, memory="1GiB"),
            router=RouterConfig(port=0, count=2),
        )
        try:
            # Ray prints what its raylets say.
            with contextlib.redirect_stdout(sys.stderr), RayCluster.connect(config) as cluster:
                began = time.monotonic()
                cluster.up(config)
                up = time.monotonic() - began
                stack.callback(ray.shutdown)
                rows, taken = asyncio.run(_measure(args, config, cluster, raylets, nodes))
                cluster.down()
        except ClusterError as error:
            raise RuntimeError(str(error)) from None
    shape = {name: getattr(args, name.replace("-", "_")) for name in ("streams", "tokens", "raylets", "transport")}
    print_result(args, shape | {"up_seconds": up, "prompts_taken": taken, "events": rows}, _print_table)


@dataclass(slots=True)
class _Client:
    """Asks for one completion again and again, by routers in turn."""

    urls: list[str]  # of the routers; the first one is asked until the connection breaks
    body: dict[str, Any]
    expected: str | None = None
    outcomes: Counter[str] = field(default_factory=Counter)
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (its end, seconds)
    requests: int = 0
    faults: list[str] = field(default_factory=list)

    async def once(self, session: aiohttp.ClientSession) -> str:
        """One request. Returns its outcome."""
        stream = _Stream(self)
        for _ in range(_MOST_CONNECTIONS):
            try:
                if (outcome := await stream.read(session)) is not None:
                    return outcome
            except (aiohttp.ClientError, OSError) as error:
                self.faults.append(f"came back after: {error or type(error).__name__}")
            self.urls.append(self.urls.pop(0))
            await asyncio.sleep(_POLL_SECONDS)
        return "connection lost"

    async def run(self, session: aiohttp.ClientSession) -> None:
        while True:
            outcome = await self.once(session)
            self.outcomes[outcome] += 1
            self.requests += 1
            if outcome.startswith("refused"):
                await asyncio.sleep(_POLL_SECONDS)


class _Stream:
    """The answer to one request of a client, over all connections that it takes."""

    def __init__(self, client: _Client):
        self._client = client
        self._text, self._event_id, self._last = "", "", None

    async def read(self, session: aiohttp.ClientSession) -> str | None:
        """Read on. Returns the outcome of the request; None: the connection has ended before the stream."""
        client = self._client
        headers = {"Last-Event-ID": self._event_id}
        async with session.post(f"{client.urls[0]}/completions", json=client.body, headers=headers) as answer:
            if answer.status != 200:
                client.faults.append((await answer.text())[:300])
                return f"refused with {answer.status}"
            event_id = ""
            async for line in answer.content:
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                if line.startswith(b"data: [DONE]"):
                    return self._outcome()
                if line.startswith(b"data: "):
                    self._event_id = event_id
                    if (fault := self._take(orjson.loads(line[6:]))) is not None:
                        return f"ended with {fault}"
        return None

    def _take(self, event: dict[str, Any]) -> str | None:
        """Take an event. Returns the code of the error that it is."""
        if "error" in event:
            self._client.faults.append(event["error"]["message"])
            return str(event["error"]["code"])
        now = time.monotonic()
        if self._last is not None:
            self._client.gaps.append((now, now - self._last))
        self._last = now
        self._text += event["choices"][0]["text"]
        return None

    def _outcome(self) -> str:
        if self._client.expected is None:
            self._client.expected = self._text
        return "identical" if self._text == self._client.expected else "different"


async def _measure(
    args: argparse.Namespace, config: ClusterConfig, cluster: Any, raylets: Any, nodes: list[Any]
) -> tuple[list[dict[str, Any]], int]:
    """A row for each event, and how many prompts the S-nodes have got from prefill S-nodes before the first one."""
    urls = [entry.url for entry in cluster.view().entries if entry.role == "router"]
    secret = read_secret(Path(config.secret_file or ""))
    assert secret is not None
    rows = []
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
        body = {"model": "fastdecode-demo", "max_tokens": args.tokens, "temperature": 0, "stream": True,
                "ignore_eos": True}  # fmt: skip
        prompts = [f"It was the {i}th of" for i in range(args.streams)]
        if args.prefill_nodes:
            prompts = [" ".join(f"{i * n} of" for n in range(150)) for i in range(1, args.streams + 1)]
        clients = [
            _Client(urls[i % 2 :] + urls[: i % 2], body | {"prompt": prompt}) for i, prompt in enumerate(prompts)
        ]
        for client in clients:
            await client.once(session)
        s_nodes = [entry.url for entry in cluster.view().entries if entry.role == "s"]
        proof = {HEADER: router_proof(secret, b"")}
        taken = sum([await _taken(session, s_node, proof) for s_node in s_nodes])
        running = [asyncio.create_task(client.run(session)) for client in clients]
        stack.callback(lambda: [task.cancel() for task in running])
        for event in args.events:
            print(_WHAT[event], file=sys.stderr, flush=True)
            await _next_requests(clients, running)
            for client in clients:
                client.outcomes.clear()
                client.gaps.clear()
                client.faults.clear()
            before = {entry.name: entry.pid for entry in cluster.view().entries}
            began = time.monotonic()
            killed = await asyncio.to_thread(_happen, event, cluster, raylets, nodes)
            recovered = await _recovered(cluster, {name: before[name] for name in killed}) - began
            await _next_requests(clients, running)
            outcomes = sum((client.outcomes for client in clients), Counter[str]())
            pauses = [seconds for client in clients for end, seconds in client.gaps if end >= began]
            faults = sorted({fault for client in clients for fault in client.faults})
            rows.append(
                {
                    "event": event,
                    "recovered_seconds": recovered,
                    "longest_pause_seconds": max(pauses, default=0.0),
                    "outcomes": dict(outcomes),
                    "faults": faults,
                }
            )
        return rows, taken


async def _taken(session: aiohttp.ClientSession, url: str, proof: dict[str, str]) -> int:
    """How many prompts an S-node has got from prefill S-nodes since its start."""
    async with session.get(f"{url}/metrics", headers=proof) as answer:
        lines = (await answer.text()).splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith("fastdecode:prompts_taken_total"))))


async def _next_requests(clients: list[_Client], running: list[asyncio.Task[None]]) -> None:
    """Wait until every client has ended the request that it has now."""
    goals = [client.requests + 1 for client in clients]
    async with asyncio.timeout(_SETTLE_SECONDS):
        while any(client.requests < goal for client, goal in zip(clients, goals, strict=True)):
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(_POLL_SECONDS)


def _happen(event: str, cluster: Any, raylets: Any, nodes: list[Any]) -> list[str]:
    """Let an event happen. Returns the names of the nodes whose processes it kills."""
    last_r, last_s, *last_p = (places[-1].node for role in "rsp" if (places := cluster.actors(role)))
    match event:
        case "scale":
            cluster.scale("r", 4)
        case "drain-r":
            cluster.drain(last_r)
        case "drain-s":
            cluster.drain(last_s)
        case "drain-p":
            cluster.drain(last_p[0])
        case "kill-directory":
            os.kill(_process_of("directory"), signal.SIGKILL)
        case "kill-raylet":
            entries = [e for e in cluster.view().entries if e.role != "router"]
            on = {node: [e for e in entries if e.ray_node == node.node_id] for node in nodes}
            victim = max(nodes, key=lambda node: [e.role for e in on[node]].count("r"))
            nodes.remove(victim)
            raylets.remove_node(victim, allow_graceful=False)
            return [entry.name for entry in on[victim]]
        case _:
            names = {
                "kill-s": last_s,
                "kill-p": last_p[0] if last_p else "",
                "kill-router": cluster.actors("router")[0].node,
            }
            name = names.get(event, last_r)
            if event == "kill-r-actor":
                os.kill(_process_of(next(p.name for p in cluster.actors() if p.node == name)), signal.SIGKILL)
            else:
                os.kill(next(e.pid for e in cluster.view().entries if e.name == name), signal.SIGKILL)
            return [name]
    return []


def _process_of(actor: str) -> int:
    """The process id of a Ray actor."""
    import ray

    pid: int = ray.get(ray.get_actor(actor).__ray_call__.remote(lambda _: os.getpid()))
    return pid


async def _recovered(cluster: Any, killed: dict[str, int | None]) -> float:
    """Wait until all nodes serve and all links are open. Returns when that was. `killed`: the ids of the processes that
    were killed, by their nodes."""
    async with asyncio.timeout(_SETTLE_SECONDS):
        while True:
            with contextlib.suppress(ClusterError):  # the directory is being started again
                if await asyncio.to_thread(_all_well, cluster, killed):
                    return time.monotonic()
            await asyncio.sleep(_POLL_SECONDS)


def _all_well(cluster: Any, killed: dict[str, int | None]) -> bool:
    view = cluster.view()
    names = {place.node for place in cluster.actors()}
    running = {entry.name: entry for entry in view.entries if entry.state == "running"}
    if running.keys() != names or any(running[name].pid == pid for name, pid in killed.items()):
        return False
    s_nodes = [entry for entry in running.values() if entry.role in "sp"]
    r_nodes = [entry for entry in running.values() if entry.role == "r"]
    return all(len(links_to(entry, view)) == len(s_nodes) for entry in r_nodes)


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['streams']} streams of {result['tokens']} tokens through two routers, {result['raylets']} raylets, "
        f"transport {result['transport']}; up in {result['up_seconds']:.1f} s"
    )
    if result["prompts_taken"]:
        print(f"{result['prompts_taken']} prompts computed by prefill S-nodes")
    print(f"{'event':32} {'recovered':>10} {'longest pause':>14}  streams")
    for row in result["events"]:
        outcomes = ", ".join(f"{n} {what}" for what, n in sorted(row["outcomes"].items()))
        print(
            f"{_WHAT[row['event']]:32} {row['recovered_seconds']:8.1f} s {row['longest_pause_seconds']:12.2f} s  "
            f"{outcomes}"
        )
        for fault in row["faults"]:
            print(f"    {fault}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    run(parser.parse_args())
