"""attention_layers: the attention of a link's layers, as the kernels of kernels/gpu take it."""

from __future__ import annotations

from fastdecode.kernels.gpu.page_kernels import PagedLayer
from fastdecode.transports.base import HadamardHeads, Hello


def attention_layers(hello: Hello) -> list[PagedLayer]:
    """The attention of each layer of a link, for kernels/gpu."""
    g, options = hello.geometry, hello.layers
    usual = g.n_q_heads, g.n_kv_heads, g.head_size, g.v_size
    layers = []
    for i, window in enumerate(hello.windows):
        n_q, n_kv, size, v_size = options.heads[i] if options.heads else usual
        layers.append(
            PagedLayer(
                kv_dtype=hello.kv_dtype,
                act_dtype=g.act_dtype,
                n_q_heads=n_q,
                n_kv_heads=n_kv,
                head_size=size,
                softmax_scale=hello.softmax_scale,
                window=window,
                softcap=options.softcaps[i] if options.softcaps else 0.0,
                segment=options.segments[i] if options.segments else 0,
                v_size=v_size,
                v_in_k=g.v_in_k,
                hadamard=bool(options.hadamard & HadamardHeads.QK),
            )
        )
    return layers
