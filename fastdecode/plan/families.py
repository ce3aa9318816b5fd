"""The memory that well-known models take: KV-cache, states and weights, and the graphics cards that the weights fit.

A model is the configuration of transformers for its type with the values that differ; for many types the class's own
values are those of a published model. The parameters are counted and the KV-cache is laid out as for serving, on the
meta device, so no file is needed. Parts that fastdecode leaves aside (vision, heads for drafts) do not count.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.kv_pages import KVPages
from fastdecode.daemon.option_values import format_bytes, size_option
from fastdecode.daemon.weights import QUANTISED_BYTES
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS
from fastdecode.spart import ModelConfig
from fastdecode.spart.backend import choose_backend

if TYPE_CHECKING:
    from fastdecode.spart.hf.config import HFConfig

COMMAND = ("families", "memory that well-known models take, and the graphics cards that their weights fit")

_GIB = 1 << 30
#: Bytes of a weight by what it is kept in, the most first.
_WEIGHTS = {"16 bits": 2.0, "8 bits": QUANTISED_BYTES["int8"], "4 bits": QUANTISED_BYTES["int4"]}


@dataclass(frozen=True, eq=False)
class Family:
    """A published model: its name, its type in transformers, and the values that are not the type's own."""

    name: str
    model_type: str
    values: dict[str, Any]


def _attention_at(n_layers: int, layers: tuple[int, ...], kind: str, others: str) -> list[str]:
    return [kind if layer in layers else others for layer in range(n_layers)]


_GRANITE_4 = {
    "num_hidden_layers": 40, "layer_types": _attention_at(40, (5, 15, 25, 35), "attention", "mamba"),
    "vocab_size": 100352, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES = (
    Family("Llama 3.1 8B", "llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }),
    Family("Llama 3.3 70B", "llama", {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }),
    Family("Qwen3 8B", "qwen3", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    }),
    Family("Qwen3 30B-A3B", "qwen3_moe", {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    }),
    Family("Qwen3-Next 80B-A3B", "qwen3_next", {}),
    Family("Qwen3.5 9B", "qwen3_5_text", {}),
    Family("Qwen3.5 27B", "qwen3_5_text", {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    }),
    Family("Qwen3.5 35B-A3B", "qwen3_5_moe_text", {}),
    Family("Gemma 3 27B", "gemma3_text", {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    }),
    Family("gpt-oss 20B", "gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    Family("gpt-oss 120B", "gpt_oss", {}),
    Family("GLM-4.5-Air", "glm4_moe", {"head_dim": 128, "attention_bias": True}),
    Family("GLM-4.5 to 4.7", "glm4_moe", {
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
        "head_dim": 128, "n_routed_experts": 160, "first_k_dense_replace": 3, "attention_bias": True,
        "use_qk_norm": True,
    }),
    Family("GLM-4.7-Flash", "glm4_moe_lite", {}),
    Family("MiniMax-M2", "minimax_m2", {}),
    Family("DeepSeek-V2-Lite", "deepseek_v2", {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "q_lora_rank": None, "vocab_size": 102400, "first_k_dense_replace": 1,
    }),
    Family("DeepSeek-V3", "deepseek_v3", {}),
    Family("DeepSeek-V3.2", "deepseek_v32", {}),
    Family("GLM-5", "glm_moe_dsa", {}),
    Family("Ministral 3 8B", "ministral3", {}),
    Family("Mistral Small 24B", "mistral", {
        "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "head_dim": 128,
        "vocab_size": 131072, "sliding_window": None,
    }),
    Family("Kimi-Linear 48B-A3B", "kimi_linear", {}),
    Family("Kimi K2", "deepseek_v3", {
        "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
        "first_k_dense_replace": 1,
    }),
    Family("Nemotron 3 Nano 30B-A3B", "nemotron_h", {
        "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    }),
    Family("Granite 4.0 H-Tiny", "granitemoehybrid", _GRANITE_4 | {
        "hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 12, "num_key_value_heads": 4,
        "num_local_experts": 64, "shared_intermediate_size": 1024, "mamba_n_heads": 48,
    }),
    Family("Granite 4.0 H-Small", "granitemoehybrid", _GRANITE_4 | {
        "hidden_size": 4096, "intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 72, "shared_intermediate_size": 1536, "mamba_n_heads": 128,
    }),
    Family("Falcon-H1 7B", "falcon_h1", {
        "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 44, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 130049, "mamba_d_ssm": 3072, "mamba_n_heads": 24,
        "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1,
    }),
    Family("LFM2 8B-A1B", "lfm2_moe", {
        "num_hidden_layers": 24, "layer_types": _attention_at(24, (2, 6, 10, 14, 18, 21), "full_attention", "conv"),
    }),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes."""

    name: str
    model_type: str
    parameters: int
    state_bytes: int  # of a sequence, beside the weights
    token_bytes: float | None  # of the KV-cache; None: the model cannot have the format
    kv_bytes: int | None  # of all sequences
    cards: tuple[str | None, ...]  # what the weights are kept in to fit each card; None: they do not fit


@cache
def _read(family: Family) -> tuple[int, ModelConfig | HFConfig]:
    """The number of a model's parameters, and its configuration."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    published = CONFIG_MAPPING[family.model_type](**family.values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published)  # type: ignore[no-untyped-call]
    n = sum(p.numel() for p in model.parameters())
    published.architectures = [type(model).__name__]
    with TemporaryDirectory() as directory:
        published.save_pretrained(directory)
        return n, choose_backend("auto", directory).config


def need(family: Family, kv_dtype: str, sequences: int, context: int, cards: list[int]) -> Need:
    """What `sequences` of `context` tokens take. A card has to hold the weights and the states in the share of its
    memory that a node uses."""
    n, config = _read(family)
    node, token, held = NodeConfig(), None, None
    if kv_dtype in config.kv_dtypes:
        pages = KVPages(config.hello_geometry(1, 1, "fp16"), kv_dtype, config.windows, config.options)
        token = pages.block_bytes / PAGE_TOKENS
        held = sequences * pages.groups(node.step_rows).pages_for(context) * pages.page_bytes
    state = config.state_bytes(2)

    def kept(card: int) -> str | None:
        room = card * node.gpu_memory_utilization - sequences * state
        return next((name for name, n_bytes in _WEIGHTS.items() if n * n_bytes <= room), None)

    fits = tuple(kept(card) for card in cards)
    return Need(family.name, family.model_type, n, state, token, held, fits)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan families`."""
    add = parser.add_argument
    add("--card", type=size_option, action="append", metavar="SIZE",
        help="memory of a graphics card (repeatable); default: 12GiB, 16GiB and 24GiB")  # fmt: skip
    add("--sequences", type=int, default=16, metavar="N", help="sequences that are served at once (16)")
    add("--context", type=int, default=32768, metavar="N", help="tokens of each sequence (32768)")
    add("--kv-dtype", choices=KV_DTYPES, default="int8", help="KV format (int8)")


def run(args: argparse.Namespace) -> None:
    """Print the table, in Markdown."""
    cards = args.card or [12 * _GIB, 16 * _GIB, 24 * _GIB]
    bar = tqdm(FAMILIES, unit="model", leave=False)
    needs = [need(family, args.kv_dtype, args.sequences, args.context, cards) for family in bar]
    result = {
        "kv_dtype": args.kv_dtype,
        "sequences": args.sequences,
        "context": args.context,
        "cards": cards,
        "models": [asdict(each) for each in needs],
    }
    print_result(args, result, _print_table)


def _print_table(result: dict[str, Any]) -> None:
    cards = "".join(f" {card / _GIB:g} GiB card |" for card in result["cards"])
    ram = f"RAM for {result['sequences']} sequences of {result['context']}"
    print(f"| model | type | parameters | state a sequence | KV a token, {result['kv_dtype']} |{cards} {ram} |")
    print("|---|---|---|---|---|" + "---|" * (len(result["cards"]) + 1))
    for model in result["models"]:
        state, token, kv = (_size(model[name]) for name in ("state_bytes", "token_bytes", "kv_bytes"))
        fits = "".join(f" {kept or 'no'} |" for kept in model["cards"])
        parameters = f"{model['parameters'] / 1e9:.1f} billion"
        print(f"| {model['name']} | `{model['model_type']}` | {parameters} | {state} | {token} |{fits} {kv} |")


def _size(n_bytes: float | None) -> str:
    if n_bytes is None:
        return "refused"
    return format_bytes(n_bytes) if n_bytes else "none"
