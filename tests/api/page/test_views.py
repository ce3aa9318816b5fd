"""The page's two views, on wide windows and on a phone: what the cluster's shows, their names, contrasts and keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines.api_client import served
from engines.real_engine import real_engine
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import make_checkpoint
from pages.chat_page import ANSWER, MARKS, answered, say, url
from prometheus_client.parser import text_string_to_metric_families

from fastdecode.engine.state.totals import Totals
from fastdecode.engine.stats import EngineStats
from fastdecode.text.tokenizer import Tokenizer

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = MARKS
expect = playwright.expect


async def test_a_lost_r_node_is_shown(page, chat_tokenizer):
    engine = ScriptedEngine()
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client) + "#cluster")
        await expect(page.locator(".r-node")).to_contain_text("tcp://r1")
        engine.alive = False
        await expect(page.locator(".r-node.down")).to_contain_text("lost")
        await expect(page.locator("#status-text")).to_contain_text("no R-node is connected")


class EngineWithGPU(ScriptedEngine):
    """It has KV pages on its GPU and on an R-node."""

    @property
    def stats(self) -> EngineStats:
        stats = super().stats
        gpu = replace(stats.nodes[0], url="cuda:0", node="cuda:0", pages_used=300)
        totals = Totals(steps=100, steps_near=80, steps_together=15, steps_apart=5)
        totals.predicted_seconds, totals.measured_seconds = 1.5, 1.6
        return replace(stats, nodes=[gpu, *stats.nodes], totals=totals)


async def test_the_page_and_metrics_show_where_kv_lies_and_how_steps_went(page, chat_tokenizer):
    async with served(EngineWithGPU(), chat_tokenizer) as client:
        await page.goto(url(client) + "#cluster")
        await expect(page.locator(".ways")).to_have_text(
            "Steps of the GPU's sequences: 80 % alone (A), 15 % with all others (B), 5 % beside others (C); "
            "1.5 s predicted, 1.6 s measured"
        )
        for place, used in (("cuda:0", "1.17 MiB"), ("tcp://r1", "100 KiB")):
            shown = page.locator(".r-node", has_text=place)
            await expect(shown.get_by_role("meter", name="KV-cache")).to_have_attribute(
                "aria-valuetext", f"{used} of 1.56 MiB, 3 sequences"
            )
        async with client.http.get("/metrics") as response:
            text = await response.text()
    found = {
        (sample.name.removeprefix("fastdecode:"), sample.labels.get("r_node")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert [found[f"steps_gpu_{way}_total", None] for way in ("alone", "together", "apart")] == [80, 15, 5]
    assert [found[f"steps_{kind}_seconds_total", None] for kind in ("predicted", "measured")] == [1.5, 1.6]
    assert [found["r_node_kv_bytes_used", place] for place in ("cuda:0", "tcp://r1")] == [300 * 4096, 25 * 4096]


#: The text of each visible element of a selector, and its contrast with what is behind it (WCAG 2.2, 1.4.3).
#: One script measures them all, because the page may replace an element between two scripts.
_CONTRASTS = """selector => {
  const seen = [...document.querySelectorAll(selector)].filter(e => e.checkVisibility({visibilityProperty: true}));
  return seen.map(contrast);
};
function contrast(element) {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  let behind = element;
  while (parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const light = (color) => parse(color).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
  return [element.innerText, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_keyboard_names_and_contrast(page, chat_tokenizer, script, theme):
    async with served(ScriptedEngine(script("yes")), chat_tokenizer) as client:
        await page.emulate_media(color_scheme="dark" if theme == "light" else "light")
        await page.goto(url(client))
        await page.click("#theme")
        assert await page.evaluate("getComputedStyle(document.documentElement).colorScheme") == theme
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .foot button").first).to_be_visible()
        await page.focus("#tab-chat")
        visible = "h1, p, button:not(:disabled), summary, .faint, .value, h2, h3, label"
        for key in ("ArrowRight", "ArrowRight"):
            contrasts = await page.evaluate(_CONTRASTS, visible)
            assert len(contrasts) > 5
            assert [(text, contrast) for text, contrast in contrasts if contrast < 4.5] == []
            for role in ("button", "textbox", "spinbutton", "meter", "tab"):
                for element in await page.get_by_role(role).all():
                    assert await element.evaluate(
                        "e => e.getAttribute('aria-label') || e.textContent || e.labels?.[0]?.textContent"
                    )
            await page.keyboard.press(key)
        await expect(page.locator("#tab-chat")).to_be_focused()


#: The texts of charts that are hard to read: small, beyond the chart, or over another text. The number of all texts.
_UNREADABLE = """() => {
  const found = [];
  let seen = 0;
  for (const chart of document.querySelectorAll("#view-cluster svg:not(.sparkline)")) {
    const { left, right } = chart.getBoundingClientRect();
    const texts = [...chart.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    seen += texts.length;
    for (const [text, box] of texts) {
      if (box.height < 10 || box.left < left - 1 || box.right > right + 1) found.push(text);
      for (const [other, its] of texts) {
        const apart = box.right <= its.left || its.right <= box.left || box.bottom <= its.top || its.bottom <= box.top;
        if (text < other && !apart) found.push(`${text} over ${other}`);
      }
    }
  }
  return [found, seen];
}"""


async def test_a_phone_shows_both_views_without_scrolling_sideways(page, tmp_path):
    checkpoint = make_checkpoint("llama-gqa")
    await page.set_viewport_size({"width": 390, "height": 844})
    async with (
        real_engine(checkpoint, tmp_path) as engine,
        served(engine, Tokenizer.from_dir(checkpoint)) as client,
    ):
        await page.goto(url(client))
        width = "document.scrollingElement.scrollWidth"
        await expect(page.locator("#side")).to_be_hidden()
        await page.click("#menu")
        await page.fill("#max-tokens", "40")
        await page.click("#new")
        await expect(page.locator("#side")).to_be_hidden()
        for i in range(3):
            await say(page, "Hello")
            await answered(page, i + 1)
        assert await page.evaluate(width) == 390
        await page.click("#tab-cluster")
        await expect(page.locator("#tbt figcaption")).to_contain_text(f"{3 * 39} counted")
        assert await page.evaluate(width) == 390
        found, seen = await page.evaluate(_UNREADABLE)
        assert found == []
        assert seen > 10


async def test_terms_are_explained_to_pointer_finger_and_keyboard(page, chat_tokenizer):
    async with served(ScriptedEngine(), chat_tokenizer) as client:
        await page.goto(url(client) + "#cluster")
        tip = page.locator("#tip")
        for name, says in (("S-Part", "has weights"), ("R-Part", "Attention"), ("rows", "Q, K and V")):
            term = page.get_by_role("button", name=name, exact=True)
            await expect(tip).to_be_hidden()
            await term.hover()
            await expect(tip).to_contain_text(says)
            await page.mouse.move(0, 0)
            await expect(tip).to_be_hidden()
            await term.focus()
            await expect(tip).to_contain_text(says)
            assert await term.get_attribute("aria-describedby") == "tip"
            await page.keyboard.press("Escape")
