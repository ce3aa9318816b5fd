"""GGUF files that have keys but no blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from fastdecode.spart import ModelConfig, read_config

SIZES = {
    "context_length": 512,
    "embedding_length": 96,
    "feed_forward_length": 64,
    "block_count": 4,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def config_of_keys(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The configuration of a file that is written with SIZES and `keys`, which stand there behind the architecture's
    name, a token embedding and `tensors`. ...: without the key, or the embedding."""
    writer = gguf.GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    keys = SIZES | keys
    for key, value in keys.items():
        if value is not ...:
            add.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    embedding = np.zeros((8, keys["embedding_length"]), np.float32)
    for name, tensor in ({"token_embd.weight": embedding} | (tensors or {})).items():
        if tensor is not ...:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_config(path)
