"""What the transformers backend replaces in a model on a CPU, against the modules' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastdecode.spart.hf.linears import LinearModule, replace_linears, replaced_bytes
from fastdecode.spart.hf.row_ops import use_row_ops

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "pad_token_id": 0,
}
#: Model types, and whether their norms and MLPs are of the kinds that kernels/decoder has: Gemma multiplies by 1 + w
#: and gates with GELU, OLMo 2 norms whole rows of Q and K, and StarCoder 2 has LayerNorm and no gate.
TYPES = {
    "llama": (True, True),
    "qwen3": (True, True),
    "olmo2": (True, True),
    "gemma2": (False, False),
    "starcoder2": (False, False),
}


def make_model(model_type: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES)).eval().to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # transformers makes them ones
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_with_replaced_modules_computes_the_same(model_type: str, dtype: torch.dtype) -> None:
    ids = torch.arange(1, 14)[None]
    with torch.inference_mode():
        want = make_model(model_type, dtype)(ids).logits.double()
        model = make_model(model_type, dtype)
        replace_linears(model, model.get_output_embeddings(), None)
        use_row_ops(model, dtype)
        got = model(ids).logits.double()
    assert (got - want).norm() < 20 * torch.finfo(dtype).eps * want.norm()
    replaced = [type(part).__name__ for part in model.modules() if "forward" in vars(part)]
    norms, mlps = TYPES[model_type]
    assert any("RMSNorm" in name for name in replaced) == norms
    assert any("MLP" in name for name in replaced) == mlps


def test_linears_of_the_same_rows_are_one_product() -> None:
    model = make_model("llama", torch.float32)
    names = ("q_proj", "k_proj", "v_proj")
    block = model.model.layers[0].self_attn
    weights = [getattr(block, name).weight.double() for name in names]
    with torch.inference_mode():
        replace_linears(model, model.get_output_embeddings(), None)
        parts: list[LinearModule] = [getattr(block, name) for name in names]
        assert len({part.product for part in parts}) == 1
        x, other = torch.randn(1, 5, 48), torch.randn(1, 3, 48)
        for rows in (x, other, x):
            for part, weight in zip(parts, weights, strict=True):
                torch.testing.assert_close(part(rows).double(), rows.double() @ weight.T, rtol=1e-5, atol=1e-5)
        # In another order, and with other rows in between.
        for index, rows in ((2, x), (0, other), (1, x), (0, x)):
            want = rows.double() @ weights[index].T
            torch.testing.assert_close(parts[index](rows).double(), want, rtol=1e-5, atol=1e-5)
    linears = sum(layer.nbytes for layer in {part.product.linear for part in parts})
    assert linears == sum(weight.numel() for weight in weights) * 4 and replaced_bytes(model) > linears


def test_a_norm_of_another_formula_is_not_replaced(tmp_path: Path) -> None:
    class HalfRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(48)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * torch.nn.functional.rms_norm(x, (48,), self.weight, self.eps)

    norm = HalfRMSNorm()
    use_row_ops(norm, torch.float32)
    assert "forward" not in vars(norm)
