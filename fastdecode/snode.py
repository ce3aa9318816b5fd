"""The S-node: loads the model, opens its links, runs the engine and serves the API until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys

import torch
import uvloop

from fastdecode.api.server import make_app, serve
from fastdecode.config import NodeConfig
from fastdecode.demo import model_dir
from fastdecode.embedded import EmbeddedRNode, Split, split_machine
from fastdecode.engine.engine import Engine
from fastdecode.machine import usable_cpus
from fastdecode.node import until_told_to_end
from fastdecode.spart import Model, SPart, choose_device, choose_dtype, load_model
from fastdecode.tokenizer import Tokenizer
from fastdecode.transports.base import PAGE_TOKENS, Hello, Link, TransportError
from fastdecode.transports.registry import connect

log = logging.getLogger(__name__)

_RECONNECT_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)


def run_s_node(config: NodeConfig) -> None:
    """Run until SIGTERM. Raises ConfigError, TransportError, OSError, RuntimeError with a sentence for the user."""
    directory = config.model or model_dir()
    secret, api_key = config.read_secret(), config.read_api_key()
    device = choose_device(config.device)
    split = split_machine(config, s_on_gpu=device.type == "cuda")
    torch.set_num_threads(config.s_threads or (len(usable_cpus()) if config.r_node else split.s_threads))
    dtype = choose_dtype(config.dtype, directory, device)
    tokenizer = Tokenizer.from_dir(directory)  # before the weights: a mistake in it shows at once
    model = load_model(directory, device=device, dtype=dtype, progress=sys.stderr.isatty())
    name = config.served_model_name or ("fastdecode-demo" if config.model is None else directory.resolve().name)
    uvloop.run(_serve(config, name, model, tokenizer, split, secret, api_key))


async def _serve(
    config: NodeConfig,
    name: str,
    model: Model,
    tokenizer: Tokenizer,
    split: Split,
    secret: bytes | None,
    api_key: str | None,
) -> None:
    told = asyncio.create_task(until_told_to_end())
    hello = model.hello(
        n_slots=config.mini_batches,
        max_rows=config.max_batch_tokens,
        kv_dtype=config.kv_dtype,
        kv_bytes=config.kv_lease,
        max_seqs=config.mini_batches * config.max_batch_size,
    )
    async with contextlib.AsyncExitStack() as stack:
        urls = config.r_node
        node = None
        if not urls:
            node = await EmbeddedRNode.start(config, split)
            stack.push_async_callback(node.stop)
            urls = (node.url,)
        links = [await _open(stack, url, hello, secret, config) for url in urls]
        if node:
            node.hide()
        engine = Engine(
            SPart(model, links),
            links,
            max_model_len=config.max_model_len,
            mini_batches=config.mini_batches,
            max_batch_size=config.max_batch_size,
            max_batch_tokens=config.max_batch_tokens,
            max_queued=config.max_queued,
        )
        await engine.start()
        stack.push_async_callback(engine.stop)
        for index, link in enumerate(links):
            watch = asyncio.create_task(_reconnect(stack, engine, index, link, hello, secret, config))
            watch.add_done_callback(_log_failure)
            stack.callback(watch.cancel)
        site = await serve(make_app(engine, tokenizer, name, api_key=api_key), config.host, config.port)
        stack.push_async_callback(site.close)
        _greet(config.host, site.port, name)
        await told
        log.info("draining: running requests may go on for %.0f s", config.drain_seconds)
        await engine.drain(config.drain_seconds)
    log.info("S-node ended")


async def _open(
    stack: contextlib.AsyncExitStack, url: str, hello: Hello, secret: bytes | None, config: NodeConfig
) -> Link:
    link = await connect(url, hello, secret, spin_us=config.spin_us)
    stack.push_async_callback(link.close)
    lease = link.lease
    tokens = lease.n_pages * PAGE_TOKENS
    log.info(
        "R-node %s: %s, %d thread(s), room for %d tokens of %s KV-cache",
        url,
        lease.isa,
        lease.threads,
        tokens,
        config.kv_dtype,
    )
    return link


async def _reconnect(
    stack: contextlib.AsyncExitStack,
    engine: Engine,
    index: int,
    link: Link,
    hello: Hello,
    secret: bytes | None,
    config: NodeConfig,
) -> None:
    """Watch one R-node; when its link dies, try again with growing pauses until it is back."""
    while await link.closed():
        for pause in itertools.chain(_RECONNECT_SECONDS, itertools.repeat(_RECONNECT_SECONDS[-1])):
            await asyncio.sleep(pause)
            try:
                link = await _open(stack, link.url, hello, secret, config)
            except (TransportError, OSError) as reason:
                log.debug("R-node %s: %s", link.url, reason)
                continue
            engine.replace_link(index, link)
            log.info("R-node %s is back", link.url)
            break


def _log_failure(task: asyncio.Task) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("an R-node is no longer watched", exc_info=error)


def _greet(host: str, port: int, name: str) -> None:
    """Say where the API is and how to try it."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    print(
        f"Serving {name} on {url}. Try:\n"
        f"  curl -N {url}/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{name}", "prompt": "It was a", "max_tokens": 100, "stream": true}}'""",
        flush=True,
    )
