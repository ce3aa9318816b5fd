"""A real engine whose S-Part runs on a lying device (lying_device.py) that has KV pages of its own beside R-nodes.

Arguments: a case of CASES; "staged", "bypass", or "driver" for the bypass on the simulated CUDA driver
(bypass_on_driver.py), with pages in fp16; and a model directory. Prints a JSON object: "equal", whether every
stream has the tokens of transformers; "resident" and "crossed", how many sequences were placed on the device and on
R-nodes; "copied", whether a page was copied; "captured", whether a captured step had rows of the device's pages, and
"merged", whether one had rows of a sequence that was cut; "preemptions"; "recomputed", tokens; "guessed", tokens;
"ways", steps of each Way; "spilled" and "refilled", bytes that have left the device and come back; "reused", prompt
tokens that were cached; "alive", of each place; "left", the pages of all live places that are not free once the prefix
cache is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from models.greedy import is_greedy
from nodes.rnode_process import RNodeProcess

from fastdecode.engine.engine import Engine
from fastdecode.engine.migration.cut_moves import Spill
from fastdecode.engine.scheduling.cluster import Cluster
from fastdecode.engine.state.ledger import RNodeLedger
from fastdecode.engine.state.request import SamplingParams, TokenEvent
from fastdecode.spart import SPart, load_model
from fastdecode.spart.exchange.bypass import Bypass
from fastdecode.spart.exchange.chosen import ChosenExchange
from fastdecode.spart.resident.arena import PageArena
from fastdecode.spart.resident.kernels import ResidentKernels
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.transports._native import Proxy
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect
from gpu.late_pages import late_kernels
from gpu.lying_device import NAME, LyingDevice, take_torchs_place
from gpu.lying_engine import OnDevice, ThreadedDriver, ThreadedStream, started

ROWS = 256
PAGE_BYTES = 3 * 2 * 2 * 128 * 16 * 4  # layers, K and V, KV heads, tokens, head size, fp32
CHOICES = 3  # of prompt 2
LONG = (240, 250, 3)  # prompts whose answers grow over several pages


@dataclass(frozen=True)
class Case:
    pages: int  # of the device
    r_pages: tuple[int, ...]  # of each R-node
    #: When R-nodes are killed: "begun", the last one once every stream has a token; "cut", the one that has the first
    #: tokens of a sequence once there is one; "spilling", the one that pages are on their way to; "refilling", the one
    #: that pages are on their way from; "prefix spilling" and "prefix returning", the same with an idle prefix's pages.
    #: "": none.
    kill: str = ""
    kills: int = 1  # R-nodes that are killed
    #: "paused": the first sequence that is cut is paused at once; "recomputed": it loses its cache, too.
    preempts: str = ""
    kv_dtype: str = "fp32"
    seed: int = 3  # of the prompts' tokens
    lengths: tuple[int, ...] = (120, 126, 200, 124, 10, 64, 3, 140, 30)  # of the prompts; some grow beyond a page
    n_new: int = 24
    guesses: int = 0  # most tokens of a sequence that a step guesses
    #: Tokens of the answer to the second prompt, which comes once the first one has a token: so the sequence that ends
    #: last is the one to be cut. None: as many as of the others, and all prompts come at once.
    n_second: int | None = None
    in_turn: bool = False  # each prompt comes once the answer to the one before has ended

    def length(self, i: int) -> int:
        """Tokens of the answer to prompt i."""
        return self.n_second if i == 1 and self.n_second is not None else self.n_new


CASES = {
    "all": Case(64, (8,)),
    "kernels": Case(64, (8,), kv_dtype="fp16"),
    "too small": Case(4, (64,)),
    "short of pages": Case(3, (3,)),
    "killed": Case(5, (64, 64), kill="begun"),
    "cut": Case(5, (64,), lengths=LONG, n_new=150),
    "cut and paused": Case(5, (64,), lengths=LONG[:2], n_new=40, preempts="paused"),
    "cut and recomputed": Case(5, (64,), lengths=LONG[:2], n_new=40, preempts="recomputed"),
    # Seven pages for the prompts. The short ones grow to 123 tokens on theirs, while each choice soon needs one more.
    "cut forks": Case(8, (64,), lengths=(3, 3, 380), n_new=120, guesses=2),
    "cut and killed": Case(5, (64, 64), kill="cut", lengths=LONG, n_new=60),
    "killed while spilling": Case(5, (64, 64), kill="spilling", lengths=LONG, n_new=60),
    "two killed while spilling": Case(5, (64, 64, 64), kill="spilling", kills=2, lengths=LONG, n_new=60),
    "refilled": Case(5, (64,), lengths=LONG[:2], n_new=120, n_second=30),
    "killed while refilling": Case(5, (64, 64), kill="refilling", lengths=LONG[:2], n_new=120, n_second=30),
    "two killed while refilling": Case(
        5, (64, 64), kill="refilling", kills=2, lengths=LONG[:2], n_new=120, n_second=30
    ),
    "idle prefix": Case(5, (64,), lengths=LONG[:2], in_turn=True),
    "killed while a prefix spills": Case(5, (64, 64), kill="prefix spilling", lengths=LONG[:2], in_turn=True),
    "killed while a prefix returns": Case(5, (64, 64), kill="prefix returning", lengths=LONG[:2], in_turn=True),
}


def prompts(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(case.seed)
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in case.lengths]


def continued(prompt: list[int], answer: list[int]) -> list[int]:
    """A prompt that goes on where a sequence has ended, in the middle of a page."""
    return [*prompt, *answer, 5, 6, 7]


def are_of_transformers(case: Case, directory: Path, answers: list[list[list[int]]]) -> bool:
    """Whether transformers gives these answers to all prompts, and to the last one continued."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = [*prompts(case), continued(prompts(case)[-2], answers[-3][0])]
    return all(
        is_greedy(model, prompt, answer) and len(answer) == case.length(i)
        for i, (prompt, choices) in enumerate(zip(asked, answers, strict=True))
        for answer in choices
    )


async def generate(case: Case, engine: Engine, halfway: Callable[[], object]) -> list[list[list[int]]]:
    """The answers to all prompts, and, once all of these have ended, to one of them continued. `halfway` is called once
    all streams have a token."""

    def submit(i: int, prompt: list[int]) -> list[asyncio.Queue[Any]]:
        params = SamplingParams(temperature=0.0, max_tokens=case.length(i), ignore_eos=True)
        queues: list[asyncio.Queue[Any]] = [
            asyncio.Queue() for _ in range(CHOICES if i == 2 < len(case.lengths) else 1)
        ]
        engine.submit_choices(prompt, params, {f"{i}/{k}": queue.put_nowait for k, queue in enumerate(queues)})
        return queues

    async def rest(i: int, queue: asyncio.Queue[Any], tokens: list[int]) -> list[int]:
        while len(tokens) < case.length(i):
            event = await queue.get()
            if not isinstance(event, TokenEvent):
                raise event
            tokens.append(event.token)
        return tokens

    async def first(queues: list[asyncio.Queue[Any]]) -> list[tuple[asyncio.Queue[Any], list[int]]]:
        return [(queue, [(await queue.get()).token]) for queue in queues]

    if case.n_second is None and not case.in_turn:
        requests = [submit(i, prompt) for i, prompt in enumerate(prompts(case))]
        begun = [await first(queues) for queues in requests]
    else:
        begun = []
        for i, prompt in enumerate(prompts(case)):
            begun.append(await first(submit(i, prompt)))
            if case.in_turn:
                await rest(i, *begun[i][0])
    halfway()
    answers = [[await rest(i, queue, tokens) for queue, tokens in queues] for i, queues in enumerate(begun)]
    [last] = submit(len(begun), continued(prompts(case)[-2], answers[-2][0]))
    return [*answers, [await rest(len(begun), last, [])]]


def on_driver(folder: str) -> tuple[LyingDevice, Callable[[PageArena], ResidentKernels]]:
    """A device whose memory and streams are the simulated CUDA driver's, and the kernels of its pages."""
    from gpu.bypass_on_driver import DriverDevice
    from gpu.cuda_driver import open_driver
    from gpu.pages_on_driver import kernels_on

    cuda: Any = open_driver(Path())
    cuda.reset(queues=8, delay_us=20)
    cuda.use_here()
    device = DriverDevice(cuda)
    return device, kernels_on(device, Path(folder))


def bypass_on(device: Any, crossing: list[Link]) -> Bypass:
    if hasattr(device, "cuda"):
        return Bypass(device.cuda.kernels(), device.make_stream, most_rows=8, proxy=Proxy())
    driver = ThreadedDriver(device)
    bypass = Bypass(driver.kernels(), lambda: ThreadedStream(device), most_rows=8)
    driver.requests = requests_of(bypass, crossing)
    return bypass


def requests_of(bypass: Bypass, links: list[Link]) -> frozenset[int]:
    """The words by which streams ask R-nodes for layers."""
    regions = [bypass._region(link) for link in links]
    return frozenset(region.gate(slot).request for region in regions for slot in (0, 1))


async def serve(case: Case, exchange: str, directory: Path, folder: str) -> dict[str, Any]:
    device, kernels = LyingDevice(), late_kernels
    if exchange == "driver":
        device, kernels = on_driver(folder)
        case = replace(case, kv_dtype="fp16", seed=20)  # no rounding to fp16 decides these answers
    OnDevice.device = device
    report: dict[str, Any] = {"resident": 0, "crossed": 0, "copied": False, "captured": False, "merged": False}
    with contextlib.ExitStack() as stack:
        nodes = []
        for i in range(len(case.r_pages)):
            nodes.append(RNodeProcess(f"shm://{folder}/r{i}", kv_bytes=64 << 20))
            stack.callback(nodes[-1].end, signal.SIGKILL)
        with device, torch.inference_mode():  # torch makes no view of another tensor of the device without that mode
            model = load_model(directory, device=NAME, dtype="fp32")
            resident = ResidentLink(model.hello(3, ROWS, case.kv_dtype, None, 32), case.pages, model.device, kernels)
            crossing = [
                await connect(node.url, model.hello(3, ROWS, case.kv_dtype, pages * PAGE_BYTES, 32), None)
                for node, pages in zip(nodes, case.r_pages, strict=True)
            ]
            chosen = ChosenExchange.plain(model.device)
            if exchange != "staged":
                chosen = ChosenExchange("bypass", bypass=bypass_on(device, crossing))
            spart = SPart(model, [resident, *crossing], chosen)
            if chosen.bypass is not None:
                chosen.bypass.prepare(spart, 2, least=8)
        count(report, resident)
        async with started(spart, OnDevice, prefix_cache=True, max_uncached_suffix=256, guesses=case.guesses) as engine:
            if case.pages < 64 and engine.scheduler.way_choice is not None:
                # How long steps take on the lying device says nothing about whether R-nodes pay.
                engine.scheduler.way_choice.pays = lambda *_: True  # type: ignore[method-assign]
            killing = Killer(case, engine, resident, nodes)
            tokens = await generate(case, engine, killing.begun)
            killing.end()
            totals = engine.stats.totals
            report["preemptions"], report["guessed"] = totals.preemptions, totals.guessed
            report["recomputed"], report["reused"] = engine.scheduler.recomputed_tokens, totals.prefix_hits
            report["ways"] = [totals.steps_near, totals.steps_together, totals.steps_apart]
            report["spilled"], report["refilled"] = totals.spilled_bytes, totals.refilled_bytes
            report["alive"] = [node.alive for node in engine.stats.nodes]
            spiller = engine.r_nodes.spiller
            while spiller.move is not None or (spiller.prefixes is not None and spiller.prefixes.busy):
                await asyncio.sleep(0.01)
            for ledger in engine.cluster.alive:
                ledger.drain()
            engine.r_nodes.send_pending()
            while any(ledger.pages_freeing for ledger in engine.cluster.alive):
                await asyncio.sleep(0.01)
            report["left"] = sum([(await node.link.stats())["pages_used"] for node in engine.cluster.alive])
        for link in crossing:
            await link.close()
    report["equal"] = are_of_transformers(case, directory, tokens)
    return report


class Killer:
    """Kills R-nodes of a running engine, or preempts its sequences, when the case says."""

    def __init__(self, case: Case, engine: Engine, resident: ResidentLink, nodes: list[RNodeProcess]):
        self._case, self._engine, self._nodes = case, engine, nodes
        self._memory = resident._pinned.memory
        self._left = case.kills
        self._task = asyncio.create_task(self._once_cut()) if case.kill == "cut" else None
        self._spiller = engine.r_nodes.spiller
        self._callbacks = self._spiller._engine
        self._spiller._engine = replace(self._callbacks, changed=self._preempt_and_change)
        resident._pinned.memory = self._kill_and_take  # type: ignore[method-assign]

    def begun(self) -> None:
        """Every stream has a token."""
        if self._case.kill == "begun":
            self._kill(self._nodes[-1].url)

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _kill(self, url: str) -> None:
        """Kill the R-node at `url`, and others if the case says so."""
        for node in sorted(self._nodes, key=lambda node: node.url != url)[: self._left]:
            node.end(signal.SIGKILL)
        self._left = 0

    async def _once_cut(self) -> None:
        while self._left:
            await asyncio.sleep(0.005)
            for seq in self._engine.scheduler.running:
                if self._left and self._engine.stats.cut_sequences and seq.prefix is not None:
                    self._kill(seq.prefix.node.url)

    def _preempt_and_change(self) -> None:
        """A cut has moved, and no driver has planned a step since: pause the sequence that was cut first."""
        scheduler = self._engine.scheduler
        if self._case.preempts and not scheduler.cluster.totals.preemptions and self._spiller.cut_sequences:
            [seq] = self._spiller.cut_sequences
            assert scheduler.running.can_pause(seq)
            scheduler.pauses._pause(seq)
            if self._case.preempts == "recomputed":
                seq.placed_on.drop_paused(seq)
        self._callbacks.changed()

    def _kill_and_take(self, n_bytes: int) -> torch.Tensor:
        """Take memory for the next pages of a migration connection, which is open."""
        spiller = self._engine.r_nodes.spiller
        if (move := spiller.move) is not None:
            self._kill_if("spilling" if isinstance(move, Spill) else "refilling", move.r_node)
        prefixes = spiller.prefixes
        if prefixes is not None and (prefix := prefixes.move) is not None:
            spills = prefix.source.resident
            self._kill_if(f"prefix {'spilling' if spills else 'returning'}", prefix.target if spills else prefix.source)
        return self._memory(n_bytes)

    def _kill_if(self, kind: str, node: RNodeLedger) -> None:
        if self._left and self._case.kill == kind:
            self._kill(node.url)


def count(report: dict[str, Any], resident: ResidentLink) -> None:
    """Let `report` count the sequences by place, and tell whether a page was copied and whether a captured step has
    had rows of the device's pages."""
    admit, copy, start = Cluster.admit, resident.kernels.copy, Bypass._start

    def admitted(cluster: Cluster, seq: Any, placement: Any) -> None:
        report["resident" if placement.node.resident else "crossed"] += 1
        admit(cluster, seq, placement)

    def copied(*arguments: Any) -> None:
        report["copied"] = True
        copy(*arguments)

    def started(bypass: Bypass, spart: Any, rows: Any, crossing: Any, own: Any, *arguments: Any) -> Any:
        report["captured"] |= own is not None
        report["merged"] |= any(rows.partial for rows in crossing)
        return start(bypass, spart, rows, crossing, own, *arguments)

    Bypass._start = started  # type: ignore[method-assign]
    Cluster.admit = admitted  # type: ignore[method-assign]
    resident.kernels.copy = copied  # type: ignore[method-assign]


def main() -> None:
    take_torchs_place()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(serve(CASES[sys.argv[1]], sys.argv[2], Path(sys.argv[3]), folder))))


if __name__ == "__main__":
    main()
