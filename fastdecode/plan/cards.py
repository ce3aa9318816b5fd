"""What a GPU and the RAM beside it hold, and how fast: KV on the GPU alone, in both places, and on R-nodes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.device_plan import KERNEL_BYTES
from fastdecode.engine.scheduling.ways import BatchTimes, Way, best, rates
from fastdecode.plan.configurations import Goal
from fastdecode.plan.equations import System, Work, mean_read, stage_times, steady
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import Profile, ProfileError

#: Assumed of steps and their captured graphs, bytes of the GPU's memory.
_STEP_BYTES = 1e9


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one division of the KV-cache holds. Times are in seconds."""

    gpu_memory: float  # bytes
    kv: str  # "GPU-only", "hybrid" or "split"
    tokens: float  # of all sequences, or of one alone
    sequences: int  # of the goal's mean length, at once
    tokens_per_second: float  # of all of them
    tpot: float  # of a sequence on the GPU, or of all if none is there
    way: str = ""  # of the hybrid; see fastdecode/engine/scheduling/ways.py
    far_tpot: float | None = None  # of a sequence on R-nodes; None: there is none, or it waits for room on the GPU


def kv_room(profile: Profile, model: PlannedModel, gpu_memory: float) -> float:
    """Bytes that a GPU with `gpu_memory` bytes has for KV pages, less than 0 if the weights do not fit."""
    assert profile.s_node is not None
    weight_bytes = profile.s_node.times(model.name, model.parameters).weight_bytes
    weights = weight_bytes * model.parameters + 2 * (model.all_parameters - model.parameters)
    return NodeConfig().gpu_memory_utilization * gpu_memory - weights - KERNEL_BYTES - _STEP_BYTES


def capacities(
    profile: Profile, transport: str, model: PlannedModel, kv_dtype: str, goal: Goal, memory: float
) -> list[Capacity]:
    """GPU-only, hybrid and split on a GPU with `memory` bytes, as far as they hold a sequence of the goal's length.

    As many prompts are prefilled as sequences end. The hybrid goes the scheduler's best way, with the slowdown that
    is allowed by default. Raises ProfileError without times of resident KV.
    """
    system = System.from_profile(profile, transport, model, kv_dtype, 1)
    if not system.gpu_bytes_per_second:
        raise ProfileError("no --profile says how fast a GPU reads resident KV: s_node has no section gpu")
    assert profile.r_node is not None
    token_bytes = model.token_bytes(kv_dtype)
    length = goal.n_prompt + goal.n_output / 2
    room, ram = max(0.0, kv_room(profile, model, memory)) / token_bytes, profile.r_node.memory / token_bytes
    near, far = (int(min(tokens / length, goal.max_batch_tokens)) for tokens in (room, ram))
    found = []
    on_gpu = _times(system, goal, near, 0)
    if near:
        found.append(Capacity(memory, "GPU-only", room, int(room / length), near / on_gpu.seconds, on_gpu.seconds))
    if near and far:
        of_r_nodes = _times(system, goal, 0, far)
        rate = best(rates(on_gpu, of_r_nodes, _times(system, goal, near, far).seconds, NodeConfig().gpu_slowdown))
        seconds, far_seconds = on_gpu.seconds, None
        if rate.way is Way.TOGETHER:
            seconds = far_seconds = (near + far) / rate.tokens_per_second
        elif rate.way is Way.APART:
            seconds, far_seconds = on_gpu.seconds / (1 - of_r_nodes.gpu_seconds / rate.period), rate.period
        n = int(room / length) + int(ram / length)
        way, tokens_per_second = rate.way.value, rate.tokens_per_second
        found.append(Capacity(memory, "hybrid", room + ram, n, tokens_per_second, seconds, way, far_seconds))
    if far:
        state = steady(system, far, min(2, far), goal.n_prompt, goal.n_output)
        found.append(
            Capacity(memory, "split", ram, int(ram / length), state.tokens_per_second, state.seconds, "", state.seconds)
        )
    return found


def _times(system: System, goal: Goal, near: int, far: int) -> BatchTimes:
    """The times of a step with `near` sequences on the GPU and `far` sequences on R-nodes, and with as many prompts as
    sequences end."""
    read, ends, n = mean_read(system.model, goal.n_prompt, goal.n_output), (near + far) / goal.n_output, goal.n_prompt
    work = Work(
        near + far,
        far * read,
        prompt_rows=ends * n,
        prompt_pairs=ends * n * (n + 1) / 2,
        resident_rows=near,
        resident_tokens=near * read,
        resident_prompt_rows=near / goal.n_output * n,
    )
    stages = stage_times(system, work)
    return BatchTimes(near + far, stages.alone, stages.s_node)


def break_even(profile: Profile, transport: str, kv_dtype: str, group: int) -> tuple[float, float]:
    """GB/s at which R-nodes attend to pages in RAM, and at which pages would come from there to the GPU. R-nodes pay
    where the first is larger."""
    assert profile.r_node is not None
    return profile.r_node.bytes_per_second(kv_dtype, group) / 1e9, profile.links[transport].gbps


def with_ram(profile: Profile, gbps: float | None, share: float, memory: float | None) -> Profile:
    """The profile with R-nodes that have `memory` bytes of RAM, of whose `gbps` GB/s attention has a `share`. None:
    what the profile says."""
    assert profile.r_node is not None
    r_node = profile.r_node
    if gbps is not None:
        r_node = replace(r_node, kv_gbps={name: {"1": share * gbps} for name in r_node.kv_gbps}, row_gbps=None)
    return replace(profile, r_node=r_node if memory is None else replace(r_node, memory=memory))
