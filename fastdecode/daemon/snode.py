"""The S-node: loads the model, opens its links, runs the engine and serves the API until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from typing import TYPE_CHECKING

import torch
import uvloop

from fastdecode.api.server import bind, make_app, serve
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode, Split, split_machine
from fastdecode.daemon.rnode_links import RNodeLinks
from fastdecode.daemon.shutdown import wait_for_shutdown
from fastdecode.demo import model_dir
from fastdecode.engine.engine import Engine
from fastdecode.spart import Model, ModelConfig, choose_device, choose_dtype
from fastdecode.spart.backend import Backend, choose_backend
from fastdecode.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastdecode.spart.hf.config import HFConfig
    from fastdecode.spart.hf.model import HFModel

log = logging.getLogger(__name__)

#: A GPU computes a prompt anew sooner than R-nodes attend to a long rest of one. Where the balance is, is not measured.
_MAX_UNCACHED_SUFFIX = 256


def run_s_node(config: NodeConfig) -> None:
    """Run until SIGTERM. Raises ConfigError, TransportError, OSError, RuntimeError with a sentence for the user."""
    directory = config.model or model_dir()
    secret, api_key = config.read_secret(), config.read_api_key()
    device = choose_device(config.device)
    split = split_machine(config, s_on_gpu=device.type == "cuda")
    torch.set_num_threads(split.s_threads)
    backend = choose_backend(config.backend, directory)
    dtype = choose_dtype(config.dtype, backend.config.dtype, device)
    # Before the weights, which take their time: a mistake shows at once.
    sockets = bind(config.host, config.port)
    tokenizer = Tokenizer.from_dir(directory)
    _check_vocabulary(tokenizer, backend.config)
    model = backend.load(device, dtype, progress=sys.stderr.isatty())
    log.info("%s by the %s backend, %s", backend.config.architecture, backend.name, str(dtype).removeprefix("torch."))
    name = config.served_model_name or ("fastdecode-demo" if config.model is None else directory.resolve().name)
    uvloop.run(_serve(config, name, backend, model, tokenizer, sockets, split, secret, api_key))


def _check_vocabulary(tokenizer: Tokenizer, model: ModelConfig | HFConfig) -> None:
    """Tokens that the model has not: a prompt with one of them is refused, which is no reason not to start."""
    if beyond := tokenizer.tokens_from(model.vocab_size):
        some = ", ".join(map(repr, beyond[:3])) + (", ..." if len(beyond) > 3 else "")
        log.warning(
            "the tokenizer has %d token(s) more than the model's %d; a prompt that holds one will be refused: %s",
            len(beyond),
            model.vocab_size,
            some,
        )


async def _serve(
    config: NodeConfig,
    name: str,
    backend: Backend,
    model: Model | HFModel,
    tokenizer: Tokenizer,
    sockets: list[socket.socket],
    split: Split,
    secret: bytes | None,
    api_key: str | None,
) -> None:
    told = asyncio.create_task(wait_for_shutdown())
    hello = model.hello(
        n_slots=split.mini_batches,
        max_rows=config.max_batch_tokens,
        kv_dtype=config.kv_dtype,
        kv_bytes=config.kv_lease,
        # As many again may have ended and be kept for their prefixes.
        max_seqs=split.mini_batches * config.max_batch_size * (1 if config.no_prefix_cache else 2),
    )
    async with contextlib.AsyncExitStack() as stack:
        embedded = None
        if not config.r_node:
            embedded = EmbeddedRNode(config, split)
            stack.push_async_callback(embedded.stop)
            await embedded.start()
        r_nodes = RNodeLinks(config.r_node or (embedded.url,), hello, secret, config, embedded)
        stack.push_async_callback(r_nodes.close)
        opening = asyncio.create_task(r_nodes.open())
        stack.callback(opening.cancel)
        await asyncio.wait([opening, told], return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            return
        links = opening.result()
        engine = Engine(
            backend.make_spart(model, links),
            links,
            max_model_len=config.max_model_len,
            mini_batches=split.mini_batches,
            max_batch_size=config.max_batch_size,
            max_batch_tokens=config.max_batch_tokens,
            max_queued=config.max_queued,
            prefix_cache=not config.no_prefix_cache,
            max_uncached_suffix=None if model.device.type == "cpu" else _MAX_UNCACHED_SUFFIX,
        )
        await engine.start()
        stack.push_async_callback(engine.stop)
        r_nodes.watch(engine)
        stack.callback(r_nodes.unwatch)
        site = await serve(make_app(engine, tokenizer, name, api_key=api_key), sockets)
        stack.push_async_callback(site.close)
        _greet(config.host, site.port, name)
        await told
        log.info("draining: running requests may go on for %.0f s", config.drain_seconds)
        await engine.drain(config.drain_seconds)
    log.info("S-node ended")


def _greet(host: str, port: int, name: str) -> None:
    """Say where the API is and how to try it."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    print(
        f"Serving {name} on {url}. Try:\n"
        f"  curl -N {url}/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{name}", "prompt": "It was a", "max_tokens": 100, "stream": true}}'""",
        flush=True,
    )
