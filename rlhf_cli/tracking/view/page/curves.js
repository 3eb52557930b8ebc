// Curves of all metrics, runs overlaid.

import {useMemo, useState} from "preact/hooks";
import {LineChart} from "view/chart.js";
import {colourOf, html} from "view/shared.js";

const MEASURED = ["time/", "perf/", "memory/"];

// Positions on the x axis by step. In report.html a record may be the mean of `averaged` steps.
const AXES = {
  step: ["iteration or step", records => records.map(record => record.step)],
  hours: ["hours of training", records => {
    let seconds = 0;
    return records.map(record => (seconds += (record.averaged ?? 1)
      * ((record["time/step"] ?? 0) + (record["time/eval"] ?? 0))) / 3600);
  }],
  tokens: ["trained tokens", records => {
    let tokens = 0;
    return records.map(record => tokens += (record.averaged ?? 1) * (record.num_tokens ?? 0));
  }],
};

export function lineOf(run, records, positions, name) {
  const x = [], y = [], broken = [];
  records.forEach((record, place) => {
    if (!(name in record)) return;
    // Equal positions would not be one point: uPlot needs growing ones.
    if (x.length && positions[place] <= x[x.length - 1]) return;
    x.push(positions[place]);
    const value = record[name];
    // NaN and infinities are strings.
    if (typeof value === "string") broken.push(positions[place]);
    y.push(typeof value === "string" ? null : Number(value));
  });
  return {name: run.name, colour: colourOf(run), x, y, broken, isMarked: name.startsWith("eval/")};
}

// Names of all metrics: important ones first, as in the terminal for one of the runs, and last those that are 0 in all
// steps; then measurements.
export function namesOf(runs, metrics) {
  const found = runs.map(run => metrics.get(run.number)).filter(Boolean);
  const first = new Set(found.flatMap(({prominent}) => prominent));
  const rest = new Set(found.flatMap(({titles}) => Object.keys(titles)));
  const isZero = name => found.every(({records}) => records.every(record => !record[name]));
  const ranks = new Map([...first].map(name => [name, Math.min(...found.map(({prominent}) =>
    prominent.includes(name) ? prominent.indexOf(name) : Infinity))]));
  return {first: [...first].sort((a, b) => isZero(a) - isZero(b) || ranks.get(a) - ranks.get(b)), rest: [...rest].filter(name => !first.has(name)), titles:
    Object.assign({}, ...found.map(({titles}) => titles))};
}

export function Curves({runs, metrics}) {
  const [words, setWords] = useState(""), [smoothing, setSmoothing] = useState(0);
  const [axisName, setAxis] = useState("step"), [isLog, setLog] = useState(false);
  const {first, rest, titles} = useMemo(() => namesOf(runs, metrics), [runs.map(run => run.number).join(), metrics]);
  const fits = name => !words || `${name} ${titles[name]}`.toLowerCase().includes(words.toLowerCase());
  const more = rest.filter(name => words || !MEASURED.some(start => name.startsWith(start)));
  const unit = axisName === "step" ? runs[0].unit ?? "step" : {hours: "hour", tokens: "token"}[axisName];
  const lines = useMemo(() => {
    const positions = new Map(runs.map(run => [run.number, AXES[axisName][1](metrics.get(run.number)?.records ?? [])]));
    return name => runs.map(run =>
      lineOf(run, metrics.get(run.number)?.records ?? [], positions.get(run.number), name));
  }, [runs.map(run => run.number).join(), metrics, axisName]);
  const charts = names => html`<div class="grid">${names.filter(fits).map(name => html`
    <${LineChart} key=${name} name=${name} title=${titles[name]} lines=${lines(name)} version=${lines} smoothing=${smoothing}
      isLog=${isLog} unit=${unit} group="curves"/>`)}</div>`;
  return html`
    <form class="controls" onSubmit=${event => event.preventDefault()}>
      <label>Metrics <input type="search" placeholder="part of a name" value=${words}
        onInput=${event => setWords(event.target.value)}/></label>
      <label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smoothing}
        onInput=${event => setSmoothing(+event.target.value)}/> <output>${smoothing}</output></label>
      <label>Horizontal <select value=${axisName} onChange=${event => setAxis(event.target.value)}>
        ${Object.entries(AXES).map(([name, [title]]) => html`<option value=${name}>${title}</option>`)}</select></label>
      <label><input type="checkbox" checked=${isLog} onChange=${event => setLog(event.target.checked)}/> logarithmic</label>
    </form>
    ${first.length ? charts(first) : html`<p class="soft">These runs have logged nothing yet.</p>`}
    ${more.filter(fits).length > 0 && html`<${More} count=${more.filter(fits).length}>${() => charts(more)}<//>`}`;
}

// Charts in a closed list are not drawn.
function More({count, children}) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${event => setOpen(event.target.open)}><summary>${count} more curves</summary>
    ${isOpen && children()}</details>`;
}
