"""Reading checkpoints: what their configuration means, and how a bad one is refused."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models.checkpoints import BUFFERS, VARIANTS, make_checkpoint, reference
from ranks.in_threads import Ranks
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastdecode.region.geometry import Geometry
from fastdecode.spart import CheckpointError, choose_device, choose_dtype, load_model, read_config
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.checkpoints import tensors
from fastdecode.spart.checkpoints.config import WrongValue
from fastdecode.spart.checkpoints.families import FAMILIES, make_config
from fastdecode.spart.checkpoints.tensors import require_finite
from fastdecode.spart.decoder.block_ops import ACTIVATIONS
from fastdecode.spart.decoder.blueprint import Blueprint
from fastdecode.spart.linears.dense import PackedLinear, known_rows
from fastdecode.spart.loader import _Wanted
from fastdecode.spart.parameters import progress
from fastdecode.spart.parameters.progress import LoadProgress


@pytest.fixture
def copy(tmp_path):
    """A function that copies a checkpoint, for a test to damage."""

    def make(name: str = "llama-mha") -> Path:
        return Path(shutil.copytree(make_checkpoint(name), tmp_path / name))

    return make


def edit_config(directory: Path, remove: tuple[str, ...] = (), **changes) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in remove}))


def edit_tensors(directory: Path, edit) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in VARIANTS if "gemma4" not in name])  # which transformers 4 lacks
def test_both_spellings_of_rope_mean_the_same(name, copy):
    """transformers 5 writes rope_parameters and dtype; 4 wrote rope_theta, rope_scaling and torch_dtype."""
    directory = copy(name)
    new = read_config(directory)
    raw = json.loads((directory / "config.json").read_text())
    rope = raw.get("rope_parameters") or {}
    local = rope.get("sliding_attention")  # a table for each type of layers; 4 scaled only one of them
    rope = rope.get("full_attention", rope)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    for kind in ("rope_type", "type"):  # before 4.43 it was "type"
        if scaling:
            scaling[kind] = scaling.pop("rope_type", None) or scaling.pop("type", None)
        old = {"rope_scaling": None if scaling.get(kind) == "default" else scaling, "torch_dtype": raw["dtype"]}
        if rope:
            old["rope_theta"] = rope["rope_theta"]
            old["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
        if local:
            old["rope_local_base_freq"] = local["rope_theta"]
        edit_config(directory, ("rope_parameters", "dtype"), **old)
        assert read_config(directory) == new


NAN = float("nan")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_transformers(name):
    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(ACTIVATIONS[name](x.clone()), ACT2FN[name](x), rtol=1e-5, atol=1e-6)


def test_geometry_and_windows():
    config = read_config(make_checkpoint("mistral"))
    assert config.hello_geometry(2, 64, "bf16") == Geometry(2, 64, 3, 4, 2, 32, "bf16")
    assert config.windows == (16, 16, 16)
    assert config.softmax_scale == pytest.approx(32**-0.5)
    assert read_config(make_checkpoint("qwen2-window")).windows == (0, 16, 16)
    assert read_config(make_checkpoint("qwen2")).windows == (0, 0, 0)
    assert read_config(make_checkpoint("mistral-full")).windows == (0, 0, 0)


def test_end_tokens_come_from_both_files(copy):
    directory = copy()
    edit_config(directory, eos_token_id=[1, 5])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert read_config(directory).eos_token_ids == (1, 5, 7)
    (directory / "generation_config.json").unlink()
    edit_config(directory, eos_token_id=9)
    assert read_config(directory).eos_token_ids == (9,)


def test_unknown_architecture_is_named_with_the_known_ones(copy):
    directory = copy()
    edit_config(directory, architectures=["MambaForCausalLM"])
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM.*LlamaForCausalLM.*OPTForCausalLM"):
        load_model(directory)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 20}, "head size 20"),
        ({"head_dim": 584}, "head size 584"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        ({"rope_parameters": {"rope_type": "axial"}}, "'axial' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "'short_factor' is None"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "1 factors for 8"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor' is None"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"hidden_act": "swiglu"}, "'swiglu'"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantised by 'bitsandbytes'.*known are compressed",
        ),
        ({"hidden_size": "64"}, "'hidden_size' is '64'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
        ({"num_hidden_layers": 10**7}, "10000000 layers"),
        ({"num_hidden_layers": 10**18}, "'num_hidden_layers' is 1000000000000000000, more than"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' is 10+, not a finite"),
        ({"hidden_act": None}, "'hidden_act' is None, not a name"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "'rope_type' is .'x'., not a name"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "attention_factor": NAN}}, "'attention_factor' is nan"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}},
            "'beta_slow' is 1, 'beta_fast' 0.5",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "a 'rope_theta' of 1 is too small"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
            "'low_freq_factor' is 4, 'high_freq_factor' 1",
        ),
        ({"architectures": 5}, "'architectures' is 5"),
        ({"dtype": ["float32"]}, "dtype .'float32'. is not one of"),
        ({"eos_token_id": {"a": 1}}, "'eos_token_id' is {'a': 1}"),
        ({"rope_parameters": [1]}, "'rope_parameters' is .1., not an object"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "'factor' is 0.0, not a positive"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": "x"}}, "'x', not a number"),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0.5}},
            "embeddings' is 0.5, less",
        ),
        ({"quantization_config": "awq"}, "'quantization_config' is 'awq', not an object"),
        ({"rms_norm_eps": NAN}, "'rms_norm_eps' is nan"),
        ({"architectures": ["X"], "model_type": [1]}, "unknown architecture X"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_cannot_be_served_says_why(copy, changes, message):
    directory = copy()
    edit_config(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_window_layers": "1"}, "'max_window_layers' is '1', not a whole number"),
        ({"max_window_layers": -1}, "'max_window_layers' is -1, not a whole number"),
        ({"layer_types": [["full_attention"]] * 3}, "layer type .'full_attention'. is not one of"),
        ({"layer_types": [{}] * 3}, "layer type {} is not one of"),
    ],
    ids=str,
)
def test_layers_with_windows_that_cannot_be_told_are_named(copy, changes, message):
    directory = copy("qwen2-window")
    edit_config(directory, **({"layer_types": None} | changes))
    with pytest.raises(CheckpointError, match=message):
        read_config(directory)


@pytest.mark.parametrize(
    "changes",
    [
        *({"hidden_size": "64"}, {"num_hidden_layers": 10**7}, {"num_hidden_layers": -1}, {"hidden_act": None}),
        *({"attention_bias": 0}, {"eos_token_id": "1"}, {"dtype": "x"}, {"architectures": 1}, {"head_dim": 0}),
        {"rope_parameters": {"rope_type": "yarn", "factor": 0, "rope_theta": 10000.0}},
    ],
    ids=str,
)
def test_what_no_model_can_have_is_refused_by_each_backend(copy, changes):
    """The transformers backend does not take what the native decoder has found to be wrong."""
    directory = copy()
    edit_config(directory, **changes)
    with pytest.raises(WrongValue, match=rf"^{directory}: "):
        choose_backend("auto", directory)
    if changes.keys() & {"rope_parameters", "architectures"}:  # which transformers takes
        return
    with pytest.raises(CheckpointError):
        choose_backend("transformers", directory)


def test_an_architecture_and_a_model_type_that_contradict_each_other_are_named(copy):
    """transformers goes by the type alone."""
    directory = copy()
    edit_config(directory, model_type="mistral")
    with pytest.raises(WrongValue, match="has 'LlamaForCausalLM', and 'model_type' is 'mistral', another"):
        choose_backend("auto", directory)
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name in FAMILIES:
            with pytest.raises(CheckpointError, match=r"lacks 'num_hidden_layers'|tensors have names of their own"):
                make_config({"architectures": [name], "model_type": model_type, "num_hidden_layers": None})


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_weights_that_are_not_finite_are_refused(copy, backend):
    """Attention hides what is not finite in Q or K."""
    directory = copy()
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][3, 5] = NAN
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"tensor 'model\.layers\.1\.self_attn\.q_proj\.weight' has numbers that are"
    ):
        choose_backend(backend, directory).load(torch.device("cpu"), torch.float32)


def test_integers_without_a_quantization_config_are_no_weights(copy):
    directory = copy()
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    for backend in ("native", "transformers"):
        with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.0\.mlp\.up_proj\.weight' is stored as I8"):
            choose_backend(backend, directory).check_tensors()


def test_a_missing_key_is_named(copy):
    directory = copy()
    edit_config(directory, remove=("hidden_size",))
    with pytest.raises(CheckpointError, match="lacks 'hidden_size'"):
        load_model(directory)


def test_not_a_model_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_model(tmp_path)


# -- tensors ----------------------------------------------------------------------------------------------------------


def test_packed_products_compile_few_kernels_and_are_right_for_every_number_of_rows():
    """oneDNN compiles a kernel for each distinct number of rows, and a server meets all numbers."""
    weight, bias = torch.randn(24, 16), torch.randn(24)
    packed = PackedLinear(weight, bias)
    for n in (*range(1, 130), 511, 512, 513):
        x = torch.randn(n, 16)
        assert torch.allclose(packed(x), x @ weight.T + bias, atol=1e-5)
        assert n <= known_rows(n) <= n * 17 / 16 + 1
    assert len({known_rows(n) for n in range(1, 513)}) <= 96
    assert all(known_rows(n) == n for n in range(1, 33))


@pytest.mark.quick
@pytest.mark.parametrize("name", VARIANTS)
def test_every_number_of_the_checkpoint_is_loaded(name):
    """Sums of parameters, so that a tensor in the wrong half of a fused one would still have to be found elsewhere."""
    directory = make_checkpoint(name)
    model = load_model(directory, dtype="fp32")
    theirs = reference(directory)
    stored = [*theirs.parameters(), *(b for name, b in theirs.named_buffers() if name.endswith(BUFFERS))]
    assert model.parameters == sum(tensor.numel() for tensor in stored)


def test_a_sharded_checkpoint_has_several_files():
    directory = make_checkpoint("llama-gqa")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    assert (directory / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("name", ["llama-bf16", "llama-fp16", "llama-mha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted(name, dtype):
    stored = load_file(make_checkpoint(name) / "model.safetensors")
    layer = load_model(make_checkpoint(name), dtype=dtype).weights.layers[1]
    assert layer.mlp_norm.weight.dtype == dtype
    assert torch.equal(layer.mlp_norm.weight, stored["model.layers.1.post_attention_layernorm.weight"].to(dtype))
    up = stored["model.layers.1.mlp.up_proj.weight"].to(dtype)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        ours, theirs = layer.mlp.up(x)[:, 96:].double(), x.double() @ up.double().T
    assert (ours - theirs).abs().max() <= 8 * torch.finfo(dtype).eps * theirs.abs().max()


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.5-moe"])
def test_experts_that_lie_in_two_tensors_are_read_one_by_one(name, copy):
    """As transformers itself names and lays out the parameters of a layer's experts."""
    directory = copy(name)

    def stack(tensors):
        for block in {key.partition(".experts.")[0] for key in tensors if ".experts." in key}:
            matrices = [
                [tensors.pop(f"{block}.experts.{e}.{kind}_proj.weight") for kind in ("gate", "up", "down")]
                for e in range(6)
            ]
            tensors[f"{block}.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in matrices])
            tensors[f"{block}.experts.down_proj"] = torch.stack([down for *_, down in matrices])

    edit_tensors(directory, stack)
    theirs, same = (reference(path).state_dict() for path in (directory, make_checkpoint(name)))
    assert all(torch.equal(theirs[key], same[key]) for key in same)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    ours, one_by_one = (load_model(path, dtype="fp32").weights.blocks for path in (directory, make_checkpoint(name)))
    for got, want in zip(ours, one_by_one, strict=True):
        assert torch.equal(got.mlp(x, lambda up: up[:, :32]), want.mlp(x, lambda up: up[:, :32]))
        assert torch.equal(got.mlp(x, lambda up: up[:, 32:]), want.mlp(x, lambda up: up[:, 32:]))


def test_each_expert_of_a_stack_is_read_once(monkeypatch):
    """Reading all of a stack for each of its experts would take minutes with the 128 experts of gpt-oss-120b."""
    read = 0

    def count(tensor, name):
        nonlocal read
        read += tensor.numel() if ".experts." in name else 0
        return require_finite(tensor, name)

    monkeypatch.setattr(tensors, "require_finite", count)
    load_model(make_checkpoint("gpt-oss"))
    stored = reference(make_checkpoint("gpt-oss")).named_parameters()
    assert read == sum(p.numel() for name, p in stored if ".experts." in name)


def test_blocks_at_both_ends_have_a_down_projection_in_8_bits():
    """Whatever blocks keep states, and whether an MTP head is behind them."""
    raw = json.loads((make_checkpoint("qwen3.5") / "config.json").read_text())
    types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6
    config = make_config(raw | {"num_hidden_layers": 24, "layer_types": types})

    class Noting(_Wanted):
        def linear(self, names, outs, width, bias, head=False, layer=False, precise=None):
            if precise is not None and names[0].endswith("down_proj"):
                found.append(names[0])

    for each in (config, config.with_mtp(2)):
        found: list[str] = []
        Blueprint(each, own_head=True).weights(Noting())
        assert found == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1, 22, 23)]


def test_a_missing_tensor_is_named(copy):
    directory = copy()
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.1.self_attn.v_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.1\.self_attn\.v_proj\.weight'"):
        load_model(directory)


def test_a_tensor_of_another_shape_is_named(copy):
    directory = copy()

    def cut(tensors):
        name = "model.layers.2.mlp.down_proj.weight"
        tensors[name] = tensors[name][:, :-8].contiguous()

    edit_tensors(directory, cut)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.mlp\.down_proj\.weight' has shape \(64, 88\)"):
        load_model(directory)


def test_a_tensor_of_another_type_is_named(copy):
    directory = copy()
    edit_tensors(directory, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is stored as I8"):
        load_model(directory)


def test_a_leftover_tensor_is_a_warning(copy, caplog):
    directory = copy()
    edit_tensors(directory, lambda tensors: tensors.update({"model.layers.0.extra": torch.zeros(3)}))
    with caplog.at_level(logging.WARNING):
        load_model(directory)
    assert "model.layers.0.extra" in caplog.text


def test_a_tied_checkpoint_that_repeats_its_embedding_is_tied(copy, caplog):
    directory = copy("qwen3")
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with caplog.at_level(logging.WARNING):
        model = load_model(directory)
    assert model.parameters == sum(p.numel() for p in reference(directory).parameters())  # the head is the embedding
    assert_head_is(model, model.weights.embedding(torch.arange(model.config.vocab_size)))
    assert not caplog.text


def test_a_head_that_differs_from_the_embedding_is_used_as_transformers_does(copy):
    directory = copy("qwen3")
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    model = load_model(directory)
    assert_head_is(model, reference(directory).lm_head.weight)


def assert_head_is(model, weight):
    x = torch.eye(model.config.hidden_size)
    with torch.inference_mode():
        torch.testing.assert_close(model.weights.head(x).T, weight)


def test_a_checkpoint_of_the_bare_model_loads(copy):
    """AutoModel (without the head) saves the same tensors without their common prefix."""
    directory = copy("qwen3")
    want = load_model(directory).weights.layers[0].mlp_norm.weight

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(directory, strip)
    assert torch.equal(load_model(directory).weights.layers[0].mlp_norm.weight, want)


def test_pytorch_bin_only_says_that_safetensors_are_needed(copy):
    directory = copy()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*safetensors"):
        load_model(directory)


def test_no_weights_at_all(copy):
    directory = copy()
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load_model(directory)


def test_a_shard_the_index_names_is_missing(copy):
    directory = copy("llama-gqa")
    victim = sorted(directory.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        load_model(directory)


def test_a_directory_in_place_of_a_shard_is_named(copy):
    directory = copy("llama-gqa")
    victim = sorted(directory.glob("model-*.safetensors"))[1]
    victim.unlink()
    victim.mkdir()
    with pytest.raises(CheckpointError, match=f"{victim.name} cannot be read"):
        load_model(directory)


def test_an_index_that_points_outside_is_refused(copy):
    directory = copy("llama-gqa")
    index = directory / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="elsewhere"):
        load_model(directory)
    index.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not an index"):
        load_model(directory)


def test_a_truncated_file_is_refused(copy):
    directory = copy()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        load_model(directory)


def test_loading_takes_no_second_copy_of_the_model(tmp_path):
    """Peak memory of a process that loads 34 M bf16 parameters as fp32: 136 MB of parameters and little else.

    The checkpoint is in small shards, because a file that is mapped counts while it is (its pages are the kernel's
    cache, not a copy).
    """
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8
    )
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="8MB")
    program = """
import sys
import torch
from fastdecode.spart import load_model

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

torch.ones(8, 8) @ torch.ones(8, 8)
before = status("VmRSS:")
model = load_model(sys.argv[1], dtype="fp32")
print(status("VmHWM:") - before, model.parameters * 4)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    grown, parameters = map(int, done.stdout.split())
    assert parameters > 130e6
    assert grown < 1.3 * parameters


def test_the_package_itself_does_without_torch():
    """A node or a tool that only needs the batch's types must not wait for torch."""
    imports = "from fastdecode.spart import ModelConfig; from fastdecode.spart.step import batch"
    program = f"import sys; {imports}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_progress_on_a_terminal_is_a_bar(capsys, caplog, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with caplog.at_level(logging.INFO):
        load_model(make_checkpoint("llama-mha"), progress=True)
    assert "loading the weights: 100%" in capsys.readouterr().err and not caplog.messages
    load_model(make_checkpoint("llama-mha"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["llama-mha", "gemma3", "gpt-oss", "qwen3-moe", "qwen3.5-last"])
@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_progress_in_a_log_rises_to_100_percent(name, weights, caplog, monkeypatch):
    """Here each tensor has a line; every number of the checkpoint counts once, whatever it becomes."""
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, progress.__name__):
        load_model(make_checkpoint(name), weights=weights, calibration=range(3, 40), progress=True)
    shares = [int(line.removesuffix(" % of the weights are loaded")) for line in caplog.messages]
    assert shares == sorted(shares) and len(set(shares)) > 3 and shares[-1] == 100
    caplog.clear()
    load_model(make_checkpoint(name), weights=weights)
    assert not caplog.messages


def test_progress_of_a_rank_is_that_of_its_share(caplog, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, progress.__name__):
        Ranks(make_checkpoint("llama-gqa"), 2, progress=True)
    assert caplog.messages.count("100 % of the weights are loaded") == 2


def test_a_log_has_a_line_of_progress_every_ten_seconds_at_most(caplog):
    seconds = itertools.count(step=4)
    with caplog.at_level(logging.INFO, progress.__name__), LoadProgress(200, clock=lambda: next(seconds)) as shown:
        for _ in range(9):
            shown.update(20)
    assert [line.partition(" ")[0] for line in caplog.messages] == ["30", "60", "90"]


# -- where and in what ------------------------------------------------------------------------------------------------


def test_dtype_by_name_and_by_checkpoint():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    stored = read_config(make_checkpoint("llama-bf16")).dtype
    assert choose_dtype("fp16", stored, cpu) is torch.float16
    assert choose_dtype("auto", stored, cuda) is torch.bfloat16
    assert choose_dtype("auto", stored, cpu) in (torch.bfloat16, torch.float32)
    assert choose_dtype("auto", read_config(make_checkpoint("llama-mha")).dtype, cuda) is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_an_error():
    assert choose_device("auto").type == "cpu"
    with pytest.raises(CheckpointError, match="no CUDA device"):
        choose_device("cuda")
