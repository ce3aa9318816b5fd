"""Models whose weights `--weights` has rounded, as `--save-weights` writes them: RoundedWriter and RoundedCheckpoint.

Reading rounded weights takes less time than rounding them by a text. A saved model is a directory like that of the
model that was rounded. Its config.json says

    "quantization_config": {"quant_method": "fastdecode", "activation_bits": 8 or 15}

A rounded matrix NAME [out, in] is one or several parts, rows over rows, since an LM head in 4 bits has rows in 8. Part
I is stored as NAME.I.codes, uint8 [rows, in / 2], whose bytes hold an even input's number in the low half and the next
one's in the high half, with NAME.I.scales and NAME.I.mins fp32 [rows, groups]; or without minimums as NAME.I.codes
uint8 [rows, in] in 8 bits. Expert E of a stack of matrices NAME is the matrix NAME.E. See Quantised for what the
numbers mean. All other tensors are as they were.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fastdecode.gguf.file import ModelSource
from fastdecode.spart.checkpoints.config import CheckpointError, Quantisation, TensorNames
from fastdecode.spart.checkpoints.config_json import read_json
from fastdecode.spart.checkpoints.tensors import Checkpoint, SafetensorsCheckpoint
from fastdecode.spart.linears.quantised import (
    ACTIVATION_BITS,
    GROUP,
    LEVELS,
    Quantised,
    pack_pairs,
    rows_of,
    unpack_pairs,
)

METHOD = "fastdecode"
# Names with longer numbers are those of no part and no expert: there would be too many before them.
_PART = re.compile(r"(.+)\.([0-9]{1,5})\.codes")
_EXPERT = re.compile(r"(.+)\.([0-9]{1,5})")
_FILE_BYTES = 256 << 20  # a file of weights gets no more matrices once it has so many
#: Files of a model that are no weights.
_COPIED = (".json", ".jinja", ".model", ".txt", ".md")
_INDEX = "model.safetensors.index.json"


class RoundedCheckpoint(SafetensorsCheckpoint):
    """A directory that RoundedWriter wrote."""

    def __init__(self, directory: Path, names: TensorNames, quantisation: Quantisation):
        """Raises CheckpointError."""
        super().__init__(directory, names)
        self._activation_bits = quantisation.activation_bits
        self._parts: dict[str, int] = {}  # of each matrix
        for name in self.stored:
            if part := _PART.fullmatch(name):
                self._parts[part[1]] = max(self._parts.get(part[1], 0), int(part[2]) + 1)
        experts = [_EXPERT.fullmatch(name) for name in self._parts if not name.endswith(".weight")]
        self._stacks: dict[str, int] = {}  # the experts of each stack
        for expert in experts:
            if expert is None:
                raise CheckpointError(f"{directory} has rounded matrices that are no linear's")
            self._stacks[expert[1]] = max(self._stacks.get(expert[1], 0), int(expert[2]) + 1)

    def names(self) -> set[str]:
        plain = {name for name in self.stored if name.rsplit(".", 2)[0] not in self._parts}
        return plain | {name for name in self._parts if name.endswith(".weight")} | set(self._stacks)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._stacks:
            outs, ins = self._shape(f"{name}.0")
            return self._stacks[name], ins, outs
        return self._shape(name) if name in self._parts else super().shape(name)

    def _shape(self, name: str) -> tuple[int, int]:
        """(out, in) of a matrix. Raises CheckpointError for tensors that are missing or do not fit together."""
        parts = [self._part_shape(f"{name}.{i}") for i in range(self._parts.get(name, 1))]
        if any(ins != parts[0][1] for _, ins in parts):
            raise CheckpointError(f"the parts of {name!r} have rows of different lengths")
        return sum(outs for outs, _ in parts), parts[0][1]

    def _part_shape(self, part: str) -> tuple[int, int]:
        codes, scales, mins = (self.stored.get(f"{part}.{end}") for end in ("codes", "scales", "mins"))
        if codes is None or scales is None:
            raise CheckpointError(f"the checkpoint lacks the tensor '{part}.{'scales' if codes else 'codes'}'")
        if len(codes.shape) == 2 and codes.dtype == "U8":
            outs, ins = codes.shape[0], codes.shape[1] * (1 if mins is None else 2)
            if all((x.shape, x.dtype) == ((outs, -(-ins // GROUP)), "F32") for x in (scales, mins) if x is not None):
                return outs, ins
        raise CheckpointError(f"the tensors of {part!r} are no rounded matrix")

    def matrices(self, name: str) -> list[torch.Tensor | Quantised]:
        if name not in self._parts:
            return super().matrices(name)
        self._shape(name)
        return [self._part(f"{name}.{i}") for i in range(self._parts[name])]

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        if name not in self._parts:
            return super().matrix(name)
        [matrix] = self.matrices(name)
        return matrix

    def expert(self, name: str, index: int) -> torch.Tensor | Quantised:
        if name not in self._stacks:
            return super().expert(name, index)
        expert = f"{name}.{index}"
        if self._shape(expert) != self._shape(f"{name}.0") or self._parts[expert] != 1:
            raise CheckpointError(f"the experts of {name!r} differ in their shapes")
        return self.matrix(expert)

    def _part(self, part: str) -> Quantised:
        codes, scales = self.read(f"{part}.codes"), self.read(f"{part}.scales")
        if f"{part}.mins" not in self.stored:
            hadamard = self._is_transformed(codes.shape[1])
            return Quantised(codes, scales, None, 128, 8, GROUP, self._activation_bits, hadamard=hadamard)
        q = unpack_pairs(codes)
        hadamard = self._is_transformed(q.shape[1])
        table, mins = LEVELS if hadamard else (), self.read(f"{part}.mins")
        return Quantised(q, scales, mins, 0, 4, GROUP, self._activation_bits, table=table, hadamard=hadamard)

    def _is_transformed(self, ins: int) -> bool:
        """True if `quantise` transforms a matrix of `ins` inputs."""
        return self._activation_bits == ACTIVATION_BITS and ins % GROUP == 0

    @property
    def quantisation(self) -> str | None:
        parts = [f"{name}.{i}" for name, n in self._parts.items() for i in range(n)]
        kinds = {"int4" if f"{part}.mins" in self.stored else "int8" for part in parts}
        return f"fastdecode {', '.join(sorted(kinds))}"


class RoundedWriter:
    """Writes a model whose matrices are rounded one after another."""

    def __init__(self, source: ModelSource, directory: Path):
        """`source` is the model that is rounded; `directory` is made once all is written. Raises CheckpointError."""
        if source.gguf is not None:
            raise CheckpointError(f"{source.path} is a GGUF file; only models in safetensors are saved rounded")
        if directory.exists():
            raise CheckpointError(f"{directory} exists already")
        self._source, self._directory = source.path, directory
        self._unfinished = directory.with_name(f"{directory.name}.unfinished")
        try:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error}") from None
        self._tensors: dict[str, torch.Tensor] = {}  # of the file that is written next
        self._written: dict[str, str] = {}  # the file of each tensor
        self._done: set[str] = set()  # the matrices
        self._activation_bits = ACTIVATION_BITS

    def add(self, sizes: Mapping[str, int], matrices: Sequence[Quantised]) -> None:
        """Add matrices whose rows stand over one another in `matrices`. `sizes` has the rows of each, by its name."""
        stop = 0
        for name, size in sizes.items():
            start, stop = stop, stop + size
            for i, part in enumerate(rows_of(matrices, start, stop)):
                self._add_part(f"{name}.{i}", part)
            self._done.add(name)
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= _FILE_BYTES:
            self._write()

    def _add_part(self, part: str, matrix: Quantised) -> None:
        self._activation_bits, q = matrix.activation_bits, matrix.q
        if matrix.bits == 4:
            assert matrix.mins is not None
            if q.shape[1] % 2:
                raise CheckpointError(f"{part!r} has an odd number of inputs, which cannot be written")
            q = pack_pairs(q)
            self._tensors[f"{part}.mins"] = _own(matrix.mins)
        self._tensors[f"{part}.codes"] = _own(q)
        self._tensors[f"{part}.scales"] = _own(matrix.scales)

    def finish(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        """Add those of the tensors `names` of the model's own checkpoint that were not rounded, and the other files.
        Raises CheckpointError."""
        stacks = {name.rpartition(".")[0] for name in self._done}
        for name in names:
            if name not in self._done and name not in stacks:
                self._tensors[name] = _own(checkpoint.tensor(name))
        self._write()
        try:
            for file in self._source.iterdir():
                if file.suffix in _COPIED and file.name != _INDEX and file.is_file():
                    shutil.copyfile(file, self._unfinished / file.name)
            config = dict(read_json(self._source / "config.json"))
            config["quantization_config"] = {"quant_method": METHOD, "activation_bits": self._activation_bits}
            (self._unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            index = {"metadata": {}, "weight_map": self._written}
            (self._unfinished / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
            self._unfinished.rename(self._directory)
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be written: {error}") from None

    def _write(self) -> None:
        file = f"model-{len(set(self._written.values())) + 1:05}.safetensors"
        try:
            save_file(self._tensors, self._unfinished / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._directory} cannot be written: {error}") from None
        self._written |= dict.fromkeys(self._tensors, file)
        self._tensors = {}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that shares no memory: safetensors writes no others."""
    return tensor.cpu().clone(memory_format=torch.contiguous_format)
