"""ModelSource: the files of a model, opened once for everything that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastdecode.gguf.file import GGUFFile, find_gguf


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A Hugging Face directory with safetensors, or one GGUF file with config, tokenizer and weights."""

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
        files = self.path.glob("*.safetensors") if self.gguf is None else [self.gguf.path]
        return sum(file.stat().st_size for file in files)
