"""The garbage collector of a process that serves streams."""

from __future__ import annotations

import gc

#: New objects after which the collector looks at the young ones; Python's own number is 700.
_YOUNG = 20_000


def freeze() -> None:
    """Take all objects that live now out of the collector's sight, once a process has started.

    A full collection holds the GIL, and so every stream, while it looks at all objects: 0.2 s for the million of torch,
    the tokenizer and the HTTP library, which live as long as the process.
    """
    gc.collect()
    gc.freeze()
    # A step of many streams makes thousands of objects that die with it. The collector looks at the young ones of a few
    # steps at once, and seldom at all of them.
    gc.set_threshold(_YOUNG, 20, 50)
