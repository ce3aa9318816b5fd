"""Bypass: decode steps as CUDA graphs, in which no thread of the host takes part between a step's start and its end.

A whole step, all layers and the drawing of its tokens, is captured once per mini-batch, set of R-nodes, size class and
kind of sampling (sampling_kinds.py). The graphs for all R-nodes together are captured before there is work. A graph for
another set of R-nodes is captured later, by a second thread, and the steps that need the graph are staged meanwhile.

A graph packs the rows into the slots, rings the R-nodes, waits for their answers and unpacks the O rows by itself
(stream_rows.py). The host arms the step, waits for the R-nodes' verdicts, uploads the step's table, starts the graph
and, behind it in the same stream, the download of the tokens. The stream then writes the mini-batch's completion word,
for which the runner waits as for anything else. Tokens that no kind of sampling covers are drawn behind the graph, in
the same stream.

Each mini-batch has a stream of its own, and waits in it for R-nodes only, never for the other stream. In a stream, rows
are published before anything is waited for. So streams that share a hardware queue cost time, and cannot deadlock. The
proxy (transports/proxy.h) opens every gate of an R-node that dies or is late; then the step goes on for the others.

Steps with prompts, LoRA adapters, LongRoPE's long factors or states, and steps of more rows than are captured, take the
staged exchange.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from tqdm import tqdm

from fastdecode.region.contract import blocks_for
from fastdecode.spart.exchange.base import LinkRows, StepLinks
from fastdecode.spart.exchange.driver import DriverError
from fastdecode.spart.exchange.graph import GraphStream
from fastdecode.spart.exchange.graph_table import GraphTable, size_class
from fastdecode.spart.exchange.resident import ResidentStream
from fastdecode.spart.exchange.stream_rows import Gate, Kernels, MappedMemory, MappedRegion, StreamRows, step_addresses
from fastdecode.spart.memory import graph_bytes
from fastdecode.spart.resident.kernels import ResidentKernels, ResidentTables
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.resident.rows import ResidentRows
from fastdecode.spart.sampler.sampling import Sampler
from fastdecode.spart.sampler.sampling_kinds import KINDS, Kind, kind_of
from fastdecode.spart.step.batch import StepBatch, StepOutput
from fastdecode.transports._native import Proxy
from fastdecode.transports.base import DataPath, Pending

if TYPE_CHECKING:
    from fastdecode.spart.exchange.base import RowExchange

log = logging.getLogger(__name__)

#: A mini-batch keeps this many graphs. The graph that was used longest ago goes first.
_MOST_GRAPHS = 256
#: What the driver may need for the captured steps' own nodes, beside the memory of their tensors; it is a part of
#: device_plan.KERNEL_BYTES.
_NODE_BYTES = 256 << 20
#: The kinds of steps that are captured at start. None: their tokens are drawn behind the graph.
_KINDS = (*KINDS, None)
_MEASUREMENTS = 3  # of a captured step
_LINE = 64  # bytes between two completion words
#: Arrays of a step's table that no graph reads: of LoRA adapters, of LongRoPE's long factors, and of states.
_STAGED = ("adapter rows", "long", "state rows")


class _Key(NamedTuple):
    """What a graph is captured for."""

    links: tuple[DataPath, ...]  # to R-nodes
    size: int  # the size class
    kind: Kind | None  # of sampling
    merges: bool = False  # sequences have remote prefixes


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step. It reads its mini-batch's table, and writes its mini-batch's logits and results."""

    replay: Callable[[], object]
    regions: tuple[MappedRegion, ...]  # whose addresses are in the graph


class Captured(Protocol):
    """An S-Part whose steps can be captured: decoder.SPart, or hf.decoder.HFSPart."""

    @property
    def model(self) -> Any: ...
    @property
    def links(self) -> Sequence[DataPath]: ...
    def whole_step(self, inputs: dict[str, torch.Tensor], exchange: RowExchange) -> torch.Tensor: ...


class _Tensors:
    """What the steps of a mini-batch read and write, on the current stream: rows, table, logits, results."""

    def __init__(self, spart: Captured, most_rows: int):
        model, vocab_size = spart.model, spart.model.config.vocab_size
        self.page_tables, self._tokens, self._scratch, self._lse = (0, 0), 0, None, None
        if (link := _resident(spart)) is not None:
            lists, self._tokens = link.arena.lists, model.config.max_positions
            self.page_tables = lists.n_sections, min(blocks_for(self._tokens), lists.n_pages)
            sizes = {size_class(n) for n in range(1, most_rows + 1)}  # a smaller step may have more pieces to merge
            n_bytes = max(link.kernels.scratch_bytes(size, self._tokens) for size in sizes)
            self._scratch = torch.zeros(n_bytes, dtype=torch.uint8, device=model.device)
            self._lse = link.kernels.new_lse(most_rows)
        self.rows = [torch.zeros(most_rows, n, dtype=model.dtype, device=model.device) for n in model.config.row_sizes]
        n_bytes = GraphTable.most_bytes(most_rows, vocab_size, self.page_tables)
        self.inputs = torch.zeros(n_bytes, dtype=torch.uint8, device=model.device)
        self.logits = torch.zeros(most_rows, vocab_size, dtype=torch.float32, device=model.device)
        self.results = torch.zeros(2 * most_rows, dtype=torch.int32, device=model.device)

    def resident(self, kernels: ResidentKernels, inputs: dict[str, torch.Tensor], merges: bool) -> ResidentTables:
        """The tables of a captured step for the device's own KV pages. `merges`: sequences have remote prefixes. The
        step begins by clearing the kernels' counters, where steps of another size have left partial results."""
        sections, width = self.page_tables
        pages = inputs["resident pages"].view(sections, -1, width)
        rows, counts = inputs["resident rows"], inputs["resident counts"]
        answers, lse = (inputs["resident answers"], self._lse) if merges else (None, None)
        if self._scratch is not None:
            self._scratch[: 4 * kernels.n_counters(len(rows) // 4)].zero_()
        return ResidentTables(rows, counts, pages, self._tokens, True, self._scratch, answers, lse)


class _MiniBatch(_Tensors):
    """One mini-batch's graphs, the tensors that these share, the stream that runs them, and the one that captures
    them, beside it."""

    def __init__(self, make_stream: Callable[[], GraphStream], spart: Captured, most_rows: int):
        self.stream, self.recorder = make_stream(), make_stream()
        self.graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        with self.stream.current():
            super().__init__(spart, most_rows)


def _resident(spart: Captured) -> ResidentLink | None:
    """The KV pages of the S-Part's own device; None: there are none."""
    first = next(iter(spart.links), None)
    return first if isinstance(first, ResidentLink) else None


def _crossing(links: Iterable[DataPath]) -> tuple[DataPath, ...]:
    """The links to R-nodes among some links."""
    return tuple(link for link in links if not link.resident)


def _merges(link_rows: Iterable[LinkRows]) -> bool:
    """True if rows of a step attend to remote prefixes."""
    return any(rows.partial for rows in link_rows)


class _DrivenLinks(StepLinks):
    """A step whose layer words a device drives."""

    def __init__(self, slot: int, link_rows: list[LinkRows], proxy: Proxy):
        super().__init__(slot, link_rows)
        self._slot, self._proxy = slot, proxy
        self._driven: list[int] = []

    def begin(self, timeout: float) -> tuple[DataPath, ...]:
        """Hand the words over to the device, after the verdicts. Returns the links that take part."""
        failed = []
        for i, rows in enumerate(self._link_rows):
            if rows.views.link in self.failures:
                continue
            try:
                self._proxy.begin(rows.views.link.port, self._slot, timeout)
            except ConnectionError as error:
                failed.append((i, -1, str(error)))
            else:
                self._driven.append(i)
        self._check(failed)
        return tuple(self._link_rows[i].views.link for i in self._driven)

    def end(self) -> None:
        """Take the words back, after the device has passed its last gate."""
        failed = []
        while self._driven:
            i = self._driven.pop()
            try:
                outcome = self._proxy.end(self._link_rows[i].views.link.port, self._slot)
            except ConnectionError as error:
                outcome = (-1, str(error))
            if isinstance(outcome, tuple):
                failed.append((i, *outcome))
        self._check(failed)


class Bypass:
    """Runs the decode steps of an SPart. Used by one thread at a time: the runner's, once there are steps."""

    def __init__(
        self, kernels: Kernels, make_stream: Callable[[], GraphStream], most_rows: int, proxy: Proxy | None = None
    ):
        """`make_stream` is called once a mini-batch. Steps of more rows than the size class of `most_rows` are not
        taken. Raises DriverError."""
        self._kernels, self._driver = kernels, kernels.driver
        self._make_stream, self._most_rows = make_stream, size_class(most_rows)
        self._proxy = proxy or Proxy()
        self._completions = MappedMemory(self._driver, np.frombuffer(self._proxy, np.uint8))
        self._mini_batches: dict[int, _MiniBatch] = {}
        self._regions: dict[DataPath, MappedRegion] = {}
        self._warm_up = make_stream()
        self._thread = ThreadPoolExecutor(1, "fastdecode-capture")
        self._capturing: Future[tuple[int, _Key, _Graph]] | None = None  # with the mini-batch
        self.seconds: dict[int, float] = {}  # of steps without a row of any sequence, by their size, measured at start
        self.fault = ""  # the reason why no step is taken any more
        self._behind: set[str] = set()  # what has been drawn behind a graph

    @torch.inference_mode()
    def takes(self, spart: Captured, rows: Any, slot: int) -> bool:
        """True if `step` can run `rows`, a StepRows: they decode, are not too many, and have a graph.

        A missing graph is captured in another thread. After a capture that fails, no step is taken any more.
        """
        n = len(rows.table["tokens"])
        staged = rows.prompts or rows.scorer.n_rows or any(name in rows.table for name in _STAGED)
        if self.fault or staged or n > self._most_rows:
            return False
        self._driver.use_here()
        self._forget_links(_crossing(spart.links))
        links = _crossing(link_rows.views.link for link_rows in rows.link_rows)
        key = _Key(links, size_class(n), self._kind(rows), _merges(rows.link_rows))
        with self._captures():
            self.settle(wait=False)
            if key in self._mini_batch(spart, slot).graphs:
                return True
            if self._capturing is None:
                self._capturing = self._capture(spart, slot, key)
        return False

    @torch.inference_mode()
    def step(
        self, spart: Captured, rows: Any, batch: StepBatch, keep_logits: bool
    ) -> Generator[Pending, float | None, StepOutput]:
        """Run a step that `takes` has accepted; see SPart.step."""
        mini_batch = self._mini_batches[batch.slot]
        size = size_class(len(rows.table["tokens"]))
        crossing = [link_rows for link_rows in rows.link_rows if not link_rows.views.link.resident]
        links = _DrivenLinks(batch.slot, crossing, self._proxy)
        own: ResidentRows | None = None
        if len(crossing) < len(rows.link_rows):
            link, links.goes_on = _resident(spart), True
            assert link is not None
            own = ResidentRows(link, rows.link_rows[0].entries, True, rows.link_rows[0].cuts)
        try:
            links.arm()
            if own is not None:
                own.arm()
            links.judge(batch.layer_timeout)
            kind = self._kind(rows)
            key = _Key(links.begin(batch.layer_timeout), size, kind, _merges(rows.link_rows))
            graph = self._graph(spart, batch.slot, key)
            with mini_batch.stream.current():
                sampler, results = self._start(spart, rows, crossing, own, batch.slot, mini_batch, graph, size, kind)
            while not self._proxy.done(batch.slot):
                yield self._proxy.done_fd(batch.slot)
                mini_batch.stream.check()
            links.end()
        except BaseException:
            with contextlib.suppress(Exception):  # of a device that has failed
                mini_batch.stream.synchronize()
            with contextlib.suppress(Exception):
                links.end()
            links.settle(batch.layer_timeout)
            raise
        finally:
            if own is not None:
                own.end()
        logits = mini_batch.logits[: rows.n_drawn]
        with mini_batch.stream.current():
            drawn = sampler.read(results.numpy(), mini_batch.logits)[: rows.n_drawn] if rows.n_drawn else []
            sampled = rows.per_chunk(drawn)
            kept = logits.clone() if keep_logits else None
        link_costs = links.disarm()
        seconds = rows.elapsed()
        # The device cannot tell how long it has waited. It waited no longer than the slowest R-node worked.
        r_seconds = min(seconds, max((times.busy_ns for times in link_costs.values()), default=0) * 1e-9)
        return StepOutput(
            sampled=sampled,
            s_seconds=seconds - r_seconds,
            r_wait_seconds=r_seconds,
            kv_bytes=sum(times.kv_bytes for times in link_costs.values()),
            link_costs=link_costs,
            failures=links.failures,
            logits=kept,
        )

    def _kind(self, rows: Any) -> Kind | None:
        """The kind of sampling that covers a step's tokens; None if they are drawn behind the graph."""
        kind = kind_of(rows.specs, rows.vocab_size)
        if isinstance(kind, Kind):
            return kind
        if kind not in self._behind:
            self._behind.add(kind)
            log.info("exchange: tokens are drawn behind the captured steps, not in them, for %s", kind)
        return None

    def _start(
        self,
        spart: Captured,
        rows: Any,
        crossing: list[LinkRows],
        own: ResidentRows | None,
        slot: int,
        mini_batch: _MiniBatch,
        graph: _Graph,
        size: int,
        kind: Kind | None,
    ) -> tuple[Sampler, torch.Tensor]:
        """Put the whole step into its mini-batch's stream. `crossing` are its rows that go to R-nodes, `own` those of
        the device's KV pages. Returns the sampler and the tensor that will have its results."""
        regions = [self._region(link_rows.views.link) for link_rows in crossing]
        addresses = step_addresses(regions, slot, crossing) if crossing else None
        answers = addresses.answers if addresses is not None and _merges(crossing) else None
        pages = mini_batch.page_tables
        resident = own.numbers(pages[1], answers) if own is not None else None
        table = GraphTable(size, kind, rows.vocab_size, rows.table, addresses, rows.specs, pages, resident)
        table.upload(mini_batch.inputs)
        if own is not None:
            own.copy_shared()
        if table.sampler is None:
            rows.upload(spart.model.device, on_host=False)
        self._proxy.expect(slot)
        graph.replay()
        if table.sampler is None:
            sampler, drawn = rows.sampler, rows.sampler.launch(mini_batch.logits[: rows.n_drawn], rows.uploaded)
        else:
            sampler, drawn = table.sampler, mini_batch.results[: 2 * size]
        results = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
        results.copy_(drawn, non_blocking=True)
        self._driver.write_word(mini_batch.stream.handle, self._completions.device + _LINE * slot, 1)
        return sampler, results

    def close(self) -> None:
        """Give back all that is registered and captured, after the last step. Idempotent."""
        self._thread.shutdown()
        self._forget_steps("the bypass is closed")
        self._completions.close()

    def _forget_steps(self, why: str) -> None:
        """Take no further step, for the reason `why`. A step that still runs holds what it needs."""
        self.fault = self.fault or why
        self._capturing = None
        self._mini_batches.clear()
        self._regions.clear()

    # -- graphs -------------------------------------------------------------------------------------------------

    def prepare(self, spart: Captured, mini_batches: int, least: int = 1) -> None:
        """Capture the steps of at least `least` rows that use all links, before the first step runs, and measure those
        that need no R-node. Shows a bar if it takes long.

        The largest graphs are captured first, and one graph of each mini-batch stays for good: all other graphs find
        room in the memory that this one has taken. A graph that comes after smaller ones could not use their memory.
        Steps for which the counted memory (memory.graph_bytes) is not enough are left out.
        """
        sizes = sorted({size_class(n) for n in range(least, self._most_rows + 1)}, reverse=True)
        sets = [_crossing(spart.links)]
        if len(sets[0]) < len(spart.links):  # steps of the device's own KV pages need no R-node
            sets.append(())
        keys = [_Key((), sizes[0], KINDS[0]), *map(_Key._make, itertools.product(sets, sizes, _KINDS, [False]))]
        bound = mini_batches * graph_bytes(spart.model, sizes[0]) + _NODE_BYTES
        with self._captures():
            free = self._mini_batch(spart, 0).stream.free_bytes()
            options: Any = {"desc": "capturing steps", "unit": "step", "leave": False, "delay": 1, "disable": None}
            for key, slot in tqdm([*itertools.product(keys, range(mini_batches))], **options):
                if (taken := free - self._mini_batch(spart, slot).stream.free_bytes()) > bound:
                    log.warning("exchange: captures have taken %d MiB; smaller steps are left out", taken >> 20)
                    break
                graph = self._graph(spart, slot, key)
                if not key.links and key.size not in self.seconds:
                    self.seconds[key.size] = self._measure(spart, slot, key, graph)

    @torch.inference_mode()
    def _measure(self, spart: Captured, slot: int, key: _Key, graph: _Graph) -> float:
        """The seconds of a captured step without a row of any sequence: those of its S-Part."""
        mini_batch, seconds = self._mini_batches[slot], []
        table = GraphTable(key.size, key.kind, spart.model.config.vocab_size, page_tables=mini_batch.page_tables)
        with mini_batch.stream.current():
            table.upload(mini_batch.inputs)
            for _ in range(_MEASUREMENTS):
                mini_batch.stream.synchronize()
                begun = time.perf_counter()
                graph.replay()
                mini_batch.stream.synchronize()
                seconds.append(time.perf_counter() - begun)
        return min(seconds)

    def settle(self, wait: bool = True) -> None:
        """Take over the graph that the other thread has captured. With `wait`, wait for a capture that still runs."""
        if self._capturing is not None and (wait or self._capturing.done()):
            capturing, self._capturing = self._capturing, None
            self._keep(*capturing.result())

    @contextlib.contextmanager
    def _captures(self) -> Generator[None, None, None]:
        """After a capture that fails within it, no step is taken any more."""
        try:
            yield
        except (DriverError, RuntimeError) as error:
            self._forget_steps(f"a step could not be captured: {error}")
            log.warning("exchange: staged from now on; %s", self.fault)

    def _mini_batch(self, spart: Captured, slot: int) -> _MiniBatch:
        if slot not in self._mini_batches:
            self._mini_batches[slot] = _MiniBatch(self._make_stream, spart, self._most_rows)
        return self._mini_batches[slot]

    def _region(self, link: DataPath) -> MappedRegion:
        if link not in self._regions:
            self._regions[link] = MappedRegion(self._driver, link)
        return self._regions[link]

    def _forget_links(self, links: Sequence[DataPath]) -> None:
        """Let go of the graphs and regions of links that were replaced. A step that still runs holds its graph."""
        if self._regions.keys() <= set(links):
            return
        self._regions = {link: region for link, region in self._regions.items() if link in links}
        for mini_batch in self._mini_batches.values():
            for key in [key for key in mini_batch.graphs if not set(key.links) <= self._regions.keys()]:
                del mini_batch.graphs[key]

    def _graph(self, spart: Captured, slot: int, key: _Key) -> _Graph:
        """A graph of a mini-batch. A graph that is missing is captured first, and the caller waits."""
        graphs = self._mini_batch(spart, slot).graphs
        if key not in graphs:
            self._keep(*self._capture(spart, slot, key).result())
        graphs.move_to_end(key)
        return graphs[key]

    def _keep(self, slot: int, key: _Key, graph: _Graph) -> None:
        graphs = self._mini_batches[slot].graphs
        if self._regions.keys() >= set(key.links):  # no link was replaced meanwhile
            while len(graphs) >= _MOST_GRAPHS:
                graphs.popitem(last=False)
            graphs[key] = graph

    def _capture(self, spart: Captured, slot: int, key: _Key) -> Future[tuple[int, _Key, _Graph]]:
        """Let the other thread capture a graph."""
        links, size, kind, merges = key
        mini_batch, regions = self._mini_batch(spart, slot), tuple(self._region(link) for link in links)
        table = GraphTable(size, kind, spart.model.config.vocab_size, page_tables=mini_batch.page_tables)

        def work(stream: GraphStream, tensors: _Tensors, gates: Sequence[Gate]) -> None:
            inputs = table.views(tensors.inputs)
            q, kv, o = (x[:size] for x in tensors.rows)
            rows: RowExchange = StreamRows(self._kernels, stream.handle, gates, (q, kv, o), inputs)
            if (link := _resident(spart)) is not None:
                rows = ResidentStream(rows, link.kernels, tensors.resident(link.kernels, inputs, merges))
            logits = tensors.logits[:size]
            logits.copy_(spart.whole_step(inputs, rows))
            if table.sampler is not None:
                tensors.results[: 2 * size].copy_(table.sampler.launch(logits, inputs))

        @torch.inference_mode()
        def capture() -> tuple[int, _Key, _Graph]:
            self._driver.use_here()
            # Run once, because that loads kernels, which a capture must not do; in another stream and on other tensors,
            # because products use workspaces of their stream, and steps of the mini-batch may run. No row is moved, as
            # the counts are 0, and no R-node is asked or waited for.
            with self._warm_up.current():
                tensors = _Tensors(spart, size)
                table.upload(tensors.inputs)
                work(self._warm_up, tensors, ())
            self._warm_up.synchronize()
            replay, _ = mini_batch.recorder.capture(
                lambda: work(mini_batch.recorder, mini_batch, [region.gate(slot) for region in regions])
            )
            return slot, key, _Graph(replay, regions)

        return self._thread.submit(capture)
