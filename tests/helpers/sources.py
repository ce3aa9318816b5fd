"""Where the C sources stand, for tests that compile them on their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ("kernels/attention", "kernels/cache", "kernels/engine")
#: The R-engine and its kernels, without the CPython module over them.
ENGINE = sorted(path for folder in KERNELS for path in (ROOT / folder).glob("*.c"))
_FURTHER = ("kernels/linears", "kernels/decoder", "kernels/sampling")
#: Flags that find every header.
INCLUDES = [f"-I{ROOT / folder}" for folder in ("region", *KERNELS, *_FURTHER, "transports", "tests/c")]


def source_files(root: Path, folders: Iterable[str], *endings: str) -> list[Path]:
    """The files with these endings in folders of `root`, at any depth."""
    return sorted(path for folder in folders for ending in endings for path in (root / folder).rglob(f"*.{ending}"))
