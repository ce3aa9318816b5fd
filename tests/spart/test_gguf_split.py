"""Models in several GGUF files, which the package gguf has split."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from models.checkpoints import make_model
from models.gguf_made import write_gguf

from fastdecode.daemon.prefill_nodes import model_digest
from fastdecode.gguf.file import GGUFError, GGUFFile, ModelSource, find_gguf, model_name
from fastdecode.spart import load_model


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A model in three files, and in one in a folder of its own."""
    model = make_model("llama-gqa")
    split = -(-sum(1 for _ in model.parameters()) // 3)
    (tmp_path / "whole").mkdir()
    write_gguf(tmp_path / "whole/m.gguf", model, "Q8_0")
    write_gguf(tmp_path / "m.gguf", model, "Q8_0", split=split)
    return [tmp_path / f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]


def test_split_files_are_the_model_of_a_whole_file(files: list[Path], tmp_path: Path) -> None:
    split, whole = (load_model(path, dtype="fp32") for path in (files[0], tmp_path / "whole"))
    assert (split.config, split.weight_bytes) == (whole.config, whole.weight_bytes)
    tokens = torch.arange(3, 40)
    assert torch.equal(split.weights.embedding(tokens), whole.weights.embedding(tokens))
    rows = torch.randn(2, split.config.hidden_size)
    for ours, theirs in zip(split.weights.layers, whole.weights.layers, strict=True):
        assert torch.equal(ours.o(rows), theirs.o(rows))
    (tmp_path / "mmproj-m.gguf").touch()  # for images, beside the model
    assert find_gguf(tmp_path) == files[0]
    assert ModelSource.open(files[0]).weight_bytes == sum(file.stat().st_size for file in files)
    assert model_name(files[0]) == "m"


def test_the_digest_of_a_split_model_covers_every_file(files: list[Path]) -> None:
    hello = load_model(files[0], dtype="fp32").hello(1, 1, "fp16", 1 << 20, 1)
    before = model_digest(files[0], hello)
    data = bytearray(files[2].read_bytes())
    data[-1] ^= 1
    files[2].write_bytes(data)
    assert model_digest(files[0], hello) != before


def refused(path: Path, sentence: str) -> None:
    with pytest.raises(GGUFError) as error:
        GGUFFile(path)
    assert sentence in str(error.value)


def test_a_missing_file_is_named(files: list[Path]) -> None:
    files[1].unlink()
    refused(files[0], f"{files[1]} cannot be read")


def test_a_file_that_is_not_the_first_one_names_it(files: list[Path]) -> None:
    refused(files[1], f"{files[1]} is not the first of 3 files; name {files[0]}")


def test_a_renamed_file_says_how_it_must_be_named(files: list[Path]) -> None:
    renamed = files[0].rename(files[0].with_name("first.gguf"))
    refused(renamed, "first.gguf is one of 3 files, and its name does not end with -00001-of-00003.gguf")


def test_a_file_in_the_place_of_another_is_refused(files: list[Path]) -> None:
    shutil.copy(files[1], files[2])
    refused(files[0], f"{files[2]} does not say that it is number 3 of 3 files")


def test_tensors_that_a_split_model_lacks_are_counted(files: list[Path]) -> None:
    data, key = bytearray(files[0].read_bytes()), b"split.tensors.count"
    at = data.index(key) + len(key) + 4  # behind the key and the type of its value
    n = int.from_bytes(data[at : at + 4], "little")
    data[at : at + 4] = (n + 1).to_bytes(4, "little")
    files[0].write_bytes(data)
    refused(files[0], f"is damaged: it claims {n + 1} tensors in 3 files, which have {n}")
