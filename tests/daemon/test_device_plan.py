"""The division of a GPU's memory, as arithmetic: no GPU is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from models.checkpoints import make_checkpoint

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.device_plan import (
    KERNEL_BYTES,
    capacity,
    gpu_rows,
    gpu_staging,
    plan_steps,
    prompt_seconds,
    rows_by_speed,
    state_slots,
)
from fastdecode.daemon.option_values import ConfigError
from fastdecode.spart import loader, read_config
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.decoder.blueprint import Blueprint
from fastdecode.spart.decoder.weights import Model
from fastdecode.spart.linears.quantised import Quantised
from fastdecode.spart.linears.stack import make_linear, quantised_embedding
from fastdecode.transports.base import Lease

pytestmark = pytest.mark.quick
GIB = 1 << 30
META = torch.device("meta")


def test_prompts_get_what_weights_and_steps_leave():
    """24 GiB, of which 15 are in use; 0.9 of it may be."""
    assert gpu_staging(24 * GIB, 9 * GIB, 0.9, 2 * GIB, None) == (int(0.9 * 24 * GIB) - 17 * GIB - KERNEL_BYTES, 0)
    assert gpu_staging(24 * GIB, 9 * GIB, 1.0, 2 * GIB, None) == (7 * GIB - KERNEL_BYTES, 0)
    assert gpu_staging(24 * GIB, 9 * GIB, 0.9, 2 * GIB, GIB) == (GIB, 0)


def test_kv_pages_get_what_prompts_leave():
    """6.5 GiB are left; the longest prompt takes one, or ten."""
    left = 7 * GIB - KERNEL_BYTES
    assert gpu_staging(24 * GIB, 9 * GIB, 1.0, 2 * GIB, None, None, GIB) == (GIB, left - GIB)
    assert gpu_staging(24 * GIB, 9 * GIB, 1.0, 2 * GIB, None, None, 10 * GIB) == (left // 2, left - left // 2)
    assert gpu_staging(24 * GIB, 9 * GIB, 1.0, 2 * GIB, 2 * GIB, None, GIB) == (2 * GIB, left - 2 * GIB)
    assert gpu_staging(24 * GIB, 9 * GIB, 1.0, 2 * GIB, None, 4 * GIB, GIB) == (left - 4 * GIB, 4 * GIB)
    with pytest.raises(ConfigError, match=r"--gpu-kv can be 4\.5 GiB at most"):
        gpu_staging(24 * GIB, 9 * GIB, 1.0, 2 * GIB, 2 * GIB, 5 * GIB, GIB)


def test_what_does_not_fit_is_refused_with_its_numbers():
    with pytest.raises(ConfigError, match=r"20\.0 GiB are in use, and steps need 2\.5 GiB: lower --max-batch-size"):
        gpu_staging(24 * GIB, 4 * GIB, 0.9, 2 * GIB, None)
    with pytest.raises(ConfigError, match=r"--staging-memory can be 4\.1 GiB at most"):
        gpu_staging(24 * GIB, 9 * GIB, 0.9, 2 * GIB, 5 * GIB)


@pytest.mark.parametrize(("free", "rows"), [(40, 8192), (16, 4096), (15, 2048), (5, 1024), (1, 512)])
def test_a_step_has_as_many_rows_as_a_quarter_of_the_free_memory_holds(free, rows):
    """A step of 4,096 rows takes 4 GiB."""
    assert gpu_rows(512, free * GIB, lambda n: n << 20) == rows
    assert gpu_rows(9000, free * GIB, lambda n: n << 20) == 9000  # --max-batch-size asks for that many


@pytest.mark.parametrize(
    ("fixed", "per_row", "rows"),
    [
        (0.0, 1e-4, 512),  # no row is faster beside others
        (0.02, 2e-5, 8192),  # reading the weights takes as long as computing 1,000 rows
        (0.004, 4e-5, 1024),
        (10.0, 1e-6, 8192),
    ],
)
def test_a_step_takes_twice_as_many_rows_while_that_computes_prompts_faster(fixed, per_row, rows):
    assert rows_by_speed(lambda n: fixed + per_row * n, 512, 8192) == rows
    assert rows_by_speed(lambda n: fixed + per_row * n, 600, 600) == 600


@pytest.mark.parametrize(("name", "rows"), [("llama-gqa", 700), ("opt", 1500), ("qwen3.5", 1100)])
def test_prompts_are_timed_without_r_nodes(name, rows):
    """On a CPU here, where no node asks for it. The models have 1,024 positions."""
    backend = choose_backend("auto", make_checkpoint(name))
    model = backend.load(torch.device("cpu"), torch.float32)
    assert 0 < prompt_seconds(backend, model, rows) < 60


def test_without_the_option_a_step_on_a_cpu_has_512_rows_or_one_for_each_sequence():
    assert NodeConfig().step_rows == 512
    assert NodeConfig(max_batch_size=600).step_rows == 600
    assert NodeConfig(max_batch_tokens=256).step_rows == 256
    with pytest.raises(ConfigError, match="--max-batch-size is larger than --max-batch-tokens"):
        NodeConfig(max_batch_tokens=255)


def test_the_start_line_says_what_fits():
    links = [
        SimpleNamespace(
            lease=Lease(n, n, 8, GIB, "avx2", 1, "r"), geometry=SimpleNamespace(max_rows=512), resident=False
        )
        for n in (64, 33)
    ]
    line = capacity(15 * GIB, torch.device("cuda"), links, 4096)
    assert line == "weights 15.0 GiB on the GPU, KV 97.0 GiB in RAM = 3 sequences of 4096 tokens"
    assert "weights 1.5 KiB in RAM, KV 97.0 GiB" in capacity(1536, torch.device("cpu"), links, 4096)
    line = capacity(1536, torch.device("cpu"), links, 4096, n_ranks=2)
    assert line.startswith("weights 1.5 KiB in RAM of each of 2 ranks, KV 97.0 GiB")
    resident = SimpleNamespace(
        lease=Lease(33, 33, 8, GIB // 4, "cuda", 0, "cuda:0"), geometry=SimpleNamespace(max_rows=512), resident=True
    )
    line = capacity(15 * GIB, torch.device("cuda"), [resident, *links], 4096)
    assert line.endswith("KV 8.2 GiB on the GPU + 97.0 GiB in RAM = 4 sequences of 4096 tokens, 1 of them on the GPU")


def test_the_start_line_counts_pages_that_are_given_back():
    """A block of 128 tokens takes a page for the full layers and five for those with a window of 1024 tokens."""
    lease = Lease(1000, 1000, 8, 1 << 20, "avx2", 1, "r", full_sections=1, limited_sections=5, reach=1024)
    links = [SimpleNamespace(lease=lease, geometry=SimpleNamespace(max_rows=512), resident=False)]
    assert "= 2 sequences of 40000 tokens" in capacity(0, torch.device("cpu"), links, 40000)  # 313 + 5 * 13 pages each


#: Two blocks: 2 inputs of a convolution of 208 channels in fp32, and 6 heads of 16 x 24 numbers in fp32.
STATE = 2 * (2 * 208 * 4 + 6 * 16 * 24 * 4)


def test_states_get_what_all_mini_batches_need_or_a_quarter_of_what_is_free():
    model = read_config(make_checkpoint("qwen3.5"))
    assert state_slots(NodeConfig(max_batch_size=8), model, 4, GIB, 2) == 32
    assert state_slots(NodeConfig(max_batch_size=8, no_prefix_cache=True), model, 4, GIB, 2) == 16
    assert state_slots(NodeConfig(max_batch_size=8, speculate="suffix:3"), model, 4, GIB, 2) == 80
    assert state_slots(NodeConfig(max_batch_size=8), model, 4, 4 * (5 * STATE - 1), 2) == 4
    assert state_slots(NodeConfig(max_batch_size=8, state_memory=5 * STATE), model, 4, GIB, 2) == 5
    assert state_slots(NodeConfig(), read_config(make_checkpoint("llama-gqa")), 4, GIB, 2) == 0


@pytest.mark.parametrize(
    ("name", "memory", "reason"),
    [
        ("qwen3.5", STATE - 1, r"keeps a state of 21\.2 KiB, and there are 21\.2 KiB for states: raise --state-memory"),
        ("qwen3.5", 2 * GIB, r"--state-memory 2\.0 GiB: 1\.0 GiB are free"),
        ("llama-gqa", GIB, "the layers of LlamaForCausalLM keep no states"),
    ],
)
def test_state_memory_that_holds_no_state_is_refused(name, memory, reason):
    with pytest.raises(ConfigError, match=reason):
        state_slots(NodeConfig(state_memory=memory), read_config(make_checkpoint(name)), 4, GIB, 2)


#: The shape of Qwen2.5-32B.
QWEN_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


class PackedParameters:
    """A ParameterReader whose linears are those of `--weights int4` on a GPU, with tensors that have no values."""

    def tensor(self, name: str, *shape: int, offset: float = 0.0, single: bool = False) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    def matrix(self, outs: int, ins: int, bits: int) -> Quantised:
        q, scales = (
            torch.empty(outs, ins, dtype=torch.uint8, device="meta"),
            torch.empty(outs, ins // 32, device="meta"),
        )
        return Quantised(q, scales, scales if bits == 4 else None, 0 if bits == 4 else 128, bits, 32)

    def linear(self, names, outs, width, bias, head=False, layer=False, precise=None):
        parts = [(n, 8 if i == precise else 4) for i, n in enumerate(outs)]
        if head:
            parts = [(outs[0] // 8, 8), (outs[0] - outs[0] // 8, 4)]
        bias = self.tensor("", sum(outs)) if bias else None
        return make_linear([self.matrix(n, width, bits) for n, bits in parts], bias, META, torch.bfloat16)

    def embedding(self, name: str, rows: int, width: int):
        return quantised_embedding([self.matrix(rows, width, 4)], META, torch.bfloat16)

    def block_read(self, weights, index: int) -> None:
        """Does nothing."""


def test_a_model_of_32b_in_4_bits_fits_a_card_of_24_gb(tmp_path, monkeypatch):
    """With room for two mini-batches of 32 rows, captured, and for long prompts. The driver takes half a GiB."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    shape = read_config(tmp_path)
    weights = Blueprint(shape, own_head=True).weights(PackedParameters())
    taken = loader._weight_bytes(weights)
    model = Model(
        config=shape,
        weights=weights,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        parameters=loader.parameter_count(shape),
        weight_bytes=taken,
    )
    assert model.parameters == pytest.approx(32.8e9, rel=0.01)
    total = int(23.5 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - GIB // 2 - taken, total))
    asked = NodeConfig(max_batch_size=32, gpu_memory_utilization=0.95)
    config, staged, kv = plan_steps(
        asked, model, mini_batches=2, captures=True, prompt_seconds=lambda tokens: 1e-3 * tokens
    )
    assert config.max_batch_tokens >= 512 and staged >= 1024 and kv > 0
