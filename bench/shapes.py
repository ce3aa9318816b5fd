"""Shapes of well-known models by name, for benchmarks and plans that need no weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model of Llama's architecture."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int = 128
    vocab: int = 32000
    max_positions: int = 4096

    @property
    def row_parameters(self) -> int:
        """Weights that each row is multiplied with: all but norms and the embedding, which is not the LM head."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden


#: llama-125m is that of most benchmarks. FastDecode measures Llama 7B and 13B, Lamina 33B, 65B and Llama 3 70B.
SHAPES = {
    "llama-125m": ModelShape(12, 768, 2048, 12, 4, 64, max_positions=8192),
    "llama-7b": ModelShape(32, 4096, 11008, 32, 32),
    "llama-13b": ModelShape(40, 5120, 13824, 40, 40),
    "llama-33b": ModelShape(60, 6656, 17920, 52, 52),
    "llama-65b": ModelShape(80, 8192, 22016, 64, 64),
    "llama-2-70b": ModelShape(80, 8192, 28672, 64, 8),
    "llama-3-8b": ModelShape(32, 4096, 14336, 32, 8, vocab=128256, max_positions=8192),
    "llama-3-70b": ModelShape(80, 8192, 28672, 64, 8, vocab=128256, max_positions=8192),
}
