"""EngineOptions: what the owner of an engine chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.engine.scheduling.ways import SLOWDOWN


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of one engine. A class named in parentheses says more about its option."""

    limits: SchedulerLimits = SchedulerLimits()
    max_model_len: int | None = None  # most tokens of a sequence, output included; None: the model's positions
    max_queued: int = 1024  # most requests that wait for others to end; 0 counts as 1
    end_token_ids: Iterable[int] | None = None  # None: the model's own

    prefix_cache: bool = False  # prompts share the cached tokens of sequences that start alike
    #: Most tokens behind a shared prefix that are left to an R-node's attention. A prompt with a longer suffix is
    #: prefilled on the S-node as a whole. None: any number.
    max_uncached_suffix: int | None = None
    watermark: float = 0.01  # share of a lease's pages that new sequences leave to running ones
    grow_leases: bool = False  # leases grow on demand

    schedule: str = "greedy"  # one of admission.SCHEDULES
    target_tbt: float | None = None  # seconds between two tokens of a stream; None: no bound (StepTimes, Pace)
    guesses: int = 0  # most tokens of a sequence that a step guesses (Speculation)
    gpu_slowdown: float = SLOWDOWN  # share by which far rows may lengthen near steps (WayChoice)
    s_part_seconds: Mapping[int, float] | None = None  # seconds of the S-Part by rows, as measured (SPartForecast)

    rebalance: bool = True  # running sequences migrate off the R-node that steps wait for (Rebalancer)
    patience: float = 0.0  # seconds for which sequences wait for an R-node when none is connected
    kv_digest: str | None = None  # None: no S-node adopts K and V of another (Adopter)
