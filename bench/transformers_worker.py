"""transformers in a child process of the decode benchmark, see worker.py."""

from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Worker:
    """transformers' `generate`, greedy, from a DynamicCache."""

    def __init__(self, model: str, dtype: str, device: str, threads: int):
        torch.set_num_threads(threads)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.to(device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def fill(self, batch: int, context: int, format: str) -> None:
        """Cache a token of every sequence, and behind it random K and V. `format` is that of the model."""
        generator, vocabulary = torch.Generator().manual_seed(0), self._model.config.vocab_size
        ids = torch.randint(vocabulary, (batch, context + 1), generator=generator)
        self._ids, self._context = ids.to(self._model.device), context
        self._cache = DynamicCache(config=self._model.config)
        with torch.no_grad():  # `generate` writes to the states, and could not if they were of the inference mode
            self._model(self._ids[:, :1], past_key_values=self._cache, logits_to_keep=1)
            layers: Any = self._cache.layers
            for i, layer in enumerate(layers):
                if not hasattr(layer, "keys"):  # it keeps a state, whose numbers cost no time
                    continue
                sizes = [(*values.shape[:2], context - 1, values.shape[3]) for values in (layer.keys, layer.values)]
                k, v = (torch.randn(size, dtype=self._model.dtype, device=self._model.device) for size in sizes)
                self._cache.update(k, v, i)

    def round(self, steps: int) -> float:
        if grown := self._cache.get_seq_length() - self._context:
            layers: Any = self._cache.layers
            for layer in layers:
                if hasattr(layer, "keys"):
                    layer.crop(-grown)
        start = perf_counter()
        self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            past_key_values=self._cache,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
        )
        return perf_counter() - start

    def clear(self) -> None:
        del self._cache
