"""The calibration's text: written by hand, from the required packages' descriptions, and from a novel."""

from importlib import metadata

import pytest

from fastdecode.demo import model_dir
from fastdecode.text import calibration
from fastdecode.text.calibration import TEXT, calibration_tokens, readmes
from fastdecode.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(model_dir())


def described(monkeypatch, descriptions: dict[str, str | None]) -> None:
    """Let these packages be required and have these descriptions; None: not installed."""

    def found(name: str) -> dict[str, str]:
        text = descriptions[name]
        if text is None:
            raise metadata.PackageNotFoundError(name)
        return {"Description": text} if text else {}

    lines = [f"{name}>=1.0,<2" for name in descriptions] + ['other>=1; extra == "models"']
    monkeypatch.setattr(calibration.metadata, "requires", lambda _: lines)
    monkeypatch.setattr(calibration.metadata, "metadata", found)


def test_required_packages_describe_themselves():
    assert sum(map(len, readmes())) > 10_000


def test_packages_without_a_description_or_of_an_extra_are_left_out(monkeypatch):
    described(monkeypatch, {"a-b": "first", "c.d": None, "e_f": "", "g": "last"})
    assert readmes() == ["first", "last"]


def test_a_tree_that_is_not_installed_has_no_descriptions(monkeypatch, tokenizer):
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(calibration.metadata, "requires", missing)
    assert readmes() == []
    assert len(calibration_tokens(tokenizer)) > 8000


def test_tokens_are_those_of_the_text_then_of_the_beginning_of_each_description(monkeypatch, tokenizer):
    described(monkeypatch, {"a": "alpha " * 5000, "b": "beta"})
    tokens, own = calibration_tokens(tokenizer), tokenizer.encode(TEXT, add_special_tokens=False)
    alpha, beta = (tokenizer.encode(text, add_special_tokens=False) for text in ("alpha " * 5000, "beta"))
    assert tokens[: len(own)] == own
    assert tokens[len(own) :][: 512 + len(beta)] == alpha[:512] + beta
