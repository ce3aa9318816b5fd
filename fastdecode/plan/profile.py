"""Profiles of hardware: how fast an S-node, an R-node and the links between them are.

A profile is a JSON object in a file. `fastdecode-plan measure` writes one; for hardware that is not at hand, one can be
written from data sheets and papers, which its `source` then says. Every section may be missing: of several profiles the
last one that has a section gives it, so an S-node may come from one file and its R-nodes from another.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson

from fastdecode.plan import colocation
from fastdecode.plan.colocation import Colocation
from fastdecode.region.contract import KV_DTYPES

_T = TypeVar("_T")

VERSION = 1
SOURCES = ("measured", "data sheet")

#: Profiles that ship with the package are found by name.
SHIPPED = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A profile cannot be used; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SPartTimes:
    """The S-Part of one model, T(B) of FastDecode (section 4.2), over all layers."""

    model: str
    parameters: float  # weights that each row is multiplied with
    weight_bytes: float = 2.0  # of a weight in the memory of the S-node's device
    rows: tuple[tuple[float, float], ...]  # (decoding rows, seconds of a step), rows rising
    prompt_row: float = 1.0  # decoding rows that cost as much as one row of a prompt, its attention apart
    prompt_attention: float = 1.0  # how many times as long a prompt's attention takes as rows of as many operations

    def __post_init__(self) -> None:
        _positive(self, "parameters", "weight_bytes", "prompt_row", "prompt_attention")
        if not self.rows:
            raise ProfileError(f"the S-Part of {self.model} has no rows")
        numbers, seconds = zip(*self.rows, strict=True)
        if list(numbers) != sorted(set(numbers)) or numbers[0] < 1 or min(seconds) <= 0:
            raise ProfileError(f"the rows of the S-Part of {self.model} do not rise from 1, or a time is not positive")

    def seconds(self, rows: float) -> float:
        """Seconds of a step of `rows` decoding rows: linear between the points, beyond the last as they rise overall.

        Fewer rows than the first point's take as long, because they read the same weights.
        """
        (n0, t0), (n1, t1) = self.rows[0], self.rows[-1]
        if rows > n1 > n0:
            return t1 + (t1 - t0) * (rows - n1) / (n1 - n0)
        return float(np.interp(rows, [n for n, _ in self.rows], [t for _, t in self.rows]))

    def rows_in(self, seconds: float) -> float:
        """The rows of a step of `seconds`: the inverse of `seconds`. With one point, rows in proportion to it."""
        (n0, t0), (n1, t1) = self.rows[0], self.rows[-1]
        if seconds > t1:
            return n1 + (seconds - t1) * (n1 - n0) / (t1 - t0) if t1 > t0 else n1 * seconds / t1
        risen = accumulate((t for _, t in self.rows), max)
        return float(np.interp(seconds, list(risen), [n for n, _ in self.rows]))

    def scaled(self, parameters: float) -> SPartTimes:
        """The S-Part of a model with `parameters` weights: the times grow with the weights."""
        ratio = parameters / self.parameters
        return dataclasses.replace(self, parameters=parameters, rows=tuple((n, ratio * t) for n, t in self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """The memory of an S-node's GPU, where resident KV lies beside the weights."""

    memory: float  # bytes
    kv_gbps: float  # GB/s at which attention reads resident KV, in every format

    def __post_init__(self) -> None:
        _positive(self, "memory", "kv_gbps")


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketsProfile:
    """The NUMA nodes of an S-node on CPUs. The times of its S-Part are those of one NUMA node over its own memory."""

    n: int
    cross_gbps: float  # GB/s at which the cores of one NUMA node read the memory of another one
    sum_seconds: float  # of a sum over ranks of next to nothing
    sum_gbps: float  # GB/s of the rows of such a sum

    def __post_init__(self) -> None:
        _positive(self, "n", "cross_gbps", "sum_seconds", "sum_gbps")


@dataclass(frozen=True, slots=True, kw_only=True)
class SNodeProfile:
    """A machine that runs the S-Part."""

    device: str
    s_part: tuple[SPartTimes, ...]
    gpu: GpuProfile | None = None  # None: no KV lies beside the weights
    sockets: SocketsProfile | None = None  # None: the times are those of the whole machine
    price: float | None = None  # an hour, in any currency
    #: Seconds that scheduling and delivery of tokens take for each step and, besides, for each of its rows.
    engine_step: float = 0.0
    engine_row: float = 0.0
    #: How many times as long the S-Part takes while another mini-batch is at the R-nodes.
    overlap: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "price", "overlap")
        if not (self.engine_step >= 0 and self.engine_row >= 0):
            raise ProfileError(f"engine_step and engine_row of {self.device} must not be negative")
        if not self.s_part:
            raise ProfileError(f"{self.device} has no times of an S-Part")

    def times(self, model: str, parameters: float) -> SPartTimes:
        """The S-Part of a model. A model that the profile does not have gets the scaled S-Part of the model nearest in
        size."""
        for times in self.s_part:
            if times.model == model:
                return times
        return min(self.s_part, key=lambda t: abs(math.log(t.parameters / parameters))).scaled(parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class RNodeProfile:
    """A machine, or a socket, that runs an R-node."""

    device: str
    kv_gbps: dict[str, dict[str, float]]  # by KV format and GQA group: GB/s at which attention reads KV-cache
    memory: float  # bytes for the KV-cache
    price: float | None = None  # an hour
    row_gbps: float | None = None  # GB/s of Q, K, V and O of decoding rows, the reading apart; None: they cost nothing

    def __post_init__(self) -> None:
        _positive(self, "memory", "price", "row_gbps")
        for name, groups in self.kv_gbps.items():
            if name not in KV_DTYPES:
                raise ProfileError(f"{name!r} is not a KV format: {', '.join(KV_DTYPES)}")
            if not groups or not all(group.isdigit() and speed > 0 for group, speed in groups.items()):
                raise ProfileError(f"kv_gbps of {name} does not give a positive GB/s for each GQA group")

    def bytes_per_second(self, kv_dtype: str, group: int) -> float:
        """Bytes a second at which attention reads a KV format. A GQA group that the profile does not have gets the
        speed of the next larger group, else of the largest.

        Raises ProfileError for a format that the profile does not have.
        """
        if kv_dtype not in self.kv_gbps:
            raise ProfileError(f"{self.device} has no speed of {kv_dtype}; it has {', '.join(self.kv_gbps)}")
        groups = sorted((int(name), speed) for name, speed in self.kv_gbps[kv_dtype].items())
        return 1e9 * next((speed for n, speed in groups if n >= group), groups[-1][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """A layer's way from the S-node to its R-nodes and back, by one transport."""

    layer_seconds: float  # with next to no rows, the R-node's work included
    gbps: float  # GB/s of the S-node's rows, each way, the R-nodes' work on them apart

    def __post_init__(self) -> None:
        _positive(self, "layer_seconds", "gbps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile, or several that were merged. `in_turns`: S-Part and R-Part take turns on the same cores."""

    version: int = VERSION
    name: str
    source: str
    notes: str = ""
    in_turns: bool = False
    s_node: SNodeProfile | None = None
    r_node: RNodeProfile | None = None
    links: dict[str, LinkTimes] = field(default_factory=dict)  # by transport
    colocations: tuple[Colocation, ...] = ()  # measurements of S-Part and R-nodes at work on this machine

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ProfileError(f"the profile is of version {self.version}; this program reads version {VERSION}")
        if self.source not in SOURCES:
            raise ProfileError(f"source is {self.source!r}; it is {' or '.join(SOURCES)}")

    def write(self, path: Path) -> None:
        """Write the profile as JSON. Raises OSError."""
        path.write_bytes(orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_profile(where: str) -> Profile:
    """Read and check a profile: a file, or the name of one that ships. Raises ProfileError."""
    shipped = SHIPPED / f"{where}.json"
    try:
        value = orjson.loads((shipped if shipped.is_file() else Path(where)).read_bytes())
        return profile_from_json(value)
    except OSError as error:
        raise ProfileError(f"profile {where}: {error.strerror}; profiles that ship: {_shipped()}") from None
    except (ProfileError, orjson.JSONDecodeError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise ProfileError(f"profile {where}: {error}") from None


def _shipped() -> str:
    return ", ".join(sorted(path.stem for path in SHIPPED.glob("*.json")))


def merged(profiles: list[Profile]) -> Profile:
    """One profile with the last of each section of several. Raises ProfileError if S-node, R-node or links are
    missing."""
    s_node = next((p.s_node for p in reversed(profiles) if p.s_node), None)
    r_node = next((p.r_node for p in reversed(profiles) if p.r_node), None)
    links = next((p.links for p in reversed(profiles) if p.links), {})
    for name, section in (("s_node", s_node), ("r_node", r_node), ("links", links)):
        if not section:
            raise ProfileError(
                f"no --profile has the section {name}: give a file of `fastdecode-plan measure`, or one that ships: "
                f"{_shipped()}"
            )
    sources = {p.source for p in profiles}
    return Profile(
        name=" + ".join(p.name for p in profiles),
        source="measured" if sources == {"measured"} else "data sheet",
        in_turns=len(profiles) == 1 and profiles[0].in_turns,
        colocations=profiles[0].colocations if len(profiles) == 1 else (),
        s_node=s_node,
        r_node=r_node,
        links=links,
    )


def fastest(profiles: Sequence[Profile]) -> Profile:
    """The best times of several profiles of one machine, measured alike: other work can only have made one slower."""
    first = profiles[0]
    if len(profiles) == 1 or first.s_node is None or first.r_node is None:
        return first
    s_parts = [p.s_node.s_part[0] for p in profiles if p.s_node]
    rows = tuple((n, min(times.rows[i][1] for times in s_parts)) for i, (n, _) in enumerate(s_parts[0].rows))
    prompt_row = statistics.median(times.prompt_row for times in s_parts)
    attention = statistics.median(times.prompt_attention for times in s_parts)
    s_part = dataclasses.replace(s_parts[0], rows=rows, prompt_row=prompt_row, prompt_attention=attention)
    gbps = {
        name: {group: max(p.r_node.kv_gbps[name][group] for p in profiles if p.r_node) for group in groups}
        for name, groups in first.r_node.kv_gbps.items()
    }
    rows_gbps = [p.r_node.row_gbps for p in profiles if p.r_node and p.r_node.row_gbps]
    # The GB/s come from a difference, which noise moves either way: the GB/s of the least disturbed measurement count.
    links = {name: min((p.links[name] for p in profiles), key=lambda link: link.layer_seconds) for name in first.links}
    nodes = [p.s_node for p in profiles if p.s_node]
    step, row = min(node.engine_step for node in nodes), min(node.engine_row for node in nodes)
    overlap = min(node.overlap for node in nodes)
    s_node = dataclasses.replace(first.s_node, s_part=(s_part,), engine_step=step, engine_row=row, overlap=overlap)
    return dataclasses.replace(
        first,
        s_node=s_node,
        r_node=dataclasses.replace(first.r_node, kv_gbps=gbps, row_gbps=max(rows_gbps, default=None)),
        links=links,
        colocations=colocation.fastest([p.colocations for p in profiles]),
    )


def median(profiles: Sequence[Profile]) -> Profile:
    """The median of every number of several profiles of one machine, measured alike: what a load of minutes meets where
    the speed of the machine wanders."""
    middle: Profile = _median(list(profiles))
    return middle


def _median(values: Sequence[Any]) -> Any:
    """The medians of numbers, and of those in equally built containers; of anything else, the first."""
    first = values[0]
    if isinstance(first, bool) or all(value == first for value in values):
        return first
    if isinstance(first, int | float):
        return statistics.median(values)
    if isinstance(first, tuple):
        return tuple(_median(items) for items in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: _median([value[key] for value in values]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in dataclasses.fields(first)]
        return dataclasses.replace(first, **{n: _median([getattr(value, n) for value in values]) for n in names})
    return first


def profile_from_json(value: dict[str, Any]) -> Profile:
    """Build a profile from JSON. Raises ProfileError, also for a field that is missing or unknown."""
    fields = dict(value)
    if s_node := fields.get("s_node"):
        times = [
            _section(SPartTimes, t | {"rows": tuple((float(n), float(s)) for n, s in t["rows"])}, "s_node.s_part: ")
            for t in s_node["s_part"]
        ]
        gpu, sockets = s_node.get("gpu"), s_node.get("sockets")
        parts = {
            "s_part": tuple(times),
            "gpu": gpu and _section(GpuProfile, gpu, "s_node.gpu: "),
            "sockets": sockets and _section(SocketsProfile, sockets, "s_node.sockets: "),
        }
        fields["s_node"] = _section(SNodeProfile, s_node | parts, "s_node: ")
    if r_node := fields.get("r_node"):
        fields["r_node"] = _section(RNodeProfile, r_node, "r_node: ")
    fields["links"] = {
        name: _section(LinkTimes, link, f"links.{name}: ") for name, link in fields.get("links", {}).items()
    }
    cells = fields.pop("together", ()) or fields.get("colocations", ())  # profiles of November 2026 say "together"
    fields["colocations"] = tuple(_section(Colocation, cell, "colocations: ") for cell in cells)
    return _section(Profile, fields, "")


def _section(kind: type[_T], values: dict[str, Any], where: str) -> _T:
    """A section of a profile from its fields. Raises ProfileError, whose message begins with `where`, for a field that
    is missing or unknown."""
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values.keys() - known:
        raise ProfileError(f"{where}there is no field {name!r}; there are {', '.join(known)}")
    for name, f in known.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ProfileError(f"{where}the field {name!r} is missing")
    return kind(**values)


def _positive(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ProfileError(f"{name} is {value!r}; it must be a positive number")
