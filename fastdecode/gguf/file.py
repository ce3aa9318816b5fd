"""GGUFFile: the metadata and the table of tensors of a GGUF file, version 2 or 3, which may be split into several.
ModelSource: the files of a model.

Each file is mapped and every offset and length in it is checked against its size before it is used, so that a file that
was cut off is refused at once. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Split files have the
names and the fields `split.*` that llama.cpp's llama-gguf-split gives them.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")
#: More of either than any model has; a larger number means a damaged file.
_MOST_ENTRIES = 1 << 20
#: The name of a split file: of the model, the file's number from 1 on, and how many there are.
_SPLIT_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


class TensorType(NamedTuple):
    """A type that a tensor may have."""

    name: str
    block: int  # numbers; a row is a whole number of blocks
    bytes: int  # of a block


#: By the ids in ggml's `enum ggml_type`.
TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}


class GGUFError(ValueError):
    """The file is no GGUF file, or is damaged; the message is a sentence that names it."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of a mapped file."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch; the file has them the other way round
    type: TensorType
    data: np.ndarray  # uint8 [bytes], a view of the file

    @property
    def blocks(self) -> np.ndarray:
        """uint8 [rows, blocks of a row, bytes of a block]."""
        return self.data.reshape(-1, self.shape[-1] // self.type.block, self.type.bytes)


class GGUFFile:
    """A GGUF file, or the first one of a split model with all others. `fields` has the metadata by key, `tensors` the
    tensors by name."""

    def __init__(self, path: str | Path):
        """Raises GGUFError."""
        first = _File(Path(path))
        self.path, self.fields, self.tensors = first.path, first.fields, first.tensors
        n = first.whole_number("split.count") or 1
        self.paths = split_paths(self.path) if n > 1 else [self.path]
        if len(self.paths) != n:
            raise GGUFError(f"{path} is one of {n} files, and its name does not end with -00001-of-{n:05}.gguf")
        if first.whole_number("split.no"):
            raise GGUFError(f"{path} is not the first of {n} files; name {self.paths[0]}")
        for number, other in enumerate(self.paths[1:], 1):
            file = _File(other)
            if (file.whole_number("split.no"), file.whole_number("split.count")) != (number, n):
                raise GGUFError(f"{other} does not say that it is number {number + 1} of {n} files")
            if twice := file.tensors.keys() & self.tensors.keys():
                raise GGUFError(f"{other} is damaged: an earlier file has the tensor {min(twice)!r}, too")
            self.tensors |= file.tensors
        claimed, found = first.whole_number("split.tensors.count"), len(self.tensors)
        if n > 1 and claimed != found:
            raise GGUFError(f"{path} is damaged: it claims {claimed} tensors in {n} files, which have {found}")


class _File:
    """The metadata and the tensors of a single file."""

    def __init__(self, path: Path):
        """Raises GGUFError."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise GGUFError(f"{path} cannot be read: {error}") from None
        self._at = 0
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read()
        except (struct.error, IndexError):
            raise GGUFError(f"{path} is cut off: its header ends after {len(self._map)} bytes") from None
        except UnicodeDecodeError:
            raise GGUFError(f"{path} is damaged: a name in its header is not text") from None

    def whole_number(self, key: str) -> int:
        """The field `key`, 0 without it. Raises GGUFError."""
        return whole_number(self.fields, key, self.path)

    def _read(self) -> None:
        if self._map[:4] != _MAGIC:
            raise GGUFError(pointer_fault(self.path) or f"{self.path} is not a GGUF file")
        self._at = 4
        version = self._number("I")
        if int.from_bytes(self._map[4:8], "big") in (2, 3):
            raise GGUFError(
                f"{self.path} is big-endian, and little-endian files are read; the package gguf converts it "
                "(gguf-convert-endian)"
            )
        if version not in (2, 3):
            raise GGUFError(f"{self.path} has version {version} of GGUF; known are 2 and 3")
        n_tensors, n_fields = self._number("Q"), self._number("Q")
        if max(n_tensors, n_fields) > _MOST_ENTRIES:
            raise GGUFError(f"{self.path} is damaged: it claims {n_tensors} tensors and {n_fields} fields")
        for _ in range(n_fields):
            key = self._string()
            if key in self.fields:
                raise GGUFError(f"{self.path} is damaged: it has the key {key!r} twice")
            self.fields[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(n_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise GGUFError(
                f"{self.path} is damaged: 'general.alignment' is {alignment!r}, not a power of two of at least 8"
            )
        start = -(-self._at // alignment) * alignment
        everything = np.frombuffer(self._map, np.uint8)
        end, before = 0, ""
        for name, shape, kind, offset in sorted(infos, key=itemgetter(3)):
            if name in self.tensors:
                raise GGUFError(f"{self.path} is damaged: it has the tensor {name!r} twice")
            if offset % alignment:
                raise GGUFError(
                    f"{self.path} is damaged: tensor {name!r} has the offset {offset}, which is no multiple of the "
                    f"alignment {alignment}"
                )
            self.tensors[name] = self._tensor(name, shape, kind, start + offset, everything)
            if offset < end:
                raise GGUFError(f"{self.path} is damaged: the tensors {before!r} and {name!r} overlap")
            end, before = offset + len(self.tensors[name].data), name
        if (left_out := self._tensor_at(end + -end % alignment)) is not None:
            raise GGUFError(
                f"{self.path} is damaged: it claims {n_tensors} tensors, and its header goes on with {left_out!r}"
            )

    def _tensor_at(self, offset: int) -> str | None:
        """The name of the tensor that the header describes next, if that is one with this offset."""
        try:
            name, *_, its_offset = self._tensor_info()
        except (GGUFError, struct.error, IndexError, UnicodeDecodeError):
            return None  # padding, or numbers
        return name if its_offset == offset else None

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dimensions = self._string(), self._number("I")
        if not 1 <= n_dimensions <= _MOST_DIMENSIONS:
            raise GGUFError(f"{self.path} is damaged: tensor {name!r} has {n_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(n_dimensions))[::-1]
        if 0 in shape:
            raise GGUFError(f"{self.path} is damaged: tensor {name!r} has no numbers, its shape is {list(shape)}")
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, everything: np.ndarray) -> GGUFTensor:
        if kind not in TYPES:
            raise GGUFError(f"{self.path}: tensor {name!r} has the type {kind}, which is not known")
        form = TYPES[kind]
        if shape[-1] % form.block:
            raise GGUFError(f"{self.path} is damaged: rows of {shape[-1]} in {form.name}, {name!r}")
        size = prod(shape) // form.block * form.bytes
        if offset + size > len(everything):
            raise GGUFError(
                f"{self.path} is cut off: tensor {name!r} ends at byte {offset + size}, the file at {len(everything)}"
            )
        return GGUFTensor(name, shape, form, everything[offset : offset + size])

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._map, self._at)
        self._at += _LENGTH.size
        end = self._at + length
        if end > len(self._map):
            raise IndexError
        text = self._map[self._at : end].decode()
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._code(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            if count > (len(self._map) - self._at) // 8:
                raise IndexError
            return [self._string() for _ in range(count)]
        code = self._code(kind)
        end = self._at + struct.calcsize("<" + code) * count
        if end > len(self._map):
            raise IndexError
        values = np.frombuffer(self._map, "<" + code, count, self._at).tolist()
        self._at = end
        return values

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise GGUFError(f"{self.path} is damaged: a field has the type {kind}")
        return _SCALARS[kind]


def whole_number(fields: dict[str, Any], key: str, path: Path) -> int:
    """A field of the file `path` that is a whole number; 0 without it. Raises GGUFError."""
    value = fields.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GGUFError(f"{path}: the key {key!r} is {value!r}, not a whole number")
    return value


def pointer_fault(path: Path) -> str | None:
    """A sentence if the file is a pointer of Git LFS in place of the file that it stands for; else None."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError:
        return None
    if start != _LFS_POINTER:
        return None
    return f"{path} is a Git LFS pointer and not the file itself; `git lfs pull` or `hf download` gets the file"


def split_paths(path: Path) -> list[Path]:
    """All files of a split model, of which `path` is one by its name; `path` alone if it is none."""
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or not int(name[3]):
        return [path]
    return [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, int(name[3]) + 1)]


def model_name(path: Path) -> str:
    """The name of a directory, or of a GGUF file without its ending and its number among split files."""
    name = _SPLIT_NAME.fullmatch(path.name)
    return name[1] if name else path.name.removesuffix(".gguf")


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that `path` means: itself, or the only one in a directory that has no config.json; else None. Split
    files count as one, and the first of them is returned. llama.cpp's files for images (mmproj) do not count.

    Raises GGUFError for a directory with several.
    """
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    models = [file for file in path.glob("*.gguf") if not file.name.startswith("mmproj")]
    files = sorted({split_paths(file)[0] for file in models})
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise GGUFError(f"{path} has {len(files)} GGUF files; name one of them: {names}")
    return files[0] if files else None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A Hugging Face directory with safetensors, or a GGUF file with config, tokenizer and weights."""

    path: Path  # as it was named: a directory or a GGUF file
    gguf: GGUFFile | None  # None: a directory without one

    @classmethod
    def open(cls, model: str | Path | ModelSource) -> ModelSource:
        """The source of a model that a path names; a source is returned as it is. Raises GGUFError."""
        if isinstance(model, ModelSource):
            return model
        file = find_gguf(model)
        return cls(Path(model), None if file is None else GGUFFile(file))

    @property
    def weight_bytes(self) -> int:
        """The size of the files that hold the weights."""
        files = self.path.glob("*.safetensors") if self.gguf is None else self.gguf.paths
        return sum(file.stat().st_size for file in files)
