"""The chat of the page at / in a real browser, and what a page of another origin may do."""

from __future__ import annotations

import asyncio
import re

import pytest
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from engines.scripted_engine import ScriptedEngine
from models import tokenizers_made
from models.checkpoints import make_checkpoint
from pages.chat_page import ANSWER, MARKS, answered, say, url

from fastdecode.engine.state.request import Overloaded
from fastdecode.text.tokenizer import Tokenizer

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = MARKS
expect = playwright.expect


#: The conversations that the browser keeps.
_KEPT = "Object.entries(localStorage).filter(([key]) => key.includes('conversation')).map(([, v]) => JSON.parse(v))"


async def test_a_conversation_equals_the_openai_clients_and_survives_a_reload(page, tmp_path):
    checkpoint = make_checkpoint("llama-gqa")
    async with (
        real_engine(checkpoint, tmp_path) as engine,
        served(engine, Tokenizer.from_dir(checkpoint)) as client,
    ):
        await page.goto(url(client))
        await page.fill("#max-tokens", "12")
        messages = []
        for i, text in enumerate(("Hello", "Go on")):
            await say(page, text)
            await answered(page, i + 1)
            messages.append({"role": "user", "content": text})
            answer = await client.openai.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=12
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        [kept] = await page.evaluate(_KEPT)
        assert [{"role": m["role"], "content": m["content"]} for m in kept["messages"]] == messages
        await page.reload()
        await expect(page.locator(ANSWER)).to_have_count(2)
        assert await page.input_value("#max-tokens") == "12"
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


async def test_a_model_without_a_template_writes_on(page, tmp_path, script):
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path))
    engine = ScriptedEngine(script(" time"), script("!"))
    async with served(engine, tokenizer) as client:
        await page.goto(url(client))
        await expect(page.locator("#completion-note")).to_be_visible()
        for i, text in enumerate(("Once upon a", " there was")):
            await say(page, text)
            await answered(page, i + 1)
    assert [tokenizer.decode(prompt) for prompt in engine.prompts] == ["Once upon a", "Once upon a time there was"]


async def test_stop_ends_the_request_and_keeps_the_text(page, chat_tokenizer, script):
    engine = ScriptedEngine([*script("half"), asyncio.Event()])
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half")
        await page.click("#stop")
        await asyncio.wait_for(engine.streams[0].cancelled.wait(), 60)
        await expect(page.locator(ANSWER)).to_contain_text("stopped")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half")


async def test_a_stopped_answer_goes_on_where_it_ended(page, chat_tokenizer, script):
    engine = ScriptedEngine([*script("half"), asyncio.Event()], script(" and whole"))
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half")
        await page.click("#stop")
        await page.get_by_role("button", name="Continue").click()
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half and whole")
    assert chat_tokenizer.decode(engine.prompts[1]).endswith("half")


async def test_the_status_says_what_the_model_does(page, chat_tokenizer, script):
    first, rest = asyncio.Event(), asyncio.Event()
    async with served(ScriptedEngine([first, *script("half"), rest, *script("!")]), chat_tokenizer) as client:
        await page.goto(url(client))
        status = page.locator("#status-text")
        await expect(status).to_have_text(f"{MODEL} · requests: 2 running, 1 waiting")
        await say(page, "Hi")
        await expect(status).to_have_text(f"{MODEL} · waiting for the first token")
        await expect(page.locator(f"{ANSWER} .foot")).to_contain_text(re.compile(r"waiting for the first token, \d+ s"))
        first.set()
        await expect(status).to_have_text(f"{MODEL} · writing")
        rest.set()
        await expect(status).to_have_text(f"{MODEL} · requests: 2 running, 1 waiting")


async def test_an_edited_message_takes_the_place_of_what_followed_it(page, chat_tokenizer, script):
    engine = ScriptedEngine(*(script(text) for text in ("one", "two", "three")))
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        for i, text in enumerate(("first", "second")):
            await say(page, text)
            await answered(page, i + 1)
        await page.get_by_role("button", name="Edit").first.click()
        await page.fill(".editor textarea", "changed")
        await page.get_by_role("button", name="Send", exact=True).first.click()
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("three")
        await expect(page.locator("#messages .message")).to_have_count(2)
    prompt = chat_tokenizer.decode(engine.prompts[2])
    assert "changed" in prompt
    assert "first" not in prompt
    assert "second" not in prompt


async def test_several_conversations_are_kept_until_they_are_deleted(page, chat_tokenizer, script):
    engine = ScriptedEngine(script("red"), [*script("half of green"), asyncio.Event()])
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Paint")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("red")
        await page.click("#new")
        await expect(page.locator("#messages .message")).to_have_count(0)
        await say(page, "Draw")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half of green")
        # Another conversation is opened while this one is being written: what is written so far is kept.
        await page.get_by_role("button", name="Paint", exact=True).click()
        await asyncio.wait_for(engine.streams[1].cancelled.wait(), 60)
        await expect(page.locator("#stop")).to_be_hidden()
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("red")
        await page.get_by_role("button", name="Draw", exact=True).click()
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half of green")
        await page.get_by_role("button", name="Paint", exact=True).click()
        await page.reload()
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("red")
        await page.get_by_role("button", name="Draw", exact=True).click()
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half of green")
        await expect(page.locator(ANSWER)).to_contain_text("stopped")
        for left, name in ((1, "Draw"), (0, "Paint")):
            remove = page.get_by_role("button", name=f"Delete “{name}”")
            await remove.click()
            await remove.click()
            await expect(page.locator("#conversations li")).to_have_count(left)
        assert await page.evaluate(_KEPT) == []


async def test_a_reload_keeps_what_was_written(page, chat_tokenizer, script):
    engine = ScriptedEngine([*script("half"), asyncio.Event()])
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half")
        await page.reload()
        await asyncio.wait_for(engine.streams[0].cancelled.wait(), 60)
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half")
        await expect(page.get_by_role("button", name="Continue")).to_be_visible()


async def test_two_tabs_show_each_others_conversations(page, chat_tokenizer, script):
    async with served(ScriptedEngine(script("red"), script("green")), chat_tokenizer) as client:
        other = await page.context.new_page()
        for tab in (page, other):
            await tab.goto(url(client))
        await say(page, "Paint")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("red")
        await other.get_by_role("button", name="Paint", exact=True).click()
        await say(other, "Again")
        for tab in (page, other):
            await expect(tab.locator(f"{ANSWER} .text")).to_have_text(["red", "green"])
        remove = other.get_by_role("button", name="Delete “Paint”")
        await remove.click()
        await remove.click()
        await expect(page.locator("#messages .message")).to_have_count(0)


@pytest.mark.parametrize(
    "broken",
    [
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }",
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('', 'SecurityError'); } })",
    ],
    ids=["full", "forbidden"],
)
async def test_a_browser_that_keeps_nothing_is_told_and_served(page, chat_tokenizer, script, broken):
    await page.add_init_script(broken)
    async with served(ScriptedEngine(script("one"), script("two")), chat_tokenizer) as client:
        await page.goto(url(client))
        for i in (1, 2):
            await say(page, "Hi")
            await answered(page, i)
        await expect(page.locator("#storage-note")).to_be_visible()


async def test_the_options_reach_the_request_and_are_kept(page, chat_tokenizer, script):
    engine = ScriptedEngine(script("one"), script("two"))
    values = {"temperature": "0.5", "top-p": "0.25", "repetition-penalty": "1.5", "seed": "7", "max-tokens": "9"}
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("one")
        for field, value in values.items():
            await page.fill(f"#{field}", value)
        await page.fill("#system", "Be brief")
        await page.reload()
        await expect(page.locator("#asked")).to_have_text("temperature 0.5 · at most 9 tokens · with the system prompt")
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text").last).to_have_text("two")
        await page.get_by_role("button", name="Reset").click()
        await expect(page.locator("#asked")).to_have_text("temperature 0 · at most 2048 tokens")
    found = [(p.temperature, p.top_p, p.repetition_penalty, p.seed, p.max_tokens) for p in engine.params]
    assert found == [(0, 1, 1, None, 2048), (0.5, 0.25, 1.5, 7, 9)]
    assert "Be brief" in chat_tokenizer.decode(engine.prompts[1])


async def test_an_adapter_can_be_chosen(page, chat_tokenizer, script):
    engine = ScriptedEngine(script("one"), script("two"))
    async with served(engine, chat_tokenizer, adapters=("terse",)) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("one")
        await page.select_option("#model", "terse")
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text").last).to_have_text("two")
    assert [params.adapter for params in engine.params] == [None, "terse"]


async def test_a_full_queue_is_tried_again(page, chat_tokenizer, script):
    engine = ScriptedEngine(refusal=Overloaded("too many requests wait", 2))
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .notice:visible")).to_contain_text("Trying again in")
        engine.scripts.append(script("done"))
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("done")
        await expect(page.locator(f"{ANSWER} .notice:visible")).to_have_count(0)


async def test_a_refused_request_says_why_and_can_be_sent_again(page, chat_tokenizer, script):
    engine = ScriptedEngine(script("fine"))
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await page.fill("#max-tokens", "-1")
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} [role=alert]")).to_contain_text("max_tokens")
        await page.fill("#max-tokens", "")
        await page.get_by_role("button", name="Try again").click()
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("fine")


async def test_a_server_that_goes_away(page, chat_tokenizer, script):
    engine = ScriptedEngine([*script("half"), asyncio.Event()])
    async with served(engine, chat_tokenizer) as client:
        await page.goto(url(client))
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("half")
    await expect(page.locator(f"{ANSWER} [role=alert]")).to_be_visible()
    await expect(page.locator(f"{ANSWER} .text")).to_have_text("half")
    await expect(page.locator("#status-text")).to_have_text("The server does not answer.")
    await say(page, "Still there?")
    await expect(page.locator(f"{ANSWER} [role=alert]").last).to_have_text("The server does not answer.")


async def test_a_key_is_asked_for_once(page, chat_tokenizer, script):
    async with served(ScriptedEngine(script("yes")), chat_tokenizer, api_keys=["secret"], key="secret") as client:
        await page.goto(url(client))
        for key in ("wrong", "secret"):
            await expect(page.locator("#key-dialog")).to_be_visible()
            await page.fill("#key", key)
            await page.press("#key", "Enter")
        await expect(page.locator("#status-text")).to_contain_text(MODEL)
        await say(page, "Hi")
        await expect(page.locator(f"{ANSWER} .text")).to_have_text("yes")


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
