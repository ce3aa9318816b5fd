"""TLS of the API and of routers, from the files that options name."""

from __future__ import annotations

import ssl
from pathlib import Path

from fastdecode.daemon.option_values import ConfigError


def server_tls(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """The context of a server with --ssl-certfile and --ssl-keyfile; None without a certificate. Raises ConfigError."""
    if certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as error:
        reason = _reason(error, "a certificate chain and its private key, both in PEM")
        files = f"--ssl-certfile {certfile}, --ssl-keyfile {keyfile or certfile}"
        raise ConfigError(f"{files}: {reason}") from None
    return context


def client_tls(ca: Path | None) -> ssl.SSLContext:
    """The context with which S-nodes are asked over TLS: their certificates must be signed by one in the file `ca`, or
    without a file by one that this machine trusts. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(f"--s-node-ca {ca}: {_reason(error, 'certificates in PEM')}") from None


def _reason(error: OSError, wanted: str) -> str:
    """Why files could not be read, or are not what is `wanted`."""
    if not isinstance(error, ssl.SSLError):
        return str(error.strerror)
    return f"not {wanted}" + (f" ({error.reason})" if error.reason else "")
