"""A device that computes as late as it may: a wait that is missing gives wrong results every time, not now and then.

Operations on its tensors are put into the queue of a stream, in order. They run when the host waits for an event or
for a copy that blocks, and not before. Until then a result and the host memory that a copy goes to hold poison (NaN, or
a number that is no token), and a copy from host memory reads what that memory holds when the copy runs. So code
must wait here for everything that it must wait for on a GPU. Operations that mix devices fail.

    with LyingDevice() as device:
        model = load_model(directory, device=NAME)

torch computes the operations on the CPU. Shapes and views are those of torch's meta device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "lying"
_setup_privateuseone_for_python_backend(NAME)


class LyingTensor(torch.Tensor):
    """A tensor on the device. `late` holds its values on the CPU, once its operation has run; `meta` its shape, and
    which tensors it is a view of."""

    late: torch.Tensor
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, late: torch.Tensor, meta: torch.Tensor) -> LyingTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype, device=NAME
        )
        made.late, made.meta = late, meta
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert LyingDevice.current is not None, "the device is gone"
        return LyingDevice.current.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.late.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"LyingTensor({tuple(self.shape)}, {self.dtype})"


class LyingStream:
    """A queue of operations, which run in order when the host waits for one of them. In place of graph.GraphStream."""

    def __init__(self, device: LyingDevice, handle: int = 0):
        self._device, self.handle = device, handle
        self._queue: deque[Callable[[], Any]] = deque()
        self._put = self._run = 0  # operations that were put into the queue, and that have run
        self._running = threading.RLock()  # held by the thread that runs them
        self.waits = 0  # how often the host has waited for an event or a copy
        self._record: list[Callable[[], Any]] | None = None  # of a capture

    def put(self, operation: Callable[[], Any]) -> None:
        if self._record is not None:
            self._record.append(operation)
        else:
            self._queue.append(operation)
            self._put += 1

    def mark(self) -> int:
        """The end of the queue as it is now."""
        return self._put

    def is_captured(self) -> bool:
        return self._record is not None

    def has_run(self, mark: int) -> bool:
        return self._run >= mark

    def run_to(self, mark: int) -> None:
        if self._run >= mark:
            return
        assert self._record is None, "the host waits while a stream is captured"
        with self._running, torch.inference_mode(), torch.utils._python_dispatch._disable_current_modes():
            while self._run < mark:
                self._queue.popleft()()
                self._run += 1

    @contextmanager
    def current(self) -> Iterator[None]:
        before, self._device.stream = self._device.stream, self
        try:
            with self._device.in_thread():
                yield
        finally:
            self._device.stream = before

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        record = self._record = []
        try:
            with self.current():
                result = work()
        finally:
            self._record = None

        def replay() -> None:
            for operation in record:
                self._device.stream.put(operation)

        return replay, result

    def free_bytes(self) -> int:
        return self._device.free_bytes

    def check(self) -> None:
        pass

    def synchronize(self) -> None:
        self.run_to(self.mark())


class SideStream(LyingStream):
    """Takes the place of torch.Stream: a stream beside the device's first one, for which both wait by events."""

    def __init__(self, device: torch.device):
        assert LyingDevice.current is not None
        super().__init__(LyingDevice.current)
        self._running = LyingDevice.current.streams[0]._running  # two threads may wait for the streams in either order

    def __enter__(self) -> SideStream:
        self._current = self.current()
        self._current.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._current.__exit__(*error)


class OperationsOf(TorchDispatchMode):
    """Gives a thread's operations to a device."""

    def __init__(self, device: LyingDevice):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.run(func, args, kwargs or {})


class LyingDevice(TorchDispatchMode):
    """The device and its streams, for the code within the `with`."""

    current: LyingDevice | None = None
    free_bytes = 1 << 40

    def __init__(self, left_out: str = "none") -> None:
        """`left_out` is a kind of wait that does nothing, "event", "download" or "weights", to show that it is needed.
        "weights" is that of a new stream for the first one, in which the weights' copies from pageable memory may still
        be under way when the calls return (CUDA's API synchronization behavior)."""
        super().__init__()
        self._left_out = left_out
        self._thread = threading.local()  # its current stream, and whether its operations come here already
        self.streams = [LyingStream(self)]
        self._results: dict[Any, int | dict[str, Any]] = {}  # by operation and shapes; see _shapes

    def __enter__(self) -> LyingDevice:
        LyingDevice.current = self
        self._thread.here = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._thread.here = False
        LyingDevice.current = None

    @property
    def stream(self) -> LyingStream:
        """The current stream of this thread."""
        return getattr(self._thread, "stream", self.streams[0])

    @stream.setter
    def stream(self, stream: LyingStream) -> None:
        self._thread.stream = stream

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Within it, this thread's operations come to the device."""
        with nullcontext() if getattr(self._thread, "here", False) else OperationsOf(self):
            yield

    # -- the streams ----------------------------------------------------------------------------------------------

    def make_stream(self) -> LyingStream:
        """A new stream, which begins after all that the first one has been given."""
        if self._left_out != "weights":
            self.streams[0].synchronize()
        self.streams.append(LyingStream(self, len(self.streams)))
        return self.streams[-1]

    def wait(self, stream: LyingStream, mark: int, kind: str) -> None:
        """Run everything before a mark. `kind` is "event", "upload" or "download"."""
        if kind == self._left_out or (kind == "upload" and self._left_out == "weights"):
            return
        stream.waits += 1
        stream.run_to(mark)

    # -- operations -----------------------------------------------------------------------------------------------

    def allocate(self, meta: torch.Tensor) -> torch.Tensor:
        """Memory of the device for a result of this shape."""
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, arguments = func._overloadpacket.__name__, _arguments(func)
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if given.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if name in ("to", "_to_copy"):
            device = given.get("device") or given["self"].device
            if device.type != given["self"].device.type:
                return self._transfer(given["self"], device, given.get("dtype"), bool(given.get("non_blocking")))
        if name == "copy_" and given["src"].device.type != given["self"].device.type:
            return self._copy(given["self"], given["src"], bool(given.get("non_blocking")))
        if name in ("item", "_local_scalar_dense") and isinstance(given["self"], LyingTensor):
            if self.stream.is_captured():
                raise RuntimeError("the host may not wait for a stream that is captured")
            self.wait(self.stream, self.stream.mark(), "download")
            return given["self"].late.item()
        tensors: list[torch.Tensor] = []
        call = (func, _described(args, tensors), _described(kwargs, tensors))
        here = [x for x in tensors if isinstance(x, LyingTensor)]
        made_here = torch.device(given["device"]).type == NAME if given.get("device") is not None else False
        if not here and not made_here:
            return func(*args, **kwargs)
        if any(x.device.type == "cpu" and x.dim() for x in tensors):
            raise RuntimeError(f"{func} mixes devices")
        return self._compute(call, args, kwargs, here)

    def _compute(self, call: tuple[Any, ...], args: Any, kwargs: Any, here: list[LyingTensor]) -> Any:
        func = call[0]
        late_args, late_kwargs = (_at("cpu", lambda x: x.late, given) for given in (args, kwargs))
        copies: list[tuple[int, torch.Tensor]] = []

        def made(i: int, meta: Any) -> Any:
            if not isinstance(meta, torch.Tensor):
                return meta
            for x in here:
                if x.meta is meta:
                    return x
            for x in reversed(here):
                if x.meta.untyped_storage()._cdata == meta.untyped_storage()._cdata:
                    late = x.late.view(meta.dtype) if x.late.dtype is not meta.dtype else x.late
                    return LyingTensor(late.as_strided(meta.shape, meta.stride(), meta.storage_offset()), meta)
            late = poisoned(self.allocate(meta))
            copies.append((i, late))
            return LyingTensor(late, meta)

        metas = self._shapes(call, args, kwargs, here)
        several = isinstance(metas, tuple | list)
        outs = [made(i, meta) for i, meta in enumerate(metas if several else [metas])]
        if copies or _writes(func):

            def operation() -> None:
                results = func(*late_args, **late_kwargs)
                for i, late in copies:
                    late.copy_(results[i] if several else results)

            self.stream.put(operation)
        return type(metas)(outs) if several else outs[0]

    def _shapes(self, call: tuple[Any, ...], args: Any, kwargs: Any, here: list[LyingTensor]) -> Any:
        """What an operation returns, on torch's meta device. That takes longer than the operation itself, so the shape
        of a result that is no view, and a result that is an argument whose shape stays, are remembered."""
        if (known := self._results.get(call)) is not None:
            return torch.empty_strided(**known) if isinstance(known, dict) else here[known].meta
        meta_args, meta_kwargs = (_at("meta", lambda x: x.meta, given) for given in (args, kwargs))
        metas = call[0](*meta_args, **meta_kwargs)
        if isinstance(metas, torch.Tensor) and call[1:] == (_described(args, after := []), _described(kwargs, after)):
            same = [i for i, x in enumerate(here) if x.meta is metas]
            if same:
                self._results[call] = same[0]
            elif metas.untyped_storage()._cdata not in {x.meta.untyped_storage()._cdata for x in here}:
                shape = {"size": metas.shape, "stride": metas.stride(), "dtype": metas.dtype}
                self._results[call] = {**shape, "device": "meta"}
        return metas

    def _transfer(self, source: torch.Tensor, device: Any, dtype: Any, non_blocking: bool) -> torch.Tensor:
        """A copy of `source` on another device."""
        if isinstance(source, LyingTensor):
            assert not non_blocking, "the copy's memory is not pinned"
            target = torch.empty_strided(source.shape, source.stride(), dtype=dtype or source.dtype)
            return self._copy(target, source, False)
        meta = torch.empty(source.shape, dtype=dtype or source.dtype, device="meta")
        return self._copy(LyingTensor(poisoned(self.allocate(meta)), meta), source, non_blocking)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        late_target, late_source = (x.late if isinstance(x, LyingTensor) else x for x in (target, source))
        poisoned(late_target) if late_target is target else None
        self.stream.put(lambda: late_target.copy_(late_source))
        if not non_blocking:
            self.wait(self.stream, self.stream.mark(), "download" if isinstance(source, LyingTensor) else "upload")
        return target


@cache
def _arguments(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def _writes(func: Any) -> bool:
    """Whether an operation writes to its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _described(given: Any, tensors: list[torch.Tensor]) -> Any:
    """What the shape of an operation's result depends on. Adds the tensors among its arguments to `tensors`."""
    if isinstance(given, torch.Tensor):
        first = next((i for i, x in enumerate(tensors) if x is given), len(tensors))
        tensors.append(given)
        x = given.meta if isinstance(given, LyingTensor) else given
        return first, x.device, x.dtype, x.shape, x.stride(), x.storage_offset()
    if isinstance(given, list | tuple):
        return tuple([_described(x, tensors) for x in given])
    if isinstance(given, dict):
        return tuple([(name, _described(x, tensors)) for name, x in given.items()])
    return type(given), given


def _at(device: str, of: Callable[[LyingTensor], torch.Tensor], given: Any) -> Any:
    """The arguments of an operation on another device."""
    if isinstance(given, LyingTensor):
        return of(given)
    if isinstance(given, list | tuple):
        return type(given)([_at(device, of, x) for x in given])
    if isinstance(given, dict):
        return {name: _at(device, of, x) for name, x in given.items()}
    return torch.device(device) if isinstance(given, torch.device) else given


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """`x`, filled with values that nothing mistakes for results."""
    with torch.utils._python_dispatch._disable_current_modes():
        return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(1 if x.dtype is torch.bool else 0x5A)


class LyingEvent:
    """Takes the place of torch.Event."""

    def __init__(self, device: Any = None, blocking: bool = False):
        self._stream: LyingStream | None = None
        self._mark = 0
        self._awaited = False  # by a stream

    def record(self) -> None:
        assert LyingDevice.current is not None
        waited = self._stream is None or self._awaited or self._stream.has_run(self._mark)
        assert waited, "an event is recorded again before anybody has waited for it"
        self._stream, self._awaited = LyingDevice.current.stream, False
        self._mark = self._stream.mark()

    def wait(self) -> None:
        """Let the current stream wait for the event, and the host go on."""
        assert LyingDevice.current is not None and self._stream is not None
        recorded, mark, self._awaited = self._stream, self._mark, True
        LyingDevice.current.stream.put(lambda: recorded.run_to(mark))

    def synchronize(self) -> None:
        assert LyingDevice.current is not None and self._stream is not None
        LyingDevice.current.wait(self._stream, self._mark, "event")


def take_torchs_place() -> None:
    """Let torch make events and streams of a device that lies."""
    torch.Event = LyingEvent  # type: ignore[misc,assignment]
    torch.Stream = SideStream  # type: ignore[misc,assignment]
