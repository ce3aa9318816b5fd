"""The ranks of a tensor-parallel S-Part: processes of one machine, each of which has a share of every layer's weights.

cut           the model that each rank has, and the models that ranks cannot share
share         a rank's share of a checkpoint
vocabulary    the embedding and the LM head, whose rows the ranks share
reduction     sums over all ranks, through memory that they share
"""
