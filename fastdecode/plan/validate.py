"""Decodes a few points on this machine and prints the measured tokens/s beside the predicted ones.

The profile is measured first, in the same run, from steps with next to nothing cached and from attention alone; the
points then decode with full caches. Each point is a batch, a context, a KV format and a number of R-nodes, which share
this machine's cores. Without --model, a Llama of 93 million parameters with random weights is made. With --state, the
profile and the points are kept as they are measured, and a later run goes on with what is missing. With --passes, every
measurement is taken several times, and the fastest counts: other work on the machine can only make one slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop
from tqdm import tqdm

from fastdecode.bench import checkpoint
from fastdecode.bench.options import keep, print_result
from fastdecode.daemon.machine import usable_cpus
from fastdecode.plan.colocation_measure import STEPS, ColocatedLoad
from fastdecode.plan.equations import System, Work, round_seconds, stage_times
from fastdecode.plan.measure import ProfileSettings, decode_rounds, load, measure
from fastdecode.plan.model import PlannedModel, read_model
from fastdecode.plan.profile import Profile, fastest, profile_from_json
from fastdecode.spart import Model

COMMAND = ("validate", "predicted tokens/s beside measured ones, on this machine")

_LOAD_ROWS = 24  # of the measurement of colocation
_ONE_SIZE = 1.25  # KV-caches whose sizes are within this ratio are measured once

#: The points by default, in one mini-batch each: batch, context, KV format and number of R-nodes vary.
POINTS = (
    ColocatedLoad(8, 2048, "fp16"), ColocatedLoad(16, 1024, "fp16"), ColocatedLoad(32, 512, "fp16"),
    ColocatedLoad(32, 1024, "fp16"), ColocatedLoad(64, 512, "fp16"), ColocatedLoad(16, 4096, "int8"),
    ColocatedLoad(64, 1024, "int8"), ColocatedLoad(32, 2048, "int4"), ColocatedLoad(32, 1024, "fp16", 2),
    ColocatedLoad(64, 1024, "int8", 2),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan validate`."""
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="checkpoint; default: one with random weights")
    add("--point", action="append", type=_point, metavar="B,C,KV,N", help="batch, context, KV format and R-nodes to "
        "decode (repeatable); default: ten points of 16,384 to 65,536 cached tokens")  # fmt: skip
    add("--seconds", type=float, default=90.0, help="about how long to measure the profile")
    add("--point-seconds", type=float, default=12.0, help="how long to decode at each point")
    add("--state", type=Path, metavar="FILE", help="keep what is measured in FILE, and measure only what it lacks")
    add("--passes", type=int, default=1, metavar="N", help="measure profile and points N times; the fastest count")
    add("--stop-after", type=float, metavar="S", help="begin nothing after S seconds; needs --state")


def _point(text: str) -> ColocatedLoad:
    batch, context, kv_dtype, r_nodes = text.split(",")
    return ColocatedLoad(int(batch), int(context), kv_dtype, int(r_nodes))


def run(args: argparse.Namespace) -> None:
    """Measure, decode and print. Raises ValueError, OSError, RuntimeError, TransportError."""
    if args.stop_after is not None and args.state is None:
        raise ValueError("--stop-after needs a --state, from which a later run goes on")
    with tempfile.TemporaryDirectory(prefix="fastdecode-") as made:
        directory = args.model or random_checkpoint(Path(made) / "llama-93m")
        print_result(args, uvloop.run(_run(directory, args)), _print_table)


def random_checkpoint(directory: Path) -> Path:
    """Write the checkpoint that `fastdecode-bench checkpoint` writes by default."""
    parser = argparse.ArgumentParser()
    checkpoint.add_arguments(parser)
    checkpoint.write(parser.parse_args(["--out", str(directory)]))
    return directory


@dataclass(slots=True)
class _State:
    """The measurements of all passes so far."""

    profiles: list[Profile] = field(default_factory=list)
    measured: dict[ColocatedLoad, list[float]] = field(default_factory=dict)  # output tokens/s

    @classmethod
    def read(cls, path: Path | None) -> _State:
        """The state that a run has left in a file; without the file, an empty one. Raises ValueError for another
        file."""
        if path is None or not path.exists():
            return cls()
        try:
            value = orjson.loads(path.read_bytes())
            points = {ColocatedLoad(**point): [float(speed) for speed in speeds] for point, speeds in value["measured"]}
            return cls([profile_from_json(profile) for profile in value["profiles"]], points)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a state of fastdecode-plan validate: {error}") from None

    def write(self, path: Path | None) -> None:
        measured = [(dataclasses.asdict(point), speeds) for point, speeds in self.measured.items()]
        keep(path, {"profiles": self.profiles, "measured": measured})


async def _run(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    points: tuple[ColocatedLoad, ...] = tuple(args.point or POINTS)
    planned, state = read_model(directory), _State.read(args.state)
    await _measure(directory, planned, points, state, args)
    profile, rows, missing = fastest(state.profiles), [], 0
    for point in points:
        speeds = state.measured.get(point, [])
        missing += args.passes - min(args.passes, len(speeds))
        if speeds:
            measured, predicted = max(speeds), predict(planned, profile, point)
            row = {"predicted": predicted, "measured": measured, "slowest": min(speeds), "passes": len(speeds)}
            rows.append(dataclasses.asdict(point) | row | {"error": predicted / measured - 1})
    shown = {"model": planned.name, "machine": profile.name, "profile": dataclasses.asdict(profile)}
    return shown | {"rows": rows, "missing": missing}


async def _measure(
    directory: Path, planned: PlannedModel, points: tuple[ColocatedLoad, ...], state: _State, args: argparse.Namespace
) -> None:
    """Measure what the state lacks, pass by pass."""
    begun, model = time.monotonic(), None

    def late() -> bool:
        return args.stop_after is not None and time.monotonic() - begun > args.stop_after

    for n in range(args.passes):
        if len(state.profiles) <= n and (not state.profiles or not late()):
            state.profiles.append(await _profile(directory, planned, points, args.seconds))
            state.write(args.state)
        missing = [point for point in points if len(state.measured.get(point, [])) <= n]
        for point in tqdm(missing, desc=f"points, pass {n + 1}", unit="point"):
            if late():
                return
            model = model or load(directory)
            state.measured.setdefault(point, []).append(await _decode(model, planned, point, args.point_seconds))
            state.write(args.state)


async def _profile(
    directory: Path, planned: PlannedModel, points: tuple[ColocatedLoad, ...], seconds: float
) -> Profile:
    settings = ProfileSettings(
        rows=sorted({1, 4, 128, *(point.batch for point in points)}),
        kv_dtypes=list(dict.fromkeys(point.kv_dtype for point in points)),
        # The last-level cache holds some of the KV-cache, so attention is measured over as much as the points have.
        kv_bytes=int(statistics.median(point.kv_bytes(planned) for point in points)),
        seconds=seconds,
        colocated_loads=_loads(planned, points),
        least=True,
    )
    return await measure(directory, settings)


def _loads(planned: PlannedModel, points: tuple[ColocatedLoad, ...]) -> list[ColocatedLoad]:
    """The loads that measure colocation: for each KV format the least and the most bytes of the points, and for each
    other number of R-nodes the most bytes of the first format. No load has the sequences of a point."""
    loads: list[ColocatedLoad] = []
    for kv_dtype in dict.fromkeys(point.kv_dtype for point in points):
        sizes = sorted(point.kv_bytes(planned) for point in points if point.kv_dtype == kv_dtype)
        chosen = sizes[:1] if sizes[-1] < _ONE_SIZE * sizes[0] else [sizes[0], sizes[-1]]
        loads += [ColocatedLoad.from_bytes(planned, kv_dtype, size, _LOAD_ROWS) for size in chosen]
    most = max((load for load in loads if load.kv_dtype == loads[0].kv_dtype), key=lambda load: load.context)
    numbers = sorted({point.r_nodes for point in points} - {1})
    return loads + [dataclasses.replace(most, r_nodes=n) for n in numbers]


async def _decode(model: Model, planned: PlannedModel, point: ColocatedLoad, seconds: float) -> float:
    """Output tokens/s of a point."""
    with point.nodes(planned, len(usable_cpus()), mini_batches=1) as urls:
        rounds = await decode_rounds(model, urls, point.shape(mini_batches=1), seconds)
    return point.batch * STEPS / min(r.elapsed for r in rounds)


def predict(planned: PlannedModel, profile: Profile, point: ColocatedLoad) -> float:
    """Output tokens a second of a point."""
    system = System.from_profile(profile, "shm", planned, point.kv_dtype, point.r_nodes)
    system = dataclasses.replace(system, engine_step=0.0, engine_row=0.0)  # no engine runs
    work = Work(point.batch, point.read_tokens(planned))
    seconds, _ = round_seconds([stage_times(system, work)], profile.in_turns)
    return point.batch / seconds


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']} on {result['machine']}: output tokens/s")
    print(
        f"{'batch':>6} {'context':>8} {'KV':>9} {'R-nodes':>8} {'predicted':>10} {'measured':>9} {'error':>7}  slowest"
    )
    for row in result["rows"]:
        print(
            f"{row['batch']:6d} {row['context']:8d} {row['kv_dtype']:>9} {row['r_nodes']:8d} {row['predicted']:10.1f} "
            f"{row['measured']:9.1f} {100 * row['error']:+6.1f} %  {row['slowest']:.1f} of {row['passes']}"
        )
    errors = [abs(row["error"]) for row in result["rows"]]
    if result["missing"]:
        print(f"{result['missing']} measurement(s) are missing; run the same command again")
    if errors:
        print(
            f"{sum(error <= 0.1 for error in errors)} of {len(errors)} within 10 %; the worst {100 * max(errors):.1f} %"
        )
