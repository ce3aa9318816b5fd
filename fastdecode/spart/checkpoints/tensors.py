"""Checkpoint: the tensors of a model's files, whatever their format. SafetensorsCheckpoint: those in safetensors."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fastdecode.gguf.file import pointer_fault
from fastdecode.spart.checkpoints.config import CheckpointError, TensorNames
from fastdecode.spart.linears.quantised import HeadMatrices, Quantised

#: The types of floats that are read, in safetensors' spelling.
FLOATS = {"F32", "F16", "BF16"}


class Checkpoint(ABC):
    """The tensors of a model's files. Reading their names and shapes reads no weight."""

    @abstractmethod
    def names(self) -> set[str]:
        """The names of all tensors that can be read. A quantised matrix counts as one, with the ending ".weight"."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in elements. Raises CheckpointError if the tensor cannot be read, by name."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of a float dtype; a view of the file where possible."""

    @abstractmethod
    def matrix(self, name: str) -> torch.Tensor | Quantised:
        """A linear's or embedding's weight, as it is stored."""

    def matrices(self, name: str) -> list[torch.Tensor | Quantised]:
        """The same, rows over rows: several matrices if some rows are stored in another form than others."""
        return [self.matrix(name)]

    def expert(self, name: str, index: int) -> torch.Tensor | Quantised:
        """The weight [out, in] of one expert in the tensor `name` [experts, in, out], as it is stored."""
        raise NotImplementedError  # where the experts of a layer lie one by one

    def absorbed(self, name: str, heads: int, k_size: int) -> tuple[HeadMatrices, HeadMatrices]:
        """The matrices [rank, k_size] and [v_size, rank] of each head of latent attention, as they are stored, from the
        tensor `name` [heads * (k_size + v_size), rank]: that of K of the first head, that of its V, and so on. Those of
        K are transposed."""
        each = self.tensor(name).unflatten(0, (heads, -1))
        return each[:, :k_size].mT, each[:, k_size:]

    @property
    def quantisation(self) -> str | None:
        """The name of the weights' quantisation, for people; None: they are fp32, fp16 or bf16."""
        return None

    def head_differs(self, names: TensorNames) -> bool:
        """True if the checkpoint has an LM head that is not its embedding: then they are not tied, whatever the config
        says.

        transformers does the same.
        """
        head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
        have = self.names()
        if head not in have:
            return False
        if embedding not in have or self.shape(embedding) != self.shape(head):
            return True
        [ours, *_], [theirs, *_] = self.matrices(embedding), self.matrices(head)
        if isinstance(ours, Quantised) or isinstance(theirs, Quantised):
            return True
        return not torch.equal(ours, theirs)


#: What the names of a text part's tensors begin with, in place of "model.", as transformers writes them now and before.
_TEXT_PARTS = ("model.language_model.", "language_model.model.")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # in safetensors' spelling, such as "BF16"
    part: tuple[int, slice] | None = None  # the tensor is these rows of one of the stored tensor's matrices
    transposed: bool = False  # the matrices of the stored tensor are [in, out]


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors of a Hugging Face directory, in fp32, fp16 or bf16."""

    def __init__(self, directory: Path, names: TensorNames):
        """Reads the headers of all files. Raises CheckpointError."""
        self.stored = _scan(directory, names)
        self._open: tuple[Path, Any] | None = None  # the file that was read last

    def names(self) -> set[str]:
        return set(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self.stored[name]
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"tensor {name!r} is stored as {tensor.dtype}, not as F32, F16 or BF16")
        return tensor.shape

    def tensor(self, name: str) -> torch.Tensor:
        return self.read(name)

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        return self.read(name)

    def expert(self, name: str, index: int) -> torch.Tensor | Quantised:
        stored = self.stored[name]
        matrix: torch.Tensor = self._file(stored).get_slice(stored.name)[index]
        return require_finite(matrix, stored.name).T

    def read(self, name: str) -> torch.Tensor:
        """A tensor of any dtype."""
        stored = self.stored[name]
        file = self._file(stored)
        if stored.part is not None:
            matrix, rows = stored.part
            stack = file.get_slice(stored.name)
            part: torch.Tensor = stack[matrix, :, rows].T if stored.transposed else stack[matrix, rows]
            return require_finite(part, stored.name)
        return require_finite(file.get_tensor(stored.name), stored.name)

    def _file(self, stored: Stored) -> Any:
        """The open file that a tensor is in."""
        if self._open is None or self._open[0] != stored.path:
            self._open = None  # a file that is mapped takes memory
            with open_safetensors(stored.path) as file:
                self._open = (stored.path, file)
        return self._open[1]


_CHECKED = (torch.float32, torch.float16, torch.bfloat16)


def require_finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor of a checkpoint. Raises CheckpointError for numbers in fp32, fp16 or bf16 that are not finite: attention
    could hide them."""
    if tensor.dtype in _CHECKED and tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise CheckpointError(f"tensor {name!r} has numbers that are not finite")
    return tensor


@contextmanager
def open_safetensors(path: Path, framework: str = "pt") -> Iterator[Any]:
    """An open safetensors file. `framework` is that of its tensors. Raises CheckpointError."""
    try:
        yield safe_open(path, framework=framework)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, though the checkpoint's index names it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except SafetensorError as error:
        raise CheckpointError(pointer_fault(path) or f"{path} is not a sound safetensors file: {error}") from None


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors that the headers of a directory's safetensors list, by their names there. Raises CheckpointError."""
    stored: dict[str, Stored] = {}
    for path in safetensors_files(directory):
        with open_safetensors(path, "np") as file:  # torch maps a file only if the memory could hold all of it
            for name in file.keys():  # noqa: SIM118
                view = file.get_slice(name)
                stored[name] = Stored(path, name, tuple(view.get_shape()), view.get_dtype())
    return stored


def safetensors_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files. Raises CheckpointError if it has none."""
    index = directory / "model.safetensors.index.json"
    if (single := directory / "model.safetensors").is_file():
        return [single]
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
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


def _scan(directory: Path, names: TensorNames) -> dict[str, Stored]:
    """All stored tensors, by the names that a checkpoint with an LM head gives them."""
    stored = {_of_text_part(name): tensor for name, tensor in stored_tensors(directory).items()}
    base = names.embedding.partition(".")[0]
    if not any(name.startswith(f"{base}.") for name in stored):  # saved from the base model, which has no LM head
        head = f"{names.head}."
        stored = {name if name.startswith(head) else f"{base}.{name}": tensor for name, tensor in stored.items()}
    return _one_by_one(stored, names)


def _of_text_part(name: str) -> str:
    """The name that a tensor of the text part of a model of several modes would have in a model of text alone; any
    other name as it is."""
    for part in _TEXT_PARTS:
        name = name.replace(part, "model.", 1) if name.startswith(part) else name
    return name.removeprefix("language_model.")


def _one_by_one(stored: dict[str, Stored], names: TensorNames) -> dict[str, Stored]:
    """`stored`, in which the experts of a layer that lie in two tensors, [experts, gate and up, in] and [experts, out,
    in], stand one by one. The matrices of both tensors may be transposed (Qwen3-VL-MoE as it is published)."""
    if not any("{e}" in name for name in names.expert_up):
        return stored
    experts = names.expert_up[0].partition("{e}")[0]
    members = {"gate_up_proj": names.expert_up, "down_proj": (names.expert_down,)}
    found: dict[str, Stored] = {}
    for name, tensor in stored.items():
        block, _, kind = name.partition(experts)
        if kind not in members or len(tensor.shape) != 3:
            found[name] = tensor
            continue
        n, rows, width = tensor.shape
        if transposed := _transposed(stored, block + experts):
            rows, width = width, rows
        size = rows // len(members[kind])
        for i, member in enumerate(members[kind]):
            part = slice(i * size, (i + 1) * size)
            for e in range(n):
                one = f"{block}{member}.weight".replace("{e}", str(e))
                found[one] = replace(tensor, shape=(size, width), part=(e, part), transposed=transposed)
    return found


def _transposed(stored: dict[str, Stored], experts: str) -> bool:
    """Whether the two tensors of a layer's experts, whose names begin with `experts`, are [experts, in, gate and up]
    and [experts, in, out]."""
    both = [stored.get(f"{experts}{kind}") for kind in ("gate_up_proj", "down_proj")]
    (_, *up), (_, *down) = (tensor.shape if tensor and len(tensor.shape) == 3 else (0, 0, 0) for tensor in both)
    return up == [down[1], 2 * down[0]]
