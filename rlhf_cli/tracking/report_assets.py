"""Style and script of the report page: text that is put into it as it is.

Nothing is loaded from anywhere; the script only moves what the page holds already.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #16181d; --soft: #5c616b; --faint: #8b909a; --line: #e4e4df;
  --grid: #ecece8; --wash: #f3f3f0; --accent: #2a6fd6;
  --good: #0f7a4d; --good-wash: #e2f3ea; --bad: #b3261e; --bad-wash: #fbe9e7; --warn: #8a5a00; --warn-wash: #fbf0d9;
  --c1: #2a6fd6; --c2: #e0632b; --c3: #16a085; --c4: #d99a00; --c5: #6c4fd1; --c6: #d6568f; --c7: #3f8f3a; --c8: #9aa0aa;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121316; --card: #1b1d21; --ink: #eceef2; --soft: #a6acb8; --faint: #7d838f; --line: #2d3036;
    --grid: #282b31; --wash: #23262b; --accent: #6ea8ff;
    --good: #5fd39b; --good-wash: #173226; --bad: #ff8a80; --bad-wash: #3a1d1b; --warn: #f0bf58; --warn-wash: #33290f;
    --c1: #5b9bf5; --c2: #f0814d; --c3: #35c3a5; --c4: #e6b23a; --c5: #9c86f2; --c6: #ec7fae; --c7: #69bd63; --c8: #6d737e;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 64px; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-font-smoothing: antialiased; font-variant-numeric: tabular-nums;
}
main, .bar > div, footer { max-width: 1160px; margin: 0 auto; padding: 0 24px; }
a { color: inherit; text-decoration: none; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 0; font-weight: 650; overflow-wrap: anywhere; }
h2 { font-size: 21px; letter-spacing: -.015em; margin: 0; font-weight: 650; }
h3 { font-size: 15px; margin: 0; font-weight: 600; }
.overline { color: var(--accent); font-size: 12.5px; font-weight: 600; letter-spacing: .06em; text-transform: uppercase; }
.soft { color: var(--soft); } .faint { color: var(--faint); } .small { font-size: 13px; }
.mono { font-family: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }

.bar { position: sticky; top: 0; z-index: 5; background: color-mix(in srgb, var(--page) 88%, transparent);
  backdrop-filter: blur(10px); border-bottom: 1px solid var(--line); }
.bar > div { display: flex; align-items: center; gap: 24px; height: 52px; }
.bar b { font-weight: 650; letter-spacing: -.01em; white-space: nowrap; }
.bar nav { display: flex; gap: 4px; overflow-x: auto; }
.bar nav a { padding: 5px 11px; border-radius: 7px; color: var(--soft); font-size: 14px; white-space: nowrap; }
.bar nav a:hover { background: var(--wash); color: var(--ink); }

header { padding: 44px 0 8px; }
header .overline { margin-bottom: 8px; }
header p { margin: 10px 0 0; color: var(--soft); max-width: 76ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; margin: 28px 0 8px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px; min-width: 0; }
.tile .label { color: var(--soft); font-size: 13px; }
.tile .label::first-letter, .card h3::first-letter { text-transform: uppercase; }
.tile .value { font-size: 28px; line-height: 1.25; font-weight: 650; letter-spacing: -.02em; overflow-wrap: anywhere; }
.tile .note { color: var(--faint); font-size: 13px; }

section.stage { padding-top: 44px; }
.head { display: flex; align-items: center; gap: 12px; margin-bottom: 6px; }
.chip { font-size: 12px; font-weight: 600; padding: 2px 9px; border-radius: 99px; background: var(--wash); color: var(--soft);
  white-space: nowrap; display: inline-block; }
.chip.good { background: var(--good-wash); color: var(--good); }
.chip.bad { background: var(--bad-wash); color: var(--bad); }
.chip.warn { background: var(--warn-wash); color: var(--warn); }
.facts { display: flex; flex-wrap: wrap; gap: 2px 26px; margin: 0 0 18px; color: var(--soft); font-size: 14px; }
.facts b { font-weight: 500; color: var(--faint); margin-right: 6px; }
.facts span { overflow-wrap: anywhere; }

.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px 12px; min-width: 0; }
.card.wide { grid-column: 1 / -1; }
.card header, .cardhead { display: flex; align-items: baseline; gap: 12px; justify-content: space-between; padding: 0; margin-bottom: 8px; }
.cardhead .now { font-weight: 600; white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft); margin: -2px 0 8px; }
.legend i, .tip i { display: inline-block; width: 9px; height: 9px; border-radius: 2.5px; margin-right: 6px; }
.broken-note { color: var(--bad); font-size: 13px; }

svg.chart { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
svg.chart .grid { display: inline; stroke: var(--grid); stroke-width: 1; fill: none; }
svg.chart .axis { stroke: var(--line); stroke-width: 1; fill: none; }
svg.chart .tick { fill: var(--faint); font-size: 11.5px; }
svg.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg.chart .faint { opacity: .3; stroke-width: 1.25; }
svg.chart .dot { stroke: var(--card); stroke-width: 1.5; }
svg.chart .broken { stroke: var(--bad); stroke-width: 1.5; fill: none; }
svg.chart .cross { stroke: var(--faint); stroke-width: 1; pointer-events: none; }
.tip { position: fixed; z-index: 9; pointer-events: none; background: var(--card); color: var(--ink); border: 1px solid var(--line);
  border-radius: 9px; padding: 7px 11px; font-size: 13px; box-shadow: 0 6px 24px rgb(0 0 0 / .14); display: none; }
.tip div { white-space: nowrap; } .tip b { font-weight: 600; float: right; margin-left: 18px; }

details { margin-top: 16px; }
summary { cursor: pointer; color: var(--soft); font-size: 14px; padding: 6px 0; user-select: none; }
summary:hover { color: var(--ink); }
details[open] > summary { margin-bottom: 8px; }
h3.part { margin: 30px 0 12px; font-size: 17px; letter-spacing: -.01em; }

.share { display: flex; height: 14px; border-radius: 5px; overflow: hidden; gap: 2px; margin: 4px 0 12px; }
.share i { display: block; min-width: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 500; color: var(--faint); font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.num, th.num { text-align: right; padding-right: 0; padding-left: 14px; }
.scroll { overflow: auto; max-height: 420px; }
.settings { columns: 2; column-gap: 40px; }
.settings > div { break-inside: avoid; margin-bottom: 18px; }
.settings h4 { margin: 0 0 4px; font-size: 13px; color: var(--faint); font-weight: 500; }
.settings table { table-layout: fixed; font-size: 13px; }
.settings td { padding: 4px 10px 4px 0; overflow-wrap: anywhere; }

.rollouts { background: var(--card); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.rollouts .tools { display: flex; flex-wrap: wrap; gap: 10px 14px; padding: 12px 16px; border-bottom: 1px solid var(--line); align-items: center; }
.rollouts label { font-size: 13px; color: var(--soft); display: flex; align-items: center; gap: 7px; }
.rollouts select, .rollouts input { font: inherit; font-size: 13.5px; color: var(--ink); background: var(--wash); border: 1px solid var(--line);
  border-radius: 7px; padding: 4px 8px; min-width: 0; }
.rollouts input[type=search] { flex: 1 1 160px; }
.rollouts .count { margin-left: auto; }
.rollouts .panes { display: grid; grid-template-columns: 330px minmax(0, 1fr); height: 520px; }
.rollouts .list { overflow: auto; border-right: 1px solid var(--line); }
.rollouts .item { display: grid; grid-template-columns: 44px minmax(0, 1fr) auto; gap: 10px; align-items: center; width: 100%; text-align: left;
  font: inherit; font-size: 13.5px; color: inherit; background: none; border: 0; border-bottom: 1px solid var(--line); padding: 8px 14px; cursor: pointer; }
.rollouts .item:hover { background: var(--wash); }
.rollouts .item.on { background: color-mix(in srgb, var(--accent) 13%, transparent); }
.rollouts .item .text { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.rollouts .detail { overflow: auto; padding: 16px 20px; }
.rollouts .meta { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; margin-bottom: 12px; font-size: 13.5px; color: var(--soft); }
.rollouts .meta b { color: var(--ink); font-weight: 600; }
.rollouts h4 { margin: 14px 0 5px; font-size: 12.5px; color: var(--faint); font-weight: 500; }
.rollouts pre { margin: 0; padding: 11px 13px; background: var(--wash); border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.55 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.rollouts .none { padding: 28px; color: var(--faint); }
footer { padding-top: 44px; padding-bottom: 44px; color: var(--faint); font-size: 13px; }

@media (max-width: 860px) {
  .grid { grid-template-columns: minmax(0, 1fr); }
  .settings { columns: 1; }
  .rollouts .panes { grid-template-columns: minmax(0, 1fr); height: auto; }
  .rollouts .list { max-height: 240px; border-right: 0; border-bottom: 1px solid var(--line); }
  main, .bar > div, footer { padding-left: 16px; padding-right: 16px; }
}
@media print { .bar, .tools, .list { display: none !important; } .panes { display: block !important; height: auto !important; } }
"""

SCRIPT = """
"use strict";
const number = v => !Number.isFinite(v) ? String(v) : v === 0 ? "0" : Math.abs(v) < 1e-3 ? v.toExponential(2)
  : Math.abs(v) >= 1e5 ? v.toLocaleString("en", {notation: "compact", maximumFractionDigits: 1}) : String(+v.toPrecision(4));
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};

const tip = document.body.appendChild(make("div", "tip"));
for (const chart of document.querySelectorAll("svg.chart")) {
  const data = JSON.parse(chart.dataset.chart), [left, right, top, bottom] = data.box, [low, high] = data.x;
  const cross = document.createElementNS(chart.namespaceURI, "path");
  cross.setAttribute("class", "cross");
  chart.append(cross);
  const hide = () => { tip.style.display = "none"; cross.removeAttribute("d"); };
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    const at = low + ((event.clientX - box.left) * scale - left) / (right - left) * (high - low);
    let nearest = null;
    for (const line of data.s) for (const [x] of line.p)
      if (nearest === null || Math.abs(x - at) < Math.abs(nearest - at)) nearest = x;
    if (nearest === null) return hide();
    const pixel = left + (nearest - low) / (high - low) * (right - left);
    cross.setAttribute("d", `M${pixel} ${top}V${bottom}`);
    tip.replaceChildren(make("div", "faint", data.labels.length ? data.labels[Math.floor(nearest)] : "step " + Math.round(nearest)));
    for (const line of data.s) {
      const found = line.p.find(([x]) => x === nearest);
      if (!found || (data.labels.length && !found[1])) continue;
      const row = make("div"), mark = make("i");
      mark.style.background = `var(${line.v || "--c" + line.c})`;
      row.append(mark, line.n, make("b", "", number(found[1]) + (data.labels.length ? " s" : "")));
      tip.append(row);
    }
    tip.style.display = "block";
    const wide = tip.offsetWidth, x = event.clientX + 16 + wide > innerWidth ? event.clientX - 16 - wide : event.clientX + 16;
    tip.style.left = x + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
}

const SHOWN = ["step", "prompt", "response", "label", "reward", "status", "value"];
const verdict = row => {
  const said = row.status === "scored" ? undefined : row.status, score = typeof row.reward === "number" ? row.reward : null;
  const tone = said ? {correct: "good", wrong: "bad", invalid: "bad", failed: "warn"}[said] || ""
    : score === null ? "warn" : score > 0 ? "good" : score < 0 ? "bad" : "";
  return make("span", "chip " + tone, score === null ? said || "no score" : number(score));
};
for (const browser of document.querySelectorAll(".rollouts")) {
  const rows = JSON.parse(browser.querySelector("script").textContent);
  const [list, detail, count] = [".list", ".detail", ".count"].map(name => browser.querySelector(name));
  const [step, order, low, high, text] = ["step", "order", "low", "high", "text"].map(name => browser.querySelector(`[name=${name}]`));
  let shown = [], chosen = 0;
  const open = index => {
    chosen = index;
    list.querySelector(".on")?.classList.remove("on");
    const row = shown[index];
    if (!row) return detail.replaceChildren(make("div", "none", "No rollout fits."));
    list.children[index].classList.add("on");
    const meta = make("div", "meta"), parts = [meta];
    meta.append(verdict(row), make("span", "", `${browser.dataset.unit} ${row.step}`));
    if (row.status) meta.append(make("span", "", row.status));
    for (const [name, value] of Object.entries(row)) {
      if (SHOWN.includes(name) || value === null || value === "" || (typeof value === "object" && !Object.keys(value).length)) continue;
      const item = make("span", "", name.replaceAll("_", " ") + " ");
      item.append(make("b", "", typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? number(value) : value));
      meta.append(item);
    }
    for (const name of ["prompt", "response", "label"]) if (row[name] !== null && row[name] !== undefined)
      parts.push(make("h4", "", {prompt: "Prompt", response: "Response", label: "Ground truth"}[name]), make("pre", "", String(row[name])));
    detail.replaceChildren(...parts);
    detail.scrollTop = 0;
  };
  const update = () => {
    const from = low.value === "" ? -Infinity : +low.value, to = high.value === "" ? Infinity : +high.value, word = text.value.toLowerCase();
    const limited = low.value !== "" || high.value !== "";
    shown = rows.filter(row => (!step.value || row.step === +step.value)
      && (!limited || (typeof row.reward === "number" && row.reward >= from && row.reward <= to))
      && (!word || `${row.prompt} ${row.response} ${row.label}`.toLowerCase().includes(word)));
    const score = row => typeof row.reward === "number" ? row.reward : -Infinity;
    if (order.value === "best") shown.sort((a, b) => score(b) - score(a));
    if (order.value === "worst") shown.sort((a, b) => score(a) - score(b));
    if (order.value === "late") shown.sort((a, b) => b.step - a.step);
    list.replaceChildren(...shown.map((row, index) => {
      const item = make("button", "item");
      const first = String(row.response ?? "").trim().split("\\n").join(" ").slice(0, 200);
      item.append(make("span", "faint", row.step), make("span", "text", first || "(empty)"), verdict(row));
      item.onclick = () => open(index);
      return item;
    }));
    count.textContent = `${shown.length} of ${rows.length}`;
    open(0);
  };
  for (const control of [step, order, low, high, text]) control.addEventListener("input", update);
  list.addEventListener("keydown", event => {
    const move = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (!move || !shown[chosen + move]) return;
    event.preventDefault();
    open(chosen + move);
    list.children[chosen].focus();
  });
  update();
}
"""
