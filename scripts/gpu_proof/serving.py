"""Whole S-nodes: their answers against transformers', and the exchanges of rows against each other."""

from __future__ import annotations

import asyncio
import json
import math
import random
import urllib.request
from pathlib import Path
from typing import Any

from fastdecode.bench.soaking.processes import Node
from fastdecode.demo import model_dir
from gpu_proof.setting import Setting

_PROMPTS, _TOKENS = 8, 24
_TOP = 5  # alternatives whose log-probabilities are compared


def prompts() -> list[list[int]]:
    """Prompts of 3 to 200 token ids of the demo model."""
    rng = random.Random(1)
    return [[rng.randint(300, 4000) for _ in range(rng.choice([3, 20, 70, 200]))] for _ in range(_PROMPTS)]


async def answers(setting: Setting, name: str, *options: str, **sampling: Any) -> list[Any]:
    """The choices of an S-node of the demo model, which gets all prompts at once."""
    model = str(model_dir())
    argv = ("--model", model, "--device", setting.device, "--dtype", "fp32", "--kv-dtype", "fp32", "--port", "0")
    node = Node(setting.out / f"{name}.log", *argv, *options)
    try:
        url = await node.read(r"Serving \S+ on (http://\S+)/v1")
        asked = (asyncio.to_thread(_complete, url, prompt, seed, sampling) for seed, prompt in enumerate(prompts()))
        return list(await asyncio.gather(*asked))
    finally:
        node.kill()


def _complete(url: str, prompt: list[int], seed: int, sampling: dict[str, Any]) -> Any:
    body = {"model": Path(model_dir()).name, "prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True, "seed": seed}
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        body["model"] = json.load(response)["data"][0]["id"]
    data = json.dumps(body | sampling).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]


def against_transformers(setting: Setting) -> None:
    """Greedy answers of an S-node against those of `generate` on the same device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).to(setting.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    want = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device=setting.device)
        options = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False, "pad_token_id": 0}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
        want.append(tokenizer.decode(made[0, len(prompt) :]))
    got = [choice["text"] for choice in asyncio.run(answers(setting, "tokens", temperature=0))]
    equal = sum(a == b for a, b in zip(got, want, strict=True))
    setting.results |= {"device": setting.device, "prompts": len(want), "tokens of each": _TOKENS, "equal": equal}
    if equal != len(want):
        raise RuntimeError(f"{equal} of {len(want)} answers are equal: {got} instead of {want}")


def bypass_against_staged(setting: Setting) -> None:
    """Tokens and log-probabilities of the two exchanges, greedy and drawn. A captured step multiplies other numbers of
    rows than a staged one, so its sums round otherwise."""
    setting.need_torch_cuda()
    compared, furthest, bound = 0, 0.0, tolerance(model_dir())
    for temperature in (0.0, 0.8):
        both = [
            asyncio.run(answers(setting, how, "--exchange", how, temperature=temperature, logprobs=_TOP))
            for how in ("staged", "bypass")
        ]
        compared += len(both[0])
        furthest = max(furthest, *map(difference, *both))
        setting.results[f"answers compared, with {_TOP} log-probabilities a token"] = compared
        setting.results |= {"largest difference": f"{furthest:.1e}", "tolerance": f"{bound:.1e}"}
        setting.left()
        if furthest > bound:
            raise RuntimeError(
                f"the answers differ by {furthest:.1e} (tolerance {bound:.1e}) at temperature {temperature}: "
                f"see {setting.out}"
            )


def tolerance(model: Path) -> float:
    """How far two computations in fp32 of a log-probability may be apart, relative to it or to 1.

    A sum of n products has a relative error of about sqrt(n) u, where u = 2^-24 (Higham and Mary, SIAM Journal on
    Scientific Computing 41(5), 2019, on probabilistic rounding error analysis). The errors of the products on the way
    through the model, seven a layer and the head's, are independent, as are those of the two computations.
    """
    config = json.loads((model / "config.json").read_bytes())
    terms = max(config["hidden_size"], config["intermediate_size"])
    return 2.0**-24 * math.sqrt(2 * terms * (7 * config["num_hidden_layers"] + 1))


def difference(one: Any, other: Any) -> float:
    """The largest difference between the log-probabilities of two choices, relative to their size or to 1; infinite if
    the texts differ. The alternatives' numbers are compared without their tokens: where the last alternatives are
    nearly equal, the two choices may list different tokens."""
    if one["text"] != other["text"]:
        return math.inf
    numbers = [
        choice["logprobs"]["token_logprobs"]
        + [x for top in choice["logprobs"]["top_logprobs"] for x in sorted(top.values(), reverse=True)[:_TOP]]
        for choice in (one, other)
    ]
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(*numbers, strict=True))
