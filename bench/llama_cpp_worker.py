"""llama.cpp in a child process of the decode benchmark, see worker.py."""

import ctypes
import os
import random
from pathlib import Path
from time import perf_counter

import llama_cpp as lib
import numpy as np

_ROWS = 512  # of a prompt in one call
#: RoPE with several positions of a token. A cell keeps these, and the token.
_MROPE = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)
_KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # ggml's numbers


def _repeated(state: bytes, context: int, words: int) -> bytes:
    """The state of a sequence of `context` tokens, made of a shorter one's.

    The state (llama_kv_cache::state_write) has a head of 12 bytes, the last four the number of streams, then the number
    of cells, for each cell `words` words of 4 bytes, the first its position, then one word, the number of layers, and
    for the K of each layer, then the V, a type, the bytes of a cell and the cells. After these it has a 0 for each of
    the other streams. That of a hybrid model goes on (llama_memory_recurrent::state_write) with a 1, the last position
    and the states of layers. Raises ValueError for a state of another form.
    """
    cells = int.from_bytes(state[12:16], "little")
    at = 16 + 4 * words * cells
    layers = int.from_bytes(state[at + 4 : at + 8], "little")
    table = np.resize(np.frombuffer(state[16:at], np.int32), (context, words))
    table[:, 0] = np.arange(context)
    parts = [state[:12], context.to_bytes(4, "little"), table.tobytes(), state[at : at + 8]]
    at += 8
    for _ in range(2 * layers):
        row = int.from_bytes(state[at + 4 : at + 12], "little")
        values = state[at + 12 : at + 12 + cells * row]
        parts += [state[at : at + 12], (values * -(-context // cells))[: context * row]]
        at += 12 + cells * row
    streams = bytes(4 * (int.from_bytes(state[8:12], "little") - 1))
    if state[at:] == streams:
        return b"".join([*parts, streams])
    last, new_last = (streams + np.array([1, n - 1], np.int32).tobytes() for n in (cells, context))
    if not state.startswith(last, at):
        raise ValueError("this version of llama.cpp writes a state of another form")
    return b"".join([*parts, new_last, state[at + len(last) :]])


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
        self._words = 6 if lib.llama_model_rope_type(self._model) in _MROPE else 3
        self._hybrid = lib.llama_model_is_hybrid(self._model)
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
            self._restore(_repeated(self._saved(0), context, self._words), 0, 0)
        for i in range(1, batch):
            lib.llama_memory_seq_cp(self._memory, 0, i, -1, -1)
        self._layer_states = self._saved(lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) if self._hybrid else b""

    def _saved(self, flags: int) -> bytes:
        """The state of sequence 0."""
        state = (ctypes.c_uint8 * lib.llama_state_seq_get_size_ext(self._context, 0, flags))()
        lib.llama_state_seq_get_data_ext(self._context, state, len(state), 0, flags)
        return bytes(state)

    def _restore(self, saved: bytes, sequence: int, flags: int) -> None:
        state = (ctypes.c_uint8 * len(saved)).from_buffer_copy(saved)
        if lib.llama_state_seq_set_data_ext(self._context, state, len(saved), sequence, flags) != len(saved):
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
            if self._hybrid:  # no token can be taken out of the states of its layers
                self._restore(self._layer_states, i, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
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
