// The options of requests: the browser keeps them, and all conversations share them.

import { $, el, number } from "./dom.js";
import { browser } from "./store.js";

const STORE = "fastdecode.options";
/** The fields of a request that numbers set, each with the element that has its value. */
const NUMBERS = {
  temperature: "temperature",
  top_p: "top-p",
  repetition_penalty: "repetition-penalty",
  seed: "seed",
  max_tokens: "max-tokens",
};
const TEXTS = ["system", ...Object.values(NUMBERS)];

export class Options {
  constructor() {
    this.load();
    const form = $("options");
    form.addEventListener("input", () => this.save());
    form.addEventListener("reset", () => setTimeout(() => this.save()));
    form.addEventListener("submit", (event) => event.preventDefault());
    this.show();
  }

  get system() {
    return $("system").value.trim();
  }

  /** The model, or the adapter of it, that answers; null: the server's own. */
  get model() {
    return $("model").value || null;
  }

  /** Whether the same question gets the same answer. */
  get greedy() {
    return this.fields().temperature === 0;
  }

  /** The fields that have a value. */
  fields() {
    const given = Object.entries(NUMBERS).filter(([, id]) => $(id).value !== "");
    return Object.fromEntries(given.map(([name, id]) => [name, Number($(id).value)]));
  }

  /** Offer the model and its adapters, as /v1/models lists them. */
  offer({ data }) {
    const names = [data[0], ...data.filter((model) => model.parent)].map((model) => model.id);
    $("model").replaceChildren(...names.map((name) => el("option", {}, name)));
    $("model-label").hidden = names.length < 2;
  }

  load() {
    const kept = browser.read(STORE) ?? {};
    for (const id of TEXTS) if (typeof kept[id] === "string") $(id).value = kept[id];
  }

  save() {
    browser.write(STORE, Object.fromEntries(TEXTS.map((id) => [id, $(id).value])));
    this.show();
  }

  /** Say beside the composer what the next request asks for. */
  show() {
    const { temperature, max_tokens: most } = this.fields();
    const parts = [
      temperature === undefined ? "the model's temperature" : `temperature ${temperature}`,
      most === undefined ? "as long as the context" : `at most ${number(most)} tokens`,
      this.system && !$("system").disabled && "with the system prompt",
    ];
    $("asked").textContent = parts.filter((part) => part).join(" · ");
  }
}
