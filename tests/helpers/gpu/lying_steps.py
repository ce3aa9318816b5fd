"""Runs steps on a lying device and on the CPU, over links to real R-nodes, and prints whether their tokens are equal.

Arguments: the exchanges ("staged", "bypass" or "staged,bypass"), the number of links, what to leave out, model
directories. "none" leaves nothing out, and "event,download" leaves out one wait in a run, then the other; `without` and
the classes of lying_device.py and lying_driver.py have the names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu.lying_device import NAME, LyingDevice, LyingStream, take_torchs_place

SLOTS = 3
PROMPTS = 2  # the slot of steps with prompts; those before it are of mini-batches that decode


def texts(vocab_size: int) -> list[list[int]]:
    """Eight prompts: four for each mini-batch."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in (3, 40, 17, 70, 1, 55, 8, 30)]


def how_to_draw(i: int, prompt: list[int], done: list[int]) -> Any:
    """The SampleSpec of prompt `i`. Those of the even prompts are covered by a captured step; the log-probabilities
    that prompt 5 asks for are not, until it asks no more."""
    from fastdecode.spart.step.batch import SampleSpec
    from fastdecode.spart.step.penalties import LogitRules

    index = len(done)
    rules = LogitRules(bias=[(7, 2.0)], repetition=1.3, presence=0.4, prompt=prompt)
    for token in done:
        rules.generated(token)
    return [
        SampleSpec(temperature=0.0),
        SampleSpec(temperature=0.7, seed=1, index=index),
        SampleSpec(top_k=50, seed=2, index=index),
        SampleSpec(temperature=0.0),
        SampleSpec(temperature=1.2, top_p=0.95, seed=4, index=index),
        SampleSpec(seed=5, index=index, logprobs=3 if index < 2 else None),
        SampleSpec(top_k=30, top_p=0.9, min_p=0.01, seed=6, index=index),
        SampleSpec(temperature=0.0, rules=rules),
    ][i]


#: Runs of the bypass whose first steps are captured: R-nodes attend for the prompts. "first" leaves nothing out.
#: "weights": a stream does not wait for the weights. In the others a step is abandoned before: "abandoned" leaves
#: nothing out, and with "end" nobody waits for the end of what the stream was given.
FIRST = ("first", "weights")
ABANDONED = ("abandoned", "end")


def abandon(spart: Any, wait: bool) -> None:
    """Begin a step of each mini-batch and close it while its stream still has everything to do."""
    from unittest import mock

    from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch

    for slot in (0, 1):
        piece = Chunk(0, 8 + slot, 1, 0, list(range(5, 25)), False, SampleSpec(temperature=0.0), 20)
        step = spart.step(StepBatch(slot, [piece]))
        assert isinstance(next(step), int), "the step is not captured"
        with contextlib.nullcontext() if wait else mock.patch.object(LyingStream, "synchronize", lambda stream: None):
            step.close()


def generate(spart: Any, n_links: int, n_new: int = 4, chunk: int = 24, prefill: bool = True) -> list[list[int]]:
    """Tokens of eight prompts, each drawn in another way. Two mini-batches decode beside steps of prompts, which are
    prefilled in chunks. Without `prefill` the R-nodes attend for the prompts."""
    from fastdecode.spart.step.batch import Chunk, StepBatch

    prompts = texts(spart.config.vocab_size)
    done: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    while any(len(tokens) < n_new for tokens in done):
        work: list[list[tuple[int, Chunk]]] = [[] for _ in range(SLOTS)]
        for i in range(len(prompts)):
            everything = prompts[i] + done[i]
            if len(done[i]) == n_new:
                continue
            tokens = everything[cached[i] : cached[i] + chunk]
            more = cached[i] + len(tokens) < len(everything)
            spec = how_to_draw(i, prompts[i], done[i])
            prompt = prefill and cached[i] < len(prompts[i])
            link = i // 2 % n_links
            piece = Chunk(link, i, 1, cached[i], tokens, prompt, None if more else spec, len(prompts[i]))
            work[PROMPTS if prompt else i % PROMPTS].append((i, piece))
            cached[i] += len(tokens)
        if spart.exchange.bypass is not None:
            spart.exchange.bypass.settle()
        steps, groups = [], []
        for slot, pieces in enumerate(work):
            pieces.sort(key=lambda pair: pair[1].link)
            if pieces:
                groups.append([i for i, _ in pieces])
                steps.append(spart.step(StepBatch(slot, [piece for _, piece in pieces])))
        for group, output in zip(groups, in_turn(steps), strict=True):
            for i, sampled in zip(group, output.sampled, strict=True):
                if sampled is not None:
                    done[i].append(sampled.token)
    return done


def in_turn(steps: list[Any]) -> list[Any]:
    """Run the steps of several slots in turn; their outputs. The last stream of the device runs first, once every step
    waits."""
    outputs: list[Any] = [None] * len(steps)
    pending: Any = None
    try:
        while None in outputs:
            for i, step in enumerate(steps):
                if outputs[i] is None:
                    try:
                        pending = next(step)
                    except StopIteration as end:
                        outputs[i] = end.value
            if LyingDevice.current is not None and isinstance(pending, int):
                for stream in reversed(LyingDevice.current.streams[1:]):
                    stream.synchronize()
    finally:
        for step in steps:
            step.close()
    return outputs


def make_bypass(device: LyingDevice, left_out: str) -> Any:
    from fastdecode.spart.exchange.bypass import Bypass
    from gpu.lying_driver import LyingDriver

    return Bypass(LyingDriver(device, left_out).kernels(), device.make_stream, most_rows=32)


async def with_links(
    model: Any, n_links: int, bypass: Any = None, left_out: str = "none", make_spart: Any = None
) -> list[list[int]]:
    """`make_spart` is the class of the S-Part; None: SPart."""
    from models.spart_steps import linked

    from fastdecode.spart import SPart
    from fastdecode.spart.exchange.chosen import ChosenExchange

    with tempfile.TemporaryDirectory() as folder:
        async with linked(model, Path(folder), n_links, max_rows=256, n_slots=SLOTS) as links:
            with torch.inference_mode():  # torch makes no view of another tensor of the device in that mode
                choice = ChosenExchange("bypass", bypass=bypass) if bypass else None
                spart = (make_spart or SPart)(model, links, choice)
                if bypass:
                    bypass.prepare(spart, 2, least=24 if left_out in FIRST + ABANDONED else 32)
            if left_out in ABANDONED:
                abandon(spart, wait=left_out != "end")
            if left_out in FIRST + ABANDONED:
                return generate(spart, n_links, chunk=8, prefill=False)
            return generate(spart, n_links)


def main() -> None:
    take_torchs_place()
    from fastdecode.spart import load_model

    torch.set_num_threads(1)
    exchanges, n_links, directories = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[4:]
    equal = []
    for directory in map(Path, directories):
        want = asyncio.run(with_links(load_model(directory, dtype="fp32"), n_links))
        for exchange in exchanges:
            equal += [tokens(exchange, directory, n_links, wait) == want for wait in sys.argv[3].split(",")]
    print(json.dumps(equal))


@contextlib.contextmanager
def without(what: str) -> Iterator[None]:
    """Leave out a wait of the exchange: "verdict", for an R-node that is to plan the step; "reply", of the host for the
    R-nodes' O rows; "record", so that an event comes before the copies that it is for; "order", so that a stream waits
    for a layer before it asks for it; "words", so that two mini-batches use the same ones."""
    from unittest import mock

    from fastdecode.spart.exchange.base import Exchange, StepLinks
    from fastdecode.spart.exchange.staged import Staged
    from fastdecode.spart.exchange.stream_rows import MappedRegion, StreamRows

    gate, post, wait = MappedRegion.gate, StreamRows.post, StreamRows.wait

    def late(rows: Any, timeout: float) -> None:
        rows._asked += 1
        wait(rows)
        post(rows, rows._asked - 1)

    def early_event(exchange: Any) -> None:
        exchange._copied.record()
        for host, rows in zip(exchange._host, (exchange.q, exchange.kv), strict=False):
            host.copy_(rows[: len(host)], non_blocking=True)
        exchange._copied.synchronize()

    with contextlib.ExitStack() as patches:
        if what == "verdict":
            patches.enter_context(mock.patch.object(StepLinks, "judge", lambda links, timeout: None))
        elif what == "reply":
            patches.enter_context(mock.patch.object(Exchange, "wait", lambda exchange, timeout: exchange._take_rows()))
        elif what == "record":
            patches.enter_context(mock.patch.object(Staged, "_send_rows", early_event))
        elif what == "words":
            patches.enter_context(mock.patch.object(MappedRegion, "gate", lambda region, slot: gate(region, 0)))
        elif what == "order":
            patches.enter_context(mock.patch.object(StreamRows, "post", lambda rows, layer, timeout: None))
            patches.enter_context(mock.patch.object(StreamRows, "wait", late))
        yield


def tokens(exchange: str, directory: Path, n_links: int, left_out: str) -> list[list[int]] | None:
    """The tokens of a model on the device; None if a wait is left out and something has failed."""
    from fastdecode.spart import load_model

    with LyingDevice(left_out) as device, without(left_out):
        model = load_model(directory, device=NAME, dtype="fp32")
        loading = device.stream.waits
        bypass = make_bypass(device, left_out) if exchange == "bypass" else None
        try:
            got = asyncio.run(with_links(model, n_links, bypass, left_out))
        except Exception:
            if left_out in ("none", "first", "abandoned"):
                raise
            return None
        assert left_out != "none" or device.stream.waits > loading
        assert left_out != "none" or bypass is None or was_captured(bypass, device)
        return got


def was_captured(bypass: Any, device: LyingDevice) -> bool:
    """True if steps of both mini-batches have run in their streams, of which the host has waited for nothing but the
    completion words, and some of them have drawn their tokens behind the graph."""
    assert len(bypass._mini_batches) == 2
    assert bypass._behind == {"biases and penalties", "log-probabilities"}, bypass._behind
    assert not any(stream.waits for stream in device.streams[1:])
    return bypass._driver.waited > 0 and not bypass.fault


if __name__ == "__main__":
    main()
