"""The performance model: FastDecode's equations (arXiv 2403.11421, section 4.2), and the time of a whole step.

FastDecode models one block of a model without grouped queries, perfect overlap, and no network. `stage_times` adds
grouped queries, prompts and the bytes on the wire; `round_seconds` adds the time of a mini-batch by itself. All
functions are pure; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastdecode.plan.colocation import Colocation, ColocationCost, colocation_cost
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import LinkTimes, Profile, ProfileError, SNodeProfile, SPartTimes

# -- FastDecode's equations, with its letters --------------------------------------------------------------------------
# N: layers. S: most tokens of a sequence. B: sequences of a mini-batch. T: seconds of the S-Part of one layer, B rows.
# R: seconds of one R-node for one cached token in one layer. P: R-nodes. C: tokens that an R-node can cache.


def s_part_throughput(b: float, t: float) -> float:
    """Equation (8): E(B) = B / T(B), rows a second of one layer. 1024 / 7.08 ms = 144,600."""
    return b / t


def fits(b: float, s: float, c: float, p: float) -> bool:
    """Equation (9): B S / 2 <= C P, sequences of mixed ages fit the KV-cache of all R-nodes."""
    return b * s / 2 <= c * p


def r_nodes_in_balance(s: float, r: float, e: float) -> float:
    """Equation (11): P = S R E(B) / 2, the R-nodes whose R-Part takes as long as the S-Part; (10) solved for P.

    With S = 1024, R = 0.124 us (an Epyc 7452 socket, 16 KiB a token and layer) and E = 144,600: 9.2.
    """
    return s * r * e / 2


# -- a step ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class System:
    """A model on hardware: all that the time of a step depends on."""

    model: PlannedModel
    s_part: SPartTimes
    link: LinkTimes
    kv_dtype: str
    kv_bytes_per_second: float  # of one R-node
    r_nodes: int
    in_turns: bool = False  # S-Part and R-Part take turns on the same cores
    engine_step: float = 0.0  # seconds of the scheduler and of the delivery of tokens, for a step
    engine_row: float = 0.0  # and for each of its rows
    overlap: float = 1.0  # how many times as long the S-Part takes while another mini-batch is at the R-nodes
    row_seconds: float = 0.0  # of an R-node's work on a byte of Q, K, V or O, the reading apart
    gpu_bytes_per_second: float = 0.0  # at which the S-node's GPU reads resident KV; 0: there is none
    #: If the R-nodes are on the S-node's machine: what S-Part and R-nodes cost each other.
    colocations: tuple[Colocation, ...] = ()

    @classmethod
    def from_profile(
        cls, profile: Profile, transport: str, model: PlannedModel, kv_dtype: str, r_nodes: int, ranks: int = 1
    ) -> System:
        """The system that a profile with all sections gives a model. R-nodes over shared memory are on the S-node's
        machine. Raises ProfileError for a format that the profile does not have, and for ranks that it does not
        allow."""
        assert profile.s_node is not None and profile.r_node is not None
        s_part = s_part_of_ranks(profile.s_node, model, ranks)
        speed = profile.r_node.bytes_per_second(kv_dtype, model.group)
        engine = profile.s_node.engine_step, profile.s_node.engine_row, profile.s_node.overlap
        near = [cell for cell in profile.colocations if transport == "shm" and cell.group == model.group]
        cells = tuple(near) if any(cell.kv_dtype == kv_dtype and cell.r_nodes == 1 for cell in near) else ()
        link = profile.links[transport]
        row_seconds = 1e-9 / profile.r_node.row_gbps if profile.r_node.row_gbps else 0.0
        gpu = 1e9 * profile.s_node.gpu.kv_gbps if profile.s_node.gpu else 0.0
        return cls(model, s_part, link, kv_dtype, speed, r_nodes, profile.in_turns, *engine, row_seconds, gpu, cells)

    def reading(self, kv_bytes: float) -> Reading:
        """How the R-nodes read `kv_bytes` of KV-cache in a step."""
        if not self.colocations or not kv_bytes:
            return Reading(self.kv_bytes_per_second)
        cost = colocation_cost(self.colocations, self.kv_dtype, self.r_nodes, kv_bytes, self._cost)
        return Reading(1e9 * cost.kv_gbps / self.r_nodes, cost.s_extra if self.in_turns else 0.0, cost.lost)

    def _cost(self, cell: Colocation) -> ColocationCost:
        """What S-Part and R-nodes cost each other in a measurement. The number of rows does not change how many weights
        the S-Part reads from memory again."""
        cold = cell.s_part * self.model.parameters / cell.parameters
        gbps = cell.kv_gbps(self.link.layer_seconds, 1e-9 / self.link.gbps + self.row_seconds)
        return ColocationCost(gbps, max(0.0, cold - self.s_part.seconds(cell.rows)), cell.lost)


class Reading(NamedTuple):
    """A step's reading of KV-cache, and what it costs an S-Part on the same machine."""

    bytes_per_second: float  # of one R-node, all at work
    s_extra: float = 0.0  # see fastdecode.plan.colocation.ColocationCost
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """A mini-batch's step. Sums over its sequences; the R-nodes share the reading evenly."""

    rows: float  # decoding sequences
    read_tokens: float  # cached tokens that R-nodes read for their attention, PlannedModel.read_tokens
    prompt_rows: float = 0.0
    prompt_pairs: float = 0.0  # keys that the prompts' rows attend to
    resident_rows: float = 0.0  # of `rows`, those whose K and V are appended on the S-node's GPU
    resident_tokens: float = 0.0  # cached tokens that the GPU reads
    cut_rows: float = 0.0  # of `resident_rows`, those of cut sequences: R-nodes get their Q
    resident_prompt_rows: float = 0.0  # of `prompt_rows`


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of each stage of a mini-batch's step, over all layers."""

    s_part: float
    r_part: float
    wire: float  # Q, K and V to the R-nodes; O comes back the other way in less time
    back: float
    latency: float  # of the layers' ways there and back
    engine: float = 0.0  # scheduling the step and delivering its tokens, on the S-node
    overlap: float = 1.0  # see System
    lost: float = 0.0  # see Colocation
    resident: float = 0.0  # attention on the S-node's GPU, while the R-nodes attend

    @property
    def alone(self) -> float:
        """The step with nothing beside it: all stages one after another, but both places attend at once."""
        remote = self.wire + self.r_part + self.back + self.latency
        return self.engine + self.s_part + max(remote, self.resident)

    @property
    def s_node(self) -> float:
        """The part of the step in which the S-node is at work."""
        return self.engine + self.s_part + self.resident


def stage_times(system: System, work: Work, slowest_share: float | None = None) -> StageTimes:
    """The times of a step's stages. `slowest_share`: the share of the reading that the slowest R-node has; None: equal
    shares.

    A prompt's rows cost the S-Part as much as `prompt_row` decoding rows each, and their attention as much as
    `prompt_attention` times as many operations of rows; their K and V travel, their Q and O do not.
    """
    model, times, share = system.model, system.s_part, slowest_share or 1 / max(1, system.r_nodes)
    attention = times.prompt_attention * model.pair_rows * work.prompt_pairs
    prompts = times.prompt_row * work.prompt_rows + attention
    remote_rows, remote_prompt_rows = work.rows - work.resident_rows, work.prompt_rows - work.resident_prompt_rows
    bytes_out = (remote_rows + work.cut_rows) * model.q_bytes
    bytes_out += (remote_rows + remote_prompt_rows) * model.kv_row_bytes
    bytes_back = (remote_rows + 2 * work.cut_rows) * model.q_bytes  # with O of a cut row comes its log-sum-exp
    read = work.read_tokens * model.token_bytes(system.kv_dtype)
    reading = system.reading(read)
    on_rows = remote_rows * (2 * model.q_bytes + model.kv_row_bytes) + work.cut_rows * 3 * model.q_bytes
    on_rows *= system.row_seconds
    if system.colocations:
        on_rows *= system.r_nodes  # one machine's cores work on all rows
    return StageTimes(
        s_part=system.s_part.seconds(work.rows + prompts) + reading.s_extra,
        r_part=share * (read / reading.bytes_per_second + on_rows),
        wire=bytes_out / (1e9 * system.link.gbps),
        back=bytes_back / (1e9 * system.link.gbps),
        latency=model.n_layers * system.link.layer_seconds if remote_rows + work.cut_rows + remote_prompt_rows else 0.0,
        engine=system.engine_step + system.engine_row * work.rows,
        overlap=system.overlap,
        lost=reading.lost,
        resident=work.resident_tokens * model.token_bytes(system.kv_dtype) / system.gpu_bytes_per_second
        if work.resident_tokens
        else 0.0,
    )


def shared_seconds(stages: Sequence[StageTimes]) -> dict[str, float]:
    """Seconds in which all mini-batches in flight can do a step, by what they share: the S-node, the R-nodes and each
    direction of the wire serve one mini-batch after another. On one machine, the longer of S-Part and R-Part also takes
    the time that overlap does not hide."""
    s_part = sum(s.s_part * (s.overlap if len(stages) > 1 else 1.0) + s.engine + s.resident for s in stages)
    r_part = sum(s.r_part for s in stages)
    lost = max((s.lost for s in stages), default=0.0) * min(s_part, r_part)
    return {
        "S-Part": s_part + lost if s_part >= r_part else s_part,
        "R-Part": r_part + lost if r_part > s_part else r_part,
        "wire": max(sum(s.wire for s in stages), sum(s.back for s in stages)),
    }


def paces(stages: Sequence[StageTimes], in_turns: bool) -> list[float]:
    """Seconds of a step of each mini-batch while steps of all of them are in flight. A step takes as long as alone, or
    longer where the S-node, the R-nodes or the wire cannot serve all steps at once. What the steps that are slowest
    alone leave of these, the other steps share evenly."""
    if in_turns:
        return [sum(s.alone for s in stages)] * len(stages)
    found = [0.0] * len(stages)
    left = dict.fromkeys(shared_seconds([]), 1.0)  # the shares of the S-node, the R-nodes and the wire that are free
    to_pace = list(range(len(stages)))
    while to_pace:
        needed = shared_seconds([stages[i] for i in to_pace])
        bounds = {name: needed[name] / max(left[name], 1e-9) for name in left}
        binding = max(bounds, key=bounds.__getitem__)
        slowest = max(to_pace, key=lambda i: stages[i].alone)
        pace, bound = stages[slowest].alone, [slowest]
        if bounds[binding] > pace:
            pace, bound = bounds[binding], [i for i in to_pace if shared_seconds([stages[i]])[binding]]
        for i in bound:
            found[i] = max(pace, stages[i].alone)
            for name, seconds in shared_seconds([stages[i]]).items():
                left[name] -= seconds / found[i]
            to_pace.remove(i)
    return found


def round_seconds(stages: Sequence[StageTimes], in_turns: bool) -> tuple[float, str]:
    """Seconds in which each mini-batch in flight does a step, and what binds the step: "S-Part", "R-Part", "wire", or
    "one mini-batch": the mini-batch that takes longest by itself. On the same cores nothing overlaps."""
    bounds = shared_seconds(stages)
    if in_turns:
        return sum(s.alone for s in stages), max(("S-Part", "R-Part"), key=bounds.__getitem__)
    bounds["one mini-batch"] = max(s.alone for s in stages)
    binding = max(bounds, key=bounds.__getitem__)
    return bounds[binding], binding


@dataclass(frozen=True, slots=True)
class Steady:
    """A system at work on sequences of mixed ages."""

    batch: float  # sequences, of all mini-batches
    seconds: float  # of a step, so between two tokens of a stream
    binding: str
    stages: StageTimes  # of one mini-batch

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def steady(system: System, batch: float, mini_batches: int, n_prompt: float, n_output: float) -> Steady:
    """`batch` sequences over `mini_batches`, each with `n_prompt` tokens of prompt and `n_output` of output.

    In a step of b sequences b / n_output of them end, and as many prompts are prefilled.
    """
    b = batch / mini_batches
    read = mean_read(system.model, n_prompt, n_output)
    ends = b / n_output
    work = Work(b, b * read, ends * n_prompt, ends * n_prompt * (n_prompt + 1) / 2)
    stages = stage_times(system, work)
    seconds, binding = round_seconds([stages] * mini_batches, system.in_turns)
    return Steady(batch, seconds, binding, stages)


def mean_read(model: PlannedModel, n_prompt: float, n_output: float) -> float:
    """Cached tokens that attention reads of a sequence, on average over the steps of its output."""
    points = 33
    lengths = [n_prompt + n_output * (i + 0.5) / points for i in range(points)]
    return sum(map(model.read_tokens, lengths)) / points


_SUMS = 2  # of a layer over all ranks


def s_part_of_ranks(s_node: SNodeProfile, model: PlannedModel, ranks: int) -> SPartTimes:
    """The times of a model's S-Part by `ranks` ranks. Raises ProfileError for a number that the profile or the model
    does not allow.

    The weights of one rank lie in the memory of one NUMA node, and the cores of the others read an equal share of them
    from there. Ranks read their own memory, and sum up their rows twice a layer.
    """
    times, sockets = s_node.times(model.name, model.parameters), s_node.sockets
    if sockets is None:
        if ranks > 1:
            raise ProfileError(f"--tensor-parallel {ranks}: the profile has no section s_node.sockets")
        return times
    if ranks == 1:
        far_bytes = times.parameters * times.weight_bytes * (1 - 1 / sockets.n)
        far = 1e-9 * far_bytes / sockets.cross_gbps
        return replace(times, rows=tuple((n, max(seconds / sockets.n, far)) for n, seconds in times.rows))
    if ranks % sockets.n:
        raise ProfileError(f"--tensor-parallel {ranks}: {sockets.n} NUMA nodes cannot have equally many ranks")
    if model.n_kv_heads % ranks:
        raise ProfileError(
            f"--tensor-parallel {ranks}: the plan knows even shares of KV heads alone, and {model.name} has "
            f"{model.n_kv_heads} KV heads"
        )
    row = 1e-9 * model.q_bytes / model.n_layers / sockets.sum_gbps  # Q is about as wide as the rows that are summed
    sums = _SUMS * model.n_layers
    rows = ((n, seconds / sockets.n + sums * (sockets.sum_seconds + n * row)) for n, seconds in times.rows)
    return replace(times, rows=tuple(rows))
