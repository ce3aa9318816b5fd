"""`fastdecode-bench split`: what it prints, of two layouts with real nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif("FASTDECODE_SLOW" not in os.environ, reason="starts five nodes; FASTDECODE_SLOW=1 runs it")
def test_both_layouts_give_the_same_texts():
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    command = [sys.executable, "-m", "fastdecode.bench.cli", "split", "--json", "--cores", cores]
    run = subprocess.run(
        [*command, "--prompts", "2", "--prompt-tokens", "600", "--every", "1", "--streams", "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["texts_compared"], found["texts_that_differ"]) == (4, 0)
    assert found["tokens_compared"] > 100
    assert all(layout["tbt_ms"]["most"] > 0 for layout in found["layouts"].values())
