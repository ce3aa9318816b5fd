"""read_config: the ModelConfig of a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from fastdecode.gguf import file as gguf_file
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig
from fastdecode.spart.checkpoints.config_json import read_json
from fastdecode.spart.checkpoints.families import make_config


def read_config(path: str | Path) -> ModelConfig:
    """Read a model directory's config.json and, if it has one, generation_config.json; or a GGUF file's metadata.

    Raises CheckpointError.
    """
    if file := find_gguf(path):
        from fastdecode.spart.checkpoints.gguf import gguf_config, open_gguf  # imports torch

        return gguf_config(open_gguf(file))
    directory = Path(path)
    raw = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    return make_config(raw, read_json(generation) if generation.is_file() else {})


def find_gguf(path: str | Path) -> Path | None:
    """As find_gguf of fastdecode.gguf, but raises CheckpointError."""
    try:
        return gguf_file.find_gguf(path)
    except gguf_file.GGUFError as error:
        raise CheckpointError(str(error)) from None
