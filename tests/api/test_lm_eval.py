"""lm-eval's client for completions, unmodified, against lm-eval's own transformers backend on the same checkpoint.

lm-eval is not in the extra `test`, because it brings some forty other packages: `pip install "lm-eval[api]"`.
"""

from __future__ import annotations

import asyncio

import pytest
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from models.checkpoints import make_checkpoint

from fastdecode.text.tokenizer import Tokenizer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")

PAIRS = [
    ("The quick brown fox", " jumps over the lazy dog"),
    ("A node that has memory to spare", " keeps the cache"),
    ("Zwölf", " Boxkämpfer jagen Viktor quer"),
    ("0123456789 +", " 42 = 123456831"),
    ("The", " The The The"),
]


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


async def test_lm_eval_finds_what_its_own_backend_finds(tmp_path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    checkpoint = make_checkpoint("llama-gqa")
    theirs = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1)
    until = [("The quick brown fox", {"until": ["\n"], "max_gen_toks": 12, "do_sample": False})]
    expected = theirs.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    texts = theirs.generate_until(instances("generate_until", until), disable_tqdm=True)
    async with (
        real_engine(checkpoint, tmp_path) as engine,
        served(engine, Tokenizer.from_dir(checkpoint)) as client,
    ):
        ours = LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{client.server.port}/v1/completions",
            model=MODEL,
            tokenizer=str(checkpoint),
            tokenizer_backend="huggingface",
            num_concurrent=1,
            max_retries=1,
        )
        found = await asyncio.to_thread(ours.loglikelihood, instances("loglikelihood", PAIRS), disable_tqdm=True)
        written = await asyncio.to_thread(ours.generate_until, instances("generate_until", until), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert written == texts
