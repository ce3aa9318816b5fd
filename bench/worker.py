"""The child process in which a peer of a benchmark runs, so that it can be killed and has its own threads.

    python -P worker.py FILE ARGUMENTS

loads the class `Worker` of FILE with ARGUMENTS, a JSON object, and answers {} when that is done. Each further line is a
JSON object: {"do": NAME, ...} calls the method NAME with the other fields. Its answer is what the method returns: a
JSON object, seconds as {"seconds": S}, or {} for nothing. An error is answered {"error": sentence}. The process runs in
any Python, without fastdecode.

Peers of the decode benchmark have `fill(batch, context, format)`, which fills a KV-cache, `round(steps)`, which decodes
tokens of every sequence from there and returns seconds, and `clear()`, which frees the cache. Peers of the attention
benchmark have `open(context, group, head_size, kv_heads, ...)`, which fills a cache, `layer()`, which attends one query
row of each sequence and returns seconds, `output(to)`, which writes O as .npy, [sequences, q_heads, head_size] float32,
and `close()`.
"""

import importlib.util
import json
import os
import sys
from typing import Any


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print to stdout

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    try:
        spec = importlib.util.spec_from_file_location("peer", sys.argv[1])
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        worker = module.Worker(**json.loads(sys.argv[2]))
    except Exception as error:
        answer(_sentence(error))
        return
    answer({})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            value = getattr(worker, asked.pop("do"))(**asked)
            answer(value if isinstance(value, dict) else {} if value is None else {"seconds": value})
        except Exception as error:
            answer(_sentence(error))


def _sentence(error: Exception) -> dict[str, Any]:
    lines = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {lines[0]}"[:300]}


if __name__ == "__main__":
    main()
