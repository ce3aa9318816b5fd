"""An engine whose options are keywords."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from fastdecode.engine.engine import Engine
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import SchedulerLimits

_LIMITS = {field.name for field in fields(SchedulerLimits)}
_ENGINE = {"prefill_nodes", "start_runner"}


def make_engine(spart: Any, links: Iterable[Any], **options: Any) -> Engine:
    """An engine. `options` are fields of EngineOptions and of its limits, and keywords of Engine."""
    limits = SchedulerLimits(**{name: options.pop(name) for name in _LIMITS & options.keys()})
    keywords = {name: options.pop(name) for name in _ENGINE & options.keys()}
    return Engine(spart, list(links), EngineOptions(limits, **options), **keywords)
