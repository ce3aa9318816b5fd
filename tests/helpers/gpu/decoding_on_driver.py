"""The rounds of `fastdecode-bench decode` (DecodingInParts) on the device of bypass_on_driver.py.

Argument: a model directory; $FASTDECODE_COMPILED has the driver. Prints a JSON object: the exchanges of the split
system and of its S-Part alone, how many steps their mini-batches have captured, what has failed, what is left.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fastdecode.bench.decoding_in_parts import DecodingInParts
from fastdecode.daemon import decoding
from fastdecode.daemon.decoding import DecodeShape
from fastdecode.daemon.rnode import RNode
from fastdecode.engine.runner import Runner
from fastdecode.spart import load_model
from fastdecode.spart.exchange.bypass import Bypass
from fastdecode.spart.exchange.chosen import ChosenExchange
from fastdecode.transports._native import Proxy
from gpu.bypass_on_driver import DriverDevice
from gpu.cuda_driver import SimulatedCuda, open_driver
from gpu.lying_device import NAME, take_torchs_place

SHAPE = DecodeShape(batch=6, context=20, steps=4, mini_batches=2, kv_dtype="fp32")


async def rounds(model: Any, device: DriverDevice, folder: str) -> dict[str, Any]:
    class OnDevice(Runner):
        def _run(self) -> None:
            with device:
                super()._run()

    node = RNode(threads=1, kv_bytes=1 << 25)
    [url] = await node.serve([f"shm://{folder}/r"], None)
    with torch.inference_mode():  # torch makes no view of another tensor of the device in that mode
        parts = await DecodingInParts.open(model, [url], SHAPE)
        alone = parts._s_alone
    parts._runner = OnDevice()
    await parts.fill(progress=False)
    await parts.split_round()
    await parts.s_round()
    found = {
        "exchanges": [str(spart.exchange) for spart in (parts.spart, alone)],
        "captured": [stream.captured for stream in device.streams[1:] if stream.captured],
        "failed": [str(error) for stream in device.streams[1:] for error in stream.failed],
    }
    await parts.close()
    await node.close()
    del device.streams[1:]
    return found


def main() -> None:
    take_torchs_place()
    torch.set_num_threads(1)
    cuda = open_driver(Path())
    assert isinstance(cuda, SimulatedCuda)
    cuda.use_here()
    with DriverDevice(cuda) as device, tempfile.TemporaryDirectory() as folder:
        model = load_model(Path(sys.argv[1]), device=NAME, dtype="fp32")
        kernels = cuda.kernels()

        def choose(wanted: str, on: torch.device, mini_batches: int, most_rows: int, spin_us: int) -> ChosenExchange:
            assert (wanted, on.type, mini_batches, most_rows) == ("auto", NAME, 2, 3)
            return ChosenExchange("bypass", bypass=Bypass(kernels, device.make_stream, most_rows, Proxy(spin_us)))

        decoding.choose_exchange = choose
        before = device.held()
        found = asyncio.run(rounds(model, device, folder))
        left = {name: n - before[name] for name, n in device.held().items() if n != before[name]}
        print(json.dumps(found | {"left": left}), flush=True)


if __name__ == "__main__":
    main()
