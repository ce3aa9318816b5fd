"""LoRA adapters (Hu et al., arXiv 2106.09685): small changes of a model's linears, chosen request by request.

files      read_adapter: an adapter in PEFT's format
adapters   the adapters of a model, applied to the rows of a step that use them
"""

from __future__ import annotations
