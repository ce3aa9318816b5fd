"""Random LoRA adapters, made and merged by PEFT."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def save_adapter(base: Path, directory: Path, seed: int, **options: Any) -> Path:
    """Save an adapter of the checkpoint `base`, which changes its outputs clearly. `options` are LoraConfig's."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with _own_warnings(), torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**options))
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(0.0, 0.7 * parameter.shape[1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def merged(base: Path, adapter: Path | None) -> Any:
    """The checkpoint `base` with the adapter merged into it, as PEFT does it, in fp32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is None:
        return model
    from peft import PeftModel

    with _own_warnings():
        return PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()


@contextlib.contextmanager
def _own_warnings() -> Iterator[None]:
    """PEFT calls functions of transformers that are to be removed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
