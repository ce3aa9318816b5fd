"""The decode benchmark's llama.cpp worker: a child process, so that llama.cpp's threads are not those of fastdecode.

    python llama_cpp_worker.py FILE BATCH CONTEXT KV_TYPE THREADS

prints "ready" when the model is loaded and all sequences have their context. Then it answers each line "STEPS" with the
seconds that STEPS tokens of every sequence took. It ends without a word if llama.cpp cannot do that.
"""

import os
import random
import sys
from pathlib import Path
from time import perf_counter

_ROWS = 512  # of a prompt in one call
_MOST_STEPS = 256  # tokens of a sequence behind its context
_KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # ggml's numbers


def main() -> None:
    import llama_cpp as lib
    import numpy as np

    path, kv_type = sys.argv[1], _KV_TYPES[sys.argv[4]]
    batch, context, threads = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llama.cpp writes thousands of lines
    lib.llama_backend_init()
    loading = lib.llama_model_default_params()
    # Version 0.3.36 of the package dies in the first product with AMX, for which it packs weights anew.
    loading.use_extra_bufts = b"amx_tile" not in Path("/proc/cpuinfo").read_bytes()
    model = lib.llama_model_load_from_file(path.encode(), loading)
    params = lib.llama_context_default_params()
    params.n_ctx = batch * -(-(context + _MOST_STEPS) // 256) * 256  # of all sequences
    params.n_seq_max, params.n_batch, params.n_ubatch = batch, max(_ROWS, batch), max(_ROWS, batch)
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = kv_type
    params.flash_attn_type, params.kv_unified, params.no_perf = 1, False, True
    ctx = lib.llama_init_from_model(model, params)
    if not ctx:
        return
    memory, vocabulary = lib.llama_get_memory(ctx), lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = lib.llama_batch_init(max(_ROWS, batch), 0, 1)

    def decode(tokens: list[int], positions: list[int], sequences: list[int], *, logits: bool) -> None:
        rows.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            rows.token[i], rows.pos[i], rows.n_seq_id[i], rows.logits[i] = token, position, 1, logits
            rows.seq_id[i][0] = sequence
        if status := lib.llama_decode(ctx, rows):
            raise SystemExit(f"llama_decode failed with {status}")

    rng = random.Random(0)
    for start in range(0, context, _ROWS):  # all sequences get the same context
        n = min(_ROWS, context - start)
        decode([rng.randrange(2, vocabulary) for _ in range(n)], list(range(start, start + n)), [0] * n, logits=False)
    for i in range(1, batch):
        lib.llama_memory_seq_cp(memory, 0, i, -1, -1)

    def seconds(steps: int) -> float:
        for i in range(batch):
            lib.llama_memory_seq_rm(memory, i, context, -1)
        tokens, everyone = [2 + i % 1000 for i in range(batch)], list(range(batch))
        start = perf_counter()
        for step in range(steps):
            decode(tokens, [context + step] * batch, everyone, logits=True)
            logits = np.ctypeslib.as_array(lib.llama_get_logits(ctx), (batch, vocabulary))
            tokens = logits.argmax(axis=1).tolist()
        return perf_counter() - start

    seconds(2)
    print("ready", flush=True)
    for line in sys.stdin:
        print(seconds(int(line)), flush=True)


if __name__ == "__main__":
    main()
