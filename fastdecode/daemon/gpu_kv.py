"""--gpu-kv: the KV pages on the S-Part's own GPU, or the reason why there are none."""

from __future__ import annotations

import logging
from dataclasses import replace

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.option_values import ConfigError, format_bytes
from fastdecode.kernels._native import page_bytes
from fastdecode.kernels.gpu.cupy_kernels import KernelError
from fastdecode.kernels.gpu.page_kernels import unsupported
from fastdecode.region.contract import KV_DTYPES
from fastdecode.region.geometry import geometry_tuple
from fastdecode.spart.resident.layers import attention_layers
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.resident.trial import measure_reading, try_kernels
from fastdecode.spart.served import ServedModel
from fastdecode.transports.base import Hello

log = logging.getLogger(__name__)


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
