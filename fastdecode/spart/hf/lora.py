"""LoRA adapters on the linears of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastdecode.spart.hf.attention import running, split_attention
from fastdecode.spart.hf.config import HFConfig, read_configs
from fastdecode.spart.hf.interface import use_attention
from fastdecode.spart.hf.mixers import Mixer
from fastdecode.spart.lora.adapters import AdapterSet, Change


class _AdaptedModule(torch.nn.Module):
    """A linear of the model, with the changes of the adapters that the step's rows use."""

    def __init__(self, base: torch.nn.Module, change: Change):
        super().__init__()
        self.base, self.change = base, change

    @property
    def weight(self) -> torch.Tensor:
        """The base's, for code that asks a layer for its dtype or shape."""
        return self.base.get_parameter("weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, rows, in] or [rows, in] -> the same with the linear's outputs."""
        y: torch.Tensor = self.base(x)
        forward = running.forward
        if forward is not None and (rows := forward.adapters) is not None:
            (of_rows, ins) = (y, x) if x.ndim == 2 else (y[0], x[0])
            if len(ins) != rows.n_rows:
                raise RuntimeError(f"a linear with adapters got {len(ins)} of the step's {rows.n_rows} rows")
            self.change.add(of_rows, ins, rows)
        return y


def block_linears(directory: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear of a checkpoint's model but the LM head, by its name. Raises CheckpointError."""
    config, generation = read_configs(directory)
    return adaptable_linears(config, HFConfig.from_configs(config, generation).mixers)


def adaptable_linears(config: Any, mixers: Sequence[Mixer]) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear of the model of a PretrainedConfig, but the LM head and those within `mixers`, by its
    name."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config)
    use_attention(model, split_attention)  # the linears that it replaces cannot have adapters
    head, shapes = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{mixer.name}.") for mixer in mixers):  # it gets only some rows of a step at a time
            continue
        if type(module) is torch.nn.Linear and module is not head:
            shapes[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D":  # GPT-2: the weight is [in, out]
            shapes[name] = (module.nf, module.nx)
    return shapes


def adapt_linears(module: Any, adapters: AdapterSet, device: torch.device, dtype: torch.dtype) -> int:
    """Let the linears that adapters change apply these changes; returns the memory that the adapters take, in bytes."""
    nbytes = 0
    for name, (outs, ins) in adapters.modules.items():
        parent, child = module.get_submodule(name.rpartition(".")[0]), module.get_submodule(name)
        change = adapters.change([name], [outs], ins, device, dtype)
        assert change is not None, "the name is that of a linear which an adapter changes"
        setattr(parent, name.rpartition(".")[2], _AdaptedModule(child, change))
        nbytes += change.nbytes
    return nbytes
