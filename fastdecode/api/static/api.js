// Requests to the server: errors as sentences, and the events of a stream.

import { tab } from "./store.js";

/** A request that got no answer, or one that says no. `status` is 0 without an answer. */
export class Failure extends Error {
  constructor(status, message, { code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter; // seconds, if the server named them
  }
}

const KEY = "fastdecode.key";

export function useKey(key) {
  tab.write(KEY, key);
}

/** The server's answer if its status is 200. Throws Failure, or the signal's AbortError. */
export async function request(path, { body, signal } = {}) {
  const key = tab.read(KEY);
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    const method = body ? "POST" : "GET";
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The server does not answer.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/** The JSON of an answer. Throws Failure. */
export async function requestJson(path) {
  const response = await request(path);
  return unbroken(response.json());
}

async function failure(response) {
  const { error } = await response.json().catch(() => ({}));
  const seconds = Number.parseInt(response.headers.get("Retry-After"), 10);
  const message = error?.message ?? `The server answered with status ${response.status}.`;
  return new Failure(response.status, sentence(message), {
    code: error?.code ?? null,
    retryAfter: Number.isNaN(seconds) ? null : seconds,
  });
}

/** With a capital letter, unless it begins with the name of a field, and a full stop. */
function sentence(text) {
  const whole = /^[a-z]+ /.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

/** The objects of a stream of server-sent events. Throws Failure if it breaks off or ends with an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await unbroken(reader.read());
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue; // blank lines, and comments that keep the connection open
        const data = line.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Failure(500, sentence(event.error.message), { code: event.error.code });
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
  throw broken();
}

/** What a promise of a part of an answer gives. Throws Failure, or the signal's AbortError. */
async function unbroken(part) {
  try {
    return await part;
  } catch (error) {
    throw error.name === "AbortError" ? error : broken();
  }
}

function broken() {
  return new Failure(0, "The connection broke before the answer was complete.");
}

/** Resolves after a number of seconds. Rejects with an AbortError if the signal is aborted before. */
export function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    }, { once: true });
  });
}
