"""The S-Part's device at start: its exchange with the R-nodes, its memory, and how many sequences the node can hold."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import available_memory
from fastdecode.daemon.option_values import ConfigError, format_bytes, guesses
from fastdecode.engine.state.pages import PageGroups
from fastdecode.spart.exchange.choice import BypassImpossible, ChosenExchange, choose_exchange
from fastdecode.spart.exchange.graph_table import size_class
from fastdecode.spart.loader import choose_device
from fastdecode.spart.memory import graph_bytes, step_bytes
from fastdecode.spart.prefill.prompt import staged_token_bytes
from fastdecode.spart.served import ServedModel

if TYPE_CHECKING:
    from fastdecode.transports.base import Link

log = logging.getLogger(__name__)

#: Without --max-batch-tokens, a step on a GPU has up to this many rows, and the steps of all mini-batches may take this
#: part of the GPU's free memory. A GPU computes long chunks of prompts faster than short ones. While streams run,
#: --target-tbt-ms bounds the rows.
_GPU_ROWS, _STEPS_PART = 4096, 4
#: Without --staging-memory, unfinished prompts may take this part of a CPU's available memory.
_STAGING_PART = 8
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


def node_exchange(config: NodeConfig, device: torch.device, mini_batches: int) -> ChosenExchange:
    """The exchange for --exchange. Raises ConfigError if that one cannot be used."""
    spin_us = PROXY_SPIN_US if config.spin_us is None else config.spin_us
    try:
        return choose_exchange(
            config.exchange,
            device,
            mini_batches,
            config.max_batch_size,
            spin_us,
            whole_rows=config.parts == 1,
        )
    except BypassImpossible as error:
        raise ConfigError(f"--exchange {config.exchange}: {error}") from None


def plan_steps(config: NodeConfig, model: ServedModel, mini_batches: int, captures: bool) -> tuple[NodeConfig, int]:
    """`config` with the rows of a step, and the tokens of unfinished prompts whose K and V may be staged on the device.
    The weights must have been loaded. `captures`: decode steps are captured in graphs, which keep memory of their own.

    Raises ConfigError if the steps of all mini-batches do not fit beside the weights.
    """
    device = model.device
    token_bytes = staged_token_bytes(model.config, device, model.dtype)
    if device.type != "cuda":
        memory = config.staging_memory
        return config, (available_memory() // _STAGING_PART if memory is None else memory) // token_bytes
    free, total = torch.cuda.mem_get_info(device)
    drawn = config.max_batch_size * (1 + guesses(config.speculate))
    graphs = graph_bytes(model, size_class(config.max_batch_size)) if captures else 0

    def bytes_of(rows: int) -> int:
        return mini_batches * (step_bytes(model, rows, min(rows, drawn)) + graphs)

    if config.max_batch_tokens is None:
        config = dataclasses.replace(config, max_batch_tokens=gpu_rows(config.step_rows, free, bytes_of))
    steps = bytes_of(config.step_rows)
    memory = gpu_staging(total, free, config.gpu_memory_utilization, steps, config.staging_memory)
    log.info(
        "GPU memory: %s of %s in use, %s for steps of up to %d rows, %s for kernels, %s for unfinished prompts",
        format_bytes(total - free),
        format_bytes(total),
        format_bytes(steps),
        config.step_rows,
        format_bytes(KERNEL_BYTES),
        format_bytes(memory),
    )
    return config, memory // token_bytes


def gpu_rows(least: int, free: int, bytes_of: Callable[[int], int]) -> int:
    """The most rows of a step on a GPU with `free` bytes of memory: as many as prompts gain from, or fewer where the
    steps would take more than their part of the memory, but at least `least`."""
    rows = max(_GPU_ROWS, least)
    while rows > least and bytes_of(rows) > free // _STEPS_PART:
        rows = max(rows // 2, least)
    return rows


def gpu_staging(total: int, free: int, utilization: float, steps: int, wanted: int | None) -> int:
    """The bytes of a GPU's memory that remain for staged prompts.

    `total` and `free` are the GPU's, with the weights loaded; `steps` are the bytes for the steps of all
    mini-batches; `wanted` is --staging-memory. Raises ConfigError if less remains than is wanted.
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
    return left if wanted is None else wanted


def capacity(model_bytes: int, device: torch.device, links: Iterable[Link], length: int) -> str:
    """A line for the log: the weights, the KV-cache, and how many sequences of `length` tokens the cache holds."""
    kv = sequences = 0
    for link in links:
        lease = link.lease
        groups = PageGroups(lease.full_sections, lease.limited_sections, lease.reach, link.geometry.max_rows)
        kv += lease.max_pages * lease.page_bytes
        sequences += lease.max_pages // groups.pages_for(length)
    where = "in RAM" if device.type == "cpu" else "on the GPU"
    held = f"{sequences} sequences of {length} tokens"
    return f"weights {format_bytes(model_bytes)} {where}, KV {format_bytes(kv)} in RAM = {held}"
