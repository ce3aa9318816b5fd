"""The S-node once its options are checked: load the model, open the links, run the engine and serve the API."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass
from functools import partial

import torch
import uvloop

from fastdecode.api.server import ApiServer, serve
from fastdecode.daemon.activity import log_activity
from fastdecode.daemon.api_processes import ApiProcesses
from fastdecode.daemon.api_settings import ApiSettings
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.device_plan import (
    capacity,
    free_memory,
    node_device,
    node_exchange,
    open_gpu_kv,
    plan_steps,
    prompt_seconds,
    prompts_apart,
    state_slots,
    with_gpu_kv,
)
from fastdecode.daemon.discovery import FileSet, FixedSet, NodeSet, bracketed, r_node_set
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.option_values import ConfigError, format_bytes, guesses
from fastdecode.daemon.prefill_nodes import PrefillServer, RemotePrefillNodes, model_digest
from fastdecode.daemon.process import announce, freeze, wait_for_shutdown
from fastdecode.daemon.ranks import Ranks
from fastdecode.daemon.rnode_links import RNodeLinks, first_lease
from fastdecode.daemon.split import Split, split_machine
from fastdecode.daemon.tasks import run_until
from fastdecode.daemon.tuning import choose_split
from fastdecode.daemon.weights import check_fits, precision_note, torch_name
from fastdecode.engine.engine import Engine
from fastdecode.engine.migration.prefill_worker import PrefillWorker
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.region.contract import MAX_ROWS, MAX_SEQS
from fastdecode.service.local import LocalEngine
from fastdecode.spart import choose_dtype
from fastdecode.spart.backend import Backend
from fastdecode.spart.exchange.chosen import ChosenExchange
from fastdecode.spart.int4.balance import balance_digest, balance_for
from fastdecode.spart.linears.quantised import BITS
from fastdecode.spart.lora.files import Adapter, read_adapter
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.served import ServedModel
from fastdecode.spart.shape import AttentionShape
from fastdecode.spart.threads import set_threads
from fastdecode.text.calibration import calibration_tokens
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.text.turn_end import end_of_turn
from fastdecode.transports.base import Hello, Link
from fastdecode.transports.partition import member_of

log = logging.getLogger(__name__)

#: With the S-Part on a GPU, a prompt starts from the prefix cache only if its uncached suffix is at most this long. The
#: S-node computes the attention of a whole prompt itself, but R-nodes attend for the uncached suffix of a shared
#: prompt. For a long suffix, a GPU should compute the whole prompt faster. The best limit has not been measured.
_MAX_UNCACHED_SUFFIX = 256
#: Rounding that takes longer is worth an option.
_LONG_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _LoadedNode:
    """An S-node whose weights are loaded."""

    config: NodeConfig
    settings: ApiSettings
    backend: Backend
    model: ServedModel
    exchange: ChosenExchange
    split: Split
    ranks: Ranks | None
    api: ApiProcesses | list[socket.socket]  # the processes that serve the API, or the sockets on which this one does
    secret: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How an S-node divides its cores and the memory of its device, and what it asks R-nodes for."""

    config: NodeConfig  # that of the node, with the rows of a step
    split: Split
    slots: int  # for states
    staged: int  # tokens of unfinished prompts whose K and V may be staged
    kv_bytes: int  # of KV pages on the device
    length: int  # tokens of the longest sequence that the model allows
    hello: Hello
    digest: str  # see model_digest


def serve_model(
    config: NodeConfig, settings: ApiSettings, backend: Backend, sockets: list[socket.socket], secret: bytes | None
) -> None:
    """Load the weights and serve the API on bound sockets until SIGTERM. Raises what run_s_node raises."""
    device = node_device(config)
    adapters = [read_adapter(name, directory) for name, directory in config.lora]
    dtype = choose_dtype(config.dtype, backend.config.dtype, device)
    split = split_machine(config, s_on_gpu=device.type != "cpu")
    set_threads(split.s_threads)
    if config.tensor_parallel > 1 and device.type != "cpu":
        raise ConfigError("--tensor-parallel is for S-Parts on CPUs: give --device cpu")
    with ExitStack() as stack:
        exchange = stack.enter_context(closing(node_exchange(config, device, split.mini_batches)))
        check_fits(config, backend, device, dtype)
        _check_vocabulary(settings.tokenizer, backend.config.vocab_size)
        _check_access(config, sockets)
        # They start while the weights are loaded, and the API's may run on all cpus, unlike the ranks.
        api = ApiProcesses(config, sockets) if config.api_processes else sockets
        ranks: Ranks | None = None
        if config.tensor_parallel > 1:
            ranks = stack.enter_context(closing(Ranks(config, backend.config.vocab_size)))
        model = _load(config, backend, device, dtype, adapters, calibration_tokens(settings.tokenizer), ranks)
        if device.type == "cpu" and (for_model := split.for_model(config, model.parameters)) is not split:
            split = for_model
            log.info("the S-Part of only %d parameters computes in one thread", model.parameters)
        set_threads(split.s_threads, model)
        if device.type != "cpu":  # a CPU has only the direct one
            log.info("exchange: %s", exchange)
        node = _LoadedNode(config, settings, backend, model, exchange, split, ranks, api, secret)
        uvloop.run(_serve(node))


async def _serve(node: _LoadedNode) -> None:
    """Open the links, and run the engine and the API over them until SIGTERM."""
    shutdown = asyncio.create_task(wait_for_shutdown())
    async with AsyncExitStack() as stack:
        if isinstance(node.api, ApiProcesses):
            stack.push_async_callback(node.api.close)
        choosing = await run_until(_choose_split(node), shutdown)
        if choosing.cancelled():
            return
        plan = await _plan_memory(node, choosing.result())
        r_nodes = await _start_r_nodes(node, plan, stack)
        opening = await run_until(r_nodes.open(), shutdown)
        if opening.cancelled():
            return
        engine = await _start_engine(node, plan, opening.result(), stack)
        prefill = await _take_prompts(node, plan, engine, stack)
        r_nodes.watch(engine)
        stack.callback(r_nodes.unwatch)
        stack.callback(asyncio.create_task(log_activity(lambda: engine.stats)).cancel)
        server = await _serve_api(node, engine, stack)
        freeze()
        greet(node.config, server.port, node.settings)
        await shutdown
        seconds = node.config.drain_seconds
        log.info("draining: running requests may go on for %.0f s; a second signal ends them now", seconds)
        await server.drain(seconds)
        if prefill is not None:
            await prefill.drain(seconds)
    log.info("S-node ended")


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Warn of tokens that are beyond the model's vocabulary. The engine will refuse a prompt with such a token."""
    if extra := tokenizer.tokens_from(vocab_size):
        examples = ", ".join(map(repr, extra[:3])) + (", ..." if len(extra) > 3 else "")
        log.warning(
            "the tokenizer has %d token(s) more than the model's %d; a prompt with one of them will be refused: %s",
            len(extra),
            vocab_size,
            examples,
        )


def _check_access(config: NodeConfig, sockets: Sequence[socket.socket]) -> None:
    """Warn of an API without keys that other machines reach."""
    addresses = [ipaddress.ip_address(sock.getsockname()[0].split("%")[0]) for sock in sockets]
    if config.api_key_file is None and not config.router_only and not all(a.is_loopback for a in addresses):
        log.warning(
            "whoever reaches %s:%d can use the API, because there is no --api-key-file", config.host, config.port
        )


def _load(
    config: NodeConfig,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    adapters: Sequence[Adapter],
    calibration: Sequence[int],
    ranks: Ranks | None,
) -> ServedModel:
    """Load and balance the weights, those of rank 0 if there are `ranks`. `calibration`: the tokens of a text."""
    fitted_to = None if config.no_calibration else calibration
    share = None if ranks is None else ranks.share
    log.info("loading the weights of %s", config.model)
    # The S-Part's thread is to be the only one with OpenMP threads.
    began = time.monotonic()
    model = in_own_thread(
        backend.load, device, dtype, True, config.weights, adapters, fitted_to, share, config.save_weights
    )
    if ranks is not None:
        ranks.wait_until_loaded()
    if config.save_weights is not None:
        log.info(
            "the rounded weights are in %s: --model with this directory takes them as they are", config.save_weights
        )
    elif config.weights in BITS and (seconds := time.monotonic() - began) > _LONG_SECONDS:
        log.info("rounding the weights took %.0f s%s", seconds, _how_to_save(backend, ranks))
    log.info(
        "%s is loaded by the %s backend: its weights take %s %s, activations are in %s",
        backend.config.architecture,
        backend.name,
        format_bytes(model.weight_bytes),
        "as stored" if config.weights == "auto" else f"in {config.weights}",
        torch_name(dtype),
    )
    if note := precision_note(config, backend, device, dtype):
        log.info("%s", note)
    in_own_thread(balance_for if ranks is None else ranks.balance, model, config.kv_dtype, calibration)
    return model


def _how_to_save(backend: Backend, ranks: Ranks | None) -> str:
    """How the next start is spared the rounding, if it can be."""
    if ranks is not None or backend.name != "native" or backend.source.gguf is not None:
        return ""
    return "; with --save-weights the next start reads them instead"


async def _choose_split(node: _LoadedNode) -> Split:
    """The split that a measurement chooses, where options leave it open. An S-Part on a GPU has the node's."""
    if node.model.device.type != "cpu":
        return node.split
    split = await choose_split(node.config, node.backend, node.model, node.split)
    set_threads(split.s_threads, node.model)
    return split


async def _plan_memory(node: _LoadedNode, split: Split) -> _Plan:
    """Divide the device's memory. Raises ConfigError."""
    model, shape, itemsize = node.model, node.backend.config, node.model.dtype.itemsize
    # The slots hold states of the whole model, of which each rank keeps its heads' part.
    slots = state_slots(node.config, shape, itemsize, free_memory(model.device), split.mini_batches)
    state_bytes = slots * shape.state_bytes(itemsize)
    if slots:
        log.info("the model's layers keep states: %s hold %d of them", format_bytes(state_bytes), slots)
    captures, seconds_of = node.exchange.bypass is not None, partial(prompt_seconds, node.backend, model)
    config, staged, kv_bytes = await asyncio.to_thread(
        plan_steps, with_gpu_kv(node.config, model), model, split.mini_batches, captures, seconds_of, state_bytes
    )
    length = config.max_model_len or shape.max_positions
    hello = _make_hello(config, model, split, length)
    return _Plan(
        config=config,
        split=split,
        slots=slots,
        staged=staged,
        kv_bytes=kv_bytes,
        length=length,
        hello=hello,
        digest=model_digest(node.backend.source.path, hello, balance_digest(model)),
    )


async def _start_r_nodes(node: _LoadedNode, plan: _Plan, stack: AsyncExitStack) -> RNodeLinks:
    """Take the device's memory for KV pages, and start the embedded R-node if the node uses no others. The links to
    R-nodes are yet to be opened."""
    config = plan.config
    resident = await asyncio.to_thread(open_gpu_kv, config, node.model, plan.hello, plan.kv_bytes)
    if resident is not None:
        resident.secret = node.secret
    embedded: EmbeddedRNode | None = None
    r_nodes: NodeSet
    if config.uses_r_nodes:
        r_nodes = r_node_set(config)
    else:
        embedded = EmbeddedRNode(config, plan.split)
        stack.push_async_callback(embedded.stop)
        await embedded.start()
        r_nodes = FixedSet((embedded.url,))
    links = RNodeLinks(r_nodes, plan.hello, node.secret, config, embedded, resident, node.ranks)
    stack.push_async_callback(links.close)
    return links


async def _start_engine(node: _LoadedNode, plan: _Plan, links: list[Link], stack: AsyncExitStack) -> Engine:
    """Start the engine over open links. `links` is the list that changes as R-nodes come and go."""
    config, model, exchange, ranks = plan.config, node.model, node.exchange, node.ranks
    log.info("%s", capacity(model.weight_bytes, model.device, links, plan.length, config.tensor_parallel))
    prefill_nodes: RemotePrefillNodes | None = None
    if config.prefill_at or config.prefill_file:
        prefill_nodes = RemotePrefillNodes(config.prefill_at, plan.digest, node.secret)
    if prefill_nodes is not None and config.prefill_file is not None:
        followed = FileSet(config.prefill_file, ("tcp",), may_be_empty=True)
        stack.callback(asyncio.create_task(prefill_nodes.follow(followed)).cancel)
    spart = node.backend.make_spart(model, links, exchange, plan.slots, None if ranks is None else ranks.followers)
    if exchange.bypass is not None:
        await asyncio.to_thread(exchange.bypass.prepare, spart, plan.split.mini_batches)
    ends = _end_tokens(node.settings.tokenizer, node.backend.config)
    seconds = {} if exchange.bypass is None else exchange.bypass.seconds
    options = _engine_options(config, plan.split, spart.model.device, plan.staged, plan.digest, ends, seconds)
    engine = Engine(spart, links, options, prefill_nodes=prefill_nodes)
    if engine.longest_sequence < engine.max_model_len:
        log.warning(
            "the KV-cache holds at most %d tokens of one sequence, fewer than the context of %d",
            engine.longest_sequence - 1,
            engine.max_model_len,
        )
    await engine.start()
    stack.push_async_callback(engine.stop)
    return engine


def _end_tokens(tokenizer: Tokenizer, model: AttentionShape) -> frozenset[int]:
    """The tokens that end a turn; says in the log which these are."""
    ends = end_of_turn(tokenizer, model.eos_token_ids, model.vocab_size)
    if ends:
        log.info("a turn ends at %s", ", ".join(f"{tokenizer.token_text(token)} ({token})" for token in sorted(ends)))
    else:
        log.warning("the model names no token that ends a turn, so only max_tokens and stop strings end one")
    return ends


async def _take_prompts(node: _LoadedNode, plan: _Plan, engine: Engine, stack: AsyncExitStack) -> PrefillServer | None:
    """Take the prompts of other S-nodes, if --prefill-listen says where."""
    if plan.config.prefill_listen is None:
        return None
    server = await PrefillServer.listen(plan.config.prefill_listen, PrefillWorker(engine), plan.digest, node.secret)
    stack.push_async_callback(server.close)
    log.info("prompts of other S-nodes are taken at %s", server.url)
    return server


async def _serve_api(node: _LoadedNode, engine: Engine, stack: AsyncExitStack) -> ApiProcesses | ApiServer:
    """Serve the API in its processes, or in this one."""
    settings = node.settings
    client = LocalEngine(engine, settings.tokenizer, settings.names[0])
    if isinstance(node.api, ApiProcesses):
        await node.api.serve(client)
        return node.api
    server = await serve(settings.app(client), node.api, tls=settings.tls)
    stack.push_async_callback(server.close)
    return server


def _make_hello(config: NodeConfig, model: ServedModel, split: Split, length: int) -> Hello:
    """The lease to ask R-nodes for. One that grows begins with room for a sequence of `length` tokens."""
    # A row of a sequence on the GPU whose first tokens lie on an R-node has two rows there.
    second_rows = config.max_batch_size if config.gpu_kv != 0 else 0
    hello = model.hello(
        n_slots=split.mini_batches + prompts_apart(model.device),
        max_rows=min(MAX_ROWS, config.step_rows + second_rows),
        kv_dtype=config.kv_dtype,
        kv_bytes=None if config.kv_lease is None else config.kv_lease // config.tensor_parallel,
        # As many sequences again may be kept: paused ones, and ended ones in the prefix cache.
        max_seqs=min(MAX_SEQS, 2 * split.mini_batches * config.max_batch_size),
    )
    if not _leases_grow(config):
        return hello
    first = first_lease(member_of(hello, 0, config.parts, config.team), length)
    return dataclasses.replace(hello, kv_bytes=first)


def _leases_grow(config: NodeConfig) -> bool:
    """An embedded R-node has no other S-node, so its whole memory is leased at once, like a lease of a given size."""
    return config.uses_r_nodes and config.kv_lease is None


def _engine_options(
    config: NodeConfig,
    split: Split,
    device: torch.device,
    staged: int,
    digest: str,
    end_token_ids: frozenset[int],
    s_part_seconds: Mapping[int, float],
) -> EngineOptions:
    """The options of an engine whose S-Part computes on `device`, where `staged` tokens of unfinished prompts may be
    staged. `digest`: see model_digest."""
    on_cpu = device.type == "cpu"
    limits = SchedulerLimits(
        mini_batches=split.mini_batches,
        max_batch_tokens=config.step_rows,
        max_batch_size=config.max_batch_size,
        max_staged_tokens=staged,
        strict_staging=not on_cpu,
        prompts_apart=prompts_apart(device),
    )
    return EngineOptions(
        limits,
        max_model_len=config.max_model_len,
        max_queued=config.max_queued,
        end_token_ids=end_token_ids,
        prefix_cache=not config.no_prefix_cache,
        max_uncached_suffix=None if on_cpu else _MAX_UNCACHED_SUFFIX,
        grow_leases=_leases_grow(config),
        schedule=config.schedule,
        target_tbt=config.target_tbt_ms / 1000 or None,
        guesses=guesses(config.speculate),
        gpu_slowdown=config.gpu_slowdown,
        s_part_seconds=s_part_seconds,
        patience=config.reconnect_seconds,
        kv_digest=digest if config.uses_r_nodes else None,  # an embedded R-node has no other S-node
    )


def greet(config: NodeConfig, port: int, settings: ApiSettings) -> None:
    """Announce the API's address and a command to try it."""
    asked = str(config.model)  # `chat`, where that is a name besides the model's own
    name = asked if asked in settings.names else settings.names[0]
    scheme = "http" if settings.tls is None else "https"
    url = f"{scheme}://{bracketed(config.host)}:{port}/v1"
    endpoint, ask = "completions", '"prompt": "It was a"'
    if settings.tokenizer.template_source():
        question = '{"role": "user", "content": "What is the capital of France?"}'
        endpoint, ask = "chat/completions", f'"messages": [{question}], "temperature": 0'
    command = (
        f". Try:\n  curl -N {url}/{endpoint} -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{name}", {ask}, "max_tokens": 100, "stream": true}}'"""
    )
    announce(log, config.log_format, f"Serving {name} on {url}", command)
