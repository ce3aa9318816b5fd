// Charts as SVG: a line of the last values, a histogram, the timeline of mini-batches.

import { el, number, seconds, svg } from "./dom.js";

/** A small line of values, oldest first. */
export function sparkline(values) {
  const [width, height] = [120, 28];
  const most = Math.max(...values, 1e-9);
  const step = width / Math.max(1, values.length - 1);
  const y = (value) => height - 2 - (value / most) * (height - 4);
  const points = values.map((value, i) => `${(i * step).toFixed(1)},${y(value).toFixed(1)}`);
  const line = svg("polyline", { points: points.join(" "), class: "spark" });
  const box = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" };
  return svg("svg", { ...box, class: "sparkline", "aria-hidden": "true" }, line);
}

const [FEWEST_BARS, NARROWEST_BAR] = [9, 22];
const DIGIT = 7.5; // the width of a label's character

/**
 * A histogram of `counts` with the upper `bounds`, in seconds, of all but the last, `width` pixels wide; null without a
 * count.
 */
export function histogram({ bounds, counts }, name, width) {
  const total = counts.reduce((a, b) => a + b, 0);
  if (!total) return null;
  // All buckets from the first to the last that counted something, and enough beside them to keep bars slim.
  let [first, last] = [counts.findIndex((n) => n > 0), counts.findLastIndex((n) => n > 0)];
  const wanted = Math.min(FEWEST_BARS, Math.floor(width / NARROWEST_BAR));
  for (let spare = Math.max(2, wanted - (last - first + 1)); spare > 0; spare -= 1) {
    if ((spare % 2 && first > 0) || last === counts.length - 1) first = Math.max(0, first - 1);
    else last += 1;
  }
  const shown = counts.slice(first, last + 1);
  const slot = width / shown.length;
  const [height, base] = [170, 146];
  const most = Math.max(...shown);
  const chart = svg("svg", { width, height, class: "histogram", role: "img" });
  const says = `p50 ${quantile(0.5)}, p90 ${quantile(0.9)}, p99 ${quantile(0.99)}, ${number(total)} counted`;
  chart.append(svg("title", {}, `${name}: ${says}`));
  const edges = shown.slice(1).map((_, i) => seconds(bounds[first + i]));
  const every = Math.ceil((DIGIT * Math.max(...edges.map((edge) => edge.length)) + 4) / slot); // edge has a label
  shown.forEach((n, i) => {
    const tall = n ? Math.max(2, (n / most) * (base - 22)) : 0;
    const bar = svg("rect", { x: i * slot + 2, y: base - tall, width: slot - 4, height: tall, rx: 3, class: "bar" });
    bar.append(svg("title", {}, `${range(first + i)}: ${number(n)}`));
    chart.append(bar);
    if (n && DIGIT * number(n).length < slot) {
      chart.append(svg("text", { x: (i + 0.5) * slot, y: base - tall - 5, class: "label" }, number(n)));
    }
  });
  edges.forEach((edge, i) => {
    const apart = every === 1 || i % every === 1; // and not at the chart's border
    if (apart) chart.append(svg("text", { x: (i + 1) * slot, y: height - 6, class: "tick" }, edge));
  });
  chart.append(svg("line", { x1: 0, x2: width, y1: base + 0.5, y2: base + 0.5, class: "axis" }));
  return el("figure", {}, chart, el("figcaption", { className: "faint" }, says));

  function range(i) {
    if (i >= bounds.length) return `over ${seconds(bounds.at(-1))}`;
    return i ? `${seconds(bounds[i - 1])} to ${seconds(bounds[i])}` : `up to ${seconds(bounds[0])}`;
  }

  /** Interpolated within the bucket, as Prometheus does. */
  function quantile(q) {
    let below = 0;
    for (let i = 0; i < counts.length; i += 1) {
      if (below + counts[i] >= q * total) {
        if (i >= bounds.length) return `over ${seconds(bounds.at(-1))}`;
        const from = i ? bounds[i - 1] : 0;
        return seconds(from + ((q * total - below) / counts[i]) * (bounds[i] - from));
      }
      below += counts[i];
    }
    return "";
  }
}

const [FEWEST_INTERVALS, MOST_INTERVALS, PIXELS] = [24, 72, 14]; // shown, and the width of one
const GAP = 0.02; // seconds without a step that the timeline leaves out

/**
 * The last intervals of steps: two lanes for each mini-batch, S-Part above R-Part. `intervals` are [slot, number,
 * asked, replied, ended] in microseconds (engine/stats.py: StepInterval). Returns the chart, `width` pixels wide, the
 * time that it shows, and for how much of it the S-Part computed; null without an interval.
 */
export function timeline(intervals, width) {
  const fitting = Math.max(FEWEST_INTERVALS, Math.min(MOST_INTERVALS, Math.floor(width / PIXELS)));
  const shown = intervals.slice(-fitting).sort((a, b) => a[2] - b[2]);
  if (!shown.length) return null;
  const slots = [...new Set(shown.map(([slot]) => slot))].sort((a, b) => a - b);
  const clip = clipped(shown);
  const [left, lane, pad] = [46, 24, 8];
  const room = width - left;
  const height = slots.length * (2 * lane + pad) + 18;
  const x = (t) => left + (clip.at(t) / clip.length) * room;
  const names = { role: "img", "aria-labelledby": "timeline-title timeline-text" };
  const chart = svg("svg", { width, height, class: "timeline", ...names });
  slots.forEach((slot, i) => {
    const top = i * (2 * lane + pad);
    chart.append(svg("text", { x: 0, y: top + lane + 5, class: "name" }, String.fromCharCode(65 + slot)));
    ["S", "R"].forEach((part, k) => {
      chart.append(svg("rect", { x: left, y: top + k * lane + 2, width: room, height: lane - 4, class: "lane" }));
      chart.append(svg("text", { x: left - 10, y: top + k * lane + lane / 2 + 4, class: "lane-name" }, part));
    });
  });
  for (const { slot, lane: k, kind, from, to, text } of bars(shown)) {
    const y = slots.indexOf(slot) * (2 * lane + pad) + k * lane + 2;
    const wide = Math.max(0.8, x(to) - x(from)).toFixed(2);
    const rect = svg("rect", { x: x(from).toFixed(2), y, width: wide, height: lane - 4, class: kind });
    rect.append(svg("title", {}, `${text}, ${seconds((to - from) / 1e6)}`));
    chart.append(rect);
  }
  const ticks = room > 400 ? 4 : 2;
  for (let i = 0; i <= ticks; i += 1) {
    const place = i === ticks ? "tick end" : i ? "tick" : "tick start";
    const text = seconds(((i / ticks) * clip.length) / 1e6);
    chart.append(svg("text", { x: left + (i / ticks) * room, y: height - 2, class: place }, text));
  }
  const computed = shown.reduce((sum, [, , , replied, ended]) => sum + ended - replied, 0);
  return { chart, computed, length: clip.length };
}

/** The bars of intervals: when the S-Part computed and waited (lane 0), and when the R-nodes had the rows (lane 1). */
function bars(intervals) {
  const found = [];
  const last = new Map(); // slot -> its interval before
  for (const interval of intervals) {
    const [slot, n, asked, replied, ended] = interval;
    const before = last.get(slot);
    const computes = n ? `S-Part between layers ${n - 1} and ${n}` : "S-Part before layer 0";
    found.push({ slot, lane: 0, kind: "s", from: replied, to: ended, text: computes });
    if (replied > asked) {
      const waits = `the S-Part waits for layer ${n - 1}`;
      found.push({ slot, lane: 0, kind: "wait", from: asked, to: replied, text: waits });
    }
    if (n && before?.[1] === n - 1) {
      found.push({ slot, lane: 1, kind: "r", from: before[4], to: replied, text: `R-Part of layer ${n - 1}` });
    }
    last.set(slot, interval);
  }
  return found;
}

/** The time that the intervals take, without the gaps between steps: `at(t)` is how much of it has passed at time t. */
function clipped(intervals) {
  const gaps = [];
  let end = intervals[0][4];
  for (const [, , asked, , ended] of intervals) {
    if (asked - end > GAP * 1e6) gaps.push([end, asked - end]);
    end = Math.max(end, ended);
  }
  const start = intervals[0][2];
  const at = (t) => t - start - gaps.reduce((sum, [from, length]) => sum + Math.min(length, Math.max(0, t - from)), 0);
  return { at, length: Math.max(1, at(end)) };
}
