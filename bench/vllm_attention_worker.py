"""vLLM's paged attention in a child process of the attention benchmark, in an environment of its own; see worker.py."""

import mmap
from time import perf_counter
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

_BLOCK = 128  # tokens in a block; vLLM's own choice for CPUs


class Worker:
    """One layer of attention of sequences of equal length."""

    def open(self, **a: Any) -> dict[str, int]:
        """Make a cache of `sequences`, each with the K and V of `data`, an .npz of q [q_heads, head_size] and k, v
        [context, kv_heads, head_size], fp16, in a `format` of vLLM's cache. Raises ValueError for another shape."""
        if a["head_size"] not in CPUAttentionBackend.get_supported_head_sizes():
            raise ValueError(f"vLLM supports no head size of {a['head_size']}")
        torch.set_num_threads(a["threads"])
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # asks the OS for permission to use the tiles, which vLLM's operation assumes
        fp8 = a["format"] == "fp8"
        dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(a["format"], torch.bfloat16)
        n, heads, d = a["sequences"], a["kv_heads"], a["head_size"]
        per_sequence = -(-a["context"] // _BLOCK)
        kind = torch.uint8 if fp8 else dtype
        elements = n * per_sequence * heads * 2 * _BLOCK * d
        self._memory = mmap.mmap(-1, elements * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        cache = torch.frombuffer(self._memory, dtype=kind).view(n * per_sequence, heads, 2 * _BLOCK, d)
        k_cache, v_cache = cache.chunk(2, dim=2)
        table = torch.from_numpy(np.random.default_rng(0).permutation(n * per_sequence)).view(n, per_sequence)
        cache_dtype = "fp8" if fp8 else "auto"
        isa = _get_attn_isa(dtype, _BLOCK, d, cache_dtype)
        data = {name: torch.from_numpy(x).to(dtype) for name, x in np.load(a["data"]).items()}
        tokens = torch.arange(a["context"])
        slots = table[0, tokens // _BLOCK] * _BLOCK + tokens % _BLOCK
        _custom_ops.cpu_attn_reshape_and_cache(
            data["k"], data["v"], k_cache, v_cache, slots, isa, kv_cache_dtype=cache_dtype
        )
        one = cache[table[0]]
        for row in table[1:]:
            cache[row] = one
        q = data["q"].repeat(n, 1, 1)
        starts, lengths = (x.to(torch.int32) for x in (torch.arange(n + 1), torch.full((n,), a["context"])))
        self._o = torch.empty_like(q)
        metadata = _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=n,
            num_heads=heads * a["group"],
            num_kv_heads=heads,
            head_dim=d,
            seq_lens=lengths,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
            kv_cache_dtype=cache_dtype,
        )
        self._arguments = {
            "query": q,
            "key_cache": k_cache,
            "value_cache": v_cache,
            "output": self._o,
            "query_start_loc": starts,
            "seq_lens": lengths,
            "scale": d**-0.5,
            "causal": True,
            "alibi_slopes": None,
            "sliding_window": -1,
            "block_table": table.to(torch.int32),
            "softcap": 0.0,
            "scheduler_metadata": metadata,
            "s_aux": None,
            "kv_cache_dtype": cache_dtype,
        }
        return {"kv_bytes": cache.nbytes}

    def layer(self) -> float:
        start = perf_counter()
        _custom_ops.cpu_attention_with_kv_cache(**self._arguments)
        return perf_counter() - start

    def output(self, to: str) -> None:
        np.save(to, self._o.float().numpy())

    def close(self) -> None:
        del self._arguments, self._o, self._memory
