"""load_model: reads a checkpoint into parameters on the device.

The names and shapes of all tensors are compared with the parameters that the model needs before any weight is read, so
a checkpoint that does not fit is refused at once, and the message names the tensor. Then parameters/ makes each
parameter of its tensors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastdecode.gguf.file import ModelSource
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig
from fastdecode.spart.checkpoints.config_file import open_source, read_config
from fastdecode.spart.checkpoints.gguf import GGUFCheckpoint
from fastdecode.spart.checkpoints.interleaved import InterleavedCheckpoint, interleaved_rows
from fastdecode.spart.checkpoints.mxfp4 import MXFP4Checkpoint
from fastdecode.spart.checkpoints.quantised_files import QuantisedCheckpoint
from fastdecode.spart.checkpoints.rounded import METHOD, RoundedCheckpoint, RoundedWriter
from fastdecode.spart.checkpoints.tensors import Checkpoint, SafetensorsCheckpoint
from fastdecode.spart.decoder.blueprint import Blueprint
from fastdecode.spart.decoder.weights import Model, Weights
from fastdecode.spart.lora.adapters import AdapterSet, check_adapted
from fastdecode.spart.lora.files import Adapter
from fastdecode.spart.parameters.calibrated import CalibratedParameters
from fastdecode.spart.parameters.progress import LoadProgress
from fastdecode.spart.parameters.reader import Parameters
from fastdecode.spart.ranks.cut import cut_config
from fastdecode.spart.ranks.share import CutAdapter, CutCheckpoint, Share
from fastdecode.spart.ranks.vocabulary import SharedEmbedding, SharedHead
from fastdecode.spart.served import TORCH_DTYPES, with_sinks

log = logging.getLogger(__name__)

#: Ends of tensor names that old checkpoints contain and that the decoder computes from the config.
_DERIVED = ("rotary_emb.inv_freq", "attn.masked_bias")


def load_model(
    model: str | Path | ModelSource,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    progress: bool = False,
    weights: str = "auto",
    adapters: Sequence[Adapter] = (),
    calibration: Sequence[int] | None = None,
    mtp: int = 0,
    share: Share | None = None,
    save: Path | None = None,
) -> Model:
    """Load a checkpoint for inference.

    `dtype` is the dtype of activations and of weights that are not quantised: a torch dtype, "fp32", "bf16", "fp16" or
    "auto" (see choose_dtype). `weights` is the format of the linears in memory: "auto" (as stored), "dense" (in
    `dtype`), "int8" or "int4" (rounded at load). `progress`: show how much is loaded (LoadProgress). `adapters` are
    LoRA adapters that chunks may use. `calibration` are the tokens of a text by which "int4" rounds the blocks
    (calibration.py); without them each weight is rounded to the nearest number. `mtp`: the tokens that the model's MTP
    head drafts in a step; 0: the head is left aside. `share`: the rank whose share of the model to load. `save`: a
    directory to make of the model with its weights rounded (checkpoints/rounded.py). Raises CheckpointError; if a
    tensor is missing or has another shape, the message names it.
    """
    source, device = open_source(model), torch.device(device)
    config = read_config(source)
    if mtp:
        config = config.with_mtp(mtp)
    if isinstance(dtype, str):
        dtype = choose_dtype(dtype, config.dtype, device)
    checkpoint = open_checkpoint(source, config)
    blueprint = Blueprint(config, own_head=not config.tied or checkpoint.head_differs(config.names))
    shapes = _wanted(blueprint).shapes
    _match(shapes, checkpoint, config, source)
    check_adapted(source, adapters)
    adapters = [replace(adapter, rows=interleaved_rows(config)) for adapter in adapters]
    adapter_set = AdapterSet(adapters)
    adapter_set.check(block_linears(config))
    parameters = sum(map(math.prod, shapes.values()))
    if share is not None:
        whole, config = config, cut_config(config, share.rank, share.n)
        blueprint = Blueprint(config, blueprint.own_head)
        cut = CutCheckpoint(checkpoint, whole, shapes, _wanted(blueprint).shapes, share)
        checkpoint, adapter_set = cut, AdapterSet([CutAdapter.of(adapter, cut) for adapter in adapters])
    to_load = sum(map(math.prod, _wanted(blueprint).shapes.values()))
    with torch.inference_mode(), LoadProgress(to_load, progress) as shown:
        writer = None if save is None else RoundedWriter(source, save)
        made = checkpoint, device, dtype, weights, adapter_set, shown, writer
        calibrated = weights == "int4" and not (config.names.sinks or config.delta)
        known = [token for token in calibration or () if token < config.vocab_size] if calibrated else []
        reader = CalibratedParameters(config, known, *made) if known else Parameters(*made)
        loaded = blueprint.weights(reader)
        if writer is not None:
            writer.finish(checkpoint, shapes)
        if share is not None:
            loaded.embedding = SharedEmbedding(loaded.embedding, config.vocab_size, share)
            loaded.head = SharedHead(loaded.head, config.vocab_size, share)
            if loaded.per_layer is not None and config.per_layer is not None:
                loaded.per_layer.table = SharedEmbedding(loaded.per_layer.table, config.per_layer.rows, share)
    config = replace(config, options=with_sinks(config.options, [layer.sinks for layer in loaded.layers]))
    return Model(
        config=config,
        weights=loaded,
        device=device,
        dtype=dtype,
        parameters=parameters,
        weight_bytes=_weight_bytes(loaded),
        adapters=adapter_set.names,
        reduction=None if share is None else share.reduction,
    )


def open_checkpoint(source: ModelSource, config: ModelConfig) -> Checkpoint:
    """The tensors of a model, of which no weight is read. Raises CheckpointError."""
    stored = _open_stored(source, config)
    # The rows of a rounded model were in order before they were saved.
    in_order = not config.rope_interleaved or isinstance(stored, RoundedCheckpoint)
    return stored if in_order else InterleavedCheckpoint(stored, config)


def _open_stored(source: ModelSource, config: ModelConfig) -> Checkpoint:
    """The tensors of a model as its files have them."""
    if source.gguf is not None:
        return GGUFCheckpoint(source.gguf, config)
    if config.quantisation and config.quantisation.method == "mxfp4":
        return MXFP4Checkpoint(source.path, config.names)
    if config.quantisation and config.quantisation.method == METHOD:
        return RoundedCheckpoint(source.path, config.names, config.quantisation)
    if config.quantisation:
        return QuantisedCheckpoint(source.path, config.names, config.quantisation)
    return SafetensorsCheckpoint(source.path, config.names)


def check_tensors(source: ModelSource, config: ModelConfig) -> None:
    """Raise CheckpointError if a tensor of a model is missing or has another shape. Reads no weight."""
    _match(tensor_shapes(config), open_checkpoint(source, config), config, source)


def _wanted(blueprint: Blueprint) -> _Wanted:
    wanted = _Wanted()
    blueprint.weights(wanted)
    return wanted


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a checkpoint, by its name. An LM head that is tied to the embedding has none."""
    return _wanted(Blueprint(config, own_head=not config.tied)).shapes


def block_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear of the model's blocks as the checkpoint stores it, by its name. These are the linears
    that adapters may change; an MTP head is not adapted."""
    wanted = _wanted(Blueprint(config, own_head=not config.tied))
    first, head = config.names.block.partition("{i}")[0], config.names.mtp
    linears = {name: shape for name, shape in wanted.linears.items() if name.startswith(first)}
    return linears if head is None else {name: linears[name] for name in linears if not name.startswith(head.block)}


def parameter_count(config: ModelConfig) -> int:
    """How many numbers a model has; a tied LM head counts once."""
    return sum(map(math.prod, tensor_shapes(config).values()))


def choose_device(name: str) -> torch.device:
    """The device for `name`: "auto" (the GPU if torch can use one, else the CPU), "cpu" or "cuda".

    Raises CheckpointError for "cuda" if torch can use no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("this torch can use no CUDA device; use --device cpu")
    return torch.device(name)


def choose_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """The torch dtype for `name`: "fp32", "bf16", "fp16" or "auto". `stored` is the checkpoint's dtype, one of the
    first three.

    "auto" is the checkpoint's dtype, except on a CPU without instructions for that dtype: there 16-bit products are
    slower than fp32 products, so "auto" is fp32.
    """
    if name != "auto":
        return TORCH_DTYPES[name]
    dtype = stored
    if device.type == "cpu":
        native = {"bf16": torch.cpu._is_avx512_bf16_supported, "fp16": torch.cpu._is_amx_fp16_supported}
        if dtype in native and not native[dtype]():
            dtype = "fp32"
    return TORCH_DTYPES[dtype]


def _match(
    shapes: dict[str, tuple[int, ...]], checkpoint: Checkpoint, config: ModelConfig, source: ModelSource
) -> None:
    """Raise CheckpointError for a tensor that is missing or has another shape; warn of tensors that are not used."""
    have = checkpoint.names()
    if missing := [name for name in shapes if name not in have]:
        if (mtp := config.names.mtp) is not None and missing[0] == f"{mtp.embedding_norm}.weight":
            raise CheckpointError(f"the checkpoint has no MTP head to draft tokens: it lacks the tensor {missing[0]!r}")
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"the checkpoint lacks the tensor {missing[0]!r}{more}")
    for name, shape in shapes.items():
        if (stored := checkpoint.shape(name)) != shape:
            where = source.gguf.path if source.gguf else "config.json"
            raise CheckpointError(f"tensor {name!r} has shape {stored}, {where} says {shape}")
    used = set(shapes) | ({f"{config.names.head}.weight"} if config.tied else set())
    unused = sorted(name for name in have - used if not name.endswith(_DERIVED))
    if aside := [name for name in unused if name.startswith(config.names.aside)]:
        log.info("%d tensors are left aside, of vision, sound or drafts: %s, ...", len(aside), aside[0])
        unused = [name for name in unused if not name.startswith(config.names.aside)]
    if unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        log.warning("%d tensors of the checkpoint are not used: %s", len(unused), shown)


class _Wanted:
    """A ParameterReader that makes nothing and notes the shapes of all tensors."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.linears: dict[str, tuple[int, int]] = {}  # (out, in) of each linear of the model, by its module's name

    def tensor(self, name: str, *shape: int, **_: Any) -> Any:
        self.shapes[name] = shape

    def linear(self, names: Sequence[str], outs: Sequence[int], width: int, bias: bool, *_: Any, **__: Any) -> Any:
        for name, out in zip(names, outs, strict=True):
            self.shapes[f"{name}.weight"] = self.linears[name] = (out, width)
        for name, out in zip(names, outs, strict=True):
            if bias:
                self.shapes[f"{name}.bias"] = (out,)

    def experts(self, names: Sequence[str], outs: Sequence[int], width: int, n: int, bias: bool) -> Any:
        for name, out in zip(names, outs, strict=False):
            if "{e}" in name:
                self.shapes |= {f"{name}.weight".replace("{e}", str(e)): (out, width) for e in range(n)}
                if bias:
                    self.shapes |= {f"{name}.bias".replace("{e}", str(e)): (out,) for e in range(n)}
            else:
                self.shapes[name] = (n, width, sum(outs))
                if bias:
                    self.shapes[f"{name}_bias"] = (n, sum(outs))

    def absorbed(self, name: str, heads: int, k_size: int, v_size: int, rank: int) -> Any:
        self.shapes[f"{name}.weight"] = (heads * (k_size + v_size), rank)
        return None, None

    def embedding(self, name: str, rows: int, width: int) -> Any:
        self.shapes[f"{name}.weight"] = (rows, width)

    def block_read(self, weights: Weights, index: int) -> None:
        """Does nothing."""

    def tied(self, name: str, rows: int, width: int) -> Any:
        self.shapes[f"{name}.weight"] = (rows, width)
        return None, None


def _weight_bytes(weights: Weights) -> int:
    linears = [weights.head, weights.project_in, weights.project_out]
    blocks = weights.blocks
    if weights.mtp is not None:
        linears.append(weights.mtp.fc)
        blocks = [*blocks, weights.mtp.layer]
    linears += [linear for block in blocks for linear in block.linears]
    others = weights.embedding.nbytes + sum(block.mlp.nbytes for block in blocks)
    others += sum(heads.nbytes for block in blocks for heads in block.absorbed)
    if weights.per_layer is not None:
        linears.append(weights.per_layer.projection)
        others += weights.per_layer.table.nbytes
    return others + sum(linear.nbytes for linear in linears if linear is not None)
