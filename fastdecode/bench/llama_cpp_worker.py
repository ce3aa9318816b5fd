"""llama.cpp in a child process of the decode benchmark, see decode_worker.py."""

import os
import random
from pathlib import Path
from time import perf_counter

import llama_cpp as lib
import numpy as np

_ROWS = 512  # of a prompt in one call
_KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # ggml's numbers


class Worker:
    """llama.cpp with flash attention, greedy, all sequences in one batch, each with a stream of KV cells of its own."""

    def __init__(self, model: str, threads: int, steps: int):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llama.cpp writes thousands of lines
        lib.llama_backend_init()
        loading = lib.llama_model_default_params()
        # Version 0.3.36 of the package dies in the first product with AMX, for which it packs weights anew.
        loading.use_extra_bufts = b"amx_tile" not in Path("/proc/cpuinfo").read_bytes()
        self._model = lib.llama_model_load_from_file(model.encode(), loading)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the model")
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._threads, self._steps = threads, steps

    def fill(self, batch: int, context: int, format: str) -> None:
        """Compute one prompt of random tokens, and copy its cells for every sequence."""
        params = lib.llama_context_default_params()
        params.n_ctx = batch * -(-(context + self._steps) // 256) * 256  # of all sequences
        params.n_seq_max, params.n_batch, params.n_ubatch = batch, max(_ROWS, batch), max(_ROWS, batch)
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = _KV_TYPES[format]
        params.flash_attn_type, params.kv_unified, params.no_perf = 1, False, True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {batch} sequences of {context} tokens in {format}")
        self._memory = lib.llama_get_memory(self._context)
        self._rows = lib.llama_batch_init(max(_ROWS, batch), 0, 1)
        self._batch, self._length = batch, context
        rng = random.Random(0)
        for start in range(0, context, _ROWS):
            n = min(_ROWS, context - start)
            tokens = [rng.randrange(2, self._vocabulary) for _ in range(n)]
            self._decode(tokens, list(range(start, start + n)), [0] * n, logits=False)
        for i in range(1, batch):
            lib.llama_memory_seq_cp(self._memory, 0, i, -1, -1)

    def _decode(self, tokens: list[int], positions: list[int], sequences: list[int], *, logits: bool) -> None:
        rows = self._rows
        rows.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            rows.token[i], rows.pos[i], rows.n_seq_id[i], rows.logits[i] = token, position, 1, logits
            rows.seq_id[i][0] = sequence
        if status := lib.llama_decode(self._context, rows):
            raise RuntimeError(f"llama_decode failed with {status}")

    def round(self, steps: int) -> float:
        batch, everyone = self._batch, list(range(self._batch))
        for i in everyone:
            lib.llama_memory_seq_rm(self._memory, i, self._length, -1)
        tokens = [2 + i % 1000 for i in everyone]
        start = perf_counter()
        for step in range(steps):
            self._decode(tokens, [self._length + step] * batch, everyone, logits=True)
            logits = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (batch, self._vocabulary))
            tokens = logits.argmax(axis=1).tolist()
        return perf_counter() - start

    def clear(self) -> None:
        lib.llama_batch_free(self._rows)
        lib.llama_free(self._context)
