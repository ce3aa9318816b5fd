"""Runs models of transformers on a lying device (lying_device.py) with the bypass, and on the CPU, over real links.

Arguments: model directories, each after "plain:" or "reads:", which lets the model's code read a token on the host.
Prints a JSON list with an entry for each: whether the tokens are equal, and the reason why no step was captured (empty:
steps were).
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch

from gpu.lying_device import NAME, LyingDevice, take_torchs_place
from gpu.lying_steps import make_bypass, with_links


def put_on_device(module: torch.nn.Module) -> None:
    """Move a model's tensors, also tensors that are neither parameters nor buffers."""
    moved: dict[int, torch.Tensor] = {}

    def there(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in moved:
            moved[id(x)] = x.detach().to(NAME)
        return moved[id(x)]

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(there(parameter), requires_grad=False)
        for holder in (part._buffers, part.__dict__):
            for name, value in list(holder.items()):
                if isinstance(value, torch.Tensor):
                    holder[name] = there(value)


def main() -> None:
    take_torchs_place()
    from fastdecode.spart.hf import model as hf_model
    from fastdecode.spart.hf.decoder import HFSPart

    torch.set_num_threads(1)
    hf_model.can_pack = lambda device, dtype: False  # packed weights and C functions are for a CPU alone
    hf_model.use_row_ops = lambda module, dtype: None  # type: ignore[assignment]
    found: list[Any] = []
    logits_of = HFSPart.logits_of

    def reads(spart: Any, tokens: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        assert tokens[0].item() < spart.config.vocab_size
        return logits_of(spart, tokens, *rest)

    for how, _, directory in (argument.partition(":") for argument in sys.argv[1:]):
        HFSPart.logits_of = reads if how == "reads" else logits_of  # type: ignore[method-assign]
        model = hf_model.load_hf_model(directory, dtype="fp32")
        want = asyncio.run(with_links(model, 2, make_spart=HFSPart))
        with LyingDevice() as device:
            with torch.inference_mode():
                put_on_device(model.module)
            model.device = torch.device(NAME)
            bypass = make_bypass(device, "none")
            got = asyncio.run(with_links(model, 2, bypass, make_spart=HFSPart))
        assert bool(bypass.fault) != bool(bypass._driver.waited)
        found.append([got == want, bypass.fault])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
