"""Peers of the decode benchmark: each loads the checkpoint once, then decodes some tokens of each sequence a round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch


class Peer(Protocol):
    def round(self, steps: int) -> float:
        """Decode `steps` tokens of every sequence, from the same context each time; seconds taken."""


class Transformers:
    """transformers' `generate`, greedy, going on from a cache of `context` random tokens, on all cores in its turn."""

    def __init__(self, model: Path, batch: int, context: int, dtype: torch.dtype, device: torch.device, threads: int):
        from transformers import AutoModelForCausalLM, DynamicCache

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._context = context
        vocab = self._model.config.vocab_size
        self._ids = torch.randint(vocab, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(device)
        before, _ = torch.get_num_threads(), torch.set_num_threads(threads)
        self._cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(self._ids[:, :context], past_key_values=self._cache, logits_to_keep=1)
        torch.set_num_threads(before)

    def round(self, steps: int) -> float:
        if grown := self._cache.get_seq_length() - self._context:
            self._cache.crop(-grown)
        mask = torch.ones_like(self._ids)
        start = perf_counter()
        self._model.generate(
            self._ids,
            attention_mask=mask,
            past_key_values=self._cache,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
        )
        return perf_counter() - start


PEERS: dict[str, Callable[..., Peer]] = {"transformers": Transformers}
