"""Chooses the split of a CPU between the S-Part and the embedded R-node by a short measurement at start.

Sequences decode with the loaded model over R-nodes of their own: many at once, and one alone. The splits that a search
proposes (split_search.py) take turns with the rule's (`embedded.split_machine`), one after another. The rule stands
unless another split is faster by a margin for many, so that noise does not change the choice, and hardly slower for
one.

What was found is remembered for the machine and the model in a file of its own, in `$XDG_CACHE_HOME/fastdecode` or
`~/.cache/fastdecode`. No fault of these files keeps a node from starting: without a record that can be read, the node
measures again.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from tqdm import tqdm

from fastdecode import __version__
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_files import cache_file
from fastdecode.daemon.decoding import USUAL_TEMPERATURE, DecodeShape, Decoding, Round
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.machine import available_memory, busy_seconds, cpu_model, own_seconds, usable_cpus
from fastdecode.daemon.split import SMALL_MODEL, Split, split_machine
from fastdecode.daemon.split_search import MOST_SPLITS, search
from fastdecode.daemon.weights import chosen_isa, parameters, torch_name, weights_of
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.backend import Backend
from fastdecode.spart.served import ServedModel
from fastdecode.spart.threads import set_threads
from fastdecode.transports.base import TransportError

log = logging.getLogger(__name__)

_SECONDS = 20.0  # after which no other split is measured
_SPLIT_SECONDS = 1.0  # for the rounds of one split and the rule's beside it; its R-node is started and filled before
_MOST_ROUNDS = 5
_STEPS = 4  # of a round, at most
_SLOW_STEP = 2.0  # seconds of a step that takes too long to measure splits
_MARGIN = 1.03  # by which a split must be faster than the rule's for many sequences
_LEAST_OF_ONE = 0.9  # of the rule's speed, which a split must have for one sequence
#: Part of the cpus' time: what is measured beside busier programs may be wrong at the next start.
_MOST_OTHERS = 0.1
_BATCH = 32  # sequences, at most
_BLOCKS = 8  # of each sequence, at most
#: KV-cache of each R-node. Filling it takes about as long as reading as many bytes of weights, so a larger model may
#: have more.
_LEAST_BYTES, _MOST_BYTES = 256 << 20, 1 << 30


def is_open(config: NodeConfig, parameters: int) -> bool:
    """True if a measurement is to choose the split for a model with this number of parameters on a CPU: no option fixes
    the split, and there is something to choose."""
    fixed = config.uses_r_nodes or config.threads or config.s_threads or config.mini_batches or config.cpus
    fixed = fixed or config.tensor_parallel > 1 or config.numa_node is not None
    return not fixed and parameters >= SMALL_MODEL and len(usable_cpus()) > 1 and config.max_batch_size > 1


def report(config: NodeConfig, backend: Backend, dtype: torch.dtype, parameters: int) -> str:
    """The split that an S-node with this model would have on this machine's CPU, for people."""
    rule = split_machine(config, s_on_gpu=False).for_model(config, parameters)
    if config.tune == "off" or not is_open(config, parameters):
        return str(rule) if config.tensor_parallel == 1 else f"{config.tensor_parallel} ranks, each {rule}"
    found = _remembered(config, backend, dtype)
    if found is None or config.tune == "always":
        return f"measured at start: {rule}, or one of up to {MOST_SPLITS - 1} others"
    return f"{found}; remembered from {found.date}"


def _remembered(config: NodeConfig, backend: Backend, dtype: torch.dtype) -> Record | None:
    """The record of this model and machine, if the split that it chooses is possible."""
    record = recall(record_key(config, backend, dtype))
    if record is None:
        return None
    split, cpus = record.speeds[0].split, len(usable_cpus())
    possible = 0 < split.s_threads <= cpus and 0 < split.r_threads <= cpus and 0 < split.mini_batches <= _BATCH
    return record if possible else None


async def choose_split(config: NodeConfig, backend: Backend, model: ServedModel, rule: Split) -> Split:
    """The split for a model on a CPU: `rule`, a remembered one, or the fastest in a measurement. The log says which and
    why. The number of torch's threads may have changed afterwards."""
    if config.tune == "off" or not is_open(config, model.parameters):
        return rule
    if config.tune == "auto" and (found := _remembered(config, backend, model.dtype)):
        log.info("splits of the cores, the chosen one first: %s; remembered from %s", found, found.date)
        return found.speeds[0].split
    try:
        record, others = await _measure(config, backend, model, rule)
    except (TransportError, OSError, RuntimeError, ValueError) as error:
        log.warning("%s; other splits were not measured: %s", rule, error)
        return rule
    if others > _MOST_OTHERS:
        log.info(
            "splits of the cores, the chosen one first: %s; measured now, and not remembered, because other programs "
            "took %.0f %% of the cpus' time meanwhile",
            record,
            100 * others,
        )
    else:
        log.info("splits of the cores, the chosen one first: %s; measured now", record)
        remember(record)
    return record.speeds[0].split


async def _measure(config: NodeConfig, backend: Backend, model: ServedModel, rule: Split) -> tuple[Record, float]:
    """The speeds of the splits that a search proposes, and the part of the cpus' time that other programs took
    meanwhile.

    Raises TransportError, OSError, RuntimeError, ValueError if a split cannot be measured.
    """
    shape, cpus = _shape(config, model), usable_cpus()
    async with AsyncExitStack() as stack:
        title = "measuring the split of the cpus"
        bar: tqdm[Any] = stack.enter_context(
            tqdm(total=MOST_SPLITS, desc=title, unit="split", leave=False, delay=1, disable=None)
        )
        load = await stack.enter_async_context(_opened(config, backend, model, rule, shape))
        begun, others = time.perf_counter(), busy_seconds(cpus) - own_seconds()
        many, one = await _rounds([(rule, decoding) for decoding in load])
        tokens_per_s, one_sequence = shape.batch / statistics.median(many), 1 / statistics.median(one)
        measured: dict[Split, Ratios] = {rule: Ratios(1.0, 1.0)}
        if many[0] < _SLOW_STEP:
            step = await _round(rule, load[0], 1)
            proposals = search(len(cpus), step.waited / step.elapsed, shape.batch)
            with contextlib.suppress(StopIteration):
                split = next(proposals)
                while time.perf_counter() - begun < _SECONDS:
                    bar.update()
                    measured[split] = await _beside_rule(config, backend, rule, load, split)
                    split = proposals.send(measured[split].score)
        elapsed = time.perf_counter() - begun
        others = (busy_seconds(cpus) - own_seconds() - others) / (len(cpus) * elapsed)
    speeds = [
        Speed(split, tokens_per_s * measured[split].many, one_sequence * measured[split].one)
        for split in in_order(measured)
    ]
    key: Key = record_key(config, backend, model.dtype)
    return Record(key, datetime.date.today().isoformat(), shape.batch, shape.context, speeds), others


class Ratios(NamedTuple):
    """How many times as fast as the rule's split another one is."""

    many: float  # sequences
    one: float

    @property
    def score(self) -> float:
        """For the search: the speed for many sequences; negative if the split is too slow for one."""
        return self.many if self.one >= _LEAST_OF_ONE else self.one - 1.0


def in_order(measured: dict[Split, Ratios]) -> list[Split]:
    """The splits, the rule's first among `measured`: now the chosen one first, then by their speed for many
    sequences."""
    rule = next(iter(measured))
    order = sorted(measured, key=lambda split: -measured[split].many)
    chosen = next((split for split in order if measured[split].score >= _MARGIN), rule)
    return sorted(order, key=lambda split: split != chosen)


#: The load of many sequences and that of one, over the same R-node.
_Load = tuple[Decoding, Decoding]


@asynccontextmanager
async def _opened(
    config: NodeConfig, backend: Backend, model: ServedModel, split: Split, shape: DecodeShape
) -> AsyncIterator[_Load]:
    """Both loads over an R-node of their own, filled."""
    one_shape = replace(shape, batch=1, mini_batches=1)
    async with AsyncExitStack() as stack:
        # No secret is needed: only this user reaches the socket.
        memory = shape.memory(model) + one_shape.memory(model)
        alone = replace(config, kv_memory=memory, prefault=False, secret_file=None)
        node = EmbeddedRNode(alone, split, brief=True)
        stack.push_async_callback(node.stop)
        await node.start()
        many = await Decoding.open(model, [node.url], shape, backend.make_spart)
        stack.push_async_callback(many.close)
        one = await Decoding.open(model, [node.url], one_shape, backend.make_spart)
        stack.push_async_callback(one.close)
        node.remove_socket()
        await many.fill(progress=False)
        await one.fill(progress=False)
        yield many, one


async def _beside_rule(config: NodeConfig, backend: Backend, rule: Split, load: _Load, split: Split) -> Ratios:
    """The speeds of a split. Each round is compared with the rule's beside it, because the machine's speed may change
    meanwhile. A split with the R-node of the rule's has the rule's `load`."""
    async with AsyncExitStack() as stack:
        own = load
        if not split.in_turns:
            shape = replace(load[0].shape, mini_batches=split.mini_batches)
            own = await stack.enter_async_context(_opened(config, backend, load[0].model, split, shape))
        seconds = await _rounds([(rule, load[0]), (split, own[0]), (rule, load[1]), (split, own[1])])
    many, one = (
        statistics.median(a / b for a, b in zip(rules, splits, strict=True))
        for rules, splits in (seconds[:2], seconds[2:])
    )
    return Ratios(many, one)


async def _rounds(pairs: Sequence[tuple[Split, Decoding]]) -> list[list[float]]:
    """The seconds of a step of all sequences, in each round, for each pair. Where a step is slow, the first round
    counts."""
    firsts = [(await _round(split, decoding, 1)).elapsed for split, decoding in pairs]
    if sum(firsts) > _SPLIT_SECONDS:
        return [[first] for first in firsts]
    steps = max(1, min(_STEPS, int(_SPLIT_SECONDS / (3 * sum(firsts)))))
    seconds: list[list[float]] = [[] for _ in pairs]
    end = time.perf_counter() + _SPLIT_SECONDS
    while not seconds[0] or (len(seconds[0]) < _MOST_ROUNDS and time.perf_counter() < end):
        for taken, (split, decoding) in zip(seconds, pairs, strict=True):
            taken.append((await _round(split, decoding, steps)).elapsed / steps)
    return seconds


async def _round(split: Split, decoding: Decoding, steps: int) -> Round:
    """Steps of all mini-batches. The thread of the S-Part ends with the round: OpenMP threads of several
    splits at once would disturb each other (see own_thread.py)."""
    set_threads(split.s_threads, decoding.model)
    try:
        return await decoding.split_round(steps)
    finally:
        decoding.end_runner()


def _shape(config: NodeConfig, model: ServedModel) -> DecodeShape:
    """The load: as many sequences as a mini-batch may have, but at most 32, of some 1,024 tokens, or less where two
    such loads are more than the memory or the model holds."""
    batch = min(_BATCH, config.max_batch_size)
    block = DecodeShape(batch, 1, _STEPS, 1, config.kv_dtype).block_bytes(model)
    memory = (config.kv_memory or available_memory() // 2) // 2
    memory = min(memory, max(_LEAST_BYTES, min(_MOST_BYTES, model.weight_bytes)))
    blocks = max(1, min(_BLOCKS, memory // (batch * block)))
    state = model.config.state_bytes(model.dtype.itemsize)
    batch = max(2, min(batch, memory // (blocks * block + state)))
    longest = min(config.max_model_len or model.config.max_positions, model.config.max_positions)
    context = max(1, min(blocks * PAGE_TOKENS, longest) - _STEPS - 1)
    return DecodeShape(batch, context, _STEPS, 1, config.kv_dtype, USUAL_TEMPERATURE)


#: What the speed of a split depends on, by name.
Key = dict[str, str | int]


class Speed(msgspec.Struct, frozen=True):
    """The speed of a split."""

    split: Split
    tokens_per_s: float  # of many sequences
    one_sequence: float = msgspec.field(name="of_one")  # tokens a second

    def __str__(self) -> str:
        many, one = (
            f"{rate:.0f}" if rate >= 1000 else f"{rate:.4g}" for rate in (self.tokens_per_s, self.one_sequence)
        )
        return f"{self.split}: {many} tokens/s, {one} with one sequence"


class Record(msgspec.Struct, frozen=True):
    """The speeds of all splits that were measured, that of the chosen one first."""

    key: Key
    date: str  # YYYY-MM-DD
    batch: int  # sequences that decoded
    context: int  # cached tokens of each
    speeds: list[Speed]

    def __str__(self) -> str:
        return f"{'; '.join(map(str, self.speeds))} ({self.batch} sequences of {self.context} tokens)"


def record_key(config: NodeConfig, backend: Backend, dtype: torch.dtype) -> Key:
    """The key of a model on this machine's CPU, which is known before the weights are loaded. `dtype` is that of the
    activations."""
    model = backend.config
    return {
        "fastdecode": __version__,
        "torch": str(torch.__version__),
        "cpu": cpu_model(),
        "cpus": len(usable_cpus()),
        "isa": chosen_isa(),
        "model": f"{model.architecture} by the {backend.name} backend",
        "parameters": parameters(backend),
        "attention": repr(model.hello_geometry(1, 1, "fp32")),
        "weights": weights_of(config, backend, torch.device("cpu"), dtype)[1],
        "dtype": torch_name(dtype),
        "kv_dtype": config.kv_dtype,
        "max_batch_size": config.max_batch_size,
        "huge_pages": config.huge_pages,
        "spin_us": -1 if config.spin_us is None else config.spin_us,
    }


def recall(key: Key) -> Record | None:
    """The record with this key; None if there is none that can be read."""
    try:
        path = _path(key)
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        if record.key != key or not record.speeds:
            raise ValueError(f"{path} is the record of another model or machine")
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError) as error:
        log.debug("no remembered split: %s", error)
        return None
    return record


def remember(record: Record) -> None:
    """Write the record, in place of an older one with the same key, or log why that cannot be done."""
    try:
        path = _path(record.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several S-nodes may write the same record at once, so each writes a file of its own and renames it.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".split-", delete=False) as file:
            try:
                file.write(msgspec.json.format(msgspec.json.encode(record)))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except (OSError, RuntimeError) as error:
        log.debug("the split is not remembered: %s", error)


def _path(key: Key) -> Path:
    """The file of a record. Raises RuntimeError without a home directory."""
    digest = hashlib.blake2b(repr(sorted(key.items())).encode(), digest_size=8).hexdigest()
    return cache_file(f"split-{digest}.json")
