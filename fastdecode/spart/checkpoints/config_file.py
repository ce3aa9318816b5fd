"""open_source and read_config: a model's files, and the ModelConfig that they hold."""

from __future__ import annotations

from pathlib import Path

from fastdecode.gguf.file import GGUFError, ModelSource
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig
from fastdecode.spart.checkpoints.config_json import read_json
from fastdecode.spart.checkpoints.families import make_config


def open_source(model: str | Path | ModelSource) -> ModelSource:
    """ModelSource.open, whose errors are CheckpointErrors."""
    try:
        return ModelSource.open(model)
    except GGUFError as error:
        raise CheckpointError(str(error)) from None


def read_config(model: str | Path | ModelSource) -> ModelConfig:
    """Read a model directory's config.json and, if it has one, generation_config.json; or a GGUF file's metadata.

    Raises CheckpointError.
    """
    source = open_source(model)
    if source.gguf is not None:
        from fastdecode.spart.checkpoints.gguf_config import gguf_config  # imports torch

        return gguf_config(source.gguf)
    raw = read_json(source.path / "config.json")
    file = source.path / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    try:
        return make_config(raw, generation)
    except CheckpointError as error:
        raise type(error)(f"{source.path}: {error}") from None
