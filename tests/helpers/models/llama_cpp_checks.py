"""The logits of a GGUF file, of ours and of llama.cpp."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode.spart import SPart, load_model
from fastdecode.spart.step.batch import Chunk, StepBatch
from models.spart_steps import GREEDY, linked, run

needs_llama_cpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")

_SINGLE = 8  # tokens behind the prompt


async def last_logits(path: Path, tokens: list[int], tmp_path: Path) -> torch.Tensor:
    """The logits after a prompt, and after each of 8 tokens behind it."""
    loaded, n = load_model(path, dtype="fp32"), len(tokens)
    async with linked(loaded, tmp_path) as links:
        spart = SPart(loaded, links)
        chunks = [Chunk(0, 0, 1, 0, tokens[:-_SINGLE], True, GREEDY)]
        chunks += [Chunk(0, 0, 1, i, tokens[i : i + 1], False, GREEDY) for i in range(n - _SINGLE, n)]
        return torch.cat([run(spart.step(StepBatch(0, [chunk]), keep_logits=True)).logits for chunk in chunks])


def logits_of_llama_cpp(path: Path, tokens: list[int]) -> torch.Tensor:
    """The same by llama.cpp, with K and V in fp32."""
    import llama_cpp

    floats = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    theirs = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=2, **floats)
    theirs.eval(tokens)
    logits = torch.from_numpy(np.array(theirs.scores[len(tokens) - _SINGLE - 1 : len(tokens)]))
    theirs.close()
    return logits
