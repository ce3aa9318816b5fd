"""The search for a split, on made-up machines of 2 to 128 cores, beside the best of all splits that they have."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fastdecode.daemon.split import Split
from fastdecode.daemon.split_search import MOST_SPLITS, search
from fastdecode.daemon.tuning import Ratios, in_order

CORES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Machine:
    """A machine and a model. Threads read as fast as the memory allows, and wait for each other in every layer."""

    cores: int
    core_bytes: float  # a second, of one core
    memory_bytes: float  # a second, of the memory
    core_products: float  # a second, of one core
    half_cores: bool  # half of the cores are the second threads of the others
    layers: int
    weights: float  # bytes; a row has as many products
    kv: float  # bytes of a sequence
    kv_products: float
    layer_seconds: float  # of a layer's ways
    thread_seconds: float  # that a layer takes longer for each thread of the S-Part
    batch: int

    def _seconds(self, threads: int, n_bytes: float, products: float) -> float:
        real = self.cores / 2 if self.half_cores else threads
        cores = min(threads, real) + 0.25 * max(threads - real, 0)
        return max(n_bytes / min(threads * self.core_bytes, self.memory_bytes), products / (cores * self.core_products))

    def seconds(self, split: Split, batch: int) -> float:
        """The seconds of a step of all mini-batches."""
        n = min(split.mini_batches, batch)
        rows = batch / n
        s_part = self._seconds(split.s_threads, self.weights, rows * self.weights)
        s_part += self.layers * (self.layer_seconds + self.thread_seconds * split.s_threads)
        r_part = self._seconds(split.r_threads, rows * self.kv, rows * self.kv_products)
        r_part += self.layers * self.layer_seconds
        together = (n * self.weights + batch * self.kv) / self.memory_bytes
        return s_part + r_part if n == 1 else max(n * s_part, n * r_part, s_part + r_part, together)

    @property
    def rule(self) -> Split:
        return Split(self.cores, self.cores, 1, in_turns=True)

    def ratios(self, split: Split) -> Ratios:
        many, one = (self.seconds(self.rule, n) / self.seconds(split, n) for n in (self.batch, 1))
        return Ratios(many, one)

    def splits(self) -> Iterator[Split]:
        """All of them."""
        for threads in range(1, self.cores + 1):
            yield Split(threads, self.cores, 1, in_turns=True)
        for r_threads in range(1, self.cores):
            for mini_batches in range(2, min(4, self.batch) + 1):
                yield Split(self.cores - r_threads, r_threads, mini_batches)


def machines(n: int) -> Iterator[Machine]:
    draw = random.Random(42)

    def between(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    for i in range(n):
        cores, core_bytes = CORES[i % len(CORES)], between(5e9, 30e9)
        yield Machine(
            cores=cores,
            core_bytes=core_bytes,
            memory_bytes=core_bytes * max(1.0, min(cores, between(1.2, 40))),
            core_products=between(3e10, 1e12),
            half_cores=draw.random() < 0.3,
            layers=draw.choice([16, 32, 80]),
            weights=between(1e8, 3e10),
            kv=between(1e7, 3e9),
            kv_products=between(1e6, 1e10),
            layer_seconds=between(1e-6, 1e-4),
            thread_seconds=between(1e-7, 2e-5),
            batch=draw.choice([2, 8, 32]),
        )


def searched(machine: Machine, noise: float = 0.0) -> dict[Split, Ratios]:
    """What the search measures."""
    draw, rule = random.Random(7), machine.rule
    r_part = machine._seconds(machine.cores, machine.batch * machine.kv, machine.batch * machine.kv_products)
    measured = {rule: Ratios(1.0, 1.0)}
    proposals = search(machine.cores, r_part / machine.seconds(rule, machine.batch), machine.batch)
    for split in iter(lambda: next_split(proposals, measured), None):
        assert split not in measured, "measured twice"
        assert split in set(machine.splits())
        many, one = machine.ratios(split)
        measured[split] = Ratios(many * draw.uniform(1 - noise, 1 + noise), one)
    return measured


def next_split(proposals, measured: dict[Split, Ratios]) -> Split | None:
    try:
        return next(proposals) if len(measured) == 1 else proposals.send(next(reversed(measured.values())).score)
    except StopIteration:
        return None


@pytest.mark.parametrize("noise", [0.0, 0.015])
def test_few_measurements_find_a_split_nearly_as_fast_as_the_best_of_all(noise):
    improved = 0
    for machine in machines(350):
        measured = searched(machine, noise)
        assert len(measured) <= MOST_SPLITS == 12
        chosen = machine.ratios(in_order(measured)[0]).many
        best = max(machine.ratios(split).score for split in machine.splits())
        assert chosen >= 0.95 * best, (machine, measured)
        improved += best > 1.2
    assert improved > 25, "the rule's split is the best nearly everywhere, so the search shows nothing"


@pytest.mark.quick
def test_a_machine_with_one_core_has_nothing_to_search():
    assert list(search(1, 0.5, 32)) == []
