"""Shared by all tests: `tests/` itself is importable, for helper modules such as checkpoints.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
