"""The exchange that a node's options ask for."""

from __future__ import annotations

import torch

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.option_values import ConfigError
from fastdecode.spart.exchange.choice import BypassImpossible, Choice, choose_exchange

#: Microseconds that the proxy of a bypass spins, without --spin-us. A GPU takes hundreds of them for its part of a
#: layer, and a nap would come on top. The best number has not been measured.
_PROXY_SPIN_US = 2000


def node_exchange(config: NodeConfig, device: torch.device, mini_batches: int) -> Choice:
    """The exchange for --exchange. Raises ConfigError if that one cannot be used."""
    spin_us = _PROXY_SPIN_US if config.spin_us is None else config.spin_us
    try:
        return choose_exchange(
            config.exchange,
            device,
            mini_batches,
            config.max_batch_size,
            spin_us,
            whole_rows=config.parts == 1,
        )
    except BypassImpossible as error:
        raise ConfigError(f"--exchange {config.exchange}: {error}") from None
