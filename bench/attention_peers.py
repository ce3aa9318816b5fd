"""Peers of the attention benchmark: decode attention of other projects, and of other versions of this one, on the same
shapes.

Each peer uses the one of its own formats that is nearest to the format of the cell.
"""

from __future__ import annotations

import functools
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from fastdecode.bench.ggml_peer import GgmlFlashAttention
from fastdecode.bench.openvino_peer import OpenVINOPagedAttention
from fastdecode.bench.other_version_peer import OtherVersionAttention
from fastdecode.bench.shape import Data, Shape
from fastdecode.bench.vllm_peer import VllmPagedAttention
from fastdecode.daemon.roofline import huge_pages
from fastdecode.spart.served import TORCH_DTYPES

#: Largest error of an element of O for normal K and V, by format. A peer without this format uses a finer one.
TOLERANCE = {"fp32": 5e-4, "fp16": 5e-3, "bf16": 1e-2, "int8": 4e-2, "fp8": 2e-1, "int4": 2e-1, "int8-int4": 2e-1}


class AttentionPeer(Protocol):
    """A peer with as many sequences as make up `kv_bytes` in its own format."""

    needs: str  # what must be installed, for messages
    format: str  # its own name of the format of K and V
    sequences: int
    kv_bytes: int

    @staticmethod
    def installed() -> bool: ...

    def __init__(self, shape: Shape, kv_dtype: str, kv_bytes: int, threads: int): ...

    def layer(self) -> float:
        """Run one layer of one step of all sequences; returns the seconds it took."""

    def output(self) -> np.ndarray:
        """O of the last `layer`, [sequences, q_heads, head_size] float32."""

    def close(self) -> None: ...


class TorchSDPA:
    """torch's scaled_dot_product_attention. The query heads of a group are passed as rows of one head, because torch's
    own `enable_gqa` repeats K and V in memory, which is slower."""

    needs = "torch"

    @staticmethod
    def installed() -> bool:
        return True

    def __init__(self, shape: Shape, kv_dtype: str, kv_bytes: int, threads: int):
        self.format = kv_dtype if kv_dtype in TORCH_DTYPES else "bf16"
        dtype = TORCH_DTYPES[self.format]
        token = 2 * shape.kv_heads * shape.head_size * dtype.itemsize
        self.sequences = shape.sequences(token, kv_bytes)
        self.kv_bytes = self.sequences * shape.context * token
        self._threads, self._shape = threads, shape
        data = Data.of(shape)

        def tiled(x: np.ndarray) -> torch.Tensor:  # [tokens, heads, d] -> [sequences, heads, tokens, d]
            one = torch.from_numpy(x).to(dtype).transpose(0, 1)
            memory = huge_pages(self.sequences * one.nbytes)
            every = torch.frombuffer(memory, dtype=dtype, count=self.sequences * one.numel())
            return every.view(self.sequences, *one.shape).copy_(one)

        self._k, self._v = tiled(data.k), tiled(data.v)
        self._q = tiled(data.q.reshape(shape.kv_heads, shape.group, -1).swapaxes(0, 1))
        self._o = self._q

    def layer(self) -> float:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            start = perf_counter()
            self._o = torch.nn.functional.scaled_dot_product_attention(self._q, self._k, self._v)
            return perf_counter() - start

    def output(self) -> np.ndarray:
        return self._o.float().reshape(self.sequences, self._shape.q_heads, self._shape.head_size).numpy()

    def close(self) -> None:
        del self._k, self._v


PEERS: dict[str, type[AttentionPeer]] = {
    "torch": TorchSDPA,
    "ggml": GgmlFlashAttention,
    "openvino": OpenVINOPagedAttention,
    "vllm": VllmPagedAttention,
    "fastdecode": OtherVersionAttention,
}


def installed() -> list[str]:
    """The names of the peers that can run on this machine."""
    return [name for name, peer in PEERS.items() if peer.installed()]


def check(peer: AttentionPeer, shape: Shape, kv_dtype: str) -> None:
    """Check the peer's last output against float64 attention. Raises RuntimeError if it is wrong."""
    error = float(np.abs(peer.output() - expected(shape)).max())
    if not error <= TOLERANCE["fp8" if peer.format == "fp8" else kv_dtype]:
        raise RuntimeError(f"the output of {type(peer).__name__} ({peer.format}) is wrong by {error:.2g}")


@functools.lru_cache(maxsize=1)
def expected(shape: Shape) -> np.ndarray:
    """O [q_heads, head_size] of `Data.of(shape)`, computed in float64."""
    data = Data.of(shape)
    q, k, v = (x.astype(np.float64) for x in (data.q, data.k, data.v))
    k, v = (x.swapaxes(0, 1) for x in (k, v))  # [kv_heads, context, head_size]
    scores = q.reshape(shape.kv_heads, shape.group, -1) @ k.swapaxes(1, 2) * shape.head_size**-0.5
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    o: np.ndarray = weights @ v / weights.sum(axis=2, keepdims=True)
    return o.reshape(shape.q_heads, -1)
