"""Attention in float64, and kernels and arenas to compare with it."""
