"""Shared by all tests: `tests/` itself is importable, for helper modules such as checkpoints.py."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# One torch thread here and in every process a test starts: with more, OpenMP's spinning waiters and the R-engine's
# threads take the cores from each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
