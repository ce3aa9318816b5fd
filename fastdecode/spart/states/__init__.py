"""Layers that keep a state of fixed size for each sequence, in place of K and V of each token.

pool        StatePool: the states of all sequences, a slot each, and a step's rows in it
delta       the gated delta rule (Qwen3-Next, Qwen3.5)
delta_rows  the same in C
"""
