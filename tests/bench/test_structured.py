"""`fastdecode-bench structured` against a real server, and its judge."""

from __future__ import annotations

import asyncio
import json

import pytest
from api_client import served
from checkpoints import make_checkpoint
from real_engine import real_engine

from fastdecode.bench.cli import main
from fastdecode.bench.schemas import SCHEMAS, fault
from fastdecode.text.tokenizer import Tokenizer

pytest.importorskip("jsonschema")
pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "text", "follows"),
    [
        ("format date", '"2023-02-28"', True),
        ("format date", '"0000-02-29"', True),
        ("format date", '"2023-02-29"', False),
        ("format date", '"20230228"', False),
        ("bounds", "119", True),
        ("bounds", "120", False),
        ("enum", '"gre', False),
    ],
)
def test_judge(name, text, follows):
    assert (fault(text, SCHEMAS[name]) is None) == follows


async def test_all_answers_are_judged_and_steps_timed(tmp_path, capsys):
    pytest.importorskip("llguidance")
    checkpoint = make_checkpoint("llama-gqa")
    async with real_engine(checkpoint, tmp_path) as engine, served(engine, Tokenizer.from_dir(checkpoint)) as client:
        url = f"http://127.0.0.1:{client.server.port}/v1"
        sizes = ("--requests", "20", "--batch", "4", "--max-tokens", "60", "--rounds", "1", "--tokens", "4")
        await asyncio.to_thread(main, ["structured", "--url", url, *sizes, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["finished"] + result["cut"] == 20 and result["finished"]
    assert result["invalid"] == result["failed"] == []
    assert result["ratio"]["least"] > 0
