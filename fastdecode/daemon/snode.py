"""The S-node once its options are checked: load the model, open the links, run the engine and serve the API."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from fastdecode.api.server import ApiServer, serve
from fastdecode.daemon.api_processes import ApiProcesses
from fastdecode.daemon.check_model import check_fits, precision_note
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
from fastdecode.daemon.embedded import EmbeddedRNode, Split, split_machine
from fastdecode.daemon.option_values import ConfigError, format_bytes, guesses
from fastdecode.daemon.prefill_nodes import PrefillServer, RemotePrefillNodes, model_digest
from fastdecode.daemon.process import announce, freeze, wait_for_shutdown
from fastdecode.daemon.ranks import Ranks
from fastdecode.daemon.rnode_links import RNodeLinks, first_lease
from fastdecode.daemon.serving import ApiSettings
from fastdecode.daemon.tuning import choose_split
from fastdecode.engine.engine import Engine
from fastdecode.engine.migration.prefill_worker import PrefillWorker
from fastdecode.engine.stats import EngineStats
from fastdecode.region.contract import MAX_ROWS, MAX_SEQS
from fastdecode.service.local import LocalEngine
from fastdecode.spart import Model, ModelConfig, SPart, choose_dtype
from fastdecode.spart.backend import Backend
from fastdecode.spart.exchange.chosen import ChosenExchange
from fastdecode.spart.int4.balance import balance_digest, balance_for
from fastdecode.spart.lora.files import read_adapter
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.threads import set_threads
from fastdecode.text.calibration import calibration_tokens
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.text.turn_end import end_of_turn
from fastdecode.transports.base import Hello, Link
from fastdecode.transports.partition import member_of

if TYPE_CHECKING:
    from fastdecode.spart.hf.config import HFConfig
    from fastdecode.spart.hf.model import HFModel

log = logging.getLogger(__name__)

#: With the S-Part on a GPU, a prompt starts from the prefix cache only if its uncached suffix is at most this long. The
#: S-node computes the attention of a whole prompt itself, but R-nodes attend for the uncached suffix of a shared
#: prompt. For a long suffix, a GPU should compute the whole prompt faster. The best limit has not been measured.
_MAX_UNCACHED_SUFFIX = 256
_ACTIVITY_SECONDS = 10.0  # between two lines of the log about the work


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
    with contextlib.ExitStack() as stack:
        exchange = stack.enter_context(contextlib.closing(node_exchange(config, device, split.mini_batches)))
        check_fits(config, backend, device, str(dtype).removeprefix("torch."))
        _check_vocabulary(settings.tokenizer, backend.config)
        if config.api_key_file is None and not config.router_only and any(map(_is_reachable, sockets)):
            log.warning(
                "whoever reaches %s:%d can use the API, because there is no --api-key-file", config.host, config.port
            )
        # They start while the weights are loaded, and the API's may run on all cpus, unlike the ranks.
        api_processes = ApiProcesses(config, sockets) if config.api_processes else None
        ranks: Ranks | None = None
        if config.tensor_parallel > 1:
            ranks = stack.enter_context(contextlib.closing(Ranks(config, backend.config.vocab_size)))
        share = None if ranks is None else ranks.share
        calibration = calibration_tokens(settings.tokenizer)
        fitted_to = None if config.no_calibration else calibration
        # The S-Part's thread is to be the only one with OpenMP threads.
        progress = sys.stderr.isatty()
        log.info("loading the weights of %s", config.model)
        model = in_own_thread(backend.load, device, dtype, progress, config.weights, adapters, fitted_to, share)
        if ranks is not None:
            ranks.wait_until_loaded()
        log.info(
            "%s by the %s backend, %s in %s, activations in %s",
            backend.config.architecture,
            backend.name,
            format_bytes(model.weight_bytes),
            "weights as stored" if config.weights == "auto" else f"{config.weights} weights",
            str(dtype).removeprefix("torch."),
        )
        if note := precision_note(config, backend, device, dtype):
            log.info("%s", note)
        if device.type == "cpu" and (for_model := split.for_model(config, model.parameters)) is not split:
            split = for_model
            log.info("the S-Part of only %d parameters computes in one thread", model.parameters)
        if ranks is None:
            in_own_thread(balance_for, model, config.kv_dtype, calibration)
        else:
            in_own_thread(ranks.balance, model, config.kv_dtype, calibration)
        set_threads(split.s_threads, model)
        log.info("exchange: %s", exchange)
        uvloop.run(_serve(config, settings, backend, model, exchange, api_processes or sockets, split, secret, ranks))


def _is_reachable(sock: socket.socket) -> bool:
    """Whether other machines reach what listens at a socket."""
    return not ipaddress.ip_address(sock.getsockname()[0].split("%")[0]).is_loopback


def _check_vocabulary(tokenizer: Tokenizer, model: ModelConfig | HFConfig) -> None:
    """Warn of tokens that are beyond the model's vocabulary. The engine will refuse a prompt with such a token."""
    if extra := tokenizer.tokens_from(model.vocab_size):
        examples = ", ".join(map(repr, extra[:3])) + (", ..." if len(extra) > 3 else "")
        log.warning(
            "the tokenizer has %d token(s) more than the model's %d; a prompt with one of them will be refused: %s",
            len(extra),
            model.vocab_size,
            examples,
        )


def _end_tokens(tokenizer: Tokenizer, model: ModelConfig | HFConfig) -> frozenset[int]:
    """The tokens that end a turn; says in the log which these are."""
    ends = end_of_turn(tokenizer, model.eos_token_ids, model.vocab_size)
    if ends:
        log.info("a turn ends at %s", ", ".join(f"{tokenizer.token_text(token)} ({token})" for token in sorted(ends)))
    else:
        log.warning("the model names no token that ends a turn, so only max_tokens and stop strings end one")
    return ends


async def _serve(
    config: NodeConfig,
    settings: ApiSettings,
    backend: Backend,
    model: Model | HFModel,
    exchange: ChosenExchange,
    api: ApiProcesses | list[socket.socket],
    split: Split,
    secret: bytes | None,
    ranks: Ranks | None,
) -> None:
    """Run the engine, and the API in its processes, or in this one on bound sockets."""
    shutdown = asyncio.create_task(wait_for_shutdown())
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(api, ApiProcesses):
            stack.push_async_callback(api.close)
        if model.device.type == "cpu":
            choosing = asyncio.create_task(choose_split(config, backend, model, split))
            await asyncio.wait([choosing, shutdown], return_when=asyncio.FIRST_COMPLETED)
            if not choosing.done():
                choosing.cancel()
                await asyncio.wait([choosing])  # its R-nodes end
                return
            split = choosing.result()
            set_threads(split.s_threads, model)
        itemsize = model.dtype.itemsize
        # The slots hold states of the whole model, of which each rank keeps its heads' part.
        slots = state_slots(config, backend.config, itemsize, free_memory(model.device), split.mini_batches)
        state_bytes = slots * backend.config.state_bytes(itemsize)
        if slots:
            log.info(
                "the model's layers keep states: %s hold %d of them",
                format_bytes(state_bytes),
                slots,
            )
        captures, seconds_of = exchange.bypass is not None, partial(prompt_seconds, backend, model)
        config, staged, kv_bytes = await asyncio.to_thread(
            plan_steps, with_gpu_kv(config, model), model, split.mini_batches, captures, seconds_of, state_bytes
        )
        length = config.max_model_len or backend.config.max_positions
        hello = _make_hello(config, model, split, length)
        resident = await asyncio.to_thread(open_gpu_kv, config, model, hello, kv_bytes)
        if resident is not None:
            resident.secret = secret
        embedded: EmbeddedRNode | None = None
        r_nodes: NodeSet
        if config.uses_r_nodes:
            r_nodes = r_node_set(config)
        else:
            embedded = EmbeddedRNode(config, split)
            stack.push_async_callback(embedded.stop)
            await embedded.start()
            r_nodes = FixedSet((embedded.url,))
        first: list[Link] = [] if resident is None else [resident]
        r_node_links = RNodeLinks(r_nodes, hello, secret, config, embedded, first_position=len(first), ranks=ranks)
        stack.push_async_callback(r_node_links.close)
        opening = asyncio.create_task(r_node_links.open())
        stack.callback(opening.cancel)
        await asyncio.wait([opening, shutdown], return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            return
        links = opening.result()  # which the S-Part changes; a copy would keep the regions of lost links mapped
        links[:0] = first
        digest = model_digest(backend.source.path, hello, balance_digest(model))
        log.info("%s", capacity(model.weight_bytes, model.device, links, length, config.tensor_parallel))
        prefill_nodes: RemotePrefillNodes | None = None
        if config.prefill_at or config.prefill_file:
            prefill_nodes = RemotePrefillNodes(config.prefill_at, digest, secret)
        if prefill_nodes is not None and config.prefill_file is not None:
            followed = FileSet(config.prefill_file, ("tcp",), may_be_empty=True)
            stack.callback(asyncio.create_task(prefill_nodes.follow(followed)).cancel)
        spart = backend.make_spart(model, links, exchange, slots, None if ranks is None else ranks.followers)
        if exchange.bypass is not None:
            await asyncio.to_thread(exchange.bypass.prepare, spart, split.mini_batches)
        ends = _end_tokens(settings.tokenizer, backend.config)
        seconds = {} if exchange.bypass is None else exchange.bypass.seconds
        engine = _make_engine(config, spart, split, staged, prefill_nodes, digest, ends, seconds)
        if engine.longest_sequence < engine.max_model_len:
            log.warning(
                "the KV-cache holds at most %d tokens of one sequence, fewer than the context of %d",
                engine.longest_sequence - 1,
                engine.max_model_len,
            )
        await engine.start()
        stack.push_async_callback(engine.stop)
        prefill: PrefillServer | None = None
        if config.prefill_listen is not None:
            prefill = await PrefillServer.listen(config.prefill_listen, PrefillWorker(engine), digest, secret)
            stack.push_async_callback(prefill.close)
            log.info("prompts of other S-nodes are taken at %s", prefill.url)
        r_node_links.watch(engine)
        stack.callback(r_node_links.unwatch)
        stack.callback(asyncio.create_task(log_activity(lambda: engine.stats)).cancel)
        client = LocalEngine(engine, settings.tokenizer, settings.names[0])
        server: ApiProcesses | ApiServer
        if isinstance(api, ApiProcesses):
            server = api
            await server.serve(client)
        else:
            server = await serve(settings.app(client), api, tls=settings.tls)
        stack.push_async_callback(server.close)
        freeze()
        _greet(config, server.port, settings)
        await shutdown
        log.info("draining: running requests may go on for %.0f s", config.drain_seconds)
        await server.drain(config.drain_seconds)
        if prefill is not None:
            await prefill.drain(config.drain_seconds)
    log.info("S-node ended")


def _make_hello(config: NodeConfig, model: Model | HFModel, split: Split, length: int) -> Hello:
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


def _make_engine(
    config: NodeConfig,
    spart: SPart,
    split: Split,
    staged: int,
    prefill_nodes: RemotePrefillNodes | None,
    digest: str,
    end_token_ids: frozenset[int],
    s_part_seconds: Mapping[int, float],
) -> Engine:
    """The engine over an S-Part and its links, in which `staged` tokens of unfinished prompts may be staged. `digest`:
    see model_digest. `s_part_seconds`: see SPartForecast."""
    on_cpu = spart.model.device.type == "cpu"
    return Engine(
        spart,
        spart.links,
        max_model_len=config.max_model_len,
        mini_batches=split.mini_batches,
        max_batch_size=config.max_batch_size,
        max_batch_tokens=config.step_rows,
        max_queued=config.max_queued,
        max_staged_tokens=staged,
        strict_staging=not on_cpu,
        prompts_apart=prompts_apart(spart.model.device),
        target_tbt=config.target_tbt_ms / 1000 or None,
        schedule=config.schedule,
        guesses=guesses(config.speculate),
        gpu_slowdown=config.gpu_slowdown,
        s_part_seconds=s_part_seconds,
        prefix_cache=not config.no_prefix_cache,
        max_uncached_suffix=None if on_cpu else _MAX_UNCACHED_SUFFIX,
        grow_leases=_leases_grow(config),
        patience=config.reconnect_seconds,
        prefill_nodes=prefill_nodes,
        kv_digest=digest if config.uses_r_nodes else None,  # an embedded R-node has no other S-node
        end_token_ids=end_token_ids,
    )


async def log_activity(count: Callable[[], EngineStats], interval: float = _ACTIVITY_SECONDS) -> None:
    """Log a line every `interval` seconds in which tokens were computed or requests wait, so that an operator sees what
    happens without a dashboard. `count` returns the engine's statistics. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    since, before = loop.time(), _tokens(count())
    while True:
        await asyncio.sleep(interval)
        now, stats = loop.time(), count()
        tokens = _tokens(stats)
        if tokens != before or stats.running or stats.waiting:
            prompt, generated, looked_up, found = (b - a for a, b in zip(before, tokens, strict=True))
            log.info("%s", _line(stats, prompt / (now - since), generated / (now - since), looked_up, found))
        since, before = now, tokens


def _tokens(stats: EngineStats) -> tuple[int, int, int, int]:
    t = stats.totals
    return t.prompt_tokens, t.generated_tokens, t.prefix_queries, t.prefix_hits


def _line(stats: EngineStats, prompt_rate: float, generated_rate: float, looked_up: int, found: int) -> str:
    kv = ", ".join(
        f"{node.url} {100 * node.pages_used / max(1, node.pages_max):.0f} %" if node.alive else f"{node.url} lost"
        for node in stats.nodes
    )
    prefix = f", prefix cache {100 * found / looked_up:.0f} % of prompt tokens" if looked_up else ""
    return (
        f"{stats.running} running, {stats.waiting} waiting; {prompt_rate:.0f} prompt and {generated_rate:.0f} output "
        f"tokens/s{prefix}; KV in use: {kv}"
    )


def _greet(config: NodeConfig, port: int, settings: ApiSettings) -> None:
    """Announce the API's address and a command to try it."""
    name, scheme = settings.names[0], "http" if settings.tls is None else "https"
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
