"""The page at / in Chromium: where things are, and what a reader does."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from engines.api_client import Client

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
#: Marks of a module that uses the page. Chromium is Debian's package `chromium`, playwright PyPI's.
MARKS = [
    pytest.mark.tools,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
ANSWER = "#messages .message.assistant"


def url(client: Client) -> str:
    return f"http://127.0.0.1:{client.server.port}/"


async def say(page: Any, text: str) -> None:
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")


async def answered(page: Any, number: int = 1) -> None:
    """Wait until there are `number` answers, of which none is being written."""
    from playwright.async_api import expect

    await expect(page.locator(f"{ANSWER}:not(.writing)")).to_have_count(number)
    await expect(page.locator("#send")).to_be_visible()
