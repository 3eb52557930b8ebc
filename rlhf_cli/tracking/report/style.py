"""The style sheet of the report page: light and dark, wide and narrow, nothing loaded from anywhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #16181d; --soft: #5c616b; --faint: #8b909a; --line: #e4e4df;
  --grid: #ecece8; --wash: #f3f3f0; --accent: #2a6fd6;
  --good: #0f7a4d; --good-wash: #e2f3ea; --bad: #b3261e; --bad-wash: #fbe9e7; --warn: #8a5a00; --warn-wash: #fbf0d9;
  --c1: #2a6fd6; --c2: #e0632b; --c3: #16a085; --c4: #d99a00; --c5: #6c4fd1; --c6: #d6568f; --c7: #3f8f3a;
    --c8: #9aa0aa;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121316; --card: #1b1d21; --ink: #eceef2; --soft: #a6acb8; --faint: #7d838f; --line: #2d3036;
    --grid: #282b31; --wash: #23262b; --accent: #6ea8ff;
    --good: #5fd39b; --good-wash: #173226; --bad: #ff8a80; --bad-wash: #3a1d1b; --warn: #f0bf58; --warn-wash: #33290f;
    --c1: #5b9bf5; --c2: #f0814d; --c3: #35c3a5; --c4: #e6b23a; --c5: #9c86f2; --c6: #ec7fae; --c7: #69bd63;
      --c8: #6d737e;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 64px; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
    sans-serif;
  -webkit-font-smoothing: antialiased; font-variant-numeric: tabular-nums;
}
main, .bar > div, footer { max-width: 1160px; margin: 0 auto; padding: 0 24px; }
a { color: inherit; text-decoration: none; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 0; font-weight: 650; overflow-wrap: anywhere;
  }
h2 { font-size: 21px; letter-spacing: -.015em; margin: 0; font-weight: 650; }
h3 { font-size: 15px; margin: 0; font-weight: 600; }
.overline { color: var(--accent); font-size: 12.5px; font-weight: 600; letter-spacing: .06em;
  text-transform: uppercase; }
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
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px;
  min-width: 0; }
.tile .label { color: var(--soft); font-size: 13px; }
.tile .label::first-letter, .card h3::first-letter { text-transform: uppercase; }
.tile .value { font-size: 28px; line-height: 1.25; font-weight: 650; letter-spacing: -.02em; overflow-wrap: anywhere;
  }
.tile .note { color: var(--faint); font-size: 13px; }

section.stage { padding-top: 44px; }
.head { display: flex; align-items: center; gap: 12px; margin-bottom: 6px; }
.chip { font-size: 12px; font-weight: 600; padding: 2px 9px; border-radius: 99px; background: var(--wash);
  color: var(--soft);
  white-space: nowrap; display: inline-block; }
.chip.good { background: var(--good-wash); color: var(--good); }
.chip.bad { background: var(--bad-wash); color: var(--bad); }
.chip.warn { background: var(--warn-wash); color: var(--warn); }
.facts { display: flex; flex-wrap: wrap; gap: 2px 26px; margin: 0 0 18px; color: var(--soft); font-size: 14px; }
.facts b { font-weight: 500; color: var(--faint); margin-right: 6px; }
.facts span { overflow-wrap: anywhere; }

.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px 12px;
  min-width: 0; }
.card.wide { grid-column: 1 / -1; }
.card header, .cardhead { display: flex; align-items: baseline; gap: 12px; justify-content: space-between;
  padding: 0; margin-bottom: 8px; }
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
.tip { position: fixed; z-index: 9; pointer-events: none; background: var(--card); color: var(--ink);
  border: 1px solid var(--line);
  border-radius: 9px; padding: 7px 11px; font-size: 13px; box-shadow: 0 6px 24px rgb(0 0 0 / .14); display: none; }
.tip div { display: flex; align-items: center; white-space: nowrap; }
.tip b { font-weight: 600; margin-left: auto; padding-left: 18px; }
.narrow-only { display: none; }

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
table.fit { width: auto; min-width: min(100%, 420px); }
.scroll { overflow: auto; max-height: 420px; }
.settings { columns: 2; column-gap: 40px; }
.settings > div { break-inside: avoid; margin-bottom: 18px; }
.settings h4 { margin: 0 0 4px; font-size: 13px; color: var(--faint); font-weight: 500; }
.settings table { table-layout: fixed; font-size: 13px; }
.settings td { padding: 4px 10px 4px 0; overflow-wrap: anywhere; }

.rollouts { background: var(--card); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.rollouts .tools { display: flex; flex-wrap: wrap; gap: 10px 14px; padding: 12px 16px;
  border-bottom: 1px solid var(--line); align-items: center; }
.rollouts label { font-size: 13px; color: var(--soft); display: flex; align-items: center; gap: 7px; }
.rollouts select, .rollouts input { font: inherit; font-size: 13.5px; color: var(--ink); background: var(--wash);
  border: 1px solid var(--line);
  border-radius: 7px; padding: 4px 8px; min-width: 0; }
.rollouts input[type=search] { flex: 1 1 160px; }
.rollouts .count { margin-left: auto; }
.rollouts .panes { display: grid; grid-template-columns: 330px minmax(0, 1fr); height: 520px; }
.rollouts .list { overflow: auto; border-right: 1px solid var(--line); }
.rollouts .item { display: grid; grid-template-columns: 44px minmax(0, 1fr) auto; gap: 10px; align-items: center;
  width: 100%; text-align: left;
  font: inherit; font-size: 13.5px; color: inherit; background: none; border: 0;
    border-bottom: 1px solid var(--line); padding: 8px 14px; cursor: pointer; }
.rollouts .item:hover { background: var(--wash); }
.rollouts .item.on { background: color-mix(in srgb, var(--accent) 13%, transparent); }
.rollouts .item .text { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.rollouts .detail { overflow: auto; padding: 16px 20px; }
.rollouts .meta { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; margin-bottom: 12px;
  font-size: 13.5px; color: var(--soft); }
.rollouts .meta b { color: var(--ink); font-weight: 600; }
.rollouts .pictures { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 10px; }
.rollouts .pictures img { min-width: 112px; max-width: 256px; max-height: 256px; object-fit: contain;
  border: 1px solid var(--line); border-radius: 8px; image-rendering: pixelated; }
.rollouts .detail h3 { margin: 18px 0 0; }
.rollouts h4 { margin: 14px 0 5px; font-size: 12.5px; color: var(--faint); font-weight: 500; }
.rollouts pre { margin: 0; padding: 11px 13px; background: var(--wash); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere;
  font: 13px/1.55 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.rollouts .message { margin: 14px 0; padding-left: 12px; border-left: 3px solid var(--line); }
.rollouts .message.own { border-left-color: var(--accent); }
.rollouts .message h4:first-child { margin-top: 0; }
.rollouts .message .chip { margin-left: 8px; }
.rollouts .meta.end { margin-top: 14px; }
.rollouts .none { padding: 28px; color: var(--faint); }
footer { padding-top: 44px; padding-bottom: 44px; color: var(--faint); font-size: 13px; }

@media (max-width: 860px) {
  .grid { grid-template-columns: minmax(0, 1fr); }
  .wide-only { display: none; }
  .narrow-only { display: block; }
  .settings { columns: 1; }
  .rollouts .panes { grid-template-columns: minmax(0, 1fr); height: auto; }
  .rollouts .list { max-height: 240px; border-right: 0; border-bottom: 1px solid var(--line); }
  main, .bar > div, footer { padding-left: 16px; padding-right: 16px; }
}
@media print {
  .bar, .tools, .list { display: none !important; }
  .panes { display: block !important; height: auto !important; }
}
"""
