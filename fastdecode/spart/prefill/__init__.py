"""Attention of prompts, which the S-node computes.

prompt            the prompts of a step: their K and V, and their attention
heads             views of the heads in rows of Q and of K and V
prompt_attention  attention by kernels/decoder, on a CPU
attention         attention by torch's fused kernels, on a GPU
scoring           soft-capping, attention sinks and ALiBi
selection         attention to the tokens that a layer selects, by torch
"""
