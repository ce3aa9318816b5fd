"""The child process in which a peer of the decode benchmark runs, so that it can be killed and has its own threads.

    python -P decode_worker.py FILE ARGUMENTS

loads the class `Worker` of FILE with ARGUMENTS, a JSON object, and answers {} when the model is loaded. Each further
line is a JSON object: {"do": "fill", "batch": B, "context": C, "format": F} fills a KV-cache, {"do": "round",
"steps": N} decodes N tokens of every sequence from there and answers {"seconds": S}, and {"do": "clear"} frees the
cache. An error is answered {"error": sentence} and ends the process. It runs in any Python, without fastdecode.
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
        spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        worker = module.Worker(**json.loads(sys.argv[2]))
        answer({})
        for line in sys.stdin:
            asked = json.loads(line)
            seconds = getattr(worker, asked.pop("do"))(**asked)
            answer({} if seconds is None else {"seconds": seconds})
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        answer({"error": f"{type(error).__name__}: {lines[0]}"[:300]})


if __name__ == "__main__":
    main()
