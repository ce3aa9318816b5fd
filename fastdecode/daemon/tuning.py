"""Chooses the split of a CPU between the S-Part and the embedded R-node by a short measurement at start.

Sequences decode with the loaded model over R-nodes of their own, once for each split, in rounds that take turns: many
at once, and one alone. The rule (`embedded.split_machine`) stands unless another split is faster by a margin for many,
so that noise does not change the choice, and hardly slower for one. What was found is remembered (tuning_record.py).
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.decoding import USUAL_TEMPERATURE, DecodeShape, Decoding
from fastdecode.daemon.embedded import SMALL_MODEL, EmbeddedRNode, Split, split_machine
from fastdecode.daemon.machine import available_memory, busy_seconds, own_seconds, usable_cpus
from fastdecode.daemon.tuning_record import Key, Record, Speed, recall, record_key, remember
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart import Model
from fastdecode.spart.backend import Backend
from fastdecode.spart.threads import set_threads
from fastdecode.transports.base import TransportError

if TYPE_CHECKING:
    from fastdecode.spart.hf.model import HFModel

log = logging.getLogger(__name__)

_SECONDS = 2.0  # for all rounds; the R-nodes are started and filled before
_MOST_ROUNDS = 9
_STEPS = 4  # of a round, at most
_MARGIN = 1.05  # by which a split must be faster than the rule's for many sequences
_LEAST_OF_ONE = 0.9  # of the rule's speed, which a split must have for one sequence
#: Part of the cpus' time: what is measured beside busier programs may be wrong at the next start.
_MOST_OTHERS = 0.1
_MANY_CPUS = 8  # from which on an R-node with a quarter of them is tried, too
_BATCH = 32  # sequences, at most
_BLOCKS = 8  # of each sequence, at most
#: KV-cache of each R-node. Filling it takes about as long as reading as many bytes of weights, so a larger model may
#: have more.
_LEAST_BYTES, _MOST_BYTES = 256 << 20, 1 << 30


def candidates(config: NodeConfig, rule: Split, parameters: int) -> list[Split]:
    """The splits to choose from for a model with this number of parameters on a CPU: first the rule's, and no other one
    if options fix the split, or if nothing is left to choose."""
    cpus = len(usable_cpus())
    fixed = config.uses_r_nodes or config.threads or config.s_threads or config.mini_batches or config.cpus
    fixed = fixed or config.tensor_parallel > 1 or config.numa_node is not None
    if fixed or parameters < SMALL_MODEL or cpus == 1 or config.max_batch_size == 1:
        return [rule]
    shares = [cpus // 2, cpus // 4] if cpus >= _MANY_CPUS else [cpus // 2]
    return [rule, *(Split(cpus - share, share, 2) for share in shares)]


def report(config: NodeConfig, backend: Backend, dtype: torch.dtype, parameters: int) -> str:
    """The split that an S-node with this model would have on this machine's CPU, for people."""
    rule = split_machine(config, s_on_gpu=False).for_model(config, parameters)
    splits = candidates(config, rule, parameters)
    if len(splits) == 1 or config.tune == "off":
        return str(rule) if config.tensor_parallel == 1 else f"{config.tensor_parallel} ranks, each {rule}"
    found = _remembered(config, backend, dtype, splits)
    if found is None or config.tune == "always":
        return f"measured at start: {' or '.join(map(str, splits))}"
    return f"{found}; remembered from {found.date}"


def _remembered(config: NodeConfig, backend: Backend, dtype: torch.dtype, splits: Sequence[Split]) -> Record | None:
    """The record of this model and machine, if it chooses one of `splits`."""
    record = recall(record_key(config, backend, dtype))
    return record if record and record.speeds[0].split in splits else None


async def choose_split(config: NodeConfig, backend: Backend, model: Model | HFModel, rule: Split) -> Split:
    """The split for a model on a CPU: `rule`, a remembered one, or the fastest in a measurement. The log says which and
    why. The number of torch's threads may have changed afterwards."""
    splits = candidates(config, rule, model.parameters)
    if len(splits) == 1 or config.tune == "off":
        return rule
    if config.tune == "auto" and (found := _remembered(config, backend, model.dtype, splits)):
        log.info("%s; remembered from %s", found, found.date)
        return found.speeds[0].split
    try:
        record, others = await _measure(config, backend, model, splits)
    except (TransportError, OSError, RuntimeError, ValueError) as error:
        log.warning("%s; other splits were not measured: %s", rule, error)
        return rule
    if others > _MOST_OTHERS:
        log.info(
            "%s; measured now, and not remembered, because other programs took %.0f %% of the cpus' time meanwhile",
            record,
            100 * others,
        )
    else:
        log.info("%s; measured now", record)
        remember(record)
    return record.speeds[0].split


async def _measure(
    config: NodeConfig, backend: Backend, model: Model | HFModel, splits: Sequence[Split]
) -> tuple[Record, float]:
    """The speeds of `splits`, and the part of the cpus' time that other programs took meanwhile.

    Raises TransportError, OSError, RuntimeError, ValueError if a split cannot be measured.
    """
    shapes = [_shape(config, model, split, len(splits)) for split in splits]
    ones = [replace(shape, batch=1, mini_batches=1) for shape in shapes]
    total = 2 * len(splits) * (2 + _MOST_ROUNDS)
    async with AsyncExitStack() as stack:
        bar: tqdm[Any] = stack.enter_context(
            tqdm(total=total, desc="measuring the split of the cpus", unit="part", leave=False, delay=1, disable=None)
        )
        nodes = []
        for split, shape, one in zip(splits, shapes, ones, strict=True):
            # No secret is needed: only this user reaches the socket.
            memory = shape.memory(model) + one.memory(model)
            alone = replace(config, kv_memory=memory, prefault=False, secret_file=None)
            nodes.append(EmbeddedRNode(alone, split, brief=True))
            stack.push_async_callback(nodes[-1].stop)
        await asyncio.gather(*(node.start() for node in nodes))
        decodings = []
        for node, shape in zip(nodes + nodes, shapes + ones, strict=True):
            decodings.append(await Decoding.open(model, [node.url], shape, backend.make_spart))
            stack.push_async_callback(decodings[-1].close)
        for node in nodes:
            node.remove_socket()
        for decoding in decodings:
            await decoding.fill(progress=False)
            bar.update()
        cpus = usable_cpus()
        begun, others = time.perf_counter(), busy_seconds(cpus) - own_seconds()
        seconds = await _rounds([*zip([*splits, *splits], decodings, strict=True)], bar)
        others = (busy_seconds(cpus) - own_seconds() - others) / (len(cpus) * (time.perf_counter() - begun))
    many_sequences, one_sequence = seconds[: len(splits)], seconds[len(splits) :]
    batch, context = shapes[0].batch, shapes[0].context
    speeds = [
        Speed(split, batch / statistics.median(many), 1 / statistics.median(one) if one else None)
        for split, many, one in zip_longest(splits[: len(many_sequences)], many_sequences, one_sequence)
    ]
    speeds = [speeds[i] for i in _order(_beside_rule(many_sequences), _beside_rule(one_sequence))]
    key: Key = record_key(config, backend, model.dtype)
    return Record(key, datetime.date.today().isoformat(), batch, context, speeds), others


def _beside_rule(seconds: list[list[float]]) -> list[float]:
    """How many times as fast as the rule's split, the first, each split is. Each round is compared with the rule's
    beside it, because the machine's speed may change meanwhile."""
    return [statistics.median(a / b for a, b in zip(seconds[0], taken, strict=True)) for taken in seconds]


def _order(many_sequences: list[float], one_sequence: list[float]) -> list[int]:
    """The splits, the chosen one first, then by their speed for many sequences. The speeds are relative to the first
    split, the rule's."""
    order = sorted(range(len(many_sequences)), key=lambda i: -many_sequences[i])
    fit = [i for i in order if many_sequences[i] >= _MARGIN and one_sequence[i] >= _LEAST_OF_ONE]
    return sorted(order, key=lambda i: i != (fit or [0])[0])


async def _rounds(pairs: Sequence[tuple[Split, Decoding]], bar: tqdm[Any]) -> list[list[float]]:
    """The seconds of a step of all sequences, in each round, for each pair; only those of the first pair if a step
    takes too long to measure others."""
    firsts: list[float] = []
    for split, decoding in pairs:
        firsts.append(await _round(split, decoding, 1))
        bar.update()
        if firsts[0] > _SECONDS:
            return [firsts]
    steps = max(1, min(_STEPS, int(_SECONDS / (3 * sum(firsts)))))
    seconds: list[list[float]] = [[] for _ in pairs]
    end = time.perf_counter() + _SECONDS
    while not seconds[0] or (len(seconds[0]) < _MOST_ROUNDS and time.perf_counter() < end):
        for taken, (split, decoding) in zip(seconds, pairs, strict=True):
            taken.append(await _round(split, decoding, steps))
            bar.update()
    return seconds


async def _round(split: Split, decoding: Decoding, steps: int) -> float:
    """Seconds of a step of all mini-batches. The thread of the S-Part ends with the round: OpenMP threads of several
    splits at once would disturb each other (see own_thread.py)."""
    set_threads(split.s_threads, decoding.model)
    try:
        return (await decoding.split_round(steps)).elapsed / steps
    finally:
        decoding.end_runner()


def _shape(config: NodeConfig, model: Model | HFModel, split: Split, n_splits: int) -> DecodeShape:
    """The load: as many sequences as a mini-batch may have, but at most 32, of some 1,024 tokens, or less where this is
    more than the memory or the model holds."""
    batch = min(_BATCH, config.max_batch_size)
    block = DecodeShape(batch, 1, _STEPS, split.mini_batches, config.kv_dtype).block_bytes(model)
    memory = (config.kv_memory or available_memory() // 2) // n_splits
    memory = min(memory, max(_LEAST_BYTES, min(_MOST_BYTES, model.weight_bytes)))
    blocks = max(1, min(_BLOCKS, memory // (batch * block)))
    state = model.config.state_bytes(model.dtype.itemsize)
    batch = max(2, min(batch, memory // (blocks * block + state)))
    longest = min(config.max_model_len or model.config.max_positions, model.config.max_positions)
    context = max(1, min(blocks * PAGE_TOKENS, longest) - _STEPS - 1)
    return DecodeShape(batch, context, _STEPS, split.mini_batches, config.kv_dtype, USUAL_TEMPERATURE)
