// The frame of the page: tabs, theme, the state of the server, the API key.

import { Failure, requestJson, sleep, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { $, number } from "./dom.js";
import { browser } from "./store.js";
import { explainTerms } from "./tips.js";

const THEME = "fastdecode.theme";
const POLL_SECONDS = 1;
const POLL_SECONDS_BESIDE = 5; // while nothing shows what changes

const cluster = new Cluster();
const chat = new Chat();
explainTerms();

// ---- tabs ----

const tabs = [$("tab-chat"), $("tab-cluster")];

const scrolled = new Map(); // tab -> how far its view was scrolled

function show(chosen, focus = false) {
  scrolled.set(tabs.find((tab) => tab.tabIndex === 0), document.scrollingElement.scrollTop);
  for (const tab of tabs) {
    const selected = tab === chosen;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !selected;
  }
  document.scrollingElement.scrollTop = scrolled.get(chosen) ?? 0;
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

if (browser.read(THEME)) document.documentElement.dataset.theme = browser.read(THEME);
$("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  browser.write(THEME, theme);
});

// ---- the server's state ----

let wake = () => {};
let report = null; // the last one
let doing = null; // what the chat does

function showState() {
  if (report.status !== "ok") return showStatus("bad", `${report.model} · ${report.status}`);
  const { model, running, waiting } = report;
  const requests = running + waiting ? `requests: ${number(running)} running, ${number(waiting)} waiting` : "idle";
  return showStatus("ok", `${model} · ${doing ?? requests}`);
}

function showStatus(level, text) {
  $("status").dataset.level = level;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

chat.onState = (state) => {
  if (state === doing) return;
  doing = state;
  if (report) showState();
  wake();
};

async function askForKey() {
  const dialog = $("key-dialog");
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  useKey($("key").value.trim());
}

async function poll() {
  for (;;) {
    try {
      const known = report?.model;
      report = await requestJson("/cluster");
      showState();
      if (report.model !== known) await meet(report);
      cluster.update(report);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      report = null;
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

/** The server has another model than before, or is seen for the first time. */
async function meet({ model, chat: hasTemplate }) {
  for (const place of document.querySelectorAll("[data-field=model]")) place.textContent = model;
  chat.adapt(hasTemplate);
  chat.options.offer(await requestJson("/v1/models"));
}

/** Resolves when it is time to ask again: soon while an answer is written or the cluster is shown, never while the page
 *  is hidden. */
async function next() {
  const stop = new AbortController();
  wake = () => stop.abort();
  await sleep($("view-cluster").hidden && !doing ? POLL_SECONDS_BESIDE : POLL_SECONDS, stop.signal).catch(() => {});
  while (document.hidden) {
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}

show(location.hash === "#cluster" ? tabs[1] : tabs[0]);
poll();
