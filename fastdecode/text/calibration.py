"""Text by which the S-node estimates what rows look like: those of Q, K and V
(fastdecode/spart/int4/balance.py), and the inputs of the linears that are rounded to 4 bits
(fastdecode/spart/int4/calibration.py)."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from fastdecode.demo import heldout_text
from fastdecode.text.tokenizer import Tokenizer

_NOVEL = 16_000  # characters
_OF_A_README = 512  # tokens

#: Prose, dialogue, code, tables and a few languages, so that most of a model's directions occur.
TEXT = Path(__file__).with_name("calibration.txt").read_text(encoding="utf-8")


def calibration_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens of TEXT, of readmes() and of the end of the demo model's held-out novel, without special ones. Quality
    is measured from the novel's beginning on."""
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (TEXT, *readmes(), heldout_text()[-_NOVEL:])]
    return [*parts[0], *(token for part in parts[1:-1] for token in part[:_OF_A_README]), *parts[-1]]


def readmes() -> list[str]:
    """What the packages that this one requires say of themselves: Markdown, reStructuredText, commands and code.
    Packages without a description, as some systems install them, are left out."""
    return [text for name in _required() if (text := _description(name))]


def _required() -> list[str]:
    """The packages that are required without an extra."""
    try:
        requirements = metadata.requires("fastdecode") or []
    except metadata.PackageNotFoundError:  # run from a directory, not installed
        return []
    return [re.split(r"[^\w.-]", line)[0] for line in requirements if "extra ==" not in line]


def _description(name: str) -> str:
    try:
        return metadata.metadata(name).get("Description") or ""
    except metadata.PackageNotFoundError:
        return ""
