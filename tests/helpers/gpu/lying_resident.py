"""A real engine whose S-Part runs on a lying device (lying_device.py) that has KV pages of its own beside R-nodes.

Arguments: a case of CASES, "staged" or "bypass", and a model directory. Prints a JSON object: "equal", whether every
stream has the tokens of transformers; "resident" and "crossed", how many sequences were placed on the device and on
R-nodes; "copied", whether a page was copied; "captured", whether a captured step had rows of the device's pages;
"preemptions"; "alive", of each place; "left", the device's pages that are not free once the prefix cache is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nodes.rnode_process import RNodeProcess

from fastdecode.engine.engine import Engine
from fastdecode.engine.scheduling.cluster import Cluster
from fastdecode.engine.state.request import SamplingParams, TokenEvent
from fastdecode.spart import SPart, load_model
from fastdecode.spart.exchange.bypass import Bypass
from fastdecode.spart.exchange.choice import ChosenExchange
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect
from gpu.late_pages import late_kernels
from gpu.lying_device import NAME, LyingDevice, take_torchs_place
from gpu.lying_engine import OnDevice, ThreadedDriver, ThreadedStream, started

ROWS = 256
PAGE_BYTES = 3 * 2 * 2 * 128 * 16 * 4  # layers, K and V, KV heads, tokens, head size, fp32
N_NEW = 24
CHOICES = 3  # of prompt 2


@dataclass(frozen=True)
class Case:
    pages: int  # of the device
    r_pages: tuple[int, ...]  # of each R-node
    kill: bool = False  # the last R-node, once every stream has a token
    kv_dtype: str = "fp32"


CASES = {
    "all": Case(64, (8,)),
    "kernels": Case(64, (8,), kv_dtype="fp16"),
    "too small": Case(6, (64,)),
    "short of pages": Case(3, (3,)),
    "killed": Case(5, (64, 64), kill=True),
}


def prompts() -> list[list[int]]:
    """Some of which grow beyond a page."""
    generator = torch.Generator().manual_seed(3)
    lengths = (120, 126, 200, 124, 10, 64, 3, 140, 30)
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in lengths]


def continued(prompt: list[int], answer: list[int]) -> list[int]:
    """A prompt that goes on where a sequence has ended, in the middle of a page."""
    return [*prompt, *answer, 5, 6, 7]


def by_transformers(directory: Path) -> list[list[int]]:
    """The answers to all prompts, and to the last one continued."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def answer(prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        made = model.generate(tokens, do_sample=False, max_new_tokens=N_NEW, min_new_tokens=N_NEW, eos_token_id=None)
        tail: list[int] = made[0, len(prompt) :].tolist()
        return tail

    found = [answer(prompt) for prompt in prompts()]
    return [*found, answer(continued(prompts()[-2], found[-2]))]


async def generate(engine: Engine, halfway: Callable[[], None]) -> list[list[list[int]]]:
    """The answers to all prompts, and, once all of these have ended, to one of them continued. `halfway` is called once
    all streams have a token."""
    params = SamplingParams(temperature=0.0, max_tokens=N_NEW, ignore_eos=True)

    def submit(i: int, prompt: list[int]) -> list[asyncio.Queue[Any]]:
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(CHOICES if i == 2 else 1)]
        engine.submit_choices(prompt, params, {f"{i}/{k}": queue.put_nowait for k, queue in enumerate(queues)})
        return queues

    async def rest(queue: asyncio.Queue[Any], tokens: list[int]) -> list[int]:
        while len(tokens) < N_NEW:
            event = await queue.get()
            if not isinstance(event, TokenEvent):
                raise event
            tokens.append(event.token)
        return tokens

    requests = [submit(i, prompt) for i, prompt in enumerate(prompts())]
    begun = [[(queue, [(await queue.get()).token]) for queue in queues] for queues in requests]
    halfway()
    answers = [[await rest(queue, tokens) for queue, tokens in queues] for queues in begun]
    [last] = submit(len(requests), continued(prompts()[-2], answers[-2][0]))
    return [*answers, [await rest(last, [])]]


def requests_of(bypass: Bypass, links: list[Link]) -> frozenset[int]:
    """The words by which streams ask R-nodes for layers."""
    regions = [bypass._region(link) for link in links]
    return frozenset(region.gate(slot).request for region in regions for slot in (0, 1))


async def serve(case: Case, bypassed: bool, directory: Path, folder: str) -> dict[str, Any]:
    device = OnDevice.device = LyingDevice()
    report: dict[str, Any] = {"resident": 0, "crossed": 0, "copied": False, "captured": False}
    with contextlib.ExitStack() as stack:
        nodes = []
        for i in range(len(case.r_pages)):
            nodes.append(RNodeProcess(f"shm://{folder}/r{i}", kv_bytes=64 << 20))
            stack.callback(nodes[-1].end, signal.SIGKILL)
        with device, torch.inference_mode():  # torch makes no view of another tensor of the device without that mode
            model = load_model(directory, device=NAME, dtype="fp32")
            resident = ResidentLink(
                model.hello(3, ROWS, case.kv_dtype, None, 32), case.pages, model.device, late_kernels
            )
            crossing = [
                await connect(node.url, model.hello(3, ROWS, case.kv_dtype, pages * PAGE_BYTES, 32), None)
                for node, pages in zip(nodes, case.r_pages, strict=True)
            ]
            chosen = ChosenExchange.plain(model.device)
            if bypassed:
                driver = ThreadedDriver(device)
                bypass = Bypass(driver.kernels(), lambda: ThreadedStream(device), most_rows=8)
                chosen = ChosenExchange("bypass", bypass=bypass)
                driver.requests = requests_of(bypass, crossing)
            spart = SPart(model, [resident, *crossing], chosen)
            if bypassed:
                bypass.prepare(spart, 2, least=8)
        count(report, resident)
        async with started(spart, OnDevice, prefix_cache=True, max_uncached_suffix=256) as engine:
            tokens = await generate(engine, lambda: nodes[-1].end(signal.SIGKILL) if case.kill else None)
            report["preemptions"] = engine.stats.totals.preemptions
            report["alive"] = [node.alive for node in engine.stats.nodes]
            ledger = engine.cluster.nodes[0]
            ledger.drain()
            engine.r_nodes.send_pending()
            while ledger.pages_freeing:
                await asyncio.sleep(0.01)
            report["left"] = case.pages - resident.arena.lists.n_free
        for link in crossing:
            await link.close()
    want = by_transformers(directory)
    report["equal"] = all(choice == one for one, choices in zip(want, tokens, strict=True) for choice in choices)
    return report


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
        return start(bypass, spart, rows, crossing, own, *arguments)

    Bypass._start = started  # type: ignore[method-assign]
    Cluster.admit = admitted  # type: ignore[method-assign]
    resident.kernels.copy = copied  # type: ignore[method-assign]


def main() -> None:
    take_torchs_place()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(serve(CASES[sys.argv[1]], sys.argv[2] == "bypass", Path(sys.argv[3]), folder))))


if __name__ == "__main__":
    main()
