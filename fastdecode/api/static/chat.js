// The chat: conversations, the answer that is being written, and what can be done with the messages.

import { writeAnswer } from "./answer.js";
import { Failure, sleep } from "./api.js";
import * as conversations from "./conversations.js";
import { $, button, el, fit, isAtEnd, onEnter, toEnd } from "./dom.js";
import { MessageItem } from "./message.js";
import { Options } from "./options.js";

const KEEP_SECONDS = 2; // an answer that is being written is kept this often
const QUESTIONS = [
  "What is the capital of France?",
  "Explain in three sentences how a transformer writes text.",
  "Write a Python function that reverses a string.",
];
const BEGINNINGS = ["It was a", "Once upon a time there was", "The first thing that she saw was"];

export class Chat {
  constructor() {
    this.onState = () => {}; // is called with what the chat does, as "writing"; with null when an answer has ended
    this.options = new Options();
    this.completes = false; // the model has no chat template
    this.known = new Promise((resolve) => { this.tellKnown = resolve; }); // whether it has one
    this.running = null; // the AbortController of the answer that is being written
    this.items = []; // of the messages
    const prompt = $("prompt");
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("new").addEventListener("click", () => this.open(conversations.create()));
    $("options").addEventListener("input", () => this.offerActions());
    prompt.addEventListener("input", () => fit(prompt));
    onEnter(prompt, () => this.send());
    document.addEventListener("keydown", ({ key }) => {
      const inView = !$("view-chat").hidden && !$("side").matches(":popover-open"); // otherwise Escape closes something
      if (key === "Escape" && inView) this.running?.abort();
    });
    addEventListener("pagehide", () => { if (this.running) this.keep(this.conversation); });
    conversations.watch((id) => this.changedElsewhere(id));
    this.open(conversations.reopen());
  }

  /** Take in whether the model has a chat template. */
  adapt(hasTemplate) {
    this.completes = !hasTemplate;
    $("completion-note").hidden = hasTemplate;
    $("system").disabled = !hasTemplate;
    $("prompt").placeholder = hasTemplate ? "Your message" : "The beginning of a text";
    const texts = hasTemplate ? QUESTIONS : BEGINNINGS;
    $("suggestions").replaceChildren(...texts.map((text) => button(text, () => this.say(text))));
    this.options.show();
    this.tellKnown();
  }

  // ---- conversations ----

  open(conversation) {
    if ($("side").matches(":popover-open")) $("side").hidePopover();
    if (conversation.id === this.conversation?.id) return;
    this.running?.abort();
    this.conversation = conversation;
    conversations.markOpen(conversation);
    this.showRunning(null);
    this.show();
    this.list();
    toEnd();
    if (matchMedia("(hover: hover)").matches) $("prompt").focus(); // elsewhere it would open a keyboard
  }

  keep(conversation) {
    if (conversation.removed) return;
    $("storage-note").hidden = conversations.write(conversation);
    conversations.markOpen(this.conversation);
  }

  remove(conversation) {
    conversations.remove(conversation.id);
    if (conversation.id !== this.conversation.id) this.list();
    else {
      this.conversation.removed = true;
      this.open(conversations.create());
    }
  }

  /** Another tab has written or removed a conversation, or all if `id` is null. */
  changedElsewhere(id) {
    this.list();
    const { conversation } = this;
    if (this.running || !conversation.changed || (id ?? conversation.id) !== conversation.id) return;
    this.conversation = conversations.read(conversation.id) ?? conversations.create();
    this.show();
  }

  list() {
    const all = conversations.all();
    $("conversations").replaceChildren(...all.map((conversation) => {
      const { id } = conversation;
      // What is kept may have changed since the list was made.
      const reopen = () => this.open(conversations.read(id) ?? conversations.create());
      const open = button(conversations.title(conversation), reopen, "open");
      if (id === this.conversation.id) open.setAttribute("aria-current", "true");
      return el("li", {}, open, this.remover(conversation));
    }));
  }

  /** A button that removes a conversation when it is pressed twice. */
  remover(conversation) {
    const label = `Delete “${conversations.title(conversation)}”`;
    const node = button("×", () => {
      if (node.classList.contains("bad")) this.remove(conversation);
      node.classList.add("bad");
      node.textContent = "Delete?";
    }, "remove");
    node.title = label;
    node.setAttribute("aria-label", label);
    node.addEventListener("blur", () => {
      node.classList.remove("bad");
      node.textContent = "×";
    });
    return node;
  }

  // ---- asking ----

  send() {
    const text = $("prompt").value;
    if (!text.trim() || this.running) return;
    $("prompt").value = "";
    fit($("prompt"));
    this.say(text);
  }

  say(text) {
    if (this.running) return;
    this.conversation.messages.push({ role: "user", content: this.completes ? text : text.trim() });
    this.answer({ role: "assistant", content: "", reasoning: "" });
  }

  /** Say `text` in place of a message of the user, and of everything behind it. */
  sayInstead(message, text) {
    const { messages } = this.conversation;
    messages.splice(messages.indexOf(message));
    this.say(text);
  }

  again() {
    this.conversation.messages.pop();
    this.answer({ role: "assistant", content: "", reasoning: "" });
  }

  /** Let the model write `message`, a new one or the last. */
  async answer(message) {
    const { conversation } = this;
    const running = new AbortController();
    const said = conversation.messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
    if (conversation.messages.at(-1) !== message) conversation.messages.push(message);
    Object.assign(message, { writing: true, stats: "", waited: 0, stopped: false, cut: false, error: null });
    this.showRunning(running);
    this.show();
    toEnd();
    const item = this.items.at(-1);
    const changed = () => {
      if (running !== this.running) return;
      this.onState(message.stats ? "writing" : "waiting for the first token");
      item.refresh();
    };
    changed();
    this.keep(conversation);
    this.list();
    const keeping = setInterval(() => this.keep(conversation), KEEP_SECONDS * 1000);
    try {
      await Promise.race([this.known, sleep(3, running.signal)]);
      await writeAnswer(...this.request(said), message, running.signal, changed);
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else message.error = error instanceof Failure ? error.message : `The page failed: ${error.message}.`;
    }
    clearInterval(keeping);
    message.writing = false;
    this.keep(conversation);
    if (running !== this.running) return; // another conversation is open
    const atEnd = isAtEnd();
    this.showRunning(null);
    item.finish();
    this.offerActions();
    if (atEnd) toEnd();
    this.list();
    $("announcer").textContent = message.error ?? message.content;
  }
  /** The path and the body of a request for what comes after the messages `said`. */
  request(said) {
    const body = this.options.fields();
    if (this.options.model) body.model = this.options.model;
    if (this.completes) return ["/v1/completions", { ...body, prompt: said.map(({ content }) => content).join("") }];
    const messages = [];
    for (const message of said) {
      // Many templates want roles in turns; they are not where an answer failed.
      if (messages.at(-1)?.role === message.role) messages.at(-1).content += `\n\n${message.content}`;
      else messages.push({ ...message });
    }
    const goesOn = messages.at(-1).role === "assistant";
    if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    if (this.options.system) messages.unshift({ role: "system", content: this.options.system });
    return ["/v1/chat/completions", { ...body, messages }];
  }

  // ---- showing ----

  show() {
    const { messages } = this.conversation;
    this.items = messages.map((message) => new MessageItem(message));
    $("messages").replaceChildren(...this.items.map((item) => item.node));
    $("welcome").hidden = messages.length > 0;
    document.title = messages.length ? `${conversations.title(this.conversation)} – fastdecode` : "fastdecode";
    this.offerActions();
  }

  showRunning(running) {
    this.running = running;
    $("send").hidden = Boolean(running);
    $("stop").hidden = !running;
    $("messages").setAttribute("aria-busy", Boolean(running));
    if (!running) this.onState(null);
  }

  /** Show under each message what can be done with it now. */
  offerActions() {
    for (const item of this.items) item.offer(this.running ? {} : this.actions(item));
  }

  actions({ message }) {
    if (message.role === "user") return { Edit: (item) => item.edit((text) => this.sayInstead(message, text)) };
    if (message !== this.conversation.messages.at(-1)) return {};
    const complete = !message.stopped && !message.cut && !message.error;
    const goOn = { Continue: () => this.answer(message) };
    if (complete) return this.options.greedy ? {} : { "Write another": () => this.again() };
    return { ...(message.content ? goOn : {}), "Try again": () => this.again() };
  }
}
