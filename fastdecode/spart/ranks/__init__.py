"""The ranks of a tensor-parallel S-Part: processes of one machine, each of which has a share of every layer's weights.

reduction     sums over all ranks, through memory that they share
"""
