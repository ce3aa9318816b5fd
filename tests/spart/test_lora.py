"""LoRA adapters: PEFT makes them, and its merged models judge every token."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from engines.api_client import served
from engines.real_engine import real_engine
from engines.token_stream import submit, tokens_of
from models.adapters_made import merged, save_adapter
from models.checkpoints import VOCAB_SIZE, make_checkpoint, make_model
from models.greedy import is_greedy
from models.hf_models import save_model
from models.spart_steps import EXACT
from openai import NotFoundError
from safetensors.torch import load_file, save_file

from fastdecode.daemon import check_model
from fastdecode.daemon.api_settings import ApiSettings
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.option_values import ConfigError
from fastdecode.engine.state.request import InvalidParameter, SamplingParams
from fastdecode.gguf.file import ModelSource
from fastdecode.spart import CheckpointError, load_model
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.linears import grouped_mm
from fastdecode.spart.lora.adapters import AdapterRows, adapted_product
from fastdecode.spart.lora.files import read_adapter
from fastdecode.spart.step.batch import Chunk
from fastdecode.spart.step.step_table import StepTable
from fastdecode.text.tokenizer import Tokenizer

#: Adapters of Llama that differ in everything that PEFT's configuration can say.
OPTIONS = [
    {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "lora_alpha": 4, "target_modules": "all-linear"},
    {"r": 16, "lora_alpha": 8, "target_modules": ["down_proj"], "use_rslora": True},
    {"r": 3, "lora_alpha": 6, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["gate_proj", "q_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {"gate_proj": 9},
    },
    {"r": 8, "lora_alpha": 16, "target_modules": r".*layers\.[02]\..*(q|k)_proj", "init_lora_weights": "gaussian"},
    {"r": 2, "lora_alpha": 8, "target_modules": ["v_proj"], "layers_to_transform": [1]},
    {"r": 12, "lora_alpha": 12, "target_modules": ["gate_proj", "up_proj", "down_proj"], "lora_dropout": 0.1},
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint("llama-gqa")
    return [save_adapter(base, root / f"a{i}", i, **options) for i, options in enumerate(OPTIONS)]


def greedy(n: int, adapter: str | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, adapter=adapter)


async def test_64_requests_over_8_adapters_and_the_base_model_equal_the_merged_models(directories, tmp_path):
    """All at once, with prompts that begin alike: the prefix cache must not mix what adapters have computed."""
    base = make_checkpoint("llama-gqa")
    adapters = [read_adapter(f"a{i}", directory) for i, directory in enumerate(directories)]
    rng = random.Random(0)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(130)]
    names = [None, *(adapter.name for adapter in adapters)]
    requests = [
        (names[i % 9], shared * (i % 3 == 0) + [rng.randrange(3, VOCAB_SIZE) for _ in range(1 + i % 40)])
        for i in range(64)
    ]
    options = {"adapters": adapters, "prefix_cache": True, "max_batch_size": 32, "max_batch_tokens": 128}
    async with real_engine(base, tmp_path, kv_bytes=2**26, **options) as engine:
        with pytest.raises(InvalidParameter, match="no adapter 'b'"):
            submit(engine, [5], greedy(1, "b"))
        outputs = await asyncio.gather(
            *(tokens_of(submit(engine, prompt, greedy(8, name))) for name, prompt in requests)
        )
        again = await asyncio.gather(*(tokens_of(submit(engine, shared, greedy(4, name))) for name in names))
        assert engine.stats.totals.prefix_hits > 0
    for name, directory in zip(names, [None, *directories], strict=True):
        judge = merged(base, directory)
        for (asked, prompt), tokens in zip(requests, outputs, strict=True):
            if asked == name:
                assert is_greedy(judge, prompt, tokens)
        assert is_greedy(judge, shared, again[names.index(name)])


@pytest.mark.parametrize(
    ("backend", "model_type", "options"),
    [
        ("transformers", "qwen3", {"target_modules": "all-linear"}),
        ("transformers", "gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        ("transformers", "mixtral", {"target_modules": ["q_proj", "o_proj"]}),
        ("native", "deepseek_v3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_other_models_equal_the_merged_model(backend, model_type, options, tmp_path):
    base = save_model(model_type, tmp_path)
    directory = save_adapter(base, tmp_path / "adapter", 1, r=4, lora_alpha=8, **options)
    prompts = [[5, 9, 44], list(range(3, 100)), [7]]
    adapters = [read_adapter("a", directory)]
    async with real_engine(base, tmp_path, backend=backend, adapters=adapters) as engine:
        outputs = [
            await asyncio.gather(*(tokens_of(submit(engine, prompt, greedy(6, name))) for prompt in prompts))
            for name in ("a", None)
        ]
    for judge, of_judge in zip((merged(base, directory), merged(base, None)), outputs, strict=True):
        for prompt, tokens in zip(prompts, of_judge, strict=True):
            assert is_greedy(judge, prompt, tokens)


@pytest.mark.parametrize("product", ["padded", "grouped", "looped"])
@pytest.mark.parametrize("weights", ["dense", "int8", "int4"])
def test_a_change_is_added_to_weights_of_every_format(weights, product, directories, monkeypatch):
    if product == "looped":
        monkeypatch.setattr(grouped_mm, "_torch_can", lambda *_: False)
    adapters = [read_adapter(f"a{i}", directory) for i, directory in enumerate(directories)]
    model = load_model(make_checkpoint("llama-gqa"), dtype="fp32", weights=weights, adapters=adapters)
    uses = [3, None, 1, 7, 0, 2, 5, 6, 4, 0] if product == "padded" else [3, None, 1, 1, 0, None, 7, 4]
    table = StepTable()
    rows = AdapterRows([Chunk(0, i, 1, 0, [5] * 2, False, None, adapter=use) for i, use in enumerate(uses)], 8, table)
    rows = rows.on_device(table.upload(torch.device("cpu")))
    assert (rows.padded is not None) == (product == "padded")
    x = torch.randn(2 * len(uses), 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        linear = model.weights.layers[1].qkv
        change = adapted_product(linear, x, rows) - linear(x)
    expected = torch.zeros_like(change)
    for i, use in enumerate(uses):
        first = 0
        for part, outs in (("q", 64), ("k", 32), ("v", 32)):
            name = f"model.layers.1.self_attn.{part}_proj"
            if use is not None and name in adapters[use].modules:
                a, b = adapters[use].factors(name)
                expected[2 * i : 2 * i + 2, first : first + outs] = x[2 * i : 2 * i + 2] @ a.T @ b.T
            first += outs
    torch.testing.assert_close(change, expected, atol=EXACT, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens'"),
        ({"r": 5}, "8 rows and lora_B 8 columns; adapter_config.json says rank 5"),
        ({"lora_alpha": "x"}, "adapter_config.json: 'lora_alpha' is 'x', not a number"),
        ({"lora_alpha": None}, "adapter_config.json: 'lora_alpha' is None, not a number"),
        ({"r": None}, "adapter_config.json: 'r' is None, not a number"),
        ({"alpha_pattern": {"q_proj": None}}, "adapter_config.json: 'q_proj' is None, not a number"),
        ({"rank_pattern": {"q_proj": None}}, "adapter_config.json: 'q_proj' is None, not a number"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"rank_pattern": {"a{9999999999}": 3}}, "no regular expression"),
        ({"target_modules": ["q_proj", "fc1"]}, "names 'fc1'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_adapter_of_another_kind_is_refused_by_name(changes, message, directories, tmp_path):
    directory = Path(shutil.copytree(directories[0], tmp_path / "a"))
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=f"adapter 'french': .*{message}"):
        read_adapter("french", directory)


@pytest.mark.parametrize(
    "pattern", ["(.+.+)+x", "(.|..)*x", "(?:.?){50}x", ".*" * 20 + "x", ".?" * 40 + "x", "(.|.)" * 40]
)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_takes_without_end_to_match_is_refused(key, pattern, directories, tmp_path):
    directory = Path(shutil.copytree(directories[0], tmp_path / "a"))
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {key: {pattern: 3}}))
    with pytest.raises(CheckpointError, match=re.escape(f"{key}: {pattern!r} may take without end to match")):
        read_adapter("french", directory)
    usual = {r"^model.layers.[1-5].x": 3, r".*\.(0|1)\.(self_attn|mlp)\.(up|down)_proj": 3, "model.layers.0.x": 3}
    path.write_text(json.dumps(config | {key: usual}))
    read_adapter("french", directory)


def rename(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("self_attn.q_proj", "mlp.q_proj")] = tensors.pop(name)


def embed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 8)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[sorted(tensors)[0]]


@pytest.mark.parametrize(
    ("edit", "message"), [(rename, "mlp.q_proj'"), (embed, "lora_embedding_A"), (drop, "only one of lora_A and lora_B")]
)
def test_tensors_that_do_not_fit_are_refused_before_weights_are_read(edit, message, directories, tmp_path):
    directory = Path(shutil.copytree(directories[0], tmp_path / "a"))
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load_model(make_checkpoint("llama-gqa"), adapters=[read_adapter("a", directory)])


@pytest.mark.parametrize("factor", ["A", "B"])
def test_a_factor_that_is_not_finite_is_refused_by_name(factor, directories, tmp_path):
    directory = Path(shutil.copytree(directories[0], tmp_path / "a"))
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith(f"lora_{factor}.weight"))
    tensors[name][1, 2] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"adapter 'a': tensor '{name}' has numbers that are not finite"):
        load_model(make_checkpoint("llama-gqa"), adapters=[read_adapter("a", directory)])


def test_a_factor_that_its_scale_makes_infinite_is_refused_by_name(directories, tmp_path):
    directory = Path(shutil.copytree(directories[0], tmp_path / "a"))
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 1e300}))
    with pytest.raises(CheckpointError, match=r"adapter 'a': tensor '.*lora_B\.weight' has numbers that are not"):
        load_model(make_checkpoint("llama-gqa"), adapters=[read_adapter("a", directory)])


def test_missing_files_are_named(directories, tmp_path):
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        read_adapter("a", tmp_path)
    shutil.copy(directories[0] / "adapter_config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        read_adapter("a", tmp_path)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is nested too deeply"):
        read_adapter("a", tmp_path)
    shutil.copy(directories[0] / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        read_adapter("a", tmp_path)


def test_adapters_beside_a_gguf_file_are_refused_with_the_reason(directories, tmp_path):
    gguf_made = pytest.importorskip("models.gguf_made")
    path = tmp_path / "m.gguf"
    gguf_made.write_gguf(path, make_model("llama-gqa"), "Q8_0")
    with pytest.raises(CheckpointError, match="adapters are for safetensors"):
        load_model(path, adapters=[read_adapter("a", directories[0])])
    config = NodeConfig(check=True, model=path, lora=(("a", directories[0]),))
    with pytest.raises(CheckpointError, match="adapters are for safetensors"):
        check_model.rows(config, choose_backend("auto", path))


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_an_adapter_of_another_model_is_refused(backend, directories):
    other = choose_backend(backend, make_checkpoint("llama-mha"))
    with pytest.raises(CheckpointError, match=r"adapter 'a' is for another model: its '.*k_proj' is 32 x 64"):
        other.load(torch.device("cpu"), torch.float32, adapters=[read_adapter("a", directories[3])])


async def test_clients_choose_an_adapter_as_their_model(directories, tmp_path):
    base = make_checkpoint("llama-gqa")
    prompt, judge, tokenizer = [5, 9, 44, 17], merged(base, directories[1]), Tokenizer.from_dir(base)
    adapters = [read_adapter("a", directories[1])]
    async with (
        real_engine(base, tmp_path, adapters=adapters) as engine,
        served(engine, tokenizer, names=["tiny"], adapters=("a",)) as client,
    ):
        listed = {model.id: model for model in (await client.openai.models.list()).data}
        assert list(listed) == ["tiny", "a"] and listed["a"].parent == "tiny"
        options = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
        with torch.inference_mode():
            whole = judge.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        text = tokenizer.decode(whole[0].tolist()).removeprefix(tokenizer.decode(prompt))
        answer = await client.openai.completions.create(model="a", **options)
        assert (answer.model, answer.choices[0].text) == ("a", text)
        answer = await client.openai.completions.create(model="tiny", **options)
        assert (answer.model, answer.choices[0].text) != ("tiny", text)
        with pytest.raises(NotFoundError, match="only 'tiny', 'a'"):
            await client.openai.completions.create(model="b", **options)
        chat = await client.openai.chat.completions.create(
            model="a", messages=[{"role": "user", "content": "Hi"}], max_tokens=2
        )
        assert chat.model == "a"


def test_an_adapter_with_the_name_of_the_model_is_an_error(directories):
    config = NodeConfig(model=make_checkpoint("llama-gqa"), served_model_name=("a",), lora=(("a", directories[0]),))
    with pytest.raises(ConfigError, match="--lora: 'a' is the name of another model"):
        ApiSettings.make(config, ModelSource.open(config.model))
    with pytest.raises(SystemExit):
        NodeConfig.from_args(["--lora", "french"])
    assert NodeConfig.from_args(["--lora", "f=a/b=c"]).lora == (("f", Path("a/b=c")),)


def test_the_check_counts_what_an_adapter_changes(directories):
    config = NodeConfig(check=True, model=make_checkpoint("llama-gqa"), lora=(("a", directories[0]),))
    assert ("LoRA a", "6 linears, 5376 parameters") in check_model.rows(config, choose_backend("auto", config.model))
