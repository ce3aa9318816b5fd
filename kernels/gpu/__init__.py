"""CUDA: how kernels are compiled and launched. torch is not imported here, so an R-node can do without it."""
