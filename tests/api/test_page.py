"""The page at / in a real browser, Chromium without a window.

Needs Debian's package `chromium` and PyPI's `playwright`.
"""

from __future__ import annotations

import asyncio
import shutil

import pytest
import pytest_asyncio
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from engines.scripted_engine import ScriptedEngine
from models import tokenizers_made
from models.checkpoints import make_checkpoint

from fastdecode.engine.state.request import Overloaded
from fastdecode.text.tokenizer import Tokenizer

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.tools,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
expect = playwright.expect
LINE = "#messages .message.assistant"


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_dir(tokenizers_made.byte_level(directory, chat_template=tokenizers_made.CHATML))


@pytest.fixture
def script(chat_tokenizer):
    return lambda text: chat_tokenizer.encode(text, add_special_tokens=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with playwright.async_playwright() as tool:
        # In a container Chromium's own sandbox cannot be set up.
        browser = await tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser):
    """A page in a profile of its own. Fails if a script throws, or asks another host for anything."""
    context = await browser.new_context()
    page = await context.new_page()
    thrown, hosts = [], set()
    page.on("pageerror", lambda error: thrown.append(error))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2].split(":")[0]))
    yield page
    await context.close()
    assert not thrown
    assert hosts <= {"127.0.0.1"}


def url(client):
    return f"http://127.0.0.1:{client.server.port}/"


async def say(page, text):
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")


async def test_a_conversation_equals_the_openai_clients_and_survives_a_reload(page, tmp_path):
    checkpoint = make_checkpoint("llama-gqa")
    async with (
        real_engine(checkpoint, tmp_path) as engine,
        served(engine, Tokenizer.from_dir(checkpoint)) as client,
    ):
        await page.goto(url(client))
        await page.click("#options summary")
        for field, value in (("temperature", "0"), ("max-tokens", "12")):
            await page.fill(f"#{field}", value)
        messages = []
        for i, text in enumerate(("Hello", "Go on")):
            await say(page, text)
            await expect(page.locator(f"{LINE} .foot").nth(i)).to_contain_text("tokens/s")
            messages.append({"role": "user", "content": text})
            answer = await client.openai.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=12
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        kept = await page.evaluate("JSON.parse(localStorage.getItem('fastdecode.conversation')).messages")
        assert [{"role": m["role"], "content": m["content"]} for m in kept] == messages
        await page.reload()
        await expect(page.locator(LINE)).to_have_count(2)
        assert await page.input_value("#max-tokens") == "12"
        await page.click("#clear")
        await page.reload()
        await expect(page.locator(LINE)).to_have_count(0)
        # The other view shows what /cluster says of this work.
        await page.click("#tab-cluster")
        async with client.http.get("/cluster") as response:
            found = await response.json()
        await expect(page.locator("#tiles")).to_contain_text(f"{4 * 12} since the start")
        await expect(page.locator(".r-node")).to_contain_text(found["nodes"][0]["url"])
        assert await page.locator("#timeline rect.s").count() > 10
        assert await page.locator("#timeline rect.r").count() > 10
        # /cluster may be older than the last tokens, so the page is compared with what was generated.
        await expect(page.locator("#tbt figcaption")).to_contain_text(f"{4 * (12 - 1)} counted")


async def test_a_models_text_is_formatted_and_never_run(page, chat_tokenizer, script):
    text = "So **bold** <img src=x onerror=alert(1)>\n\n```py\nprint('<b>')\n```\ndone"
    async with served(ScriptedEngine(script(text)), chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "<i>me</i>")
        await expect(page.locator(f"{LINE} strong")).to_have_text("bold")
        await expect(page.locator(f"{LINE} pre code")).to_have_text("print('<b>')\n")
        await expect(page.locator(f"{LINE} .text p").first).to_contain_text("<img src=x onerror=alert(1)>")
        await expect(page.locator(".message.user")).to_contain_text("<i>me</i>")
        assert await page.locator("#messages img, #messages i").count() == 0


async def test_a_model_without_a_template_writes_on(page, tmp_path, script):
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path))
    engine = ScriptedEngine(script(" time"), script("!"))
    async with served(engine, tokenizer) as client:
        await page.goto(url(client))
        await expect(page.locator("#completion-note")).to_be_visible()
        for i, text in enumerate(("Once upon a", " there was")):
            await say(page, text)
            await expect(page.locator(f"{LINE} .foot button")).to_have_count(i + 2)
    assert [tokenizer.decode(prompt) for prompt in engine.prompts] == ["Once upon a", "Once upon a time there was"]


async def test_stop_ends_the_request_and_keeps_the_text(page, chat_tokenizer, script):
    engine = ScriptedEngine([*script("half"), asyncio.Event()])
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{LINE} .text")).to_have_text("half")
        await page.click("#stop")
        await asyncio.wait_for(engine.streams[0].cancelled.wait(), 10)
        await expect(page.locator(LINE)).to_contain_text("stopped")
        await expect(page.locator(f"{LINE} .text")).to_have_text("half")


async def test_a_new_conversation_drops_the_answer_that_is_being_written(page, chat_tokenizer, script):
    engine = ScriptedEngine([*script("half"), asyncio.Event()], script("whole"))
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{LINE} .text")).to_have_text("half")
        await page.click("#clear")
        await asyncio.wait_for(engine.streams[0].cancelled.wait(), 10)
        await expect(page.locator("#stop")).to_be_hidden()
        await expect(page.locator("#messages .message")).to_have_count(0)
        await say(page, "Hi again")
        await expect(page.locator(f"{LINE} .text")).to_have_text("whole")


async def test_a_full_queue_is_tried_again(page, chat_tokenizer, script):
    engine = ScriptedEngine(refusal=Overloaded("too many requests wait", 2))
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{LINE} .notice")).to_contain_text("Trying again in")
        engine.scripts.append(script("done"))
        await expect(page.locator(f"{LINE} .text")).to_have_text("done")
        await expect(page.locator(f"{LINE} .notice")).to_have_count(0)


async def test_a_refused_request_says_why_and_can_be_sent_again(page, chat_tokenizer, script):
    engine = ScriptedEngine(script("fine"))
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await page.click("#options summary")
        await page.fill("#max-tokens", "-1")
        await say(page, "Hi")
        await expect(page.locator(f"{LINE} [role=alert]")).to_contain_text("max_tokens")
        await page.fill("#max-tokens", "")
        await page.get_by_role("button", name="Try again").click()
        await expect(page.locator(f"{LINE} .text")).to_have_text("fine")


async def test_a_server_that_goes_away(page, chat_tokenizer, script):
    engine = ScriptedEngine([*script("half"), asyncio.Event()])
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{LINE} .text")).to_have_text("half")
    await expect(page.locator(f"{LINE} [role=alert]")).to_be_visible()
    await expect(page.locator(f"{LINE} .text")).to_have_text("half")
    await expect(page.locator("#status-text")).to_have_text("The server does not answer.", timeout=10_000)
    await say(page, "Still there?")
    await expect(page.locator(f"{LINE} [role=alert]").last).to_have_text("The server does not answer.")


async def test_a_key_is_asked_for_once(page, chat_tokenizer, script):
    async with served(ScriptedEngine(script("yes")), chat_tokenizer, api_keys=["secret"], key="secret") as client:
        await page.goto(url(client))
        for key in ("wrong", "secret"):
            await expect(page.locator("#key-dialog")).to_be_visible()
            await page.fill("#key", key)
            await page.press("#key", "Enter")
        await expect(page.locator("#status-text")).to_contain_text(MODEL)
        await say(page, "Hi")
        await expect(page.locator(f"{LINE} .text")).to_have_text("yes")


async def test_a_lost_r_node_is_shown(page, chat_tokenizer):
    engine = ScriptedEngine()
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client) + "#cluster")
        await expect(page.locator(".r-node")).to_contain_text("tcp://r1")
        engine.alive = False
        await expect(page.locator(".r-node.down")).to_contain_text("lost", timeout=10_000)
        await expect(page.locator("#status-text")).to_contain_text("no R-node is connected")


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
        await expect(page.locator(f"{LINE} .foot button").first).to_be_visible()
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


#: What a chat on another server does: it sends a key, and reads a stream.
_ELSEWHERE = """async (url) => {
  const body = JSON.stringify({messages: [{role: "user", content: "Hi"}], stream: true});
  const headers = {"Content-Type": "application/json", "Authorization": "Bearer secret", "X-Request-Id": "page-1"};
  const answer = await fetch(url + "v1/chat/completions", {method: "POST", headers, body});
  const events = (await answer.text()).split("\\n").filter((line) => line.startsWith("data: {"));
  const deltas = events.map((line) => JSON.parse(line.slice(6)).choices[0]?.delta.content ?? "");
  return [deltas.join(""), answer.headers.get("X-Request-Id")];
}"""


async def test_a_page_of_another_origin_reads_a_stream_where_cors_allows_it(page, chat_tokenizer, script):
    options = {"api_keys": ["secret"], "key": "secret"}
    async with served(ScriptedEngine(), chat_tokenizer) as other:
        await page.goto(url(other) + "version")  # of another port, so of another origin
        origin = url(other).removesuffix("/")
        async with served(ScriptedEngine(script("yes")), chat_tokenizer, cors_origins=[origin], **options) as client:
            assert await page.evaluate(_ELSEWHERE, url(client)) == ["yes", "page-1"]
        async with served(ScriptedEngine(script("yes")), chat_tokenizer, **options) as client:
            with pytest.raises(playwright.Error, match="Failed to fetch"):
                await page.evaluate(_ELSEWHERE, url(client))
