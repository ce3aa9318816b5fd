"""did_you_mean: the name that somebody who has mistyped one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LIKENESS = 0.75  # of two names, as difflib measures it from 0 to 1; `input` and `min_p` have 0.6
_LONGEST = 100  # characters of a name that is compared; a request may have one of megabytes


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about the unknown `name`: "; did you mean ...?", or "" if no known name is like it."""
    close = difflib.get_close_matches(name, known, 1, _LIKENESS) if len(name) <= _LONGEST else []
    return f"; did you mean {close[0]}?" if close else ""
