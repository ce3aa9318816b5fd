"""OpenVINO's PagedAttention on the CPU: the operation alone, with a cache of shuffled blocks."""

from __future__ import annotations

from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np

from fastdecode.bench.shape import Data, Shape
from fastdecode.daemon.roofline import huge_pages
from fastdecode.kernels import _native

#: KV format -> nearest OpenVINO cache precision.
_PRECISIONS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "u8", "int4": "u4", "int8-int4": "u8"}
_FILL_BLOCKS = 64  # filled by one inference


class OpenVINOPagedAttention:
    """One layer of PagedAttentionExtension. The CPU plugin decides the cache's element type, block size and scales."""

    needs = "openvino"

    @staticmethod
    def installed() -> bool:
        return find_spec("openvino") is not None

    def __init__(self, shape: Shape, kv_dtype: str, kv_bytes: int, threads: int):
        import openvino

        self._shape, self._ov = shape, openvino
        # The plugin has bf16 with AVX-512 only; fp16 takes as many bytes.
        wide = any(isa.startswith(("avx512", "amx")) for isa in _native.isa_supported())
        nearest = "fp16" if kv_dtype == "bf16" and not wide else kv_dtype
        hints = {
            "KV_CACHE_PRECISION": _PRECISIONS[nearest],
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if nearest in ("fp32", "fp16"):  # else the plugin also uses bf16 for the cache if the CPU has it
            hints["INFERENCE_PRECISION_HINT"] = "f32"
        compiled = openvino.Core().compile_model(self._model(), "CPU", hints)
        self._request = compiled.create_infer_request()
        caches = [compiled.input(name) for name in ("key_cache", "value_cache")]
        self.format = caches[0].get_element_type().get_type_name()
        layouts = [[d.get_length() for d in list(c.get_partial_shape())[1:]] for c in caches]
        self._block = min(layouts[0][1], layouts[1][1])  # the larger one includes room for scales
        per_sequence = -(-shape.context // self._block)
        block_bytes = sum(
            int(np.prod(layout)) * c.get_element_type().bitwidth // 8 for layout, c in zip(layouts, caches, strict=True)
        )
        self.sequences = shape.sequences(block_bytes / self._block, kv_bytes)
        blocks = self.sequences * per_sequence
        self.kv_bytes = blocks * block_bytes
        self._memory: list[np.ndarray] = []  # [blocks, bytes of a block] each for K and V
        for name, cache, layout in zip(("key_cache", "value_cache"), caches, layouts, strict=True):
            kind = cache.get_element_type()
            memory = huge_pages(blocks * int(np.prod(layout)) * kind.bitwidth // 8)
            raw = np.frombuffer(memory, np.uint8)[: blocks * int(np.prod(layout)) * kind.bitwidth // 8]
            self._memory.append(raw.reshape(blocks, -1))
            self._request.set_tensor(name, openvino.Tensor(raw, openvino.Shape([blocks, *layout]), kind))
        self._table = np.random.default_rng(0).permutation(blocks).reshape(self.sequences, per_sequence)
        self._fill(Data.of(shape))

    def _model(self) -> Any:
        """An OpenVINO model of one PagedAttention operation."""
        ov = self._ov
        from openvino import opset13

        shape, kind = self._shape, ov.Type

        def parameter(name: str, element: Any, dims: list[int]) -> Any:
            node = opset13.parameter(ov.PartialShape(dims), element, name)
            node.output(0).get_tensor().set_names({name})
            return node

        def scalar(value: float, element: Any) -> Any:
            return opset13.constant(np.array(value), dtype=element)

        def nothing(element: Any) -> Any:
            return opset13.constant(np.zeros(0), dtype=element)

        heads, d = shape.kv_heads, shape.head_size
        q = parameter("q", kind.f32, [-1, shape.q_heads * d])
        rows = [parameter(name, kind.f32, [-1, heads * d]) for name in ("k", "v")]
        caches = [parameter(name, kind.dynamic, [-1, -1, -1, -1]) for name in ("key_cache", "value_cache")]
        names = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
        tables = [parameter(name, kind.i32, [-1]) for name in names]
        longest = parameter("max_context_len", kind.i32, [])
        i32, f32 = kind.i32, kind.f32
        arguments = [
            *(q, *rows, *caches, *tables),
            *(scalar(d**-0.5, f32), scalar(0, i32), nothing(f32), longest),  # scale, sliding window, ALiBi
            *(nothing(i32), nothing(i32), nothing(i32), nothing(f32)),  # score window, rotation of evicted blocks
            *(nothing(f32), scalar(0, i32), scalar(0, i32), nothing(f32)),  # XAttention, sinks
            *(scalar(0, i32), nothing(i32), nothing(i32), nothing(i32)),  # adaptive R-KV
            *(nothing(i32), nothing(kind.u8), nothing(i32)),  # token types, query-query bias
        ]
        node = ov.op._PagedAttentionExtension([argument.output(0) for argument in arguments])
        for name, value in (("num_k_heads", heads), ("k_head_size", d), ("num_v_heads", heads), ("v_head_size", d)):
            node.get_rt_info()[name] = value
        return ov.Model([node.output(0)], [q, *rows, *caches, *tables, longest], "attention")

    def _set(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, past: int, lengths: np.ndarray, blocks: np.ndarray
    ) -> None:
        """Set the inputs for sequences with `lengths` new rows after `past` cached tokens; `blocks` is [sequences,
        n]."""
        n, i32 = len(lengths), np.int32
        values = {
            "q": q,
            "k": k,
            "v": v,
            "past_lens": np.full(n, past, i32),
            "subsequence_begins": np.concatenate([[0], np.cumsum(lengths)]).astype(i32),
            "block_indices": blocks.reshape(-1).astype(i32),
            "block_indices_begins": (np.arange(n + 1) * blocks.shape[1]).astype(i32),
            "max_context_len": np.array(past + lengths.max(), i32),
        }
        for name, value in values.items():
            self._request.set_tensor(name, self._ov.Tensor(np.asarray(value, order="C")))

    def _fill(self, data: Data) -> None:
        """Fill the cache: the operation fills the first sequence's blocks, each as a prompt; the others are copies."""
        cached, context = self._shape.context - 1, self._shape.context
        q = np.broadcast_to(data.q.reshape(1, -1).astype(np.float32), (context, data.q.size))
        k, v = (x.reshape(context, -1).astype(np.float32) for x in (data.k, data.v))
        step = _FILL_BLOCKS * self._block
        for start in range(0, cached, step):
            end = min(start + step, cached)
            lengths = np.diff([*range(start, end, self._block), end])
            first = start // self._block
            blocks = self._table[0, first : first + len(lengths), None]
            self._set(q[start:end], k[start:end], v[start:end], 0, lengths, blocks)
            self._request.infer()
        for memory in self._memory:
            memory[self._table[1:]] = memory[self._table[0]]
        n = self.sequences
        q, k, v = (np.repeat(x[-1:], n, axis=0) for x in (q, k, v))
        self._set(q, k, v, cached, np.ones(n, np.int64), self._table)

    def layer(self) -> float:
        start = perf_counter()
        self._request.infer()
        return perf_counter() - start

    def output(self) -> np.ndarray:
        o: np.ndarray = self._request.get_output_tensor(0).data
        return o.astype(np.float32).reshape(self.sequences, self._shape.q_heads, self._shape.head_size)

    def close(self) -> None:
        del self._request, self._memory
