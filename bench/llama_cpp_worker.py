"""llama.cpp in a child process of the decode benchmark, see worker.py."""

import ctypes
import os
import random
from pathlib import Path
from time import perf_counter

import llama_cpp as lib
import numpy as np

_ROWS = 512  # of a prompt in one call
_KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # ggml's numbers


def _repeated(state: bytes, context: int) -> bytes:
    """The state of a sequence of `context` tokens, made of a shorter one's.

    The state (llama_kv_cache::state_write) has a head of 12 bytes, the last four the number of streams, then the number
    of cells, for each cell its position and its sequences, one word, the number of layers, and for the K of each layer,
    then the V, a type, the bytes of a cell and the cells. At the end it has a 0 for each of the other streams. Raises
    ValueError for a state of another form.
    """
    cells = int.from_bytes(state[12:16], "little")
    at = 16 + 12 * cells
    layers = int.from_bytes(state[at + 4 : at + 8], "little")
    positions = np.tile(np.array([[0, 1, 0]], np.int32), (context, 1))
    positions[:, 0] = np.arange(context)
    parts = [state[:12], context.to_bytes(4, "little"), positions.tobytes(), state[at : at + 8]]
    at += 8
    for _ in range(2 * layers):
        row = int.from_bytes(state[at + 4 : at + 12], "little")
        values = state[at + 12 : at + 12 + cells * row]
        parts += [state[at : at + 12], (values * -(-context // cells))[: context * row]]
        at += 12 + cells * row
    if any(state[at:]) or len(state) - at != 4 * (int.from_bytes(state[8:12], "little") - 1):
        raise ValueError("this version of llama.cpp writes a state of another form")
    return b"".join([*parts, state[at:]])


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
        """Compute a prompt of random tokens, repeat its cells up to the context, and copy them for every sequence."""
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
        rng, computed = random.Random(0), min(context, _ROWS)
        tokens = [rng.randrange(2, self._vocabulary) for _ in range(computed)]
        self._decode(tokens, list(range(computed)), [0] * computed, logits=False)
        if context > computed:
            self._restore(_repeated(self._saved(), context))
        for i in range(1, batch):
            lib.llama_memory_seq_cp(self._memory, 0, i, -1, -1)

    def _saved(self) -> bytes:
        """The state of sequence 0."""
        state = (ctypes.c_uint8 * lib.llama_state_seq_get_size(self._context, 0))()
        lib.llama_state_seq_get_data(self._context, state, len(state), 0)
        return bytes(state)

    def _restore(self, saved: bytes) -> None:
        lib.llama_memory_seq_rm(self._memory, 0, -1, -1)
        state = (ctypes.c_uint8 * len(saved)).from_buffer_copy(saved)
        if lib.llama_state_seq_set_data(self._context, state, len(saved), 0) != len(saved):
            raise RuntimeError(f"llama.cpp does not take the state of {self._length} tokens")

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
