"""The shipped demo model is complete, loads anywhere, and has learnt its text."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from sources.folders import ROOT
from tokenizers import Tokenizer

from fastdecode import demo

sys.path.insert(0, str(ROOT / "scripts" / "demo_model"))

import corpus
from network import Llama


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.model_dir() / "tokenizer.json"))


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((demo.model_dir() / "config.json").read_text())


@pytest.fixture(scope="module")
def network(config) -> Llama:
    weights = load_file(demo.model_dir() / "model.safetensors")
    model = Llama(config, dropout=0.0).bfloat16().eval()
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    return model


@pytest.mark.quick
def test_tokenizer_round_trips_any_text(tokenizer, config):
    for text in (demo.heldout_text()[:5000], "naïve £5 日本語 \n\n\t x"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == config["bos_token_id"]
        assert max(ids) < config["vocab_size"]
        assert tokenizer.decode(ids) == text


@pytest.mark.quick
def test_heldout_loss_is_that_of_a_trained_model(network, tokenizer):
    ids = tokenizer.encode(demo.heldout_text()[:12000]).ids
    rows = torch.tensor(ids[: len(ids) // 513 * 513]).view(-1, 513)
    with torch.no_grad():
        assert network.loss(rows).item() < 4.5  # untrained: 8.3


def test_transformers_computes_the_same(network, tokenizer):
    transformers = pytest.importorskip("transformers")
    ids = torch.tensor([tokenizer.encode(demo.heldout_text()[:3000]).ids])
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.model_dir())
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        assert network.loss(ids).item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), abs=0.01)


def test_chat_template_makes_running_text():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.model_dir())
    messages = [{"role": "user", "content": "Emma smiled."}, {"role": "user", "content": "The morning was "}]

    def render(messages: list) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert render(messages) == "<s>Emma smiled.\n\nThe morning was"
    assert render(messages[:1]) == "<s>Emma smiled.\n\n"


def test_corpus_drops_everything_but_the_prose():
    lines = ["PERSUASION", "", "Chapter 1", "", "Sir Walter _Elliot_,  of", "Kellynch Hall.", "", '"Yes."', ""]
    lines += ["[At this point volume 1", "ends.]", "", "CHAPTER II", "Anne.", "", "    * * *", "Finis", "a note"]
    assert corpus.chapters(lines) == ['Sir Walter Elliot, of Kellynch Hall.\n\n"Yes."', "Anne."]
