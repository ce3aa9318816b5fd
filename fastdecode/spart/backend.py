"""choose_backend: whether the native decoder or the transformers backend runs a checkpoint."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.gguf.file import ModelSource
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig, UnknownArchitecture, WrongValue
from fastdecode.spart.checkpoints.config_file import open_source, read_config
from fastdecode.spart.checkpoints.config_json import read_json
from fastdecode.spart.ranks.cut import heads_of_rank, why_not_shared

if TYPE_CHECKING:
    import torch

    from fastdecode.spart.decoder.decoder import SPart
    from fastdecode.spart.decoder.rank_steps import Followers, FollowingSPart, LeadSPart
    from fastdecode.spart.decoder.weights import Model
    from fastdecode.spart.exchange.chosen import ChosenExchange
    from fastdecode.spart.hf.config import HFConfig
    from fastdecode.spart.hf.model import HFModel
    from fastdecode.spart.lora.files import Adapter
    from fastdecode.spart.ranks.share import Share
    from fastdecode.spart.served import ServedModel
    from fastdecode.transports.base import DataPath


@dataclass(frozen=True, slots=True)
class Backend:
    """A checkpoint and the code that runs it, before its weights are loaded."""

    name: str  # "native" or "transformers"
    source: ModelSource
    config: ModelConfig | HFConfig

    def load(
        self,
        device: torch.device,
        dtype: torch.dtype,
        progress: bool = False,
        weights: str = "auto",
        adapters: Sequence[Adapter] = (),
        calibration: Sequence[int] | None = None,
        share: Share | None = None,
        save: Path | None = None,
    ) -> Model | HFModel:
        """Load the weights, or quantise them: `weights` is "auto", "int8" or "int4". `progress`: show how much
        is loaded. `adapters` are LoRA adapters that chunks may use. `calibration` are the tokens of a text by which the
        native decoder rounds to int4; see load_model. `share`: the rank to load. `save`: a directory to make of the
        model with rounded weights. Raises CheckpointError."""
        if self.name == "native":
            from fastdecode.spart.loader import load_model

            mtp = self.config.mtp
            return load_model(self.source, device, dtype, progress, weights, adapters, calibration, mtp, share, save)
        if save is not None:
            raise CheckpointError("the weights of a model of the transformers backend are not saved")
        from fastdecode.spart.hf.model import load_hf_model

        return load_hf_model(self.source.path, device, dtype, progress, weights, adapters, self.config.mtp, share)

    def with_mtp(self, drafts: int) -> Backend:
        """The checkpoint with its MTP head, which drafts `drafts` tokens in a step; 0: without. Raises
        CheckpointError."""
        if not drafts:
            return self
        if isinstance(self.config, ModelConfig):
            return replace(self, config=self.config.with_mtp(drafts))
        return replace(self, config=self.config.from_dir(self.source.path, drafts))

    def check_tensors(self) -> None:
        """Raise CheckpointError if a tensor of the model is missing or has another shape. Reads no weight."""
        if isinstance(self.config, ModelConfig):
            from fastdecode.spart.loader import check_tensors

            check_tensors(self.source, self.config)
        else:
            from fastdecode.spart.hf.model import check_tensors as check_hf_tensors

            check_hf_tensors(self.source.path, self.config.mtp)

    def why_not_shared(self, n: int) -> str | None:
        """The reason why `n` ranks cannot share the model, or None if they can."""
        if isinstance(self.config, ModelConfig):
            return why_not_shared(self.config, n)
        from fastdecode.spart.hf.model import check_ranks

        try:
            check_ranks(self.source.path, n)
        except CheckpointError as error:
            return str(error)
        return None

    def kv_copies(self, n: int) -> float:
        """How many times the memory of a token's K and V `n` ranks need together: more than once if several ranks have
        the same KV head, or if ranks with fewer KV heads leave memory unused."""
        if not isinstance(self.config, ModelConfig):
            return float(n) if all(layer.v_in_k for layer in self.config.layers) else 1.0
        config, elements = self.config, [0, 0]  # of all layers' KV rows: of the model, and of the rank with the most
        for layer in sorted(set(config.kv_layers)):
            heads = config.heads_of(layer)
            of_ranks = [heads_of_rank(heads, rank, n)[1] for rank in range(n)]
            elements[0] += heads.kv_row_size
            elements[1] += heads._replace(n_kv=max(part.stop - part.start for part in of_ranks)).kv_row_size
        return n * elements[1] / elements[0]

    def parameters_of_each_rank(self) -> int:
        """About how many of the model's numbers every rank has, beside its part of the others. Raises
        CheckpointError."""
        if isinstance(self.config, ModelConfig):
            return 0  # norms and routers
        from fastdecode.spart.hf.model import model_without_weights
        from fastdecode.spart.hf.ranks import repeated_parameters

        return repeated_parameters(model_without_weights(self.source.path))

    def parameters_of_tied_head(self) -> int:
        """How many numbers an LM head has that is the embedding; 0 if it is not. Raises CheckpointError."""
        if isinstance(self.config, ModelConfig):
            from fastdecode.spart.loader import tensor_shapes

            embedding = tensor_shapes(self.config)[f"{self.config.names.embedding}.weight"]
            return math.prod(embedding) if self.config.tied else 0
        from fastdecode.spart.hf.model import model_without_weights
        from fastdecode.spart.hf.ranks import tied_head

        return tied_head(model_without_weights(self.source.path))

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each linear that adapters may change, by its name. Raises CheckpointError."""
        if isinstance(self.config, ModelConfig):
            from fastdecode.spart.loader import block_linears

            return block_linears(self.config)
        from fastdecode.spart.hf.lora import block_linears as hf_linears

        return hf_linears(self.source.path)

    def make_spart(
        self,
        model: ServedModel,
        links: Sequence[DataPath],
        exchange: ChosenExchange | None = None,
        state_slots: int = 0,
        followers: Followers | None = None,
    ) -> SPart:
        """The S-Part of a model that `load` returned; see SPart. `followers`: the other ranks of rank 0."""
        loaded: Any = model  # of this backend
        alone, lead, _ = self._sparts()
        if followers is not None:
            return lead(loaded, links, followers, state_slots)
        return alone(loaded, links, exchange, state_slots)

    def make_follower(self, model: ServedModel, rank: int) -> FollowingSPart:
        """The S-Part of another rank than 0, of a model that `load` returned."""
        loaded: Any = model  # of this backend
        return self._sparts()[2](loaded, rank)

    def _sparts(self) -> tuple[type[SPart], type[LeadSPart], type[FollowingSPart]]:
        """The S-Part of a model without ranks, that of rank 0, and that of the other ranks."""
        if self.name == "native":
            from fastdecode.spart.decoder.decoder import SPart
            from fastdecode.spart.decoder.rank_steps import FollowingSPart, LeadSPart

            return SPart, LeadSPart, FollowingSPart
        from fastdecode.spart.hf.decoder import HFFollowingSPart, HFLeadSPart, HFSPart

        return HFSPart, HFLeadSPart, HFFollowingSPart


def choose_backend(name: str, model: str | Path | ModelSource) -> Backend:
    """The backend for a model. `name` is "native", "transformers" or "auto", which takes the native
    decoder if it knows the model.

    Raises CheckpointError; with the reasons of both backends if the native decoder knows the architecture, and neither
    takes the checkpoint.
    """
    source = open_source(model)
    if source.gguf is None:
        read_json(source.path / "config.json")  # neither backend takes a file that is not JSON
    if name != "transformers":
        try:
            return Backend("native", source, read_config(source))
        except CheckpointError as error:
            if name == "native" or isinstance(error, WrongValue) or not (source.path / "config.json").is_file():
                raise
            native = error
    elif source.gguf is not None:
        raise CheckpointError(f"the transformers backend reads no GGUF files, and {source.path} is one")
    if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("greenlet")):
        hint = "the transformers backend is not installed: pip install 'fastdecode[models]'"
        raise CheckpointError(hint if name == "transformers" else f"{native}; {hint}")
    from fastdecode.spart.hf.config import HFConfig

    try:
        return Backend("transformers", source, HFConfig.from_dir(source.path))
    except CheckpointError as error:
        if name == "transformers" or isinstance(native, UnknownArchitecture):
            raise
        raise CheckpointError(f"native decoder: {native}; transformers backend: {error}") from None
