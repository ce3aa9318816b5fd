"""Parameters in the quick subset, for tests of which only some parameters are."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def quick(values: Iterable[object], *chosen: object) -> list[object]:
    """For pytest.mark.parametrize: `values`, with the `chosen` of them in `pytest -m quick`."""
    return [pytest.param(value, marks=pytest.mark.quick) if value in chosen else value for value in values]
