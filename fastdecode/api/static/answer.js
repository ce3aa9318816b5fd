// An answer as it is written: the request, tried again while the server cannot take it, and the events of its stream.

import { events, request, sleep } from "./api.js";
import { count, number, seconds } from "./dom.js";

const TRIES = 5;
const BUSY = [429, 503];

/**
 * Let the model write on in `message`, and call `changed` whenever the message has changed. Throws Failure, or the
 * signal's AbortError.
 */
export async function writeAnswer(path, body, message, signal, changed) {
  const begun = performance.now();
  let first = null;
  let usage = null;
  const waiting = setInterval(() => {
    message.waited = Math.round((performance.now() - begun) / 1000);
    changed();
  }, 1000);
  try {
    for await (const event of events(await ask(path, body, message, signal, changed))) {
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      if (choice) {
        first ??= performance.now();
        clearInterval(waiting);
        message.content += choice.text ?? choice.delta?.content ?? "";
        message.reasoning += choice.delta?.reasoning_content ?? "";
        message.cut = choice.finish_reason === "length" || message.cut;
      }
      message.stats = stats(begun, first, usage);
      changed();
    }
  } finally {
    clearInterval(waiting);
  }
}

/** The stream of an answer. Waits and asks again while the server cannot take the request. */
async function ask(path, body, message, signal, changed) {
  for (let tries = 1; ; tries += 1) {
    try {
      return await request(path, { body: { ...body, ...STREAMED }, signal });
    } catch (error) {
      if (!BUSY.includes(error.status) || tries === TRIES) throw error;
      for (let left = error.retryAfter ?? 2 ** tries; left > 0; left -= 1) {
        message.notice = `${error.message} Trying again in ${left} s.`;
        changed();
        await sleep(1, signal);
      }
    } finally {
      message.notice = null;
    }
  }
}

const STREAMED = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };

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
