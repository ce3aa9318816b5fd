"""compile_layer: a layer's kernels for functions_on_driver.py."""

from __future__ import annotations

from pathlib import Path

from sources.compiled import compile_kernels

from fastdecode.kernels.gpu.cupy_kernels import joined
from fastdecode.kernels.gpu.page_kernels import ATTENTION_SOURCES, PagedLayer, definitions
from gpu.functions_on_driver import SHAPE, library_of


def compile_layer(layer: PagedLayer, folder: Path) -> None:
    """Compile the library with a layer's kernels if it is not there."""
    path, values = library_of(layer, folder), definitions(layer, SHAPE)
    if not path.exists():
        compile_kernels(joined(ATTENTION_SOURCES), [f"-D{name}={value}" for name, value in values.items()], path)
