"""The parts of scripts/prove_on_gpu.py, and its page."""
