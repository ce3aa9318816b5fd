// What a term means: shown while the pointer or the focus is on it, hidden by Escape (WCAG 2.2, 1.4.13).

import { $ } from "./dom.js";

const MARGIN = 8; // pixels between the tip, its term and the edges of the window

function show(term) {
  const tip = $("tip");
  tip.textContent = term.dataset.tip;
  tip.showPopover();
  const { left, top, bottom } = term.getBoundingClientRect();
  const room = document.documentElement.clientWidth - tip.offsetWidth - MARGIN;
  const below = bottom + MARGIN + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(MARGIN, Math.min(left, room))}px`;
  tip.style.top = `${below ? bottom + MARGIN : top - MARGIN - tip.offsetHeight}px`;
  term.setAttribute("aria-describedby", "tip");
}

function hide() {
  if ($("tip").matches(":popover-open")) $("tip").hidePopover();
}

export function explainTerms() {
  for (const term of document.querySelectorAll(".term")) {
    term.addEventListener("pointerenter", () => show(term));
    term.addEventListener("focus", () => show(term));
    term.addEventListener("click", () => show(term)); // a tap where nothing is focused by it
    term.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    term.addEventListener("blur", hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, { passive: true });
}
