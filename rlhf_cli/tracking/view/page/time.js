// Where the time of each run goes, by phase; measurements of speed and memory; and what was planned for both.

import {LineChart} from "view/chart.js";
import {lineOf, namesOf} from "view/curves.js";
import {duration, html, number} from "view/shared.js";

const COLOURS = {generate: "--c1", train: "--c2", forward: "--c3", reward: "--c4", transfer: "--c5", advantage: "--c6",
  data: "--c7", eval: "--c7", other: "--c8"};
// An unknown phase has a color from its name, which is the same in every run.
const colourOfPhase = name => COLOURS[name] ?? `--c${[...name].reduce((sum, one) => sum + one.charCodeAt(0), 0) % 7 + 1}`;

const percent = share => `${share < 0 ? "-" : "+"}${Math.round(100 * Math.abs(share))} %`;

// Seconds by phase of a step; evaluations are outside of time/step.
function phasesOf(record) {
  const phases = Object.fromEntries(Object.entries(record).filter(([name, value]) =>
    name.startsWith("time/") && name !== "time/step" && Number.isFinite(value)).map(([name, value]) => [name.slice(5), value]));
  const rest = (record["time/step"] ?? 0) + (phases.eval ?? 0) - Object.values(phases).reduce((sum, one) => sum + one, 0);
  return rest > 0.01 * (record["time/step"] ?? 0) ? {...phases, other: rest} : phases;
}

function Phases({run, records, version}) {
  const steps = records.filter(record => "time/step" in record), each = steps.map(phasesOf), totals = {};
  const counts = steps.map(record => record.averaged ?? 1), count = counts.reduce((sum, one) => sum + one, 0);
  each.forEach((phases, place) => {
    for (const [name, seconds] of Object.entries(phases)) totals[name] = (totals[name] ?? 0) + counts[place] * seconds;
  });
  const names = Object.keys(totals).sort((a, b) => totals[b] - totals[a]);
  const whole = names.reduce((sum, name) => sum + totals[name], 0);
  if (!whole) return html`<section class="card"><h3>time by phase: ${run.name}</h3><p class="soft">No times yet.</p></section>`;
  const x = steps.map(record => record.step);
  const lines = names.map(name => ({name, colour: colourOfPhase(name), x, y: each.map(phases => phases[name] ?? 0)}));
  return html`
    <section class="card"><div class="cardhead"><h3>time by phase: ${run.name}</h3>
      <span class="now">${duration(whole)}</span></div>
      <div class="share" aria-hidden="true">${names.map(name => html`<i style=${
        {flex: totals[name] / whole, background: `var(${colourOfPhase(name)})`}}></i>`)}</div>
      <div class="scroll"><table><thead><tr><th>phase</th><th class="num">total</th>
        <th class="num">per ${run.unit ?? "step"}</th><th class="num">share</th></tr></thead>
      <tbody>${names.map(name => html`<tr><td><span class="legend"><span><i style=${
        {background: `var(${colourOfPhase(name)})`}}></i>${name}</span></span></td>
        <td class="num">${duration(totals[name])}</td><td class="num">${duration(totals[name] / count)}</td>
        <td class="num">${(100 * totals[name] / whole).toFixed(1)} %</td></tr>`)}</tbody></table></div></section>
    <${LineChart} title=${`seconds of each ${run.unit ?? "step"}: ${run.name}`} lines=${lines} version=${version}
      unit=${run.unit ?? "step"} group=${`time-${run.number}`} height=${240}/>`;
}

function Planned({run}) {
  const {assumed, values = {}} = run.plan;
  return assumed && html`<section class="card"><h3>plan and measured: ${run.name}</h3><div class="scroll"><table>
    <thead><tr><th></th><th class="num">plan</th><th class="num">measured</th><th class="num">difference</th></tr></thead>
    <tbody>${Object.entries(values).map(([name, [planned, measured]]) => html`<tr><td>${name}</td>
      <td class="num">${number(planned)}</td><td class="num">${number(measured)}</td>
      <td class="num">${percent(planned / measured - 1)}</td></tr>`)}</tbody></table></div>
    <p class="small soft">${assumed}</p></section>`;
}

export function Time({runs, metrics}) {
  const {rest, titles} = namesOf(runs, metrics);
  const measured = rest.filter(name => name.startsWith("perf/") || name.startsWith("memory/"));
  const lines = name => runs.map(run => {
    const records = metrics.get(run.number)?.records ?? [];
    return lineOf(run, records, records.map(record => record.step), name);
  });
  return html`<div class="grid spaced">${runs.map(run => html`
      <${Phases} key=${run.number} run=${run} records=${metrics.get(run.number)?.records ?? []} version=${metrics}/>
      <${Planned} run=${run}/>`)}
    ${measured.map(name => html`<${LineChart} key=${name} name=${name} title=${titles[name]} lines=${lines(name)}
      version=${metrics} unit=${runs[0].unit ?? "step"} group="measured"/>`)}</div>`;
}
