"""Makes guest.py importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
