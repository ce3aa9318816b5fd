"""The S-Part's products of rows with a weight matrix, behind one interface.

base         Linear and Embedding: the interfaces that the decoder calls
dense        16- and 32-bit weights, for oneDNN in the order that its kernels read
dense16      16-bit weights for fp32 or bf16 activations, by kernels/linears on a CPU
quantised    Quantised: a matrix in few bits, whatever file it came from; rounding of float weights to 8 or 4 bits
grouped      GroupedLinear: the product with a Quantised, by kernels/linears on a CPU
grouped_mm   grouped_mm: a product of sorted rows, each group of rows with its own matrix
experts      one linear of every expert of a layer
heads        HeadLinears: a matrix for each head, which latent attention has
gpu          GPULinear, GPUExperts: products with matrices in few bits on a GPU
gpu_kernels  the library that multiplies them there
packed       the form of a Quantised on a GPU
stack        make_linear: one Linear of several matrices that multiply the same rows
huge_pages   memory in huge pages for the weights and states of a CPU
"""

from __future__ import annotations
