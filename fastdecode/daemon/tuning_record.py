"""What a measurement of splits has found (tuning.py), remembered for a machine and a model in a file of its own.

The files lie in `$XDG_CACHE_HOME/fastdecode`, or in `~/.cache/fastdecode`. No fault of theirs keeps a node from
starting: without a record that can be read, the node measures again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec
import torch

from fastdecode import __version__
from fastdecode.daemon.check_model import parameters, weights_of
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import Split
from fastdecode.daemon.machine import cpu_model, usable_cpus
from fastdecode.kernels import _native
from fastdecode.spart.backend import Backend

log = logging.getLogger(__name__)

#: What the speed of a split depends on, by name.
Key = dict[str, str | int]


class Speed(msgspec.Struct, frozen=True):
    """The speed of a split."""

    split: Split
    tokens_per_s: float  # of many sequences
    one_sequence: float = msgspec.field(name="of_one")  # tokens a second

    def __str__(self) -> str:
        return f"{self.split}: {self.tokens_per_s:.4g} tokens/s, {self.one_sequence:.4g} with one sequence"


class Record(msgspec.Struct, frozen=True):
    """The speeds of all splits that were measured, that of the chosen one first."""

    key: Key
    date: str  # YYYY-MM-DD
    batch: int  # sequences that decoded
    context: int  # cached tokens of each
    speeds: list[Speed]

    def __str__(self) -> str:
        return f"{'; '.join(map(str, self.speeds))} ({self.batch} sequences of {self.context} tokens)"


def record_key(config: NodeConfig, backend: Backend, dtype: torch.dtype) -> Key:
    """The key of a model on this machine's CPU, which is known before the weights are loaded. `dtype` is that of the
    activations."""
    model, name = backend.config, str(dtype).removeprefix("torch.")
    return {
        "fastdecode": __version__,
        "torch": str(torch.__version__),
        "cpu": cpu_model(),
        "cpus": len(usable_cpus()),
        "isa": os.environ.get("FASTDECODE_ISA") or _native.isa_best(),
        "model": f"{model.architecture} by the {backend.name} backend",
        "parameters": parameters(backend),
        "attention": repr(model.hello_geometry(1, 1, "fp32")),
        "weights": weights_of(config, backend, torch.device("cpu"), name)[1],
        "dtype": name,
        "kv_dtype": config.kv_dtype,
        "max_batch_size": config.max_batch_size,
        "huge_pages": config.huge_pages,
        "spin_us": -1 if config.spin_us is None else config.spin_us,
    }


def recall(key: Key) -> Record | None:
    """The record with this key; None if there is none that can be read."""
    try:
        path = _path(key)
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        if record.key != key or not record.speeds:
            raise ValueError(f"{path} is the record of another model or machine")
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError) as error:
        log.debug("no remembered split: %s", error)
        return None
    return record


def remember(record: Record) -> None:
    """Write the record, in place of an older one with the same key, or log why that cannot be done."""
    try:
        path = _path(record.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several S-nodes may write the same record at once, so each writes a file of its own and renames it.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".split-", delete=False) as file:
            try:
                file.write(msgspec.json.format(msgspec.json.encode(record)))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except (OSError, RuntimeError) as error:
        log.debug("the split is not remembered: %s", error)


def _path(key: Key) -> Path:
    """The file of a record. Raises RuntimeError without a home directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not cache.is_absolute():  # the XDG specification says to ignore such a value
        cache = Path.home() / ".cache"
    digest = hashlib.blake2b(repr(sorted(key.items())).encode(), digest_size=8).hexdigest()
    return cache / "fastdecode" / f"split-{digest}.json"
