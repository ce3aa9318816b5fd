"""Whether a model can be served with the options given, and by which backend. It needs neither weights nor torch."""

from __future__ import annotations

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_checks import given
from fastdecode.daemon.kv_pages import KVPages
from fastdecode.daemon.option_values import ConfigError, format_bytes, mtp_drafts
from fastdecode.gguf.file import ModelSource
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.region.geometry import region_layout
from fastdecode.spart.backend import Backend, choose_backend
from fastdecode.spart.shape import AttentionShape
from fastdecode.transports.base import TransportError
from fastdecode.transports.team import check_parts
from fastdecode.transports.token_team import check_tokens


def node_backend(config: NodeConfig, source: ModelSource) -> Backend:
    """The backend that the options ask for, with the MTP head if they ask for it. Raises CheckpointError."""
    return choose_backend(config.backend, source).with_mtp(mtp_drafts(config.speculate))


def check_for_model(config: NodeConfig, backend: Backend) -> None:
    """Raise ConfigError for the first option that the model does not have or that is too large or small for it."""
    model = backend.config
    if (config.max_model_len or 0) > model.max_positions:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's {model.max_positions} positions"
        )
    _check_kv_dtype(config, model)
    _check_ranks(config, backend)
    _check_partition(config, model)
    _check_states(config, model)
    _check_kv_memory(config, backend)


def _check_kv_dtype(config: NodeConfig, model: AttentionShape) -> None:
    """Raise ConfigError if the KV-cache of the model cannot have the format of `--kv-dtype`."""
    if config.kv_dtype not in model.kv_dtypes:
        raise ConfigError(
            f"--kv-dtype {config.kv_dtype} is not supported for {model.architecture}, whose V is a part of K and is "
            f"stored with it: use one of {', '.join(model.kv_dtypes)}"
        )


def _check_ranks(config: NodeConfig, backend: Backend) -> None:
    """Raise ConfigError if the ranks of `--tensor-parallel` cannot share the model."""
    if config.tensor_parallel == 1:
        return
    if config.lora and backend.name == "transformers":
        raise ConfigError(
            f"--tensor-parallel and --lora are not supported together for {backend.config.architecture}, which runs by "
            "the transformers backend"
        )
    if reason := backend.why_not_shared(config.tensor_parallel):
        raise ConfigError(f"--tensor-parallel {config.tensor_parallel}: {reason}")


def _check_partition(config: NodeConfig, model: AttentionShape) -> None:
    """Raise ConfigError if R-nodes cannot share the model's heads or tokens as `--partition` says."""
    try:
        if config.partition == "tokens":
            check_tokens(model.windows, model.options)
        check_parts(map(model.heads_of, range(model.n_layers)), config.parts if config.partition == "heads" else 1)
    except TransportError as error:
        raise ConfigError(f"--partition {config.partition}: {error}") from None


def _check_states(config: NodeConfig, model: AttentionShape) -> None:
    """Raise ConfigError for an option that a model whose layers keep states does not have."""
    options = given(config, "prefill_at", "prefill_file", "prefill_listen")
    if options and model.state_bytes(1):
        raise ConfigError(
            f"{options[0]} is not supported for {model.architecture}: its layers keep states, which are not on R-nodes"
        )


def _check_kv_memory(config: NodeConfig, backend: Backend) -> None:
    """Raise ConfigError if --kv-memory or --kv-lease is too small for a block of a sequence."""
    model = backend.config
    geometry = model.hello_geometry(config.mini_batches or 1, config.step_rows, "fp32")
    block = KVPages(geometry, config.kv_dtype, model.windows, model.options).block_bytes // config.parts
    block = int(block * backend.kv_copies(config.tensor_parallel))
    for option, size, needed in (
        ("--kv-memory", config.kv_memory, block + region_layout(geometry).region_bytes),
        ("--kv-lease", config.kv_lease, block),
    ):
        if size is not None and size < needed:
            raise ConfigError(
                f"{option} {format_bytes(size)} is too small for {PAGE_TOKENS} tokens of {model.architecture} "
                f"({format_bytes(block)}): give {format_bytes(needed)} or more"
            )
