"""Another version of fastdecode in a child process of the attention benchmark, in its environment; see worker.py.

The worker uses only what `RPart` and `Shape` have had since they exist.
"""

import os
from typing import Any

import numpy as np

from fastdecode.bench.rpart import RPart
from fastdecode.bench.shape import Shape


class Worker:
    """The R-engine of the version that this Python imports."""

    def open(
        self, context: int, group: int, head_size: int, kv_heads: int, format: str, fill: int, threads: int, **how: Any
    ) -> dict[str, float]:
        """Cache as many sequences of `Data.of(shape)` as make up `fill` bytes. `how`: further options of RPart."""
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        shape = Shape(context, group, head_size, kv_heads)
        self._r_part = RPart(shape, format, fill, cpus, progress=False, **how)
        sizes = {name: getattr(self._r_part, name) for name in ("sequences", "kv_bytes")}
        return sizes | {"run_pages": self._r_part.run_pages()}

    def layer(self) -> float:
        return self._r_part.layer()[0]

    def output(self, to: str) -> None:
        np.save(to, self._r_part.output().astype(np.float32))

    def close(self) -> None:
        self._r_part.close()
