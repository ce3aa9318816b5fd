"""An API process: serves HTTP on sockets that the engine's process has bound, over the engine at another socket.

    python -m fastdecode.daemon.api_process FDS OPTIONS

FDS are the numbers of open sockets: first the one to the engine's process, then the listening ones. OPTIONS are the
S-node's. The process ends when the engine's process asks for it, or has ended.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys

import uvloop

from fastdecode.api.server import serve
from fastdecode.daemon.api_settings import ApiSettings
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.process import freeze, set_up_logging
from fastdecode.engine.state.request import NotReady
from fastdecode.gguf.file import ModelSource
from fastdecode.service.remote import RemoteEngine

log = logging.getLogger("fastdecode.daemon.api_process")  # __name__ is "__main__" here


def main() -> None:
    """Exit status: 0 if the engine's process asked for the end, 1 if it has ended by itself."""
    # A service manager sends these to all processes of the S-node. The engine's process says when the end has come.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    engine, *listening = (socket.socket(fileno=int(fd)) for fd in sys.argv[1].split(","))
    config = NodeConfig.from_args(sys.argv[2:])
    set_up_logging(config.log_level, config.log_format)
    settings = ApiSettings.make(config, ModelSource.open(config.model_path()))
    sys.exit(uvloop.run(_serve(settings, engine, listening)))


async def _serve(settings: ApiSettings, engine_socket: socket.socket, listening: list[socket.socket]) -> int:
    try:
        engine = await RemoteEngine.open(engine_socket)
    except NotReady:
        return 1  # the engine's process has ended before it was ready, and has said why
    try:
        server = await serve(settings.app(engine), listening, tls=settings.tls)
    except OSError as error:
        log.critical("%s", error)
        return 1
    freeze()
    engine.serving()
    seconds = await engine.drain_asked
    if seconds is None:
        level = logging.CRITICAL if engine.lost else logging.INFO
        lost = f"{engine.lost} choice{'' if engine.lost == 1 else 's'}"
        log.log(level, "the engine's process has ended, and with it %s; so does this API process", lost)
    else:
        await server.drain(seconds)
        engine.drained()
        await engine.close_asked.wait()
    await server.close()
    await engine.close()
    return 1 if seconds is None else 0


if __name__ == "__main__":
    main()
