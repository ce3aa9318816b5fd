// One message of a conversation, as an item of the list.

import { button, copyText, el, fit, isAtEnd, onEnter, toEnd } from "./dom.js";
import { GrowingText } from "./markdown.js";

const SHARE = 0.25; // of the time that the page may spend on showing a text that grows

export class MessageItem {
  constructor(message) {
    this.message = message;
    this.busy = false; // the message was shown a moment ago, or is going to be
    this.stale = false; // the message has changed since it was shown
    this.text = el("div", { className: "text" });
    this.notice = el("p", { className: "notice" });
    this.error = el("p", { className: "notice bad", role: "alert" });
    this.notes = el("span", { className: "faint" });
    this.copy = button("Copy", (self) => copyText(self, message.content));
    this.actions = el("span", { className: "actions" });
    this.node = el(
      "li",
      { className: `message ${message.role}` },
      el("span", { className: "visually-hidden" }, message.role === "user" ? "You:" : "The model:"),
      this.text,
      this.notice,
      this.error,
      el("div", { className: "foot" }, this.notes, this.copy, this.actions),
    );
    if (message.role === "user") this.text.append(el("p", {}, message.content));
    else this.answer = new GrowingText(this.text);
    this.show();
  }

  show() {
    const { message } = this;
    this.answer?.show(message.content);
    if (message.reasoning) this.showReasoning();
    fill(this.notice, message.notice);
    fill(this.error, message.error);
    fill(this.notes, notes(message));
    this.node.classList.toggle("writing", Boolean(message.writing));
    this.copy.hidden = !message.content || Boolean(message.writing);
  }

  showReasoning() {
    const { content, reasoning } = this.message;
    if (!this.reasoning) {
      const text = el("div", { className: "text" });
      this.details = el("details", { className: "reasoning" }, el("summary", {}, "Reasoning"), text);
      this.details.open = true;
      this.text.before(this.details);
      this.reasoning = new GrowingText(text);
    }
    this.reasoning.show(reasoning);
    if (content && !this.answered) this.details.open = false; // once: a reader may open it again
    this.answered = Boolean(content);
  }

  /** Show what the message has become with the next frame, or later if that takes long. */
  refresh() {
    this.stale = true;
    if (this.busy) return;
    this.busy = true;
    requestAnimationFrame(() => {
      const begun = performance.now();
      const atEnd = isAtEnd();
      this.stale = false;
      this.show();
      if (atEnd) toEnd();
      const spent = performance.now() - begun;
      setTimeout(() => {
        this.busy = false;
        if (this.stale) this.refresh();
      }, spent / SHARE - spent);
    });
  }

  /** Show a text that grows no more: a link may be defined behind its use. */
  finish() {
    this.text.replaceChildren();
    this.answer = new GrowingText(this.text);
    this.show();
  }

  /** The buttons at the foot: their labels, each with what it calls. */
  offer(actions) {
    this.actions.replaceChildren(...Object.entries(actions).map(([label, act]) => button(label, () => act(this))));
  }

  /** Let the user change the text. `send` gets the new one. */
  edit(send) {
    const area = el("textarea", { value: this.message.content, "aria-label": "Your message" });
    const submit = () => { if (area.value.trim()) send(area.value); };
    const cancel = () => {
      editor.remove();
      this.node.classList.remove("editing");
    };
    const editor = el("div", { className: "editor" }, area, button("Cancel", cancel), button("Send", submit, ""));
    area.addEventListener("input", () => fit(area));
    onEnter(area, submit);
    area.addEventListener("keydown", (event) => { if (event.key === "Escape") cancel(); });
    this.node.classList.add("editing");
    this.node.append(editor);
    fit(area);
    area.focus();
  }
}

function fill(node, text) {
  node.hidden = !text;
  node.textContent = text ?? "";
}

function notes({ stats, waited, stopped, cut }) {
  const parts = [stats || (waited && `waiting for the first token, ${waited} s`), stopped && "stopped"];
  return [...parts, cut && "cut at the longest answer"].filter((part) => part).join(" · ");
}
