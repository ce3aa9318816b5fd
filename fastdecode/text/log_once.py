"""log_once: what one request shows about the model or its clients, said once and not for every request."""

from __future__ import annotations

import logging
from functools import lru_cache

_REMEMBERED = 256  # messages; an older one may be logged again


@lru_cache(_REMEMBERED)
def log_once(log: logging.Logger, message: str) -> None:
    """Log `message` at the level INFO, unless it has been logged already."""
    log.info("%s", message)
