// The chat: a conversation that the browser keeps, answers as they are written, errors that can be tried again.

import { Failure, events, request, sleep } from "./api.js";
import { $, button, count, el, number, seconds } from "./dom.js";
import { copyText, render } from "./text.js";

const STORE = "fastdecode.conversation";
const TRIES = 5; // of a request that the server refuses because its queue is full
const QUESTIONS = ["What is the capital of France?", "Explain what a KV-cache is in two sentences.", "Write a limerick about memory bandwidth."];
const BEGINNINGS = ["It was a", "Once upon a time there was", "The first thing that she saw was"];

export class Chat {
  /** `model`: a promise of the server's first report. */
  constructor(model) {
    this.onEnd = () => {};
    this.model = model;
    this.completes = false; // the model has no chat template
    this.running = null; // the AbortController of the answer that is being written
    this.messages = [];
    this.load();
    model.then((report) => this.adapt(report.chat));
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
    for (const id of ["system", "temperature", "max-tokens"]) $(id).addEventListener("change", () => this.save());
    const prompt = $("prompt");
    prompt.addEventListener("input", () => fit(prompt));
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.running?.abort(); });
    this.show();
  }

  // ---- what the browser keeps ----

  load() {
    try {
      const kept = JSON.parse(localStorage.getItem(STORE)) ?? {};
      this.messages = kept.messages ?? [];
      for (const [id, value] of Object.entries(kept.options ?? {})) $(id).value = value;
    } catch {
      localStorage.removeItem(STORE);
    }
  }

  save() {
    const options = Object.fromEntries(["system", "temperature", "max-tokens"].map((id) => [id, $(id).value]));
    try {
      localStorage.setItem(STORE, JSON.stringify({ messages: this.messages, options }));
    } catch {
      // The storage is full or forbidden: the conversation lives as long as the page.
    }
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.save();
    this.show();
    $("prompt").focus();
  }

  adapt(hasTemplate) {
    this.completes = !hasTemplate;
    $("completion-note").hidden = hasTemplate;
    $("system").disabled = !hasTemplate;
    $("prompt").placeholder = hasTemplate ? "Your message" : "The beginning of a text";
    const texts = hasTemplate ? QUESTIONS : BEGINNINGS;
    $("suggestions").replaceChildren(...texts.map((text) => button(text, () => { $("prompt").value = text; this.send(); })));
  }

  // ---- asking ----

  send() {
    const text = $("prompt").value;
    if (!text.trim() || this.running) return;
    $("prompt").value = "";
    fit($("prompt"));
    this.messages.push({ role: "user", content: this.completes ? text : text.trim() });
    this.show();
    this.answer();
  }

  /** Let the model write the answer to the last message of the user. */
  async answer() {
    const message = { role: "assistant", content: "", reasoning: "" };
    const { messages } = this;
    const item = this.append(message);
    this.running = new AbortController();
    this.showRunning(true);
    try {
      await this.write(message, item, this.running.signal);
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else if (error instanceof Failure) message.error = error.message;
      else message.error = `The page failed: ${error.message}.`;
    }
    this.running = null;
    this.showRunning(false);
    this.onEnd();
    if (messages !== this.messages) return; // a new conversation has begun
    message.notice = null;
    messages.push(message);
    this.save();
    this.show();
    $("announcer").textContent = message.error ?? message.content;
  }

  async write(message, item, signal) {
    await Promise.race([this.model, sleep(3, signal)]);
    const begun = performance.now();
    let first = null;
    let usage = null;
    for await (const event of events(await this.ask(message, item, signal))) {
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      if (!choice) continue;
      first ??= performance.now();
      message.content += choice.text ?? choice.delta?.content ?? "";
      message.reasoning += choice.delta?.reasoning_content ?? "";
      message.cut = choice.finish_reason === "length" || message.cut;
      message.stats = stats(begun, first, usage);
      this.refresh(item, message);
    }
    message.stats = stats(begun, first, usage);
  }

  /** The stream of the answer. Waits and asks again while the server's queue is full. */
  async ask(message, item, signal) {
    const [path, body] = this.body();
    for (let tries = 1; ; tries += 1) {
      try {
        return await request(path, { body, signal });
      } catch (error) {
        if (error.status !== 429 || tries === TRIES) throw error;
        for (let left = error.retryAfter ?? 2 ** tries; left > 0; left -= 1) {
          message.notice = `The server is busy. Trying again in ${left} s.`;
          this.refresh(item, message);
          await sleep(1, signal);
        }
        message.notice = null;
      }
    }
  }

  body() {
    const body = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
    if ($("max-tokens").value !== "") body.max_tokens = Number($("max-tokens").value);
    const said = this.messages.filter((message) => message.content);
    if (this.completes) {
      // The text so far is the prompt, and the endpoint's default of 16 tokens would be short.
      const prompt = said.map((message) => message.content).join("");
      return ["/v1/completions", { max_tokens: 256, ...body, prompt }];
    }
    const system = $("system").value.trim();
    const messages = said.map(({ role, content }) => ({ role, content }));
    if (system) messages.unshift({ role: "system", content: system });
    return ["/v1/chat/completions", { ...body, messages }];
  }

  again() {
    if (this.running) return;
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    this.show();
    this.answer();
  }

  // ---- showing ----

  show() {
    $("messages").replaceChildren(...this.messages.map((message, i) => this.item(message, i === this.messages.length - 1)));
    $("welcome").hidden = this.messages.length > 0;
    $("clear").disabled = this.messages.length === 0;
    toEnd();
  }

  showRunning(running) {
    $("send").hidden = running;
    $("stop").hidden = !running;
    $("messages").setAttribute("aria-busy", running);
  }

  append(message) {
    const item = this.item(message, false);
    item.classList.add("writing");
    $("messages").append(item);
    toEnd();
    return item;
  }

  item(message, last) {
    const item = el("li", { className: `message ${message.role}` });
    fill(item, message);
    if (message.role === "assistant" && last) {
      item.querySelector(".foot").append(button(message.error ? "Try again" : "Write another", () => this.again()));
    }
    return item;
  }

  /** Show a message that grows, at most once a frame. */
  refresh(item, message) {
    if (item.dataset.due) return;
    item.dataset.due = "1";
    requestAnimationFrame(() => {
      delete item.dataset.due;
      if (!item.isConnected) return;
      const atEnd = isAtEnd();
      fill(item, message);
      if (atEnd) toEnd();
    });
  }
}

function fill(item, message) {
  const open = item.querySelector("details")?.open;
  const parts = [el("span", { className: "visually-hidden" }, message.role === "user" ? "You:" : "The model:")];
  if (message.reasoning) {
    const details = el("details", { className: "reasoning" }, el("summary", {}, "Reasoning"), ...render(message.reasoning));
    details.open = open ?? !message.content;
    parts.push(details);
  }
  parts.push(el("div", { className: "text" }, ...(message.role === "user" ? [el("p", {}, message.content)] : render(message.content))));
  if (message.notice) parts.push(el("p", { className: "notice" }, message.notice));
  if (message.error) parts.push(el("p", { className: "notice bad", role: "alert" }, message.error));
  if (message.role === "assistant") parts.push(foot(message));
  item.replaceChildren(...parts);
}

function foot(message) {
  const notes = [];
  if (message.stats) notes.push(message.stats);
  if (message.stopped) notes.push("stopped");
  if (message.cut) notes.push("cut at the longest answer");
  const line = el("div", { className: "foot" }, el("span", { className: "faint" }, notes.join(" · ")));
  if (message.content) line.append(button("Copy", (self) => copyText(self, message.content)));
  return line;
}

/** "120 tokens · the first after 85 ms · 41 tokens/s · 96 of 110 prompt tokens cached" */
function stats(begun, first, usage) {
  if (first === null || !usage) return "";
  const n = usage.completion_tokens;
  const parts = [count(n, "token"), `the first after ${seconds((first - begun) / 1000)}`];
  const taken = (performance.now() - first) / 1000;
  if (n > 1 && taken > 0) parts.push(`${number((n - 1) / taken)} tokens/s`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  return parts.join(" · ");
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 220)}px`;
}

function isAtEnd() {
  const page = document.scrollingElement;
  return page.scrollHeight - page.scrollTop - page.clientHeight < 80;
}

function toEnd() {
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}
