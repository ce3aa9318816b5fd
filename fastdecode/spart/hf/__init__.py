"""The transformers backend: any causal language model of transformers, split at its attention.

    trace       the shape and options of each layer's attention, learned on the meta device before a weight is read
    interface   use_attention: the attention of every model calls one function of ours
    latent      multi-head latent attention with one KV head (DeepSeek)
    config      HFConfig: the heads of each layer, and the reason why a model cannot be served
    model       load_hf_model: the checkpoint through transformers' own loader
    mtp         heads that draft tokens (DeepSeek, GLM)
    linears     the linears of a model on a CPU or with quantised weights, those of the same rows as one product
    row_ops     norms and MLPs of a model by kernels/decoder, on a CPU
    lora        LoRA adapters on a model's linears
    mixers      modules that keep a state of each sequence
    indexer     the indexers of trained sparse attention (DeepSeek-V3.2, GLM-5)
    ranks       the matrices of each rank of a tensor-parallel S-Part, by transformers' own plan
    attention   the function that transformers calls in every layer
    decoder     HFSPart: one step of one mini-batch, whose forward pass is a greenlet that pauses at each layer

fastdecode has no code for these models: transformers calls the attention function that `trace` or `attention` registers
with its AttentionInterface. This package needs the extra `fastdecode[models]`.
"""

from __future__ import annotations
