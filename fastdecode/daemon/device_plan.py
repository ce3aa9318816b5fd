"""The S-Part's device at start: its exchange with the R-nodes, its memory, and how many sequences the node can hold."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import available_memory
from fastdecode.daemon.option_values import ConfigError, format_bytes, guesses
from fastdecode.engine.state.pages import PageGroups
from fastdecode.kernels._native import page_bytes
from fastdecode.kernels.gpu.cupy_kernels import KernelError
from fastdecode.kernels.gpu.page_kernels import unsupported
from fastdecode.region.contract import KV_DTYPES, MAX_SLOTS
from fastdecode.region.geometry import geometry_tuple
from fastdecode.spart.exchange.chosen import BypassImpossible, ChosenExchange, choose_exchange
from fastdecode.spart.exchange.graph_table import size_class
from fastdecode.spart.loader import choose_device
from fastdecode.spart.memory import graph_bytes, step_bytes
from fastdecode.spart.prefill.prompt import staged_token_bytes
from fastdecode.spart.resident.layers import attention_layers
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.resident.trial import measure_reading, try_kernels
from fastdecode.spart.served import ServedModel
from fastdecode.spart.shape import AttentionShape
from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch
from fastdecode.transports.base import Hello
from fastdecode.transports.loopback import Loopback

if TYPE_CHECKING:
    from fastdecode.spart.backend import Backend
    from fastdecode.transports.base import Link

log = logging.getLogger(__name__)

#: Without --max-batch-tokens, a step on a GPU has up to this many rows, and the steps of all mini-batches may take this
#: part of the GPU's free memory. Within these bounds the rows are measured (below). While streams run,
#: --target-tbt-ms bounds the rows of prompts.
_GPU_ROWS, _STEPS_PART = 8192, 4
#: Without --staging-memory, unfinished prompts may take this part of a CPU's available memory.
_STAGING_PART = 8
#: Without --state-memory, states may take this part of the device's free memory.
_STATE_PART = 4
#: Without --staging-memory, beside KV pages on the GPU, unfinished prompts may take this part of what is left of its
#: memory, and no more than one prompt of the longest context.
_STAGING_BESIDE_KV = 2
#: Memory of a GPU that is left to torch's kernels (workspaces of products and of sorting) and to its allocator.
KERNEL_BYTES = 512 << 20
#: Microseconds that the proxy of a bypass spins, without --spin-us. A GPU takes hundreds of them for its part of a
#: layer, and a nap would come on top. The best number has not been measured.
PROXY_SPIN_US = 2000


def node_device(config: NodeConfig) -> torch.device:
    """The device for --device. To be called before CUDA starts. Raises CheckpointError."""
    if config.device != "cpu" and config.exchange != "staged":
        # A kernel that is loaded late waits for streams that wait for R-nodes.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    return choose_device(config.device)


def prompts_apart(device: torch.device) -> bool:
    """True if prompts have steps of their own, see SchedulerLimits. A GPU computes them beside the captured steps of
    the sequences that decode; a CPU's one thread reads the weights once for both."""
    return device.type != "cpu"


def node_exchange(config: NodeConfig, device: torch.device, mini_batches: int) -> ChosenExchange:
    """The exchange for --exchange. Raises ConfigError if that one cannot be used."""
    spin_us = PROXY_SPIN_US if config.spin_us is None else config.spin_us
    try:
        return choose_exchange(
            config.exchange, device, mini_batches, config.max_batch_size, spin_us, whole_rows=config.parts == 1
        )
    except BypassImpossible as error:
        raise ConfigError(f"--exchange {config.exchange}: {error}") from None


def free_memory(device: torch.device) -> int:
    """Bytes of the device's memory that are free."""
    return available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def state_slots(config: NodeConfig, model: AttentionShape, itemsize: int, free: int, mini_batches: int) -> int:
    """How many states the S-Part can keep at once, with activations of `itemsize` bytes and `free` bytes of memory; 0:
    the model's layers keep no states.

    Raises ConfigError if --state-memory holds no state, is more than what is free, or is for another kind of model.
    """
    state, memory = model.state_bytes(itemsize), config.state_memory
    if not state:
        if memory is not None:
            raise ConfigError(f"--state-memory: the layers of {model.architecture} keep no states")
        return 0
    if memory is None:
        memory = free // _STATE_PART
    elif memory > free:
        raise ConfigError(f"--state-memory {format_bytes(memory)}: {format_bytes(free)} are free")
    # As many states again may be snapshots of the prefix cache.
    each = 1 + guesses(config.speculate) + (not config.no_prefix_cache)
    most = mini_batches * config.max_batch_size * each
    slots = min(memory // state, most)
    if not slots:
        raise ConfigError(
            f"a sequence of {model.architecture} keeps a state of {format_bytes(state)}, and there are "
            f"{format_bytes(memory)} for states: raise --state-memory, or free memory"
        )
    return slots


class DevicePlan(NamedTuple):
    """The memory of the S-Part's device, beside the weights and states."""

    config: NodeConfig  # with the rows of a step
    staged: int  # tokens of unfinished prompts whose K and V may be staged
    kv: int  # bytes of KV pages; 0: there are none


def plan_steps(
    config: NodeConfig,
    model: ServedModel,
    mini_batches: int,
    captures: bool,
    prompt_seconds: Callable[[int], float],
    states: int = 0,
) -> DevicePlan:
    """Divide the device's memory. The weights must have been loaded. `captures`: decode steps are captured in graphs,
    which keep memory of their own. `prompt_seconds` tells how long a prompt of some tokens takes. `states`: bytes of
    the states.

    Raises ConfigError if there are too many mini-batches, or if the steps of all of them and of prompts do not fit
    beside the weights.
    """
    device = model.device
    if mini_batches + prompts_apart(device) > MAX_SLOTS:
        raise ConfigError(f"--mini-batches {mini_batches}: on a GPU there are up to {MAX_SLOTS - 1}")
    token_bytes = staged_token_bytes(model.config, device, model.dtype)
    if device.type != "cuda":
        memory = config.staging_memory
        staged = (available_memory() // _STAGING_PART if memory is None else memory) // token_bytes
        return DevicePlan(config, staged, config.gpu_kv or 0)
    free, total = torch.cuda.mem_get_info(device)
    drawn = config.max_batch_size * (1 + guesses(config.speculate))
    graphs = graph_bytes(model, size_class(config.max_batch_size)) if captures else 0

    def bytes_of(rows: int) -> int:
        """Bytes of a step of prompts with `rows` rows, beside steps of decoding rows of all mini-batches."""
        decoding = min(rows, drawn)
        return step_bytes(model, rows, decoding) + mini_batches * (step_bytes(model, decoding, decoding) + graphs)

    if config.max_batch_tokens is None:
        rows = gpu_rows(config.step_rows, free, bytes_of)
        if config.tune != "off":
            try:
                rows = rows_by_speed(prompt_seconds, config.step_rows, rows)
            except RuntimeError as error:  # of the device
                log.warning("a step has up to %d rows, and fewer were not measured: %s", rows, error)
            torch.cuda.empty_cache()  # what the prompts have taken
        config = dataclasses.replace(config, max_batch_tokens=rows)
    steps = bytes_of(config.step_rows) + states
    length = config.max_model_len or model.config.max_positions
    memory, kv = gpu_staging(
        total, free, config.gpu_memory_utilization, steps, config.staging_memory, config.gpu_kv, length * token_bytes
    )
    log.info(
        "GPU memory: %s of %s in use, %s for states and steps of %d rows, %s for kernels, %s for unfinished prompts, "
        "%s for KV pages",
        format_bytes(total - free),
        format_bytes(total),
        format_bytes(steps),
        config.step_rows,
        format_bytes(KERNEL_BYTES),
        format_bytes(memory),
        format_bytes(kv),
    )
    return DevicePlan(config, memory // token_bytes, kv)


def gpu_rows(least: int, free: int, bytes_of: Callable[[int], int]) -> int:
    """The most rows that a step may have on a GPU with `free` bytes of memory: fewer where the steps would take more
    than their part of the memory, but at least `least`."""
    rows = max(_GPU_ROWS, least)
    while rows > least and bytes_of(rows) > free // _STEPS_PART:
        rows = max(rows // 2, least)
    return rows


def gpu_staging(
    total: int, free: int, utilization: float, steps: int, wanted: int | None, kv: int | None = 0, prompt: int = 0
) -> tuple[int, int]:
    """The bytes of a GPU's memory that remain for staged prompts and for KV pages.

    `total` and `free` are the GPU's, with the weights loaded; `steps` are the bytes for the steps of all
    mini-batches; `wanted` is --staging-memory and `kv` --gpu-kv; `prompt` are the bytes of the longest prompt. Raises
    ConfigError if less remains than is wanted.
    """
    limit = int(utilization * total)
    left = limit - (total - free) - steps - KERNEL_BYTES
    what = (
        f"--gpu-memory-utilization {utilization:g} of {format_bytes(total)} allows {format_bytes(limit)}; "
        f"{format_bytes(total - free)} are in use, and steps need {format_bytes(steps + KERNEL_BYTES)}"
    )
    if left < 0:
        raise ConfigError(f"{what}: lower --max-batch-size or --max-batch-tokens, or quantise the weights (--weights)")
    if wanted is not None and wanted > left:
        raise ConfigError(f"{what}: --staging-memory can be {format_bytes(left)} at most")
    if kv is not None and kv > left - (wanted or 0):
        raise ConfigError(f"{what}: --gpu-kv can be {format_bytes(left - (wanted or 0))} at most")
    if kv is None:
        staging = min(left // _STAGING_BESIDE_KV, prompt) if wanted is None else wanted
        return staging, left - staging
    return left - kv if wanted is None else wanted, kv


def capacity(model_bytes: int, device: torch.device, links: Iterable[Link], length: int, n_ranks: int = 1) -> str:
    """A line for the log: the weights, the KV-cache, and how many sequences of `length` tokens the cache holds.
    `model_bytes` are those of one of `n_ranks`."""
    kv = {"on the GPU": 0, "on GPUs of R-nodes": 0, "in RAM": 0}
    sequences = dict.fromkeys(kv, 0)
    for link in links:
        lease = link.lease
        groups = PageGroups(lease.full_sections, lease.limited_sections, lease.reach, link.geometry.max_rows)
        on_r_node = "on GPUs of R-nodes" if lease.isa.startswith("cuda") else "in RAM"
        memory = "on the GPU" if link.resident else on_r_node
        kv[memory] += lease.max_pages * lease.page_bytes
        sequences[memory] += lease.max_pages // groups.pages_for(length)
    where = "in RAM" if device.type == "cpu" else "on the GPU"
    if n_ranks > 1:
        where = f"{where} of each of {n_ranks} ranks"
    held = " + ".join(f"{format_bytes(n_bytes)} {memory}" for memory, n_bytes in kv.items() if n_bytes)
    some = f", {sequences['on the GPU']} of them on the GPU" if kv["on the GPU"] else ""
    return (
        f"weights {format_bytes(model_bytes)} {where}, KV {held} = "
        f"{sum(sequences.values())} sequences of {length} tokens{some}"
    )


_ROUNDS = 2  # after a first step, which loads kernels
_LEAST_GAIN = 1.05  # in tokens a second, for which a step takes twice as many rows


def rows_by_speed(seconds_of: Callable[[int], float], least: int, most: int) -> int:
    """The rows of a step, from `least` to `most`: twice as many as long as that computes prompts faster.
    `seconds_of` tells how long a prompt of some tokens takes."""
    rows, speed = least, least / seconds_of(least)
    while rows < most:
        more = min(2 * rows, most)
        faster = more / seconds_of(more)
        if faster < _LEAST_GAIN * speed:
            break
        rows, speed = more, faster
    return rows


def prompt_seconds(backend: Backend, model: ServedModel, rows: int) -> float:
    """Seconds that the S-Part takes for a step of `rows` rows: a prompt, or several if the model's positions end
    before."""
    lengths = [min(model.config.max_positions, rows - i) for i in range(0, rows, model.config.max_positions)]
    greedy = SampleSpec(temperature=0.0)
    prompts = [Chunk(0, i, 1, 0, [0] * n, True, greedy, n, state=i) for i, n in enumerate(lengths)]
    geometry = model.config.hello_geometry(1, rows, model.act_dtype)
    with contextlib.closing(Loopback(geometry)) as link:
        spart = backend.make_spart(model, [link], state_slots=len(prompts))
        times = []
        for _ in range(1 + _ROUNDS):
            start = time.perf_counter()
            for pending in spart.step(StepBatch(0, prompts)):
                if isinstance(pending, int):  # a descriptor, at start a small one
                    select.select([pending], [], [])
            times.append(time.perf_counter() - start)
        return min(times[1:])


def with_gpu_kv(config: NodeConfig, model: ServedModel) -> NodeConfig:
    """`config`, with --gpu-kv 0 where there can be no KV pages on the device. Raises ConfigError if a size is wanted
    there."""
    fault = gpu_kv_fault(config, model)
    if fault is None:
        return config
    if config.gpu_kv:
        raise ConfigError(f"--gpu-kv {format_bytes(config.gpu_kv)}: {fault}")
    if config.gpu_kv is None and model.device.type != "cpu":
        log.info("no KV pages on the GPU: %s", fault)
    return replace(config, gpu_kv=0)


def gpu_kv_fault(config: NodeConfig, model: ServedModel) -> str | None:
    """Why there can be no KV pages on the device; None: there can be."""
    if model.device.type == "cpu":
        return "the S-Part runs on the CPU"
    if config.partition != "sequences":
        return f"--partition {config.partition} divides every sequence among R-nodes"
    if config.prefill_listen is not None:
        return "the prompts that --prefill-listen computes for other S-nodes go from R-node to R-node"
    if model.config.mtp:
        return "--speculate mtp drafts in layers that only R-nodes have"
    hello = model.hello(1, 1, config.kv_dtype, None, 1)
    return next(filter(None, map(unsupported, dict.fromkeys(attention_layers(hello)))), None)


def open_gpu_kv(config: NodeConfig, model: ServedModel, hello: Hello, n_bytes: int) -> ResidentLink | None:
    """Take `n_bytes` of the device's memory for KV pages; None: there are to be none. Raises ConfigError if a size was
    asked for that cannot be had."""
    stored = hello.layers.stored(hello.windows)
    n_pages = n_bytes // page_bytes(geometry_tuple(hello.geometry), KV_DTYPES.index(hello.kv_dtype), **stored)
    if not n_pages:
        return None
    try:
        link = ResidentLink(hello, n_pages, model.device)
        try_kernels(link)
        link.bytes_per_second = measure_reading(link)
        return link
    except (KernelError, ValueError) as error:
        if config.gpu_kv:
            raise ConfigError(f"--gpu-kv {format_bytes(config.gpu_kv)}: {error}") from None
        log.info("no KV pages on the GPU: %s", error)
        return None
