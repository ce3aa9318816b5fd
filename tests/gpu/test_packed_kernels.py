"""The kernels of packed weights (linears/gpu_kernels.py) are compiled for GPUs that this machine does not have.

Their values are seen on a GPU only: there, a trial compares each matrix's product with that of the converted matrix.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import cuda_driver

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/humming_compiled.py"
MODULES = ("humming", "triton", "nvidia.cuda_nvrtc", "nvidia.cuda_nvcc", "nvidia.cuda_cccl")

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name.partition(".")[0]) is None for name in MODULES)
        or any(importlib.util.find_spec(name) is None for name in MODULES),
        reason="needs humming-kernels[cu12] and triton",
    ),
    pytest.mark.skipif(cuda_driver.has_driver(), reason="this machine has a GPU"),
]


CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
FORMS = 7


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_form_is_taken_and_compiled(capability):
    """All forms, and a stack of experts; what the kernels read takes no more memory than what was packed. Three forms
    are compiled for each capability, and each form for three."""
    first = CAPABILITIES.index(capability)
    compiled = [(first + i) % FORMS for i in (0, 1, 3)]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(capability), ",".join(map(str, compiled))]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    forms = json.loads(run.stdout.splitlines()[-1])
    assert len(forms) == FORMS
    for number, (name, (packed, read, cubin)) in enumerate(forms.items()):
        assert read == pytest.approx(packed, rel=0.02), name
        assert cubin > 10_000 if number in compiled else cubin is None, name
