"""The engine: iteration-level batching, placement on R-nodes, preemption."""
