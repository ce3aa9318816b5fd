"""load_model: reads a Hugging Face checkpoint directory into parameters on the device.

The headers of all files are compared with the parameters that the model needs before any weight is read, so a
checkpoint that does not fit is refused at once, and the message names the tensor. Then each tensor is copied from the
mapped file into its preallocated parameter and converted on the way, so memory never holds more than one tensor besides
the parameters.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from fastdecode.spart.config import CheckpointError, ModelConfig, TensorNames
from fastdecode.spart.families import read_config
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.spart.weights import Allocation, Model, TensorTarget, can_pack

log = logging.getLogger(__name__)

_FLOATS = {"F32", "F16", "BF16"}
#: Ends of tensor names that old checkpoints contain and that the decoder computes from the config.
_DERIVED = ("rotary_emb.inv_freq", "attn.masked_bias")


def load_model(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto", progress: bool = False
) -> Model:
    """Load a checkpoint for inference.

    `dtype` is the dtype of weights and activations: a torch dtype, "fp32", "bf16", "fp16" or "auto" (see choose_dtype).
    `progress` shows a progress bar on stderr. Raises CheckpointError; if a tensor is missing or has another shape, the
    message names it.
    """
    directory, device = Path(directory), torch.device(device)
    config = read_config(directory)
    if isinstance(dtype, str):
        dtype = choose_dtype(dtype, config.dtype, device)
    stored = _scan(directory, config.names)
    allocation = Allocation(config, device, dtype, own_head=not config.tied or _head_differs(stored, config.names))
    targets = _match(allocation.targets, stored, config)
    with torch.inference_mode():
        _copy(targets, progress)
    parameters = sum(t.target.numel() for t in allocation.targets)
    weights = allocation.weights
    if can_pack(device, dtype):
        del targets, allocation  # they hold every weight
        with torch.inference_mode():
            weights.pack()
    return Model(config, weights, device, dtype, parameters)


def choose_device(name: str) -> torch.device:
    """The device for `name`: "auto" (the GPU if torch can use one, else the CPU), "cpu" or "cuda".

    Raises CheckpointError for "cuda" if torch can use no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("this torch can use no CUDA device; use --device cpu")
    return torch.device(name)


def choose_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """The torch dtype for `name`: "fp32", "bf16", "fp16" or "auto". `stored` is the checkpoint's dtype, one of the
    first three.

    "auto" is the checkpoint's dtype, except on a CPU without instructions for that dtype: there 16-bit products are
    slower than fp32 products, so "auto" is fp32.
    """
    if name != "auto":
        return TORCH_DTYPES[name]
    dtype = stored
    if device.type == "cpu":
        native = {"bf16": torch.cpu._is_avx512_bf16_supported, "fp16": torch.cpu._is_amx_fp16_supported}
        if dtype in native and not native[dtype]():
            dtype = "fp32"
    return TORCH_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # in safetensors' spelling, such as "BF16"


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """An open safetensors file. Raises CheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, though the checkpoint's index names it") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from None


def _files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files. Raises CheckpointError if it has none."""
    index = directory / "model.safetensors.index.json"
    if (single := directory / "model.safetensors").is_file():
        return [single]
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index} is not an index of safetensors files") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index} names {name!r}, which is not the name of a file in its directory")
        return [directory / name for name in sorted(names)]
    if any(directory.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{directory} has its weights only as pytorch_model.bin; safetensors are needed "
            "(in transformers: model.save_pretrained(directory))"
        )
    raise CheckpointError(f"{directory} has no model.safetensors and no model.safetensors.index.json")


def _scan(directory: Path, names: TensorNames) -> dict[str, _Stored]:
    """All tensors that the checkpoint's headers list, by the names that a checkpoint with an LM head gives them."""
    stored: dict[str, _Stored] = {}
    for path in _files(directory):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                view = file.get_slice(name)
                stored[name] = _Stored(path, name, tuple(view.get_shape()), view.get_dtype())
    base = names.embedding.partition(".")[0]
    if not any(name.startswith(f"{base}.") for name in stored):  # saved from the base model, which has no LM head
        head = f"{names.head}."
        stored = {name if name.startswith(head) else f"{base}.{name}": tensor for name, tensor in stored.items()}
    return stored


def _read(tensor: _Stored) -> torch.Tensor:
    with _open(tensor.path) as file:
        data: torch.Tensor = file.get_tensor(tensor.name)
    return data


def _head_differs(stored: dict[str, _Stored], names: TensorNames) -> bool:
    """True if the checkpoint has an LM head that is not its embedding: then they are not tied, whatever the config
    says.

    transformers does the same.
    """
    head, embedding = stored.get(f"{names.head}.weight"), stored.get(f"{names.embedding}.weight")
    if head is None:
        return False
    return embedding is None or embedding.shape != head.shape or not torch.equal(_read(embedding), _read(head))


def _match(
    targets: list[TensorTarget], stored: dict[str, _Stored], config: ModelConfig
) -> list[tuple[TensorTarget, _Stored]]:
    """Pair each target with its tensor. Raises CheckpointError for one that is missing or has another shape or type."""
    pairs = []
    for target in targets:
        tensor = stored.get(target.name)
        shape = tuple(target.target.shape)
        if tensor is None:
            missing = [s.name for s in targets if s.name not in stored]
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise CheckpointError(f"the checkpoint lacks the tensor {missing[0]!r}{more}")
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {target.name!r} has shape {tensor.shape}, config.json says {shape}")
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"tensor {target.name!r} is stored as {tensor.dtype}, not as F32, F16 or BF16")
        pairs.append((target, tensor))
    wanted = {target.name for target in targets} | ({f"{config.names.head}.weight"} if config.tied else set())
    unused = sorted(name for name in stored if name not in wanted and not name.endswith(_DERIVED))
    if unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        log.warning("%d tensors of the checkpoint are not used: %s", len(unused), shown)
    return pairs


def _copy(pairs: list[tuple[TensorTarget, _Stored]], progress: bool) -> None:
    total = sum(target.target.nbytes for target, _ in pairs)
    units: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(total=total, desc="loading weights", disable=not progress, **units) as bar:
        for path in sorted({tensor.path for _, tensor in pairs}):
            with _open(path) as file:
                for target, tensor in pairs:
                    if tensor.path == path:
                        target.target.copy_(file.get_tensor(tensor.name))
                        bar.update(target.target.nbytes)
