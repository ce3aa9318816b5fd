// A model's Markdown as elements. markdown-it reads it into tokens, and each token becomes an element that this file
// names: no string of HTML reaches the page.

import { button, copyText, el } from "./dom.js";

const markdown = globalThis.markdownit({ html: false, linkify: true });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "main.py" is a file, not a host in Paraguay
markdown.validateLink = (url) => /^(?:https?:\/\/|mailto:)/i.test(url);

const TAGS = new Set(
  ["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "em", "strong", "s", "a"].concat(
    ["table", "thead", "tbody", "tr", "th", "td"],
  ),
);

/** What a token without tokens inside becomes. */
const LEAVES = {
  text: (token) => token.content,
  softbreak: () => el("br"), // a model means the end of a line where it writes one
  hardbreak: () => el("br"),
  code_inline: (token) => el("code", {}, token.content),
  code_block: (token) => codeBlock("", token.content),
  fence: (token) => codeBlock(token.info.trim().split(/\s/)[0], token.content),
  image: (token) => link(token.attrGet("src"), `Picture: ${token.content || token.attrGet("src")}`), // never loaded
};

/** A text that may grow, as the children of `node`. Blocks that later text cannot change stay as they are. */
export class GrowingText {
  constructor(node) {
    this.node = node;
    this.definitions = {}; // of links: the environment of the settled blocks
    this.settled = 0; // characters whose blocks stay
    this.blocks = 0; // settled blocks, each a child of `node`
  }

  show(text) {
    const rest = text.replace(/\r\n?/g, "\n").slice(this.settled);
    const tokens = markdown.parse(rest, { references: { ...this.definitions.references } });
    while (this.node.childNodes.length > this.blocks) this.node.lastChild.remove();
    append(tokens, this.node);
    // More text can change the last block, and the one that an unfinished line seems to end.
    const lines = lineStarts(rest);
    const blocks = tokens.filter((token) => token.level === 0 && token.nesting >= 0).map((token) => token.map[0]);
    const last = blocks.findLastIndex((line) => line < lines.length - 1);
    if (last > 0) {
      markdown.parse(rest.slice(0, lines[blocks[last]]), this.definitions);
      this.settled += lines[blocks[last]];
      this.blocks += last;
    }
  }
}

function lineStarts(text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  return starts;
}

function append(tokens, parent) {
  const open = [parent];
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraph of an item in a list without blank lines
    if (token.type === "inline") append(token.children, open.at(-1));
    else if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) {
      const node = element(token);
      open.at(-1).append(node.tagName === "TABLE" ? el("div", { className: "table" }, node) : node);
      open.push(node);
    } else open.at(-1).append(LEAVES[token.type]?.(token) ?? element(token));
  }
}

function element(token) {
  if (token.tag === "a") return link(token.attrGet("href"));
  const node = el(TAGS.has(token.tag) ? token.tag : "span");
  const start = token.attrGet("start");
  const align = /text-align:(left|center|right)/.exec(token.attrGet("style"));
  if (start !== null) node.start = start;
  if (align) node.style.textAlign = align[1];
  return node;
}

function link(href, ...children) {
  return el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

function codeBlock(language, code) {
  const copy = button("Copy", (self) => copyText(self, code));
  const caption = el("figcaption", {}, language || "code", copy);
  return el("figure", { className: "code" }, caption, el("pre", {}, el("code", {}, code)));
}
