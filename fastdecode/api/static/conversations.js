// The conversations that the browser keeps. Each has a key of its own, so that tabs do not overwrite each other's.

import { browser, tab } from "./store.js";

const PREFIX = "fastdecode.conversation.";
const OPEN = "fastdecode.open"; // the id of the conversation that a tab shows
const KEPT = ["role", "content", "reasoning", "stats", "stopped", "cut", "error"]; // of a message
const TITLE_LENGTH = 60;

export function create() {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`, changed: 0, messages: [] };
}

/** The conversation with this id; null if there is none. */
export function read(id) {
  const conversation = browser.read(PREFIX + id);
  return Array.isArray(conversation?.messages) ? { ...conversation, id } : null;
}

/** Whether the browser could keep the conversation. */
export function write(conversation) {
  conversation.changed = Date.now();
  const messages = conversation.messages.map((message) => ({
    ...Object.fromEntries(KEPT.map((name) => [name, message[name]])),
    stopped: message.stopped || message.writing, // for a page that is closed meanwhile
  }));
  return browser.write(PREFIX + conversation.id, { ...conversation, messages });
}

export function remove(id) {
  browser.remove(PREFIX + id);
}

/** All conversations that are kept, the last changed first. */
export function all() {
  const keys = browser.keys().filter((key) => key.startsWith(PREFIX));
  const found = keys.map((key) => read(key.slice(PREFIX.length))).filter((conversation) => conversation);
  return found.sort((a, b) => b.changed - a.changed);
}

/** The conversation that this tab showed before it was reloaded, or a new one. */
export function reopen() {
  return read(tab.read(OPEN)) ?? create();
}

export function markOpen({ id }) {
  tab.write(OPEN, id);
}

/** Call `changed` with the id of each conversation that another tab writes or removes; with null if it removes all. */
export function watch(changed) {
  addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(PREFIX)) changed(key && key.slice(PREFIX.length));
  });
}

export function title({ messages }) {
  const text = messages[0]?.content.trim().replace(/\s+/g, " ") || "New conversation";
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)} …` : text;
}
