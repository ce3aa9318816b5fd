"""Models that `--save-weights` writes, against the models whose weights are rounded at load."""

from __future__ import annotations

import json
import re
import resource
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
from models.checkpoints import make_checkpoint, reference
from models.gguf_made import write_gguf
from models.quantised_checks import edit_config
from ranks.in_threads import Ranks, decoded, error_of
from safetensors.torch import load_file, save_file

from fastdecode.spart import CheckpointError, load_model
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.checkpoints import rounded

#: Tied and untied heads, biases, stacks of Q, K and V, experts one by one and in stacks, layers with states, and
#: latent attention.
CASES = [
    ("ernie4.5", "int8"),
    ("llama-gqa", "int4"),
    ("llama-mha", "int4"),
    ("qwen2", "int8"),
    ("phi3", "int4"),
    ("opt-projected", "int8"),
    ("mixtral", "int4"),
    ("gpt-oss", "int4"),
    ("qwen3.5-moe", "int8"),
    ("glm4-moe", "int4"),
    ("gemma4", "int4"),
    ("gemma4-e", "int4"),
    ("gemma4-moe", "int8"),
    ("deepseek-v3", "int4"),
]
INDEX = "model.safetensors.index.json"


def some_text() -> list[int]:
    return torch.randint(5, 60, (2000,), generator=torch.Generator().manual_seed(3)).tolist()


def saved(directory: Path, target: Path, weights: str = "int4", **options) -> Path:
    load_model(directory, dtype="fp32", weights=weights, save=target, **options)
    return target


@pytest.mark.parametrize(("variant", "weights"), CASES)
async def test_a_saved_model_computes_the_same_bits(variant, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(rounded, "_FILE_BYTES", 20_000)  # so that there are several files
    directory, target = make_checkpoint(variant), tmp_path / "saved"
    rounding = Ranks(directory, 1, dtype="fp32", weights=weights, calibration=some_text(), save=target)
    tokens, logits = await decoded(rounding, tmp_path / "a")
    assert len(list(target.glob("*.safetensors"))) > 1
    read = Ranks(target, 1, dtype="fp32")
    assert read.models[0].weight_bytes == rounding.models[0].weight_bytes
    again, equal = await decoded(read, tmp_path / "b")
    assert again == tokens
    assert all(map(torch.equal, chain(*logits), chain(*equal)))


async def test_ranks_share_a_saved_model(tmp_path):
    directory = make_checkpoint("llama-mha")
    target = saved(directory, tmp_path / "saved", calibration=some_text())
    one, two = [await error_of(Ranks(target, n, dtype="fp32"), reference(directory), tmp_path / str(n)) for n in (1, 2)]
    assert two == pytest.approx(one, rel=0.2)


@pytest.mark.parametrize("weights", ["dense", "int8"])
@pytest.mark.parametrize("variant", ["llama-gqa", "llama-mha"])
async def test_a_saved_model_is_taken_in_other_forms(variant, weights, tmp_path):
    """Its head, tied or not, has rows in 8 bits and rows in 4."""
    target = saved(make_checkpoint(variant), tmp_path / "saved")
    stored, other = [await decoded(Ranks(target, 1, dtype="fp32", weights=w), tmp_path / w) for w in ("auto", weights)]
    first, same = stored[1][0][0], other[1][0][0]
    assert (first - same).norm() < 0.3 * first.norm()  # rounded activations, or weights rounded once more


def test_a_saved_model_is_of_the_native_backend_and_has_its_tokenizer(tmp_path):
    directory = make_checkpoint("qwen3")
    target = saved(directory, tmp_path / "saved", "int8")
    assert choose_backend("auto", target).name == "native"
    assert {path.name for path in directory.iterdir() if path.suffix == ".json"} <= {
        path.name for path in target.iterdir()
    }
    with pytest.raises(CheckpointError, match="fastdecode"):
        choose_backend("transformers", target)


def test_models_that_are_not_saved(tmp_path):
    directory = make_checkpoint("llama-gqa")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match=r"there exists already$"):
        saved(directory, tmp_path / "there")
    with pytest.raises(CheckpointError, match=r"sub cannot be written: .*Not a directory"):
        (tmp_path / "file").write_text("")
        saved(directory, tmp_path / "file/sub")
    write_gguf(tmp_path / "m.gguf", reference(directory), "F32")
    with pytest.raises(CheckpointError, match=r"m\.gguf is a GGUF file; only models in safetensors are saved rounded$"):
        saved(tmp_path / "m.gguf", tmp_path / "x")
    with pytest.raises(CheckpointError, match="the weights of a model of the transformers backend are not saved"):
        choose_backend("transformers", directory).load(torch.device("cpu"), torch.float32, save=tmp_path / "x")


def test_a_disk_that_is_full_is_named(tmp_path):
    directory = make_checkpoint("llama-gqa")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"saved cannot be written: .*File too large"):
            saved(directory, tmp_path / "saved", "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "saved").exists()


NAME = "model.layers.1.mlp.down_proj.weight.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}.scales"), f"the checkpoint lacks the tensor '{NAME}.scales'"),
        (lambda t: t.update({f"{NAME}.mins": t[f"{NAME}.mins"][1:]}), f"the tensors of '{NAME}' are no rounded matrix"),
        (lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"][:, 1:]}), r"has shape \(64, 94\), config.json says"),
        (lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"][:, 16:]}), "are no rounded matrix"),
        (lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"].int()}), "are no rounded matrix"),
        (lambda t: t.update({f"{NAME}.codes": t[f"{NAME}.codes"][0]}), "are no rounded matrix"),
        (lambda t: t[f"{NAME}.scales"].fill_(torch.nan), f"tensor '{NAME}.scales' has numbers that are not finite"),
        (lambda t: t.update({"model.x.codes": t[f"{NAME}.codes"]}), "not used"),
        (lambda t: t.update({f"a.weight.{'9' * 5000}.codes": t[f"{NAME}.codes"]}), "not used"),
        (lambda t: t.update({"model.x.0.codes": t[f"{NAME}.codes"]}), "rounded matrices that are no linear's"),
        (lambda t: t.update({f"{NAME[:-1]}2.codes": t[f"{NAME}.codes"]}), r"lacks the tensor .*1\.codes"),
    ],
)
def test_damaged_files_are_refused_by_name(change, message, tmp_path):
    target = saved(make_checkpoint("llama-gqa"), tmp_path / "saved")
    [file] = target.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file)
    if message == "not used":
        load_model(target, dtype="fp32")
        return
    with pytest.raises(CheckpointError, match=message):
        load_model(target, dtype="fp32")


def test_an_expert_that_is_missing_or_cut_off_is_refused_by_name(tmp_path):
    target = saved(make_checkpoint("gpt-oss"), tmp_path / "saved")
    [file] = target.glob("*.safetensors")
    tensors, expert = load_file(file), "model.layers.0.mlp.experts.down_proj.1.0"
    cut = {name: tensor[:-1].clone() if name.startswith(f"{expert}.") else tensor for name, tensor in tensors.items()}
    save_file(cut, file)
    with pytest.raises(CheckpointError, match=r"the experts of '.*0\.mlp\.experts\.down_proj' differ in their shapes"):
        load_model(target, dtype="fp32")
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith(f"{expert}.")}, file)
    with pytest.raises(CheckpointError, match=re.escape(f"lacks the tensor '{expert}.codes'")):
        load_model(target, dtype="fp32")


@pytest.mark.parametrize("bits", [None, 7, "8", True])
def test_bits_of_activations_that_are_not_known_are_refused(bits, tmp_path):
    target = saved(make_checkpoint("llama-gqa"), tmp_path / "saved")
    edit_config(target, quantization_config={"quant_method": "fastdecode", "activation_bits": bits})
    with pytest.raises(CheckpointError, match=re.escape(f"the checkpoint's bits of activations {bits!r}")):
        load_model(target, dtype="fp32")


def test_a_directory_that_was_not_finished_is_written_anew(tmp_path):
    (tmp_path / "saved.unfinished").mkdir()
    (tmp_path / "saved.unfinished/model-00009.safetensors").write_text("cut off")
    target = saved(make_checkpoint("llama-gqa"), tmp_path / "saved", "int8")
    assert set(json.loads((target / INDEX).read_text())["weight_map"].values()) == {
        path.name for path in target.glob("*.safetensors")
    }
    shutil.rmtree(target)
    assert not list(tmp_path.iterdir())
