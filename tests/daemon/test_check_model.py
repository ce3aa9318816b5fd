"""The size of the weights that `--check --model` reports, against the weights when they are loaded."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from models.checkpoints import make_checkpoint, make_model
from models.gguf_made import write_gguf
from models.hf_models import TYPES
from models.hf_models import save_model as save_hf_model
from models.mtp_made import make_head
from ranks.in_threads import HFRanks

from fastdecode.daemon.check import report
from fastdecode.daemon.check_model import rows
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.options import WEIGHTS
from fastdecode.daemon.snode_start import run_s_node
from fastdecode.daemon.weights import weights_of
from fastdecode.demo import model_dir
from fastdecode.kernels import _native
from fastdecode.spart import load_model
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.hf.model import load_hf_model
from fastdecode.spart.loader import parameter_count

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, make_model("llama-gqa"), "Q4_1")
    return path


@pytest.mark.parametrize("kind", ["directory", "gguf"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_size_in_memory_is_about_right(kind, weights, gguf_file):
    path = gguf_file if kind == "gguf" else make_checkpoint("llama-gqa")
    said = dict(rows(NodeConfig(model=path, weights=weights, dtype="fp32"), choose_backend("auto", path)))["weights"]
    number, unit = re.match(r"([\d.]+) (KiB|B)", said).groups()
    model = load_model(path, dtype="fp32", weights=weights)
    assert model.parameters == parameter_count(model.config)
    assert float(number) * {"B": 1, "KiB": 1024}[unit] == pytest.approx(model.weight_bytes, rel=0.3)
    assert ("GGUF Q4_1" in said) == (kind == "gguf")


@pytest.mark.parametrize("checkpoint", ["llama-gqa", "llama-mha"])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_dense_embedding_that_is_also_the_head_counts_twice(backend, checkpoint):
    chosen = choose_backend(backend, make_checkpoint(checkpoint))
    model = chosen.load("cpu", "fp32")
    said, _ = weights_of(NodeConfig(), chosen, torch.device("cpu"), torch.float32)
    assert said == pytest.approx(model.weight_bytes, rel=0.01)


def test_a_16_bit_checkpoint_keeps_its_size_with_fp32_activations():
    path = make_checkpoint("llama-bf16")
    said = dict(rows(NodeConfig(model=path, dtype="fp32"), choose_backend("auto", path)))["weights"]
    assert "kept as bfloat16; activations in float32" in said
    model = load_model(path, dtype="fp32")
    number = float(re.match(r"([\d.]+) KiB", said).group(1))
    assert 1024 * number == pytest.approx(2 * model.parameters, rel=0.01)
    assert model.weight_bytes < 3 * model.parameters


@pytest.mark.parametrize(
    ("checkpoint", "options", "note"),
    [
        ("llama-fp16", {"dtype": "bf16"}, "from fp16 to bf16, whose significand has 8 bits instead of 11"),
        ("llama-mha", {"dtype": "fp16", "weights": "dense"}, "from fp32 to fp16, whose significand has 11 bits"),
        ("llama-bf16", {"dtype": "bf16"}, None),
        ("llama-fp16", {"dtype": "fp32"}, None),
        ("llama-fp16", {"dtype": "bf16", "weights": "int8"}, None),
    ],
)
def test_what_rounding_weights_to_a_dtype_loses_is_said(checkpoint, options, note, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    said = precision(checkpoint, **options)
    assert said is None if note is None else note in said


@pytest.mark.parametrize(
    "options", [{"dtype": "bf16"}, {"dtype": "auto"}, {"dtype": "bf16", "weights": "int8"}], ids=str
)
def test_a_dtype_without_instructions_is_said_to_be_slow(options, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    said = precision("llama-bf16", **options)
    slow = "this CPU has no instructions for bf16: steps of many sequences are faster in fp32"
    assert said == (slow if options == {"dtype": "bf16"} else None)


@pytest.mark.parametrize(("weights", "slow"), [("dense", True), ("auto", False), ("int8", False)])
def test_a_quantised_file_that_is_unpacked_to_a_dtype_without_instructions_is_said_to_be_slow(
    weights, slow, gguf_file, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    config = NodeConfig(model=gguf_file, weights=weights, dtype="bf16", device="cpu")
    said = dict(rows(config, choose_backend("auto", gguf_file))).get("precision")
    assert (said or "").startswith("this CPU has no instructions for bf16: steps of many") == slow


@pytest.mark.parametrize("isa", _native.isa_supported())
def test_a_faster_dtype_for_fp16_is_named_where_the_cpu_has_amx(isa, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)
    said = precision("llama-fp16", dtype="auto")
    assert ("--dtype bf16" in said) if isa == "amx" else said is None


@pytest.mark.parametrize(
    ("checkpoint", "n", "copies"),
    [("llama-gqa", 2, 1), ("llama-gqa", 4, 2), ("llama-mha", 3, 1.5), ("deepseek_v3", 2, 2), ("gemma", 2, 1)],
)
def test_ranks_that_have_the_same_kv_head_keep_k_and_v_several_times(checkpoint, n, copies, tmp_path):
    path = save_hf_model(checkpoint, tmp_path) if checkpoint in TYPES else make_checkpoint(checkpoint)
    backend = choose_backend("auto", path)
    one, several = (
        int(re.search(r"hold (\d+) tokens", dict(rows(config, backend))["KV fp16"])[1])
        for config in (NodeConfig(model=path, kv_memory=1 << 26, tensor_parallel=i, device="cpu") for i in (1, n))
    )
    assert several == pytest.approx(one / copies, rel=0.001)


def test_what_each_rank_has_whole_counts_for_each(tmp_path):
    path = save_hf_model("gemma4_text", tmp_path)
    backend = choose_backend("transformers", path)
    one, two = (
        weights_of(NodeConfig(model=path, tensor_parallel=n), backend, torch.device("cpu"), torch.float32)[0]
        for n in (1, 2)
    )
    ranks = HFRanks(path, 2, dtype="fp32").models
    held = sum(model.weight_bytes for model in ranks) - load_hf_model(path, dtype="fp32").weight_bytes
    assert two - one == pytest.approx(held, rel=0.05)


def precision(checkpoint: str, **options: str) -> str | None:
    path = make_checkpoint(checkpoint)
    return dict(rows(NodeConfig(model=path, device="cpu", **options), choose_backend("auto", path))).get("precision")


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(backend, tmp_path):
    directory = Path(shutil.copytree(make_checkpoint("llama-mha"), tmp_path / "large"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_size": 1 << 27, "head_dim": 16}))
    with (directory / "more.safetensors").open("wb") as file:  # a file with a hole: 1 TiB that takes no room
        file.truncate(1 << 40)
    for weights, advice in (("auto", "; --weights int8 and int4 take less"), ("int8", "; --weights int4 takes less")):
        with pytest.raises(ConfigError, match=rf"weights take about .* [GT]iB \({weights} weights, .*{advice}$"):
            run_s_node(NodeConfig(model=directory, backend=backend, port=0, weights=weights))
    with pytest.raises(ConfigError, match=r"memory are available on cpu$"):  # nothing is smaller than int4
        run_s_node(NodeConfig(model=directory, backend=backend, port=0, weights="int4", device="cpu"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9876543\n"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("model.safetensors", POINTER, "model.safetensors is a Git LFS pointer"),
        ("config.json", POINTER, "config.json is a Git LFS pointer"),
        ("tokenizer.json", POINTER, "tokenizer.json is a Git LFS pointer"),
        ("tokenizer.json", "{", "tokenizer.json: "),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("m.gguf", POINTER, "m.gguf is a Git LFS pointer"),
        ("m.gguf", b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(200), "m.gguf is big-endian"),
        ("config.json", {"tie_word_embeddings": False}, "lacks the tensor 'lm_head.weight'"),
        ("config.json", "[" * 100_000, "config.json is nested too deeply"),
        ("generation_config.json", "[]", "generation_config.json is not a JSON object"),
        ("generation_config.json", "[" * 100_000, "generation_config.json: depth limit exceeded"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("generation", ["auto", "none"])
def test_check_refuses_what_a_node_refuses_in_the_same_words(tmp_path, file, content, says, generation):
    directory = Path(shutil.copytree(model_dir(), tmp_path / "m"))
    path = directory / file
    match content:
        case None:
            path.unlink()
        case bytes():
            path.write_bytes(content)
        case str():
            path.write_text(content)
        case dict():
            path.write_text(json.dumps(json.loads(path.read_text()) | content))
    model = path if file.endswith(".gguf") else directory
    config = NodeConfig(model=model, port=0, kv_memory=2**26, generation_config=generation)
    messages = []
    for start in (report, run_s_node):
        with pytest.raises((ValueError, OSError)) as caught:
            start(config)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and says in messages[0]


def test_a_state_that_does_not_fit_is_refused_by_the_report_and_at_start():
    options = NodeConfig(model=make_checkpoint("qwen3.5"), port=0, dtype="fp32", state_memory=1024)
    reason = r"keeps a state of 21\.2 KiB, and there are 1\.0 KiB for states: raise --state-memory"
    with pytest.raises(ConfigError, match=reason):
        rows(options, choose_backend("auto", options.model))
    with pytest.raises(ConfigError, match=reason):
        run_s_node(options)


def test_the_report_says_what_a_state_takes():
    path = make_checkpoint("qwen3.5")
    lines = dict(rows(NodeConfig(model=path, max_batch_size=8), choose_backend("auto", path)))
    assert "2 layers with K and V and layers with states" in lines["model"]
    state = load_model(path, dtype="fp32").config.state_bytes(4)
    assert lines["states"].startswith(f"{state / 1024:.1f} KiB per sequence; ")


@pytest.mark.parametrize(
    "options",
    [{name: ("tcp://a:1",), "r_node": ("tcp://b:2",)} for name in ("prefill_at",)],
    ids=str,
)
def test_what_a_model_with_states_does_not_have_is_refused(options):
    path = make_checkpoint("qwen3.5")
    with pytest.raises(ConfigError, match="its layers keep states, which are not on R-nodes"):
        rows(NodeConfig(model=path, **options), choose_backend("auto", path))


def test_v_that_is_a_part_of_k_has_the_format_of_k(tmp_path):
    path = save_hf_model("deepseek_v3", tmp_path)
    backend = choose_backend("transformers", path)
    lines = dict(rows(NodeConfig(model=path), backend))
    assert "1 KV heads of 24 (V: the first 16)" in lines["model"]
    assert "KV int8" in lines and "KV int8-int4" not in lines
    with pytest.raises(ConfigError, match="whose V is a part of K and is stored with it: use one of fp32, "):
        rows(NodeConfig(model=path, kv_dtype="int8-int4"), backend)


def test_an_mtp_head_counts_with_its_weights_and_its_kv(tmp_path):
    directory = make_checkpoint("qwen3.5")
    path = make_head(directory).save(directory, tmp_path / "m")
    plain, heads = (
        report(NodeConfig(role="s", model=path, dtype="fp32", device="cpu", speculate=text))
        for text in ("off", "mtp:2")
    )
    # Two layers attend, and the head is a third; 2 KV heads of K and V, 32 elements of 4 bytes.
    for said, layers in ((plain, 2), (heads, 3)):
        assert f"{layers * 2 * 2 * 32 * 4 / 1024:.1f} KiB per token" in said
    number = float(re.search(r"weights +([\d.]+) MiB", heads).group(1))
    held = load_model(path, dtype="fp32", mtp=2).weight_bytes
    assert number * 2**20 == pytest.approx(held, rel=0.05) and held > 1.1 * load_model(path, dtype="fp32").weight_bytes
    assert "2 layers with K and V, layers with states and an MTP head" in heads


def test_an_mtp_head_of_a_model_of_transformers_counts_with_its_kv(tmp_path):
    directory = save_hf_model("deepseek_v32", tmp_path)
    path = make_head(directory).save(directory, tmp_path / "m")
    config = NodeConfig(model=path, kv_dtype="fp32", device="cpu", speculate="mtp:2")
    backend = choose_backend("auto", path)
    plain, head = (dict(rows(config, backend.with_mtp(drafts))) for drafts in (0, 2))
    # The head is one more layer like the three of the model, with an indexer of its own.
    per_token = [int(re.match(r"(\d+) B per token", said["KV fp32"]).group(1)) for said in (plain, head)]
    assert per_token[1] == per_token[0] * 4 / 3
    assert "(3 layers and an MTP head, " in head["model"]


@pytest.mark.parametrize(
    ("name", "backend", "says"),
    [
        ("qwen3.5", "auto", "the checkpoint has no MTP head to draft tokens"),
        ("llama-gqa", "auto", "an MTP head of LlamaForCausalLM is not supported"),
        ("qwen3.5", "transformers", "an MTP head of a model of type 'qwen3_5_text' is not supported"),
    ],
)
def test_a_model_without_an_mtp_head_is_refused(name, backend, says):
    config = NodeConfig(role="s", model=make_checkpoint(name), backend=backend, device="cpu", speculate="mtp:2")
    with pytest.raises(CheckpointError, match=says):
        report(config)


def test_a_model_of_transformers_without_an_mtp_head_is_refused(tmp_path):
    backend = choose_backend("auto", save_hf_model("deepseek_v32", tmp_path))
    with pytest.raises(CheckpointError, match=r"no MTP head .*: it lacks the tensor 'model\.layers\.3\.eh_proj"):
        backend.with_mtp(2)
