// Small helpers that make elements, and figures that people read.

export const $ = (id) => document.getElementById(id);

/** An element with properties (or, with a dash or for SVG, attributes) and children. */
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

/** Copy a text, and say on the button that it was. */
export async function copyText(self, text) {
  const label = self.textContent;
  self.textContent = (await toClipboard(text)) ? "Copied" : "Not allowed";
  setTimeout(() => { self.textContent = label; }, 1500);
}

async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  // Over http from another host a browser has no navigator.clipboard, and copies only what is selected.
  const area = el("textarea", { className: "visually-hidden", value: text });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

/** A quiet button that calls `onclick`, with itself as the argument. */
export function button(label, onclick, className = "quiet") {
  const node = el("button", { type: "button", className }, label);
  node.addEventListener("click", () => onclick(node));
  return node;
}

/** Call `act` when Enter is pressed in a text area; with Shift it is a new line, in an input method it ends a word. */
export function onEnter(area, act) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    act();
  });
}

/** Make a text area as high as its text, up to a limit. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 220)}px`;
}

export function isAtEnd() {
  const page = document.scrollingElement;
  return page.scrollHeight - page.scrollTop - page.clientHeight < 80;
}

export function toEnd() {
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function number(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

export function seconds(value) {
  if (value < 1e-3) return `${trim(value * 1e6)} µs`;
  return value < 1 ? `${trim(value * 1e3)} ms` : `${trim(value)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (value >= 1024 && i < units.length - 1) {
    value /= 1024;
    i += 1;
  }
  return `${trim(value)} ${units[i]}`;
}

function trim(value) {
  return String(Number(value.toPrecision(value >= 1000 ? 4 : 3)));
}

/** "1 sequence", "2 sequences". */
export function count(n, one, many = `${one}s`) {
  return `${number(n)} ${n === 1 ? one : many}`;
}
