"""Measures this machine for a profile: the S-Part's time by rows, attention's GB/s, the links, and the engine's cost.

The S-Part's time and the links' come from decoding steps with next to nothing cached, over an R-node that this command
starts for each transport, or one that runs already (--r-node). Attention is measured without an S-Part. All figures are
medians, so short disturbances do not count; on a machine that does other work the profile is that of the busy machine.
The engine's cost: see engine_cost.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import uvloop
from tqdm import tqdm

from fastdecode.bench.options import numbers
from fastdecode.bench.rpart import RPart
from fastdecode.bench.shape import Shape
from fastdecode.bench.steps import run_step
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.decoding import USUAL_TEMPERATURE, DecodeShape, Decoding, Round
from fastdecode.daemon.device_plan import node_device
from fastdecode.daemon.machine import available_memory, cpu_model, usable_cpus
from fastdecode.daemon.option_values import size_option
from fastdecode.daemon.split import split_machine
from fastdecode.plan.children import r_node
from fastdecode.plan.colocation import Colocation
from fastdecode.plan.colocation_measure import ColocatedLoad, measure_colocation
from fastdecode.plan.engine_cost import engine_cost
from fastdecode.plan.model import PlannedModel, read_model
from fastdecode.plan.profile import LinkTimes, Profile, RNodeProfile, SNodeProfile, SPartTimes
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import Model, SPart, choose_dtype, load_model, read_config
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch
from fastdecode.spart.threads import pool_threads, set_threads
from fastdecode.transports.registry import connect

COMMAND = ("measure", "measure this machine and save a profile")
HAS_RESULT = False

_CONTEXT, _STEPS = 16, 8  # of the decoding steps
_ATTENTION_CONTEXT = 1024
_PROMPT_TOKENS, _PROMPT_CHUNKS = 256, 8
_LEAST_SAMPLES = 3
_COLOCATION_ROWS = 24  # of the steps over full caches
#: --kv-bytes divided by this number is their KV-cache, so that filling is quick.
_COLOCATION_DIVISOR = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan measure`."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("profile.json"), metavar="FILE", help="where to save; default: profile.json")
    add("--model", type=Path, metavar="DIR", help="checkpoint; default: the demo model")
    add("--rows", type=numbers, default=[1, 4, 16, 64, 128], metavar="N,...", help="batches of the S-Part's steps")
    add("--kv-dtype", action="append", choices=KV_DTYPES, help="KV format (repeatable); default: fp16, int8 and int4")
    add("--group", action="append", type=int, default=[], help="GQA group besides the model's own (repeatable)")
    add("--kv-bytes", type=size_option, default=1 << 30, metavar="SIZE", help="KV-cache to attend to; default: 1GiB")
    add("--transport", action="append", help="transport between processes here (repeatable); default: shm and tcp")
    add("--r-node", action="append", default=[], metavar="URL", help="R-node whose link to measure (repeatable)")
    add("--s-threads", type=int, metavar="N", help="threads of the S-Part; default: as fastdecode-node takes")
    add("--r-threads", type=int, metavar="N", help="threads of the R-Part; default: all cores. If both fit the cores, "
        "the parts do not take turns")  # fmt: skip
    add("--seconds", type=float, default=60.0, help="about how long to measure in all")


def run(args: argparse.Namespace) -> None:
    """Measure, print and save a profile. Raises ValueError, OSError, RuntimeError, TransportError."""
    directory = NodeConfig(model=args.model).model_path()
    settings = ProfileSettings(
        rows=sorted(set(args.rows)),
        kv_dtypes=args.kv_dtype or ["fp16", "int8", "int4"],
        kv_bytes=args.kv_bytes,
        seconds=args.seconds,
        groups=args.group,
        transports=args.transport or ["shm", "tcp"],
        r_nodes=args.r_node,
        s_threads=args.s_threads,
        r_threads=args.r_threads,
        colocated_loads=_loads(read_model(directory), args),
    )
    profile = uvloop.run(measure(directory, settings))
    profile.write(args.out)
    print_profile(profile)
    print(f"saved as {args.out}")


def _loads(planned: PlannedModel, args: argparse.Namespace) -> list[ColocatedLoad]:
    """The steps over full caches: of each KV format, and of the first format with two R-nodes. None without shm."""
    if args.transport and "shm" not in args.transport:
        return []
    formats, kv_bytes = args.kv_dtype or ["fp16", "int8", "int4"], args.kv_bytes / _COLOCATION_DIVISOR
    loads = [ColocatedLoad.from_bytes(planned, kv_dtype, kv_bytes, _COLOCATION_ROWS) for kv_dtype in formats]
    cpus = len(usable_cpus())
    if min(args.r_threads or cpus, cpus) >= 2:
        loads.append(dataclasses.replace(loads[0], r_nodes=2))
    return loads


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What a profile is measured with, and for about how long."""

    rows: Sequence[int]  # batches of the S-Part's steps
    kv_dtypes: Sequence[str]
    kv_bytes: int  # KV-cache to attend to
    seconds: float  # in all
    groups: Sequence[int] = ()  # GQA groups besides the model's own
    transports: Sequence[str] = ("shm",)  # to R-nodes that are started here
    r_nodes: Sequence[str] = ()  # URLs of R-nodes that run already
    s_threads: int | None = None  # default: as many as fastdecode-node takes
    r_threads: int | None = None  # default: one on each CPU
    colocated_loads: Sequence[ColocatedLoad] = ()  # steps over full caches, for the section `colocations`
    least: bool = False  # the fastest round of each measurement counts instead of the median


async def measure(directory: Path, settings: ProfileSettings) -> Profile:
    """Measure a profile of this machine with the checkpoint in `directory`. The S-Part's times are taken over the first
    transport. Raises OSError, RuntimeError, ValueError, TransportError."""
    return await _Measurement(directory, settings).profile()


class _Measurement:
    """One measurement of a profile; each part of it takes an equal share of the seconds."""

    def __init__(self, directory: Path, settings: ProfileSettings):
        self._settings = settings
        self._planned, self._model = read_model(directory), load(directory, settings.s_threads)
        self._cpus = usable_cpus()
        self._r_cpus = self._cpus[-settings.r_threads :] if settings.r_threads else self._cpus
        self._on_cpu = self._model.device.type == "cpu"
        self._in_turns = self._on_cpu and pool_threads() + len(self._r_cpus) > len(self._cpus)
        shapes = [
            Shape(_ATTENTION_CONTEXT, group, self._planned.head_size, self._planned.n_kv_heads)
            for group in {self._planned.group, *settings.groups}
        ]
        self._cells = list(itertools.product(settings.kv_dtypes, shapes))
        n_links = len(settings.transports) + len(settings.r_nodes)
        n_loads = len(settings.colocated_loads)
        self._each = settings.seconds / (len(self._cells) + n_links * len(settings.rows) + 1 + n_loads)
        self._bar = tqdm(total=len(self._cells) + n_links + n_loads, desc="measuring", unit="measurement")

    async def profile(self) -> Profile:
        kv_gbps = self._attention()
        links: dict[str, LinkTimes] = {}
        s_part: SPartTimes | None = None
        for where in (*self._settings.transports, *self._settings.r_nodes):
            self._bar.set_postfix_str(f"S-Part and link, {where}")
            with r_node(where, len(self._r_cpus)) as url:
                steps = await self._steps(url)
                if s_part is None:
                    s_part, overlap = await self._s_part(url, steps)
                    of_rows = row_gbps(self._planned, steps)
            links[url.partition(":")[0]] = link_times(self._planned, steps)
            self._bar.update()
        assert s_part is not None
        colocations = [await self._both_parts(colocated) for colocated in self._settings.colocated_loads]
        device = cpu_model() if self._on_cpu else torch.cuda.get_device_name(self._model.device)
        self._bar.close()
        cost = await engine_cost(self._planned)
        return Profile(
            name=f"{device}, {len(self._cpus)} CPUs",
            source="measured",
            notes=f"weights in {str(self._model.dtype).removeprefix('torch.')}",
            in_turns=self._in_turns,
            s_node=SNodeProfile(
                device=device, s_part=(s_part,), engine_step=cost.step, engine_row=cost.row, overlap=overlap
            ),
            r_node=RNodeProfile(
                device=cpu_model(), kv_gbps=kv_gbps, row_gbps=of_rows, memory=float(available_memory() // 2)
            ),
            links=links,
            colocations=tuple(colocations),
        )

    def _attention(self) -> dict[str, dict[str, float]]:
        """GB/s by KV format and GQA group."""
        settings = self._settings
        found: dict[str, dict[str, float]] = {kv_dtype: {} for kv_dtype in settings.kv_dtypes}
        for kv_dtype, shape in self._cells:
            self._bar.set_postfix_str(f"attention, {kv_dtype}, G = {shape.group}")
            found[kv_dtype][str(shape.group)] = attention_gbps(
                shape, kv_dtype, settings.kv_bytes, self._each, self._r_cpus, settings.least
            )
            self._bar.update()
        return found

    async def _steps(self, url: str) -> list[StepTime]:
        """Steps of each number of rows over the R-node at a URL."""
        least = self._settings.least
        return [await decode_step(self._model, url, n, self._each, least) for n in self._settings.rows]

    async def _s_part(self, url: str, steps: list[StepTime]) -> tuple[SPartTimes, float]:
        """The S-Part's times, and how much slower it is while another mini-batch is at the R-node."""
        times = await s_part_times(self._planned, self._model, url, steps, self._each)
        if self._in_turns:
            return times, 1.0
        return times, await overlap_of_two(self._model, url, steps[len(steps) // 2], self._each)

    async def _both_parts(self, colocated: ColocatedLoad) -> Colocation:
        self._bar.set_postfix_str(f"both parts, {colocated.kv_dtype}, {colocated.r_nodes} R-node(s)")
        threads, least = len(self._r_cpus), self._settings.least
        measured = await measure_colocation(
            self._planned, self._model, colocated, threads, self._each, self._in_turns, least
        )
        self._bar.update()
        return measured


def load(directory: Path, threads: int | None = None) -> Model:
    """Load a checkpoint as a node would; torch gets `threads` threads, by default as many as the node's S-Part."""
    device = node_device(NodeConfig())
    threads = threads or split_machine(NodeConfig(), s_on_gpu=device.type == "cuda").s_threads
    set_threads(threads)
    dtype = choose_dtype("auto", read_config(directory).dtype, device)
    model = in_own_thread(load_model, directory, device=device, dtype=dtype)
    set_threads(threads, model)
    return model


# -- the three measurements --------------------------------------------------------------------------------------------


def attention_gbps(
    shape: Shape, kv_dtype: str, kv_bytes: int, seconds: float, cpus: list[int], least: bool = False
) -> float:
    """GB/s at which the attention of a layer reads at least `kv_bytes` of KV-cache with a thread on each of `cpus`."""
    with closing(RPart(shape, kv_dtype, kv_bytes, cpus, progress=False)) as r_part:
        r_part.layer()  # warms up
        speeds: list[float] = []
        end = time.perf_counter() + seconds
        while len(speeds) < _LEAST_SAMPLES or time.perf_counter() < end:
            elapsed, read = r_part.layer()
            speeds.append(read / elapsed * 1e-9)
    return max(speeds) if least else statistics.median(speeds)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A decoding step of `rows` sequences with next to nothing cached, in seconds."""

    rows: int
    s_part: float
    waited: float  # for the R-node
    busy: float  # the R-node's work on the step


async def decode_step(model: Model, url: str, rows: int, seconds: float, least: bool = False) -> StepTime:
    """Time steps of `rows` sequences in one mini-batch for about `seconds`."""
    shape = DecodeShape(rows, _CONTEXT, _STEPS, 1, "fp16", USUAL_TEMPERATURE)
    rounds = await decode_rounds(model, [url], shape, seconds)
    best = min if least else statistics.median
    seconds_of = (r.elapsed - r.waited for r in rounds), (r.waited for r in rounds), (r.busy for r in rounds)
    return StepTime(rows, *(best(values) / _STEPS for values in seconds_of))


async def decode_rounds(model: Model, urls: Sequence[str], shape: DecodeShape, seconds: float) -> list[Round]:
    """Decode rounds for about `seconds` after a first round."""
    decoding = await Decoding.open(model, urls, shape)
    try:
        await decoding.fill()
        rounds = [await decoding.split_round()]
        end = time.perf_counter() + seconds
        while len(rounds) <= _LEAST_SAMPLES or time.perf_counter() < end:
            rounds.append(await decoding.split_round())
        return rounds[1:]
    finally:
        await decoding.close()


async def s_part_times(
    planned: PlannedModel, model: Model, url: str, steps: Sequence[StepTime], seconds: float
) -> SPartTimes:
    """The S-Part's curve from its steps, and the costs of a prompt's rows and of their attention from the first and the
    last chunk of a long prompt."""
    rows = tuple((float(step.rows), step.s_part) for step in steps)
    times = SPartTimes(model=planned.name, parameters=planned.parameters, rows=rows)
    chunks = max(1, min(_PROMPT_CHUNKS, (planned.max_positions - 1) // _PROMPT_TOKENS))
    length = chunks * _PROMPT_TOKENS
    link = await connect(url, model.hello(1, _PROMPT_TOKENS, "fp16", None, 1), None)
    taken: list[list[float]] = []
    try:
        spart, end = SPart(model, [link], state_slots=1), time.perf_counter() + seconds
        tokens = list(range(3, 3 + _PROMPT_TOKENS))
        while len(taken) <= _LEAST_SAMPLES or time.perf_counter() < end:
            tag = len(taken) + 1
            taken.append([])
            for pos in range(0, length, _PROMPT_TOKENS):
                sample = SampleSpec(temperature=0.0) if pos + _PROMPT_TOKENS == length else None
                chunk = Chunk(0, 0, tag, pos, tokens, True, sample, length)
                taken[-1].append(run_step(spart.step(StepBatch(0, [chunk]))).s_seconds)
            await link.free([(0, tag)])
    finally:
        await link.close()
    first, last = (times.rows_in(statistics.median(chunks_of[i] for chunks_of in taken[1:])) for i in (0, -1))
    pairs = _PROMPT_TOKENS * (_PROMPT_TOKENS + 1) / 2  # of the first chunk
    attention = 1.0
    if chunks > 1:
        more_rows = planned.pair_rows * _PROMPT_TOKENS * (length - _PROMPT_TOKENS)
        attention = min(max((last - first) / more_rows, 0.01), 1000.0)
    row = (first - attention * planned.pair_rows * pairs) / _PROMPT_TOKENS
    return dataclasses.replace(times, prompt_row=min(max(row, 0.01), 100.0), prompt_attention=attention)


async def overlap_of_two(model: Model, url: str, alone: StepTime, seconds: float) -> float:
    """How many times as long as in the step `alone` the S-Part takes with two such mini-batches in flight: it goes from
    one to the other in each layer, and the R-node works meanwhile, here on the same machine."""
    shape = DecodeShape(2 * alone.rows, _CONTEXT, _STEPS, 2, "fp16", USUAL_TEMPERATURE)
    rounds = await decode_rounds(model, [url], shape, seconds)
    both = statistics.median(r.elapsed - r.waited for r in rounds) / (2 * _STEPS)
    return max(1.0, both / alone.s_part)


def link_times(planned: PlannedModel, steps: Sequence[StepTime]) -> LinkTimes:
    """A link's times, from the waiting of steps of few and of many rows. A step waits while its rows are carried, and
    while the R-node works on them."""
    few, many = steps[0], steps[-1]
    on_the_way = (many.waited - many.busy) - (few.waited - few.busy)
    return LinkTimes(layer_seconds=few.waited / planned.n_layers, gbps=_gbps(planned, few, many, on_the_way))


def row_gbps(planned: PlannedModel, steps: Sequence[StepTime]) -> float:
    """GB/s of Q, K, V and O at which the R-node works on rows with next to nothing cached."""
    return _gbps(planned, steps[0], steps[-1], steps[-1].busy - steps[0].busy)


def _gbps(planned: PlannedModel, few: StepTime, many: StepTime, seconds: float) -> float:
    """GB/s of the rows that one step has more than the other; at most 1 TB/s, because noise can make `seconds`
    negative."""
    carried = max((many.rows - few.rows) * (2 * planned.q_bytes + planned.kv_row_bytes), 1)
    return carried / max(seconds, carried / 1e12) * 1e-9


def print_profile(profile: Profile) -> None:
    """Print a profile as a table."""
    print(f"{profile.name} ({profile.source})")
    for times in profile.s_node.s_part if profile.s_node else ():
        steps = ", ".join(f"{n:.0f}: {1e3 * t:.2f}" for n, t in times.rows)
        print(
            f"  S-Part of {times.model}, ms by rows: {steps}; a prompt's row costs {times.prompt_row:.2f} rows, its "
            f"attention {times.prompt_attention:.2f} times its operations"
        )
    if profile.s_node:
        row, step = 1e6 * profile.s_node.engine_row, 1e6 * profile.s_node.engine_step
        print(f"  the engine: {step:.0f} us a step and {row:.1f} us a row")
        print(f"  the S-Part while another mini-batch is at the R-nodes: {profile.s_node.overlap:.2f}x")
    for kv_dtype, groups in profile.r_node.kv_gbps.items() if profile.r_node else ():
        speeds = ", ".join(f"{speed:.1f} (G = {group})" for group, speed in groups.items())
        print(f"  attention over {kv_dtype}, GB/s: {speeds}")
    if profile.r_node and profile.r_node.row_gbps:
        print(f"  the R-node works on {profile.r_node.row_gbps:.2f} GB/s of rows")
    for cell in profile.colocations:
        print(
            f"  both parts here, {cell.rows} rows over {cell.kv_bytes / 1e6:.0f} MB of {cell.kv_dtype}, {cell.r_nodes} "
            f"R-node(s): waits {1e3 * cell.waited:.2f} ms, S-Part {1e3 * cell.s_part:.2f} ms, lost {cell.lost:.2f}"
        )
    for name, link in profile.links.items():
        print(f"  {name}: {1e6 * link.layer_seconds:.1f} us a layer, {link.gbps:.2f} GB/s")
