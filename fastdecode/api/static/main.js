// The frame of the page: tabs, theme, the state of the server, the API key.

import { Failure, requestJson, sleep, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { $, count } from "./dom.js";

const THEME = "fastdecode.theme";
const POLL_SECONDS = 1;
const POLL_SECONDS_BESIDE = 5; // while the cluster is not shown

const cluster = new Cluster();
let tellModel;
const chat = new Chat(new Promise((resolve) => { tellModel = resolve; }));

// ---- tabs ----

const tabs = [$("tab-chat"), $("tab-cluster")];

function show(chosen, focus = false) {
  for (const tab of tabs) {
    const selected = tab === chosen;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !selected;
  }
  if (focus) chosen.focus();
  history.replaceState(null, "", chosen === tabs[1] ? "#cluster" : "#chat");
  wake();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") show(tabs[1 - tabs.indexOf(tab)], true);
  });
}

// ---- theme ----

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

if (localStorage.getItem(THEME)) document.documentElement.dataset.theme = localStorage.getItem(THEME);
$("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
});

// ---- the server's state ----

let wake = () => {};

function showStatus(level, text) {
  $("status").dataset.level = level;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

async function askForKey() {
  const dialog = $("key-dialog");
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  useKey($("key").value.trim());
}

async function poll() {
  for (;;) {
    try {
      const report = await requestJson("/cluster");
      const busy = report.running + report.waiting;
      const ok = report.status === "ok";
      showStatus(ok ? "ok" : "bad", `${report.model} · ${ok ? (busy ? count(busy, "request") : "idle") : report.status}`);
      for (const place of document.querySelectorAll("[data-field=model]")) place.textContent = report.model;
      tellModel(report);
      cluster.update(report);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      showStatus("bad", error.message);
      cluster.lost();
      if (error.status === 401) {
        await askForKey();
        continue;
      }
    }
    await next();
  }
}

/** Resolves when it is time to ask again: soon while the cluster is shown, never while the page is hidden. */
async function next() {
  const stop = new AbortController();
  wake = () => stop.abort();
  await sleep($("view-cluster").hidden ? POLL_SECONDS_BESIDE : POLL_SECONDS, stop.signal).catch(() => {});
  while (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

chat.onEnd = () => wake();
show(location.hash === "#cluster" ? tabs[1] : tabs[0]);
poll();
