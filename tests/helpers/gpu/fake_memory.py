"""Runs large steps of a model on the device without values, and prints the most memory that their tensors took at once.

Arguments: a directory with a config.json, a dtype, the rows of a step, and how many of them decode. It prints a JSON
object: for each step, [peak, bound], where the bound is that of fastdecode.spart.memory. Memory is counted by the live
storages, so the torch kernels' own temporaries are not seen, nor what an allocator wastes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.fake_device import DEVICE, FakeTensor, _numpy, make_spart, samplers


class LiveMemory(TorchDispatchMode):
    """The bytes of all storages on the device that operations have returned and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.device.type == DEVICE:
                storage = x.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        return sum(n for _, n in self._live.values())


def run(spart: Any, memory: LiveMemory, chunks: list[Any]) -> int:
    """Run a step; returns the most memory it took beside what was there before."""
    from fastdecode.spart.step.batch import StepBatch

    with FakeTensorMode(allow_non_fake_inputs=True), memory:
        counted = None
        if spart.states is not None:  # a view lets `memory` count the pool from the start
            counted = [tensor[:] for tensors in spart.states.blocks for tensor in tensors]
            for chunk in chunks:
                spart.states.pretend(chunk.pos, chunk.state)
        before = memory.peak = memory.bytes()
        for _ in spart.step(StepBatch(0, chunks)):
            pass
    del counted
    return memory.peak - before


def run_captured_sampling(spart: Any, memory: LiveMemory, rows: int) -> int:
    """Draw the tokens of a captured step of the largest kind; returns the most memory that the draws took."""
    from fastdecode.spart.sampler.sampling import Sampler
    from fastdecode.spart.sampler.sampling_kinds import KINDS
    from fastdecode.spart.step.step_table import StepTable

    vocab, table = spart.config.vocab_size, StepTable()
    sampler = Sampler.of_kind(KINDS[0], rows, [], vocab, table)
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True), memory:
        logits, uploaded = torch.empty(rows, vocab, device=DEVICE), table.upload(torch.device(DEVICE))
        before = memory.peak = memory.bytes()
        sampler.launch(logits, uploaded)
    return memory.peak - before


def main() -> None:
    from fastdecode.spart.memory import sampling_bytes, step_bytes
    from fastdecode.spart.prefill import prompt
    from fastdecode.spart.prefill.attention import attend_efficient
    from fastdecode.spart.step.batch import Chunk

    FakeTensor.numpy = _numpy
    # The kernel of this device makes the matrix of scores, a GPU's kernels do not.
    prompt.is_fused, prompt.attend = lambda device: True, attend_efficient
    directory, dtype, rows, decoding = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    spart, memory = make_spart(directory, dtype, state_slots=decoding + 2), LiveMemory()
    kinds = list(samplers().values())
    decode = [Chunk(i % 2, i, 1, 45, [5], False, kinds[i % len(kinds)], state=i) for i in range(decoding)]
    first, second = decoding, decoding + 1  # the slots of two prompts
    decode.sort(key=lambda chunk: chunk.link)
    long = 4096
    run(spart, memory, [Chunk(0, 9999, 1, 0, [5] * rows, True, None, long, state=first)])
    late = Chunk(0, 9999, 1, rows, [5] * (rows - decoding), True, None, long, state=first)
    found = {
        "decode": [run(spart, memory, decode), step_bytes(spart.model, decoding, decoding)],
        "decode and a prompt": [run(spart, memory, [*decode, late]), step_bytes(spart.model, rows, decoding)],
        "a prompt": [
            run(spart, memory, [Chunk(0, 9998, 1, 0, [5] * rows, True, kinds[0], state=second)]),
            step_bytes(spart.model, rows, 1),
        ],
        "captured sampling": [
            run_captured_sampling(spart, memory, decoding),
            sampling_bytes(spart.model, decoding),
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
