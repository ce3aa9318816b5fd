"""The parts of a proof, by name and in order. A part fills Setting.results. It raises Skipped if it cannot run here,
OutOfTime at its bound, and another exception if it fails."""

from __future__ import annotations

import json
import os
import platform
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fastdecode.daemon.machine import usable_cpus
from gpu_proof import places, round_trip, serving, under_load
from gpu_proof.setting import Setting, Skipped

#: `fastdecode-bench checkpoint` for the shapes of these models. Decode speed does not depend on the weights' values.
_LARGE = "--layers 32 --hidden 4096 --heads 32 --head-size 128 --kv-heads 8 --intermediate 14336 --vocab 128256"
_SMALL = "--layers 28 --hidden 3072 --heads 24 --head-size 128 --kv-heads 8 --intermediate 8192 --vocab 128256"
SHAPES = {"Llama-3-8B": _LARGE, "Llama-3.2-3B": _SMALL}
_LARGE_GIB = 20  # of a GPU that holds the larger model in fp16
_TINY = "--layers 2 --hidden 64 --heads 4 --head-size 16 --kv-heads 2 --intermediate 128 --vocab 4096"
BATCHES = (32, 64, 256)
CONTEXT = 512  # cached tokens of each sequence
#: The matrices of Llama-3-8B: Q, K and V; O; gate and up; down.
MATRICES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")
#: Sequences and their tokens.
ATTENTION = ("32:512", "256:512", "64:4096", "8:32768")


def machine(setting: Setting) -> None:
    """The machine and the packages that the proof runs on."""
    packages = ("torch", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "humming-kernels", "transformers")
    found = {"cpu": platform.processor() or platform.machine(), "cpus": len(usable_cpus())}
    found["ram_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    found |= {package: _version(package) for package in packages}
    cuda = setting.driver()
    device = cuda.call("cuDeviceGet", 0)
    found["gpu"] = cuda.call("cuDeviceGetName", 64, device).split(b"\0")[0].decode()
    found["gpu_memory_gib"] = round(int(cuda.call("cuDeviceTotalMem", device)) / 2**30)
    found["driver"] = cuda.call("cuDriverGetVersion")
    names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "CAN_USE_64_BIT_STREAM_MEM_OPS")
    for name in (*names, "CAN_USE_STREAM_WAIT_VALUE_NOR", "HOST_REGISTER_SUPPORTED", "CAN_FLUSH_REMOTE_WRITES"):
        number = getattr(cuda.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        found[name] = int(cuda.call("cuDeviceGetAttribute", number, device))
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
        found[name] = os.environ.get(name, "")
    setting.results |= found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _pytest(setting: Setting, name: str, *arguments: str, steps: int = 300) -> None:
    """Counts of a run of pytest. Raises RuntimeError if a test fails, Skipped if none runs."""
    report = setting.out / f"{name}.xml"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    try:
        setting.run(name, command, FASTDECODE_STEPS=str(steps))
    finally:
        if report.exists():
            suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
            counts = {key: int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
            reasons = sorted({skipped.get("message", "") for skipped in suite.iter("skipped")})
            setting.results |= {**counts, "skipped because": "; ".join(reasons)}
    if counts["tests"] == counts["skipped"]:
        raise Skipped("; ".join(reasons))


def tests(setting: Setting) -> None:
    """The tests of tests/gpu but that of this proof, and those of the kernels."""
    names = ("driver", "exchange", "replays", "page_replays", "bypass")
    files = [*(f"tests/gpu/test_{name}.py" for name in names), "tests/spart/test_exchange_kernels.py"]
    _pytest(setting, "tests", *files)


def steps(setting: Setting) -> None:
    """Replays of captured steps over shared memory and TCP, bit for bit like the host's."""
    which = "bit_for_bit and 8]" if setting.simulated else "bit_for_bit"  # 1 and 32 queues are for the tests above
    setting.results["steps of each test"] = setting.steps
    _pytest(setting, "steps", "tests/gpu/test_replays.py", "-k", which, steps=setting.steps)


def watchdog(setting: Setting) -> None:
    """R-nodes that are killed at every layer, stopped, or late: no stream hangs."""
    files = ["tests/gpu/test_replays.py", "tests/transports/test_device.py"]
    _pytest(setting, "watchdog", *files, "-k", "outlives or waits_for or killed or late")


def throughput(setting: Setting) -> None:
    """Output tokens a second of the split system, by the exchange that a node takes, of its two parts, and of peers."""
    setting.results |= {"cells": [], "peers": []}
    batches, context = ((4,), 16) if setting.simulated else (BATCHES, CONTEXT)
    model, dtype = _checkpoint(setting)
    with setting.share(0.5, "decode"):
        _decode(setting, model, batches, context)
    command = ["-m", "gpu_proof.peers", str(model), setting.device, dtype]
    for line in setting.lines("peers", [*command, *(f"{batch}:{context}" for batch in batches)]):
        setting.results["peers"].append(setting.timed_cell(json.loads(line)))


def prompts(setting: Setting) -> None:
    """See under_load.measure."""
    under_load.measure(setting, *_checkpoint(setting))


def r_node(setting: Setting) -> None:
    """See places.measure."""
    setting.need_torch_cuda()
    places.measure(setting, *_checkpoint(setting))


def _checkpoint(setting: Setting) -> tuple[Path, str]:
    """The directory of the model with random weights, which the first part that needs it writes, and its dtype."""
    name, shape = _shape(setting)
    setting.results["model"] = name
    model = setting.scratch / name
    if not model.exists():
        written = setting.scratch / "unfinished"
        command = ["-m", "fastdecode.bench.cli", "checkpoint", "--out", str(written)]
        command += ["--max-positions", "8192", "--dtype", "fp32" if setting.simulated else "fp16"]
        setting.run("checkpoint", [*command, *shape.split()])
        written.rename(model)
    return model, "float32" if setting.simulated else "float16"


def _shape(setting: Setting) -> tuple[str, str]:
    """The name and the options of the model that the GPU holds."""
    if setting.simulated:
        return "tiny", _TINY
    large = torch.cuda.get_device_properties(0).total_memory >= _LARGE_GIB << 30
    name = "Llama-3-8B" if large and setting.memory_gib >= _LARGE_GIB else "Llama-3.2-3B"
    return name, SHAPES[name]


def _decode(setting: Setting, model: Path, batches: Sequence[int], context: int) -> None:
    """The cells of `fastdecode-bench decode`, which keeps each as it ends."""
    out = setting.out / "decode.json"
    out.unlink(missing_ok=True)
    command = ["decode", "--model", str(model), "--device", setting.device, "--kv-dtype", "int8", "--out", str(out)]
    command += [part for batch in batches for part in ("--batch", str(batch))]
    sizes = ["fp32", "--steps", "2", "--rounds", "1"] if setting.simulated else ["fp16", "--cell-seconds", "20"]
    try:
        setting.bench("decode", *command, "--context", str(context), "--dtype", *sizes)
    finally:
        kept = json.loads(out.read_text()) if out.exists() else {"rows": []}
        setting.results["exchange"] = kept.get("exchange", "")
        names = ("batch", "context", "kv_dtype", "tokens_per_s", "s_tokens_per_s", "r_tokens_per_s", "note")
        rows = [{name: row[name] for name in names if row.get(name)} for row in kept["rows"]]
        setting.results["cells"] = [setting.timed_cell(row) for row in rows]


def weights(setting: Setting) -> None:
    """Products with weights in 16, 8 and 4 bits: the packed ones are to be 1.5 and 2.2 times as fast for few rows."""
    setting.results["cells"] = []
    matrices = ("96x128",) if setting.simulated else MATRICES
    for line in setting.lines("weights", ["-m", "gpu_proof.products", setting.device, *matrices]):
        setting.results["cells"].append(setting.timed_cell(json.loads(line)))


def attention(setting: Setting) -> None:
    """Attention over pages in the GPU's memory, and torch's over a dense cache."""
    setting.results["cells"] = []
    cells = ("1:130",) if setting.simulated else ATTENTION
    for line in setting.lines("attention", ["-m", "gpu_proof.attention", setting.device, *cells]):
        setting.results["cells"].append(setting.timed_cell(json.loads(line)))


#: Each part with the share of the proof's time that it may take, the important ones first.
PARTS: dict[str, tuple[Callable[[Setting], None], float]] = {
    "machine": (machine, 0.05),
    "tokens": (serving.against_transformers, 0.15),
    "exchanges": (serving.bypass_against_staged, 0.2),
    "throughput": (throughput, 0.4),
    "prompts": (prompts, 0.3),
    "r-node": (r_node, 0.2),
    "weights": (weights, 0.15),
    "attention": (attention, 0.1),
    "round-trip": (round_trip.measure, 0.1),
    "watchdog": (watchdog, 0.15),
    "tests": (tests, 0.2),
    "steps": (steps, 1.0),
}
