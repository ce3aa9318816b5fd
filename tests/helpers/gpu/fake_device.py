"""Runs the S-Part on a device that has no values, and prints how often a step would make the host wait for it.

torch's fake tensors run every operation with shapes, dtypes and devices alone, on a device that exists only in Python.
So an operation that mixes devices fails, and so does one whose result the host must look at (`.item()`, a mask as an
index). What the host waits for without an error, a copy between host and device, is counted here.

This is a script, because the device belongs to the whole process. Its arguments are dtypes and model directories, as
"float16:DIR". It prints a JSON list with an entry for each: the steps that ran, as [name, synchronisations, uploads,
sampled chunks]; the first model runs each kind of sampling alone, too. With `--detect` it runs the counter on
operations that are known to synchronise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "fdgpu"
_setup_privateuseone_for_python_backend(DEVICE)
torch._C._set_only_lift_cpu_tensors(True)

#: Operations whose result depends on values, so that the host waits for them.
_DATA_DEPENDENT = (
    "item",
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
)


class Transfers(TorchDispatchMode):
    """Counts what the host waits for, in `syncs`, and the uploads that it does not wait for, in `uploads`."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []
        self.uploads = 0
        self._pinned: dict[int, Any] = {}  # by the address of its storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if name in _DATA_DEPENDENT:
            self.syncs.append(name)
        elif name in ("to", "_to_copy"):  # `to` is not taken apart in inference mode
            other = given.get("other")
            device = given.get("device") if other is None else other.device
            self._copy(given["self"], device or given["self"].device, bool(given.get("non_blocking")))
        elif name == "copy_":
            self._copy(given["src"], given["self"].device, bool(given.get("non_blocking")))
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pinned[result.untyped_storage()._cdata] = result
        return result

    def _copy(self, source: torch.Tensor, device: torch.device, non_blocking: bool) -> None:
        if source.device.type == device.type:
            return
        if source.device.type == "cpu" and non_blocking and source.untyped_storage()._cdata in self._pinned:
            self.uploads += 1
        else:
            self.syncs.append(f"copy from {source.device.type} to {device.type}")


class DeviceRows:
    """Stands for the exchange, whose own copies are not the S-Part's: a step's Q, K, V and O rows on the device."""

    def __init__(self, slot: int, link_rows: list[Any], device: torch.device, appender: None):
        n_rows = sum(rows.n_rows for rows in link_rows)
        (q_size, kv_size, o_size), dtype = link_rows[0].views.sizes, link_rows[0].views.dtype
        self.q = torch.empty(n_rows, q_size, device=device, dtype=dtype)
        self.kv = torch.empty(n_rows, kv_size, device=device, dtype=dtype)
        self.o = torch.empty(n_rows, o_size, device=device, dtype=dtype)
        self.failures: dict[Any, Any] = {}

    pending, ready = None, True

    def arm(self, n_layers: int) -> None:
        pass

    def post(self, layer: int, timeout: float = 0.0) -> None:
        pass

    def wait(self, timeout: float) -> int:
        return 0

    def disarm(self) -> dict[Any, Any]:
        return {}

    def settle(self, timeout: float) -> None:
        pass

    def finish(self) -> None:
        pass

    def finished(self) -> None:
        pass


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """Stands for Tensor.numpy: downloaded values all say that a row is finite and its nucleus within the prefix."""
    assert tensor.device.type == "cpu"
    return np.full(tuple(tensor.shape), 3, {torch.uint8: np.uint8, torch.int32: np.int32}[tensor.dtype])


class EmptyParameters:
    """A ParameterReader whose parameters have no values."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype

    def tensor(self, name: str, *shape: int, offset: float = 0.0, single: bool = False) -> torch.Tensor:
        return torch.empty(shape, device=self._device, dtype=torch.float32 if single else self._dtype)

    def linear(self, names: list[str], outs: list[int], width: int, bias: bool, **_: Any) -> Any:
        from fastdecode.spart.linears.dense import make_dense

        return make_dense(self.tensor("", sum(outs), width), self.tensor("", sum(outs)) if bias else None)

    def absorbed(self, name: str, heads: int, k_size: int, v_size: int, rank: int) -> Any:
        from fastdecode.spart.linears.heads import make_heads

        return tuple(
            make_heads(self.tensor(name, heads, *size), self._device, self._dtype)
            for size in ((rank, k_size), (v_size, rank))
        )

    def embedding(self, name: str, rows: int, width: int) -> Any:
        from fastdecode.spart.linears.dense import DenseEmbedding

        return DenseEmbedding(self.tensor(name, rows, width), self._dtype)

    def block_read(self, weights: Any, index: int) -> None:
        """Does nothing."""

    def tied(self, name: str, rows: int, width: int) -> tuple[Any, Any]:
        return self.embedding(name, rows, width), self.linear([name], [rows], width, False)


def make_spart(directory: str, dtype: torch.dtype, state_slots: int = 0) -> Any:
    """The S-Part of the model in `directory`, of which only the configuration is read, with two links."""
    from fastdecode.spart import read_config
    from fastdecode.spart.decoder import decoder
    from fastdecode.spart.decoder.blueprint import Blueprint
    from fastdecode.spart.decoder.weights import Model

    config = read_config(directory)
    device = torch.device(DEVICE)
    views = SimpleNamespace(
        link=SimpleNamespace(geometry=SimpleNamespace(max_rows=4096)),
        sizes=config.row_sizes,
        dtype=dtype,
    )

    class WithoutLinks(decoder.SPart):
        def _slot_views(self, index: int, slot: int) -> Any:
            return views

    decoder.make_exchange, decoder.Appender = DeviceRows, lambda device: None
    with FakeTensorMode():
        weights = Blueprint(config, own_head=not config.tied).weights(EmptyParameters(device, dtype))
        model = Model(config=config, weights=weights, device=device, dtype=dtype, parameters=0, weight_bytes=0)
        return WithoutLinks(model, [], state_slots=state_slots)


def samplers() -> dict[str, Any]:
    """A SampleSpec of every kind."""
    from fastdecode.spart.step.batch import SampleSpec
    from fastdecode.spart.step.penalties import LogitRules

    class Mask:
        def fill(self, row: np.ndarray) -> None:
            row[:] = 5

    penalties = LogitRules(bias=[(5, 2.0)], repetition=1.2, frequency=0.5, presence=0.1, prompt=[1, 2, 3])
    penalties.generated(7)
    return {
        "greedy": SampleSpec(temperature=0.0),
        "temperature": SampleSpec(temperature=0.7, seed=3, index=5),
        "top-k": SampleSpec(top_k=40),
        "top-p": SampleSpec(top_p=0.9),
        "top-k and top-p": SampleSpec(top_k=20, top_p=0.9),
        "min-p": SampleSpec(min_p=0.05),
        "bias": SampleSpec(temperature=0.0, rules=LogitRules(bias=[(9, -100.0)])),
        "penalties": SampleSpec(rules=penalties),
        "logprobs": SampleSpec(top_p=0.8, logprobs=5, rules=penalties),
        "mask": SampleSpec(temperature=0.0, mask=Mask()),
    }


def steps(every_sampler: bool) -> list[tuple[str, list[Any]]]:
    """The steps that a model runs, in order: each has a name and its chunks. `every_sampler` adds one for each kind of
    SampleSpec alone; they are together in the last step in any case."""
    from fastdecode.spart.step.batch import Chunk

    kinds = samplers()
    greedy = kinds["greedy"]
    work = [
        ("two prompts", [Chunk(0, 0, 1, 0, [5] * 40, True, greedy), Chunk(1, 0, 1, 0, [6] * 17, True, greedy)]),
        ("first chunk", [Chunk(0, 1, 1, 0, [5] * 30, True, None)]),
        ("next chunk", [Chunk(0, 1, 1, 30, [5] * 20, True, None)]),
        ("one more chunk", [Chunk(0, 1, 1, 50, [5] * 9, True, None)]),
        ("last chunk", [Chunk(0, 1, 1, 59, [5] * 3, True, kinds["top-p"])]),
        ("several tokens at once", [Chunk(0, 0, 1, 41, [5] * 4, False, greedy)]),
    ]
    if every_sampler:
        work += [(f"decode, {name}", [Chunk(0, 0, 1, 45, [5], False, spec)]) for name, spec in kinds.items()]
    work.append(("decode, all", [Chunk(i % 2, i, 1, 45, [5], False, spec) for i, spec in enumerate(kinds.values())]))
    for _, chunks in work:
        chunks.sort(key=lambda chunk: (chunk.prefill, chunk.link))
    return work


def run_model(directory: str, dtype: torch.dtype, every_sampler: bool) -> list[tuple[str, list[str], int, int]]:
    """What every step of the model in `directory` waits for."""
    from fastdecode.spart.step.batch import StepBatch

    spart = make_spart(directory, dtype, state_slots=16)
    report = []
    for name, chunks in steps(every_sampler):
        for slot, chunk in enumerate(chunks):
            chunk.state = slot
            if spart.states is not None:
                spart.states.pretend(chunk.pos, slot)
        with FakeTensorMode(allow_non_fake_inputs=True), Transfers() as transfers:
            step = spart.step(StepBatch(0, chunks))
            while True:
                try:
                    next(step)
                except StopIteration as end:
                    sampled = sum(entry is not None for entry in end.value.sampled)
                    break
        report.append((name, transfers.syncs, transfers.uploads, sampled))
    return report


def detect() -> dict[str, list[str]]:
    """The counter on operations of which the first three do not synchronise."""

    def upload(x: torch.Tensor) -> None:
        pinned = torch.empty(4, pin_memory=True)
        pinned.to(DEVICE, non_blocking=True)

    operations: dict[str, Callable[[torch.Tensor], Any]] = {
        "pinned upload": upload,
        "arithmetic": lambda x: x.softmax(dim=1).cumsum(dim=1).topk(3),
        "a tensor made on the device": lambda x: torch.arange(9, device=DEVICE) + torch.zeros(9, device=DEVICE),
        "pageable upload": lambda x: torch.empty(4).to(DEVICE, non_blocking=True),
        "blocking upload": lambda x: torch.empty(4, pin_memory=True).to(DEVICE),
        "tensor of a list": lambda x: torch.tensor([1, 2], device=DEVICE),
        "download": lambda x: x.cpu(),
        "copy to the host": lambda x: torch.empty(4, 100).copy_(x),
        "item": lambda x: x[0, 0].item(),
        "truth": lambda x: bool((x > 0).all()),
        "mask as an index": lambda x: x[x > 0],
        "nonzero": lambda x: x.nonzero(),
        "mixed devices": lambda x: x + torch.empty(4, 100),
    }
    found = {}
    for name, operation in operations.items():
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(4, 100, device=DEVICE)
            with Transfers() as transfers:
                try:
                    operation(x)
                except Exception as error:
                    transfers.syncs.append(type(error).__name__)
        found[name] = transfers.syncs
    return found


def main() -> None:
    FakeTensor.numpy = _numpy
    if sys.argv[1:] == ["--detect"]:
        print(json.dumps(detect()))
        return
    dtypes = {"float16": torch.float16, "float32": torch.float32}
    reports = []
    for i, argument in enumerate(sys.argv[1:]):
        dtype, _, directory = argument.partition(":")
        reports.append(run_model(directory, dtypes[dtype], every_sampler=i == 0))
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
