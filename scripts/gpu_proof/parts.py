"""The parts of a proof, by name and in order. A part returns its results. It raises Skipped if it cannot run here, and
another exception if it fails."""

from __future__ import annotations

import os
import platform
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastdecode.daemon.machine import usable_cpus
from gpu_proof import round_trip, serving
from gpu_proof.setting import Setting, Skipped

_HOUR = 3600.0
#: `fastdecode-bench checkpoint` for the shapes of these models. Decode speed does not depend on the weights' values.
_LARGE = "--layers 32 --hidden 4096 --heads 32 --head-size 128"
SHAPES = {
    "Llama-3-8B": f"{_LARGE} --kv-heads 8 --intermediate 14336 --vocab 128256",
    "Llama-2-7B": f"{_LARGE} --kv-heads 32 --intermediate 11008 --vocab 32000",
}
_TINY = "--layers 2 --hidden 64 --heads 4 --head-size 16 --kv-heads 2 --intermediate 128 --vocab 4096"
BATCHES = (32, 64, 128, 256, 512, 1024)
FORMATS = ("fp16", "int8")
CONTEXT = 512  # cached tokens of each sequence


def machine(setting: Setting) -> dict[str, Any]:
    """The machine and the packages that the proof runs on."""
    packages = ("torch", "cuda-bindings", "nvidia-cuda-nvrtc-cu12", "transformers", "vllm")
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
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _pytest(setting: Setting, name: str, *arguments: str, steps: int = 300) -> dict[str, Any]:
    """Counts of a run of pytest. Raises RuntimeError if a test fails, Skipped if none runs."""
    report = setting.out / f"{name}.xml"
    hours = 0.5 + steps / 20_000
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    setting.run(name, command, hours * _HOUR, FASTDECODE_STEPS=str(steps))
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
    reasons = sorted({skipped.get("message", "") for skipped in suite.iter("skipped")})
    if counts["tests"] == counts["skipped"]:
        raise Skipped("; ".join(reasons))
    return {**counts, "skipped because": reasons}


def tests(setting: Setting) -> dict[str, Any]:
    """The tests of tests/gpu but that of this proof, and those of the kernels."""
    names = ("driver", "exchange", "replays", "bypass")
    files = [*(f"tests/gpu/test_{name}.py" for name in names), "tests/spart/test_exchange_kernels.py"]
    return _pytest(setting, "tests", *files)


def steps(setting: Setting) -> dict[str, Any]:
    """Replays of captured steps over shared memory and TCP, bit for bit like the host's."""
    which = "bit_for_bit and 8]" if setting.simulated else "bit_for_bit"  # 1 and 32 queues are for the tests above
    results = _pytest(setting, "steps", "tests/gpu/test_replays.py", "-k", which, steps=setting.steps)
    return {**results, "steps of each test": setting.steps}


def watchdog(setting: Setting) -> dict[str, Any]:
    """R-nodes that are killed at every layer, stopped, or late: no stream hangs."""
    files = ["tests/gpu/test_replays.py", "tests/transports/test_device.py"]
    return _pytest(setting, "watchdog", *files, "-k", "outlives or waits_for or killed or late")


def throughput(setting: Setting) -> dict[str, Any]:
    """Output tokens a second of the split system, of its two parts, and of vLLM where it is installed."""
    if not setting.simulated:
        setting.need_torch_cuda()
    shapes = {"tiny": _TINY} if setting.simulated else SHAPES
    batches, formats = ((4,), FORMATS[:1]) if setting.simulated else (BATCHES, FORMATS)
    peers = ["--peer", "vllm"] if "FASTDECODE_VLLM_PYTHON" in os.environ and not setting.simulated else []
    cells = []
    with tempfile.TemporaryDirectory(dir=setting.out) as folder:
        for shape, options in shapes.items():
            model = Path(folder, shape)
            checkpoint = ["-m", "fastdecode.bench.cli", "checkpoint", "--out", str(model), "--dtype", "fp16"]
            setting.run("checkpoint", [*checkpoint, *options.split()], _HOUR)
            for kv_dtype in formats:
                for batch in batches[:1] if setting.quick else batches:
                    cells.append(_decode(setting, shape, model, kv_dtype, batch, peers))
    return {
        "context": CONTEXT if not setting.simulated else 16,
        "vllm": "beside it, not bounded to the same GPU memory" if peers else "FASTDECODE_VLLM_PYTHON is not set",
        "cells": cells,
    }


def _decode(setting: Setting, shape: str, model: Path, kv_dtype: str, batch: int, peers: list[str]) -> dict[str, Any]:
    cell: dict[str, Any] = {"model": shape, "kv_dtype": kv_dtype, "batch": batch}
    small = ["--dtype", "fp32", "--context", "16", "--steps", "2", "--rounds", "1"]
    sizes = small if setting.simulated else ["--dtype", "fp16", "--context", str(CONTEXT)]
    command = ["decode", "--model", str(model), "--device", setting.device, "--kv-dtype", kv_dtype]
    try:
        command += ["--batch", str(batch), *sizes, *peers]
        found = setting.bench(f"decode-{shape}-{kv_dtype}-{batch}", *command, timeout=_HOUR)
    except RuntimeError as error:
        return {**cell, "failed": str(error)}  # too large for the memory, for example
    cell["exchange"] = found["exchange"]
    for name in ("tokens_per_s", "s_tokens_per_s", "r_tokens_per_s"):
        cell[name] = setting.timed(found[name])
    for peer, numbers in found["peers"].items():
        cell[f"{peer}_tokens_per_s"] = setting.timed(numbers["tokens_per_s"])
    return cell


PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "machine": machine,
    "tests": tests,
    "tokens": serving.against_transformers,
    "exchanges": serving.bypass_against_staged,
    "watchdog": watchdog,
    "steps": steps,
    "round-trip": round_trip.measure,
    "throughput": throughput,
}
