"""An S-node of a large shape under load: prompts, alone and beside streams, and the first step of each size class.

`measure` is the part of the proof. As a process of its own, the module measures prompts by transformers; its arguments
are a model's directory, a device, a dtype, and cells such as 64x512 (prompts and tokens of each). It prints a JSON
object for each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastdecode.bench.serving.client import LoadRun, Target, first_model, run
from fastdecode.bench.serving.workload import LoadRequest, Prompts, fixed
from fastdecode.bench.soaking.processes import Node
from fastdecode.daemon.config import NodeConfig
from gpu_proof.setting import OutOfTime, Setting

_REPEATS = 3
_STREAM_TOKENS = 400  # of a stream that decodes beside prompts: more than it has when they are done
_STREAM_SECONDS = 0.2  # streams decode alone for so long
_STEP_TOKENS = 16  # of each sequence, to see the steps of a size class
#: Prompts that transformers computes at once: more tokens find no more of the GPU idle, and take its memory.
_PEER_TOKENS = 8192


def measure(setting: Setting, model: Path, dtype: str) -> None:
    """Prompt tokens a second of one long prompt and of many, beside transformers; the time between tokens of streams
    beside the many; the longest gap between tokens when a size class runs for the first time, and later."""
    one, many, streams, batches = (
        (64, (4, 16), 2, (2,)) if setting.simulated else (4096, (64, 512), 8, (2, 8, 16, 32, 64))
    )
    setting.results |= {"prompts": [], "first steps": []}
    with setting.share(0.7, "node"):
        asyncio.run(_by_node(setting, model, dtype, one, many, streams, batches))
    cells = [f"1x{one}", f"{many[0]}x{many[1]}"]
    for line in setting.lines("prompts", ["-m", "gpu_proof.under_load", str(model), setting.device, dtype, *cells]):
        setting.results["prompts"].append(setting.timed_cell(json.loads(line)))


async def _by_node(
    setting: Setting,
    model: Path,
    dtype: str,
    one: int,
    many: tuple[int, int],
    streams: int,
    batches: tuple[int, ...],
) -> None:
    name = {"float32": "fp32", "float16": "fp16"}[dtype]
    options = ["--model", str(model), "--device", setting.device, "--dtype", name, "--kv-dtype", "int8", "--port", "0"]
    options += ["--no-prefix-cache", "--max-batch-size", str(max(max(batches) // 2, streams))]
    node = Node(setting.out / "under-load.log", *options)
    try:
        async with asyncio.timeout(setting.left()):
            url = await node.read(r"Serving \S+ on (http://\S+/v1)")
            server = Target(url, await first_model(url, None))
            await _first_steps(setting, server, batches)
            await _prompts(setting, server, one, many, streams)
    except TimeoutError:
        raise OutOfTime("the node has reached the part's bound") from None
    finally:
        node.kill()


async def load(setting: Setting, server: Target, requests: list[LoadRequest], seed: int) -> LoadRun:
    """Raises RuntimeError if a request fails."""
    limit = setting.left()
    done = await run(
        server, requests, Prompts(300, 1000, seed), concurrency=None, timeout=limit, deadline=limit, progress=False
    )
    if wrong := [answer.error or "no token" for answer in done.answers if not answer.ok]:
        raise RuntimeError(f"{len(wrong)} of {len(requests)} requests failed: {wrong[0]}")
    return done


async def _first_steps(setting: Setting, server: Target, batches: tuple[int, ...]) -> None:
    """The goal is that no first step takes more than 1.2 times the time of the later ones."""
    await load(setting, server, fixed(1, 8, _STEP_TOKENS), 0)
    for n in batches:
        gaps = [_longest_gap(await load(setting, server, fixed(n, 8, _STEP_TOKENS), n + k)) for k in range(_REPEATS)]
        cell = {"sequences": n, "longest_gap_ms": gaps[0] * 1e3, "later_ms": statistics.median(gaps[1:]) * 1e3}
        setting.results["first steps"].append(setting.timed_cell(cell))


def _longest_gap(done: LoadRun) -> float:
    return max(float(np.diff(answer.chunks).max(initial=0.0)) for answer in done.answers)


async def _prompts(setting: Setting, server: Target, one: int, many: tuple[int, int], streams: int) -> None:
    times = [(await load(setting, server, fixed(1, one, 1), k)).answers[0] for k in range(_REPEATS)]
    seconds = statistics.median(answer.chunks[0] - answer.sent for answer in times)
    _keep(setting, "fastdecode", 1, one, seconds)
    for beside in (0, streams):
        requests = [LoadRequest(0.0, 8, _STREAM_TOKENS)] * beside
        requests += [LoadRequest(_STREAM_SECONDS if beside else 0.0, many[1], 1)] * many[0]
        done = await load(setting, server, requests, 10 + beside)
        prompts = [answer for answer in done.answers if answer.request.prompt_tokens == many[1]]
        begin, end = min(answer.sent for answer in prompts), max(answer.chunks[0] for answer in prompts)
        others = [answer.chunks for answer in done.answers if answer.request.prompt_tokens != many[1]]
        gaps = [b - a for chunks in others for a, b in itertools.pairwise(chunks) if a < end and b > begin]
        more: dict[str, Any] = {}
        if gaps:
            more = {"beside": f"{beside} streams", "tbt_p99_ms": float(np.percentile(gaps, 99)) * 1e3}
            more["target_tbt_ms"] = str(NodeConfig().target_tbt_ms)
        _keep(setting, "fastdecode", *many, end - begin, **more)


def _keep(setting: Setting, system: str, prompts: int, tokens: int, seconds: float, **more: Any) -> None:
    setting.results["prompts"].append(setting.timed_cell(_cell(system, prompts, tokens, seconds) | more))


def _cell(system: str, prompts: int, tokens: int, seconds: float) -> dict[str, Any]:
    return {"system": system, "prompts": prompts, "tokens": tokens, "tokens_per_s": prompts * tokens / seconds}


@torch.inference_mode()
def main() -> None:
    from transformers import AutoModelForCausalLM

    directory, device, dtype, *cells = sys.argv[1:]
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()
    for cell in cells:
        prompts, tokens = map(int, cell.split("x"))
        ids = torch.randint(300, 1000, (prompts, tokens), device=device)
        times = []
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            for some in ids.split(max(1, _PEER_TOKENS // tokens)):
                first = model(some, use_cache=True, logits_to_keep=1).logits.argmax(-1)
            first.tolist()  # waits for the device
            times.append(time.perf_counter() - start)
        print(json.dumps(_cell("transformers", prompts, tokens, statistics.median(times[1:]))), flush=True)


if __name__ == "__main__":
    main()
