"""Products with weights in 16, 8 and 4 bits, in a process of its own.

Arguments: a device, and shapes such as 6144x4096 (outputs and inputs of a matrix). It prints a JSON object for each
shape and number of rows: the microseconds of each product, and how the packed ones are computed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fastdecode.spart.linears.gpu import GPULinear
from fastdecode.spart.linears.gpu_kernels import kernels_fault
from fastdecode.spart.linears.packed import pack
from fastdecode.spart.linears.quantised import Quantised
from gpu_proof.peers import step_ms

ROWS = (1, 4, 16, 64, 512)
_GROUP = 128
#: Products of a captured step, each with weights of its own, so that none of them finds its weights in the GPU's cache.
_CACHE_BYTES, _MOST = 128 << 20, 16


def packed(bits: int, outs: int, ins: int, device: torch.device) -> GPULinear:
    q = torch.randint(0, 1 << bits, (outs, ins), dtype=torch.uint8)
    scales = torch.rand(outs, ins // _GROUP) * 0.01 + 1e-3
    return GPULinear(pack(Quantised(q, scales, None, 1 << (bits - 1), bits, _GROUP), device, torch.float16), None)


def products(outs: int, ins: int, device: torch.device) -> dict[str, list[Callable[[torch.Tensor], torch.Tensor]]]:
    """Products of each kind, enough of them to fill the GPU's cache."""

    def several(bits: int) -> int:
        return min(_MOST, 1 + _CACHE_BYTES * 8 // (outs * ins * bits)) if device.type == "cuda" else 1

    dense = [torch.randn(outs, ins, device=device).half() for _ in range(several(16))]
    kinds: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
        "fp16": [lambda x, weight=weight: F.linear(x, weight) for weight in dense]  # type: ignore[misc]
    }
    for bits in (8, 4):
        kinds[f"{bits} bits"] = [packed(bits, outs, ins, device) for _ in range(several(bits))]
    return kinds


@torch.inference_mode()
def main() -> None:
    device = torch.device(sys.argv[1])
    how = kernels_fault(device, torch.float16) or "by humming-kernels"
    for shape in sys.argv[2:]:
        outs, ins = map(int, shape.split("x"))
        kinds = products(outs, ins, device)
        for rows in ROWS:
            x = torch.randn(rows, ins, device=device).half()
            cell: dict[str, object] = {"shape": shape, "rows": rows, "packed": how}
            for kind, functions in kinds.items():
                step = lambda functions=functions, x=x: [function(x) for function in functions]  # noqa: E731
                cell[f"{kind}_us"] = step_ms(step, device) * 1e3 / len(functions)
            print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
