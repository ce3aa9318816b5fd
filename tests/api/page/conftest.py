"""Chromium without a window, and a tokenizer for scripted answers."""

from __future__ import annotations

import pytest
import pytest_asyncio
from models import tokenizers_made
from pages.chat_page import CHROMIUM

from fastdecode.text.tokenizer import Tokenizer

BUSY_MS = 60_000  # what a busy machine may take to show or to do something


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_dir(tokenizers_made.byte_level(directory, chat_template=tokenizers_made.CHATML))


@pytest.fixture
def script(chat_tokenizer):
    return lambda text: chat_tokenizer.encode(text, add_special_tokens=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    playwright.expect.set_options(timeout=BUSY_MS)
    async with playwright.async_playwright() as tool:
        # In a container Chromium's own sandbox cannot be set up.
        browser = await tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser):
    """A page in a profile of its own. Fails if a script throws, a dialog opens, or another host is asked."""
    context = await browser.new_context()
    context.set_default_timeout(BUSY_MS)
    page = await context.new_page()
    thrown, dialogs, hosts = [], [], set()
    page.on("pageerror", lambda error: thrown.append(error))
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2].split(":")[0]))
    yield page
    await context.close()
    assert not thrown
    assert not dialogs
    assert hosts <= {"127.0.0.1"}
