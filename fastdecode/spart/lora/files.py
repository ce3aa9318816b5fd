"""read_adapter: a LoRA adapter in PEFT's format, adapter_config.json and adapter_model.safetensors.

An adapter changes a linear W to W + scale * B A with A [rank, in] and B [out, rank]. A key of adapter_config.json that
changes the output and is not understood is an error, as in config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.checkpoints.config_json import ConfigJson, read_json
from fastdecode.spart.checkpoints.tensors import FLOATS, open_safetensors, require_finite

_WEIGHTS = "adapter_model.safetensors"

#: Keys that do not change the output, or that repeat the tensors' names and shapes.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",  # how the base model stores its weights
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
_UNDERSTOOD = {
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
}
#: Initialisations that leave the base model's weights as they are; the others subtract from them.
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
#: What lets a regular expression match in several ways, and how often it may stand in one: each multiplies the time.
_CHOICE, _MOST_CHOICES = re.compile(r"\(\??|[*+?{]"), 5
_REPEATED_GROUP = re.compile(r"\)[*+{]")  # the time may double with each character
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Module:
    """An adapter's change of one linear."""

    ins: int
    outs: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose weights are not read yet. The keys of `modules` are names in the base model's tree. `rows` has
    the row of B for each output of the modules whose outputs the model has in another order."""

    name: str
    directory: Path
    modules: dict[str, Module]
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def parameters(self) -> int:
        """How many numbers the adapter has."""
        return sum(module.rank * (module.ins + module.outs) for module in self.modules.values())

    def factors(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, in], and B [out, rank] times the scale, both in fp32. Raises CheckpointError."""
        names = [f"base_model.model.{module}.lora_{factor}.weight" for factor in "AB"]
        try:
            with open_safetensors(self.directory / _WEIGHTS) as file:
                a, b = (require_finite(file.get_tensor(name), name).float() for name in names)
            b = b[self.rows[module]] if module in self.rows else b
            return a, require_finite(b * self.modules[module].scale, names[1])
        except CheckpointError as error:
            raise CheckpointError(f"adapter {self.name!r}: {error}") from None


def read_adapter(name: str, directory: Path) -> Adapter:
    """The adapter in `directory`. Only the configuration and the tensors' names and shapes are read.

    Raises CheckpointError for an adapter that cannot be applied; the message names it and the reason.
    """
    try:
        config = ConfigJson(read_json(directory / "adapter_config.json", "an adapter"))
        _check(config)
        return Adapter(name, directory, _modules(config, directory))
    except CheckpointError as error:
        reason = str(error)
        if reason.startswith("config.json"):  # what a ConfigJson says
            reason = f"adapter_{reason}"
        raise CheckpointError(f"adapter {name!r}: {reason}") from None


def _check(config: ConfigJson) -> None:
    """Refuse every kind of adapter but plain LoRA."""
    raw = config.raw
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"its peft_type is {raw.get('peft_type')!r}; only 'LORA' is supported")
    if config.flag("use_dora", False):
        raise CheckpointError("it is a DoRA adapter (use_dora), which is not supported")
    if raw.get("modules_to_save"):
        modules = raw["modules_to_save"]
        raise CheckpointError(f"it replaces whole modules (modules_to_save {modules!r}), which is not supported")
    if raw.get("bias", "none") != "none":
        raise CheckpointError(f"it changes biases (bias {raw['bias']!r}), which is not supported")
    if raw.get("init_lora_weights", True) not in _INITIALISATIONS:
        raise CheckpointError(
            f"it was made for a changed base model (init_lora_weights {raw['init_lora_weights']!r}); "
            "convert it to plain LoRA with PEFT"
        )
    numbers = {key: raw[key] for key in ("r", "lora_alpha") if key in raw}
    for key, value in (numbers | config.table("rank_pattern") | config.table("alpha_pattern")).items():
        if value is None:  # which ConfigJson takes for an absent key
            raise CheckpointError(f"adapter_config.json: {key!r} is None, not a number")
    for key, value in raw.items():
        if value and key not in _UNDERSTOOD and key not in _HARMLESS:
            raise CheckpointError(f"adapter_config.json has {key!r}: {value!r}, which is not supported")


def _modules(config: ConfigJson, directory: Path) -> dict[str, Module]:
    shapes = _shapes(directory)
    if not shapes:
        raise CheckpointError(f"{_WEIGHTS} holds no tensors")
    modules = {}
    for name, factors in shapes.items():
        if set(factors) != {"A", "B"}:
            raise CheckpointError(f"{_WEIGHTS} has only one of lora_A and lora_B for {name!r}")
        (rank, ins), (outs, columns) = factors["A"], factors["B"]
        wanted = _of_pattern(config, "rank_pattern", name, config.size("r", 8))
        if rank != wanted or columns != rank:
            raise CheckpointError(
                f"lora_A of {name!r} has {rank} rows and lora_B {columns} columns; adapter_config.json says rank "
                f"{wanted}"
            )
        alpha = _of_pattern(config, "alpha_pattern", name, config.number("lora_alpha", 8))
        # Rank-stabilised LoRA: Kalajdzievski, arXiv 2312.03732.
        scale = alpha / (rank**0.5 if config.flag("use_rslora", False) else rank)
        modules[name] = Module(ins, outs, rank, scale)
    targets = config.raw.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            raise CheckpointError(f"target_modules names {target!r}, for which {_WEIGHTS} has no tensors")
    return modules


def _shapes(directory: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """The shapes of each module's factors "A" and "B"."""
    path = directory / _WEIGHTS
    if not path.is_file():
        if (directory / "adapter_model.bin").is_file():
            raise CheckpointError(f"its weights are in adapter_model.bin; {_WEIGHTS} is needed (in PEFT: save again)")
        raise CheckpointError(f"{directory} has no {_WEIGHTS}")
    shapes: dict[str, dict[str, tuple[int, int]]] = {}
    with open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118
            match, view = _TENSOR.fullmatch(name), file.get_slice(name)
            shape = tuple(view.get_shape())
            if match is None:
                raise CheckpointError(f"the tensor {name!r} is not the lora_A or lora_B of a linear")
            if len(shape) != 2 or view.get_dtype() not in FLOATS:
                raise CheckpointError(
                    f"the tensor {name!r} of shape {shape} and type {view.get_dtype()} is not a matrix of floats"
                )
            shapes.setdefault(match["module"], {})[match["factor"]] = (shape[0], shape[1])
    return shapes


def _of_pattern(config: ConfigJson, key: str, module: str, default: float) -> Any:
    """The value that `key`, a table of regular expressions for the ends of names, has for a module."""
    table = ConfigJson(config.table(key))
    for pattern in table.raw:
        if _REPEATED_GROUP.search(pattern) or len(_CHOICE.findall(pattern)) > _MOST_CHOICES:
            raise CheckpointError(
                f"{key}: {pattern!r} may take without end to match: a group repeats in it, or it has more than "
                f"{_MOST_CHOICES} of the signs ( * + ? {{"
            )
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except (re.error, OverflowError) as error:
            raise CheckpointError(f"{key}: {pattern!r} is no regular expression: {error}") from None
        if matches:
            return table.number(pattern, default)
    return default
