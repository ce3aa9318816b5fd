"""The R-engine's exceptions as answers to a peer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastdecode.region.contract import Status
from fastdecode.transports.base import CallRefused


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn the R-engine's exceptions into CallRefused."""
    try:
        yield
    except ValueError as error:
        raise CallRefused(Status.BAD_SEQUENCE, str(error)) from None
    except MemoryError as error:
        raise CallRefused(Status.OUT_OF_PAGES, str(error)) from None
    except RuntimeError as error:
        raise CallRefused(Status.LINK_CLOSED, str(error)) from None
