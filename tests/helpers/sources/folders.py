"""Where the C sources stand, for tests that compile them on their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[3]
KERNELS = ("kernels/cpu", "kernels/attention", "kernels/cache", "kernels/gpu", "kernels/engine")
#: The R-engine and its kernels, without the CPython module over them.
ENGINE = sorted(path for folder in KERNELS for path in (ROOT / folder).glob("*.c"))
#: Flags that find every header: an include of another room's file names the room.
INCLUDES = [f"-I{ROOT}", f"-I{ROOT / 'kernels'}"]


def source_files(root: Path, folders: Iterable[str], *endings: str) -> list[Path]:
    """The files with these endings in folders of `root`, at any depth. What others wrote (`vendor/`) is left out."""
    found = (path for folder in folders for ending in endings for path in (root / folder).rglob(f"*.{ending}"))
    return sorted(path for path in found if "vendor" not in path.relative_to(root).parts)
