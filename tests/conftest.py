"""Puts the helper modules beside the tests on sys.path (importlib mode does not)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
