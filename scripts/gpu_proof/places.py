"""Decode steps with KV pages in the S-node's own GPU memory, and on an R-node of the same GPU over shared memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastdecode.bench.serving.client import Target, first_model
from fastdecode.bench.serving.workload import fixed
from fastdecode.bench.soaking.processes import Node
from gpu_proof.setting import OutOfTime, Setting
from gpu_proof.under_load import load

_STREAMS, _PROMPT, _TOKENS = 32, 512, 128
_KV_MEMORY = "4GiB"  # of Llama-3-8B's int8 pages for all streams
_SPIN_US = "20000"  # as an embedded R-node beside a GPU spins within a step


def measure(setting: Setting, model: Path, dtype: str) -> None:
    """Output tokens a second of equal streams. The goal is 0.8 times those of the S-node's own pages on an R-node."""
    setting.results["cells"] = []
    url = f"shm://{setting.scratch}/places.sock"
    r_node = ["--role", "r", "--device", "cuda", "--listen", url, "--kv-memory", _KV_MEMORY]
    places = {
        "S-node's own": (["--gpu-kv", _KV_MEMORY], []),
        "R-node": (["--gpu-kv", "0", "--r-node", url], [*r_node, "--step-spin-us", _SPIN_US]),
    }
    rates = []
    for place, (options, of_r_node) in places.items():
        name = {"float32": "fp32", "float16": "fp16"}[dtype]
        options += ["--model", str(model), "--device", setting.device, "--dtype", name, "--kv-dtype", "int8"]
        options += ["--no-prefix-cache"]
        rates.append(asyncio.run(tokens_per_s(setting, options, of_r_node)))
        setting.results["cells"].append({"pages": place, "tokens_per_s": setting.timed(rates[-1])})
    setting.results["R-node / S-node's own"] = setting.timed(rates[1] / rates[0], 2)


async def tokens_per_s(setting: Setting, options: list[str], of_r_node: list[str]) -> float:
    """The rate of an S-node while all streams decode, with an R-node of its own if `of_r_node` has options."""
    nodes = []
    try:
        async with asyncio.timeout(setting.left()):
            if of_r_node:
                nodes.append(Node(setting.out / "places-r.log", *of_r_node))
                await nodes[-1].read(r"R-node on (\S+):")
            nodes.append(Node(setting.out / "places.log", *options, "--port", "0", "--max-batch-size", str(_STREAMS)))
            url = await nodes[-1].read(r"Serving \S+ on (http://\S+/v1)")
            server = Target(url, await first_model(url, None))
            await load(setting, server, fixed(_STREAMS, _PROMPT, 2), seed=0)
            done = await load(setting, server, fixed(_STREAMS, _PROMPT, _TOKENS), seed=1)
    except TimeoutError:
        raise OutOfTime("the nodes have reached the part's bound") from None
    finally:
        for node in nodes:
            node.kill()
    begin = max(answer.chunks[0] for answer in done.answers)
    end = min(answer.chunks[-1] for answer in done.answers)
    if end <= begin:
        raise RuntimeError("the first stream had ended before the last one began")
    return sum(begin < at <= end for answer in done.answers for at in answer.chunks) / (end - begin)
