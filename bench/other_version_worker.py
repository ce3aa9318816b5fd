"""The attention benchmark's worker for another version of fastdecode: a child process in that version's environment.

It reads one JSON object a line and answers each with one line:

    {"do": "open", "context", "group", "head_size", "kv_heads", "format", "fill", "threads",
     "scattered"}
        caches as many sequences of `Data.of(shape)` as make up `fill` bytes, in pages that RPart scatters if
        `scattered`; answer: {"sequences", "kv_bytes", "run_pages"}
    {"do": "layer"}             runs the R-engine, one query row for each sequence; answer: {"seconds"}
    {"do": "output", "to"}      writes the last result as .npy, [sequences, q_heads, head_size] float32; answer: {}
    {"do": "close"}             frees the cache; answer: {}

If that version does not support a request, the answer is {"error"}. The worker uses only what `RPart` and `Shape` have
had since they exist.
"""

import json
import os
import sys
from typing import Any

import numpy as np

from fastdecode.bench.rpart import RPart
from fastdecode.bench.shape import Shape


def answer(request: dict[str, Any], held: list[RPart]) -> dict[str, Any]:
    if request["do"] == "open":
        cpus = sorted(os.sched_getaffinity(0))[: request["threads"]]
        shape = Shape(request["context"], request["group"], request["head_size"], request["kv_heads"])
        how = {"progress": False, "scattered": request["scattered"]}
        held.append(RPart(shape, request["format"], request["fill"], cpus, **how))
        return {name: getattr(held[0], name) for name in ("sequences", "kv_bytes")} | {"run_pages": held[0].run_pages()}
    if request["do"] == "layer":
        return {"seconds": held[0].layer()[0]}
    if request["do"] == "output":
        np.save(request["to"], held[0].output().astype(np.float32))
    else:
        held.pop().close()
    return {}


def main() -> None:
    held: list[RPart] = []
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line), held)
        except (MemoryError, RuntimeError, ValueError) as error:
            reply = {"error": str(error) or type(error).__name__}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
