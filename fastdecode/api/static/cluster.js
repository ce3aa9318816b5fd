// The view of the cluster: rates from the differences of two reports, nodes, links, timeline and histograms.

import { histogram, sparkline, timeline } from "./charts.js";
import { $, bytes, count, el, number, seconds } from "./dom.js";

const KEPT = 90; // reports whose rates the lines show
const SPAN = 3; // seconds over which a rate is taken

export class Cluster {
  constructor() {
    this.reports = [];
    this.lines = { output: [], prompt: [], running: [], kv: [] };
    this.frozen = false;
    $("freeze").addEventListener("click", () => {
      this.frozen = !this.frozen;
      $("freeze").setAttribute("aria-pressed", this.frozen);
      $("freeze").textContent = this.frozen ? "Go on" : "Freeze";
    });
  }

  /** The server does not answer: grey out what is shown. */
  lost() {
    $("view-cluster").classList.add("stale");
  }

  update(report) {
    $("view-cluster").classList.remove("stale");
    const before = this.reports.at(-1);
    if (before && report.totals.steps < before.totals.steps) this.reports = []; // the server was started anew
    if (before?.seconds === report.seconds) return;
    this.reports.push(report);
    this.reports = this.reports.slice(-KEPT);
    const rates = this.rates(report);
    this.remember(report, rates);
    if ($("view-cluster").hidden) return;
    $("tiles").replaceChildren(...this.tiles(report, rates));
    const rNodes = report.nodes.map((node, i) => rNode(node, rates.nodes[i]));
    $("nodes").replaceChildren(sNode(report, rates), el("div", { className: "r-nodes" }, ...rNodes));
    if (!this.frozen) showTimeline(report.timeline);
    showHistogram("ttft", report.histograms.first_token, "Time to first token");
    showHistogram("tbt", report.histograms.inter_token, "Time between tokens");
  }

  /** What was counted in a second, over the last seconds. */
  rates(report) {
    const earlier = this.reports.slice(0, -1);
    const since = earlier.find((old) => report.seconds - old.seconds <= SPAN) ?? earlier.at(-1) ?? null;
    const time = since ? report.seconds - since.seconds : 1;
    const rate = (name) => (since ? (report.totals[name] - since.totals[name]) / time : 0);
    const nodes = report.nodes.map((node) => {
      const old = since?.nodes.find((other) => other.url === node.url);
      const delta = (name) => (old ? Math.max(0, node[name] - old[name]) : 0);
      const busy = delta("attention_seconds");
      const bandwidth = busy > 1e-4 ? delta("kv_bytes_read") / busy : null;
      return { busy: Math.min(1, busy / time), bandwidth, rows: delta("rows") / time };
    });
    return {
      output: rate("generated_tokens"),
      prompt: rate("prompt_tokens"),
      steps: rate("steps"),
      computing: Math.min(1, rate("s_seconds")),
      waiting: Math.min(1, rate("r_wait_seconds")),
      nodes,
    };
  }

  remember(report, rates) {
    const values = { output: rates.output, prompt: rates.prompt, running: report.running, kv: report.kv_cache_usage };
    for (const [name, value] of Object.entries(values)) this.lines[name] = [...this.lines[name], value].slice(-KEPT);
  }

  tiles(report, rates) {
    const { totals } = report;
    const hits = Math.round((100 * totals.prefix_hits) / totals.prefix_queries);
    const cached = totals.prefix_queries ? `${hits} % of prompts from the prefix cache` : "";
    const written = `${number(totals.generated_tokens)} since the start`;
    const others = `${report.waiting} waiting, ${number(totals.rejected)} refused`;
    const used = Math.round(100 * report.kv_cache_usage);
    const cut = report.cut_sequences ? `, ${number(report.cut_sequences)} cut between GPU and R-node` : "";
    return [
      tile("Output", number(rates.output), "tokens/s", written, this.lines.output),
      tile("Prompts", number(rates.prompt), "tokens/s", cached, this.lines.prompt),
      tile("Requests", report.running, "running", others, this.lines.running),
      tile("KV-cache", used, "% in use", count(totals.preemptions, "preemption") + cut, this.lines.kv),
    ];
  }
}

function tile(name, value, unit, note, values) {
  return el(
    "div",
    { className: "tile" },
    el("h3", {}, name),
    el("p", { className: "value" }, value, " ", el("span", {}, unit)),
    sparkline(values),
    el("p", { className: "faint" }, note),
  );
}

/** A bar from 0 to 1, with its figure in words. */
function meter(name, share, text, kind = "") {
  const percent = Math.round(100 * Math.min(1, Math.max(0, share)));
  const fill = el("span", { className: `fill ${kind}` });
  fill.style.width = `${percent}%`;
  const range = { "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent, "aria-valuetext": text };
  const bar = el("span", { className: "meter", role: "meter", "aria-label": name, ...range }, fill);
  return el("div", { className: "measure" }, el("span", {}, name), el("span", { className: "faint" }, text), bar);
}

function sNode(report, rates) {
  const facts = `${report.model}, context ${number(report.max_model_len)} · fastdecode ${report.version}`;
  const steps = rates.steps ? `${number(rates.steps)} steps/s` : "no step is running";
  return el(
    "article",
    { className: "node s-node" },
    el("h3", {}, "S-node"),
    el("p", { className: "faint" }, facts),
    meter("S-Part computes", rates.computing, `${Math.round(100 * rates.computing)} % of the time`, "s"),
    meter("waits for R-nodes", rates.waiting, `${Math.round(100 * rates.waiting)} % of the time`, "wait"),
    el("p", { className: "faint" }, steps),
    ...ways(report.totals),
  );
}

/** How steps of sequences on the S-Part's GPU went, and their predicted time beside the measured one. */
function ways(totals) {
  const { steps_near: alone, steps_together: together, steps_apart: apart } = totals;
  const all = alone + together + apart;
  if (!all) return [];
  const share = (n) => `${Math.round((100 * n) / all)} %`;
  const made = `${share(alone)} alone (A), ${share(together)} with all others (B), ${share(apart)} beside others (C)`;
  const times = `${seconds(totals.predicted_seconds)} predicted, ${seconds(totals.measured_seconds)} measured`;
  return [el("p", { className: "faint ways" }, `Steps of the GPU's sequences: ${made}; ${times}`)];
}

function rNode(node, rate) {
  const [transport] = node.url.split(":", 1);
  const answers = node.alive && node.answer_seconds ? `answers in ${seconds(node.answer_seconds)}` : "";
  const link = el(
    "div",
    { className: `link${node.alive ? "" : " down"}${rate.rows ? " active" : ""}` },
    el("span", { className: "wire", "aria-hidden": "true" }),
    el("strong", {}, transport),
    el("span", { className: "faint" }, node.alive ? `${number(rate.rows)} rows/s` : "lost"),
    el("span", { className: "faint" }, answers),
  );
  const used = node.pages_used * node.page_bytes;
  const most = node.pages_max * node.page_bytes;
  const body = el(
    "article",
    { className: `node r-node${node.alive ? "" : " down"}` },
    el("h3", {}, node.node || node.url),
    el("p", { className: "faint" }, `${node.url} · ${node.isa}, ${count(node.threads, "thread")}`),
  );
  if (!node.alive) {
    const lost = "The link is lost. The S-node keeps trying to open it again.";
    body.append(el("p", { className: "notice bad" }, lost));
  } else {
    const kept = `${bytes(used)} of ${bytes(most)}, ${count(node.sequences, "sequence")}`;
    body.append(
      meter("KV-cache", most ? used / most : 0, kept),
      meter("R-Part", rate.busy, `${Math.round(100 * rate.busy)} % of the time`, "r"),
      bandwidth(node, rate.bandwidth),
    );
  }
  return el("div", { className: "linked" }, link, body);
}

function bandwidth(node, measured) {
  const roof = node.roofline ? `${number(node.roofline / 1e9)} GB/s` : null;
  const idle = roof ? `idle; the memory gives ${roof}` : "idle";
  const text = measured === null ? idle : `${number(measured / 1e9)} ${roof ? `of ${roof}` : "GB/s"}`;
  const share = measured !== null && node.roofline ? measured / node.roofline : 0;
  const bar = meter("bandwidth", share, text, "r");
  bar.title =
    "KV-cache read in the time that the R-engine worked, against what its threads can read from memory, measured when " +
    "the R-node started";
  return bar;
}

function showTimeline(parts) {
  const drawn = timeline(parts, $("timeline").clientWidth);
  if (!drawn) {
    $("timeline").replaceChildren(el("p", { className: "empty" }, "No step has run yet."));
    $("timeline-text").textContent = "";
    return;
  }
  $("timeline").replaceChildren(drawn.chart);
  const { computed, length } = drawn;
  const share = Math.round((100 * computed) / length);
  $("timeline-text").textContent =
    `The last ${seconds(length / 1e6)} of work: the S-Part computes ${share} % of it. ` +
    "A is the first mini-batch, B the second.";
}

function showHistogram(id, data, name) {
  const chart = histogram(data, name, $(id).clientWidth);
  $(id).replaceChildren(chart ?? el("p", { className: "empty" }, "Nothing counted yet."));
}
