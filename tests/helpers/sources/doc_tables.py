"""Tables of docs/ that tests write."""

from __future__ import annotations

import os
import re
from pathlib import Path

_DOCS = Path(__file__).parents[3] / "docs"


def check_table(page: str, name: str, lines: list[str]) -> None:
    """Assert that the part `<!-- name -->` of a page of docs/ has these lines, which FASTDECODE_WRITE_DOCS=1 writes."""
    path = _DOCS / page
    text = path.read_text()
    body = "\n".join(lines) + "\n"
    wanted, n = re.subn(rf"(<!-- {name} -->\n).*?(?=<!-- end -->)", lambda m: m[1] + body, text, flags=re.DOTALL)
    assert n == 1, f"docs/{page} has no part <!-- {name} -->"
    if os.environ.get("FASTDECODE_WRITE_DOCS"):
        path.write_text(wanted)
    assert path.read_text() == wanted, "FASTDECODE_WRITE_DOCS=1 writes the table again"
