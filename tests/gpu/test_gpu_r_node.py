"""`fastdecode-node --role r --device cuda` beside R-nodes on CPUs, through HTTP: the tokens are those of transformers.

The GPU is the simulated driver, with the kernels compiled for the host (tests/helpers/gpu/rnode_on_driver.py).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu.cuda_driver import has_driver, missing
from gpu.layers_compiled import compile_layer
from models.checkpoints import make_checkpoint
from nodes.node_process import PROGRAMS, Node, fetch
from openai import OpenAI
from sources.compiled import compiled
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.rnode_gpu import RNodeGpu
from fastdecode.daemon.rnode_start import gpu_memory
from fastdecode.kernels.gpu.cupy_kernels import DeviceLimits
from fastdecode.kernels.gpu.page_kernels import PagedLayer
from fastdecode.region.geometry import Geometry
from fastdecode.transports.base import Hello, LayerOptions

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(bool(missing()) or has_driver(), reason="needs cuda-bindings, and no driver of NVIDIA's"),
]

N_NEW, N_LONG = 8, 80
#: Close to transformers in fp32: K and V are rounded to fp16 alone.
MODEL = ["--dtype", "fp32", "--kv-dtype", "fp16", "--max-model-len", "512", "--port", "0", "--api-processes", "0"]
Start = Callable[..., Node]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, and the kernels for the layers of llama-gqa and for the half of its heads."""
    folder = tmp_path_factory.mktemp("kernels")
    compiled("libcuda.so.1", folder)
    for heads in (1, 2):
        compile_layer(PagedLayer("fp16", "fp32", 2 * heads, heads, 16, 1.0), folder)
    return folder


@pytest.fixture
def on_gpu(start: Start, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an R-node with a GPU."""
    monkeypatch.setitem(PROGRAMS, "gpu", "gpu.rnode_on_driver")
    monkeypatch.setenv("GPU_KERNELS", str(kernels))
    return lambda url: start(*["--role", "r", "--device", "cuda", "--insecure", "--listen"], url, program="gpu")


@pytest.fixture
def on_cpu(start: Start) -> Start:
    """Starts an R-node on a CPU."""
    return lambda url: start(*["--role", "r", "--kv-memory", "64MiB", "--threads", "1", "--listen"], url)


@pytest.fixture(scope="module")
def directory() -> Path:
    return make_checkpoint("llama-gqa")


def prompts() -> list[list[int]]:
    """One of which grows beyond a page. Their tokens are the likeliest by far, so no rounding decides them."""
    generator = torch.Generator().manual_seed(14)
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in (252, 40, 3)]


class Texts:
    """What transformers answers, as text."""

    def __init__(self, directory: Path):
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def check(self, prompt: list[int], text: str, n: int = N_NEW) -> None:
        made = self._model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=n, min_new_tokens=n, eos_token_id=None
        )
        whole = self._tokenizer.decode(made[0].tolist()).replace("\ufffd", "")  # of bytes that are no character
        assert whole == (self._tokenizer.decode(prompt) + text).replace("\ufffd", "")


@pytest.fixture(scope="module")
def texts(directory: Path) -> Texts:
    return Texts(directory)


def complete(api: OpenAI, prompts: Sequence[list[int]]) -> list[str]:
    """The answers to prompts that are served beside each other."""
    name = api.models.list().data[0].id
    ask = {"max_tokens": N_NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return [choice.text for choice in api.completions.create(model=name, prompt=list(prompts), **ask).choices]


def streamed(api: OpenAI, halfway: Callable[[], object]) -> list[str]:
    """The answers to all prompts. `halfway` is called once every stream has a token."""
    name = api.models.list().data[0].id
    ask = {"max_tokens": N_LONG, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [api.completions.create(model=name, prompt=prompt, **ask) for prompt in prompts()]
    begun = [next(iter(stream)).choices[0].text for stream in streams]
    halfway()
    rest = ["".join(chunk.choices[0].text for chunk in stream if chunk.choices) for stream in streams]
    return [head + tail for head, tail in zip(begun, rest, strict=True)]


def figure(api: OpenAI, name: str, r_node: str = "") -> float:
    """A figure of /metrics, of one R-node or of the S-node."""
    text = fetch(f"{str(api.base_url).removesuffix('/v1/')}/metrics")
    pattern = rf'^fastdecode:{name}{{.*{f"""r_node="{re.escape(r_node)}""" if r_node else ""}.*}} (\S+)$'
    found = re.search(pattern, text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_tokens_are_those_of_transformers(start, on_gpu, directory, texts):
    """Over TCP. Prompts beside each other, then one again, which finds its prefix, and one that parts from it."""
    node = on_gpu("tcp://127.0.0.1:0")
    url = node.wait_for(r"R-node on (\S+): cuda sm_80, 1 thread\(s\), 230\.4 MiB of KV-cache")[1]
    s_node = start("--model", str(directory), *MODEL, "--r-node", url)
    api = s_node.api()
    long, short, _ = prompts()
    for asked in (prompts(), [long, long[:150] + short[:5]]):
        for prompt, text in zip(asked, complete(api, asked), strict=True):
            texts.check(prompt, text)
    assert figure(api, "prefix_cache_hits_total") >= 2 * 128
    assert s_node.end() == 0 and node.end() == 0


@pytest.fixture
def pair(start, on_gpu, on_cpu, directory, tmp_path) -> tuple[OpenAI, dict[str, Node], dict[str, str]]:
    """An S-node with an R-node on a GPU and one on a CPU, and these with their URLs."""
    urls = {name: f"shm://{tmp_path}/{name}.sock" for name in ("gpu", "cpu")}
    nodes = {"gpu": on_gpu(urls["gpu"]), "cpu": on_cpu(urls["cpu"])}
    api = start("--model", str(directory), *MODEL, *(x for url in urls.values() for x in ("--r-node", url))).api()
    return api, nodes, urls


@pytest.mark.parametrize("killed", ["gpu", "cpu"])
def test_streams_go_on_when_one_of_two_r_nodes_is_killed(pair, texts, killed):
    api, nodes, urls = pair

    def kill() -> None:
        assert all(figure(api, "r_node_pages_used", url) for url in urls.values())
        nodes[killed].end(signal.SIGKILL)

    for prompt, text in zip(prompts(), streamed(api, kill), strict=True):
        texts.check(prompt, text, N_LONG)


def test_streams_move_from_a_gpu_to_a_cpu(pair, texts):
    """When their R-node ends. Pages move as they are."""
    api, nodes, _ = pair
    for prompt, text in zip(prompts(), streamed(api, lambda: nodes["gpu"].process.terminate()), strict=True):
        texts.check(prompt, text, N_LONG)
    assert figure(api, "moved_total") and nodes["gpu"].process.wait(60) == 0


def test_a_gpu_and_a_cpu_share_every_sequence(start, on_gpu, on_cpu, directory, texts, tmp_path):
    """The heads of every sequence, then its tokens."""
    urls = [f"shm://{tmp_path}/{name}.sock" for name in ("cpu", "gpu")]
    on_cpu(urls[0]), on_gpu(urls[1])
    for partition in ("heads", "tokens"):
        team = ["--partition", partition, *(x for url in urls for x in ("--r-node", url))]
        s_node = start("--model", str(directory), *MODEL, *team)
        for prompt, text in zip(prompts(), complete(s_node.api(), prompts()), strict=True):
            texts.check(prompt, text)
        assert s_node.end() == 0


def test_an_s_node_is_told_what_the_gpu_cannot_hold(start, on_gpu, directory, tmp_path):
    url = f"shm://{tmp_path}/gpu.sock"
    on_gpu(url)
    s_node = start("--model", str(directory), *MODEL, "--kv-dtype", "int4", "--r-node", url)
    assert s_node.process.wait(60) == 1
    [error] = [line for line in s_node.log.read_text().splitlines() if "error:" in line]
    assert error == (
        f"fastdecode-node: error: {url} refuses: the R-node's GPU cannot hold this model: the GPU's attention kernels "
        "have no int4 KV-cache, only fp16, bf16, int8"
    )


GPU = RNodeGpu(0, DeviceLimits((7, 5), 40, 64 << 10, 64 << 10, 8 << 30))
HEADS = {"n_q_heads": 4, "n_kv_heads": 1, "head_size": 64}
LATENT = {"head_size": 576, "v_size": 512, "v_in_k": True}


@pytest.mark.parametrize(
    ("geometry", "kv_dtype", "layers", "reason"),
    [
        ({}, "fp32", {}, "no fp32 KV-cache"),
        ({}, "int8-int4", {}, "no int8-int4 KV-cache"),
        ({}, "bf16", {}, "needs compute capability 8.0, the GPU has 7.5"),
        (LATENT, "fp16", {}, "this model's V is a part of K"),
        (LATENT | {"index_heads": 1, "index_size": 8, "index_topk": 8}, "fp16", {"selections": (1, 2)}, "index keys"),
        ({"v_size": 32}, "fp16", {}, "V heads of the size of K heads, not 32 and 64"),
        ({}, "fp16", {"heads": ((4, 1, 64, 64), (4, 1, 24, 24))}, "multiples of 16 elements up to 256, not 24"),
        ({"n_q_heads": 32}, "fp16", {}, "up to 16 query heads for a KV head, not 32 for 1"),
    ],
)
def test_what_a_gpu_cannot_hold_has_a_sentence(geometry, kv_dtype, layers, reason):
    sizes = Geometry(1, 8, 2, act_dtype="fp16", **HEADS | geometry)
    hello = Hello(sizes, kv_dtype, (0, 0), 1.0, None, 4, LayerOptions(**layers))
    assert reason in (GPU.fault(hello) or "")


@pytest.mark.parametrize("option", [{"threads": 2}, {"prefault": True}, {"huge_pages": "off"}, {"cpus": (0,)}])
def test_options_for_cpus_are_refused(option):
    with pytest.raises(ConfigError, match=r"^--\S+ is for an R-node on CPUs"):
        NodeConfig(role="r", device="cuda", listen=("tcp://127.0.0.1:0",), **option)


def test_a_gpu_r_node_needs_cupy_and_has_as_much_memory_as_is_free(start):
    node = start(*["--role", "r", "--device", "cuda", "--listen", "tcp://127.0.0.1:0"])
    assert node.process.wait(60) == 2
    assert re.search(r"error: --device cuda: CuPy (is not installed|cannot use device 0)", node.log.read_text())
    config = NodeConfig(role="r", device="cuda", listen=("tcp://127.0.0.1:0",))
    assert gpu_memory(config, GPU) == int(0.9 * (8 << 30))
    assert gpu_memory(replace(config, kv_memory=1 << 30), GPU) == 1 << 30
    with pytest.raises(ConfigError, match=r"--kv-memory 9\.0 GiB is more than the 8\.0 GiB that are free on the GPU"):
        gpu_memory(replace(config, kv_memory=9 << 30), GPU)
