"""fastdecode-node --role r --device cuda on the simulated driver, which lies in the folder $GPU_KERNELS, as do the
libraries of functions_on_driver.py. The arguments are the node's. Ends with status 3 if it has imported torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

from fastdecode.daemon import rnode_gpu
from fastdecode.daemon.node import main
from fastdecode.kernels.gpu.cupy_kernels import DeviceLimits
from fastdecode.kernels.gpu.page_kernels import PageFunctions
from gpu.functions_on_driver import DriverFunctions

LIMITS = DeviceLimits((8, 0), 1, 227 << 10, 228 << 10, free_bytes=256 << 20)


def open_gpu(folder: Path) -> rnode_gpu.RNodeGpu:
    """The simulated driver's device. Both lie in `folder`, the driver and the kernels."""
    functions = DriverFunctions(folder)
    mock.patch.object(PageFunctions, "load", functions.load).start()
    return rnode_gpu.RNodeGpu(0, LIMITS)


def run() -> None:
    gpu = open_gpu(Path(os.environ["GPU_KERNELS"]))
    mock.patch.object(rnode_gpu, "device_limits", lambda device: gpu.limits).start()
    main(sys.argv[1:])
    sys.exit(3 if "torch" in sys.modules else 0)


if __name__ == "__main__":
    run()
