"""A checkpoint loaded by transformers' own loader, ready to be split.

Norms and MLPs that kernels/decoder can compute are replaced: only if the C function gives the results of the module's
own code for random rows, so no table of models says which norm or activation each of them has.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastdecode.spart.checkpoints.config import CheckpointError, first_line
from fastdecode.spart.checkpoints.tensors import FLOATS, require_finite, stored_tensors
from fastdecode.spart.decoder.block_ops import VectorOps
from fastdecode.spart.hf import adapters
from fastdecode.spart.hf.attention import ATTENTION, register, running, split_attention
from fastdecode.spart.hf.config import HFConfig, read_configs
from fastdecode.spart.hf.linears import LinearModule, quantise_embedding, replace_linears, replaced_bytes
from fastdecode.spart.hf.mixers import Mixer, install
from fastdecode.spart.hf.mtp import MTPHead, with_head_modules
from fastdecode.spart.hf.ranks import (
    CannotShare,
    StoredNames,
    cut_head,
    meet,
    with_cut_matrices,
)
from fastdecode.spart.linears.dense import can_pack
from fastdecode.spart.linears.quantised import BITS
from fastdecode.spart.lora.adapters import AdapterSet, Change
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
    lora: Sequence[Adapter] = (),
    mtp: int = 0,
    share: Share | None = None,
) -> HFModel:
    """Load a checkpoint for inference. The arguments are those of spart.loader.load_model; `lora` is its `adapters`.
    Raises CheckpointError."""
    config, generation = read_configs(directory, mtp)
    split = HFConfig.from_configs(config, generation, mtp, 1 if share is None else share.n)
    model_class = _model_class(config, mtp)
    _log_little(progress)
    _check_tensors(model_class, config, Path(directory))
    adapter_set = AdapterSet(lora)
    register()
    device = torch.device(device)
    if isinstance(dtype, str):
        dtype = TORCH_DTYPES[split.dtype if dtype == "auto" else dtype]
    if lora:
        adapter_set.check(_linears(config, split.mixers))
    placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    source: str | Path | None = directory
    whole: Any = None
    if share is not None:
        whole = _without_weights(model_class, config)
        source, model_class = None, with_cut_matrices(model_class, share.n)
        placement["state_dict"] = StoredNames(whole, _TEXT_PART_NAMES).tensors_of_rank(Path(directory), share)
    try:
        module = model_class.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=adapters.implementation(config, ATTENTION),
            local_files_only=True,
            trust_remote_code=False,
            key_mapping=_TEXT_PART_NAMES,
            **placement,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"transformers cannot load {directory}: {first_line(error)}") from None
    placement.clear()  # the model has the rank's tensors now
    for name, parameter in module.named_parameters():
        require_finite(parameter, name)
    module.eval().requires_grad_(False)
    adapters.adapt(module, split_attention)
    install(module, split.mixers)
    for child in module.modules():
        if hasattr(child, "warn_if_padding_and_no_attention_mask"):  # it looks at the tokens, so the host would wait
            child.warn_if_padding_and_no_attention_mask = _no_padding
    parameters = sum(parameter.numel() for parameter in (whole or module).parameters())
    bits = BITS.get(weights)
    if bits or can_pack(device, dtype):
        with torch.inference_mode():
            if share is not None:
                cut_head(module, share)
            if bits:
                quantise_embedding(module, bits)
            kept = [module.get_submodule(name) for mixer in split.mixers for name in mixer.own]
            replace_linears(module, module.get_output_embeddings(), bits, kept)
    change_bytes = _adapt_linears(module, adapter_set, device, dtype)
    if device.type == "cpu":
        with torch.inference_mode():
            use_row_ops(module, dtype)
    changed = replaced_bytes(module)
    rest = sum(p.nbytes for p in module.parameters() if p.device.type != "meta")
    if share is not None:
        meet(module, whole, share)
    return HFModel(
        config=_with_sinks(split, module),
        module=module,
        device=device,
        dtype=dtype,
        parameters=parameters,
        weight_bytes=changed + rest + change_bytes,
        reduction=None if share is None else share.reduction,
        adapters=adapter_set.names,
        head=MTPHead(module) if mtp else None,
    )


def _log_little(progress: bool) -> None:
    """Let transformers log errors alone, and show its progress on stderr only if wanted."""
    from transformers.utils import logging as transformers_logging

    theirs: Any = transformers_logging
    theirs.set_verbosity_error()  # a table of all tensors that are left aside would be a warning
    (theirs.enable_progress_bar if progress else theirs.disable_progress_bar)()


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


class _AdaptedModule(torch.nn.Module):
    """A linear of the model, with the changes of the adapters that the step's rows use."""

    def __init__(self, base: torch.nn.Module, change: Change):
        super().__init__()
        self.base, self.change = base, change

    @property
    def weight(self) -> torch.Tensor:
        """The base's, for code that asks a layer for its dtype or shape."""
        return self.base.get_parameter("weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, rows, in] or [rows, in] -> the same with the linear's outputs."""
        y: torch.Tensor = self.base(x)
        forward = running.forward
        if forward is not None and (rows := forward.adapters) is not None:
            (of_rows, ins) = (y, x) if x.ndim == 2 else (y[0], x[0])
            if len(ins) != rows.n_rows:
                raise RuntimeError(f"a linear with adapters got {len(ins)} of the step's {rows.n_rows} rows")
            self.change.add(of_rows, ins, rows)
        return y


def block_linears(directory: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear of a checkpoint's model but the LM head, by its name. Raises CheckpointError."""
    config, generation = read_configs(directory)
    return _linears(config, HFConfig.from_configs(config, generation).mixers)


def _linears(config: Any, mixers: Sequence[Mixer]) -> dict[str, tuple[int, int]]:
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config)
    adapters.adapt(model, split_attention)  # the linears that it replaces cannot have adapters
    head, shapes = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{mixer.name}.") for mixer in mixers):  # it gets only some rows of a step at a time
            continue
        if type(module) is torch.nn.Linear and module is not head:
            shapes[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D":  # GPT-2: the weight is [in, out]
            shapes[name] = (module.nf, module.nx)
    return shapes


def _adapt_linears(module: Any, adapters: AdapterSet, device: torch.device, dtype: torch.dtype) -> int:
    """Let the linears that adapters change apply these changes; returns the memory that the adapters take, in bytes."""
    nbytes = 0
    for name, (outs, ins) in adapters.modules.items():
        parent, child = module.get_submodule(name.rpartition(".")[0]), module.get_submodule(name)
        change = adapters.change([name], [outs], ins, device, dtype)
        assert change is not None, "the name is that of a linear which an adapter changes"
        setattr(parent, name.rpartition(".")[2], _AdaptedModule(child, change))
        nbytes += change.nbytes
    return nbytes


#: Rows of the trial, and the relative difference that roundings may make; another formula makes a larger one.
_ROWS = 3
_ROUNDINGS = 0.02


def use_row_ops(module: Any, dtype: torch.dtype) -> None:
    """Let RMS norms, and MLPs with a SiLU gate, of a model on a CPU use the vector operations for `dtype`, where this
    CPU has them."""
    if not VectorOps.supports(dtype):
        return
    ops = VectorOps(dtype)
    for child in list(module.modules()):
        if _is_norm(child):
            _try(child, child.weight.shape[0], dtype, _norm(ops, child))
        elif _is_mlp(child):
            _try(child, child.gate_proj.in_features, dtype, _mlp(ops, child))


def _is_norm(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "RMSNorm" in type(module).__name__ and isinstance(weight, torch.Tensor) and weight.ndim == 1


def _norm(ops: VectorOps, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    eps: float = getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0) or 0.0
    original = type(module).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not ops.dtype or module.weight.dtype is not ops.dtype:
            return original(module, x)  # type: ignore[no-any-return]
        return ops.rms_norm(x.contiguous(), module.weight, eps)

    return forward


def _is_mlp(module: torch.nn.Module) -> bool:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, LinearModule) and isinstance(up, LinearModule) and isinstance(down, torch.nn.Module)):
        return False
    return gate.product is up.product and "silu" in type(getattr(module, "act_fn", None)).__name__.lower()


def _mlp(ops: VectorOps, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    product = module.gate_proj.product
    return lambda x: module.down_proj(ops.silu_gate(product.whole(x)))


def _try(module: Any, width: int, dtype: torch.dtype, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a module of rows [1, n, width] compute with `forward` if both give the same."""
    x = torch.randn(1, _ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError):  # a module that wants more than rows
        want, got = module(x), forward(x)
        alike = isinstance(want, torch.Tensor) and want.dtype is got.dtype and want.shape == got.shape
        if alike and (want.float() - got.float()).norm() <= _ROUNDINGS * want.float().norm():
            module.forward = forward
