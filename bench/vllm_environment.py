"""Where vLLM is: it has an environment of its own, because it asks for a torch of its own."""

from __future__ import annotations

import os

from fastdecode.daemon.machine import usable_cpus


def vllm_python() -> str | None:
    """The python of an environment with vLLM, from FASTDECODE_VLLM_PYTHON; None if that is not set."""
    return os.environ.get("FASTDECODE_VLLM_PYTHON")


def needed_vllm_python() -> str:
    """The same. Raises ValueError if it is not set."""
    if python := vllm_python():
        return python
    raise ValueError("the vllm peer needs FASTDECODE_VLLM_PYTHON, the python of an environment with vLLM")


#: What the environment of a vLLM process has beside this process's.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


def vllm_env(kv_gib: int) -> dict[str, str]:
    """The same for a process on all cores with `kv_gib` GiB of KV-cache."""
    threads = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cpus()))}
    return QUIET | threads | {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib)}
