"""A checkpoint loaded by transformers' own loader, and split at its attention."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastdecode.spart.checkpoints.config import CheckpointError, first_line
from fastdecode.spart.checkpoints.tensors import FLOATS, require_finite, stored_tensors
from fastdecode.spart.hf.attention import ATTENTION, register, split_attention
from fastdecode.spart.hf.config import HFConfig, read_configs
from fastdecode.spart.hf.interface import implementation, use_attention
from fastdecode.spart.hf.linears import quantise_embedding, replace_linears, replaced_bytes
from fastdecode.spart.hf.lora import adapt_linears, adaptable_linears
from fastdecode.spart.hf.mixers import Mixer, install
from fastdecode.spart.hf.mtp import MTPHead, with_head_modules
from fastdecode.spart.hf.ranks import CannotShare, StoredNames, cut_head, meet, with_cut_matrices
from fastdecode.spart.hf.row_ops import use_row_ops
from fastdecode.spart.linears.dense import can_pack
from fastdecode.spart.linears.quantised import BITS
from fastdecode.spart.lora.adapters import AdapterSet
from fastdecode.spart.lora.files import Adapter
from fastdecode.spart.ranks.reduction import Reduction
from fastdecode.spart.ranks.share import Share
from fastdecode.spart.served import TORCH_DTYPES, ServedModel, with_sinks

log = logging.getLogger(__name__)

#: What the names of the tensors of a model of several modes become, so that its text part is a model of its own.
_TEXT_PART_NAMES = {
    r"^language_model\.(?=lm_head)": "",
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
}


@dataclass(slots=True, kw_only=True)
class HFModel(ServedModel):
    """A loaded model. `module` is transformers' own."""

    config: HFConfig
    module: Any
    head: MTPHead | None = None
    reduction: Reduction | None = None  # sums over the ranks that share the model

    @property
    def all_logits(self) -> bool:
        """True: some models compute the logits of all rows in any case, the others where a prompt is scored."""
        return True

    @property
    def widths(self) -> tuple[int, int]:
        """See ServedModel; the widest row is that of a linear, so experts that are kept in one tensor are not seen."""
        hidden = self.module.get_input_embeddings().weight.shape[1]
        head = self.module.get_output_embeddings()
        linears = (m for m in self.module.modules() if hasattr(m, "out_features") and m is not head)
        return hidden, max([hidden, *(2 * max(m.in_features, m.out_features) for m in linears)])


def load_hf_model(
    directory: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    progress: bool = False,
    weights: str = "auto",
    adapters: Sequence[Adapter] = (),
    mtp: int = 0,
    share: Share | None = None,
) -> HFModel:
    """Load a checkpoint for inference. The arguments are those of spart.loader.load_model. Raises CheckpointError."""
    directory, device = Path(directory), torch.device(device)
    config, generation = read_configs(directory, mtp)
    split = HFConfig.from_configs(config, generation, mtp, 1 if share is None else share.n)
    if isinstance(dtype, str):
        dtype = TORCH_DTYPES[split.dtype if dtype == "auto" else dtype]
    model_class = _model_class(config, mtp)
    _log_little(progress)
    _check_tensors(model_class, config, directory)
    adapter_set = AdapterSet(adapters)
    if adapters:
        adapter_set.check(adaptable_linears(config, split.mixers))
    whole = None if share is None else _without_weights(model_class, config)
    module = _read_weights(directory, model_class, config, device, dtype, whole, share)
    _split(module, split.mixers)
    parameters = sum(parameter.numel() for parameter in (whole or module).parameters())
    with torch.inference_mode():
        _replace_matrices(module, split.mixers, BITS.get(weights), device, dtype, share)
        change_bytes = adapt_linears(module, adapter_set, device, dtype)
        if device.type == "cpu":
            use_row_ops(module, dtype)
    rest = sum(p.nbytes for p in module.parameters() if p.device.type != "meta")
    weight_bytes = replaced_bytes(module) + rest + change_bytes
    if share is not None:
        meet(module, whole, share)
    return HFModel(
        config=_with_sinks(split, module),
        module=module,
        device=device,
        dtype=dtype,
        parameters=parameters,
        weight_bytes=weight_bytes,
        reduction=None if share is None else share.reduction,
        adapters=adapter_set.names,
        head=MTPHead(module) if mtp else None,
    )


def _read_weights(
    directory: Path,
    model_class: Any,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    whole: Any,
    share: Share | None,
) -> Any:
    """The model of a directory by transformers' own loader; with `share` a rank's part of the model `whole`, which has
    no weights. Raises CheckpointError."""
    placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    source: Path | None = directory
    if share is not None:
        source, model_class = None, with_cut_matrices(model_class, share.n)
        placement["state_dict"] = StoredNames(whole, _TEXT_PART_NAMES).tensors_of_rank(directory, share)
    register()
    try:
        module = model_class.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=implementation(config, ATTENTION),
            local_files_only=True,
            trust_remote_code=False,
            key_mapping=_TEXT_PART_NAMES,
            **placement,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"transformers cannot load {directory}: {first_line(error)}") from None
    for name, parameter in module.named_parameters():
        require_finite(parameter, name)
    return module.eval().requires_grad_(False)


def _split(module: Any, mixers: Sequence[Mixer]) -> None:
    """Let a model's attention and its mixers be those of the step that runs."""
    use_attention(module, split_attention)
    install(module, tuple(mixers))
    for child in module.modules():
        if hasattr(child, "warn_if_padding_and_no_attention_mask"):  # it looks at the tokens, so the host would wait
            child.warn_if_padding_and_no_attention_mask = _no_padding


def _replace_matrices(
    module: Any,
    mixers: Sequence[Mixer],
    bits: int | None,
    device: torch.device,
    dtype: torch.dtype,
    share: Share | None,
) -> None:
    """Keep a model's matrices in `bits`, None: in `dtype`, and the rank's part of its LM head, where that pays."""
    if not bits and not can_pack(device, dtype):
        return
    if share is not None:
        cut_head(module, share)
    if bits:
        quantise_embedding(module, bits)
    kept = [module.get_submodule(name) for mixer in mixers for name in mixer.own]
    replace_linears(module, module.get_output_embeddings(), bits, kept)


def _log_little(progress: bool) -> None:
    """Let transformers log errors alone, and show its progress only if wanted and if stderr is a terminal."""
    from transformers.utils import logging as transformers_logging

    theirs: Any = transformers_logging
    theirs.set_verbosity_error()  # a table of all tensors that are left aside would be a warning
    (theirs.enable_progress_bar if progress and sys.stderr.isatty() else theirs.disable_progress_bar)()


def _model_class(config: Any, mtp: int) -> Any:
    """The class of transformers for a model, which has the modules of its MTP head if that drafts."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    found = factory._model_mapping[type(config)]
    return with_head_modules(found) if mtp else found


def check_tensors(directory: Path, mtp: int) -> None:
    """Raise CheckpointError if a tensor of a checkpoint is missing or has another shape. Reads no weight. `mtp`: as for
    load_hf_model."""
    config, _ = read_configs(directory, mtp)
    _log_little(False)
    _check_tensors(_model_class(config, mtp), config, directory)


def check_ranks(directory: Path, n: int) -> None:
    """Raise CheckpointError if `n` ranks cannot share a checkpoint. Reads no weight."""
    config, generation = read_configs(directory)
    if getattr(config, "quantization_config", None):
        raise CannotShare("ranks do not share quantised models of the transformers backend")
    HFConfig.from_configs(config, generation, n_ranks=n)
    check_tensors(directory, 0)
    StoredNames(_without_weights(_model_class(config, 0), config), _TEXT_PART_NAMES).check(directory)


def model_without_weights(directory: Path) -> Any:
    """The model of a checkpoint on the meta device. Raises CheckpointError."""
    config, _ = read_configs(directory)
    return _without_weights(_model_class(config, 0), config)


def _without_weights(model_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return model_class._from_config(config)


def _check_tensors(model_class: Any, config: Any, directory: Path) -> None:
    """check_tensors, by transformers' own loader: it gets tensors without data that have the names and shapes of the
    checkpoint's. It would let a model that lacks a tensor go on with random numbers."""
    if getattr(config, "quantization_config", None):  # whose tensors have shapes of their own
        return
    stored = stored_tensors(directory)
    _, found = model_class.from_pretrained(
        None,
        config=config,
        state_dict={name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()},
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        key_mapping=_TEXT_PART_NAMES,
    )
    if missing := sorted(found["missing_keys"]):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"the checkpoint lacks the tensor {missing[0]!r}{more}")
    for name, shape, wanted in sorted(found["mismatched_keys"]):
        raise CheckpointError(f"tensor {name!r} has shape {tuple(shape)}, config.json says {tuple(wanted)}")
    for name, tensor in stored.items():
        if name.endswith("weight") and tensor.dtype not in {*FLOATS, "F64"} and name not in found["unexpected_keys"]:
            raise CheckpointError(
                f"tensor {name!r} is stored as {tensor.dtype}, and config.json has no quantization_config"
            )
    if aside := sorted(found["unexpected_keys"]):
        log.info("%d tensors are left aside, of vision, sound or drafts: %s, ...", len(aside), aside[0])


def _no_padding(*_: Any) -> None:
    """Steps are packed, so no row is padding."""


def _with_sinks(config: HFConfig, module: Any) -> HFConfig:
    """`config` with the values of the model's attention sinks, which are parameters."""
    sinks = [module.get_parameter(layer.sinks) if layer.sinks else None for layer in config.layers]
    return replace(config, options=with_sinks(config.options, sinks))
