"""A model as the planner sees it: how many bytes and weights a token costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fastdecode.bench.shapes import SHAPES
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.kv_pages import KVPages
from fastdecode.daemon.weights import parameters
from fastdecode.engine.scheduling.rtime import layer_groups
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.region.geometry import Geometry
from fastdecode.spart import ModelConfig
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.shape import LayerReads
from fastdecode.transports.base import LayerOptions


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The sizes of a model that times depend on."""

    name: str
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_size: int
    parameters: float  # weights that each row is multiplied with: all but an embedding that is not the LM head
    reads: tuple[LayerReads, ...] = ()  # what a row reads in each layer; empty: all tokens in all layers
    act_bytes: int = 2  # of an element of Q, K, V and O on the wire
    max_positions: int = 1 << 20
    v_size: int = 0  # of a V head; 0: head_size
    v_in_k: bool = False  # V of a head is a part of its K, and is not stored
    index_heads: int = 0  # of an indexer, and the elements of one; 0: no layer selects tokens
    index_size: int = 0
    all_parameters: float = 0.0  # with an embedding that is not the LM head; 0: there is none

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_size", self.v_size or self.head_size)
        object.__setattr__(self, "all_parameters", self.all_parameters or self.parameters)

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.n_q_heads // self.n_kv_heads

    @property
    def q_bytes(self) -> int:
        """Bytes of a row's Q, or of its O, in all layers. Index queries are not considered."""
        return self.n_layers * self.n_q_heads * self.head_size * self.act_bytes

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of a row's K and V on the wire, in all layers."""
        size = self.head_size if self.v_in_k else self.head_size + self.v_size
        return self.n_layers * self.n_kv_heads * size * self.act_bytes

    def token_bytes(self, kv_dtype: str) -> float:
        """Bytes of a cached token, in all layers."""
        selections = tuple((1 if reads.index_share else 2) if reads.topk else 0 for reads in self.reads)
        geometry = Geometry(
            1,
            1,
            self.n_layers,
            self.n_q_heads,
            self.n_kv_heads,
            self.head_size,
            "fp16",
            self.v_size,
            self.v_in_k,
            self.index_heads,
            self.index_size,
            max((reads.topk for reads in self.reads), default=0),
        )
        return _token_bytes(geometry, kv_dtype, selections if any(selections) else ())

    def read_tokens(self, length: float) -> float:
        """Cached tokens that attention reads of a sequence of `length`, as an average over the layers."""
        if not self.reads:
            return length
        return sum(n * reads.tokens(length) for reads, n in _layer_groups(self.reads)) / len(self.reads)

    @property
    def pair_rows(self) -> float:
        """Rows that cost as many operations as one pair of a prompt's row and a key: a pair takes 4 operations for
        each element of Q in each layer, a row 2 for each weight."""
        return 2 * self.n_layers * self.n_q_heads * self.head_size / self.parameters

    @classmethod
    def of_shape(cls, name: str) -> PlannedModel:
        """The model with a name of bench/shapes.py."""
        shape = SHAPES[name]
        return cls(
            name,
            shape.layers,
            shape.heads,
            shape.kv_heads,
            shape.head_size,
            shape.row_parameters,
            max_positions=shape.max_positions,
            all_parameters=shape.row_parameters + shape.vocab * shape.hidden,
        )


_layer_groups = lru_cache(layer_groups)


@lru_cache
def _token_bytes(geometry: Geometry, kv_dtype: str, selections: tuple[int, ...]) -> float:
    return KVPages(geometry, kv_dtype, (), LayerOptions(selections=selections)).block_bytes / PAGE_TOKENS


def is_shape(model: Path | None) -> bool:
    """Whether --model names a shape of bench/shapes.py, and no checkpoint."""
    return model is not None and str(model) in SHAPES and not model.exists()


def find_planned_model(model: Path | None) -> PlannedModel:
    """The model that --model names: a shape of bench/shapes.py, or a model as for fastdecode-node; by default the demo.

    Raises ConfigError, CheckpointError.
    """
    if is_shape(model):
        return PlannedModel.of_shape(str(model))
    return read_model(NodeConfig(model=model).model_path())


def read_model(path: Path) -> PlannedModel:
    """The model in a directory or GGUF file; its weights are not loaded. Raises CheckpointError."""
    backend = choose_backend("auto", path)
    config = backend.config
    unused = 0
    if isinstance(config, ModelConfig) and not config.tied:
        unused = config.vocab_size * config.embed_size
    if isinstance(config, ModelConfig) and config.per_layer:
        unused += config.per_layer.rows * config.per_layer.size * config.n_blocks
    return PlannedModel(
        name=path.resolve().name,
        n_layers=config.n_layers,
        n_q_heads=config.n_q_heads,
        n_kv_heads=config.n_kv_heads,
        head_size=config.head_size,
        parameters=parameters(backend) - unused,
        reads=config.reads if any(reads != LayerReads() for reads in config.reads) else (),
        max_positions=config.max_positions,
        v_size=config.most_heads.v_size,
        v_in_k=config.v_in_k,
        index_heads=config.index_heads,
        index_size=config.index_size,
        all_parameters=parameters(backend),
    )
