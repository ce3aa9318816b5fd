"""The decode benchmark's vLLM worker: a child process in vLLM's own environment, which has no fastdecode.

    python vllm_worker.py MODEL BATCH CONTEXT DTYPE

prints "ready" when the model is loaded and the prompts are in vLLM's prefix cache. Then it answers each line "STEPS"
with the seconds that STEPS tokens of every sequence took: the time for STEPS + 1 tokens less the time for one.
"""

import random
import sys
from time import perf_counter


def main() -> None:
    from vllm import LLM, SamplingParams

    model, batch, context, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    out = sys.stdout
    sys.stdout = sys.stderr  # vLLM prints to stdout
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=context + 512,
        max_num_seqs=batch,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    rng = random.Random(0)
    vocabulary = llm.get_tokenizer().vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(2, vocabulary) for _ in range(context)]} for _ in range(batch)]

    def seconds(tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return perf_counter() - start

    seconds(2)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        steps = int(line)
        print(seconds(steps + 1) - seconds(1), file=out, flush=True)


if __name__ == "__main__":
    main()
