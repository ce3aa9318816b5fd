"""CUDA kernels of the native decoder: what it computes between two products, in four launches a layer of three kernels.

block.cu has the kernels. They have been compiled for every architecture and run on a CPU, but on no GPU.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).with_name("block.cu")
#: Threads of a block; the kernels are compiled with this FD_BLOCK_THREADS.
BLOCK_THREADS = 256
#: Elements of the largest head that the kernels take.
MOST_HEAD = 1024
