"""probe: the pass of prompts through the layers without R-nodes, to see what the layers compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.layer_pass import DecoderLayers, DecoderPass
from fastdecode.spart.decoder.weights import Model
from fastdecode.spart.prefill.prompt import PromptCache
from fastdecode.spart.step.batch import Chunk, SampleSpec

_LENGTH = 256


def sequences_of(config: ModelConfig, tokens: Sequence[int]) -> list[torch.Tensor]:
    """The tokens of a text in sequences of at most 256, int64, each with the begin token of a model that has one.
    Tokens that the model does not know are left out."""
    vocabulary = range(config.vocab_size)
    begin = torch.tensor([token for token in [config.bos_token_id] if token in vocabulary], dtype=torch.int64)
    length = min(_LENGTH, config.max_positions) - len(begin)
    known = torch.tensor([token for token in tokens if token in vocabulary], dtype=torch.int64)
    return [torch.cat([begin, some]) for some in known.split(length)]


def prompt_pass(layers: DecoderLayers, sequences: Sequence[torch.Tensor]) -> DecoderPass:
    """The pass of a step, before its first layer, whose rows are the prompts `sequences`, one after another."""
    model, stops = layers.model, torch.tensor([len(tokens) for tokens in sequences]).cumsum(0).tolist()
    cache = PromptCache(model.config, model.device, model.dtype)
    prompts = []
    for i, (tokens, stop) in enumerate(zip(sequences, stops, strict=True)):
        chunk = Chunk(0, i, 0, 0, tokens.tolist(), True, SampleSpec())  # a whole prompt, so nothing is staged
        prompts.append(cache.begin((0, i, 0), chunk, slice(stop - len(tokens), stop)))
    positions = torch.cat([torch.arange(len(tokens)) for tokens in sequences])
    inputs = {"tokens": torch.cat(list(sequences)).to(model.device), "positions": positions.to(model.device)}
    return DecoderPass(layers, inputs, _NoLinks(model, stops[-1]), prompts)


class _NoLinks:
    """A RowExchange of a step of prompts, which no R-node sees."""

    def __init__(self, model: Model, rows: int):
        q_size, kv_size, o_size = model.config.row_sizes
        self.kv = torch.empty(rows, kv_size, device=model.device, dtype=model.dtype)
        self.q, self.o = self.kv.new_empty(rows, q_size), self.kv.new_empty(rows, o_size)

    def post(self, layer: int, timeout: float) -> None:
        """Does nothing."""

    def wait(self, timeout: float) -> None:
        """Does nothing."""
