// A model's text as elements: paragraphs, fenced code, inline code, bold. No HTML of the model reaches the page.

import { button, el } from "./dom.js";

const FENCE = /^ {0,3}```+ *([\w+#.-]*)[^\n]*\n([\s\S]*?)(?:^ {0,3}```+ *$|(?![\s\S]))/gm;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;

/** The elements of a text. A code block that is not closed yet ends with the text. */
export function render(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(FENCE)) {
    nodes.push(...paragraphs(text.slice(end, match.index)));
    nodes.push(codeBlock(match[1], match[2]));
    end = match.index + match[0].length;
  }
  nodes.push(...paragraphs(text.slice(end)));
  return nodes;
}

function paragraphs(text) {
  const parts = text.replace(/^\n+|\n+$/g, "").split(/\n{2,}/);
  return parts.filter((part) => part).map((part) => el("p", {}, ...inline(part)));
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index));
    nodes.push(match[1] === undefined ? el("strong", {}, match[2]) : el("code", {}, match[1]));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function codeBlock(language, code) {
  const copy = button("Copy", (self) => copyText(self, code), "quiet copy");
  return el("figure", { className: "code" }, el("figcaption", {}, language || "code", copy), el("pre", {}, el("code", {}, code)));
}

/** Copy a text, and say on the button that it was. */
export async function copyText(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}
