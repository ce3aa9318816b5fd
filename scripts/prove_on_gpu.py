#!/usr/bin/env python3
"""Runs, on a machine with an NVIDIA GPU, the proofs that fastdecode's tests cannot give without a GPU.

    pip install -e '.[test,plot,cuda12]'     # or cuda13, as torch's CUDA build has it
    python scripts/prove_on_gpu.py

writes proof.json and proof.md, a page of results, to bench/results/gpu-CARD. `--minutes` bounds the whole. The parts
that matter most run first, each with a bound of its own, at which what it has measured is kept. A part passes, fails,
is cut at its bound, or is skipped with a reason; the exit status is 1 if one fails. Send us the page of your card.

Without a GPU, the parts that can run use the simulated driver of tests/gpu/driver and tiny models on the CPU. The
results then have the word "simulated" in place of every time and every rate.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = [str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]
sys.path[:0] = _FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])  # of processes

from gpu import cuda_driver  # noqa: E402
from gpu_proof import page  # noqa: E402
from gpu_proof.parts import PARTS  # noqa: E402
from gpu_proof.setting import OutOfTime, Setting, Skipped  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parts = f"run this part alone (repeatable): {', '.join(PARTS)}"
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help=parts)
    parser.add_argument("--minutes", type=float, default=8.0, help="bound on all parts together (8)")
    parser.add_argument(
        "--steps", type=int, default=20_000, help="replays of a captured step on each transport (20000)"
    )
    parser.add_argument("--memory-gib", type=float, default=24.0, help="bound on the GPU memory of the S-Part (24)")
    args = parser.parse_args()
    card = card_name()
    out = (args.out or ROOT / "bench/results" / f"gpu-{re.sub('[^a-z0-9]+', '-', card.lower())}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        setting = Setting.here(out, Path(scratch), args.steps, args.memory_gib, args.minutes)
        proof: dict[str, Any] = {"card": card, "simulated": setting.simulated, "minutes": args.minutes}
        proof |= {"memory_gib": args.memory_gib, "parts": []}
        for name in args.only or PARTS:
            print(f"{name} ...", file=sys.stderr, flush=True)
            share = 1.0 if args.only else PARTS[name][1]
            proof["parts"].append(outcome(name, setting, 60 * args.minutes * share))
            (out / "proof.json").write_text(json.dumps(proof, indent=2) + "\n")
            (out / "proof.md").write_text(page.markdown(proof))
            part = proof["parts"][-1]
            print(f"{name}: {part['status']} {part['reason']}", file=sys.stderr, flush=True)
    print(out / "proof.md")
    return int(any(part["status"] == "failed" for part in proof["parts"]))


def card_name() -> str:
    """The GPU's name; "simulated" without one."""
    if not cuda_driver.has_driver() or not torch.cuda.is_available():
        return "simulated"
    return torch.cuda.get_device_name().removeprefix("NVIDIA ")


def outcome(name: str, setting: Setting, seconds: float) -> dict[str, object]:
    """A part's status, reason and results, of which it may take `seconds`."""
    start, reason, status = time.monotonic(), "", "passed"
    try:
        setting.begin(seconds)
        PARTS[name][0](setting)
    except Skipped as skipped:
        status, reason = "skipped", str(skipped)
    except OutOfTime as bound:
        status, reason = "cut", str(bound)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
        (setting.out / f"{name}.txt").write_text(traceback.format_exc())
    taken = setting.timed(time.monotonic() - start)
    return {"name": name, "status": status, "reason": reason, "seconds": taken, "results": setting.results}


if __name__ == "__main__":
    sys.exit(main())
