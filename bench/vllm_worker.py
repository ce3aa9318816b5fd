"""vLLM in a child process of the decode benchmark, in an environment of its own; see worker.py."""

import random
from time import perf_counter
from typing import Any

_CONNECTOR = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"startup_fill": True},  # once, not for each request
}


class Worker:
    """vLLM's engine, greedy, with the connector that it has for such benchmarks.

    The K and V of a prompt, but for its last token, count as computed elsewhere. The blocks are each sequence's own.
    """

    def __init__(self, model: str, dtype: str, format: str, batch: int, context: int, steps: int):
        """`format`: of the KV-cache; that of the model, or "fp8". `batch` and `context`: the most of a cell."""
        from vllm import LLM

        longest = context + 2 * steps + 64
        self._llm: Any = LLM(
            model,
            dtype=dtype,
            kv_cache_dtype="fp8" if format == "fp8" else "auto",
            max_model_len=longest,
            max_num_seqs=batch,
            enable_prefix_caching=False,
            kv_transfer_config=_CONNECTOR,
            disable_log_stats=True,
            hf_overrides=lambda config: _with_positions(config, longest),
        )
        self._round = 0

    def fill(self, batch: int, context: int, format: str) -> None:
        """Draw the prompts."""
        rng = random.Random(f"{batch} {context}")
        vocabulary = self._llm.get_tokenizer().vocab_size
        self._prompts = [[rng.randrange(2, vocabulary) for _ in range(context)] for _ in range(batch)]

    def round(self, steps: int) -> float:
        """Time steps of the engine from the one in which every sequence has its first token."""
        from vllm import SamplingParams

        engine, self._round = self._llm.llm_engine, self._round + 1
        # Prompts are taken in over some steps, and the sequences that come first decode until the last one has come.
        most = steps + 64 + len(self._prompts)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        names = [f"{self._round}-{i}" for i in range(len(self._prompts))]
        for name, prompt in zip(names, self._prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
        start = perf_counter()
        for _ in range(steps):
            decoded = len(engine.step())
            if decoded != len(names):
                raise RuntimeError(f"vLLM decoded {decoded} of {len(names)} sequences in a step; it lacks KV-cache")
        seconds = perf_counter() - start
        engine.abort_request(names)
        return seconds

    def clear(self) -> None:
        self._prompts = []


def _with_positions(config: Any, positions: int) -> Any:
    """The model's configuration with `positions` positions: a cell may decode more tokens than a model is made for."""
    if getattr(config, "max_position_embeddings", positions) < positions:
        config.max_position_embeddings = positions
    return config
