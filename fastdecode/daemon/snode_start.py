"""The start of an S-node up to its weights: what the options name is opened, and R-nodes are asked whether they answer.

Importing torch takes seconds and reading weights up to minutes, so a wrong option shows before both.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastdecode.api.server import bind
from fastdecode.daemon.api_settings import ApiSettings
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.discovery import DiscoveryError, FileSet, r_node_set
from fastdecode.daemon.first_answers import first_answers
from fastdecode.daemon.model_checks import check_for_model, node_backend
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.process import wait_for_shutdown
from fastdecode.daemon.tasks import run_until
from fastdecode.spart.checkpoints.config_file import open_source
from fastdecode.transports import tcp
from fastdecode.transports.registry import probe


def run_s_node(config: NodeConfig) -> None:
    """Run an S-node until SIGTERM.

    Raises ConfigError, TransportError, OSError, RuntimeError, ValueError; the message is a sentence for the user.
    """
    source = open_source(config.model_path())
    secret = config.read_secret()
    settings = ApiSettings.make(config, source)
    with contextlib.ExitStack() as stack:
        sockets = bind(config.host, config.port)
        for sock in sockets:
            stack.callback(sock.close)
        backend = node_backend(config, source)
        check_for_model(config, backend)
        if not asyncio.run(_check_until_shutdown(config, secret)):
            return
        from fastdecode.daemon.snode import serve_model  # imports torch

        serve_model(config, settings, backend, sockets, secret)


async def _check_until_shutdown(config: NodeConfig, secret: bytes | None) -> bool:
    """True: the addresses are good; False: a signal has asked for the end. Raises what `_check_addresses` raises."""
    checking = await run_until(_check_addresses(config, secret), wait_for_shutdown())
    if checking.cancelled():
        return False
    checking.result()
    return True


async def _check_addresses(config: NodeConfig, secret: bytes | None) -> None:
    """Raise ConfigError or TransportError if the R-nodes do not answer, or if this node cannot listen for prompts."""
    if config.prefill_file is not None:
        try:
            await FileSet(config.prefill_file, ("tcp",), may_be_empty=True).read()
        except DiscoveryError as error:
            raise ConfigError(f"--prefill-file {error}") from None
    if config.prefill_listen is not None:
        host, port = tcp.parse(config.prefill_listen)
        sock, _ = await tcp.listen(config.prefill_listen, host, port, secret, False)
        sock.close()
    if config.uses_r_nodes:

        async def ask(url: str) -> None:
            for member in config.r_node if config.parts > 1 else (url.partition("#")[0],):
                await probe(member, secret)

        await first_answers(r_node_set(config), ask, config.connect_seconds)
