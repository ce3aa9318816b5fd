"""Steps on a lying device (lying_device.py) of a sequence whose first pages lie on an R-node, cut at every page border.

Arguments: "staged", "bypass", or "driver" for the bypass on the simulated CUDA driver (bypass_on_driver.py), of which
$FASTDECODE_COMPILED has the library; the pages' format; and a model directory. With fp16 the R-node has a GPU, the
simulated driver's, unless the S-Part has that. Prints a JSON object: "equal", whether
all tokens are those of transformers; "waited", how often a captured step has waited for an R-node, on the driver how
many steps were captured; "cuts", how many cuts there were.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models.greedy import is_greedy
from models.spart_steps import linked
from sources.compiled import compiled

from fastdecode.daemon.rnode_gpu import RNodeGpu
from fastdecode.kernels.gpu.page_kernels import PagedLayer
from fastdecode.region.contract import PAGE_TOKENS, ROW_DTYPE
from fastdecode.spart import SPart, load_model
from fastdecode.spart.exchange.bypass import Bypass
from fastdecode.spart.exchange.chosen import ChosenExchange
from fastdecode.spart.resident.arena import PageArena
from fastdecode.spart.resident.kernels import ResidentKernels
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.step.batch import Chunk, RemotePrefix, SampleSpec, StepBatch
from fastdecode.transports._native import Proxy
from gpu.late_pages import late_kernels
from gpu.layers_compiled import compile_layer
from gpu.lying_device import NAME, LyingDevice, take_torchs_place
from gpu.lying_driver import LyingDriver
from gpu.lying_steps import in_turn
from gpu.rnode_on_driver import open_gpu

GREEDY = SampleSpec(temperature=0.0)
LENGTH, N_NEW = 3 * PAGE_TOKENS - 4, 8  # the answers grow into another page
AT_ONCE = 3  # the last tokens of the prompt attend in one step
OTHER = 20  # tokens of two sequences beside it, which lie wholly on the device and on the R-node
DEVICE, R_NODE = 0, 1


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in (LENGTH, OTHER, OTHER)]


def forget(link: ResidentLink, seq_index: int, n_pages: int) -> None:
    """Write NaN over the first pages of a sequence on the device."""
    entries = np.zeros(1, ROW_DTYPE)
    entries["seq_index"] = seq_index
    pages = np.zeros(n_pages, np.int32)
    link.arena.lists.tables(entries.view(np.uint8), pages, n_pages)
    for page in pages.tolist():
        link.arena.memory[:, page].fill_(255)


def answers(spart: SPart, link: ResidentLink, cut: int, tag: int) -> list[list[int]]:
    """The tokens of all prompts, of which the first one has `cut` tokens on the R-node."""
    long, on_device, on_r_node = prompts()
    known = LENGTH - AT_ONCE
    parts = [
        (DEVICE, 0, long[:known]),
        (DEVICE, 1, on_device[:-1]),
        (R_NODE, 0, long[:cut]),
        (R_NODE, 1, on_r_node[:-1]),
    ]
    in_turn([spart.step(StepBatch(1, [Chunk(at, i, tag, 0, part, True, None, len(part)) for at, i, part in parts]))])
    forget(link, 0, cut // PAGE_TOKENS)
    prefix = RemotePrefix(R_NODE, 0, tag, cut)
    done: list[list[int]] = [[], [], []]
    rest = [long[known:], on_device[-1:], on_r_node[-1:]]
    at = [known, OTHER - 1, OTHER - 1]
    for _ in range(N_NEW):
        chunks = [
            Chunk(DEVICE, 0, tag, at[0], rest[0], False, GREEDY, prefix=prefix),
            Chunk(DEVICE, 1, tag, at[1], rest[1], False, GREEDY),
            Chunk(R_NODE, 1, tag, at[2], rest[2], False, GREEDY),
        ]
        if spart.exchange.bypass is not None:
            spart.exchange.bypass.settle()
        [output] = in_turn([spart.step(StepBatch(0, chunks))])
        for i, sampled in enumerate(output.sampled):
            assert sampled is not None
            at[i] += len(rest[i])
            rest[i] = [sampled.token]
            done[i].append(sampled.token)
    return done


def simulated_gpu(kv_dtype: str, folder: Path) -> RNodeGpu:
    """A GPU for R-nodes, with the kernels for llama-gqa."""
    compiled("libcuda.so.1", folder)
    compile_layer(PagedLayer(kv_dtype, "fp32", 4, 2, 16, 1.0), folder)
    return open_gpu(folder)


async def run(bypassed: bool, kv_dtype: str, directory: Path, folder: str) -> dict[str, Any]:
    with LyingDevice() as device:
        driver = LyingDriver(device)
        bypass = Bypass(driver.kernels(), device.make_stream, most_rows=8) if bypassed else None
        gpu = simulated_gpu(kv_dtype, Path(folder)) if kv_dtype == "fp16" else None
        found = await cut(bypass, late_kernels, gpu, kv_dtype, directory, folder)
        return found | {"waited": driver.waited}


async def run_on_driver(kv_dtype: str, directory: Path, folder: str) -> dict[str, Any]:
    from gpu.bypass_on_driver import DriverDevice
    from gpu.cuda_driver import open_driver
    from gpu.pages_on_driver import kernels_on

    cuda: Any = open_driver(Path())
    cuda.reset(queues=8, delay_us=20)
    cuda.use_here()
    with DriverDevice(cuda) as device:
        bypass = Bypass(cuda.kernels(), device.make_stream, most_rows=8, proxy=Proxy())
        found = await cut(bypass, kernels_on(device, Path(folder)), None, kv_dtype, directory, folder)
        streams: list[Any] = device.streams[1:]
        assert not bypass.fault and not any(stream.failed for stream in streams)
        return found | {"waited": sum(stream.captured for stream in streams)}


async def cut(
    bypass: Bypass | None,
    kernels: Callable[[PageArena], ResidentKernels],
    gpu: RNodeGpu | None,
    kv_dtype: str,
    directory: Path,
    folder: str,
) -> dict[str, Any]:
    """Cut the sequence at every page border, on the current device; `gpu` is the R-node's."""
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = load_model(directory, device=NAME, dtype="fp32")
    async with linked(model, Path(folder), kv_dtype=kv_dtype, max_rows=1024, gpu=gpu) as links:
        with torch.inference_mode():  # torch makes no view of another tensor of the device without that mode
            hello = model.hello(2, 1024, kv_dtype, None, 16)
            link, chosen = ResidentLink(hello, 16, model.device, kernels), ChosenExchange.plain(model.device)
            if bypass is not None:
                chosen = ChosenExchange("bypass", bypass=bypass)
            spart, found = SPart(model, [link, *links], chosen), []
            borders = range(PAGE_TOKENS, LENGTH - AT_ONCE + 1, PAGE_TOKENS)
            for tag, border in enumerate(borders, 1):
                found.append(answers(spart, link, border, tag))
                for i in (0, 1):
                    await link.free([(i, tag)])
                    await links[0].free([(i, tag)])
            equal = all(is_greedy(judge, *pair) for got in found for pair in zip(prompts(), got, strict=True))
            return {"equal": equal, "cuts": len(found)}


def main() -> None:
    take_torchs_place()
    torch.set_num_threads(1)
    exchange, kv_dtype, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        if exchange == "driver":
            found = asyncio.run(run_on_driver(kv_dtype, directory, folder))
        else:
            found = asyncio.run(run(exchange == "bypass", kv_dtype, directory, folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
