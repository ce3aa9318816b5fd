"""The memory of well-known models, against what their publishers say of them."""

from __future__ import annotations

from functools import cache

import pytest
from sources.doc_tables import check_table

from fastdecode.plan.cli import main as plan
from fastdecode.plan.families import FAMILIES, Need, need

#: Billions of parameters as the models' cards or technical reports say, without vision and heads for drafts.
PUBLISHED = {
    "Llama 3.1 8B": 8.03, "Llama 3.3 70B": 70.6, "Qwen3 8B": 8.2, "Qwen3 30B-A3B": 30.5, "Qwen3-Next 80B-A3B": 80,
    "Qwen3.5 9B": 9, "Qwen3.5 27B": 27, "Qwen3.5 35B-A3B": 35, "Gemma 3 27B": 27, "gpt-oss 20B": 20.9,
    "gpt-oss 120B": 116.8, "DeepSeek-V2-Lite": 15.7, "DeepSeek-V3": 671, "GLM-4.7-Flash": 30,
    "GLM-4.5-Air": 106, "GLM-4.5 to 4.7": 355, "MiniMax-M2": 230,
    "Mistral Small 24B": 23.6, "Kimi-Linear 48B-A3B": 49, "Kimi K2": 1030, "Nemotron 3 Nano 30B-A3B": 31.6,
    "Granite 4.0 H-Tiny": 7, "Granite 4.0 H-Small": 32, "Falcon-H1 7B": 7.6, "LFM2 8B-A1B": 8.3,
}  # fmt: skip


@cache
def need_of(name: str) -> Need:
    """What one sequence of a page takes, with K and V in fp16."""
    return need(next(family for family in FAMILIES if family.name == name), "fp16", 1, 128, [])


def test_the_documentation_has_the_memory_of_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    plan(["families"])
    check_table("models.md", "families", capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str) -> None:
    assert need_of(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.015)


@pytest.mark.parametrize(
    ("name", "token_bytes", "state_bytes"),
    [
        ("Llama 3.1 8B", 32 * 2 * 8 * 128 * 2, 0),
        ("DeepSeek-V3", 61 * (512 + 64) * 2, 0),
        # 16 of 64 layers have 4 KV heads of 256. The others keep 48 matrices of 128 x 128 in fp32, and the last 3 of
        # the 2 * 16 + 48 channels of 128 before their convolution.
        ("Qwen3.5 27B", 16 * 2 * 4 * 256 * 2, 48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 + 48) * 128 * 2)),
    ],
)
def test_bytes_are_those_of_the_architecture(name: str, token_bytes: int, state_bytes: int) -> None:
    need = need_of(name)
    assert (need.token_bytes, need.state_bytes, need.kv_bytes) == (token_bytes, state_bytes, 128 * token_bytes)


def test_a_card_holds_weights_and_states_in_the_most_bits_that_fit() -> None:
    family = next(each for each in FAMILIES if each.name == "Qwen3.5 9B")
    n = need_of(family.name).parameters
    cards = [int(n * bytes_ / 0.9) for bytes_ in (0.62, 0.64, 1.06, 1.08, 1.99, 2.02)]
    assert need(family, "int8", 1, 1, cards).cards == (None, "4 bits", "4 bits", "8 bits", "8 bits", "16 bits")
    assert need(family, "int8", 100, 1, cards[1:2]).cards == (None,)  # 100 states take 4.8 GiB


def test_a_format_that_a_family_cannot_have_is_refused_in_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [family for family in FAMILIES if family.name in ("GLM-4.7-Flash", "Llama 3.1 8B")]
    monkeypatch.setattr("fastdecode.plan.families.FAMILIES", few)
    plan(["families", "--kv-dtype", "int8-int4", "--card", "24GiB"])
    rows = {line.split(" | ")[0][2:]: line.split(" | ") for line in capsys.readouterr().out.splitlines()}
    assert rows["GLM-4.7-Flash"][4:] == ["refused", "4 bits", "refused |"]
    assert rows["Llama 3.1 8B"][4] == "50.0 KiB"
