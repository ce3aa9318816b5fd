"""Compiles the kernels that humming-kernels has for packed matrices, for a GPU that this machine does not have.

The arguments are its compute capability, such as "80", and the forms to compile, such as "0,1,3". The simulated driver
answers what the library asks of a device. Fake tensors go through KernelProduct, so the library checks shapes and
dtypes of each form. The script prints a JSON object: for each form the bytes of the packed matrices, the bytes that the
kernels read, and the size of a kernel, null for a form that is not compiled. Nothing is launched, because the library's
launcher needs torch with CUDA.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpu.cuda_driver import SimulatedCuda, open_driver

#: What a kernel may use of a device, beside its capability.
_ATTRIBUTES = {
    "MULTIPROCESSOR_COUNT": 128,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_THREADS_PER_MULTIPROCESSOR": 1536,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "L2_CACHE_SIZE": 40 << 20,
    "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 99 << 10,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 100 << 10,
    "MEMORY_CLOCK_RATE": 9_000_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 384,
    "CLOCK_RATE": 2_000_000,
}
_LARGE = {90, 100}  # of these, a block may use more shared memory


def pretend(driver: SimulatedCuda, capability: int) -> None:
    """Let the simulated device have a capability, and torch believe that it can use it."""
    shared = {"MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 << 10}
    attributes = _ATTRIBUTES | (shared if capability in _LARGE else {})
    attributes |= {"COMPUTE_CAPABILITY_MAJOR": capability // 10, "COMPUTE_CAPABILITY_MINOR": capability % 10}
    for name, value in attributes.items():
        driver.set_attribute(name, value)
    patched: Any = torch.cuda
    patched.is_available = lambda: True
    patched.current_device = lambda: 0
    patched.set_device = lambda device: None
    patched._exchange_device = patched._maybe_exchange_device = lambda device: 0
    patched.current_stream = lambda device=None: type("Stream", (), {"cuda_stream": 7})
    patched.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.version.cuda = "12.9"
    made = torch.tensor

    def tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        """torch.tensor makes no fake tensor of a device that torch was not built for."""
        here = made(data, dtype=dtype)
        return here if device is None else torch.empty(here.shape, dtype=here.dtype, device=device)

    torch.tensor = tensor  # type: ignore[assignment]


def guardless() -> None:
    """Two functions of a tensor choose its device in C, which torch without CUDA cannot; their operations can."""
    patched: Any = FakeTensor
    indexed = torch.Tensor.__getitem__

    def item(x: torch.Tensor, key: Any) -> torch.Tensor:
        if isinstance(key, tuple) and isinstance(key[-1], torch.Tensor):  # of the last dimension
            return torch.ops.aten.index.Tensor(x, [*[None] * (x.dim() - 1), key[-1]])
        return indexed(x, key)

    patched.contiguous = lambda x: x.clone(memory_format=torch.contiguous_format)
    patched.__getitem__ = item


def forms(dtype: torch.dtype) -> dict[str, Any]:
    """A packed matrix [256, 512] of each form, and those of four experts."""
    from fastdecode.spart.linears.packed import PackedMatrix

    def matrix(bits: int, group: int, zeros: bool, table: bool = False) -> PackedMatrix:
        codes = torch.empty(256, 512 * bits // 8, dtype=torch.uint8, device="cuda")
        scales = torch.empty(256, 512 // group, dtype=dtype, device="cuda")
        numbers = torch.empty(16, dtype=dtype, device="cuda") if table else None
        return PackedMatrix(codes, scales, scales if zeros else None, bits, group, numbers, 256, 512)

    return {
        "4 bits": [matrix(4, 128, False)],
        "4 bits with zero points": [matrix(4, 32, True)],
        "8 bits": [matrix(8, 32, False)],
        "8 bits with zero points": [matrix(8, 32, True)],
        "8 bits, whole rows": [matrix(8, 512, False)],
        "E2M1": [matrix(4, 32, False, table=True)],
        "experts in E2M1": [matrix(4, 32, False, table=True) for _ in range(4)],
    }


def run(capability: int, compiled: set[int]) -> dict[str, Any]:
    from humming.kernel.humming import HummingKernel

    from fastdecode.spart.linears.gpu_kernels import KernelProduct

    sizes: list[int] = []

    def note(kernel: Any) -> None:
        """In place of loading the kernel."""
        kernel.kernel_id = len(sizes)
        sizes.append(Path(kernel.kernel_filename).stat().st_size)

    HummingKernel.register_kernel = note
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    results = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for number, (name, matrices) in enumerate(forms(dtype).items()):
            product = KernelProduct(matrices)
            layer, how, tuning = HummingKernel._resolve_configs(product._config, product._how, None, 0)
            options = tuning[0][2]  # of the fewest rows
            options.pop("num_sms", None)
            if number in compiled:
                HummingKernel(**layer, **how, **options)
            size = sizes[-1] if number in compiled else None
            results[name] = [sum(matrix.nbytes for matrix in matrices), product.nbytes, size]
    return results


def main() -> None:
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HUMMING_CACHE_DIR"] = f"{folder}/humming"
        driver = open_driver(Path(folder))
        assert isinstance(driver, SimulatedCuda)
        capability, compiled = int(sys.argv[1]), set(map(int, sys.argv[2].split(",")))
        pretend(driver, capability)
        guardless()
        print(json.dumps(run(capability, compiled)))


if __name__ == "__main__":
    main()
