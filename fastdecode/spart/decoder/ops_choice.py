"""make_block_ops: the decoder's operations between products on a device."""

from __future__ import annotations

import torch

from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.block_ops import BlockOps, NativeBlockOps, VectorOps
from fastdecode.spart.decoder.cuda_ops import CudaBlockOps, open_launch


def make_block_ops(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> BlockOps:
    """The operations for a model's activations in `dtype` on `device`."""
    if device.type == "cuda" and CudaBlockOps.supports(config, dtype) and (launch := open_launch(device)):
        return CudaBlockOps(config, dtype, launch)
    native = device.type == "cpu" and VectorOps.supports(dtype)
    return NativeBlockOps(config, dtype) if native else BlockOps(config, dtype)
