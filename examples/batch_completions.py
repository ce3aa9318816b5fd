"""Complete every line of a file, many at once, and write one JSON object a line in the order of the prompts.

    python examples/batch_completions.py prompts.txt > completions.jsonl

More requests in flight make larger batches, which is what fastdecode is for; --concurrency bounds them. Needs the
openai client and a running S-node (`fastdecode-node --role s`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from openai import AsyncOpenAI, OpenAIError


async def complete_all(client: AsyncOpenAI, model: str, prompts: list[str], args: argparse.Namespace) -> int:
    """Print the completions; return how many tokens were generated."""
    slots = asyncio.Semaphore(args.concurrency)

    async def complete(prompt: str) -> tuple[str, str, int]:
        async with slots:
            answer = await client.completions.create(
                model=model, prompt=prompt, max_tokens=args.max_tokens, temperature=args.temperature
            )
        choice = answer.choices[0]
        return choice.text, choice.finish_reason, answer.usage.completion_tokens if answer.usage else 0

    tasks = [asyncio.create_task(complete(prompt)) for prompt in prompts]
    generated = 0
    for prompt, task in zip(prompts, tasks, strict=True):
        text, finish_reason, n_tokens = await task
        generated += n_tokens
        print(json.dumps({"prompt": prompt, "completion": text, "finish_reason": finish_reason}, ensure_ascii=False))
    return generated


async def run(args: argparse.Namespace) -> None:
    prompts = [line for line in args.prompts.read_text().splitlines() if line.strip()]
    # A full queue is answered by a 429, which the client tries again.
    async with AsyncOpenAI(base_url=args.url, api_key=args.api_key, max_retries=20) as client:
        models = await client.with_options(max_retries=2).models.list()
        model = models.data[0].id  # an S-node serves one model
        begun = time.perf_counter()
        generated = await complete_all(client, model, prompts, args)
    seconds = time.perf_counter() - begun
    print(f"{len(prompts)} prompts, {generated} tokens in {seconds:.1f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete every line of a file.")
    parser.add_argument("prompts", type=Path, help="text file, one prompt a line")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    parser.add_argument("--api-key", default="none", help="the key in the server's --api-key-file, if it has one")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a completion; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight; default: %(default)s")
    try:
        asyncio.run(run(parser.parse_args()))
    except OpenAIError as error:
        sys.exit(f"batch_completions: the server at --url cannot be asked: {error}")


if __name__ == "__main__":
    main()
