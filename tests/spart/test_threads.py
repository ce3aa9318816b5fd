"""The threads of an S-Part on a CPU: those of kernels/ and those of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from models.checkpoints import make_checkpoint

from fastdecode.spart import threads
from fastdecode.spart.linears.dense16 import keeps16
from fastdecode.spart.loader import load_model
from fastdecode.spart.threads import pool_threads, set_threads

CPU = torch.device("cpu")

#: A process that multiplies in two threads of kernels/, then adds tensors that torch would share among its threads,
#: and prints how many threads it has got.
_COUNT = """
import os, torch
from fastdecode.spart.linears.dense16 import Linear16
from fastdecode.spart.threads import set_threads

class Pooled:
    pooled = {pooled}

set_threads(2, Pooled())
before = len(os.listdir("/proc/self/task"))
linear, x = Linear16(torch.ones(2000, 200, dtype=torch.bfloat16)), torch.ones(4, 200)
linear(x)
torch.ones(1 << 22).add_(1)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.fixture(autouse=True)
def own_threads(monkeypatch):
    monkeypatch.setattr(threads, "_pool", None)


@pytest.mark.skipif(not keeps16(CPU), reason="an ISA without vectors")
@pytest.mark.parametrize(
    ("checkpoint", "weights", "pooled"),
    [
        ("llama-gqa", "dense", False),
        ("llama-gqa", "int8", True),
        ("llama-bf16", "dense", True),
        ("llama-bf16", "int4", True),
        ("mixtral", "dense", False),
        ("mixtral", "int8", True),
    ],
)
def test_torch_has_one_thread_where_kernels_compute_all_products(checkpoint, weights, pooled):
    model = load_model(make_checkpoint(checkpoint), device=CPU, dtype=torch.float32, weights=weights)
    assert model.pooled == pooled
    set_threads(3, model)
    assert (torch.get_num_threads(), pool_threads()) == (1 if pooled else 3, 3)


def test_kernels_take_as_many_threads_as_torch_unless_told_otherwise():
    torch.set_num_threads(2)
    assert pool_threads() == 2
    set_threads(3)
    assert (torch.get_num_threads(), pool_threads()) == (3, 3)


@pytest.mark.skipif(not keeps16(CPU), reason="an ISA without vectors")
@pytest.mark.parametrize(("pooled", "started"), [(True, 1), (False, 2)])
def test_openmp_starts_no_thread_for_a_model_of_kernels(pooled, started):
    script = [sys.executable, "-c", _COUNT.format(pooled=pooled)]
    assert int(subprocess.run(script, capture_output=True, text=True, check=True).stdout) == started
