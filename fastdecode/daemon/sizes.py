"""Sizes in bytes as text."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
#: More than any machine has, and small enough for the R-engine and the control messages.
_MAX_BYTES = 2**52


def parse_bytes(text: str) -> int:
    """ "4GiB", "512 MiB", "1e9", "4G" (a decimal G) -> bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*(?:([kmgt]i?)?b?)\s*", text.lower())
    if not match or not 1 <= (size := float(match[1]) * _UNITS[match[2] or ""]) <= _MAX_BYTES:
        raise ValueError(f"{text!r} is not a size such as 4GiB or 512MiB")
    return int(size)


def format_bytes(n: float) -> str:
    """A number of bytes as text: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
