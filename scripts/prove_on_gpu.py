#!/usr/bin/env python3
"""Runs, on a machine with an NVIDIA GPU, the proofs that fastdecode's tests cannot give without a GPU.

    pip install -e '.[test,plot,cuda12]'     # or cuda13, as torch's CUDA build has it
    python scripts/prove_on_gpu.py --out proof

writes proof/proof.json and proof/proof.html, a page of results. Each part passes, fails, or is skipped with a reason;
the exit status is 1 if one fails. `--quick` takes minutes instead of hours: 300 steps, and one batch size a model.

Without a GPU, the parts that can run use the simulated driver of tests/gpu/driver and tiny models on the CPU. The
results then have the word "simulated" in place of every time and every rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]

from gpu_proof import page  # noqa: E402
from gpu_proof.parts import PARTS  # noqa: E402
from gpu_proof.setting import Setting, Skipped  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parts = f"run this part alone (repeatable): {', '.join(PARTS)}"
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help=parts)
    parser.add_argument("--steps", type=int, default=100_000, help="replays of a captured step on each transport")
    parser.add_argument("--memory-gib", type=float, default=24.0, help="bound on the GPU memory of the S-Part")
    parser.add_argument("--quick", action="store_true", help="300 steps, and one batch size a model")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    setting = Setting.here(args.out.resolve(), 300 if args.quick else args.steps, args.memory_gib, args.quick)
    proof = {"simulated": setting.simulated, "steps": setting.steps, "memory_gib": args.memory_gib, "parts": []}
    for name in args.only or PARTS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        proof["parts"].append(outcome(name, setting))
        (args.out / "proof.json").write_text(json.dumps(proof, indent=2) + "\n")
        (args.out / "proof.html").write_text(page.html(proof))
        part = proof["parts"][-1]
        print(f"{name}: {part['status']} {part['reason']}", file=sys.stderr, flush=True)
    return int(any(part["status"] == "failed" for part in proof["parts"]))


def outcome(name: str, setting: Setting) -> dict[str, object]:
    """A part's status, reason and results."""
    start, results, reason, status = time.monotonic(), {}, "", "passed"
    try:
        results = PARTS[name](setting)
    except Skipped as skipped:
        status, reason = "skipped", str(skipped)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
        (setting.out / f"{name}.txt").write_text(traceback.format_exc())
    seconds = setting.timed(time.monotonic() - start)
    return {"name": name, "status": status, "reason": reason, "seconds": seconds, "results": results}


if __name__ == "__main__":
    sys.exit(main())
