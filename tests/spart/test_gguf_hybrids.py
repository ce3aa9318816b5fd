"""GGUF files of mixtures of experts and of models whose blocks keep states: their tokens against transformers'."""

from __future__ import annotations

import logging
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.checkpoints import VARIANTS, YARN, make_model
from models.gguf_keys import config_of_keys
from models.gguf_made import write_gguf
from models.mtp_made import kind_of_head
from models.quantised_checks import EXACT, error_of_logits
from models.spart_steps import GREEDY, linked, run, text
from quick import quick

from fastdecode.spart import CheckpointError, Model, SPart, load_model, read_config
from fastdecode.spart.checkpoints.config_file import open_source
from fastdecode.spart.linears.quantised import Quantised
from fastdecode.spart.linears.rounding import quantise
from fastdecode.spart.loader import check_tensors
from fastdecode.spart.step.batch import Chunk, StepBatch

#: A shape whose V heads are whole blocks of the quantised types, and one whose V heads are cut by blocks.
WHOLE = {"linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
CUT = {"linear_value_head_dim": 16, "linear_num_value_heads": 4}
MODELS = {
    "qwen3.5": {},
    "qwen3.5-last": WHOLE,
    "qwen3.5-moe": CUT,
    "qwen3-next": {},
    "qwen3-moe": {},
    "mixtral": {"sliding_window": None},
    "gpt-oss": {"rope": {**YARN, "truncate": False, "beta_fast": 20.0, "beta_slow": 0.5}},
    "glm4-moe": {},
    "glm4-moe-qk-norm": {},
    "minimax-m2": {},
    "ernie4.5-moe": {},
}
NEW_TOKENS, MOST_DRAFTS = 12, 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str, **changes: Any) -> Any:
        family, config, storage = VARIANTS[name]
        monkeypatch.setitem(VARIANTS, name, (family, config | changes, storage))
        return make_model(name)

    return make


async def greedy_tokens(model: Model, tmp_path: Path, drafts: int = 0) -> tuple[list[int], list[tuple[int, ...]]]:
    """The tokens after a prompt of two chunks, and the drafts that each step made for what follows its token."""
    tokens, made = text(70, 2), []
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=1)
        chunks = [(0, 40, True), (40, 70, True), *((69 + i, 70 + i, False) for i in range(1, NEW_TOKENS))]
        for start, end, prefill in chunks:
            following, sample = (tokens[end], None) if end < 70 else (None, GREEDY)
            chunk = Chunk(0, 0, 1, start, tokens[start:end], prefill, sample, 70, state=0, following=following)
            [sampled] = run(spart.step(StepBatch(0, [chunk], drafts=drafts))).sampled
            if sampled is not None:
                tokens.append(sampled.token)
                made.append(tuple(sampled.drafts))
    return tokens, made


@pytest.mark.parametrize("name", quick(MODELS, "qwen3.5", "mixtral", "glm4-moe"))
async def test_tokens_are_those_of_transformers(name: str, made: Any, tmp_path: Path) -> None:
    theirs = made(name, **MODELS[name])
    write_gguf(tmp_path / "m.gguf", theirs, "F32")
    tokens, _ = await greedy_tokens(load_model(tmp_path / "m.gguf", dtype="fp32"), tmp_path)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    assert tokens == theirs.generate(torch.tensor([tokens[:70]]), **options)[0].tolist()


@pytest.mark.parametrize("shape", [WHOLE, CUT], ids=["whole V heads", "cut V heads"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
async def test_logits_of_quantised_files(name: str, shape: dict[str, int], made: Any, tmp_path: Path) -> None:
    theirs = made(name, **shape)
    kinds = {"attn_qkv": "Q4_0", "ssm_out": "Q8_0", "_exps": "Q4_1", "ffn_down_shexp": "F16", "": "Q5_0"}
    write_gguf(tmp_path / "m.gguf", theirs, kinds)
    assert await error_of_logits(tmp_path / "m.gguf", theirs, tmp_path) < EXACT


async def test_files_of_qwen3_next_whose_projections_stand_head_by_head(made: Any, tmp_path: Path) -> None:
    theirs = made("qwen3-next")
    write_gguf(tmp_path / "m.gguf", theirs, "F32", legacy=True)
    assert read_config(tmp_path / "m.gguf").delta.by_head
    assert await error_of_logits(tmp_path / "m.gguf", theirs, tmp_path) < EXACT / 10


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "glm4-moe"])
async def test_the_mtp_head_of_a_file_drafts_what_transformers_modules_draft(
    name: str, made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, path = made(name), tmp_path / "m.gguf"
    theirs.requires_grad_(False)
    head = kind_of_head(theirs)(theirs)
    write_gguf(path, theirs, "F32", head=head)
    with caplog.at_level(logging.INFO):
        load_model(path)
    assert "tensors are left aside" in caplog.text and "WARNING" not in caplog.text
    tokens, drafts = await greedy_tokens(load_model(path, dtype="fp32", mtp=MOST_DRAFTS), tmp_path, MOST_DRAFTS)
    assert [list(each) for each in drafts] == [head.drafts(tokens[: 71 + i], MOST_DRAFTS) for i in range(NEW_TOKENS)]


async def test_experts_with_gate_and_up_in_one_tensor_are_read(made: Any, tmp_path: Path) -> None:
    theirs = made("qwen3-moe")
    write_gguf(tmp_path / "m.gguf", theirs, "Q8_0", fused=True)
    assert await error_of_logits(tmp_path / "m.gguf", theirs, tmp_path) < EXACT


@pytest.mark.parametrize("group", [32, 16])
def test_inputs_of_a_quantised_matrix_are_put_in_order(group: int) -> None:
    matrix = quantise(torch.randn(5, 96), 8)
    index = torch.arange(96).view(-1, group).flip(0).flatten()
    selected = matrix.select_inputs(index)
    assert isinstance(selected, Quantised) and (selected.order is None) == (group == 32)
    assert torch.equal(selected.dequantise(), matrix.dequantise()[:, index])


def test_what_does_not_fit_is_named(made: Any, tmp_path: Path) -> None:
    theirs, path = made("qwen3.5"), tmp_path / "m.gguf"
    for name, parameter in theirs.named_parameters():
        if name == "model.layers.0.linear_attn.A_log":
            parameter.data.fill_(1.25)
    write_gguf(path, theirs, "F32", more=lambda writer: writer.add_uint32("qwen35.ssm.unheard", 1))
    with pytest.raises(CheckpointError, match=r"the key 'qwen35\.ssm\.unheard' is not understood"):
        read_config(path)
    write_gguf(path, theirs, "F32")
    decay = -np.exp(np.float32(1.25))
    path.write_bytes(path.read_bytes().replace(decay.tobytes(), (-decay).tobytes()))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ssm_a' has numbers that are not -exp"):
        load_model(path)


@pytest.mark.parametrize(
    "stored", ["ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight"]
)
def test_a_block_of_other_sizes_than_the_first_is_refused_before_weights_are_read(
    stored: str, made: Any, tmp_path: Path
) -> None:
    path, name = tmp_path / "m.gguf", f"blk.2.{stored}".encode()
    write_gguf(path, made("qwen3.5-moe", **CUT), "F32")
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    [n_dimensions] = struct.unpack_from("<I", data, at)
    rows = at + 4 + 8 * (n_dimensions - 1)
    struct.pack_into("<Q", data, rows, struct.unpack_from("<Q", data, rows)[0] - 1)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"'blk\.2\.{stored}' has shape"):
        check_tensors(open_source(path), read_config(path))


def test_damaged_headers_end_in_a_sentence(made: Any, tmp_path: Path) -> None:
    """A flipped byte is either harmless or a CheckpointError; nothing else is raised."""
    good, bad = tmp_path / "m.gguf", tmp_path / "bad.gguf"
    write_gguf(good, made("qwen3.5-moe"), "F32")
    whole, rng = good.read_bytes(), random.Random(0)
    keys = whole.index(b"blk.0.") - 30
    refused = 0
    for i in range(150):
        data = bytearray(whole)
        data[rng.randrange(24, keys if i % 2 else 2 * keys)] ^= 1 << rng.randrange(8)
        bad.write_bytes(data)
        try:
            check_tensors(open_source(bad), read_config(bad))
        except CheckpointError:
            refused += 1
    assert refused > 30


def test_the_keys_of_a_model_without_experts_are_not_those_of_a_mixture(made: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", made("qwen3.5"), "F32", {"qwen35.expert_count": 4})
    with pytest.raises(CheckpointError, match=r"'qwen35\.expert_count' is not understood"):
        read_config(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="architecture 'nemotron_h' is not known; known are llama"):
        config_of_keys(tmp_path / "n.gguf", "nemotron_h", {})
