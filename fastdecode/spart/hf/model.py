"""A checkpoint loaded by transformers' own loader, ready to be split."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastdecode.spart.config import CheckpointError
from fastdecode.spart.hf.attention import ATTENTION, register
from fastdecode.spart.hf.config import HFConfig, read_configs
from fastdecode.spart.served import TORCH_DTYPES, ServedModel
from fastdecode.spart.weights import Linear, PackedLinear, can_pack


@dataclass(slots=True)
class HFModel(ServedModel):
    """A loaded model. `module` is transformers' own."""

    config: HFConfig
    module: Any
    device: torch.device
    dtype: torch.dtype  # of weights and activations
    parameters: int

    @property
    def shape(self) -> HFConfig:
        return self.config


def load_hf_model(
    directory: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    progress: bool = False,
) -> HFModel:
    """Load a checkpoint for inference. The arguments are those of spart.loader.load_model. Raises CheckpointError."""
    config, generation = read_configs(directory)
    split = HFConfig.from_configs(config, generation)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    register()
    device = torch.device(device)
    if isinstance(dtype, str):
        dtype = TORCH_DTYPES[split.dtype if dtype == "auto" else dtype]
    factory: Any = AutoModelForCausalLM
    bars: Any = logging
    if not progress:
        bars.disable_progress_bar()
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        module = factory.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            **placement,
        ).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise CheckpointError(f"transformers cannot load {directory}: {reason}") from None
    module.requires_grad_(False)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if can_pack(device, dtype):
        with torch.inference_mode():
            _pack(module)
    return HFModel(split, module, device, dtype, parameters)


class _PackedModule(torch.nn.Module):
    """A replacement for an nn.Linear: its weight lies in the order that oneDNN's kernels read."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        #: Without data, for code that asks a layer for its dtype or shape.
        self.weight = torch.empty_like(linear.weight, device="meta")
        self._packed = PackedLinear(Linear(linear.weight.data, None if linear.bias is None else linear.bias.data))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return self._packed(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def _pack(module: torch.nn.Module) -> None:
    """Replace every plain nn.Linear below `module`, one by one, so that only one weight exists twice at a time."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child.weight.device.type == "cpu":
                with contextlib.suppress(AttributeError):
                    setattr(parent, name, _PackedModule(child))
