"""The demo model: a small Llama trained on Jane Austen's novels.

It is the server's default model, and the one that the quality measurements
use.  `README.md` in this folder says where the text comes from, how the
model was trained and what to expect of it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["heldout_text", "model_dir"]

_HERE = Path(__file__).resolve().parent


def model_dir() -> Path:
    """The checkpoint directory (config, weights and tokenizer)."""
    return _HERE / "model"


def heldout_text() -> str:
    """Text by the same author that was not in the training set."""
    return (_HERE / "heldout.txt").read_text(encoding="utf-8")
