"""Peers of the decode benchmark: each loads the checkpoint once, then decodes some tokens of each sequence in a
round."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

from fastdecode.bench import vllm_worker
from fastdecode.bench.llama_cpp_peer import LlamaCpp
from fastdecode.bench.load import Load


class Peer(Protocol):
    """Another system that decodes `batch` sequences of `context` tokens."""

    def round(self, steps: int) -> float:
        """Decode `steps` tokens of every sequence, from the same context in each round; returns the seconds it took."""

    def close(self) -> None: ...


class Transformers:
    """transformers' `generate`, greedy, from a cache of `context` random tokens, with all cores in its turn."""

    def __init__(self, load: Load):
        """Raises ValueError unless the model is a directory and its weights are dense."""
        from transformers import AutoModelForCausalLM, DynamicCache

        _check_dense_directory("transformers", load)
        loaded: Any = AutoModelForCausalLM.from_pretrained(load.model, dtype=load.dtype)
        self._model = loaded.to(load.device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._context = context = load.context
        self._threads = load.threads
        vocab = self._model.config.vocab_size
        ids = torch.randint(vocab, (load.batch, context + 1), generator=torch.Generator().manual_seed(0))
        self._ids = ids.to(load.device)
        self._cache = DynamicCache(config=self._model.config)
        before = torch.get_num_threads()
        torch.set_num_threads(load.threads)
        with torch.inference_mode():
            self._model(self._ids[:, :context], past_key_values=self._cache, logits_to_keep=1)
        torch.set_num_threads(before)

    def round(self, steps: int) -> float:
        if grown := self._cache.get_seq_length() - self._context:
            self._cache.crop(-grown)
        mask = torch.ones_like(self._ids)
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        start = perf_counter()
        self._model.generate(
            self._ids,
            attention_mask=mask,
            past_key_values=self._cache,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
        )
        elapsed = perf_counter() - start
        torch.set_num_threads(before)
        return elapsed

    def close(self) -> None:
        pass


class Vllm:
    """vLLM in an environment of its own, whose Python interpreter FASTDECODE_VLLM_PYTHON names."""

    def __init__(self, load: Load):
        """Raises ValueError unless the model is a directory and its weights are dense, and where no python is named;
        RuntimeError if vLLM does not start."""
        _check_dense_directory("vllm", load)
        python = os.environ.get("FASTDECODE_VLLM_PYTHON")
        if not python:
            raise ValueError("the vllm peer needs FASTDECODE_VLLM_PYTHON, the python of an environment with vLLM")
        shape = [str(load.batch), str(load.context), str(load.dtype).split(".")[-1]]
        argv = [python, "-P", vllm_worker.__file__, str(load.model), *shape]
        cpus = sorted(os.sched_getaffinity(0))[: load.threads]
        env = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}-{cpus[-1]}",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        if self._read() != "ready":
            raise RuntimeError("vLLM did not start; see its log above")

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def round(self, steps: int) -> float:
        assert self._process.stdin
        print(steps, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def _check_dense_directory(peer: str, load: Load) -> None:
    if load.weights not in ("auto", "dense") or not load.model.is_dir():
        raise ValueError(f"the {peer} peer needs a model directory whose weights stay as they are stored")


PEERS: dict[str, Callable[[Load], Peer]] = {"transformers": Transformers, "vllm": Vllm, "llama.cpp": LlamaCpp}
